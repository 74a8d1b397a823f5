"""The index of a file store: where each object lies, which is evicted next, and what to write into the tables.

Every call holds the store's lock. One thread of the process at a time changes rows: it seizes them, so that other
processes leave them alone, changes the columns, publishes, and lets go. No object's bytes move here.
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.file.call import Call, Limits, NeedSlab, NeedVictims, RowAddress, group_of
from kvarve.storage.file.changes import Changes
from kvarve.storage.file.clock import Clock
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.folder import CHANGES, CLOCK, Folder, files_of_model, slab_name, slab_numbers
from kvarve.storage.file.orders import EvictionQueue, Victim
from kvarve.storage.file.slabs import STRIPES, Broken, Slab, quarantine, states_of, unlink
from kvarve.storage.file.table import (
    BROKEN,
    FREE,
    MOST_USES,
    RESERVED,
    STORED,
    UNREADABLE,
    Columns,
    Rows,
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


def _number_of(group: str) -> int:
    """A group's number in a column; for two groups with one number the names decide."""
    return zlib.crc32(group.encode()) >> 1


class Index:
    def __init__(self, disk: Disk, folder: Folder, label: bytes, limits: Limits) -> None:
        self.disk, self.folder, self.limits = disk, folder, limits
        self.owner = owner_of(label)
        self.changes = Changes(disk, folder.open(CHANGES), folder.directory)
        self.clock = Clock(disk, folder.open(CLOCK))
        self.slabs: dict[int, Slab] = {}
        self.entries: dict[str, int] = {}  # the slab's number << 32 | the row
        self.bytes = 0
        self.evicted = self.lost = self.damaged = 0
        self._of_group: dict[str, int] = {}  # slot bytes, of groups that have any; counted where there is a quota
        self._taken: set[int] = set()  # classes (slot bytes) without a free row
        self._dirty: dict[Slab, set[int]] = defaultdict(set)
        self.held: dict[Slab, set[int]] = {}  # rows that this process has seized
        self._unclear: set[Slab] = set()  # slabs with entries that fail their check
        self._duplicates: set[RowAddress] = set()  # of their rows: another row has the same name
        self.failed: dict[int, Slab] = {}  # by identity: a sync failed, so they are not used, and wait to be removed
        self._queues: dict[NeedVictims, EvictionQueue] = {}
        self._unopened: set[int] = set()  # numbers of slabs that could not be opened
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

    def refresh(self) -> None:
        """Take over what other processes have changed."""
        unopened = []
        for changed in self.changes.look():
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
        self._unopened.update(unopened)

    def look_again(self) -> None:
        """Have the next refresh try slabs again that could not be opened."""
        self.changes.look_again(self._unopened)
        self._unopened.clear()

    def revert(self) -> None:
        """Read rows again whose changes were not published, and let go of them."""
        dirty, self._dirty = self._dirty, defaultdict(set)
        for slab, rows in dirty.items():
            self._let_go(slab, rows)
            if self.slabs.get(slab.number) is slab:
                for stripe in set(slab.stripe(np.array([*rows])).tolist()):
                    self._read(slab, *slab.rows_of(stripe))

    def _read(self, slab: Slab, first: int, last: int) -> None:
        for at, columns in slab.load(first, last):
            self._learn(slab, at, columns)

    def _learn(self, slab: Slab, first: int, found: Columns) -> None:
        rows = np.arange(first, first + len(found.state))
        here: slice | Rows = slice(first, first + len(rows))
        ours = [row - first for row in self.held.get(slab, ()) if first <= row < first + len(rows)]
        if ours:  # no other process changes these
            others = np.ones(len(rows), np.bool_)
            others[ours] = False
            here = rows = rows[others]
            found = found.only(others)
        changed = (slab.state[here] != found.state) | (slab.generation[here] != found.generation)
        changed |= found.state >= BROKEN
        for row in rows[changed & (slab.state[here] == STORED)].tolist():
            self._unlist(slab, row)
        held = found.state == STORED
        if held.any():
            self.clock.at_least(int(found.stored[held].max()))
        # The time of use is outside the entry's checksum, so it may be any value.
        stored, used = times(found, self.clock.now_ns())
        slab.used[here] = np.where(changed, used, np.maximum(slab.used[here], used))
        slab.stored[here] = np.where(changed, stored, slab.stored[here])
        slab.uses[here] = np.where(changed, found.uses, np.maximum(slab.uses[here], found.uses))
        slab.state[here] = found.state
        slab.generation[here] = found.generation
        slab.length[here] = found.length
        slab.searched = False
        self._taken.discard(slab.shape.slot_bytes)
        if held.any():
            self._last_tick = max(self._last_tick, int(slab.used[here][held].max()))
            new = changed[held]
            names = found.names if new.all() else [found.names[i] for i in np.flatnonzero(new).tolist()]
            self._list(slab, rows[held][new].tolist(), names)
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
        self._duplicates = {place for place in self._duplicates if place[0] is not slab}
        self._let_go(slab, [row for row in self._dirty.pop(slab, ()) if slab.state[row] != RESERVED])
        self._unclear.discard(slab)
        self._queues.clear()  # they hold references that keep the file open

    def close(self) -> None:
        """Drop all references to slabs, so that their files close once the last read has ended."""
        for slab in [*self.slabs.values()]:
            self.slabs.pop(slab.number)
        for known in (self.entries, self._dirty, self._unclear, self._duplicates, self.failed, self._queues):
            known.clear()

    # --- changes

    def seize(self, slab: Slab, row: int, *, known: bool = True) -> bool:
        """Keep other processes from a row until `release`, or until its change is published. False: another process has
        seized it, a call of this one has, or (unless not `known`) its entry is another one now and has been read."""
        if row in self.held.get(slab, ()) or not slab.lock(row):
            return False
        self.held.setdefault(slab, set()).add(row)
        with suppress(OSError):  # it is unreadable now
            if not known or slab.is_as_known(row):
                return True
        self._let_go(slab, [row])
        self._read(slab, row, row + 1)
        return False

    def confirm(self, place: RowAddress) -> bool:
        """Whether an object is in the table, whatever other processes have told; else its entry is read again."""
        slab, row = place
        if row in self.held.get(slab, ()):
            return True
        with suppress(OSError):
            if slab.is_as_known(row):
                return True
        self._read(slab, row, row + 1)
        return False

    def release(self, places: Iterable[RowAddress]) -> None:
        """Let go of these rows; those that were to be filled are FREE."""
        for slab, row in places:
            if row in self.held.get(slab, ()):
                self._let_go(slab, [row])

    def _let_go(self, slab: Slab, rows: Iterable[int]) -> None:
        held = self.held.get(slab, set())
        for row in rows:
            held.discard(row)
            if slab.state[row] == RESERVED:
                slab.state[row] = FREE
            slab.unlock(row)
        slab.searched = False
        self._taken.discard(slab.shape.slot_bytes)
        if not held:
            self.held.pop(slab, None)

    def drop(self, slab: Slab, row: int, state: int = FREE) -> None:
        """Drop the object of a seized row; the row becomes FREE, or another `state`."""
        self._unlist(slab, row)
        self._set(slab, row, state)
        if state == FREE:  # the same call may fill it
            slab.searched = False
            self._taken.discard(slab.shape.slot_bytes)

    def keep(self, slab: Slab, row: int, name: str, length: int, now_ns: int) -> None:
        """A seized row has been filled: it is STORED."""
        if name in self.entries:  # expired
            self._unlist(*self.place(name))
        self._set(slab, row, STORED)
        slab.names[row], slab.length[row], slab.stored[row] = name, length, now_ns
        self._count_in(slab, row)

    def _set(self, slab: Slab, row: int, state: int) -> None:
        assert row in self.held[slab], f"{slab.path}: row {row} is not ours to change"
        slab.state[row] = state
        slab.generation[row] = (int(slab.generation[row]) + 1) & _GENERATIONS
        slab.length[row] = slab.used[row] = slab.uses[row] = 0
        self._dirty[slab].add(row)

    def publish(self, lock: AbstractContextManager[object] = _HELD) -> None:
        """Write the changes into the tables, tell other processes, let go of all rows but those to be filled. OSError:
        see `revert`. `lock`: the store's, if the caller does not hold it; readers go on while tables are written."""
        with lock:
            dirty = {slab: sorted(rows) for slab, rows in self._dirty.items()}
        if not dirty:
            return
        for slab, rows in dirty.items():
            slab.save(rows)
        stripes = {slab: set(slab.stripe(np.array(rows)).tolist()) for slab, rows in dirty.items()}
        self.changes.tell({slab.number: (slab.identity, which) for slab, which in stripes.items()}, lock)
        with lock:
            self._dirty.clear()
            for slab, rows in dirty.items():
                self._let_go(slab, [row for row in rows if slab.state[row] != RESERVED])

    def repair(self) -> None:
        """Free rows whose entry fails its check (no process is writing it), and duplicates of a name."""
        duplicates, self._duplicates = self._duplicates, set()
        for slab, row in duplicates:
            if slab.state[row] == BROKEN and self.seize(slab, row, known=False):
                for _, found in slab.load(row, row + 1):
                    if found.names and found.names[0] in self.entries:
                        self.drop(slab, row)
                    else:
                        self.release([(slab, row)])
        unclear, self._unclear = self._unclear, set()
        for slab in unclear:
            broken = np.flatnonzero(slab.state >= BROKEN)
            for stripe in np.unique(slab.stripe(broken)).tolist():
                self._read(slab, *slab.rows_of(stripe))
            for row in np.flatnonzero(slab.state == BROKEN).tolist():
                if self.seize(slab, row):
                    self.lost += 1
                    self.drop(slab, row)
            self._unclear.discard(slab)
            if (slab.state >= BROKEN).any():  # unreadable now: tried again the next time
                self._unclear.add(slab)

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
            known = self.slabs.get(slab.number) is slab and slab.state[row] == STORED
            if known and self._is_old(slab, row, now_ns) and self.seize(slab, row):
                self.drop(slab, row)
                count += 1
        return count

    def _is_old(self, slab: Slab, row: int, now_ns: int) -> bool:
        return self.limits.ttl_ns is not None and now_ns - int(slab.stored[row]) > self.limits.ttl_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether to sweep now: free expired objects, and slabs that are gone."""
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
            self.evict(*place)
        place[0].state[place[1]] = RESERVED
        call.seized.append(place)
        call.touched.add(place[0])
        call.of_group[group] += slot_bytes
        return place

    def evict(self, slab: Slab, row: int) -> None:
        self.drop(slab, row)
        self.evicted += 1

    def _free(self, slot_bytes: int, call: Call) -> RowAddress | None:
        if slot_bytes in self._taken:
            return None
        for slab in [*self.slabs.values()]:
            if slab.shape.slot_bytes != slot_bytes or slab in call.busy or (call.low and not slab.is_solid()):
                continue
            busy = False
            while (row := slab.take_free()) is not None:
                if row in self.held.get(slab, ()) or self.seize(slab, row):  # it was dropped by this call
                    return slab, row
                busy |= slab.state[row] == FREE
            if busy:
                call.busy.add(slab)
                call.contended = True
                slab.searched = False  # the next call tries again
        if not call.low and not any(slab.shape.slot_bytes == slot_bytes for slab in call.busy):
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
                and need.group in (None, group_of(victim.slab.names[victim.row]))
            ):
                elsewhere = self._used_elsewhere(victim)
                seized = not elsewhere and self.seize(victim.slab, victim.row)
                # Also if another process used or changed it, as that is known now.
                queue.useful |= seized or not victim.is_current(self.slabs)
                if seized:
                    return victim
                call.contended |= not elsewhere
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
        """Whether the slab may be removed: this process fills no row of it, and this call keeps none."""
        if slab in self.held or (slab.state == UNREADABLE).any():
            return False
        return call is None or not any(place >> 32 == slab.number for place in call.kept)

    # --- slabs, with the mutex held

    def add(self, slab: Slab, lock: AbstractContextManager[object], *, empty: bool) -> None:
        """Add a new slab, or one found with its contents. OSError: it is not added."""
        try:
            with lock:
                self.slabs[slab.number] = slab
                self._taken.discard(slab.shape.slot_bytes)
                if not empty:
                    self._read(slab, 0, slab.shape.slots)
            self.changes.tell({slab.number: (slab.identity, ())}, lock, new=True)
        except BaseException:  # also on an interrupt
            with lock:
                self.forget(slab)
            raise

    def unlist(self, slab: Slab, rows: Sequence[int]) -> None:
        """Evict these rows of a slab that is about to be removed."""
        for row in rows:
            self._unlist(slab, row)
        slab.state[rows] = FREE
        self.evicted += len(rows)

    def remove(self, slab: Slab, lock: AbstractContextManager[object]) -> None:
        """Drop a slab that is about to be removed. OSError: it is not dropped."""
        try:
            self.changes.tell({slab.number: (0, ())}, lock, new=True)
        except BaseException:  # also on an interrupt
            with suppress(OSError, StorageError):
                self.changes.tell({slab.number: (slab.identity, ())}, lock, new=True)
            with lock:
                if self.slabs.get(slab.number) is slab:
                    self._read(slab, 0, slab.shape.slots)
            raise
        with lock:
            if self.slabs.get(slab.number) is slab:
                self.forget(slab)

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
        self.changes.begin(found)

    def quarantine(self, number: int, why: str, *, whole: bool) -> None:
        """Move files that are no slab out of the way: removed if there are only slots, without a table."""
        if whole:
            quarantine(self.disk, self.folder.model, number, why)
        else:
            unlink(self.disk, self.folder.model, number, "a process that has died left its slots without a table")

    def states(self) -> dict[str, int]:
        """How many rows are in which state."""
        return states_of(self.slabs.values())
