"""Any life of a slot table keeps its laws, which are checked by code that shares nothing with it."""

import random

import pytest

from kvarve.storage.base import group_of
from kvarve.storage.hf3fs._slot_layout import Extent, Slot, Title
from kvarve.storage.hf3fs._slot_table import REST_S, Entry, SlotTable

K = 4096
LABELS = b"1" * 32, b"2" * 32
NAMES = [f"{group}{number}" for group in ("a-", "b-", "") for number in range(12)]
NOW = 1_800_000_000.0


def audit(table: SlotTable) -> None:
    slots = [entry for file in table.files.values() for entry in file.slots.values()]
    live = [entry for entry in slots if entry.live]
    for number, file in table.files.items():
        assert number == file.extent.number and number in table.known
        free = [entry for entry in file.size.free if entry.file is file]
        resting = [entry for _, entry in table._resting if isinstance(entry, Entry) and entry.file is file]
        mine = [entry for entry in file.slots.values() if entry.live]
        kept = {*free, *resting, *mine}
        assert len(kept) == len(free) + len(resting) + len(mine) == len(file.slots) - file.held, "each is one of these"
        assert file.taken == len(mine) + file.held and (file in table._empty) == (not file.taken)
    assert table.own_bytes == sum(file.extent.bytes for file in table.files.values())
    for size in table._sizes.values():
        assert {*size.lru} == {entry for entry in live if entry.file.size is size}
        assert size.places == sum(file.extent.places for file in table.files.values() if file.size is size)
        assert [*size.lru] == sorted(size.lru, key=lambda entry: entry.used), "the order is that of use"
    for label, objects in table.objects.items():
        labelled = [entry for entry in live if entry.label == label]
        assert {entry.name: entry for entry in labelled} == objects and len(labelled) == len(objects)
        assert table.bytes[label] == sum(entry.size_bytes for entry in labelled)
    for (label, name), group in table._groups.items():
        assert {*group} == {it for it in live if (it.label, group_of(it.name)) == (label, name)}
    assert len({entry.generation for entry in live}) == len(live)


class Life:
    """Random calls, and what must be true of their answers."""

    def __init__(self, seed: int, *, shared: bool) -> None:
        self.dice, self.now, self.shared = random.Random(seed), NOW, shared
        quota = self.dice.choice([None, 12 * K])
        self.table = new_table(60, quota, shared=shared)
        self.table.owner = 5
        self.reserved: list[Entry] = []
        self.left: dict[Entry, float] = {}  # when each slot was given up that may still be read or written

    def names(self) -> list[str]:
        return self.dice.sample(NAMES, self.dice.randrange(1, 6))

    def step(self) -> None:
        table, dice, label = self.table, self.dice, self.dice.choice(LABELS)
        live = {entry for objects in table.objects.values() for entry in objects.values()}
        match dice.randrange(8):
            case 0 | 1 | 2:
                self.reserve(label, dice.choice([2, 2, 2, 3, 7]) * K)
            case 3 | 4:
                dice.shuffle(self.reserved)
                for _ in range(min(3, len(self.reserved))):
                    entry = self.reserved.pop()
                    entry.size_bytes = dice.randrange(K)
                    known = table.find(entry.label, [entry.name])[0]
                    table.commit(entry, self.now)
                    assert table.find(entry.label, [entry.name])[0] is (known or entry)
            case 5:
                if self.reserved:
                    entry = self.reserved.pop()
                    table.abort(entry, self.now)
                    self.left[entry] = self.now
            case 6:
                table.use([entry for entry in table.find(label, self.names()) if entry])
            case 7:
                for entry in filter(None, table.find(label, self.names())):
                    table.remove(entry, self.now)
        if self.shared:
            self.left |= {entry: self.now for entry in live if not entry.live and entry not in self.reserved}
        table.evicted.clear()
        table.retired.clear()
        self.now += dice.choice([0.0, 0.5, REST_S / 3])
        audit(table)

    def reserve(self, label: bytes, slot_bytes: int) -> None:
        """As a call that stores some objects does."""
        before, names = self.table.tick(), self.names()
        kept = [entry for entry in self.table.find(label, names) if entry]
        self.table.use(kept)
        for name in names:
            if self.table.find(label, [name]) == [None]:
                entry = self.table.reserve(label, name, slot_bytes, self.now, before)
                assert all(it.live for it in kept), "a call evicts nothing that it has answered for"
                assert self.table.own_bytes <= self.table.limit_bytes
                if entry is not None:
                    assert entry.file.extent.slot_bytes == slot_bytes and entry not in self.reserved
                    assert self.now - self.left.pop(entry, 0.0) >= REST_S, "it may still be written, or read"
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


def new_table(blocks: int, quota: int | None = None, *, shared: bool = False, first: int = 0) -> SlotTable:
    table = SlotTable(quota, shared=shared, first=first)
    table.limit_bytes = blocks * K
    return table


def stored(table: SlotTable, *names: str, slots: int = 2, now: float = NOW) -> list[bool]:
    done = []
    for name in names:
        entry = table.reserve(LABELS[0], name, slots * K, now, table.tick())
        if entry is not None:
            entry.size_bytes = 9
            table.commit(entry, now)
        done.append(entry is not None)
    return done


def there(table: SlotTable, *names: str) -> str:
    return " ".join(name for name, entry in zip(names, table.find(LABELS[0], names), strict=True) if entry)


def test_a_size_that_is_not_used_any_more_gives_its_room_to_one_that_is() -> None:
    table, names = new_table(64), [f"old-{i}" for i in range(32)]
    assert all(stored(table, *names))
    assert stored(table, "large", slots=16) == [True]
    assert 20 < len(there(table, *names).split()) < 32
    for turn in range(400):  # each of the old ones was not used for more than twice as long
        assert stored(table, f"new-{turn}", slots=16) == [True]
        audit(table)
    assert there(table, *names) == ""
    assert table.own_bytes <= 64 * K


def test_an_object_larger_than_there_is_room_for_evicts_nothing() -> None:
    table = new_table(64)
    assert all(stored(table, *"abc"))
    table.limit_bytes = 24 * K
    assert stored(table, "x", slots=25) == [False]
    assert there(table, *"abc") == "a b c"


def test_of_what_others_read_a_part_of_the_slots_is_at_rest_for_the_next_writers() -> None:
    table, at = new_table(64 * 100, shared=True), 0
    while not table.evicted:
        at += 1
        assert stored(table, f"n{at}") == [True]
    refused = 0
    for turn in range(2000):
        refused += stored(table, f"m{turn}", now=NOW + 4 * turn) == [False]
    assert refused == 0, "a slot in four seconds is one that has rested"
    assert sum(stored(table, *(f"o{at}" for at in range(1000)), now=NOW + 8000)) < 60, "no slot is given in haste"


def test_what_is_adopted_is_used_in_the_order_that_was_told_or_that_of_writing() -> None:
    table = new_table(8)
    assert all(stored(table, *"abcd"))
    table.use([it for it in table.find(LABELS[0], ["c", "a"]) if it])
    for uses, left in ((table.uses(), "a c x y"), ({}, "c d x y"), (dict.fromkeys(table.uses(), 1 << 63), "c d x y")):
        again = new_table(8, first=1000)
        for file in table.files.values():
            titles = [Title(entry.label, entry.name, entry.slot) for entry in file.slots.values() if entry.live]
            assert again.adopt(file.extent, titles, uses, NOW) == 1
            assert again.adopt(file.extent, titles, uses, NOW) == 0, "once"
        again.sort()
        audit(again)
        assert there(again, *"abcd") == "a b c d"
        assert stored(again, "x", "y") == [True, True]
        assert there(again, *"abcdxy") == left and again.tick() < 2000, "what is told is at most now"


def test_the_free_slots_of_a_file_of_a_killed_process_rest() -> None:
    table, extent = new_table(8), Extent(2 * K, 4, 77, 1)
    assert table.adopt(extent, [Title(LABELS[0], "a", Slot(extent, 2, 5, 9))], {}, NOW) == 1
    assert stored(table, "b", now=NOW + 1) == [True], "what is evicted was written whole, and nothing comes to it"
    assert there(table, *"ab") == "b"
    assert stored(table, "c", "d", "e", now=NOW + REST_S) == [True] * 3
    assert there(table, *"bcde") == "b c d e"
    empty = Extent(2 * K, 4, 78, 1)
    assert table.adopt(empty, [], {}, NOW) == 0
    assert table.retired == {empty}, "a file without an object is removed"


def test_what_has_left_a_group_is_known_until_its_slot_is_given_again() -> None:
    table = new_table(64)
    assert all(stored(table, "other", "g-a", "g-b"))
    (entry,) = (it for it in table.find(LABELS[0], ["g-a"]) if it)
    table.remove(entry, NOW)
    assert table.left(LABELS[0], "g") == table.left(LABELS[0], None) == [entry.title]
    assert not table.left(LABELS[0], "h") and not table.left(LABELS[1], None)
    assert stored(table, "h-a") == [True] and not table.left(LABELS[0], None)
