"""What a hf3fs URL may say: hf3fs:///mnt/3fs/kvarve?capacity=10TiB&engine=auto&metadata=…&quota=1TiB; docs/hf3fs.md."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import Storage, check_settings
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.folder import Medium, checked_path, nearest_place
from kvarve.storage.hf3fs._hf3fs_folder import check_path
from kvarve.storage.hf3fs._hf3fs_storage import Hf3fsStorage
from kvarve.storage.hf3fs._io_engine import Engine, PosixEngine
from kvarve.storage.hf3fs._io_usrbio import Library, UsrbioEngine, load
from kvarve.storage.hf3fs._owner import own
from kvarve.storage.hf3fs._redis_map import map_settings
from kvarve.storage.urls import Backend, StorageUrl
from kvarve.system.background import Abandoned, BackgroundCall
from kvarve.system.mounts import mount_of
from kvarve.system.regions import HostRegion, shared_region

log = logging.getLogger(__name__)
T = TypeVar("T")

_ENGINES = ("auto", "usrbio", "posix")
OPEN_S = 30.0  # a mount whose server stands still answers nothing


@dataclass(frozen=True)
class Settings:
    """Of a hf3fs URL. `threads`: of the POSIX engine, or rings each way."""

    path: Path
    capacity_bytes: int
    quota_bytes: int | None
    engine: str
    threads: int
    metadata: str | None


class Hf3fsBackend(Backend):
    example = "hf3fs:///mnt/3fs/kvarve?capacity=10TiB"
    parameters = frozenset({"capacity", "engine", "metadata", "quota", "threads"})
    bounded = shared = True
    managed_by = "the processes that have it open"

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        settings = read_settings(url)
        check_settings(settings.capacity_bytes, label)
        library = _answered(settings, partial(_library, settings, url.text))
        _answered(settings, partial(check_path, Disk(), settings.path))
        opened = partial(open_hf3fs, settings, label, library)
        return lambda: _answered(settings, opened, late=Hf3fsStorage.close)

    @classmethod
    def allocate(cls, url: StorageUrl, size_bytes: int) -> HostRegion | None:
        settings = read_settings(url)
        library = _answered(settings, partial(_library, settings, url.text))
        return None if library is None else shared_region(size_bytes)


def read_settings(url: StorageUrl) -> Settings:
    """ConfigError: what is wrong with the URL."""
    given = url.parameters
    if url.place or not url.path.startswith("/"):
        raise ConfigError(
            f"{url.text}: it must name a folder of the mounted file system by its absolute path, with three slashes, "
            f"as in {Hf3fsBackend.example}"
        )
    engine = given.get("engine", "auto")
    if engine not in _ENGINES:
        raise ConfigError(f"{url.text}: engine must be {', '.join(_ENGINES[:-1])} or {_ENGINES[-1]}, not {engine!r}")
    threads = url.whole_number("threads", 8, most=256)
    if "metadata" in given:
        map_settings(given["metadata"])
    quota_bytes, metadata = url.size_bytes("quota") if "quota" in given else None, given.get("metadata")
    return Settings(checked_path(url.path), url.size_bytes("capacity"), quota_bytes, engine, threads, metadata)


def open_hf3fs(settings: Settings, label: bytes, library: Library | None, disk: Disk | None = None) -> Hf3fsStorage:
    """`library`: the binding of USRBIO; None: the POSIX engine."""
    check_settings(settings.capacity_bytes, label)
    disk = disk or Disk()
    if (mount := mount_of(settings.path)) is None or mount.kind != "fuse.hf3fs":  # it may be missing
        log.warning("%s is not on 3FS: its file system is %s", settings.path, mount)
    engine: Engine = PosixEngine(disk, settings.threads)
    if library is not None:
        engine = UsrbioEngine(library, _mount(library, settings.path) or str(settings.path), settings.threads)
    owned = partial(own, settings.metadata, settings.capacity_bytes, settings.quota_bytes)
    return Hf3fsStorage(settings.path, label, engine, owned, disk)


def _library(settings: Settings, url: str) -> Library | None:
    """The binding of USRBIO if it is to be used. ConfigError: it is wanted, and cannot be."""
    if settings.engine == "posix":
        return None
    try:
        library = load()
        if _mount(library, settings.path) is None:
            raise ConfigError(f"{settings.path} is on no mount of 3FS, which engine=usrbio needs: write engine=posix")
    except ConfigError as error:
        if settings.engine == "usrbio":
            raise ConfigError(f"{url}: {error}") from None
        log.info("%s: the POSIX engine is used: %s", url, error)
        return None
    return library


def _mount(library: Library, path: Path) -> str | None:
    with Medium(path):
        return library.extract_mount_point(str(nearest_place(path)))


def _answered(settings: Settings, call: Callable[[], T], late: Callable[[T], object] = lambda _: None) -> T:
    """What `call` answers. StorageError: the file system stands still."""
    try:
        return BackgroundCall("kvarve opens 3fs", call).result(OPEN_S, late)
    except Abandoned:
        raise StorageError(f"{settings.path}: its file system has not answered for {OPEN_S:g} s") from None
