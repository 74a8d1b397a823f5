"""What this process may have of a store: all of it, if it is alone with it, or its part, with all that share a map."""

import re
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import Damaged
from kvarve.storage.file.folder import Medium
from kvarve.storage.hf3fs._hf3fs_folder import STORE_FILE, Folder
from kvarve.storage.hf3fs._owner import Owner
from kvarve.storage.hf3fs._redis_map import RedisMap, password, redis_settings
from kvarve.storage.redis.servers import library

_FIRST = "kvarve hf3fs 2"
_REDIS = re.compile(r"rediss?://")
_alone: dict[str, Owner] = {}  # of this process, by the stores' names
_opening = threading.Lock()  # guards these, and how many use each


def check_map(setting: str | None) -> None:
    """Touches nothing. ConfigError: what is wrong with it."""
    if setting is not None and not _REDIS.match(setting):
        raise ConfigError(
            f"metadata={setting}: it must be redis://host:6379/0 of a Redis or Valkey that several processes share; "
            "leave it out where one is alone with its store"
        )
    if setting is not None:
        redis_settings(setting)
        library()


def own(setting: str | None, capacity_bytes: int, quota_bytes: int | None, folder: Folder) -> Owner:
    """ConfigError; StorageError: the store is another's, or its map does not answer."""
    check_map(setting)
    if setting is not None:
        settings, file, user = redis_settings(setting)
        if file is not None:
            settings = replace(settings, password=password(file), user=user)
        store = _identified(folder, f"all that share {settings.where}/{settings.database}")
        shared = RedisMap(settings, store, secrets.token_hex(8).encode())
        try:
            shared.holders([0])
        except BaseException:
            shared.close()
            raise
        return Owner(capacity_bytes, quota_bytes, shared, _this_machine(), shared.close)
    with _opening:
        store = _identified(folder, f"one process of {_this_machine()}")
        if owner := _alone.get(store):
            with owner.lock:
                if owner.users:  # else it is being closed, and its lock still held
                    owner.users += 1
                    owner.table.capacity_bytes = capacity_bytes
                    return owner
        with Medium(folder.path):
            lock = folder.disk.open(folder.root, STORE_FILE)
            if not folder.disk.lock(lock, wait=False):
                folder.disk.close(lock)
                raise StorageError(
                    f"{folder.path} is used by another process: several share a store by a map, metadata=redis://..."
                )

        def end() -> None:
            del _alone[store]
            folder.disk.close(lock)

        owner = _alone[store] = Owner(capacity_bytes, quota_bytes, None, _this_machine(), end)
        return owner


def _this_machine() -> str:
    """A name that no other machine has, and that this one keeps."""
    with suppress(OSError):
        if name := Path("/etc/machine-id").read_text("ascii").strip():
            return f"machine {name} {socket.gethostname()}"
    return f"machine {socket.gethostname()}"


def _identified(folder: Folder, keeper: str) -> str:
    """The random name of the store in a folder, which gets one if it is new. Damaged: what its file says cannot be
    read. StorageError: its map is elsewhere, so each would give the other's room again."""
    file = folder.path / STORE_FILE
    try:
        first = f"{_FIRST}\n{secrets.token_hex(16)}\n{keeper}\n"
        lines = folder.identity(first.encode()).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{file}: {error}") from error
    if len(lines) != 3 or lines[0] != _FIRST:
        raise Damaged(f"{file} is damaged, or not written by kvarve: give an empty folder")
    if lines[2] != keeper:
        raise StorageError(
            f"{folder.path} is used by {lines[2]}, and not by {keeper}: servers that share a store name one map,"
            f" metadata=redis://...; if it is not used so any more, write how into the last line of {file}"
        )
    return lines[1]
