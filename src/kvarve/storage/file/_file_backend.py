"""What a file URL may say: file:///var/kvarve?capacity=100GiB&ttl=7d&quota=1GiB&eviction=lru&threads=4; and of a store
that others write: file:///var/kvarve?read_only=yes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvarve.errors import ConfigError
from kvarve.storage.base import Storage
from kvarve.storage.file._index import DEFAULT_THREADS, check_limits
from kvarve.storage.file.file_storage import FileStorage
from kvarve.storage.file.folder import Wanted, check_folder, checked_path
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.storage.upkeep import Upkeep
from kvarve.storage.urls import Backend, StorageUrl


@dataclass(frozen=True)
class FileSettings:
    """The settings of a file URL. `capacity_bytes`: None if it has none."""

    folder: Path
    capacity_bytes: int | None
    ttl_s: float | None
    quota_bytes: int | None
    eviction: str
    threads: int
    durable: bool
    shared: bool
    read_only: bool


def file_settings(url: StorageUrl) -> FileSettings:
    """Raise ConfigError for invalid settings; the disk is not accessed."""
    if url.place or not url.path.startswith("/"):
        raise ConfigError(f"{url.text}: it needs three slashes and an absolute path, as in {FileBackend.example}")
    given = url.parameters
    settings = FileSettings(
        checked_path(url.path),
        url.size_bytes("capacity") if "capacity" in given else None,
        url.seconds("ttl"),
        url.size_bytes("quota") if "quota" in given else None,
        given.get("eviction", "lru"),
        url.whole_number("threads", DEFAULT_THREADS),
        url.yes("durable", default=True),
        url.yes("shared", default=False),
        url.yes("read_only", default=False),
    )
    check_limits(settings.ttl_s, settings.quota_bytes, settings.eviction, settings.threads)
    return settings


class FileBackend(Backend):
    example = "file:///var/kvarve?capacity=100GiB"
    parameters = frozenset({"capacity", "ttl", "quota", "eviction", "threads", "durable", "shared", "read_only"})
    bounded = shared = can_list = can_verify = True

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        settings = file_settings(url)
        options = vars(settings) | {"capacity_bytes": 0 if settings.read_only else url.size_bytes("capacity")}
        directory, bound = options.pop("folder"), None if settings.read_only else options["capacity_bytes"]
        check_folder(Wanted(directory, bound, label, description, settings.shared, settings.read_only))
        return lambda: FileStorage(directory, label=label, description=description, **options)

    @classmethod
    def only_read(cls, url: StorageUrl) -> bool:
        return file_settings(url).read_only

    @classmethod
    def upkeep(cls, url: StorageUrl) -> Upkeep:
        settings = file_settings(url)
        return FolderUpkeep(settings.folder, settings.capacity_bytes, settings.ttl_s, shared=settings.shared)
