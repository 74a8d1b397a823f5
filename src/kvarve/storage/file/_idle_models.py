"""The slabs of models that no process has open, and when they were used last, so that they are evicted by age, one by
one, and not all at once because their model is closed just now.

Every call holds the folder's mutex, so that no process opens one of these models meanwhile.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from threading import Lock

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.file._clock import read_clock
from kvarve.storage.file._eviction_queue import LastUse
from kvarve.storage.file._index import Index, Limits
from kvarve.storage.file._moving import rescue
from kvarve.storage.file._processes import is_in_use
from kvarve.storage.file._slabs import Broken, Slab, unlink
from kvarve.storage.file._table import STORED, owner_of, times
from kvarve.storage.file.disk import Directory, NotOurs
from kvarve.storage.file.folder import (
    TABLE,
    Folder,
    Known,
    Wanted,
    files_of_model,
    known_models,
    owners_in,
    remove_model,
    slab_name,
    slab_numbers,
)

log = logging.getLogger(__name__)

# A slab of another class, or of an idle model, is removed if its objects are on average this many times as old as the
# victim here; the last slab of a class only if all of its objects are older.
_MUCH_OLDER = 2.0


@dataclass(frozen=True)
class Offer:
    """A slab that could be removed: `slab` if it is of this process's model, else the `number`-th of another `model`.

    `slot_bytes`: its class, 0 if unknown. `is_last`: the only one of its class in its model. Without it a prompt that
    needs one page of each class could resume nowhere, and a class of small objects keeps its objects for the longest.
    Ages are in ns: of its objects on average, and of the youngest.
    """

    slab: Slab | None
    model: str
    number: int
    bytes: int
    slot_bytes: int
    is_last: bool
    mean_age_ns: float
    least_age_ns: float

    def is_older(self, age_ns: float) -> bool:
        return self.least_age_ns > age_ns if self.is_last else self.mean_age_ns > _MUCH_OLDER * age_ns

    def sort_key(self) -> tuple[bool, float]:
        """The slab with the smallest key is removed first."""
        return self.is_last, -self.mean_age_ns


def chosen(offers: Sequence[Offer], size_bytes: int) -> list[Offer]:
    """The slabs to remove for so many bytes: the oldest first, the last ones of their classes only if need be."""
    found, lasts, left = list[Offer](), list[Offer](), Counter((each.model, each.slot_bytes) for each in offers)
    for offer in sorted(offers, key=Offer.sort_key):
        left[offer.model, offer.slot_bytes] -= 1
        is_last = offer.slot_bytes and not left[offer.model, offer.slot_bytes]
        (lasts if is_last else found).append(offer)
    ordered, taken = [*found, *lasts], [0, *accumulate(offer.bytes for offer in (*found, *lasts))]
    return [offer for offer, before in zip(ordered, taken, strict=False) if before < size_bytes]


class IdleModels:
    def __init__(self, folder: Folder) -> None:
        self._folder, self._disk = folder, folder.disk
        # By model and number: the table's inode and mtime, the size of its slots, and their last use.
        self._seen: dict[tuple[str, int], tuple[tuple[int, int], int, LastUse]] = {}
        self._known: dict[str, Known] = {}  # of the last offers, by name

    def offers(self) -> list[Offer]:
        """All slabs of all models that no process has open. Those of a damaged one say whose they are."""
        found, models = [], self._folder.models
        known, damaged = known_models(self._disk, models)
        self._known = {model.name: model for model in known}
        for name in {*self._known, *damaged} - {self._folder.model.path.name}:
            with (
                suppress(*(OSError,) if name in damaged else ()),
                self._disk.closing(self._disk.enter_below(models, name)) as folder,
            ):
                owners = (owner_of(self._known[name].label),) if name in self._known else owners_in(self._disk, folder)
                if not is_in_use(self._disk, folder):
                    for owner in islice(owners, 1):
                        found += self._offers_of(name, folder, owner)
        there = {(each.model, each.number) for each in found}
        self._seen = {key: it for key, it in self._seen.items() if key in there}
        return found

    def _offers_of(self, model: str, folder: Directory, owner: int) -> list[Offer]:
        files, now_ns = files_of_model(self._disk, folder), read_clock(self._disk, folder).now_ns()
        found = {}
        for number, whole in slab_numbers(self._disk, folder).items():
            if whole and slab_name(number) + TABLE not in files:  # not ours, and not to be removed
                continue
            sizes = [files[name].st_size for name in (slab_name(number), slab_name(number) + TABLE) if name in files]
            if sizes:
                table = files.get(slab_name(number) + TABLE)
                found[number] = sum(sizes), *self._last_use(model, folder, number, owner, table, now_ns)
        classes = Counter(slot_bytes for _, slot_bytes, _ in found.values())
        return [
            Offer(
                *(None, model, number, size_bytes, slot_bytes, slot_bytes > 0 and classes[slot_bytes] == 1),
                *(max(0.0, now_ns - each) for each in (used.mean_ns, used.last_ns)),
            )
            for number, (size_bytes, slot_bytes, used) in found.items()
        ]

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
                tables = [table for _, table in slab.load(0, slab.shape.slots, named=False)]
                used = np.concatenate([times(table, now_ns)[1][table.state == STORED] for table in tables])
                seen = key, slab.shape.slot_bytes, LastUse.of(used)
            self._seen[model, number] = seen
        return seen[1:]

    def rescue(self, going: Sequence[Offer], limits: Limits, *, goes_on: Callable[[], bool]) -> None:
        """Move the hottest objects of slabs that are about to be removed to others of their models."""
        for name in {offer.model for offer in going if offer.slab is None} & self._known.keys():
            numbers, model = {offer.number for offer in going if offer.model == name}, self._known[name]
            wanted = Wanted(self._folder.directory, None, model.label, model.description)
            folder = Folder(self._disk, wanted, make=False)
            try:
                folder.enter()
                index = Index(folder, limits)
                index.begin(repair=False)
                index.refresh()
                leaving = [slab for slab in index.slabs.values() if slab.number in numbers and slab.lock_all()]
                rescue(index, Lock(), leaving, goes_on=goes_on)
                index.close()
            except (OSError, StorageError) as error:
                log.warning("%s: not all that is used could be moved: %s", self._folder.models.path / name, error)
            finally:
                folder.close()

    def remove(self, offer: Offer, why: str) -> bool:
        """Remove a slab, and with its last slab the model. False: it has a file that is not ours."""
        with self._disk.closing(self._disk.enter_below(self._folder.models, offer.model)) as folder:
            try:
                unlink(self._disk, folder, offer.number, why)
            except NotOurs:  # it has a second hard link: a user wants to keep it
                return False
            left = slab_numbers(self._disk, folder)
        if not left:
            remove_model(self._disk, self._folder.models, offer.model, f"nothing is left of it: {why}")
        return True
