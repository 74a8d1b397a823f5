"""Where pages lie beyond memory: names and bytes. Nothing here knows what a page, a tensor or a model is."""

from kvarve.storage.base import Storage, StorageUsage
from kvarve.storage.breaker import Breaker
from kvarve.storage.file.storage import FileStorage
from kvarve.storage.memory import MemoryStorage
from kvarve.storage.tiers import Tiers
from kvarve.storage.urls import SCHEMES, Scheme, StorageUrl, check_storage, open_storage

__all__ = [
    "SCHEMES",
    "Breaker",
    "FileStorage",
    "MemoryStorage",
    "Scheme",
    "Storage",
    "StorageUrl",
    "StorageUsage",
    "Tiers",
    "check_storage",
    "open_storage",
]
