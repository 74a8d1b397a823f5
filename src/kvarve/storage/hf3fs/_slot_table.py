"""Which slot of this process's files holds which object. Pure: time is an argument, and there is no I/O.

    free         -- reserve --> reserved: it is being written
    reserved     -- commit  --> an object's, in the order of eviction of its size
    reserved     -- abort   --> at rest, as its write may still come
    an object's  -- removed or evicted, and not pinned --> free; at rest, if other processes may be reading it
    at rest      -- for REST_S --> free

Room moves from one size to another by files. A size without a free slot takes room that no file has; then it evicts its
own least recently used object, or a file of another size is retired, if the oldest object there has not been used for
twice as long. A file that is retired is removed whole, and none is ever made under its name again.
"""

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

from kvarve.storage.base import group_of
from kvarve.storage.hf3fs._slot_layout import MOST_PLACES, NUMBER_BITS, Extent, Slot, Title

REST_S = 150.0  # longer than any read or write takes that is not stuck for good
EXTENT_BYTES = 1 << 30
EXTENTS = 64  # into which a store is divided at least, unless its slots are larger
SPREAD = 4  # files that are filled in turn, while half of the room is in no file
AHEAD = 16  # of what others may read, a 16th of the slots of a size is free or at rest
_OLDER = 2.0


class Entry:
    """A slot that is not free. `live`: it has an object. `used`: in microseconds."""

    __slots__ = ("file", "generation", "label", "live", "name", "pins", "place", "size_bytes", "used")

    def __init__(self, file: "SlotFile", place: int, generation: int, label: bytes, name: str, size_bytes: int) -> None:
        self.file, self.place, self.generation, self.label, self.name = file, place, generation, label, name
        self.size_bytes, self.used, self.pins, self.live = size_bytes, generation, 0, False

    @property
    def slot(self) -> Slot:
        return Slot(self.file.extent, self.place, self.generation, self.size_bytes)


class SlotFile:
    """`taken`: how many slots have an entry; `held`: how many are reserved, and pins."""

    def __init__(self, extent: Extent, size: "Size") -> None:
        self.extent, self.size, self.taken, self.held = extent, size, 0, 0
        self.slots: list[Entry | None] = [None] * extent.places


class Size:
    """All slots of one size."""

    def __init__(self) -> None:
        self.files = self.places = 0
        self.free: deque[tuple[SlotFile, int]] = deque()  # also of files that have gone
        self.lru: OrderedDict[Entry, None] = OrderedDict()  # the next victim first


class Group(OrderedDict[Entry, None]):
    """The objects of a label that share a quota, in order of use, and the reserved slots. `bytes`: of all slots."""

    bytes = 0


class SlotTable:
    """The objects of all labels in the files of one process. `shared`: other processes read them. What leaves stands in
    `evicted` and `retired`, for the caller to take."""

    def __init__(self, capacity_bytes: int, quota_bytes: int | None, *, shared: bool = False) -> None:
        self.capacity_bytes, self.quota_bytes = capacity_bytes, quota_bytes
        self._limited, self._shared = quota_bytes is not None, shared
        self.others_bytes = self.own_bytes = 0  # of files, of other processes and of this one
        self.owner = 0  # of new files
        self.objects: dict[bytes, dict[str, Entry]] = {}
        self.bytes: Counter[bytes] = Counter()  # of the objects of each label
        self.evictions: Counter[bytes] = Counter()
        self.files: dict[int, SlotFile] = {}
        self.known: set[int] = set()  # numbers of these files, and of those that were retired
        self.evicted: list[Entry] = []
        self.retired: list[Extent] = []
        self._sizes: dict[int, Size] = {}
        self._groups: dict[tuple[bytes, str], Group] = {}
        self._empty: set[SlotFile] = set()
        self._resting: deque[tuple[float, SlotFile, int]] = deque()
        self._last = self._ahead = 0

    @property
    def room_bytes(self) -> int:
        """In no file."""
        return self.capacity_bytes - self.others_bytes - self.own_bytes

    # --- objects

    def find(self, label: bytes, names: Sequence[str]) -> list[Entry | None]:
        objects = self.objects.get(label, {})
        return [objects.get(name) for name in names]

    def at(self, slot: Slot) -> Entry | None:
        """The object of a slot, if it is still there."""
        file = self.files.get(slot.extent.number)
        entry = file.slots[slot.place] if file and slot.place < len(file.slots) else None
        return entry if entry and entry.live and entry.generation == slot.generation else None

    def use(self, entries: Sequence[Entry], now: float) -> None:
        """The first is evicted last."""
        for entry in reversed(entries):
            entry.used = self._tick(now)
            entry.file.size.lru.move_to_end(entry)
            if self._limited:
                self._group(entry).move_to_end(entry)

    def pin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins += 1
            entry.file.held += 1

    def unpin(self, entries: Iterable[Entry], now: float) -> None:
        for entry in entries:
            entry.pins -= 1
            entry.file.held -= 1
            if not entry.pins and not entry.live:
                self._vacate(entry, now, rests=self._shared)

    def remove(self, entry: Entry, now: float) -> None:
        """The object is gone."""
        del self.objects[entry.label][entry.name], entry.file.size.lru[entry]
        entry.live = False
        self.bytes[entry.label] -= entry.size_bytes
        if not entry.pins:
            self._vacate(entry, now, rests=self._shared)

    # --- writing

    def reserve(self, label: bytes, name: str, slot_bytes: int, now: float) -> Entry | None:
        """A slot for an object that is not there; None: there is no room, even after evicting what is not pinned."""
        while self._resting and self._resting[0][0] <= now:
            _, file, place = self._resting.popleft()
            file.size.free.append((file, place))
        if slot_bytes > self.own_bytes + self.room_bytes or not self._is_in_quota(label, name, slot_bytes, now):
            return None
        found = self._free_slot(slot_bytes, now)
        if found is None:
            return None
        entry, size = Entry(*found, self._tick(now), label, name, 0), found[0].size
        self._occupy(entry)
        entry.file.held += 1
        if self._shared and self.room_bytes < slot_bytes:
            self._evict_ahead(size, now)
        return entry

    def commit(self, entry: Entry, now: float) -> None:
        """The object is written, of `entry.size_bytes`. Of two that were written under one name the first stays."""
        entry.file.held -= 1
        if entry.name in self.objects.get(entry.label, ()) or entry.file.extent.number not in self.files:
            self._vacate(entry, now, rests=self._shared)
        else:
            entry.used = self._tick(now)
            self._publish(entry)

    def abort(self, entry: Entry, now: float) -> None:
        entry.file.held -= 1
        self._vacate(entry, now, rests=True)

    # --- files

    def adopt(self, extent: Extent, titles: Iterable[Title], order: Mapping[int, int] | None, now: float) -> int:
        """A file of an earlier life, of this process or another, with the objects that its headers name; returns how
        many. `order`: the place of each slot that had one when all writes had ended; None: some may still come."""
        if extent.number in self.known:
            return 0
        file, found = self._add(extent), 0
        for title in titles:
            slot = title.slot
            self._ahead = max(self._ahead, slot.generation - int(1e6 * now))
            if order is not None and slot.number not in order:  # its object had left it
                continue
            if title.name not in self.objects.get(title.label, ()) and file.slots[slot.place] is None:
                entry = Entry(file, slot.place, slot.generation, title.label, title.name, slot.size_bytes)
                if order is not None:
                    entry.used = order[slot.number] - len(order)  # until `in_order`
                self._occupy(entry)
                self._publish(entry)
                found += 1
        for place in range(extent.places):
            if file.slots[place] is None and order is None:
                self._resting.append((now + REST_S, file, place))
            elif file.slots[place] is None:
                file.size.free.append((file, place))
        if not found:
            self._retire(file, now)  # which has nothing to lose
        return found

    def in_order(self) -> None:
        """After files were adopted: all objects in the order of their last use, which was after their writing, and that
        of all before them in their owner's order."""
        entries = (entry for size in self._sizes.values() for entry in size.lru if entry.used < 0)
        last = Counter[int]()
        for entry in sorted(entries, key=lambda entry: entry.used):
            owner = entry.file.extent.owner
            entry.used = last[owner] = max(last[owner] + 1, entry.generation)
            self._last = max(self._last, entry.used)
        for lru in (*(size.lru for size in self._sizes.values()), *self._groups.values()):
            for entry in sorted(lru, key=lambda entry: entry.used):
                lru.move_to_end(entry)

    def order(self, owner: int, now: float) -> list[int] | None:
        """An owner's slots that have objects, used last comes last; None: a write may still come."""
        if self._resting and self._resting[-1][0] > now:
            return None
        entries = sorted((entry for size in self._sizes.values() for entry in size.lru), key=lambda entry: entry.used)
        return [entry.slot.number for entry in entries if entry.file.extent.owner == owner]

    def forget(self, owner: int, now: float) -> None:
        """The files of an owner are another process's now."""
        for file in [file for file in self.files.values() if file.extent.owner == owner]:
            self._leave(file, now)
            self.known.discard(file.extent.number)

    def shrink(self, excess_bytes: int, now: float) -> None:
        """Retire files whose objects are worth least, for as many bytes."""
        left_bytes = self.own_bytes - excess_bytes
        while self.own_bytes > left_bytes and (file := self._worth_least(None, now)):
            self._retire(file, now)

    # --- inside: an entry's life

    def _tick(self, now: float) -> int:
        """The time in microseconds, never twice the same, and after all that was written here, by whatever clock."""
        self._last = max(self._last + 1, int(1e6 * now) + self._ahead)
        return self._last

    def _occupy(self, entry: Entry) -> None:
        entry.file.slots[entry.place] = entry
        entry.file.taken += 1
        self._empty.discard(entry.file)
        if self._limited:
            group = self._group(entry)
            group[entry] = None
            group.bytes += entry.file.extent.slot_bytes

    def _publish(self, entry: Entry) -> None:
        entry.live = True
        self.bytes[entry.label] += entry.size_bytes
        self.objects.setdefault(entry.label, {})[entry.name] = entry
        entry.file.size.lru[entry] = None

    def _vacate(self, entry: Entry, now: float, *, rests: bool) -> None:
        """The slot is nobody's."""
        file = entry.file
        file.slots[entry.place] = None
        file.taken -= 1
        if not file.taken and file.extent.number in self.files:
            self._empty.add(file)
        if self._limited:
            group = self._group(entry)
            del group[entry]
            group.bytes -= file.extent.slot_bytes
        if rests:
            self._resting.append((now + REST_S, file, entry.place))
        else:
            file.size.free.append((file, entry.place))

    def _evict(self, entry: Entry, now: float) -> None:
        self.evictions[entry.label] += 1
        self.evicted.append(entry)
        self.remove(entry, now)

    def _evict_first(self, lru: Iterable[Entry], now: float) -> bool:
        victim = _first(lru)
        if victim is not None:
            self._evict(victim, now)
        return victim is not None

    def _evict_ahead(self, size: Size, now: float) -> None:
        """Others may be reading what is evicted: so that the next writers find slots that have rested."""
        if size.places - len(size.lru) < max(1, size.places // AHEAD):
            self._evict_first(size.lru, now)

    # --- inside: room

    def _group(self, entry: Entry) -> Group:
        return self._groups.setdefault((entry.label, group_of(entry.name)), Group())

    def _is_in_quota(self, label: bytes, name: str, slot_bytes: int, now: float) -> bool:
        if self.quota_bytes is None or not group_of(name):
            return True
        group = self._groups.get((label, group_of(name)), Group())
        while slot_bytes <= self.quota_bytes < group.bytes + slot_bytes:
            if not self._evict_first(group, now):
                return False
        return slot_bytes <= self.quota_bytes

    def _free_slot(self, slot_bytes: int, now: float) -> tuple[SlotFile, int] | None:
        """A slot of this size, after evicting if need be."""
        while True:
            size = self._sizes.get(slot_bytes)
            while size is not None and size.free:
                file, place = size.free.popleft()
                if file.extent.number in self.files:
                    return file, place
            if self._grow(slot_bytes):
                continue
            if other := self._worth_least(size, now):
                self._retire(other, now)
            elif size is not None and self._shared:
                self._evict_ahead(size, now)
                return None
            elif size is None or not self._evict_first(size.lru, now):
                return None

    def _grow(self, slot_bytes: int) -> bool:
        """Whether there was room for another file, or several."""
        most = min(MOST_PLACES, max(1, min(EXTENT_BYTES, self.capacity_bytes // EXTENTS) // slot_bytes))
        free: list[tuple[int, SlotFile]] = []
        for _ in range(SPREAD if 2 * self.room_bytes >= self.capacity_bytes else 1):
            if places := min(most, max(0, self.room_bytes) // slot_bytes):
                file = self._add(Extent(slot_bytes, places, secrets.randbits(NUMBER_BITS), self.owner))
                free += [(place, file) for place in range(places)]
        for place, file in sorted(free, key=lambda each: each[0]):
            file.size.free.append((file, place))
        return bool(free)

    def _add(self, extent: Extent) -> SlotFile:
        size = self._sizes.setdefault(extent.slot_bytes, Size())
        size.files += 1
        size.places += extent.places
        file = self.files[extent.number] = SlotFile(extent, size)
        self._empty.add(file)
        self.known.add(extent.number)
        self.own_bytes += extent.bytes
        return file

    def _leave(self, file: SlotFile, now: float) -> None:
        extent, size = file.extent, file.size
        for entry in file.slots:
            if entry is not None and entry.live:
                self.remove(entry, now)
        del self.files[extent.number]
        self._empty.discard(file)
        size.files -= 1
        size.places -= extent.places
        self.own_bytes -= extent.bytes
        if not size.files:
            del self._sizes[extent.slot_bytes]

    def _retire(self, file: SlotFile, now: float) -> None:
        for entry in file.slots:
            if entry is not None:
                self._evict(entry, now)
        self._leave(file, now)
        self.retired.append(file.extent)

    def _worth_least(self, size: Size | None, now: float) -> SlotFile | None:
        """A file to be retired for the sake of a size (None: of any) that has no free slot and no room."""
        if empty := next((file for file in self._empty if file.size is not size), None):
            return empty
        others = (other for other in self._sizes.values() if other is not size)
        heads = (next((entry for entry in other.lru if not entry.file.held), None) for other in others)
        oldest = min(filter(None, heads), key=lambda head: head.used, default=None)
        own, time = _first(size.lru) if size else None, self._tick(now)
        if oldest is None or (own and time - oldest.used <= _OLDER * (time - own.used)):
            return None
        return oldest.file


def _first(lru: Iterable[Entry]) -> Entry | None:
    """The next to be evicted."""
    return next((entry for entry in lru if entry.live and not entry.pins), None)
