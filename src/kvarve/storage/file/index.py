"""The index of a file store: where each object lies, which is evicted next, and what to write into the tables.

Every call holds the store's lock; one that changes a table, the folder's mutex as well. No object's bytes move here.
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np

from kvarve.storage.file.clock import Clock
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.folder import CHANGES, CLOCK, Folder, files_of_model, slab_name, slab_numbers
from kvarve.storage.file.orders import EvictionQueue, Victim
from kvarve.storage.file.sequence_lock import SequenceLock
from kvarve.storage.file.slabs import STRIPES, Broken, Slab, quarantine, states_of, unlink
from kvarve.storage.file.table import (
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

_HELD = nullcontext()  # the caller holds the lock
_GROUP_QUEUES = 64  # eviction queues of groups that are cached: each is some kilobytes and quick to compute
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
    durable: bool = True


@dataclass(eq=False)
class Call:
    """State of one put. It may not evict objects that it has answered for."""

    kept: set[int] = field(default_factory=set)  # entries of what was there already, and of what it stored
    stored: list[set[RowAddress]] = field(default_factory=list)  # per round
    touched: set[Slab] = field(default_factory=set)  # of all objects that it answers for
    of_group: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # slot bytes reserved
    grown: set[int] = field(default_factory=set)  # slot classes that cannot get another slab now
    stuck: set[int] = field(default_factory=set)  # slot classes for which no removal frees enough
    freed_bytes: int = 0  # of the disk, by slabs that it removed
    low: bool = False  # the disk is as full as it may be, so only rows whose blocks are allocated are usable
    full: bool = False  # the disk had no blocks for a free row, so only rows that were filled before are usable


@dataclass(frozen=True)
class NeedSlab:
    """No row is free: the caller should add a slab with slots of this size."""

    slot_bytes: int


@dataclass(frozen=True)
class NeedVictims:
    """The caller has to compute an eviction queue, for a slot class or for a group."""

    slot_bytes: int | None
    group: str | None


def group_of(name: str) -> str:
    """The part of a name before the first "-": the group shares a quota."""
    group, dash, _ = name.partition("-")
    return group if dash else ""


def _number_of(group: str) -> int:
    """A group's number in a column; for two groups with one number the names decide."""
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
        self.held: dict[RowAddress, int] = {}  # generations of rows reserved by calls of this process
        self._unclear: set[Slab] = set()  # slabs with entries that fail their check
        self._duplicates: set[RowAddress] = set()  # of their rows: another row has the same name
        self.failed: dict[int, Slab] = {}  # by identity: a sync failed, so they are not used, and wait to be removed
        self._queues: dict[NeedVictims, EvictionQueue] = {}
        self._interrupted = False  # the tables may have rows that we reserved and no call fills
        self._last_tick = 0
        self._swept_ns = 0

    # --- lookup

    def place(self, name: str) -> RowAddress:
        """Where an object lies, however old."""
        place = self.entries[name]
        return self.slabs[place >> 32], place & _ROW

    def find(self, name: str, now_ns: int) -> RowAddress | None:
        """Where an object lies; None if it is missing or expired."""
        place = self.entries.get(name)
        if place is None:
            return None
        slab, row = self.slabs[place >> 32], place & _ROW
        return None if self._is_old(slab, row, now_ns) else (slab, row)

    def is_current(self, place: RowAddress, generation: int) -> bool:
        """Whether the row still holds the same object."""
        slab, row = place
        known = self.slabs.get(slab.number) is slab
        return bool(known and slab.state[row] == STORED and slab.generation[row] == generation)

    def count(self, now_ns: int) -> tuple[int, int]:
        """How many objects have not expired, and their bytes."""
        if self.limits.ttl_ns is None:
            return len(self.entries), self.bytes
        objects = size_bytes = 0
        for slab in self.slabs.values():
            fresh = (slab.state == STORED) & (now_ns - slab.stored <= self.limits.ttl_ns)
            objects += int(fresh.sum())
            size_bytes += int(slab.length[fresh].sum())
        return objects, size_bytes

    # --- use

    def use(self, places: Sequence[RowAddress], *, count: bool = True) -> list[tuple[Slab, int, int, int]]:
        """Mark these as used, the first as most recently used; returns (slab, row, used, uses) to stamp."""
        tick = self._last_tick = max(self.clock.now_ns(), self._last_tick + 1)
        for slab, row in reversed(places):
            slab.used[row] = tick
            slab.uses[row] += count
            tick += 1
        self._last_tick = tick
        return [(slab, row, int(slab.used[row]), int(slab.uses[row])) for slab, row in places]

    # --- reading the tables

    def refresh(self, *, closely: bool = False) -> None:
        """Take over what other processes have changed; `closely` before this process changes a table."""
        unfinished, unopened = {}, []
        for changed in self.sequence_lock.look(closely=closely):
            if changed.unfinished:
                unfinished[changed.number] = changed.identity, changed.unfinished
            slab = self.slabs.get(changed.number)
            if slab is not None and slab.identity != changed.identity:
                self.forget(slab)
                slab = None
            if slab is not None:
                for stripe in range(STRIPES) if changed.stripes is None else changed.stripes:
                    self._read(slab, *slab.rows_of(stripe))
            elif changed.identity and changed.identity not in self.failed:
                # A slab that cannot be opened counts as missing.
                try:
                    slab = Slab.open(self.disk, self.folder.model, changed.number, self.owner)
                    if slab.identity == changed.identity:
                        self.slabs[changed.number] = slab
                        self._read(slab, 0, slab.shape.slots)
                except Broken:
                    pass
                except OSError:
                    unopened.append(changed.number)
        self.sequence_lock.mark_stale(unopened)
        if unfinished:
            with suppress(OSError):  # then the next process that changes something finishes it
                self.sequence_lock.end_write(unfinished)

    def reload(self, slabs: Iterable[Slab]) -> None:
        """Read the tables again, as the columns have changes that could not be written."""
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
        # The time of use is outside the entry's checksum, so it may be any value.
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
        """These rows are STORED under these names. Of two objects of one name one is dropped."""
        if not rows:
            return
        if rows[-1] - rows[0] + 1 == len(rows):
            slab.names[rows[0] : rows[-1] + 1] = names
        else:
            for row, name in zip(rows, names, strict=True):
                slab.names[row] = name
        # An object stored anew in another row may be read there before its old row is read as free. The older of two
        # may also be an entry that a power cut brought back, whose slot another object has overwritten.
        newer: dict[str, int] = {}
        for name, row in zip(names, rows, strict=True):
            if name in self.entries:
                there, at = self.place(name)
                if there.stored[at] > slab.stored[row]:
                    newer[name] = self.entries[name]
                else:
                    self._give_up(there, at)
        before = len(self.entries)
        # In one update, as there may be a million.
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
        """Drop a row whose name another row has: two processes may have stored the object at once, and one died before
        its change was visible."""
        name = slab.names[row]
        if self.entries[name] == slab.number << 32 | row:
            del self.entries[name]
        self.bytes -= int(slab.length[row])
        self._count_group(slab, row, -1)
        slab.state[row], slab.names[row] = BROKEN, ""
        self._unclear.add(slab)
        self._duplicates.add((slab, row))

    def _count_in(self, slab: Slab, row: int) -> None:
        self.entries[slab.names[row]] = slab.number << 32 | row
        self.bytes += int(slab.length[row])
        self._count_group(slab, row, 1)

    def _count_group(self, slab: Slab, row: int, by: int) -> None:
        """Add `by` objects to a group's count; a group without objects is forgotten."""
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
        """Drop a slab that is gone, with its objects."""
        for row in np.flatnonzero(slab.state == STORED).tolist():
            self._unlist(slab, row)
        self.slabs.pop(slab.number, None)
        self.held = {place: it for place, it in self.held.items() if place[0] is not slab}
        self._duplicates = {place for place in self._duplicates if place[0] is not slab}
        self._dirty.pop(slab, None)
        self._unclear.discard(slab)
        self._queues.clear()  # they hold references that keep the file open

    def close(self) -> None:
        """Drop all references to slabs, so that their files close once the last read has ended."""
        for slab in [*self.slabs.values()]:
            self.slabs.pop(slab.number)
        for known in (self.entries, self._dirty, self._unclear, self._duplicates, self.failed, self._queues):
            known.clear()

    # --- changes, with the mutex held

    def hold(self, slab: Slab, row: int) -> None:
        """Reserve the row for this process."""
        self._set(slab, row, RESERVED)
        self.held[slab, row] = int(slab.generation[row])
        slab.length[row] = slab.used[row] = slab.uses[row] = 0

    def drop(self, slab: Slab, row: int, state: int = FREE) -> None:
        """Drop the row's object; the row becomes FREE, or another `state`."""
        self._unlist(slab, row)
        self.held.pop((slab, row), None)
        self._set(slab, row, state)
        if state == FREE:
            slab.searched = False
            self._taken.discard(slab.shape.slot_bytes)

    def release(self, places: Iterable[RowAddress]) -> None:
        """Free these rows, as far as they are still reserved by us."""
        for place in places:
            if self.is_ours(place):
                self.drop(*place)
            self.held.pop(place, None)

    def is_ours(self, place: RowAddress) -> bool:
        """Whether a row is still reserved by us: a disk may have lost the entry, and another process reserved it."""
        slab, row = place
        ours = slab.state[row] == RESERVED and slab.holder[row] == self.folder.number
        same = slab.generation[row] == self.held.get(place) and self.slabs.get(slab.number) is slab
        return bool(ours and same)

    def abandon(self, places: Iterable[RowAddress]) -> None:
        """As `release`, if the tables cannot be written: rows stay RESERVED on disk until `reclaim` frees them."""
        for place in places:
            self.held.pop(place, None)
        self._interrupted = True

    def keep(self, slab: Slab, row: int, name: str, length: int, now_ns: int) -> None:
        """The row has been filled: it is STORED."""
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
        """Write the changes into the tables and make them visible to other processes. OSError: nothing has changed.

        `lock`: the store's, if the caller does not hold it. It is held for moments, not while tables are written, so
        readers go on; with the mutex held no other process changes a table meanwhile.
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
                self.sequence_lock.begin_write(change)
            for slab, rows in dirty.items():
                slab.save(sorted(rows))
            with lock:
                self.sequence_lock.end_write(change)
        except BaseException:  # also on an interrupt
            with lock:
                self._interrupted = True
                self.reload(dirty)
            raise

    def repair(self) -> None:
        """Free rows whose entry fails its check (no process is writing it), and duplicates of a name."""
        if self._interrupted:
            self._interrupted = False
            self.reclaim()
        duplicates, self._duplicates = self._duplicates, set()
        for slab, row in duplicates:
            if slab.state[row] == BROKEN:
                for _, found in slab.load(row, row + 1):
                    if found.names and found.names[0] in self.entries:
                        self.drop(slab, row)
        unclear, self._unclear = self._unclear, set()
        for slab in unclear:
            broken = np.flatnonzero(slab.state >= BROKEN)
            for stripe in np.unique(slab.stripe(broken)).tolist():
                self._read(slab, *slab.rows_of(stripe))
            for row in np.flatnonzero(slab.state == BROKEN).tolist():
                if (slab, row) not in self.held:  # a call of ours is writing there
                    self.lost += 1
                    self.drop(slab, row)
            self._unclear.discard(slab)
            if (slab.state >= BROKEN).any():  # unreadable now: tried again the next time
                self._unclear.add(slab)

    def reclaim(self) -> None:
        """Free the rows reserved by processes that died, and those of ours that no call fills."""
        for slab in self.slabs.values():
            reserved = np.flatnonzero(slab.state == RESERVED)
            if not len(reserved):
                continue
            holders = np.unique(slab.holder[reserved]).tolist()
            gone = [each for each in holders if each == self.folder.number or not self.folder.is_alive(each)]
            rows = reserved[np.isin(slab.holder[reserved], gone)]
            rows = rows[[(slab, row) not in self.held for row in rows.tolist()]]
            # Read the tables again: a process may have died or failed before it wrote its change.
            for stripe in np.unique(slab.stripe(rows)).tolist():
                self._read(slab, *slab.rows_of(stripe))
            for row in rows[slab.state[rows] == RESERVED].tolist():
                self.reclaimed += 1
                self.drop(slab, row)

    def old(self, slabs: Iterable[Slab], now_ns: int) -> list[RowAddress]:
        """The expired objects of these slabs. No lock is needed, as `expire` checks again."""
        ttl_ns = self.limits.ttl_ns
        if ttl_ns is None:
            return []
        return [
            (slab, row)
            for slab in slabs
            for row in np.flatnonzero((slab.state == STORED) & (now_ns - slab.stored > ttl_ns)).tolist()
        ]

    def expire(self, places: Iterable[RowAddress], now_ns: int) -> int:
        """Drop those of these rows that are still expired; returns how many."""
        count = 0
        for slab, row in places:
            if self.slabs.get(slab.number) is slab and slab.state[row] == STORED and self._is_old(slab, row, now_ns):
                self.drop(slab, row)
                count += 1
        return count

    def _is_old(self, slab: Slab, row: int, now_ns: int) -> bool:
        return self.limits.ttl_ns is not None and now_ns - int(slab.stored[row]) > self.limits.ttl_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether to sweep now: free expired objects, rows of dead processes and slabs that are gone."""
        due = now_ns - self._swept_ns > _SECOND_NS
        if due:
            self._swept_ns = now_ns
        return due

    # --- allocation and eviction

    def reserve(self, call: Call, name: str, size_bytes: int) -> RowAddress | NeedSlab | NeedVictims | None:
        """Reserve a row for a new object; None: no space. `NeedSlab`, `NeedVictims`: the caller acts and asks again."""
        slot_bytes = slot_bytes_for(size_bytes)
        group = group_of(name) if self.limits.quota_bytes is not None else ""
        space = self._make_space_in_group(call, group, slot_bytes)
        if space is not True:
            return space or None
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

    def _make_space_in_group(self, call: Call, group: str, slot_bytes: int) -> bool | NeedVictims:
        """Whether the group may have one more slot; its own coldest objects are evicted for it."""
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
        """The next victim of a slot class or a group; `need` if the queue has to be computed; None if there is none."""
        queue = self._queues.get(need)
        if queue is None:
            return need
        while (victim := queue.pop()) is not None:
            if (
                victim.is_current(self.slabs)
                and victim.slab.number << 32 | victim.row not in call.kept
                and (victim.slab, victim.row) not in self.held
                and need.group in (None, group_of(victim.slab.names[victim.row]))
            ):
                queue.useful = True  # also if another process used it, as its time of use is known now
                if not self._used_elsewhere(victim):
                    return victim
        del self._queues[need]
        return need if queue.useful else None

    def set_victims(self, need: NeedVictims, queue: EvictionQueue) -> None:
        """Set the eviction queue for `need`."""
        if need.group is not None and len(self._queues) >= _GROUP_QUEUES:
            for other in [other for other in self._queues if other.group is not None][:1]:
                del self._queues[other]
        self._queues[need] = queue

    def victim_slabs(self, need: NeedVictims) -> tuple[list[Slab], int | None]:
        """The slabs with candidates for `need`, and the number of their group."""
        slabs = [slab for slab in self.slabs.values() if need.slot_bytes in (None, slab.shape.slot_bytes)]
        return slabs, None if need.group is None else _number_of(need.group)

    def _used_elsewhere(self, victim: Victim) -> bool:
        """Whether another process has used it since; if so, take over its time of use."""
        slab, row = victim.slab, victim.row
        with suppress(OSError):
            used, uses = slab.stamped(row)
            if used > slab.used[row] and used <= self.clock.now_ns() + _SECOND_NS:
                slab.used[row], slab.uses[row] = used, max(min(uses, MOST_USES), int(slab.uses[row]))
                return True
        return False

    def may_go(self, slab: Slab, call: Call | None = None) -> bool:
        """Whether the slab may be removed: no row is being filled, as far as known, nor kept by this call."""
        if ((slab.state == RESERVED) | (slab.state == UNREADABLE)).any():
            return False
        return call is None or not any(place >> 32 == slab.number for place in call.kept)

    # --- slabs, with the mutex held

    def add(self, slab: Slab, *, empty: bool) -> None:
        """Add a new slab, or one found with its contents. OSError: it is not added."""
        self.slabs[slab.number] = slab
        self._taken.discard(slab.shape.slot_bytes)
        try:
            if not empty:
                self._read(slab, 0, slab.shape.slots)
            self.sequence_lock.end_write({slab.number: (slab.identity, ())})
        except BaseException:  # also on an interrupt
            self.forget(slab)
            raise

    def unlist(self, slab: Slab, rows: Sequence[int]) -> None:
        """Evict these rows of a slab that is about to be removed."""
        for row in rows:
            self._unlist(slab, row)
        slab.state[rows] = FREE
        self.evicted += len(rows)

    def remove(self, slab: Slab) -> None:
        """Drop a slab that is about to be removed. OSError: other processes do not see that yet."""
        if self.slabs.get(slab.number) is slab:
            self.forget(slab)
        self.sequence_lock.end_write({slab.number: (0, ())})

    def begin(self, *, repair: bool) -> None:
        """Open the slabs found on disk, as no other process has the store open.

        `repair`: quarantine files that are named like a slab and are none, and remove slots without a table, which are
        left if a process dies while it makes or removes a slab.
        """
        found, folder = {}, self.folder.model
        space_bytes = self.limits.capacity_bytes - self.folder.bytes()
        files = files_of_model(self.disk, folder)
        for number, whole in slab_numbers(self.disk, folder).items():
            try:
                slab = Slab.open(self.disk, folder, number, self.owner, alone=repair, space_bytes=space_bytes)
                found[number] = slab.identity
                if slab_name(number) in files:  # it may have grown
                    space_bytes -= max(0, self.disk.size(slab.file) - files[slab_name(number)].st_size)
            except Broken as why:
                self.lost += whole
                if repair:
                    with suppress(OSError):  # it keeps its number until the next try
                        self.quarantine(number, str(why), whole=whole)
            except OSError as error:
                self.lost += 1
                log.warning("%s is not used: %s", folder.path / slab_name(number), error)
        self.sequence_lock.begin(found)

    def quarantine(self, number: int, why: str, *, whole: bool) -> None:
        """Move files that are no slab out of the way: removed if there are only slots, without a table."""
        if whole:
            quarantine(self.disk, self.folder.model, number, why)
        else:
            unlink(self.disk, self.folder.model, number, "a process that has died left its slots without a table")

    def states(self) -> dict[str, int]:
        """How many rows are in which state."""
        return states_of(self.slabs.values())
