"""The metadata service of a store on 3FS: `service` says what it promises, `slot_table` decides, the others
carry it.

entries           what the table is made of
memory_metadata   the table in this process
local_metadata    the table in a server of this machine (`metadata_server`), which keeps it in SQLite (`journal`)
redis_metadata    the table as a script in a Redis, for stores that several machines share
calls             what clients and services say to each other, in `frames` on a stream
store_identity    which store it is
"""

import re
from pathlib import Path

from kvarve.errors import ConfigError
from kvarve.storage.hf3fs.metadata.local_metadata import LocalMetadata
from kvarve.storage.hf3fs.metadata.memory_metadata import MemoryMetadata, named_table
from kvarve.storage.hf3fs.metadata.metadata_server import SOCKET
from kvarve.storage.hf3fs.metadata.redis_metadata import RedisMetadata, redis_settings
from kvarve.storage.hf3fs.metadata.service import MOST_NAMES, Extent, Found, Metadata, Slot
from kvarve.storage.hf3fs.metadata.store_identity import STORE_FILE, identify, this_machine
from kvarve.storage.redis.servers import library
from kvarve.storage.urls import state_folder

__all__ = ["MOST_NAMES", "STORE_FILE", "Extent", "Found", "Metadata", "Slot", "check_setting", "open_metadata"]

_MEMORY = re.compile(r"memory:([A-Za-z0-9._-]{1,100})")
_REDIS = re.compile(r"rediss?://")
_SOCKET = re.compile(r"unix:(/[^\0]+)")


def check_setting(setting: str | None) -> None:
    """Touches nothing. ConfigError: what is wrong with it."""
    if setting is not None and _REDIS.match(setting):
        redis_settings(setting)
        library()
        return
    if setting is None or _MEMORY.fullmatch(setting) or _SOCKET.fullmatch(setting):
        return
    raise ConfigError(
        f"metadata={setting}: leave it out (a server of this machine, started when it is needed), or write"
        " unix:/path/to/socket of one that you run, or redis://host:6379/0 of a Redis for several machines"
    )


def open_metadata(
    setting: str | None, folder: Path, owner: bytes, capacity_bytes: int, quota_bytes: int | None
) -> Metadata:
    """The metadata of the store in `folder`, for the objects of `owner` (see `slot_layout.owner_of`). ConfigError;
    StorageError: no answer."""
    check_setting(setting)
    if setting is not None and (named := _MEMORY.fullmatch(setting)):
        return MemoryMetadata(named_table(named[1], capacity_bytes, quota_bytes), owner)
    if setting is not None and _REDIS.match(setting):
        settings, _, _ = redis_settings(setting)
        keeper = f"{settings.where}/{settings.database}"
        return RedisMetadata(setting, lambda: identify(folder, keeper), owner, capacity_bytes, quota_bytes)
    own = setting is None
    store, empty = identify(folder, f"{state_folder() if own else setting} of {this_machine()}")
    path = state_folder() / "hf3fs" / store / SOCKET if own else Path(str(setting).removeprefix("unix:"))
    hello = (store, owner.hex()), (capacity_bytes, quota_bytes or 0)
    return LocalMetadata(path, hello, empty=empty, starts=own)
