"""Where pages lie beyond memory: names and bytes. Nothing here knows what a page, a tensor or a model is."""

from kvarve.storage.base import Storage, Usage
from kvarve.storage.breaker import Breaker
from kvarve.storage.files import FileStorage
from kvarve.storage.memory import MemoryStorage
from kvarve.storage.urls import SCHEMES, Scheme, StorageUrl, check_storage, open_storage

__all__ = [
    "SCHEMES",
    "Breaker",
    "FileStorage",
    "MemoryStorage",
    "Scheme",
    "Storage",
    "StorageUrl",
    "Usage",
    "check_storage",
    "open_storage",
]
