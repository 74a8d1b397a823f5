"""Any life of a slot table keeps its laws, which are checked by code that shares nothing with it."""

import random
from collections import Counter

import pytest

from kvarve.storage.hf3fs._slot_layout import Extent, Slot, Title
from kvarve.storage.hf3fs._slot_table import REST_S, Entry, SlotTable

K = 4096
LABELS = b"1" * 32, b"2" * 32
NAMES = [f"{group}{number}" for group in ("a-", "b-", "") for number in range(12)]
NOW = 1_800_000_000.0


def audit(table: SlotTable) -> None:
    entries = [entry for file in table.files.values() for entry in file.slots if entry is not None]
    for number, file in table.files.items():
        extent = file.extent
        assert number == extent.number and number in table.known
        free = [place for its, place in file.size.free if its is file]
        resting = [place for _, its, place in table._resting if its is file]
        taken = [place for place, entry in enumerate(file.slots) if entry is not None]
        assert sorted(free + resting + taken) == [*range(extent.places)], "each slot is free, at rest, or an entry's"
        assert all(file.slots[entry.place] is entry for entry in entries if entry.file is file)
        assert file.taken == len(taken) and (file in table._empty) == (not taken)
        assert file.held == sum(entry.pins for entry in entries if entry.file is file) + sum(
            not entry.live and not entry.pins for entry in entries if entry.file is file
        )
    assert table.own_bytes == sum(file.extent.bytes for file in table.files.values())
    for size in table._sizes.values():
        assert {*size.lru} == {entry for entry in entries if entry.live and entry.file.size is size}
        assert size.places == sum(file.extent.places for file in table.files.values() if file.size is size)
        assert [*size.lru] == sorted(size.lru, key=lambda entry: entry.used), "the order is that of use"
    for label, objects in table.objects.items():
        mine = [entry for entry in entries if entry.live and entry.label == label]
        assert {entry.name: entry for entry in mine} == objects and len(mine) == len(objects)
        assert table.bytes[label] == sum(entry.size_bytes for entry in mine)
    for (label, name), group in table._groups.items():
        mine = {
            entry for entry in entries if (entry.label, entry.name.partition("-")[1] and entry.name[0]) == (label, name)
        }
        assert {*group} == mine and group.bytes == sum(entry.file.extent.slot_bytes for entry in mine)
    assert len({entry.generation for entry in entries}) == len(entries)


class Life:
    """Random calls, and what must be true of their answers."""

    def __init__(self, seed: int, *, shared: bool) -> None:
        self.dice, self.now, self.shared = random.Random(seed), NOW, shared
        self.capacity = 60 * K
        quota = self.dice.choice([None, 12 * K])
        self.table = SlotTable(self.capacity, quota, shared=shared)
        self.table.owner = 5
        self.reserved: list[Entry] = []
        self.pinned: list[Entry] = []
        self.left: dict[tuple[int, int], float] = {}  # when each slot was given up that may still be read or written

    def names(self) -> list[str]:
        return self.dice.sample(NAMES, self.dice.randrange(1, 6))

    def step(self) -> None:
        table, dice, label = self.table, self.dice, self.dice.choice(LABELS)
        before = {**{(e.file.extent.number, e.place): e for e in self.entries()}}
        match dice.randrange(8):
            case 0 | 1 | 2:
                for name in self.names():
                    if table.find(label, [name]) == [None]:
                        self.reserve(label, name, dice.choice([2, 2, 2, 3, 7]) * K)
            case 3 | 4:
                dice.shuffle(self.reserved)
                for _ in range(min(3, len(self.reserved))):
                    entry = self.reserved.pop()
                    entry.size_bytes = dice.randrange(K)
                    before.pop((entry.file.extent.number, entry.place))
                    known = table.find(entry.label, [entry.name])[0]
                    table.commit(entry, self.now)
                    assert table.find(entry.label, [entry.name])[0] is (known or entry)
            case 5:
                if self.reserved:
                    entry = self.reserved.pop()
                    table.abort(entry, self.now)
                    self.left[entry.file.extent.number, entry.place] = self.now
                    before.pop((entry.file.extent.number, entry.place))
            case 6:
                found = [entry for entry in table.find(label, self.names()) if entry]
                table.use(found, self.now)
                table.pin(found)
                self.pinned += found
            case 7:
                if self.pinned and dice.random() < 0.7:
                    table.unpin(self.pinned, self.now)
                    self.pinned = []
                else:
                    for entry in filter(None, table.find(label, self.names())):
                        table.remove(entry, self.now)
        for place, entry in before.items():
            if self.shared and entry.live is False and entry not in self.reserved and place not in self.left:
                self.left[place] = self.now
        assert not any(entry.live and entry.pins for entry in table.evicted), "nothing is evicted that is being read"
        table.evicted.clear()
        table.retired.clear()
        self.now += dice.choice([0.0, 0.5, REST_S / 3])
        audit(table)

    def entries(self) -> list[Entry]:
        return [entry for file in self.table.files.values() for entry in file.slots if entry is not None]

    def reserve(self, label: bytes, name: str, slot_bytes: int) -> None:
        pins = Counter({entry: entry.pins for entry in self.pinned})
        entry = self.table.reserve(label, name, slot_bytes, self.now)
        assert pins == Counter({entry: entry.pins for entry in self.pinned})
        if entry is None:
            return
        place = entry.file.extent.number, entry.place
        assert entry not in self.pinned and entry.file.extent.slot_bytes == slot_bytes
        assert self.now - self.left.pop(place, 0.0) >= REST_S, "a slot is given that may still be written, or read"
        assert self.table.own_bytes <= self.capacity
        self.reserved.append(entry)


@pytest.mark.parametrize("shared", [False, True])
def test_any_life_keeps_the_laws(shared: bool) -> None:
    for seed in range(12):
        print(f"seed {seed}")
        life = Life(seed, shared=shared)
        for _ in range(60):
            life.step()


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_any_long_life_keeps_the_laws(shared: bool) -> None:
    first = random.randrange(1 << 30)
    for seed in range(first, first + 60):
        print(f"seed {seed}")
        life = Life(seed, shared=shared)
        for _ in range(300):
            life.step()


def stored(table: SlotTable, *names: str, slots: int = 2, now: float = NOW) -> list[bool]:
    done = []
    for name in names:
        entry = table.reserve(LABELS[0], name, slots * K, now)
        if entry is not None:
            entry.size_bytes = 9
            table.commit(entry, now)
        done.append(entry is not None)
    return done


def there(table: SlotTable, *names: str) -> str:
    return " ".join(name for name, entry in zip(names, table.find(LABELS[0], names), strict=True) if entry)


def test_a_size_that_is_not_used_any_more_gives_its_room_to_one_that_is() -> None:
    table, names = SlotTable(64 * K, None), [f"old-{i}" for i in range(32)]
    assert all(stored(table, *names))
    assert stored(table, "large", slots=16, now=NOW + 1) == [True]
    assert 20 < len(there(table, *names).split()) < 32
    for turn in range(400):  # each of the old ones was not used for more than twice as long
        assert stored(table, f"new-{turn}", slots=16, now=NOW + 2 + turn) == [True]
        audit(table)
    assert there(table, *names) == ""
    assert table.own_bytes <= 64 * K


def test_an_object_larger_than_there_is_room_for_evicts_nothing() -> None:
    table = SlotTable(64 * K, None)
    assert all(stored(table, *"abc"))
    table.others_bytes = 40 * K
    assert stored(table, "x", slots=25) == [False]
    assert there(table, *"abc") == "a b c"


def test_of_what_others_read_a_part_of_the_slots_is_at_rest_for_the_next_writers() -> None:
    table, at = SlotTable(64 * 100 * K, None, shared=True), 0
    while not table.evicted:
        at += 1
        assert stored(table, f"n{at}") == [True]
    refused = 0
    for turn in range(2000):
        refused += stored(table, f"m{turn}", now=NOW + 4 * turn) == [False]
    assert refused == 0, "a slot in four seconds is one that has rested"
    assert sum(stored(table, *(f"o{at}" for at in range(1000)), now=NOW + 8000)) < 60, "no slot is given in haste"


def titles(table: SlotTable, extent: Extent) -> list[Title]:
    return [
        Title(entry.label, entry.name, entry.slot)
        for entry in table.files[extent.number].slots
        if entry is not None and entry.live
    ]


def test_what_is_adopted_is_used_in_the_order_that_was_told_or_that_of_writing() -> None:
    table = SlotTable(8 * K, None)
    for at, name in enumerate("abcd"):
        assert stored(table, name, now=NOW + at) == [True]
    table.use([it for it in table.find(LABELS[0], ["a", "c"]) if it], NOW + 9)
    numbers = table.order(0, NOW + 10)
    for order, victims in ((dict(zip(numbers or [], range(9), strict=False)), "acx b"), (None, "")):
        again = SlotTable(8 * K, None)
        extents = [file.extent for file in table.files.values()]
        for extent in extents:
            assert again.adopt(extent, titles(table, extent), order, NOW + 20) == 1
            assert again.adopt(extent, titles(table, extent), order, NOW + 20) == 0, "once"
        again.in_order()
        audit(again)
        if order is not None:
            assert stored(again, "x", "y", now=NOW + 20) == [True, True]
            assert there(again, *"abcdxy") == "a c x y"
        else:
            assert there(again, *"abcd") == "a b c d" and victims == ""
            assert stored(again, "x", now=NOW + 20) == [True] and there(again, *"abcd") == "b c d"


def test_a_slot_that_the_saved_order_does_not_list_is_free_whatever_its_header_says() -> None:
    table, extent = SlotTable(4 * K, None), Extent(2 * K, 2, 77, 1)
    found = [Title(LABELS[0], name, Slot(extent, place, 5, 9)) for place, name in enumerate("ab")]
    assert table.adopt(extent, found, {found[0].slot.number: 0}, NOW) == 1
    table.in_order()
    assert there(table, *"ab") == "a"
    assert stored(table, "c") == [True] and there(table, *"abc") == "a c"


def test_what_is_adopted_in_order_was_used_after_it_was_written_and_before_now() -> None:
    table = SlotTable(64 * K, None)
    for at, name in enumerate("abcdef"):
        assert stored(table, name, slots=2 + at % 2, now=NOW + 100 * at) == [True]
    table.use([it for it in table.find(LABELS[0], ["e", "b", "c"]) if it], NOW + 600)
    before = {it.name: it for it in table.find(LABELS[0], "abcdef") if it}
    numbers, again = table.order(0, NOW + 700), SlotTable(64 * K, None)
    assert numbers is not None
    for file in table.files.values():
        again.adopt(file.extent, titles(table, file.extent), {it: at for at, it in enumerate(numbers)}, NOW + 1000)
    again.in_order()
    audit(again)
    found = {it.name: it for it in again.find(LABELS[0], "abcdef") if it}
    assert sorted(found, key=lambda name: found[name].used) == sorted(before, key=lambda name: before[name].used)
    assert all(before[name].generation <= it.used <= before[name].used for name, it in found.items())


@pytest.mark.parametrize("ahead_s", [0, 3600])
def test_a_clock_that_was_ahead_costs_no_file_of_objects_as_old_as_others(ahead_s: int) -> None:
    table = SlotTable(64 * 5 * K, None)
    for slots, late_s in ((2, 0.0), (3, 0.5)):
        extent = Extent(slots * K, 64, slots, 1)
        written = [int(1e6 * (NOW - 64 + place + late_s + ahead_s)) for place in range(64)]
        found = [Title(LABELS[0], f"{slots}-{at}", Slot(extent, at, it, 9)) for at, it in enumerate(written)]
        assert table.adopt(extent, found, None, NOW) == 64
    table.in_order()
    for turn in range(8):
        assert stored(table, f"new-{turn}", slots=3, now=NOW + turn) == [True]
    audit(table)
    assert len(there(table, *(f"2-{at}" for at in range(64))).split()) == 64
    (new,) = (it for it in table.find(LABELS[0], ["new-7"]) if it)
    assert 0 <= new.used - 1e6 * (NOW + 7 + max(0.0, ahead_s - 0.5)) < 1000, "which goes on from there"


def test_the_free_slots_of_a_file_of_a_killed_process_rest() -> None:
    table, extent = SlotTable(8 * K, None), Extent(2 * K, 4, 77, 1)
    assert table.adopt(extent, [Title(LABELS[0], "a", Slot(extent, 2, 5, 9))], None, NOW) == 1
    assert stored(table, "b", now=NOW + 1) == [True], "what is evicted was written whole, and nothing comes to it"
    assert there(table, *"ab") == "b"
    assert stored(table, "c", "d", "e", now=NOW + REST_S) == [True] * 3
    assert there(table, *"bcde") == "b c d e"
    empty = Extent(2 * K, 4, 78, 1)
    assert table.adopt(empty, [], None, NOW) == 0
    assert table.retired == [empty], "a file without an object is removed"
