"""What must hold of a slot table after every call, checked by code that shares nothing with it."""

from collections import Counter
from typing import NamedTuple

from kvarve.storage.hf3fs.metadata.entries import COMMITTED, QUARANTINED, RESERVED, Entry
from kvarve.storage.hf3fs.metadata.slot_table import SlotTable


class Kept(NamedTuple):
    """How much a table keeps."""

    slots: int
    requests: int
    readers: int
    quarantined: int
    evictable: int
    pins: int
    timers: int
    labels: int


def kept(table: SlotTable) -> Kept:
    evictable = sum(1 for size in table._sizes.values() for _ in size.lru)
    counted = map(len, (table._requests, table._readers))
    more = table._quarantined, evictable, table._pins, len(table._timers), len(table._homes)
    return Kept(len(entries(table)), *counted, *more)


def entries(table: SlotTable) -> list[Entry]:
    """The slots that are not free."""
    return [*table._entries()]


def audit(table: SlotTable) -> None:
    table._advance(table._now)  # as the next call does, which ends a reservation for no time
    in_extents, evictable, taken = 0, Counter(), []
    for slot_bytes, size in table._sizes.items():
        assert size.extents, "a size without extents is forgotten"
        for number, extent in size.extents.items():
            assert (extent.size, extent.number) == (size, number)
            in_extents += extent.bytes
            places = [*extent.free, *(place for place, entry in enumerate(extent.slots) if entry is not None)]
            assert sorted(places) == [*range(len(extent.slots))], "each slot is free, or holds one entry"
            assert extent.live == len(places) - len(extent.free)
            assert (extent in size.open) == (bool(extent.free) and not extent.leaves and not extent.waits)
            assert (extent in table._empty) == (extent in size.open and not extent.live)
            assert (extent.name in table._leaving) == extent.leaves
            taken += [entry for entry in extent.slots if entry is not None]
            assert all(entry.extent is extent for entry in extent.slots if entry is not None)
            assert all(extent.slots[entry.slot.place] is entry for entry in extent.slots if entry is not None)
        evictable |= Counter(dict.fromkeys(size.lru, 1))
        assert all(entry.extent.size is size for entry in size.lru)
        assert all(size.slot_bytes == slot_bytes for entry in size.lru)
    assert table._room + in_extents == table.capacity_bytes
    assert table._leaving_bytes == sum(extent.bytes for extent in table._leaving.values())
    pins = Counter(entry for reader in table._readers.values() for entry in reader.entries)
    assert pins.total() == table._pins
    for entry in taken:
        _audit_entry(table, entry, pins)
        assert (entry in evictable) == (entry.state == COMMITTED and not entry.pins)
    assert {*pins} <= {*taken}, "what is pinned has a slot"
    for label, home in table._homes.items():
        mine = [entry for entry in taken if entry.home is home]
        assert home.label == label
        assert home.slots == len(mine)
        assert home.bytes == sum(entry.size_bytes for entry in home.objects.values())
        assert {*home.objects.values()} == {entry for entry in mine if entry.state == COMMITTED}
    asked = [entry for request in table._requests.values() for entry in request.entries.values()]
    assert Counter(asked) == Counter(entry for entry in taken if entry.state == RESERVED), "none leaks"
    assert all(request.entries for request in table._requests.values())
    for key, group in table._groups.items():
        counted = [entry for entry in taken if entry.group is group]
        assert group.bytes == sum(entry.extent.size.slot_bytes for entry in counted) > 0
        assert {*group.lru} == {entry for entry in counted if entry in evictable}
        assert {(entry.home.label, entry.name.split("-")[0]) for entry in counted} == {key}
    epochs = [entry.slot.epoch for entry in taken]
    assert len({*epochs}) == len(epochs)
    assert not epochs or max(epochs) <= table.epoch
    live = len(table._readers) + len(table._requests) + table._quarantined
    assert len(table._timers) <= 2 * live + 1026 + len(table._sizes) * 100


def _audit_entry(table: SlotTable, entry: Entry, pins: Counter[Entry]) -> None:
    assert entry.pins == pins[entry]
    assert (entry.home.objects.get(entry.name) is entry) == (entry.state == COMMITTED)
    if entry.state == QUARANTINED:
        assert entry.pins or entry.until > table._now, "quarantine ends"
    if table.quota_bytes is not None and entry.state != QUARANTINED and "-" in entry.name:
        assert entry.group is table._groups[entry.home.label, entry.name.split("-")[0]]
    if entry.state == RESERVED:
        assert entry.until > table._now, "a reservation ends with its deadline"
