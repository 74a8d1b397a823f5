"""Which slot holds which object: the decisions of a metadata service. Pure: time is an argument, and there is no I/O.

Room moves from one size to another by extents. A size without a free slot takes unallocated room; then it evicts its
own least recently used object, or one extent of another size is emptied, if the oldest object there has not been used
for twice as long. An emptied extent is retired, and its room given again when its file is gone.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from kvarve.storage.base import StorageUsage, group_of, in_group
from kvarve.storage.hf3fs.metadata.entries import (
    COMMITTED,
    QUARANTINED,
    RESERVED,
    Entry,
    Group,
    Home,
    Reader,
    Request,
    Row,
    Size,
    SlotExtent,
)
from kvarve.storage.hf3fs.metadata.service import MOST_PLACES, SLOT_ALIGNMENT, Extent, Found, Slot

QUARANTINE_S = 120.0  # longer than any write takes that is not stuck for good
MOST_S = 600.0  # for which anything can be pinned, reserved or rebuilt without asking again
MOST_PINS = 1 << 20
MOST_SIZES = 256
MOST_LABELS = 1 << 12  # that are remembered without having a slot
_MOST_NUMBER = 1 << 53  # that is exact also in Lua
EXTENT_BYTES = 1 << 30
EXTENTS = 64  # into which a store is divided at least, unless its slots are larger
SPREAD = 4  # extents of a size that are filled at a time, while half of the room is unallocated
_RETIRED_A_CALL = 4
_OLDER = 2.0
_SAVED_S = 600.0  # how old the use of an object is at most that the journal knows


class SlotTable:
    """The slots of one store, of all labels. Every call is given the time, which never goes back.

    `first`: the epoch and the extent after which it counts, see `first_numbers`. `empty`: nothing was ever stored, so
    there is nothing to rebuild. `journal`: `changes` has what changed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        quota_bytes: int | None,
        first: tuple[int, int],
        *,
        empty: bool = True,
        journal: bool = False,
        extents: int = EXTENTS,
    ) -> None:
        self.capacity_bytes, self.quota_bytes, self._extents = capacity_bytes, quota_bytes, extents
        self.epoch, self.next_extent = first
        self.built = empty
        self._builder: tuple[int, float] | None = None
        self._room = capacity_bytes  # in no extent
        self._homes: dict[bytes, Home] = {}
        self._sizes: dict[int, Size] = {}
        self._groups: dict[tuple[bytes, str], Group] = {}
        self._empty: OrderedDict[SlotExtent, None] = OrderedDict()  # open, and all their slots are free
        self._leaving: dict[Extent, SlotExtent] = {}
        self._leaving_bytes = 0
        self._readers: dict[int, Reader] = {}
        # Readers whose pins are still to be put on (True) or taken off, in order: no answer waits for that, see `tidy`.
        self._untidy: list[tuple[bool, Reader]] = []
        self._pins = 0
        self._requests: dict[tuple[bytes, int], Request] = {}
        self._timers: list[tuple[float, int, object]] = []
        self._timer = self._quarantined = 0
        self._now = 0.0
        self._changed: dict[tuple[int, int], Entry | None] | None = {} if journal else None
        self.layout_changed = False  # the extents, or whether the store is rebuilt

    def configure(self, capacity_bytes: int, quota_bytes: int | None) -> None:
        """The last process that opened a store says how much it may hold."""
        self.tidy()
        self._room += capacity_bytes - self.capacity_bytes
        self.capacity_bytes = capacity_bytes
        if quota_bytes != self.quota_bytes:
            self.quota_bytes = quota_bytes
            self._groups.clear()
            lru = [entry for size in self._sizes.values() for entry in size.lru]
            for entry in self._entries():
                entry.group = None if entry.state == QUARANTINED else self._group(entry.home, entry.name)
                if entry.group:
                    entry.group.bytes += entry.extent.size.slot_bytes
            for entry in lru:
                if entry.group:
                    entry.group.lru[entry] = None
        while self._gain(0, None, self._now):
            pass

    # --- objects

    def exists(self, label: bytes, names: Sequence[str]) -> list[bool]:
        objects = self._objects(label)
        return [name in objects for name in names]

    def lookup(self, label: bytes, names: Sequence[str], reader: int, pin_s: float, now: float) -> list[Found | None]:
        found = self.find(label, names, reader, pin_s, now)
        return [None if entry is None else Found(entry.slot, entry.size_bytes) for entry in found]

    def find(self, label: bytes, names: Sequence[str], reader: int, pin_s: float, now: float) -> list[Entry | None]:
        """`lookup`, before anything is made of what it has found."""
        now = self._advance(now)
        self._unpin(reader)
        objects = self._objects(label)
        found = [*map(objects.get, names)]
        pinned = [*filter(None, found)]
        while self._readers and self._pins + len(pinned) > MOST_PINS:
            self._unpin(next(iter(self._readers)))
        if pinned:
            until = now + min(pin_s, MOST_S)
            self._readers[reader] = reading = Reader(until, pinned)
            self._untidy.append((True, reading))
            self._pins += len(pinned)
            self._at(until, reader)
        return found

    def release(self, reader: int, now: float) -> None:
        self._advance(now)
        if (reading := self._readers.pop(reader, None)) is not None:
            self._untidy.append((False, reading))

    def tidy(self) -> None:
        """Work that no answer waits for; each call begins with what is left of it."""
        untidy, self._untidy = self._untidy, []
        for begins, reading in untidy:
            if begins:
                self._pin(reading.entries)
                for entry in reading.entries:
                    self._mark(entry, self._now)
            else:
                self._pins -= len(reading.entries)
                self._let_go(reading.entries)

    def touch(self, label: bytes, names: Sequence[str], now: float) -> None:
        now = self._advance(now)
        objects = self._objects(label)
        for name in reversed(names):
            if (entry := objects.get(name)) is not None:
                self._use(entry, now)

    def delete(self, label: bytes, names: Sequence[str], slots: Sequence[Slot] | None, now: float) -> list[bool]:
        self._advance(now)
        objects = self._objects(label)
        gone = []
        for at, name in enumerate(names):
            entry = objects.get(name)
            gone.append(entry is not None and (slots is None or slots[at] == entry.slot))
            if entry is not None and gone[-1]:
                self._remove(entry)
        return gone

    def drop(self, label: bytes, group: str | None, now: float) -> int:
        names = [name for name in self._objects(label) if in_group(name, group)]
        return sum(self.delete(label, names, None, now))

    def usage(self, label: bytes) -> StorageUsage:
        home = self._homes.get(label) or Home(label)
        return StorageUsage(len(home.objects), home.bytes, self.capacity_bytes, home.evicted)

    # --- writing

    def reserve(
        self,
        label: bytes,
        request: int,
        names: Sequence[str],
        slot_bytes: Sequence[int],
        for_s: float,
        now: float,
    ) -> list[Slot | bool]:
        now = self._advance(now)
        home = self._home(label)
        kept = [entry for name in names if (entry := home.objects.get(name)) is not None]
        self._pin(kept)
        self._gain(0, None, now)  # if the capacity is less than it was, and something was in use then
        asked = self._requests.get((label, request)) or Request()
        answers = [self._reserve(home, asked, name, size, now) for name, size in zip(names, slot_bytes, strict=True)]
        for entry in reversed(kept):
            self._mark(entry, now)
        self._let_go(kept)
        if asked.entries:
            asked.until = now + min(for_s, MOST_S)
            self._requests[label, request] = asked
            self._at(asked.until, (label, request))
            for entry in asked.entries.values():
                entry.request, entry.until = request, asked.until
                self._change(entry)
        return answers

    def commit(
        self,
        label: bytes,
        request: int,
        names: Sequence[str],
        slots: Sequence[Slot],
        sizes: Sequence[int],
        now: float,
    ) -> list[bool]:
        now = self._advance(now)
        home, asked = self._home(label), self._requests.get((label, request)) or Request()
        for name, slot, size_bytes in reversed([*zip(names, slots, sizes, strict=True)]):
            entry = asked.entries.get(name)
            if entry is not None and entry.slot == slot:
                assert 0 <= size_bytes <= slot.slot_bytes
                del asked.entries[name]
                if name in home.objects:  # and all that was written here has been
                    self._free(entry)
                else:
                    entry.size_bytes = size_bytes
                    self._publish(entry, now)
        if not asked.entries:
            self._requests.pop((label, request), None)
        return [name in home.objects for name in names]

    def abort(self, label: bytes, request: int, slots: Sequence[Slot], now: float) -> None:
        now = self._advance(now)
        if (asked := self._requests.get((label, request))) is None:
            return
        mine = {entry.slot: name for name, entry in asked.entries.items()}
        for slot in {*slots} & {*mine}:
            self._quarantine(asked.entries.pop(mine[slot]), now + QUARANTINE_S)
        if not asked.entries:
            del self._requests[label, request]

    # --- extents

    def retired(self, listed: Sequence[Extent]) -> list[Extent]:
        gone = [name for name, extent in self._leaving.items() if not extent.live]
        if self.built:
            gone += [name for name in dict.fromkeys(listed) if not self._knows(name)]
        return gone

    def removed(self, extents: Sequence[Extent]) -> None:
        for name in extents:
            extent = self._leaving.get(name)
            if extent is not None and not extent.live:
                del self._leaving[name]
                self._leaving_bytes -= extent.bytes
                self._room += extent.bytes
                del extent.size.extents[extent.number]
                if not extent.size.extents:
                    del self._sizes[extent.size.slot_bytes]
                self.layout_changed = True

    # --- after a loss

    def adopt(
        self, label: bytes, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int], now: float
    ) -> list[bool]:
        now = self._advance(now)
        home, done = self._home(label), []
        for name, slot, size_bytes in zip(names, slots, sizes, strict=True):
            known = home.objects.get(name)
            extent = None if known or self.built else self._extent_for(slot, now)
            if extent is not None and extent.slots[slot.place] is None and not extent.leaves:
                self.epoch = max(self.epoch, slot.epoch)
                extent.free.remove(slot.place)
                entry = self._occupy(extent, slot.place, slot.epoch, home, name)
                entry.size_bytes = size_bytes
                self._publish(entry, now)
                known = entry
            done.append(known is not None and known.slot == slot)
        return done

    def rebuilding(self, builder: int, for_s: float, now: float) -> bool:
        now = self._advance(now)
        if self.built or (self._builder and self._builder[0] != builder and self._builder[1] > now):
            return False
        self._builder = (builder, now + min(for_s, MOST_S))
        return True

    def rebuilt(self, builder: int) -> None:
        if self._builder and self._builder[0] == builder:
            self.built, self._builder, self.layout_changed = True, None, True

    # --- the next life

    def changes(self) -> tuple[list[Row], list[tuple[int, int]]]:
        """The rows that have changed since the last call, and the slots (bytes, number) that are free now."""
        assert self._changed is not None
        rows = [_row(entry) for entry in self._changed.values() if entry is not None]
        freed = [place for place, entry in self._changed.items() if entry is None]
        self._changed.clear()
        return rows, freed

    def extents(self) -> Iterator[tuple[Extent, int, bool]]:
        """Every extent, how many slots it has, and whether it is to be removed."""
        for size in self._sizes.values():
            for extent in size.extents.values():
                yield extent.name, len(extent.slots), extent.leaves

    def restore(self, extents: Iterable[tuple[Extent, int, bool]], rows: Iterable[Row], now: float) -> None:
        """Take over what an earlier table had. Times that the clock has not seen yet are cut to what is allowed."""
        now = self._advance(now)
        leaving = []
        for name, places, leaves in extents:
            extent = self._add_extent(name.slot_bytes, name.number, places)
            leaving += [extent] * leaves
        for row in sorted(rows, key=lambda row: row.used):
            extent = self._sizes[row.slot_bytes].extents[row.number // MOST_PLACES]
            entry = self._occupy(extent, row.number % MOST_PLACES, row.epoch, self._home(row.label), row.name)
            entry.size_bytes, entry.used = row.size_bytes, min(row.used, now)
            entry.until = min(row.until, now + MOST_S)
            self.epoch = max(self.epoch, row.epoch)
            if row.state == COMMITTED:
                self._publish(entry, entry.used)
            elif row.state == RESERVED:
                entry.request = row.request
                asked = self._requests.setdefault((row.label, row.request), Request())
                asked.until = max(asked.until, entry.until)
                asked.entries[row.name] = entry
                self._at(asked.until, (row.label, row.request))
            else:  # also of what a reader had pinned
                self._quarantine(entry, max(entry.until, now + QUARANTINE_S))
        for size in self._sizes.values():
            for extent in size.extents.values():
                extent.free = [place for place in extent.free if extent.slots[place] is None]
                if not extent.free:
                    del size.open[extent]
        for extent in leaving:
            self._retire(extent)
        if self._changed is not None:
            self._changed.clear()
        self.layout_changed = False

    # --- inside: names

    def _objects(self, label: bytes) -> dict[str, Entry]:
        home = self._homes.get(label)
        return home.objects if home else {}

    def _home(self, label: bytes) -> Home:
        if label not in self._homes and len(self._homes) >= MOST_LABELS:
            self._homes = {label: home for label, home in self._homes.items() if home.slots}
        return self._homes.setdefault(label, Home(label))

    def _group(self, home: Home, name: str) -> Group | None:
        group = group_of(name)
        return self._groups.setdefault((home.label, group), Group()) if group and self.quota_bytes else None

    def _entries(self) -> Iterator[Entry]:
        for size in self._sizes.values():
            for extent in size.extents.values():
                yield from (entry for entry in extent.slots if entry is not None)

    # --- inside: an entry's states

    def _reserve(self, home: Home, asked: Request, name: str, slot_bytes: int, now: float) -> Slot | bool:
        if name in home.objects:
            return True
        entry = asked.entries.get(name)
        if entry is None:
            assert slot_bytes > 0 and not slot_bytes % SLOT_ALIGNMENT
            extent = self._extent_with_room(home, name, slot_bytes, now)
            if extent is None:
                return False
            self.epoch += 1
            entry = asked.entries[name] = self._occupy(extent, extent.free.pop(), self.epoch, home, name)
            extent.size.open.move_to_end(extent)
            if not extent.free:
                del extent.size.open[extent]
        return entry.slot

    def _occupy(self, extent: SlotExtent, place: int, epoch: int, home: Home, name: str) -> Entry:
        entry = Entry(extent, place, epoch, home, name, self._group(home, name))
        if entry.group:
            entry.group.bytes += extent.size.slot_bytes
        extent.slots[place] = entry
        extent.live += 1
        home.slots += 1
        self._empty.pop(extent, None)
        return entry

    def _publish(self, entry: Entry, now: float) -> None:
        entry.state, entry.used, entry.request, entry.until = COMMITTED, now, 0, 0.0
        entry.home.objects[entry.name] = entry
        entry.home.bytes += entry.size_bytes
        self._into_lru(entry)
        self._change(entry)

    def _remove(self, entry: Entry) -> None:
        """A committed object ends; its slot is free when nobody reads it any more."""
        del entry.home.objects[entry.name]
        entry.home.bytes -= entry.size_bytes
        if entry.pins:
            self._quarantine(entry, None)
        else:
            self._out_of_lru(entry)
            self._free(entry)

    def _quarantine(self, entry: Entry, until: float | None) -> None:
        """Until then; None: until the last reader lets go."""
        self._leave_group(entry)
        entry.state, entry.until, entry.request = QUARANTINED, until or 0.0, 0
        if until is not None:
            self._quarantined += 1
            self._at(until, entry)
        self._change(entry)

    def _evict(self, entry: Entry) -> None:
        entry.home.evicted += 1
        self._remove(entry)

    def _free(self, entry: Entry) -> None:
        self._leave_group(entry)
        extent, slot = entry.extent, entry.slot
        extent.slots[slot.place] = None
        extent.live -= 1
        entry.home.slots -= 1
        extent.free.append(slot.place)
        if not extent.leaves:
            self._open(extent)
        if self._changed is not None:
            self._changed[slot[:2]] = None

    def _leave_group(self, entry: Entry) -> None:
        if entry.group:
            entry.group.bytes -= entry.extent.size.slot_bytes
            if not entry.group.bytes:
                self._groups.pop((entry.home.label, group_of(entry.name)), None)
            entry.group = None

    # --- inside: the order of use

    def _mark(self, entry: Entry, now: float) -> None:
        entry.used = now
        if now - entry.saved > _SAVED_S:
            self._change(entry)

    def _use(self, entry: Entry, now: float) -> None:
        self._mark(entry, now)
        if not entry.pins:
            entry.extent.size.lru.remove(entry)
            entry.extent.size.lru.append(entry)
            if entry.group:
                entry.group.lru.move_to_end(entry)

    def _into_lru(self, entry: Entry) -> None:
        entry.extent.size.lru.append(entry)
        entry.extent.evictable += 1
        if entry.group:
            entry.group.lru[entry] = None

    def _out_of_lru(self, entry: Entry) -> None:
        entry.extent.size.lru.remove(entry)
        entry.extent.evictable -= 1
        if entry.group:
            del entry.group.lru[entry]

    def _pin(self, entries: Sequence[Entry]) -> None:
        for entry in entries:  # together with `_let_go` most of the time of most calls
            if not entry.pins:
                extent = entry.extent
                extent.size.lru.remove(entry)
                extent.evictable -= 1
                if entry.group:
                    del entry.group.lru[entry]
            entry.pins += 1

    def _let_go(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):  # the first name is evicted last
            entry.pins -= 1
            if not entry.pins and entry.state == COMMITTED:
                self._into_lru(entry)
            elif not entry.pins:
                self._free(entry)

    def _unpin(self, reader: int) -> None:
        if (reading := self._readers.pop(reader, None)) is not None:
            self._untidy.append((False, reading))
            self.tidy()

    # --- inside: room

    def _extent_with_room(self, home: Home, name: str, slot_bytes: int, now: float) -> SlotExtent | None:
        """An extent with a free slot of this size for this name, after evicting if need be."""
        if slot_bytes > self.capacity_bytes:
            return None
        if self.quota_bytes is not None and group_of(name):
            if slot_bytes > self.quota_bytes:
                return None
            group = self._groups.get((home.label, group_of(name)), Group())
            while group.bytes + slot_bytes > self.quota_bytes:
                if not group.lru:
                    return None
                self._evict(next(iter(group.lru)))
        while True:
            size = self._sizes.get(slot_bytes)
            wanted = SPREAD if 2 * self._room >= self.capacity_bytes else 1
            if (size is None or len(size.open) < wanted) and self._grow(slot_bytes):
                continue
            if size is not None and size.open:
                return next(iter(size.open))
            self._gain(slot_bytes, size, now)
            self._empty_leaving()
            head = size.lru.first if size else None
            if head is None or self._soon_bytes() >= slot_bytes:
                return None  # the caller removes what is retired, and asks again
            if head.extent.waits:
                return None  # its slot would not be given yet, nor those of all others that were found again with it
            self._evict(head)

    def _soon_bytes(self) -> int:
        """The room when all files are gone that can be removed now."""
        return self._room + sum(extent.bytes for extent in self._leaving.values() if not extent.live)

    def _grow(self, slot_bytes: int) -> bool:
        """Whether there was room for another extent."""
        places = min(self._places(slot_bytes), self._room // slot_bytes)
        if places < 1 or (slot_bytes not in self._sizes and len(self._sizes) >= MOST_SIZES):
            return False
        self.next_extent += 1
        while self._knows(Extent(slot_bytes, self.next_extent)):  # adopted
            self.next_extent += 1
        self._add_extent(slot_bytes, self.next_extent, places)
        return True

    def _places(self, slot_bytes: int) -> int:
        return min(MOST_PLACES, max(1, min(EXTENT_BYTES, self.capacity_bytes // self._extents) // slot_bytes))

    def _add_extent(self, slot_bytes: int, number: int, places: int) -> SlotExtent:
        size = self._sizes.setdefault(slot_bytes, Size(slot_bytes))
        extent = size.extents[number] = SlotExtent(size, number, places)
        self._room -= extent.bytes
        self.layout_changed = True
        self._open(extent)
        return extent

    def _open(self, extent: SlotExtent) -> None:
        """Give its free slots, unless it waits for writes of an earlier life of the service."""
        if not extent.waits and extent.free:
            extent.size.open[extent] = None
            if not extent.live:
                self._empty[extent] = None

    def _gain(self, slot_bytes: int, size: Size | None, now: float) -> bool:
        """Retire extents of other sizes (of any, if the capacity has shrunk) whose objects are worth least, until there
        is so much room. Whether it has retired any."""
        for count in range(_RETIRED_A_CALL):
            # What readers and writers still hold is waited for by none that has nothing of its own to evict.
            own = size is not None and size.lru.first is not None
            held = slot_bytes > 0 and not own and len(self._leaving) < _RETIRED_A_CALL
            enough = self._room + self._leaving_bytes >= slot_bytes
            if enough and not (held and self._soon_bytes() < slot_bytes):
                return count > 0
            extent = self._worth_least(size, now)
            if extent is None:
                return count > 0
            self._retire(extent)
        return True

    def _worth_least(self, size: Size | None, now: float) -> SlotExtent | None:
        shrunk = self._room + self._leaving_bytes < 0
        for extent in self._empty:
            if extent.size is not size or shrunk:
                return extent
        heads = [other.lru.first for other in self._sizes.values() if other is not size or shrunk]
        oldest = min(
            (head for head in heads if head is not None and not head.extent.leaves),
            key=lambda head: head.used,
            default=None,
        )
        if oldest is None:
            return None
        own = size.lru.first if size and not shrunk else None
        return oldest.extent if own is None or now - oldest.used > _OLDER * (now - own.used) else None

    def _retire(self, extent: SlotExtent) -> None:
        extent.leaves = True
        extent.size.open.pop(extent, None)
        self._empty.pop(extent, None)
        self._leaving[extent.name] = extent
        self._leaving_bytes += extent.bytes
        self.layout_changed = True
        self._empty_leaving()

    def _empty_leaving(self) -> None:
        """Evict what can be evicted of the extents that are to be retired: more of it, since readers have let go."""
        for extent in self._leaving.values():
            if extent.evictable:
                for entry in extent.slots:
                    if entry is not None and entry.state == COMMITTED and not entry.pins:
                        self._evict(entry)

    def _extent_for(self, slot: Slot, now: float) -> SlotExtent | None:
        """The extent of a slot that was found in a file; its other slots are given when late writes are over."""
        size, number = self._sizes.get(slot.slot_bytes), slot.extent.number
        if max(slot.epoch, slot.number) >= _MOST_NUMBER:
            return None
        extent = size.extents.get(number) if size else None
        places = max(slot.place + 1, self._places(slot.slot_bytes))
        if extent is not None and slot.place < len(extent.slots):
            return extent
        if (places - (len(extent.slots) if extent else 0)) * slot.slot_bytes > self._room:
            places = slot.place + 1
        more = places - (len(extent.slots) if extent else 0)
        if more * slot.slot_bytes > self._room or (size is None and len(self._sizes) >= MOST_SIZES):
            return None
        if extent is not None:
            extent.free += range(len(extent.slots), places)
            extent.slots += [None] * more
            self._room -= more * slot.slot_bytes
            self.layout_changed = True
        else:
            extent = self._add_extent(slot.slot_bytes, number, places)
            extent.waits = True
            extent.size.open.pop(extent, None)
            self._empty.pop(extent, None)
            self._at(now + QUARANTINE_S, extent)
        return extent

    def _knows(self, name: Extent) -> bool:
        size = self._sizes.get(name.slot_bytes)
        return size is not None and name.number in size.extents

    # --- inside: time

    def _at(self, when: float, what: object) -> None:
        """Look at a reader, a request, a slot in quarantine or an extent that waits, when its time has come."""
        live = len(self._readers) + len(self._requests) + self._quarantined
        if len(self._timers) > 2 * live + 1024:  # most of them are of calls that have ended
            self._timers = [timer for timer in self._timers if self._is_due(timer[2], timer[0])]
            heapify(self._timers)
        self._timer += 1
        heappush(self._timers, (when, self._timer, what))

    def _is_due(self, what: object, when: float) -> bool:
        """Whether there is something to do at that time."""
        if isinstance(what, int):
            return what in self._readers and self._readers[what].until <= when
        if isinstance(what, tuple):
            return what in self._requests and self._requests[what].until <= when
        return True

    def _advance(self, now: float) -> float:
        """What has come to its end by now."""
        self._now = max(self._now, now)
        if self._untidy:
            self.tidy()
        while self._timers and self._timers[0][0] <= self._now:
            when, _, what = heappop(self._timers)
            if not self._is_due(what, when):
                continue
            if isinstance(what, int):
                self._unpin(what)
            elif isinstance(what, tuple):
                for entry in self._requests.pop(what).entries.values():
                    self._quarantine(entry, when + QUARANTINE_S)
            elif isinstance(what, SlotExtent):
                what.waits = False
                if not what.leaves:
                    self._open(what)
            elif isinstance(what, Entry):
                self._quarantined -= 1
                self._free(what)
        return self._now

    def _change(self, entry: Entry) -> None:
        if self._changed is not None:
            self._changed[entry.slot[:2]] = entry
            entry.saved = self._now


def _row(entry: Entry) -> Row:
    return Row(
        *entry.slot,
        state=entry.state,
        label=entry.home.label,
        name=entry.name,
        size_bytes=entry.size_bytes,
        request=entry.request,
        used=entry.used,
        until=entry.until,
    )
