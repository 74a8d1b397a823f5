"""Where pages lie beyond memory: names and bytes. Nothing here knows what a page, a tensor or a model is."""

from kvarve.storage._breaker import Breaker
from kvarve.storage._memory_storage import MemoryStorage
from kvarve.storage._tiers import Tiers
from kvarve.storage.base import Storage, StorageUsage, deadline, left_s
from kvarve.storage.file.file_storage import FileStorage
from kvarve.storage.urls import Backend, StorageUrl, check_storage, open_storage

__all__ = [
    "Backend",
    "Breaker",
    "FileStorage",
    "MemoryStorage",
    "Storage",
    "StorageUrl",
    "StorageUsage",
    "Tiers",
    "check_storage",
    "deadline",
    "left_s",
    "open_storage",
]
