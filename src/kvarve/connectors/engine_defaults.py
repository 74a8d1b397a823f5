"""What kvarve does behind an engine that was started with KVARVE=1: by the environment, and by what the machine has.

KVARVE=1                  as vLLM's command is, with a host tier and a store
KVARVE_HOST_MEMORY=16GiB  a quarter of the machine's free memory unless told
KVARVE_STORAGE=URL        several: with blanks between; none: no store. A folder of the user's unless told
KVARVE_CONFIG=FILE        TOML, with the connector's keys, which these two variables override
"""

import difflib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvarve.errors import ConfigError, StorageError
from kvarve.pages.sizes import format_size
from kvarve.storage.file.maintenance import capacity_in_use
from kvarve.storage.urls import state_folder
from kvarve.system.host import free_bytes

PREFIX = "KVARVE_"
VARIABLES = ("KVARVE_HOST_MEMORY", "KVARVE_STORAGE", "KVARVE_CONFIG", "KVARVE_PORT")
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
MOST_BYTES = 200 << 30  # of a store that nobody has given a size
GRAIN_BYTES = 16 << 20


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether KVARVE asks for kvarve. ConfigError: that cannot be told."""
    word = environment.get("KVARVE", "").strip().lower()
    if word not in (*ON, *OFF):
        raise ConfigError(f"$KVARVE must be 1 or 0, got {word!r}")
    return word in ON


def settings(environment: Mapping[str, str], engines: int = 1) -> dict[str, Any]:
    """The connector's keys of one of so many engines on this machine. ConfigError: one cannot be read."""
    found: dict[str, Any] = {}
    if path := environment.get("KVARVE_CONFIG"):
        from kvarve.settings.options import read_file

        found = read_file(path, "$KVARVE_CONFIG")
    if memory := environment.get("KVARVE_HOST_MEMORY"):
        found["host_memory"] = memory
    storage = environment.get("KVARVE_STORAGE", "").split()
    if storage:
        found["storage"] = None if storage == ["none"] else storage
    elif "storage" not in found:
        found["storage"] = default_storage()
    return completed(found, engines)


def completed(given: Mapping[str, Any], engines: int = 1) -> dict[str, Any]:
    """The connector's keys, with a default for those that have to be there."""
    return {"host_memory": default_memory() // engines // GRAIN_BYTES * GRAIN_BYTES, **given}


def default_memory() -> int:
    """A quarter of the memory that is free, in bytes."""
    return max(GRAIN_BYTES, free_bytes() // 4)


def default_storage() -> str:
    """A store in the user's state directory, as large as others have it open, or else for about a quarter of the room
    that its disk has or the store fills: a power of two, so that servers that start together mean the same.

    ConfigError: the directory cannot be used."""
    folder = state_folder()
    try:
        place = next(each for each in (folder, *folder.parents) if each.exists())
        with suppress(StorageError):  # it is no store yet
            if place == folder and (theirs := capacity_in_use(folder)) is not None:
                return f"file://?capacity={theirs}"
        room = min(MOST_BYTES, (shutil.disk_usage(place).free + sum(_held(folder))) // 4)
    except OSError as error:
        raise ConfigError(f"$KVARVE_STORAGE must be a URL or none, as {folder} cannot be used: {error}") from None
    return f"file://?capacity={room if room == MOST_BYTES else 1 << max(20, room.bit_length() - 1)}"


def _held(folder: Path) -> Iterator[int]:
    """The bytes on the disk of each file, of which other processes may remove some meanwhile."""
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found = os.lstat(file)
            yield found.st_blocks * 512 * stat.S_ISREG(found.st_mode)


def said(found: Mapping[str, Any]) -> str:
    """These settings, in words for the log."""
    from kvarve.storage.urls import shown

    memory, storage = found["host_memory"], found.get("storage") or ()
    urls = [storage] if isinstance(storage, str) else storage if isinstance(storage, list) else [repr(storage)]
    where = [f"{shown(url)} ({state_folder()})" if url.startswith("file://?") else shown(url) for url in urls]
    size = format_size(memory) if isinstance(memory, int) else memory
    return f"{size} of host memory, and {', '.join(where) or 'no storage'}"


def check_names(environment: Mapping[str, str]) -> None:
    """ConfigError for a name that is misspelt. Variables of `kvarve serve` begin with the same prefix."""
    for name in {name for name in environment if name.startswith(PREFIX)} - {*VARIABLES}:
        ends = [each.removeprefix(PREFIX) for each in VARIABLES]
        if near := difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.85):
            raise ConfigError(f"${name} is an unknown variable: did you mean {PREFIX}{near[0]}?")


def asked() -> bool:
    """Whether this process's environment asks for kvarve, by variables that are right."""
    if not wanted(os.environ):
        return False
    check_names(os.environ)
    return True
