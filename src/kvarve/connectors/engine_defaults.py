"""What kvarve does behind an engine that was started with KVARVE=1: by the environment, and by what the machine has.

KVARVE=1                  as vLLM's command is, with a host tier and a store
KVARVE_HOST_MEMORY=16GiB  a quarter of the machine's free memory unless told
KVARVE_STORAGE=URL        several: with blanks between; none: no store. A folder of the user's unless told
KVARVE_CONFIG=FILE        TOML, with the connector's keys, which these two variables override
"""

import os
import shutil
from collections.abc import Mapping
from typing import Any

from kvarve.errors import ConfigError
from kvarve.pages.sizes import format_size
from kvarve.settings.values import closest
from kvarve.storage.urls import state_folder
from kvarve.system.host import free_bytes

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
    return completed(found, engines) | {"storage": found.get("storage", default_storage())}


def completed(given: Mapping[str, Any], engines: int = 1) -> dict[str, Any]:
    """The connector's keys, with a default for those that have to be there."""
    return {"host_memory": default_memory() // engines // GRAIN_BYTES * GRAIN_BYTES, **given}


def default_memory() -> int:
    """A quarter of the memory that is free, in bytes."""
    return max(GRAIN_BYTES, free_bytes() // 4)


def default_storage() -> str:
    """A store in the user's state directory, for a quarter of the room that its disk has or the store fills."""
    folder = state_folder()
    place = next(each for each in (folder, *folder.parents) if each.exists())
    held = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    room = min(MOST_BYTES, (shutil.disk_usage(place).free + held) // 4)
    return f"file://?capacity={max(1, room >> 20)}MiB"


def said(found: Mapping[str, Any]) -> str:
    """These settings, in words for the log."""
    from kvarve.storage.urls import shown

    memory, storage = found["host_memory"], found.get("storage") or ()
    urls = [storage] if isinstance(storage, str) else storage
    where = [f"{shown(url)} ({state_folder()})" if url.startswith("file://?") else shown(url) for url in urls]
    size = format_size(memory) if isinstance(memory, int) else memory
    return f"{size} of host memory, and {', '.join(where) or 'no storage'}"


def check_names(environment: Mapping[str, str]) -> None:
    """ConfigError for a variable beside KVARVE that kvarve's connectors do not know, as it is misspelt."""
    for name in environment:
        near = closest(name, VARIABLES)
        if name.startswith("KVARVE_") and name not in VARIABLES and near:
            raise ConfigError(f"${name} is an unknown variable{near}")


def asked() -> bool:
    """Whether this process's environment asks for kvarve, by variables that are right."""
    if not wanted(os.environ):
        return False
    check_names(os.environ)
    return True
