"""Maintenance of a file store: list its objects, verify them, collect garbage, drop objects.

Inspection (`contents`, `inspect`) takes no lock and no process number, and writes and removes nothing: root may inspect
another user's store, also on a read-only file system or if it is damaged. `gc` and `drop` open the store as one more
process beside those that use it, as its owner only. Neither adds slabs nor evicts, and no object counts as used.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import group_of
from kvarve.storage.file._clock import CLOCK
from kvarve.storage.file._index import Index, Limits
from kvarve.storage.file._processes import is_in_use
from kvarve.storage.file._slabs import RowAddress, RowSpan
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.file_storage import FileStorage
from kvarve.storage.file.folder import (
    Folder,
    Medium,
    Wanted,
    bytes_of_damaged,
    bytes_of_model,
    check_folder,
    checked_path,
    known_models,
    model_name,
    opened_read_only,
    problem_of_marker,
    remove_model,
    root_bytes,
    users,
)
from kvarve.storage.upkeep import Contents, Model, Stored, Upkeep

_AS_LARGE_AS_IT_IS = 1 << 62
_TICK = 16  # objects


def capacity_in_use(directory: str | os.PathLike[str]) -> int | None:
    """The capacity in bytes with which processes have a store open; None: none has. StorageError if it is no store."""
    disk = Disk()
    with opened_read_only(disk, checked_path(directory)) as (_, folders):
        if folders is None:
            return None
        for _, _, found in users(disk, folders):
            if found.locked and found.capacity_bytes is not None:
                return found.capacity_bytes
    return None


class Inspection:
    """One model's slabs, open for reading. They may change meanwhile, so after a read its entry is checked again.
    `lost`: the parts of its tables that cannot be read, and why; `lost_objects`: of about so many objects."""

    def __init__(self, folder: Folder) -> None:
        self.lost: list[str] = []
        self._index = Index(folder, Limits(_AS_LARGE_AS_IT_IS), self.lost.append)
        self._index.read_all()
        self._now_ns, self.lost_objects = self._index.clock.now_ns(), self._index.lost

    def objects(self) -> list[Stored]:
        """All objects, the most recently used first."""
        found = []
        for name in self._index.entries:
            slab, row = self.place(name)
            stored_s, used_s = (max(0, self._now_ns - int(it[row])) / 1e9 for it in (slab.stored, slab.used))
            size_bytes, uses = int(slab.length[row]), int(slab.uses[row])
            found.append(Stored(name, group_of(name), slab.shape.slot_bytes, size_bytes, stored_s, used_s, uses))
        return sorted(found, key=lambda each: each.used_s_ago)

    def states(self) -> dict[str, int]:
        """How many rows are in which state."""
        return self._index.states()

    def place(self, name: str) -> RowAddress:
        """Where an object lies."""
        return self._index.place(name)

    def verify(
        self,
        intact: Callable[[str, memoryview], bool],
        tick: Callable[[int, int], None] = lambda read, of: None,
    ) -> tuple[int, list[str]]:
        """Read every object. Returns how many could be read, and the names of those that could not, or that `intact`
        (of name and bytes) rejects. `tick(read, of)` reports progress. An object dropped meanwhile is not damage."""
        read, damaged, places = 0, [], [(name, self.place(name)) for name in self._index.entries]
        for number, (name, (slab, row)) in enumerate(places):
            if number % _TICK == 0:
                tick(number, len(places))
            view = memoryview(bytearray(int(slab.length[row])))
            try:
                whole = slab.read([RowSpan(0, slab, row, view)]) == len(view)
            except OSError:
                whole = False
            if whole and intact(name, view):
                read += 1
            elif not slab.is_gone() and self._index.confirm((slab, row)):
                read += whole
                damaged.append(name)
        tick(len(places), len(places))
        return read, damaged


class FolderUpkeep(Upkeep):
    """`kvarve storage` of a folder. StorageError: it is no store, or another user's that is to be changed."""

    advice = None

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int | None = None,
        ttl_s: float | None = None,
        *,
        shared: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self._folder, self.where, self.capacity_bytes = checked_path(folder), str(folder), capacity_bytes
        self._ttl_s, self._shared, self._disk = ttl_s, shared, disk or Disk()

    def contents(self) -> Contents:
        disk = self._disk
        with opened_read_only(disk, self._folder) as (root, folders):
            found, total = list[Model](), root_bytes(disk, root)
            problems = [*filter(None, [problem_of_marker(disk, root)])]
            if folders is None:
                return Contents(found, total, problems)
            known, damaged = known_models(disk, folders)
            for model in known:
                with disk.closing(disk.enter_below(folders, model.name)) as folder:
                    size_bytes, clock = bytes_of_model(disk, folder), disk.files(folder).get(CLOCK)
                    # The clock is written while a model is open.
                    ago_s = max(0.0, time.time() - (clock.st_mtime if clock is not None else 0))
                    in_use = is_in_use(disk, folder)
                found.append(Model(model.label, model.description, folder.path, size_bytes, in_use, ago_s))
                total += size_bytes
            total += bytes_of_damaged(disk, folders, damaged)
        return Contents(found, total, [*problems, *damaged.values()])

    @contextmanager
    def inspect(self, model: Model) -> Iterator[Inspection]:
        wanted = Wanted(self._folder, None, model.label, model.description).to_read()
        with Medium(self._folder), closing(Folder(self._disk, wanted, make=False, for_inspection=True)) as folder:
            folder.look_in()
            if folder.model is folder.root:
                raise StorageError(f"{model.folder} is gone: another process has removed it")
            yield Inspection(folder)

    def opened(self, model: Model, ttl_s: float | None = None) -> FileStorage:
        """Open the store beside its users."""
        shared, identity = self._shared, (model.label, model.description)
        return FileStorage(
            self._folder, _AS_LARGE_AS_IT_IS, *identity, ttl_s=ttl_s, shared=shared, for_maintenance=True
        )

    def collect(self, model: Model) -> dict[str, int]:
        with self.opened(model, self._ttl_s) as storage:
            return storage.collect()

    def drop(self, model: Model, group: str) -> int:
        with self.opened(model) as storage:
            return storage.drop(group)

    def drop_model(self, model: Model, why: str) -> bool:
        disk, wanted = self._disk, Wanted(self._folder, None, model.label, model.description, self._shared)
        check_folder(wanted, disk)
        with Medium(wanted.directory):
            store = Folder(disk, wanted, make=False)
            try:
                with store.mutex(), disk.closing(disk.enter_below(store.root, model.folder.parent.name)) as folders:
                    if model.label in {each.label for each in known_models(disk, folders)[0]}:
                        name = model_name(model.label)
                        with disk.closing(disk.enter_below(folders, name)) as folder:
                            if is_in_use(disk, folder):
                                return False
                        remove_model(disk, folders, name, why)
                    return True
            except FileNotFoundError:
                return True  # another process removed it
            finally:
                store.close()
