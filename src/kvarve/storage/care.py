"""What people do with a file store: look what lies in it, read all of it once, tidy it up, empty it.

A store is opened for it beside the processes that use it, as one more of them; it never grows nor shrinks by that, and
nothing in it is used by that.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.books import group_of
from kvarve.storage.disk import Disk
from kvarve.storage.files import FileStorage
from kvarve.storage.folder import (
    Folder,
    check_folder,
    is_in_use,
    is_store,
    last_open,
    medium,
    model_folders,
    owner_of_model,
    remove_model,
)
from kvarve.storage.table import RETIRED, STORED, UNREADABLE

_AS_LARGE_AS_IT_IS = 1 << 62
_AT_ONCE = 16
_DROPPED_AT_ONCE = 1024  # those who use the store wait so long


@dataclass(frozen=True)
class Model:
    """One model's part of a folder. `open_s_ago`: when a process had it open that used it, by the wall clock."""

    label: bytes
    description: str
    folder: Path
    file_bytes: int
    in_use: bool
    open_s_ago: float


@dataclass(frozen=True)
class Stored:
    """One object. `slot_bytes` is the class: what it takes on the disk; ages are by the store's own clock."""

    name: str
    group: str
    slot_bytes: int
    size_bytes: int
    stored_s_ago: float
    used_s_ago: float
    uses: int


def models(directory: str | os.PathLike[str]) -> list[Model]:
    """Whose pages lie in a folder. StorageError if it is no folder of ours."""
    path, disk = check_folder(directory, _AS_LARGE_AS_IT_IS, b"-", ""), Disk()
    with medium(path):
        if not is_store(path):
            raise StorageError(f"{path}: there is no kvarve storage in it")
        return [
            Model(
                *owner_of_model(folder),
                folder,
                sum(disk.sizes(folder).values()),
                is_in_use(disk, folder),
                max(0.0, time.time() - last_open(folder) / 1e9),
            )
            for folder in model_folders(path)
        ]


def folder_bytes(directory: str | os.PathLike[str]) -> int:
    """All that lies in a folder, as its capacity counts it."""
    with medium(Path(directory)):
        return sum(Disk().sizes(Path(directory)).values())


@contextmanager
def opened(directory: str | os.PathLike[str], model: Model, *, ttl_s: float | None = None) -> Iterator[FileStorage]:
    storage = FileStorage(directory, _AS_LARGE_AS_IT_IS, model.label, model.description, ttl_s=ttl_s, visiting=True)
    try:
        yield storage
    finally:
        storage.close()


def objects(storage: FileStorage) -> list[Stored]:
    """All that is stored, what was used last first."""
    found = []
    with storage.looking() as books:
        now_ns = books.clock.now_ns()
        for slab in books.slabs.values():
            for row in np.flatnonzero(slab.state == STORED).tolist():
                stored_s, used_s = ((now_ns - int(column[row])) / 1e9 for column in (slab.stored, slab.used))
                name, size_bytes = slab.names[row], int(slab.length[row])
                found.append(
                    Stored(
                        name,
                        group_of(name),
                        slab.shape.slot_bytes,
                        size_bytes,
                        max(0.0, stored_s),
                        max(0.0, used_s),
                        int(slab.uses[row]),
                    )
                )
    return sorted(found, key=lambda each: each.used_s_ago)


def verify(
    storage: FileStorage,
    intact: Callable[[str, memoryview], bool],
    tick: Callable[[int, int], None] = lambda read, of: None,
) -> tuple[int, list[str]]:
    """Read everything; what is not intact, by its name and its bytes, is dropped. Answers how many were read, and
    the names of those that were dropped. `tick` hears how far it is. What others drop meanwhile is no damage."""
    read, dropped = 0, []
    everything = objects(storage)
    for at in range(0, len(everything), _AT_ONCE):
        some = everything[at : at + _AT_ONCE]
        buffers = [memoryview(bytearray(each.slot_bytes)) for each in some]
        names = [each.name for each in some]
        with storage.looking() as books:
            places = [books.place(name) if name in books.index else None for name in names]
        sizes = storage.get(names, buffers)
        bad = []
        for name, place, size_bytes, buffer in zip(names, places, sizes, buffers, strict=True):
            read += size_bytes is not None
            if size_bytes is None and place is not None and place[0].state[place[1]] == RETIRED:
                dropped.append(name)  # it could not be read: `get` has dropped it
            elif size_bytes is not None and not intact(name, buffer[:size_bytes]):
                bad.append(name)
        dropped += bad
        if bad:
            storage.delete(bad)
        tick(at + len(some), len(everything))
    return read, dropped


def gc(storage: FileStorage) -> dict[str, int]:
    """Free what is too old, what dead processes had reserved (since this storage was opened, which does it as well),
    and slots that could not be read and can be now."""
    counts = dict.fromkeys(("expired", "reclaimed", "retired"), 0)
    with storage.changing() as books:
        counts["expired"] = books.sweep(books.clock.now_ns())
        books.reclaim()
        counts["reclaimed"] = books.reclaimed
        for slab in books.slabs.values():
            for row in np.flatnonzero(slab.state == RETIRED).tolist():
                if slab.can_be_filled(row):
                    books.drop(slab, row)
                    counts["retired"] += 1
            # To write an entry may mend what cannot be read of a table; while others are there it may be theirs.
            for row in np.flatnonzero(slab.state == UNREADABLE).tolist() if books.folder.alone() else ():
                books.drop(slab, row)
                counts["retired"] += 1
        books.publish()
    return counts


def drop(storage: FileStorage, group: str | None = None) -> int:
    """Remove the objects of a group, or all of the model; how many there were."""
    names = [each.name for each in objects(storage) if group is None or each.group == group]
    return sum(sum(storage.delete(names[at : at + _DROPPED_AT_ONCE])) for at in range(0, len(names), _DROPPED_AT_ONCE))


def drop_model(directory: str | os.PathLike[str], model: Model) -> bool:
    """Remove a model from a folder; False, and nothing is removed, while a process has it open."""
    with _alone(directory, model.label, model.description) as folder:
        if not model.folder.exists():  # somebody was faster
            return True
        if is_in_use(folder.disk, model.folder):
            return False
        remove_model(folder.disk, model.folder)
        return True


def drop_remains(directory: str | os.PathLike[str]) -> int:
    """Remove what is left of models whose removal was cut short; of how many."""
    with _alone(directory, b"-", "") as folder:
        return folder.remove_remains()


@contextmanager
def _alone(directory: str | os.PathLike[str], label: bytes, description: str) -> Iterator[Folder]:
    """A folder alone among all processes, with no model of it open."""
    path = check_folder(directory, _AS_LARGE_AS_IT_IS, label, description)
    with medium(path):
        folder = Folder(Disk(), path, label, description)
        try:
            with folder.mutex():
                yield folder
        finally:
            folder.close()
