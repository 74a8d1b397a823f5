"""Allocates slabs in a folder: how large they are, which is removed for which, and that no file is left behind.

One thread of the process at a time calls it. To make or remove a slab it takes the folder's mutex. The store's lock,
which is all that readers need, is held for moments only, since it is slow to make and remove files and to compute
eviction queues.
"""

import errno
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.file.call import Call, NeedSlab, NeedVictims, RowAddress
from kvarve.storage.file.disk import NotOurs
from kvarve.storage.file.folder import LINE_BYTES, SLABS, slab_name, slab_numbers, spare_bytes
from kvarve.storage.file.idle_models import IdleModels, IdleSlab
from kvarve.storage.file.index import Index
from kvarve.storage.file.orders import LastUse, coldest
from kvarve.storage.file.slabs import Broken, Slab, unlink
from kvarve.storage.file.table import STORED, Shape, slot_bytes_for

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: for a file of this size
# A slab is a 16th of the capacity, at most 256 MiB, while there are fewer than 16 of these; then a 16th of all slabs.
# So a large store has some hundreds, each an open file, and a store that is never filled takes little.
_SLAB_BYTES = 256 << 20
_SHARE = 16
_RETRY_NS = 10_000_000_000  # until a slot class that found no space for a slab tries again


# A slab of another class, or of an idle model, is removed if its objects are on average this many times as old as the
# victim here; the last slab of a class only if all of its objects are older.
_MUCH_OLDER = 2.0
AT_ONCE = 32  # objects per hold of the lock, which bounds how long readers wait


@dataclass(frozen=True)
class _Offer:
    """A slab that could be removed. `is_last`: the only one of its class in its model. Without it a prompt that needs
    one page of each class could resume nowhere, and a class of small objects keeps its objects for the longest. Ages
    are in ns: of its objects on average, and of the youngest."""

    slab: Slab | IdleSlab
    bytes: int
    is_last: bool
    mean_age_ns: float
    least_age_ns: float

    def is_older(self, age_ns: float) -> bool:
        return self.least_age_ns > age_ns if self.is_last else self.mean_age_ns > _MUCH_OLDER * age_ns

    def sort_key(self) -> tuple[bool, float]:
        """The slab with the smallest key is removed first."""
        return self.is_last, -self.mean_age_ns


class SlabAllocator:
    def __init__(self, index: Index, lock: threading.Lock) -> None:
        self._index, self._folder, self._lock = index, index.folder, lock
        self._idle_models = IdleModels(self._folder)
        self._full_until: dict[int, int] = {}  # store time by slot bytes
        self._stuck_until: dict[int, int] = {}
        self._warned: set[int] = set()  # slot bytes logged as impossible to store
        self._left_alone: set[int] = set()  # numbers of slabs that are none of ours

    def begin(self, call: Call) -> int:
        """Start a put, and now and then sweep: free expired objects, and slabs whose files were removed. Returns the
        store's time."""
        call.low = spare_bytes(self._folder.disk, self._folder.root) < 0
        index = self._index
        with self._lock:
            now_ns, slabs = index.clock.now_ns(), [*index.slabs.values()]
            if not index.is_due(now_ns):
                return now_ns
        self.give_up(slab for slab in slabs if slab.is_gone())
        old = index.old(slabs, now_ns)
        for at in range(0, len(old), AT_ONCE):
            with self._lock:
                index.expire(old[at : at + AT_ONCE], now_ns)
            index.publish(self._lock)
        return now_ns

    def reserve(self, call: Call, name: str, size_bytes: int) -> RowAddress | None:
        """Reserve a row for a new object; None if there is no space for it."""
        while True:
            with self._lock:
                found = self._index.reserve(call, name, size_bytes)
            if isinstance(found, NeedSlab):
                with self._alone():
                    if not self._grow(call, found.slot_bytes):
                        call.grown.add(found.slot_bytes)
            elif isinstance(found, NeedVictims):
                self._choose_victims(call, found)
            else:
                if found is None:
                    self._warn_if_never(slot_bytes_for(size_bytes))
                return found

    def _choose_victims(self, call: Call, need: NeedVictims) -> None:
        """Compute an eviction queue, without the lock as it takes a tenth of a second for a million objects; or, if a
        slab of another class or of an idle model is much older, replace that."""
        with self._lock:
            slabs, group = self._index.victim_slabs(need)
        queue = coldest(slabs, self._index.limits.eviction, group)
        slot_bytes = need.slot_bytes
        if slot_bytes is not None and slot_bytes not in call.stuck:
            used_ns = queue.first_used_ns()
            age_ns = -1.0 if used_ns is None else max(0.0, self._index.clock.now_ns() - used_ns)
            with self._alone():
                offers = self._offers(call, slot_bytes)
                older = min((each for each in offers if each.is_older(age_ns)), key=_Offer.sort_key, default=None)
                if older is not None:
                    if self._swap(call, slot_bytes, older, sum(each.bytes for each in offers)):
                        return
                    call.stuck.add(slot_bytes)
        with self._lock:
            self._index.set_victims(need, queue)

    def _warn_if_never(self, slot_bytes: int) -> None:
        """Log once that no object of this size can be stored, as there is none to evict for it."""
        with self._lock:
            mine = [slab.shape for slab in self._index.slabs.values()]
        if slot_bytes in self._warned or any(shape.slot_bytes == slot_bytes for shape in mine):
            return
        self._warned.add(slot_bytes)
        others_bytes = self._folder.bytes() - sum(shape.bytes for shape in mine)
        log.warning(
            "%s: nothing of %d bytes can be stored: other models that are in use have %d of %d bytes, or the disk is "
            "full (a hundredth of it stays free, 256 MiB at least); give it more capacity, or another folder",
            self._folder.directory,
            slot_bytes,
            others_bytes,
            self._index.limits.capacity_bytes,
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process makes or removes a slab meanwhile."""
        with self._folder.mutex():
            with self._lock:
                self._index.look_again()
                self._index.refresh()
            yield

    def _grow(self, call: Call, slot_bytes: int) -> bool:
        """Add a slab of a class if there is space, with the mutex held; quarantined slabs are removed for it."""
        now_ns = self._index.clock.now_ns()
        if self._full_until.get(slot_bytes, 0) > now_ns:
            return False
        self._find_lost()
        shape = self._shape_for(slot_bytes, self._space_bytes(call))
        if shape is None and self._idle_models.remove_quarantined("its space is needed"):
            shape = self._shape_for(slot_bytes, self._space_bytes(call))
        number, slab = self._new_number(), None
        while slab is None and shape is not None and number is not None:
            try:
                slab = self._new_slab(number, shape)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                # The disk is smaller than the capacity: try a smaller slab.
                shape = Shape(slot_bytes, shape.slots // 4) if shape.slots >= 4 else None
        if slab is None:
            self._full_until[slot_bytes] = now_ns + _RETRY_NS
            return False
        call.freed_bytes = max(0, call.freed_bytes - slab.shape.bytes)
        self._index.add(slab, self._lock, empty=True)
        return True

    def _swap(self, call: Call, slot_bytes: int, older: _Offer, offered_bytes: int) -> bool:
        """Remove an older slab and make one of this class in its place, unless all offers together are too small.
        Returns whether one was made, or could be once the next slab is removed as well."""
        now_ns = self._index.clock.now_ns()
        if self._stuck_until.get(slot_bytes, 0) > now_ns:
            return False
        if self._shape_for(slot_bytes, self._space_bytes(call, offered_bytes)) is None:
            return False
        if not self._remove(older, "what is stored now is used more"):
            return False
        call.freed_bytes += older.bytes
        if self._grow(call, slot_bytes):
            return True
        if self._shape_for(slot_bytes, self._space_bytes(call)) is None:
            return True
        # There is space for a slab, and yet none could be made: the disk is full, whatever is removed.
        self._stuck_until[slot_bytes] = now_ns + _RETRY_NS
        return False

    def _offers(self, call: Call | None, but: int | None = None) -> list[_Offer]:
        """The slabs that could be removed: of all classes but `but`, and of idle models."""
        with self._lock:
            mine = [
                slab
                for slab in self._index.slabs.values()
                if slab.shape.slot_bytes != but and self._index.may_go(slab, call)
            ]
            classes = Counter(slab.shape.slot_bytes for slab in self._index.slabs.values())
            now_ns = self._index.clock.now_ns()
        found = []
        for slab in mine:
            used = LastUse.of(slab.used[slab.state == STORED])
            ages = (max(0.0, now_ns - each) for each in (used.mean_ns, used.last_ns))
            found.append(_Offer(slab, slab.shape.bytes, classes[slab.shape.slot_bytes] == 1, *ages))
        idle = self._idle_models.slabs()
        kinds = Counter((each.model, each.slot_bytes) for each in idle)
        for each in idle:
            is_last = each.slot_bytes > 0 and kinds[each.model, each.slot_bytes] == 1
            found.append(_Offer(each, each.bytes, is_last, each.mean_age_ns, each.least_age_ns))
        return found

    def _remove(self, offer: _Offer, why: str) -> bool:
        """Whether a slab could be removed: no other process is filling it."""
        if isinstance(offer.slab, IdleSlab):
            self._idle_models.remove(offer.slab, why)
            self._full_until.clear()
            return True
        return self.remove(offer.slab, why)

    def remove(self, slab: Slab, why: str) -> bool:
        """Evict all objects of a slab, and remove it, with the mutex held. False: another process is filling it."""
        if not slab.lock_all():
            return False
        rows = np.flatnonzero(slab.state == STORED)
        for at in range(0, len(rows), AT_ONCE):  # there may be a hundred thousand of them
            with self._lock:
                self._index.unlist(slab, rows[at : at + AT_ONCE].tolist())
        try:
            self._index.remove(slab, self._lock)
        except BaseException:  # also on an interrupt
            slab.unlock_all()
            raise
        with suppress(NotOurs):  # it has a second hard link: a user wants to keep it
            unlink(slab.disk, slab.folder, slab.number, why)
        self._full_until.clear()
        return True

    def give_up(self, slabs: Iterable[Slab]) -> None:
        """Drop slabs whose files were removed from outside."""
        for slab in slabs:
            with self._alone():
                if self._index.slabs.get(slab.number) is not slab:
                    continue
                self._index.lost += int((slab.state == STORED).sum())
                self._index.remove(slab, self._lock)
            log.warning("%s: its files were removed from outside, and all its objects are lost", slab.path)

    def drop_failed(self) -> None:
        """Remove the slabs of which a sync has failed. This process uses them no more even if that fails; the next
        change tries again."""
        for slab in [slab for slab in [*self._index.slabs.values()] if slab.failed]:
            with self._lock:
                self._index.lost += int((slab.state == STORED).sum())
                self._index.forget(slab)
                self._index.failed[slab.identity] = slab
        for slab in [*self._index.failed.values()]:
            with suppress(OSError, StorageError), self._alone():
                if not slab.is_gone():  # its number may be another slab's by now
                    self._index.remove(slab, self._lock)
                    unlink(slab.disk, slab.folder, slab.number, "a sync has failed, so any of its objects may be lost")
                del self._index.failed[slab.identity]

    def shrink(self) -> None:
        """Remove slabs down to the capacity, which may be smaller than it was."""
        excess = self._folder.bytes() - self._index.limits.capacity_bytes
        if excess > 0:
            excess -= self._idle_models.remove_quarantined("the capacity is smaller than it was")
        tried = set[Slab | IdleSlab]()
        while excess > 0:
            offers = (each for each in self._offers(None) if each.slab not in tried)
            offer = min(offers, key=_Offer.sort_key, default=None)
            if offer is None:
                break
            tried.add(offer.slab)
            if self._remove(offer, "the capacity is smaller than it was"):
                excess -= offer.bytes

    def _space_bytes(self, call: Call, more_bytes: int = 0) -> int:
        """How large a new slab may be, if `more_bytes` are removed; less its line in the file of changes. The bytes
        that this call has freed count, however full the disk is."""
        spare = spare_bytes(self._folder.disk, self._folder.root)
        free_bytes = max(spare, call.freed_bytes) + more_bytes
        return min(self._index.limits.capacity_bytes - self._folder.bytes() - LINE_BYTES + more_bytes, free_bytes)

    def _shape_for(self, slot_bytes: int, space_bytes: int) -> Shape | None:
        """The shape for a new slab of a class; None if there is too little space."""
        with self._lock:
            shapes = [slab.shape for slab in self._index.slabs.values()]
        held_bytes = sum(shape.bytes for shape in shapes)
        usual_bytes = max(min(_SLAB_BYTES, self._index.limits.capacity_bytes // _SHARE), held_bytes // _SHARE)
        usual = Shape(slot_bytes, max(1, Shape.within(slot_bytes, usual_bytes).slots))
        possible = Shape.within(slot_bytes, space_bytes)
        slots = min(usual.slots, possible.slots)
        first = all(shape.slot_bytes != slot_bytes for shape in shapes)
        return Shape(slot_bytes, slots) if slots >= (1 if first else (usual.slots + 1) // 2) else None

    def _find_lost(self) -> None:
        """Add slabs that are on disk and not in the index: a process died or failed while it made or removed them, or
        they could not be opened. Their objects are used."""
        disk, folder, known = self._folder.disk, self._folder.model, self._index.changes.known()
        for number, whole in slab_numbers(disk, folder).items():
            if number in known or number in self._index.slabs:
                continue
            with suppress(OSError):  # it keeps its number until the next try
                try:
                    slab = Slab.open(disk, folder, number, self._index.owner)
                except Broken as why:
                    self._index.quarantine(number, str(why), whole=whole)
                except NotOurs as why:
                    if number not in self._left_alone:
                        log.warning("%s is left alone: %s", folder.path / slab_name(number), why)
                        self._left_alone.add(number)
                else:
                    fits = disk.size(slab.file) == slab.shape.slots_bytes  # else it would grow beyond the capacity
                    if fits and slab.identity not in self._index.failed:
                        self._index.add(slab, self._lock, empty=False)

    def _new_number(self) -> int | None:
        there = slab_numbers(self._folder.disk, self._folder.model)
        return next((number for number in range(SLABS) if number not in there), None)

    def _new_slab(self, number: int, shape: Shape) -> Slab:
        index, identity = self._index, secrets.randbits(64) | 1
        folder, durable = self._folder.model, index.limits.durable
        return Slab.create(index.disk, folder, number, shape, index.owner, identity, durable=durable)
