"""Which slot of this process's files holds which object. Pure: time is an argument, and there is no I/O.

    free      -- reserve --> reserved: it is being written
    reserved  -- commit  --> live: it has an object, in the order of eviction of its size
    reserved  -- abort   --> at rest, as its write may still come
    live      -- removed or evicted --> free; at rest, if other processes may be reading it
    at rest   -- for REST_S --> free

Room moves from one size to another by files. A size without a free slot takes room that no file has; then it evicts its
own least recently used object, or a file of another size is retired, if the oldest object there has not been used for
twice as long. A file that is retired is removed whole, and none is ever made under its name again.
"""

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

from kvarve.storage.base import group_of, in_group
from kvarve.storage.hf3fs._slot_layout import MOST_PLACES, NUMBER_BITS, Extent, Slot, Title

REST_S = 150.0  # longer than any read or write takes that is not stuck for good
EXTENT_BYTES = 1 << 30
EXTENTS = 64  # into which a store is divided at least, unless its slots are larger
SPREAD = 4  # files that are filled in turn, while half of the room is in no file
AHEAD = 16  # of what others may read, a 16th of the slots of a size is free or at rest
_OLDER = 2.0


class Entry:
    """A slot that was given. `live`: it has the object; else it had. `used`: a number that grows with each use."""

    __slots__ = ("file", "generation", "label", "live", "name", "place", "size_bytes", "used")

    def __init__(self, file: "SlotFile", place: int) -> None:
        self.file, self.place, self.live = file, place, False
        file.slots[place] = self

    def set(self, label: bytes, name: str, generation: int, size_bytes: int) -> None:
        self.label, self.name, self.size_bytes = label, name, size_bytes
        self.generation = self.used = generation

    @property
    def slot(self) -> Slot:
        return Slot(self.file.extent, self.place, self.generation, self.size_bytes)

    @property
    def title(self) -> Title:
        return Title(self.label, self.name, self.slot)


class Order(OrderedDict[Entry, None]):
    """Objects, the next to be evicted first. `bytes`: of their slots, and of those that are reserved."""

    bytes = 0


class Size:
    """All slots of one size."""

    def __init__(self) -> None:
        self.places = 0
        self.free: deque[Entry] = deque()  # also of files that have gone
        self.fresh: deque[SlotFile] = deque()  # the same, with places that were never given; filled in turn
        self.lru = Order()


class SlotFile:
    """`taken`: how many slots are live or reserved; `held`: how many are reserved."""

    def __init__(self, extent: Extent, size: Size) -> None:
        self.extent, self.size, self.taken, self.held = extent, size, 0, 0
        self.slots: dict[int, Entry] = {}  # by place
        self.unused = [*reversed(range(extent.places))]


class SlotTable:
    """The objects of all labels in the files of one process, of at most `limit_bytes`. `shared`: other processes read
    them. What leaves stands in `evicted` and `retired`, for the caller to take. `first`: below all generations."""

    def __init__(self, quota_bytes: int | None, *, shared: bool = False, first: int = 0) -> None:
        self.quota_bytes, self._shared = quota_bytes, shared
        self.limit_bytes = self.own_bytes = 0  # of files
        self.owner = 0  # of new files
        self.objects: dict[bytes, dict[str, Entry]] = {}
        self.bytes: Counter[bytes] = Counter()  # of the objects of each label
        self.evictions: Counter[bytes] = Counter()
        self.files: dict[int, SlotFile] = {}
        self.known: set[int] = set()  # numbers of these files, and of those that were retired
        self.evicted: list[Title] = []
        self.retired: set[Extent] = set()
        self._sizes: dict[int, Size] = {}
        self._groups: dict[tuple[bytes, str], Order] = {}  # that share a quota
        self._empty: set[SlotFile] = set()
        self._resting: deque[tuple[float, Entry | SlotFile]] = deque()
        self._last = first

    # --- objects

    def find(self, label: bytes, names: Sequence[str]) -> list[Entry | None]:
        objects = self.objects.get(label, {})
        return [objects.get(name) for name in names]

    def at(self, slot: Slot) -> Entry | None:
        """The object of a slot, if it is still there."""
        file = self.files.get(slot.extent.number)
        entry = file.slots.get(slot.place) if file else None
        return entry if entry and entry.live and entry.generation == slot.generation else None

    def use(self, entries: Iterable[Entry]) -> None:
        """The last one is evicted last."""
        for entry in entries:
            entry.used = self.tick()
            for order in self._orders(entry):
                order.move_to_end(entry)

    def tick(self) -> int:
        self._last += 1  # above all generations and uses
        return self._last

    def remove(self, entry: Entry, now: float) -> None:
        """The object is gone."""
        del self.objects[entry.label][entry.name]
        self.bytes[entry.label] -= entry.size_bytes
        for order in self._orders(entry):
            del order[entry]
        entry.live = False
        self._vacate(entry, now, rests=self._shared)

    def left(self, label: bytes, group: str | None) -> list[Title]:
        """Objects of a label, or of one of its groups, that are gone, and whose headers may still be in their slots."""
        slots = (entry for file in self.files.values() for entry in file.slots.values() if entry.label == label)
        return [entry.title for entry in slots if not entry.live and in_group(entry.name, group)]

    # --- writing

    def reserve(self, label: bytes, name: str, slot_bytes: int, now: float, before: int) -> Entry | None:
        """A slot for an object that is not there; None: no room, even after evicting what was last used `before`."""
        self._settle(now)
        if slot_bytes > self.limit_bytes or not self._keep_quota(label, name, slot_bytes, now, before):
            return None
        size = self._sizes.setdefault(slot_bytes, Size())
        entry = self._free_slot(slot_bytes, size, now, before)
        if entry is not None:
            entry.set(label, name, self.tick(), 0)
            self._occupy(entry)
            entry.file.held += 1
            if self._shared and self.limit_bytes - self.own_bytes < slot_bytes:
                self._evict_ahead(size, now, before)
        return entry

    def commit(self, entry: Entry, now: float) -> None:
        """The object is written, of `entry.size_bytes`. Of two that were written under one name the first stays."""
        entry.file.held -= 1
        if entry.name in self.objects.get(entry.label, ()) or entry.file.extent.number not in self.files:
            self._vacate(entry, now, rests=self._shared)
        else:
            entry.used = self.tick()
            self._publish(entry)

    def abort(self, entry: Entry, now: float) -> None:
        entry.file.held -= 1
        self._vacate(entry, now, rests=True)

    # --- files

    def adopt(self, extent: Extent, titles: Iterable[Title], uses: Mapping[int, int], now: float) -> int:
        """A file of an earlier life, of this process or another, with the objects that its headers name; returns how
        many. `uses`: the last ones by the numbers of slots, as far as they are known. `sort` follows."""
        if extent.number in self.known:
            return 0
        file = self._add(extent)
        for title in titles:
            slot = title.slot
            self._last = max(self._last, slot.generation)
            if title.name not in self.objects.get(title.label, ()) and slot.place not in file.slots:
                entry = Entry(file, slot.place)
                entry.set(title.label, title.name, slot.generation, slot.size_bytes)
                entry.used = max(slot.generation, min(uses.get(slot.number, 0), self._last))
                self._occupy(entry)
                self._publish(entry)
        file.unused = [place for place in file.unused if place not in file.slots]
        self._resting.append((now + REST_S, file))
        if not file.taken:
            self._leave(file, now)  # which has nothing to lose
        return file.taken

    def uses(self) -> dict[int, int]:
        """The last use of each object, by the number of its slot."""
        return {entry.slot.number: entry.used for size in self._sizes.values() for entry in size.lru}

    def sort(self) -> None:
        """After files were adopted: all objects in the order of their last use, or writing."""
        for order in (*(size.lru for size in self._sizes.values()), *self._groups.values()):
            for entry in sorted(order, key=lambda entry: entry.used):
                order.move_to_end(entry)

    def forget(self, owners: Iterable[int], now: float) -> None:
        """The files of these owners are another process's now."""
        for file in [file for file in self.files.values() if file.extent.owner in owners]:
            self._leave(file, now, retired=False)
            self.known.discard(file.extent.number)

    def shrink(self, now: float) -> None:
        """Retire the files whose objects are worth least, down to the limit."""
        while self.own_bytes > self.limit_bytes and (file := self._worth_least(None)):
            self._leave(file, now)

    # --- inside: an entry's life

    def _settle(self, now: float) -> None:
        while self._resting and self._resting[0][0] <= now:
            _, rested = self._resting.popleft()
            if isinstance(rested, Entry):
                rested.file.size.free.append(rested)
            else:
                rested.size.fresh.append(rested)

    def _occupy(self, entry: Entry) -> None:
        entry.file.taken += 1
        self._empty.discard(entry.file)
        if self.quota_bytes is not None:
            self._group(entry.label, entry.name).bytes += entry.file.extent.slot_bytes

    def _publish(self, entry: Entry) -> None:
        entry.live = True
        self.bytes[entry.label] += entry.size_bytes
        self.objects.setdefault(entry.label, {})[entry.name] = entry
        for order in self._orders(entry):
            order[entry] = None

    def _vacate(self, entry: Entry, now: float, *, rests: bool) -> None:
        file = entry.file
        file.taken -= 1
        if not file.taken and file.extent.number in self.files:
            self._empty.add(file)
        if self.quota_bytes is not None:
            self._group(entry.label, entry.name).bytes -= file.extent.slot_bytes
        if rests:
            self._resting.append((now + REST_S, entry))
        else:
            file.size.free.append(entry)

    def _group(self, label: bytes, name: str) -> Order:
        return self._groups.setdefault((label, group_of(name)), Order())

    def _orders(self, entry: Entry) -> tuple[Order, ...]:
        """The orders of eviction that an object is in."""
        lru = entry.file.size.lru
        return (lru, self._group(entry.label, entry.name)) if self.quota_bytes is not None else (lru,)

    def _evict(self, entry: Entry, now: float) -> None:
        self.evictions[entry.label] += 1
        self.evicted.append(entry.title)
        self.remove(entry, now)

    def _evict_first(self, order: Order, now: float, before: int) -> bool:
        victim = next(iter(order), None)
        if victim is None or victim.used >= before:
            return False
        self._evict(victim, now)
        return True

    def _evict_ahead(self, size: Size, now: float, before: int) -> None:
        """Others may be reading what is evicted: so that the next writers find slots that have rested."""
        if size.places - len(size.lru) < max(1, size.places // AHEAD):
            self._evict_first(size.lru, now, before)

    # --- inside: room

    def _keep_quota(self, label: bytes, name: str, slot_bytes: int, now: float, before: int) -> bool:
        """Whether another slot is in the quota of its group, after evicting from that."""
        if self.quota_bytes is None or not group_of(name):
            return True
        group = self._group(label, name)
        while slot_bytes <= self.quota_bytes < group.bytes + slot_bytes:
            if not self._evict_first(group, now, before):
                return False
        return slot_bytes <= self.quota_bytes

    def _free_slot(self, slot_bytes: int, size: Size, now: float, before: int) -> Entry | None:
        """A slot of this size, after evicting if need be."""
        while True:
            while size.free:
                if (entry := size.free.popleft()).file.extent.number in self.files:
                    return entry
            while size.fresh:
                file = size.fresh.popleft()
                if file.unused and file.extent.number in self.files:
                    size.fresh.append(file)
                    return Entry(file, file.unused.pop())
            if self._grow(slot_bytes):
                continue
            other = self._worth_least(size)
            if other and not any(it.live and it.used >= before for it in other.slots.values()):
                self._leave(other, now)
            elif self._shared:
                self._evict_ahead(size, now, before)
                return None
            elif not self._evict_first(size.lru, now, before):
                return None

    def _grow(self, slot_bytes: int) -> bool:
        """Whether there was room for another file, or several."""
        most = min(MOST_PLACES, max(1, min(EXTENT_BYTES, self.limit_bytes // EXTENTS) // slot_bytes))
        fresh = self._sizes[slot_bytes].fresh
        for _ in range(SPREAD if 2 * self.own_bytes <= self.limit_bytes else 1):
            if places := min(most, max(0, self.limit_bytes - self.own_bytes) // slot_bytes):
                fresh.append(self._add(Extent(slot_bytes, places, secrets.randbits(NUMBER_BITS), self.owner)))
        return bool(fresh)

    def _add(self, extent: Extent) -> SlotFile:
        size = self._sizes.setdefault(extent.slot_bytes, Size())
        size.places += extent.places
        file = self.files[extent.number] = SlotFile(extent, size)
        self._empty.add(file)
        self.known.add(extent.number)
        self.own_bytes += extent.bytes
        return file

    def _leave(self, file: SlotFile, now: float, *, retired: bool = True) -> None:
        for entry in [entry for entry in file.slots.values() if entry.live]:
            (self._evict if retired else self.remove)(entry, now)
        del self.files[file.extent.number]
        self._empty.discard(file)
        file.size.places -= file.extent.places
        self.own_bytes -= file.extent.bytes
        if retired:
            self.retired.add(file.extent)

    def _worth_least(self, size: Size | None) -> SlotFile | None:
        """A file to be retired for the sake of a size (None: of any) that has no free slot and no room."""
        if empty := next((file for file in self._empty if file.size is not size), None):
            return empty
        others = (other for other in self._sizes.values() if other is not size)
        heads = (next((entry for entry in other.lru if not entry.file.held), None) for other in others)
        oldest = min(filter(None, heads), key=lambda head: head.used, default=None)
        own = next(iter(size.lru), None) if size else None
        if oldest is None or (own and self._last - oldest.used <= _OLDER * (self._last - own.used)):
            return None
        return oldest.file
