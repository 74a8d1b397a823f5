"""What a file store knows of its objects: where each lies, whose turn it is to go, and what to write into the tables.

Everything here is called with the store's lock held; what changes a table, with the folder's mutex as well. Bytes of
objects are not moved here.
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np

from kvarve.storage.clock import Clock
from kvarve.storage.disk import Disk
from kvarve.storage.folder import CHANGES, CLOCK, Folder, files_of_model, slab_name, slab_numbers
from kvarve.storage.orders import EvictionQueue, Victim
from kvarve.storage.sequence_lock import SequenceLock
from kvarve.storage.slabs import STRIPES, Broken, Slab, quarantine, states_of, unlink
from kvarve.storage.table import (
    BROKEN,
    FREE,
    MOST_USES,
    RESERVED,
    STORED,
    UNREADABLE,
    Columns,
    owner_of,
    slot_bytes_for,
    times,
)

log = logging.getLogger(__name__)

_HELD = nullcontext()  # by the caller
_GROUP_QUEUES = 64  # orders of groups that are kept: each is some kilobytes, and soon worked out again
_SECOND_NS = 1_000_000_000
_GENERATIONS = (1 << 32) - 1
_ROW = (1 << 32) - 1

RowAddress = tuple[Slab, int]


@dataclass(frozen=True)
class Limits:
    capacity_bytes: int
    eviction: str = "lru"
    ttl_ns: int | None = None
    quota_bytes: int | None = None


@dataclass(eq=False)
class Call:
    """One put: what it has answered for may not be evicted for the rest of it."""

    kept: set[int] = field(default_factory=set)  # places of what was there already, and of what it stored
    stored: list[set[RowAddress]] = field(default_factory=list)  # by each of its rounds
    touched: set[Slab] = field(default_factory=set)  # where all that it answers for lies
    of_group: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # slot bytes reserved
    grown: set[int] = field(default_factory=set)  # classes that cannot have one more slab now
    stuck: set[int] = field(default_factory=set)  # classes for which nothing else can make enough room
    freed_bytes: int = 0  # of the disk, by what it has removed
    low: bool = False  # the disk is as full as it may be, so only rows that have their room on it are any good
    full: bool = False  # the disk had no room behind a free row, so only those that were filled once are any good


@dataclass(frozen=True)
class NeedSlab:
    """There is no row yet: one more slab with such slots would have one."""

    slot_bytes: int


@dataclass(frozen=True)
class NeedVictims:
    """Somebody has to go, of a class or of a group, and it has to be worked out who."""

    slot_bytes: int | None
    group: str | None


def group_of(name: str) -> str:
    """What stands before the first "-" of a name: those who share a quota."""
    group, dash, _ = name.partition("-")
    return group if dash else ""


def _number_of(group: str) -> int:
    """What stands for a group in a column; of two with one number the names say which it is."""
    return zlib.crc32(group.encode()) >> 1


class Index:
    def __init__(self, disk: Disk, folder: Folder, label: bytes, limits: Limits) -> None:
        self.disk, self.folder, self.limits = disk, folder, limits
        self.owner = owner_of(label)
        self.sequence_lock = SequenceLock(disk, folder.open(CHANGES))
        self.clock = Clock(disk, folder.open(CLOCK))
        self.slabs: dict[int, Slab] = {}
        self.entries: dict[str, int] = {}  # the slab's number << 32 | the row
        self.bytes = 0
        self.evicted = self.lost = self.damaged = self.reclaimed = 0
        self._of_group: dict[str, int] = {}  # slot bytes, of groups that have any; counted where there is a quota
        self._taken: set[int] = set()  # classes (slot bytes) without a free row
        self._dirty: dict[Slab, set[int]] = defaultdict(set)
        self.held: dict[RowAddress, int] = {}  # generations of rows that calls of this process are about to fill
        self._unclear: set[Slab] = set()  # slabs with entries that fail their check
        self._doubles: set[RowAddress] = set()  # of those: another row has the same name
        self.doubtful: dict[RowAddress, int] = {}  # generations of objects that may never have reached the medium
        self._queues: dict[NeedVictims, EvictionQueue] = {}
        self._interrupted = False  # the tables may have reserved rows of ours that nobody fills
        self._last_tick = 0
        self._swept_ns = 0

    # --- asking

    def place(self, name: str) -> RowAddress:
        """Where an object lies, however old."""
        place = self.entries[name]
        return self.slabs[place >> 32], place & _ROW

    def find(self, name: str, now_ns: int) -> RowAddress | None:
        """Where an object lies that is not too old."""
        place = self.entries.get(name)
        if place is None:
            return None
        slab, row = self.slabs[place >> 32], place & _ROW
        return None if self._is_old(slab, row, now_ns) else (slab, row)

    def stands(self, place: RowAddress, generation: int) -> bool:
        """Whether it is still the same object that lies there."""
        slab, row = place
        known = self.slabs.get(slab.number) is slab
        return bool(known and slab.state[row] == STORED and slab.generation[row] == generation)

    def count(self, now_ns: int) -> tuple[int, int]:
        """How many objects there are that are not too old, and their bytes."""
        if self.limits.ttl_ns is None:
            return len(self.entries), self.bytes
        objects = size_bytes = 0
        for slab in self.slabs.values():
            fresh = (slab.state == STORED) & (now_ns - slab.stored <= self.limits.ttl_ns)
            objects += int(fresh.sum())
            size_bytes += int(slab.length[fresh].sum())
        return objects, size_bytes

    # --- using

    def use(self, places: Sequence[RowAddress], *, count: bool = True) -> list[tuple[Slab, int, int, int]]:
        """These were used, the first of them last; answers what to write down of it."""
        tick = self._last_tick = max(self.clock.now_ns(), self._last_tick + 1)
        for slab, row in reversed(places):
            slab.used[row] = tick
            slab.uses[row] += count
            tick += 1
        self._last_tick = tick
        return [(slab, row, int(slab.used[row]), int(slab.uses[row])) for slab, row in places]

    # --- learning from the tables

    def take_in(self, *, closely: bool = False) -> None:
        """Look what other processes have changed; closely, before changing something oneself."""
        unsettled, unopened = {}, []
        for changed in self.sequence_lock.look(closely=closely):
            if changed.unsettled:
                unsettled[changed.number] = changed.identity, changed.unsettled
            slab = self.slabs.get(changed.number)
            if slab is not None and slab.identity != changed.identity:
                self.forget(slab)
                slab = None
            if slab is not None:
                for stripe in range(STRIPES) if changed.stripes is None else changed.stripes:
                    self._read(slab, *slab.rows_of(stripe))
            elif changed.identity:
                # A slab that cannot be opened is not there, for now or for ever.
                try:
                    slab = Slab.open(self.disk, self.folder.model, changed.number, self.owner)
                    if slab.identity == changed.identity:
                        self.slabs[changed.number] = slab
                        self._read(slab, 0, slab.shape.slots)
                except Broken:
                    pass
                except OSError:
                    unopened.append(changed.number)
        self.sequence_lock.doubt(unopened)
        if unsettled:
            with suppress(OSError):  # then the next one has to do it
                self.sequence_lock.did(unsettled)

    def reload(self, slabs: Iterable[Slab]) -> None:
        """Believe the tables again: what was meant to be written into them could not be."""
        for slab in slabs:
            if self.slabs.get(slab.number) is slab:
                self._read(slab, 0, slab.shape.slots)

    def _read(self, slab: Slab, first: int, last: int) -> None:
        for at, columns in slab.load(first, last):
            self._learn(slab, at, columns)

    def _learn(self, slab: Slab, first: int, found: Columns) -> None:
        here = slice(first, first + len(found.state))
        changed = (slab.state[here] != found.state) | (slab.generation[here] != found.generation)
        changed |= found.state >= BROKEN
        for row in np.flatnonzero(changed & (slab.state[here] == STORED)).tolist():
            self._unlist(slab, first + row)
        held = found.state == STORED
        if held.any():
            self.clock.at_least(int(found.stored[held].max()))
        # When an object was used stands outside of the check of its entry, so it may be anything.
        stored, used = times(found, self.clock.now_ns())
        slab.used[here] = np.where(changed, used, np.maximum(slab.used[here], used))
        slab.stored[here] = np.where(changed, stored, slab.stored[here])
        slab.uses[here] = np.where(changed, found.uses, np.maximum(slab.uses[here], found.uses))
        slab.state[here] = found.state
        slab.holder[here] = found.holder
        slab.generation[here] = found.generation
        slab.length[here] = found.length
        slab.searched = False
        self._taken.discard(slab.shape.slot_bytes)
        if held.any():
            self._last_tick = max(self._last_tick, int(slab.used[here][held].max()))
            new = changed[held]
            rows = (np.flatnonzero(held) + first)[new].tolist()
            names = found.names if new.all() else [found.names[i] for i in np.flatnonzero(new).tolist()]
            self._list(slab, rows, names)
        if (slab.state[here] >= BROKEN).any():
            self._unclear.add(slab)

    def _list(self, slab: Slab, rows: list[int], names: list[str]) -> None:
        """These rows are STORED under these names. Of two objects of one name one is given up."""
        if not rows:
            return
        if rows[-1] - rows[0] + 1 == len(rows):
            slab.names[rows[0] : rows[-1] + 1] = names
        else:
            for row, name in zip(rows, names, strict=True):
                slab.names[row] = name
        # An object that went from one row to another may be seen there before it is seen to have gone from here.
        # The older one may be what a power cut has brought back, and its slot another object's by now.
        newer: dict[str, int] = {}
        for name, row in zip(names, rows, strict=True):
            if name in self.entries:
                there, at = self.place(name)
                if there.stored[at] > slab.stored[row]:
                    newer[name] = self.entries[name]
                else:
                    self._give_up(there, at)
        before = len(self.entries)
        # All at once, as there may be a million of them.
        self.entries.update(zip(names, (np.array(rows) + (slab.number << 32)).tolist(), strict=True))
        self.entries.update(newer)
        self.bytes += int(slab.length[rows].sum())
        if self.limits.quota_bytes is not None:
            for row in rows:
                self._count_group(slab, row, 1)
        if len(self.entries) < before + len(rows):
            for row, name in zip(rows, names, strict=True):
                if self.entries[name] != slab.number << 32 | row:
                    self._give_up(slab, row)

    def _give_up(self, slab: Slab, row: int) -> None:
        """A row whose name another one has: two processes may have stored it at once, of which one died before it
        could tell."""
        name = slab.names[row]
        if self.entries[name] == slab.number << 32 | row:
            del self.entries[name]
        self.bytes -= int(slab.length[row])
        self._count_group(slab, row, -1)
        slab.state[row], slab.names[row] = BROKEN, ""
        self._unclear.add(slab)
        self._doubles.add((slab, row))

    def _count_in(self, slab: Slab, row: int) -> None:
        self.entries[slab.names[row]] = slab.number << 32 | row
        self.bytes += int(slab.length[row])
        self._count_group(slab, row, 1)

    def _count_group(self, slab: Slab, row: int, by: int) -> None:
        """One object more of a group, or less; nothing is known of a group that has none."""
        if self.limits.quota_bytes is None:
            return
        group = group_of(slab.names[row])
        slab.group[row] = _number_of(group)
        size_bytes = self._of_group.pop(group, 0) + by * slab.shape.slot_bytes
        if size_bytes:
            self._of_group[group] = size_bytes
        else:
            self._queues.pop(NeedVictims(None, group), None)

    def _unlist(self, slab: Slab, row: int) -> None:
        name = slab.names[row]
        if self.entries.get(name) == slab.number << 32 | row:
            del self.entries[name]
            self.bytes -= int(slab.length[row])
            self._count_group(slab, row, -1)
        slab.names[row] = ""

    def forget(self, slab: Slab) -> None:
        """A slab is gone, with what it held."""
        for row in np.flatnonzero(slab.state == STORED).tolist():
            self._unlist(slab, row)
        self.slabs.pop(slab.number, None)
        self.held = {place: it for place, it in self.held.items() if place[0] is not slab}
        self._doubles = {place for place in self._doubles if place[0] is not slab}
        self.doubtful = {place: it for place, it in self.doubtful.items() if place[0] is not slab}
        self._dirty.pop(slab, None)
        self._unclear.discard(slab)
        self._queues.clear()  # they would keep the file open

    def close(self) -> None:
        """Nothing of a store that is closed keeps a file of a slab open, but who is reading it."""
        for slab in [*self.slabs.values()]:
            self.slabs.pop(slab.number)
        for known in (self.entries, self._dirty, self._unclear, self._doubles, self.doubtful, self._queues):
            known.clear()

    def doubt(self, places: Iterable[RowAddress]) -> None:
        """These may never have reached the medium: they are dropped as soon as tables can be written."""
        self.doubtful.update(((slab, row), int(slab.generation[row])) for slab, row in places)

    # --- changing, with the mutex held

    def hold(self, slab: Slab, row: int) -> None:
        """The row is to be filled by this process."""
        self._set(slab, row, RESERVED)
        self.held[slab, row] = int(slab.generation[row])
        slab.length[row] = slab.used[row] = slab.uses[row] = 0

    def drop(self, slab: Slab, row: int, state: int = FREE) -> None:
        """The row holds nothing any more, and is free, or is not used again."""
        self._unlist(slab, row)
        self.held.pop((slab, row), None)
        self._set(slab, row, state)
        if state == FREE:
            slab.searched = False
            self._taken.discard(slab.shape.slot_bytes)

    def release(self, places: Iterable[RowAddress]) -> None:
        """Nobody is going to fill these after all, as far as they are held."""
        for place in places:
            if self.is_ours(place):
                self.drop(*place)
            self.held.pop(place, None)

    def is_ours(self, place: RowAddress) -> bool:
        """Whether a row that this process has reserved still is: a disk may have lost that, and it is another's now."""
        slab, row = place
        ours = slab.state[row] == RESERVED and slab.holder[row] == self.folder.number
        same = slab.generation[row] == self.held.get(place) and self.slabs.get(slab.number) is slab
        return bool(ours and same)

    def abandon(self, places: Iterable[RowAddress]) -> None:
        """The same where tables cannot be written now: the next who can finds them reserved by us, and held by
        nobody."""
        for place in places:
            self.held.pop(place, None)
        self._interrupted = True

    def keep(self, slab: Slab, row: int, name: str, length: int, now_ns: int) -> None:
        """The row has been filled."""
        self.held.pop((slab, row), None)
        slab.state[row], slab.names[row], slab.length[row] = STORED, name, length
        slab.stored[row] = now_ns
        self._dirty[slab].add(row)
        self._count_in(slab, row)

    def _set(self, slab: Slab, row: int, state: int) -> None:
        slab.state[row] = state
        slab.holder[row] = self.folder.number
        slab.generation[row] = (int(slab.generation[row]) + 1) & _GENERATIONS
        self._dirty[slab].add(row)

    def publish(self, lock: AbstractContextManager[object] = _HELD) -> None:
        """Write what has changed into the tables and tell the others. OSError: nothing has changed after all.

        With the store's `lock`, if that is given and not held: it is held for moments then, and not while tables are
        written. Readers go on meanwhile, as nobody else can change a table, so that they take nothing in.
        """
        with lock:
            dirty, self._dirty = self._dirty, defaultdict(set)
            change = {
                slab.number: (slab.identity, set(slab.stripe(np.array(sorted(rows))).tolist()))
                for slab, rows in dirty.items()
            }
        if not dirty:
            return
        try:
            with lock:
                self.sequence_lock.will(change)
            for slab, rows in dirty.items():
                slab.save(sorted(rows))
            with lock:
                self.sequence_lock.did(change)
                self.doubtful = {place: it for place, it in self.doubtful.items() if self.stands(place, it)}
        except BaseException:  # whatever it is, it goes on to the caller
            with lock:
                self._interrupted = True
                self.reload(dirty)
            raise

    def settle(self) -> None:
        """Entries that fail their check although nobody is writing them are free rows; so are doubles of a name, and
        what may not be on the medium."""
        if self._interrupted:
            self._interrupted = False
            self.reclaim()
        doubles, self._doubles = self._doubles, set()
        for slab, row in doubles:
            if slab.state[row] == BROKEN:
                for _, found in slab.load(row, row + 1):
                    if found.names and found.names[0] in self.entries:
                        self.drop(slab, row)
        for place, generation in self.doubtful.items():
            if self.stands(place, generation):
                self.drop(*place)
        unclear, self._unclear = self._unclear, set()
        for slab in unclear:
            broken = np.flatnonzero(slab.state >= BROKEN)
            for stripe in np.unique(slab.stripe(broken)).tolist():
                self._read(slab, *slab.rows_of(stripe))
            for row in np.flatnonzero(slab.state == BROKEN).tolist():
                if (slab, row) not in self.held:  # a call is writing there
                    self.lost += 1
                    self.drop(slab, row)
            self._unclear.discard(slab)
            if (slab.state >= BROKEN).any():  # who knows what is there; asked again the next time
                self._unclear.add(slab)

    def reclaim(self) -> None:
        """Rows that a process had reserved before it died are free, and those of ours that no call is in_flight."""
        for slab in self.slabs.values():
            reserved = np.flatnonzero(slab.state == RESERVED)
            if not len(reserved):
                continue
            holders = np.unique(slab.holder[reserved]).tolist()
            gone = [each for each in holders if each == self.folder.number or not self.folder.is_alive(each)]
            rows = reserved[np.isin(slab.holder[reserved], gone)]
            rows = rows[[(slab, row) not in self.held for row in rows.tolist()]]
            # What stands there counts, and not what somebody was about to write before he died, or failed.
            for stripe in np.unique(slab.stripe(rows)).tolist():
                self._read(slab, *slab.rows_of(stripe))
            for row in rows[slab.state[rows] == RESERVED].tolist():
                self.reclaimed += 1
                self.drop(slab, row)

    def old(self, slabs: Iterable[Slab], now_ns: int) -> list[RowAddress]:
        """What is too old in these slabs; nobody need keep others from them meanwhile."""
        ttl_ns = self.limits.ttl_ns
        if ttl_ns is None:
            return []
        return [
            (slab, row)
            for slab in slabs
            for row in np.flatnonzero((slab.state == STORED) & (now_ns - slab.stored > ttl_ns)).tolist()
        ]

    def expire(self, places: Iterable[RowAddress], now_ns: int) -> int:
        """Of these, what is still there and too old is gone; how many that were."""
        count = 0
        for slab, row in places:
            if self.slabs.get(slab.number) is slab and slab.state[row] == STORED and self._is_old(slab, row, now_ns):
                self.drop(slab, row)
                count += 1
        return count

    def _is_old(self, slab: Slab, row: int, now_ns: int) -> bool:
        return self.limits.ttl_ns is not None and now_ns - int(slab.stored[row]) > self.limits.ttl_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to make room of what is too old, of what the dead had reserved and of what is gone."""
        due = now_ns - self._swept_ns > _SECOND_NS
        if due:
            self._swept_ns = now_ns
        return due

    # --- finding room

    def seat(self, call: Call, name: str, size_bytes: int) -> RowAddress | NeedSlab | NeedVictims | None:
        """A row for a new object, held from now on. `NeedSlab`, `NeedVictims`: try to do it and ask again."""
        slot_bytes = slot_bytes_for(size_bytes)
        group = group_of(name) if self.limits.quota_bytes is not None else ""
        room = self._make_room_in_group(call, group, slot_bytes)
        if room is not True:
            return room or None
        place = None if call.full else self._free(slot_bytes, call)
        if place is None and not call.full and slot_bytes not in call.grown:
            return NeedSlab(slot_bytes)
        if place is None:
            victim = self._victim(call, NeedVictims(slot_bytes, None))
            if not isinstance(victim, Victim):
                return victim
            place = victim.slab, victim.row
            self._unlist(*place)
            self.evicted += 1
        self.hold(*place)
        call.touched.add(place[0])
        call.of_group[group] += slot_bytes
        return place

    def evict(self, slab: Slab, row: int) -> None:
        self.drop(slab, row)
        self.evicted += 1

    def _free(self, slot_bytes: int, call: Call) -> RowAddress | None:
        if slot_bytes not in self._taken:
            for slab in self.slabs.values():
                if slab.shape.slot_bytes != slot_bytes or (call.low and not slab.is_solid()):
                    continue
                while (row := slab.take_free()) is not None:
                    if (slab, row) not in self.held:
                        return slab, row
            if not call.low:
                self._taken.add(slot_bytes)
        return None

    def _make_room_in_group(self, call: Call, group: str, slot_bytes: int) -> bool | NeedVictims:
        """Whether the group may have one more slot; it gives its own coldest for it."""
        quota = self.limits.quota_bytes
        if quota is None:
            return True
        if call.of_group[group] + slot_bytes > quota:
            return False
        while self._of_group.get(group, 0) + call.of_group[group] + slot_bytes > quota:
            victim = self._victim(call, NeedVictims(None, group))
            if not isinstance(victim, Victim):
                return victim or False
            self.evict(victim.slab, victim.row)
        return True

    def _victim(self, call: Call, need: NeedVictims) -> Victim | NeedVictims | None:
        """Who goes next of a class or of a group, or that this has to be worked out; None if nobody can."""
        queue = self._queues.get(need)
        if queue is None:
            return need
        while (victim := queue.pop()) is not None:
            if (
                victim.stands(self.slabs)
                and victim.slab.number << 32 | victim.row not in call.kept
                and (victim.slab, victim.row) not in self.held
                and need.group in (None, group_of(victim.slab.names[victim.row]))
            ):
                queue.useful = True  # also if its turn comes later, as that is known now
                if not self._used_elsewhere(victim):
                    return victim
        del self._queues[need]
        return need if queue.useful else None

    def set_victims(self, need: NeedVictims, queue: EvictionQueue) -> None:
        """It has been worked out who goes."""
        if need.group is not None and len(self._queues) >= _GROUP_QUEUES:
            for other in [other for other in self._queues if other.group is not None][:1]:
                del self._queues[other]
        self._queues[need] = queue

    def among(self, need: NeedVictims) -> tuple[list[Slab], int | None]:
        """In which slabs those are of whom one has to go, and the number of their group."""
        slabs = [slab for slab in self.slabs.values() if need.slot_bytes in (None, slab.shape.slot_bytes)]
        return slabs, None if need.group is None else _number_of(need.group)

    def _used_elsewhere(self, victim: Victim) -> bool:
        """Whether another process has used it since; then this one knows now."""
        slab, row = victim.slab, victim.row
        with suppress(OSError):
            used, uses = slab.stamped(row)
            if used > slab.used[row] and used <= self.clock.now_ns() + _SECOND_NS:
                slab.used[row], slab.uses[row] = used, max(min(uses, MOST_USES), int(slab.uses[row]))
                return True
        return False

    def may_go(self, slab: Slab, call: Call | None = None) -> bool:
        """Whether nobody is filling a row of the slab, as far as can be known, nor has this call answered for one."""
        if ((slab.state == RESERVED) | (slab.state == UNREADABLE)).any():
            return False
        return call is None or not any(place >> 32 == slab.number for place in call.kept)

    # --- slabs, with the mutex held

    def add(self, slab: Slab, *, empty: bool) -> None:
        """A slab has been made, or found with what is in it. OSError: it is not known after all."""
        self.slabs[slab.number] = slab
        self._taken.discard(slab.shape.slot_bytes)
        try:
            if not empty:
                self._read(slab, 0, slab.shape.slots)
            self.sequence_lock.did({slab.number: (slab.identity, ())})
        except BaseException:
            self.forget(slab)
            raise

    def unlist(self, slab: Slab, rows: Sequence[int]) -> None:
        """These rows of a slab that is about to be removed are evicted."""
        for row in rows:
            self._unlist(slab, row)
        slab.state[rows] = FREE
        self.evicted += len(rows)

    def remove(self, slab: Slab) -> None:
        """A slab is to be removed, with what is still listed of it. OSError: others do not know that yet."""
        self.forget(slab)
        self.sequence_lock.did({slab.number: (0, ())})

    def begin(self, *, mend: bool) -> None:
        """This process is alone: the files say which slabs there are.

        `mend`: what is no slab, though named like one, is put away, and slots without a table go, which a process left
        that died while it made or removed a slab.
        """
        found, folder = {}, self.folder.model
        room_bytes = self.limits.capacity_bytes - self.folder.bytes()
        files = files_of_model(self.disk, folder)
        for number, whole in slab_numbers(self.disk, folder).items():
            try:
                slab = Slab.open(self.disk, folder, number, self.owner, alone=mend, room_bytes=room_bytes)
                found[number] = slab.identity
                if slab_name(number) in files:  # it may have grown
                    room_bytes -= max(0, self.disk.size(slab.file) - files[slab_name(number)].st_size)
            except Broken as why:
                self.lost += whole
                if mend:
                    with suppress(OSError):  # it stays in the way until somebody can
                        self.quarantine(number, str(why), whole=whole)
            except OSError as error:  # until somebody can
                self.lost += 1
                log.warning("%s is not used: %s", folder.path / slab_name(number), error)
        self.sequence_lock.begin(found)

    def quarantine(self, number: int, why: str, *, whole: bool) -> None:
        """What is no slab makes room: at once if there is nothing but slots that no table knows."""
        if whole:
            quarantine(self.disk, self.folder.model, number, why)
        else:
            unlink(self.disk, self.folder.model, number, "a process that has died left its slots without a table")

    def states(self) -> dict[str, int]:
        """How many rows are in which state."""
        return states_of(self.slabs.values())
