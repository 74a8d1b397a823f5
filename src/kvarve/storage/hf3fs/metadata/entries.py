"""What a slot table is made of: entries, and what they stand in. No decision is made here.

An entry is a slot that is not free. It stands in the extent of its slot, in the home of its label, in the group of its
quota, and in the order of eviction of its size if it is committed and unpinned.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from kvarve.storage.hf3fs.metadata.service import MOST_PLACES, Extent, Slot

RESERVED, COMMITTED, QUARANTINED = range(3)
# The slot and the size of an entry as one object: a lookup of 128 among a million waits for memory most of its time.
PACKED = struct.Struct("<4q")


class Row(NamedTuple):
    """A slot that is not free, as it is kept for a service's next life. `until`: of a reservation or quarantine."""

    slot_bytes: int
    number: int
    epoch: int
    state: int
    label: bytes
    name: str
    size_bytes: int
    request: int
    used: float
    until: float


class Home:
    """The objects of a label."""

    def __init__(self, label: bytes) -> None:
        self.label = label
        self.objects: dict[str, Entry] = {}
        self.bytes = self.evicted = 0
        self.slots = 0  # of its objects, and of what is written or in quarantine


class Group:
    """The names of a label that share a quota."""

    def __init__(self) -> None:
        self.bytes = 0  # of slots, reserved or committed
        self.lru: OrderedDict[Entry, None] = OrderedDict()


class Order:
    """Committed and unpinned entries, the next victim first. Linked, as each lookup takes some out of the middle: a
    dict of a million is copied whole from time to time."""

    def __init__(self) -> None:
        self.first: Entry | None = None
        self._last: Entry | None = None

    def append(self, entry: "Entry") -> None:
        entry.before, entry.after = self._last, None
        if self._last is None:
            self.first = entry
        else:
            self._last.after = entry
        self._last = entry

    def remove(self, entry: "Entry") -> None:
        before, after = entry.before, entry.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self._last = before
        else:
            after.before = before

    def __iter__(self) -> Iterator["Entry"]:
        entry = self.first
        while entry is not None:
            yield entry
            entry = entry.after


class Size:
    """All slots of one size."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.extents: dict[int, SlotExtent] = {}
        self.open: OrderedDict[SlotExtent, None] = OrderedDict()  # those with free slots, in turn
        self.lru = Order()


class SlotExtent:
    def __init__(self, size: Size, number: int, places: int) -> None:
        self.size, self.number = size, number
        self.slots: list[Entry | None] = [None] * places
        self.free = [*range(places - 1, -1, -1)]
        self.live = 0  # slots that are not free
        self.evictable = 0
        self.leaves = self.waits = False

    @property
    def bytes(self) -> int:
        return len(self.slots) * self.size.slot_bytes

    @property
    def name(self) -> Extent:
        return Extent(self.size.slot_bytes, self.number)


class Entry:
    """A slot that is not free."""

    __slots__ = (
        *("after", "before", "extent", "group", "home", "name", "packed", "pins"),
        *("request", "saved", "state", "until", "used"),
    )

    def __init__(self, extent: SlotExtent, place: int, epoch: int, home: Home, name: str, group: Group | None) -> None:
        self.packed = PACKED.pack(extent.size.slot_bytes, extent.number * MOST_PLACES + place, epoch, 0)
        self.extent, self.home, self.name, self.group = extent, home, name, group
        self.state, self.pins, self.request = RESERVED, 0, 0
        self.before: Entry | None = None
        self.after: Entry | None = None
        self.used = self.until = self.saved = 0.0  # saved: when its use was last told to the journal

    @property
    def slot(self) -> Slot:
        return Slot(*PACKED.unpack(self.packed)[:3])

    @property
    def size_bytes(self) -> int:
        size_bytes: int = PACKED.unpack(self.packed)[3]
        return size_bytes

    @size_bytes.setter
    def size_bytes(self, size_bytes: int) -> None:
        self.packed = PACKED.pack(*self.slot, size_bytes)


class Request:
    def __init__(self) -> None:
        self.until = 0.0
        self.entries: dict[str, Entry] = {}


class Reader:
    def __init__(self, until: float, entries: list[Entry]) -> None:
        self.until, self.entries = until, entries
