"""The slabs of models that no process has open, and when they were used last, so that they are evicted by age, one by
one, and not all at once because their model is closed just now.

Every call holds the folder's mutex, so that no process opens one of these models meanwhile.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvarve.storage.file.clock import Clock
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.folder import (
    CLOCK,
    TABLE,
    Folder,
    files_of_model,
    known_models,
    remove_model,
    remove_quarantined,
    slab_name,
    slab_numbers,
)
from kvarve.storage.file.orders import LastUse
from kvarve.storage.file.processes import is_in_use
from kvarve.storage.file.slabs import Broken, Slab, unlink
from kvarve.storage.file.table import STORED, owner_of, times


@dataclass(frozen=True)
class IdleSlab:
    """A slab of a model that no process has open. Ages are in ns: of its objects on average, and of the youngest."""

    model: str
    number: int
    slot_bytes: int
    bytes: int
    mean_age_ns: float
    least_age_ns: float


class IdleModels:
    def __init__(self, folder: Folder) -> None:
        self._folder, self._disk = folder, folder.disk
        # By model and number: the table's inode and mtime, the size of its slots, and their last use.
        self._seen: dict[tuple[str, int], tuple[tuple[int, int], int, LastUse]] = {}

    def slabs(self) -> list[IdleSlab]:
        """All slabs of all models that no process has open."""
        found, models = [], self._folder.models
        for model in known_models(self._disk, models)[0]:
            if model.name != self._folder.model.path.name:
                with self._disk.closing(self._disk.enter_below(models, model.name)) as folder:
                    if not is_in_use(self._disk, folder):
                        found += self._slabs_of(model.name, folder, owner_of(model.label))
        there = {(each.model, each.number) for each in found}
        self._seen = {key: it for key, it in self._seen.items() if key in there}
        return found

    def _slabs_of(self, model: str, folder: Directory, owner: int) -> list[IdleSlab]:
        files = files_of_model(self._disk, folder)
        now_ns, found = self._now_ns(folder), []
        for number in slab_numbers(self._disk, folder):
            sizes = [files[name].st_size for name in (slab_name(number), slab_name(number) + TABLE) if name in files]
            if sizes:
                table = files.get(slab_name(number) + TABLE)
                slot_bytes, used = self._last_use(model, folder, number, owner, table, now_ns)
                ages = (max(0.0, now_ns - each) for each in (used.mean_ns, used.last_ns))
                found.append(IdleSlab(model, number, slot_bytes, sum(sizes), *ages))
        return found

    def _now_ns(self, folder: Directory) -> int:
        """The time by the clock of another model."""
        try:
            file = self._disk.open(folder, CLOCK, read_only=True)
        except OSError:
            return Clock(self._disk, -1).now_ns()
        try:
            return Clock(self._disk, file).now_ns()
        finally:
            self._disk.close(file)

    def _last_use(
        self, model: str, folder: Directory, number: int, owner: int, table: os.stat_result | None, now_ns: int
    ) -> tuple[int, LastUse]:
        """The size of a slab's slots, and when they were used. Cached until the table changes, as a million objects
        take a moment. A damaged slab counts as never used."""
        key = (table.st_ino, table.st_mtime_ns) if table is not None else (0, 0)
        seen = self._seen.get((model, number))
        if seen is None or seen[0] != key:
            seen = key, 0, LastUse()
            with suppress(Broken, OSError):
                slab = Slab.open(self._disk, folder, number, owner, read_only=True)
                if self._disk.size(slab.file) > slab.shape.slots_bytes:
                    raise Broken("its slots take more than its header says")
                tables = [table for _, table in slab.load(0, slab.shape.slots, named=False)]
                used = np.concatenate([times(table, now_ns)[1][table.state == STORED] for table in tables])
                seen = key, slab.shape.slot_bytes, LastUse.of(used)
            self._seen[model, number] = seen
        return seen[1:]

    def remove(self, slab: IdleSlab, why: str) -> None:
        """Remove a slab, and with its last slab the model."""
        with self._disk.closing(self._disk.enter_below(self._folder.models, slab.model)) as folder:
            unlink(self._disk, folder, slab.number, why)
            left = slab_numbers(self._disk, folder)
        if not left:
            remove_model(self._disk, self._folder.models, slab.model, f"nothing is left of it: {why}")

    def remove_quarantined(self, why: str) -> int:
        """Remove the quarantined slabs of these models and of our own; returns their bytes."""
        size_bytes = remove_quarantined(self._disk, self._folder.model, why)
        for name in self._folder.others():
            with self._disk.closing(self._disk.enter_below(self._folder.models, name)) as folder:
                if not is_in_use(self._disk, folder):
                    size_bytes += remove_quarantined(self._disk, folder, why)
        return size_bytes
