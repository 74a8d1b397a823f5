"""Which store is it, and who keeps its metadata? A small file in its folder says so to all who open it."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvarve.errors import StorageError
from kvarve.storage.base import Damaged

STORE_FILE = "store"
_FIRST = "kvarve hf3fs 1"


class Identity(NamedTuple):
    """`store`: a random name. `empty`: its folder had no slots, so that nothing can be lost."""

    store: str
    empty: bool


def this_machine() -> str:
    """A name that no other machine has, and that this one keeps."""
    with suppress(OSError):
        if name := Path("/etc/machine-id").read_text("ascii").strip():
            return f"machine {name} {socket.gethostname()}"
    return f"machine {socket.gethostname()}"


def identify(folder: Path, keeper: str) -> Identity:
    """The store in a folder, which is made if it is empty. Damaged: what it says cannot be read. StorageError: another
    service keeps the metadata of what is in it: two would give the same room twice."""
    try:
        told, empty = _read(folder), False
        if told is None:
            empty = not any(folder.glob("slots-*"))
            told = _make(folder, keeper)
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{folder / STORE_FILE}: {error}") from error
    lines = told.splitlines()
    if len(lines) != 3 or lines[0] != _FIRST:
        raise Damaged(f"{folder / STORE_FILE} is damaged, or not written by kvarve: give an empty folder")
    if lines[2] != keeper:
        raise StorageError(
            f"{folder}: its metadata is kept by {lines[2]}, not by {keeper}: several machines that share a store name"
            f" one service, metadata=redis://...; if it is not kept there any more, write where into the last line of"
            f" {folder / STORE_FILE}"
        )
    return Identity(lines[1], empty)


def _read(folder: Path) -> str | None:
    with suppress(FileNotFoundError):
        return (folder / STORE_FILE).read_bytes()[:1000].decode("utf-8")
    return None


def _make(folder: Path, keeper: str) -> str:
    """What the file says: another process may make it at the same time."""
    told, new = f"{_FIRST}\n{secrets.token_hex(16)}\n{keeper}\n", folder / f".{STORE_FILE}.{secrets.token_hex(8)}"
    try:
        new.write_text(told, "utf-8")
        with suppress(FileExistsError):
            os.link(new, folder / STORE_FILE)
    finally:
        new.unlink(missing_ok=True)
    return _read(folder) or told
