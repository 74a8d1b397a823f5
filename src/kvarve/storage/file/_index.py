"""The index of a file store: where each object lies, which is evicted next, and what to write into the tables.

Every call holds the store's lock. One thread of the process at a time changes rows: it seizes them, so that other
processes leave them alone, changes the columns, publishes, and lets go. No object's bytes move here.
"""

import itertools
import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from operator import not_

import numpy as np

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import group_of
from kvarve.storage.file._change_file import Changes
from kvarve.storage.file._clock import CLOCK, Clock
from kvarve.storage.file._eviction_queue import ORDERS
from kvarve.storage.file._slabs import STRIPES, Broken, RowAddress, Slab, states_of, unlink, without_tables
from kvarve.storage.file._table import (
    BROKEN,
    DUPLICATE,
    FREE,
    RESERVED,
    RETIRED,
    STORED,
    Columns,
    Rows,
    owner_of,
    times,
)
from kvarve.storage.file.folder import CHANGES, Folder, slab_name, slab_numbers

log = logging.getLogger(__name__)

DEFAULT_THREADS = 4
_HELD = nullcontext()  # the caller holds the lock
SECOND_NS = 1_000_000_000
_ROW = (1 << 32) - 1
_LOOKS, _PAUSE_S = 5, 0.01  # at entries that another process may be writing
_NEAR = 256  # rows: one read of a gap this long takes less time than a second read


def check_limits(ttl_s: float | None, quota_bytes: int | None, eviction: str, threads: int) -> None:
    """Raise ConfigError unless a file storage can be opened with these."""
    if ttl_s is not None and not ttl_s > 0:
        raise ConfigError(f"ttl must be above zero, such as 7d, got {ttl_s} s")
    if quota_bytes is not None and quota_bytes <= 0:
        raise ConfigError(f"quota must be above zero, such as 1GiB, got {quota_bytes} bytes")
    if eviction not in ORDERS:
        raise ConfigError(f"unknown eviction order {eviction!r}; known: {', '.join(ORDERS)}")
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")


@dataclass(frozen=True)
class Limits:
    capacity_bytes: int
    eviction: str = "lru"
    ttl_ns: int | None = None
    quota_bytes: int | None = None
    durable: bool = True


@dataclass(eq=False)
class Put:
    """One put, in one or two rounds. Objects have their numbers in the call. It may not evict what it answers for."""

    names: Sequence[str] = ()
    data: Sequence[Sequence[memoryview]] = ()
    answers: dict[int, bool] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)  # entries of what was there already, and of what it stored
    stored: set[RowAddress] = field(default_factory=set)
    touched: set[Slab] = field(default_factory=set)  # of all objects that it answers for
    of_group: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # slot bytes reserved
    freed_bytes: int = 0  # of the disk, by slabs that it removed
    low: bool = False  # the disk is as full as it may be, so only rows whose blocks are allocated are usable
    full: bool = False  # the disk had no blocks for a free row, so only rows that were filled before are usable

    # Of the round:
    places: dict[int, RowAddress] = field(default_factory=dict)  # rows to be filled
    failed: dict[int, OSError] = field(default_factory=dict)
    moving: list[Future[OSError | None]] = field(default_factory=list)  # writes in flight
    slabs: set[Slab] = field(default_factory=set)  # with objects that it answers for and that may not be synced yet
    lost: dict[Slab, OSError] = field(default_factory=dict)  # slabs of which a sync failed
    busy: set[Slab] = field(default_factory=set)  # slabs of which other processes are filling the last free rows
    contended: bool = False  # other processes had all rows, or removed a slab

    def __post_init__(self) -> None:
        self.sizes = [sum([view.nbytes for view in pieces]) for pieces in self.data]

    def begin_round(self) -> None:
        for of_round in (self.places, self.failed, self.moving, self.slabs, self.busy, self.of_group):
            of_round.clear()
        self.contended = False


def number_of(group: str) -> int:
    """A group's number in a column; for two groups with one number the names decide."""
    return zlib.crc32(group.encode()) >> 1


def _adjacent(rows: Iterable[int], gap: int = 0) -> Iterator[tuple[int, int]]:
    """The first row and the length of each run of rows; a run bridges gaps of up to `gap` rows."""
    ordered = sorted(rows)
    begins = [i for i, row in enumerate(ordered) if not i or ordered[i - 1] + gap < row - 1]
    for begin, end in itertools.pairwise([*begins, len(ordered)]):
        yield ordered[begin], ordered[end - 1] + 1 - ordered[begin]


class Index:
    """`tell`: hears what is lost, in words for people."""

    def __init__(self, folder: Folder, limits: Limits, tell: Callable[[str], None] = log.warning) -> None:
        self.disk, self.folder, self.limits, self._tell = folder.disk, folder, limits, tell
        self.owner = owner_of(folder.wanted.label)
        self.changes = Changes(self.disk, folder.open(CHANGES), folder.directory)
        self.clock = Clock(self.disk, folder.open(CLOCK))
        if self.clock.damaged:
            path = folder.model.path / CLOCK
            log.warning("%s is damaged: objects count as aged by the wall clock while the store was closed", path)
        self.slabs: dict[int, Slab] = {}
        self.entries: dict[str, int] = {}  # the slab's number << 32 | the row
        self.bytes = 0
        self.evicted = 0
        self.lost = self.damaged = 0  # objects whose entries, and whose bytes, could not be read
        self._damaged: set[int] = set()  # numbers of slabs of which that has been said
        self._of_group: dict[str, int] = {}  # slot bytes, of groups that have any; counted where there is a quota
        self._taken: set[int] = set()  # classes (slot bytes) without a free row
        self._dirty: dict[Slab, set[int]] = defaultdict(set)
        self.held: dict[Slab, set[int]] = {}  # rows that this process has seized
        self._unclear: set[Slab] = set()  # slabs with entries that fail their check
        self.failed: dict[int, Slab] = {}  # by identity: a sync failed, so they are not used, and wait to be removed
        self._unopened: set[int] = set()  # numbers of slabs that could not be opened
        self._tried_ns = 0  # when they were tried last
        self._last_tick = 0

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
        """Take over what other processes have changed. Slabs that could not be opened are tried again now and then."""
        if self._unopened and self.disk.since_boot_ns() - self._tried_ns > SECOND_NS:
            self.look_again()
        unopened = []
        for changed in self.changes.look():
            slab = self.slabs.get(changed.number)
            if slab is not None and slab.identity != changed.identity:
                self.forget(slab)
                slab = None
            if slab is not None:
                gap = _NEAR * STRIPES // slab.shape.slots
                for first, count in _adjacent(range(STRIPES) if changed.stripes is None else changed.stripes, gap):
                    self._read(slab, slab.rows_of(first)[0], slab.rows_of(first + count - 1)[1])
            elif changed.identity and changed.identity not in self.failed:
                # A slab that cannot be opened counts as missing.
                try:
                    slab = self._opened(changed.number)
                    if slab.identity != changed.identity:
                        raise Broken("its headers are those of another slab")
                    self.slabs[changed.number] = slab
                    self._read(slab, 0, slab.shape.slots)
                except Broken as why:
                    if self.changes.tells(changed.number, changed.identity):  # else it was removed meanwhile
                        self.say_damaged(changed.number, why)
                except OSError:
                    unopened.append(changed.number)
        if unopened:
            self._unopened.update(unopened)
            self._tried_ns = self.disk.since_boot_ns()

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
        as_stored = (DUPLICATE, RETIRED) if self.folder.read_only else (DUPLICATE,)  # hidden: as long as it is the same
        known = np.where(np.isin(slab.state[here], as_stored), np.uint8(STORED), slab.state[here])
        changed = (known != found.state) | (slab.generation[here] != found.generation)
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
        slab.state[here] = np.where(changed, found.state, slab.state[here])
        slab.generation[here] = found.generation
        slab.told[here] &= ~changed
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
        self.bytes += int(slab.length[rows].sum())
        if self.limits.quota_bytes is not None:
            for row in rows:
                self._count_group(slab, row, 1)
        # An object stored anew in another row may be read there before its old row is read as free. The older of two
        # may also be an entry that a power cut brought back, whose slot another object has overwritten. All processes
        # keep the same one, however they come to read of the two: else each frees what the other keeps.
        for name, row, here in zip(names, rows, (np.array(rows) + (slab.number << 32)).tolist(), strict=True):
            if self.entries.setdefault(name, here) != here:
                there, at = self.place(name)
                if there.stored_at(at) > slab.stored_at(row):
                    self._give_up(slab, row)
                else:
                    self._give_up(there, at)
                    self.entries[name] = here

    def _give_up(self, slab: Slab, row: int) -> None:
        """Drop a row whose name another row has: two processes may have stored the object at once, and one died before
        its change was visible."""
        name = slab.names[row]
        if self.entries[name] == slab.number << 32 | row:
            del self.entries[name]
        self.bytes -= int(slab.length[row])
        self._count_group(slab, row, -1)
        slab.state[row], slab.names[row] = DUPLICATE, ""
        self._unclear.add(slab)

    def _count_group(self, slab: Slab, row: int, by: int) -> None:
        """Add `by` objects to a group's count; a group without objects is forgotten."""
        if self.limits.quota_bytes is None:
            return
        group = group_of(slab.names[row])
        slab.group[row] = number_of(group)
        size_bytes = self._of_group.pop(group, 0) + by * slab.shape.slot_bytes
        if size_bytes:
            self._of_group[group] = size_bytes

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
        self._let_go(slab, [row for row in self._dirty.pop(slab, ()) if slab.state[row] != RESERVED])
        self._unclear.discard(slab)

    def count_on(self, left: "Index") -> None:
        """Go on with the counts of the index that this one replaces. What it has found lost may be the same again."""
        self.lost = max(self.lost, left.lost)
        self.damaged += left.damaged
        self.evicted += left.evicted

    def close(self) -> None:
        """Drop all references to slabs, so that their files close once the last read has ended."""
        for slab in [*self.slabs.values()]:
            self.slabs.pop(slab.number)
        for known in (self._dirty, self._unclear, self.failed):
            known.clear()
        self.entries = {}

    # --- changes

    def seize(self, slab: Slab, row: int) -> bool:
        """Keep other processes from a row until `release`, or until its change is published. False: another process has
        seized it, a call of this one has, or its entry is another one now and has been read."""
        return row not in self.held.get(slab, ()) and bool(self._seize(slab, row, 1))

    def _seize(self, slab: Slab, first: int, count: int) -> list[int]:
        """Seize adjacent rows, those that can be. It recurses for each range of another process: give a few at once."""
        if not slab.lock(first, count):
            if count == 1:
                return []
            middle = first + count // 2
            taken, after = slab.locked(first, count) or (middle, middle)  # another process has many side by side
            parts = (first, taken - first), (after, first + count - after)
            return [row for at, some in parts if some for row in self._seize(slab, at, some)]
        rows = range(first, first + count)
        self.held.setdefault(slab, set()).update(rows)
        known = [False] * count
        with suppress(OSError):  # they are unreadable now
            known = slab.are_as_known(first, count)
        for at, some in _adjacent(itertools.compress(rows, map(not_, known))):
            self._let_go(slab, range(at, at + some))
            self._read(slab, at, at + some)
        return [*itertools.compress(rows, known)]

    def confirm(self, place: RowAddress) -> bool:
        """Whether an object is in the table, whatever other processes have told; else its entry is read again."""
        slab, row = place
        if row in self.held.get(slab, ()):
            return True
        with suppress(OSError):
            if all(slab.are_as_known(row, 1)):
                return True
        self._read(slab, row, row + 1)
        return False

    def release(self, places: Iterable[RowAddress]) -> None:
        """Let go of these rows; those that were to be filled are FREE."""
        by_slab = defaultdict[Slab, list[int]](list)
        for slab, row in places:
            if row in self.held.get(slab, ()):
                by_slab[slab].append(row)
        for slab, rows in by_slab.items():
            self._let_go(slab, rows)

    def retire(self, places: Iterable[RowAddress]) -> None:
        """Leave rows alone whose slots could not be written or read: FREE in the table, and not filled by this process
        until the table is read again."""
        for slab, row in places:
            if slab.state[row] == FREE:
                slab.state[row] = RETIRED

    def _let_go(self, slab: Slab, rows: Iterable[int]) -> None:
        held = self.held.get(slab, set())
        for first, count in _adjacent(rows):
            held.difference_update(range(first, first + count))
            state = slab.state[first : first + count]
            state[state == RESERVED] = FREE
            slab.unlock(first, count)
            for row in (first + np.flatnonzero(state == FREE)).tolist():
                self._is_free(slab, row)
        if not held:
            self.held.pop(slab, None)

    def _is_free(self, slab: Slab, row: int) -> None:
        """A row may be free now."""
        slab.free.append(row)
        self._taken.discard(slab.shape.slot_bytes)

    def drop(self, slab: Slab, row: int) -> None:
        """Drop the object of a seized row; the row becomes FREE."""
        self._unlist(slab, row)
        self._set(slab, [row], FREE)
        self._is_free(slab, row)  # the same call may fill it

    def evict(self, slab: Slab, row: int) -> None:
        """Drop the object of a seized row, which is to be filled."""
        self._unlist(slab, row)
        self._set(slab, [row], RESERVED)

    def claim(self, slab: Slab, row: int) -> bool:
        """Seize a row that is free or has an object, which is evicted, to be filled. False: another process has it."""
        if slab.state[row] not in (FREE, STORED) or not self.seize(slab, row):
            return False
        if slab.state[row] == STORED:
            self.evict(slab, row)
            self.evicted += 1
        else:
            slab.state[row] = RESERVED
            self._tell_again(slab, [row])
        return True

    def _tell_again(self, slab: Slab, rows: Iterable[int]) -> None:
        """Free rows that are to be filled, and have had an object before, are told again to be free, unless this
        process has told that."""
        if untold := [row for row in rows if slab.generation[row] and not slab.told[row]]:
            self._dirty[slab].update(untold)

    def move(self, source: RowAddress, target: RowAddress) -> None:
        """A claimed row has been filled with an object of another slab, which is about to be removed: the object lies
        there now, as old and as much used as it was."""
        (slab, row), (other, at) = source, target
        name, length = slab.names[row], int(slab.length[row])
        # Of two with one name all processes keep the newer one, until the other is gone with its slab.
        self.keep(other, [at], [name], [length], int(slab.stored[row]) + 1)
        other.used[at], other.uses[at] = slab.used[row], slab.uses[row]
        slab.state[row] = FREE

    def keep(self, slab: Slab, rows: Sequence[int], names: Sequence[str], lengths: Sequence[int], now_ns: int) -> None:
        """Seized rows have been filled: they are STORED."""
        for name in names:
            if name in self.entries:  # expired
                self._unlist(*self.place(name))
        self._set(slab, rows, STORED)
        slab.length[rows], slab.stored[rows] = lengths, now_ns
        for row, name in zip(rows, names, strict=True):
            slab.names[row] = name
            self.entries[name] = slab.number << 32 | row
            self._count_group(slab, row, 1)
        self.bytes += sum(lengths)

    def _set(self, slab: Slab, rows: Sequence[int], state: int) -> None:
        assert self.held[slab].issuperset(rows), f"{slab.path}: rows {rows} are not all ours to change"
        slab.state[rows] = state
        slab.generation[rows] += np.uint32(1)  # modulo 2**32
        slab.length[rows] = slab.used[rows] = slab.uses[rows] = 0
        slab.told[rows] = False  # until it is published
        self._dirty[slab].update(rows)

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
                slab.told[rows] = True
                self._let_go(slab, [row for row in rows if slab.state[row] != RESERVED])

    def repair(self) -> None:
        """Free rows whose entry fails its check (no process is writing it), and duplicates of a name."""
        unclear, self._unclear = self._unclear, set()
        for slab in unclear:
            broken = np.flatnonzero(slab.state >= BROKEN)
            for stripe in np.unique(slab.stripe(broken)).tolist():
                self._read(slab, *slab.rows_of(stripe))
            lost = 0
            for row in np.flatnonzero((slab.state == BROKEN) | (slab.state == DUPLICATE)).tolist():
                if self.seize(slab, row):
                    lost += bool(slab.state[row] == BROKEN)
                    self.drop(slab, row)
                elif slab.state[row] == BROKEN and row not in slab.unreadable and slab.is_unreadable(row):
                    slab.unreadable.add(row)
                    lost += 1
            self._say_lost(slab, lost)
            self._unclear.discard(slab)
            if (slab.state >= BROKEN).any():  # it cannot be read, or another process has it: tried again the next time
                self._unclear.add(slab)

    def _say_lost(self, slab: Slab, entries: int) -> None:
        if entries:
            self.lost += entries
            self._tell(f"{slab.path}: {entries} of its {slab.shape.slots} entries are damaged: their objects are lost")

    def say_damaged(self, number: int, why: object) -> None:
        """A slab cannot be used; said and counted once."""
        if number in self._damaged:
            return
        self._damaged.add(number)
        folder, objects = self.folder.model, 0
        with suppress(OSError):
            objects = Slab.count_of_stored(self.disk, folder, number)
        self.lost += max(1, objects)
        path = folder.path / slab_name(number)
        self._tell(f"{path} is damaged and not used, until its space is needed: {why}; {objects} objects are lost")

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

    # --- allocation

    def group_bytes(self, group: str) -> int:
        """The slots of a group's objects; counted where there is a quota."""
        return self._of_group.get(group, 0)

    def reserve(self, put: Put, slot_bytes: int, count: int) -> list[RowAddress]:
        """Seize up to `count` free rows of a class, to be filled; none if there is none, or other processes are filling
        all. A row that has had an object is noted as free again, unless this process has noted it: the process that
        dropped the object may have died before, and a reader would take the new bytes for it."""
        if slot_bytes in self._taken:
            return []
        for slab in [*self.slabs.values()]:
            if slab.shape.slot_bytes != slot_bytes or slab in put.busy or (put.low and not slab.is_solid()):
                continue
            busy = False
            while rows := slab.take_free(count):
                held = self.held.get(slab, ())  # dropped by this call
                seized = [row for row in rows if row in held]
                free = [*_adjacent(row for row in rows if row not in held)]
                try:
                    for first, length in free:
                        seized += self._seize(slab, first, length)
                except BaseException:  # also on an interrupt none of them stays locked
                    self._let_go(slab, (row for row in rows if row in self.held.get(slab, ())))
                    raise
                slab.state[seized] = RESERVED
                if seized:
                    self._tell_again(slab, seized)
                    if busy or len(seized) < len(rows):  # another process has the others for now
                        slab.move_on()
                    return [(slab, row) for row in sorted(seized)]
                busy |= bool((slab.state[rows] == FREE).any())
            if busy:
                put.busy.add(slab)
                put.contended = True
                slab.searched = False  # the next call tries again
        if not put.low and not any(slab.shape.slot_bytes == slot_bytes for slab in put.busy):
            self._taken.add(slot_bytes)
        return []

    # --- slabs, with the mutex held

    def add(self, slab: Slab, lock: AbstractContextManager[object], *, empty: bool) -> None:
        """Add a new slab, or one found with its contents. OSError: it is not added."""
        try:
            with lock:
                self.slabs[slab.number] = slab
                self._damaged.discard(slab.number)
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
        """Tell which slabs are found on disk, as no other process has the store open. `repair`: and remove slots
        without a table, which are left if a process dies while it makes or removes a slab."""
        found, folder = {}, self.folder.model
        if repair:
            self._say_without_tables()
        for number, whole in slab_numbers(self.disk, folder).items():
            slab = self._found(number, whole=whole, repair=repair)
            if slab is not None:
                found[number] = slab.identity
            elif repair and not whole:
                with suppress(OSError):  # it keeps its number until the next try
                    unlink(self.disk, folder, number, "a process that has died left its slots without a table")
        self.changes.begin(found)

    def read_all(self) -> None:
        """Take in all slabs found on disk, to be read alone; what a process changes from now on is taken over later."""
        numbers = slab_numbers(self.disk, self.folder.model)
        self.changes.pass_over(numbers)
        self._say_without_tables()
        for number, whole in numbers.items():
            slab = self._found(number, whole=whole, repair=False)
            if slab is not None:
                self.slabs[number] = slab
                for look in range(_LOOKS):
                    time.sleep(_PAUSE_S if look else 0)
                    self._read(slab, 0, slab.shape.slots)
                    if not (broken := int((slab.state == BROKEN).sum())):
                        break
                self._say_lost(slab, broken)

    def _say_without_tables(self) -> None:
        with suppress(OSError):
            if self.folder.alone() and (told := without_tables(self.disk, self.folder.model)):
                self._tell(told)

    def _found(self, number: int, *, whole: bool, repair: bool) -> Slab | None:
        """A slab on disk; None, and it is said, if it cannot be used."""
        try:
            return self._opened(number, alone=repair)
        except Broken as why:
            if whole and number in slab_numbers(self.disk, self.folder.model):  # else a process has removed it
                self.say_damaged(number, why)
        except OSError as error:
            self.lost += 1
            self._unopened.add(number)
            self._tell(f"{self.folder.model.path / slab_name(number)} is not used: {error}")
        return None

    def _opened(self, number: int, *, alone: bool = False) -> Slab:
        folder = self.folder
        return Slab.open(self.disk, folder.model, number, self.owner, alone=alone, read_only=folder.read_only)

    def hide(self, slab: Slab, row: int) -> None:
        """Have an object count as missing, of a store that is only read, until its entry is another one."""
        self._unlist(slab, row)
        slab.state[row] = RETIRED

    def states(self) -> dict[str, int]:
        """How many rows are in which state."""
        return states_of(self.slabs.values())
