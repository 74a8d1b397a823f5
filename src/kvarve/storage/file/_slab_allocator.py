"""Finds a row for a new object: a free one, one of a new slab, or that of an object that is evicted.

One thread of the process at a time calls it. To make or remove a slab it takes the folder's mutex. The store's lock,
which is all that readers need, is held for moments only, since it is slow to make and remove files and to compute
eviction queues.
"""

import logging
import os
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.base import group_of
from kvarve.storage.file._eviction_queue import EvictionQueue, LastUse, coldest
from kvarve.storage.file._idle_models import IdleModels, Offer, chosen
from kvarve.storage.file._index import SECOND_NS, Index, Put, number_of
from kvarve.storage.file._moving import rescue
from kvarve.storage.file._slabs import Broken, RowAddress, Slab, unlink
from kvarve.storage.file._table import MOST_USES, STORED, Shape, slot_bytes_for
from kvarve.storage.file.disk import FULL, NotOurs
from kvarve.storage.file.folder import LINE_BYTES, SLABS, slab_name, slab_numbers, spare_bytes

log = logging.getLogger(__name__)

# A slab is a 16th of the capacity, at most 256 MiB, while there are fewer than 16 of these; then a 16th of all slabs.
# So a large store has some hundreds, each an open file, and a store that is never filled takes little.
_SLAB_BYTES = 256 << 20
_SHARE = 16
_RETRY_NS = 10_000_000_000  # until a slot class that found no space for a slab tries again
_QUEUES = 32  # eviction queues that are cached: there may be many groups, and each queue is quick to compute
# How long objects are moved out of slabs that are to be removed: in a put, and when the store is opened with less
# capacity (other processes wait for the folder's mutex).
_MOVING_NS, _SHRINKING_NS = 500_000_000, 5_000_000_000
AT_ONCE = 32  # objects per hold of the lock, which bounds how long readers wait


class SlabAllocator:
    def __init__(self, index: Index, lock: threading.Lock, let_readers_in: Callable[[], None]) -> None:
        self._index, self._folder, self._lock = index, index.folder, lock
        self._let_readers_in = let_readers_in  # between two moments with the lock
        self._idle_models = IdleModels(self._folder)
        self._queues: dict[int | str, EvictionQueue] = {}  # of slot classes (bytes) and of groups
        self._full_until: dict[int, int] = {}  # store time by slot bytes
        self._stuck_until: dict[int, int] = {}
        self._swept_ns = 0
        self._warned: set[int] = set()  # slot bytes logged as impossible to store
        self._damaged: set[int] = set()  # numbers of slabs that are damaged, found by the last search
        self._left_alone: set[int] = set()  # numbers of slabs that are none of ours

    def begin(self, put: Put) -> int:
        """Start a round of a put, and now and then sweep: free expired objects, and slabs whose files were removed.
        Returns the store's time."""
        put.low = spare_bytes(self._folder.disk, self._folder.root) < 0
        index = self._index
        with self._lock:
            now_ns, slabs = index.clock.now_ns(), [*index.slabs.values()]
        if now_ns - self._swept_ns <= SECOND_NS:
            return now_ns
        self._swept_ns = now_ns
        self.give_up(slab for slab in slabs if slab.is_gone())
        old = index.old(slabs, now_ns)
        for at in range(0, len(old), AT_ONCE):
            with self._lock:
                index.expire(old[at : at + AT_ONCE], now_ns)
            index.publish(self._lock)
        return now_ns

    def reserve(self, put: Put, numbers: Iterable[int]) -> None:
        """Reserve rows for objects of a put: free ones, those of a new slab, or those of objects that are evicted. An
        object gets none if there is no space for it, or if it exceeds the quota of its group."""
        wanted = defaultdict[int, list[int]](list)
        for number in numbers:
            slot_bytes = slot_bytes_for(put.sizes[number])
            if self._index.limits.quota_bytes is None or self._make_quota(put, group_of(put.names[number]), slot_bytes):
                wanted[slot_bytes].append(number)
        for slot_bytes, some in wanted.items():
            self._reserve(put, slot_bytes, some)

    def _make_quota(self, put: Put, group: str, slot_bytes: int) -> bool:
        """Have a group's own coldest objects make space for one more within its quota."""
        quota = self._index.limits.quota_bytes or 0
        if put.of_group[group] + slot_bytes > quota:
            return False
        while self._index.group_bytes(group) + put.of_group[group] + slot_bytes > quota:
            self._let_readers_in()
            with self._lock:
                place = self._evict(put, group)
            if place is None and not self._choose_victims(put, group):
                return False
        put.of_group[group] += slot_bytes
        return True

    def _reserve(self, put: Put, slot_bytes: int, numbers: Sequence[int]) -> None:
        index, left = self._index, [*reversed(numbers)]
        while left:
            self._let_readers_in()
            with self._lock:
                places = [] if put.full else index.reserve(put, slot_bytes, min(len(left), AT_ONCE))
                grows = not places and not put.full and self._full_until.get(slot_bytes, 0) <= index.clock.now_ns()
                if not places and not grows and (victim := self._evict(put, slot_bytes)) is not None:
                    places = [victim]
                for place in places:
                    put.places[left.pop()] = place
                    put.touched.add(place[0])
            if places:
                continue
            if grows:
                with self._alone():
                    self._grow(put, slot_bytes)
            elif not self._choose_victims(put, slot_bytes):
                self._warn_if_never(slot_bytes)
                return

    # --- eviction

    def _evict(self, put: Put, of: int | str) -> RowAddress | None:
        """Seize and evict the next victim of a slot class or of a group, with the lock held; None if victims have to be
        chosen first."""
        index, queue = self._index, self._queues.get(of) or EvictionQueue(iter(()), None)
        for victim in queue.victims:
            place = victim.place(index.slabs)
            if place is None or place[0].number << 32 | place[1] in put.kept:
                continue
            if isinstance(of, str) and group_of(place[0].names[place[1]]) != of:
                continue
            elsewhere = self._used_elsewhere(*place)
            seized = not elsewhere and index.seize(*place)
            # Also if another process used or changed it, as that is known now.
            queue.useful |= seized or victim.place(index.slabs) is None
            if seized:
                # A group's victim leaves a free row, as the new object may be of another class.
                (index.drop if isinstance(of, str) else index.evict)(*place)
                index.evicted += 1
                return place
            put.contended |= not elsewhere
        return None

    def _choose_victims(self, put: Put, of: int | str) -> bool:
        """Compute an eviction queue for a slot class or a group; or, if a slab of another class or of an idle model is
        much older than its first victim, replace that slab by one of this class. False: the last queue was of no use.
        """
        last = self._queues.pop(of, None)
        if last is not None and not last.useful:
            return False
        with self._lock:
            slabs = [slab for slab in self._index.slabs.values() if isinstance(of, str) or slab.shape.slot_bytes == of]
        # Without the lock, as it takes a tenth of a second for a million objects.
        group = number_of(of) if isinstance(of, str) else None
        queue = coldest(slabs, self._index.limits.eviction, group)
        if isinstance(of, str) or not self._replace_older(put, of, queue.first_used_ns):
            if len(self._queues) >= _QUEUES:
                del self._queues[next(iter(self._queues))]
            self._queues[of] = queue
        return True

    def _used_elsewhere(self, slab: Slab, row: int) -> bool:
        """Whether another process has used an object since; if so, take over its time of use."""
        with suppress(OSError):
            used, uses = slab.stamped(row)
            if slab.used[row] < used <= self._index.clock.now_ns() + SECOND_NS:
                slab.used[row], slab.uses[row] = used, max(min(uses, MOST_USES), int(slab.uses[row]))
                return True
        return False

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

    # --- making slabs

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process makes or removes a slab meanwhile."""
        with self._folder.mutex():
            with self._lock:
                self._index.look_again()
                self._index.refresh()
            yield

    def _grow(self, put: Put, slot_bytes: int) -> bool:
        """Add a slab of a class if there is space, with the mutex held; damaged slabs are removed for it."""
        now_ns = self._index.clock.now_ns()
        if self._full_until.get(slot_bytes, 0) > now_ns:
            return False
        self._find_lost()
        shape = self._shape_for(slot_bytes, self._space_bytes(put))
        if shape is None and self._remove_damaged("its space is needed"):
            shape = self._shape_for(slot_bytes, self._space_bytes(put))
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
        put.freed_bytes = max(0, put.freed_bytes - slab.shape.bytes)
        self._index.add(slab, self._lock, empty=True)
        return True

    def _replace_older(self, put: Put, slot_bytes: int, used_ns: int | None) -> bool:
        """Replace a slab of another class or of an idle model, if it is much older than an object used at `used_ns`
        and all such slabs together are large enough. Returns whether it was, or will be once the next one is too."""
        now_ns = self._index.clock.now_ns()
        if self._stuck_until.get(slot_bytes, 0) > now_ns:
            return False
        age_ns = -1.0 if used_ns is None else max(0.0, now_ns - used_ns)
        with self._alone():
            offers = self._offers(put, slot_bytes)
            older = min((each for each in offers if each.is_older(age_ns)), key=Offer.sort_key, default=None)
            space_bytes = self._space_bytes(put, sum(each.bytes for each in offers))
            if older is None or self._shape_for(slot_bytes, space_bytes) is None:
                return False
            if not self._remove(older, "what is stored now is used more", put.kept):
                return False
            put.freed_bytes += older.bytes
            if self._grow(put, slot_bytes) or self._shape_for(slot_bytes, self._space_bytes(put)) is None:
                return True
            # There is space for a slab, and yet none could be made: the disk is full, whatever is removed.
            self._stuck_until[slot_bytes] = now_ns + _RETRY_NS
            return False

    def _space_bytes(self, put: Put, more_bytes: int = 0) -> int:
        """How large a new slab may be, if `more_bytes` are removed; less its line in the file of changes. The bytes
        that this put has freed count, however full the disk is."""
        spare = spare_bytes(self._folder.disk, self._folder.root)
        free_bytes = max(spare, put.freed_bytes) + more_bytes
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
        they could not be opened. Their objects are used; damaged ones are left where they are until space is needed."""
        disk, folder, known = self._folder.disk, self._folder.model, self._index.changes.known()
        self._damaged.clear()
        for number, whole in slab_numbers(disk, folder).items():
            if number in known or number in self._index.slabs:
                continue
            with suppress(OSError):  # it keeps its number until the next try
                try:
                    slab = Slab.open(disk, folder, number, self._index.owner)
                except Broken as why:
                    self._damaged.add(number)
                    if whole:
                        self._index.say_damaged(number, why)
                except NotOurs as why:
                    if number not in self._left_alone:
                        log.warning("%s is left alone: %s", folder.path / slab_name(number), why)
                        self._left_alone.add(number)
                else:
                    if slab.identity not in self._index.failed:
                        self._index.add(slab, self._lock, empty=False)

    def remove_damaged(self, why: str) -> int:
        """Remove damaged slabs of this model; returns their bytes."""
        with self._alone():
            self._find_lost()
            return self._remove_damaged(why)

    def _remove_damaged(self, why: str) -> int:
        before = self._folder.bytes()
        for number in self._damaged:
            with suppress(NotOurs):
                unlink(self._folder.disk, self._folder.model, number, f"it is damaged, and {why}")
        return before - self._folder.bytes() if self._damaged else 0

    def _new_number(self) -> int | None:
        there = slab_numbers(self._folder.disk, self._folder.model)
        return next((number for number in range(SLABS) if number not in there), None)

    def _new_slab(self, number: int, shape: Shape) -> Slab:
        index, identity = self._index, secrets.randbits(64) | 1
        folder, durable = self._folder.model, index.limits.durable
        return Slab.create(index.disk, folder, number, shape, index.owner, identity, durable=durable)

    # --- removing slabs

    def _offers(self, put: Put, but: int | None = None) -> list[Offer]:
        """The slabs that could be removed: of all classes but `but`, and of idle models. Not those that this process is
        filling, or of which the put has told that an object is there."""
        kept = {place >> 32 for place in put.kept}
        with self._lock:
            mine, held = [*self._index.slabs.values()], set(self._index.held)
            now_ns = self._index.clock.now_ns()
        classes, found = Counter(slab.shape.slot_bytes for slab in mine), self._idle_models.offers()
        for slab in mine:
            if slab.shape.slot_bytes != but and slab not in held and slab.number not in kept:
                used = LastUse.of(slab.used[slab.state == STORED])
                ages = (max(0.0, now_ns - each) for each in (used.mean_ns, used.last_ns))
                kind = slab.shape.slot_bytes
                found.append(Offer(slab, "", slab.number, slab.shape.bytes, kind, classes[kind] == 1, *ages))
        return found

    def _remove(self, offer: Offer, why: str, keep: Set[int]) -> bool:
        """Whether a slab could be removed: no other process is filling it. Its hottest objects are moved first, but not
        in the place of those that `keep` names."""
        if offer.slab is not None:
            return bool(self._lock_and_move([offer.slab], keep, _MOVING_NS)) and self.remove(offer.slab, why)
        self._full_until.clear()
        return self._idle_models.remove(offer, why)

    def _lock_and_move(self, slabs: Iterable[Slab], keep: Set[int], most_ns: int) -> list[Slab]:
        """Lock slabs that are to be removed, and move their hottest objects to others for a while. Those that could be
        locked: of any other, another process is filling a row."""
        locked = [slab for slab in slabs if slab.lock_all()]
        rescue(self._index, self._lock, locked, keep, goes_on=self._for(most_ns))
        return locked

    def _for(self, most_ns: int) -> Callable[[], bool]:
        """True for a while from now on."""
        disk = self._folder.disk
        end_ns = disk.since_boot_ns() + most_ns
        return lambda: disk.since_boot_ns() < end_ns

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
        """Drop slabs whose files were removed or cut from outside."""
        for slab in slabs:
            with self._alone():
                if self._index.slabs.get(slab.number) is not slab:
                    continue
                self._index.lost += int((slab.state == STORED).sum())
                self._index.remove(slab, self._lock)
            log.warning("%s: its files were removed or cut from outside, and all its objects are lost", slab.path)

    def drop_failed(self) -> None:
        """Remove the slabs of which a sync has failed. This process uses them no more even if that fails; the next
        change tries again."""
        for slab in [slab for slab in [*self._index.slabs.values()] if slab.failed]:
            with self._lock:
                lost = int((slab.state == STORED).sum())
                self._index.lost += lost
                self._index.forget(slab)
                self._index.failed[slab.identity] = slab
            why = "%s: a sync has failed (%s), so any of its %d objects may be lost: it is removed"
            log.warning(why, slab.path, os.strerror(slab.failed), lost)
        for slab in [*self._index.failed.values()]:
            with suppress(OSError, StorageError), self._alone():
                if not slab.is_gone():  # its number may be another slab's by now
                    self._index.remove(slab, self._lock)
                    unlink(slab.disk, slab.folder, slab.number, "a sync has failed")
                del self._index.failed[slab.identity]

    def shrink(self) -> None:
        """Remove slabs down to the capacity, which may be smaller than it was; with the mutex held."""
        why, capacity_bytes = "the capacity is smaller than it was", self._index.limits.capacity_bytes
        if self._folder.bytes() > capacity_bytes:
            self._find_lost()
            self._remove_damaged(why)
        tried = set[tuple[str, int]]()
        while (excess := self._folder.bytes() - capacity_bytes) > 0:
            offers = [each for each in self._offers(Put()) if (each.model, each.number) not in tried]
            going = chosen(offers, excess)
            if not going:
                break
            tried |= {(each.model, each.number) for each in going}
            mine = [each.slab for each in going if each.slab is not None]
            self._make_small(mine, sum(each.bytes for each in going) - excess, why)
            mine = [slab for slab in mine if self._index.slabs.get(slab.number) is slab]
            locked = self._lock_and_move(mine, frozenset(), _SHRINKING_NS)
            self._idle_models.rescue(going, self._index.limits, goes_on=self._for(_SHRINKING_NS))
            for offer in going:
                if offer.slab is None:
                    self._idle_models.remove(offer, why)
                elif offer.slab in locked:
                    self.remove(offer.slab, why)
        self._full_until.clear()

    def _make_small(self, going: Sequence[Slab], space_bytes: int, why: str) -> None:
        """Make a slab within this space for the hottest objects of each class of which all slabs go, the coldest first.
        On a full disk the coldest one goes before that, as it has the room."""
        left = {slab.shape.slot_bytes for slab in self._index.slabs.values() if slab not in going}
        classes = {slab.shape.slot_bytes for slab in going} - left
        coldest, room_bytes = iter(going), spare_bytes(self._folder.disk, self._folder.root)
        for slot_bytes in classes:
            shape = Shape.within(slot_bytes, space_bytes // len(classes) - LINE_BYTES)
            made = self._made_small(shape, room_bytes)
            if not made and shape.slots:
                slab = next(coldest)
                if self._lock_and_move([slab], frozenset(), _MOVING_NS) and self.remove(slab, why):
                    room_bytes = max(0, room_bytes) + slab.shape.bytes
                    made = self._made_small(shape, room_bytes)
            room_bytes -= shape.bytes * made

    def _made_small(self, shape: Shape, room_bytes: int) -> bool:
        """Whether there was room for a small slab."""
        number = self._new_number()
        if number is None or not shape.slots or shape.bytes > room_bytes:
            return False
        try:
            self._index.add(self._new_slab(number, shape), self._lock, empty=True)
        except OSError:  # the disk is full, or its owner's share of it is
            return False
        return True
