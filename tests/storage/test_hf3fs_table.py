"""What lives of a slot table seldom come to: its bounds, extents of many slots, extents that were adopted."""

from hf3fs_laws import audit, kept

from kvarve.storage.hf3fs.metadata import Slot
from kvarve.storage.hf3fs.metadata import slot_table as module
from kvarve.storage.hf3fs.metadata.slot_table import MOST_LABELS, QUARANTINE_S, SlotTable

K, LABEL = 4096, b"model"
FIRST = (10**15, 100)


def store(table: SlotTable, *names: str, slots: int = 1, now: float = 0.0) -> list[Slot]:
    request = hash((names, now)) & 0xFFFFFFFF
    given = table.reserve(LABEL, request, names, [slots * K] * len(names), 60.0, now)
    mine = [slot for slot in given if isinstance(slot, Slot)]
    assert all(table.commit(LABEL, request, names, mine, [1] * len(mine), now))
    return mine


def test_an_extent_that_was_adopted_keeps_its_number() -> None:
    table = SlotTable(64 * K, None, FIRST, empty=False)
    found = Slot(K, (FIRST[1] + 1) * 4096, 5)
    assert table.adopt(LABEL, ["old"], [found], [1], 0.0) == [True]
    (slot,) = store(table, "new")
    assert slot.extent != found.extent
    audit(table)


def test_pins_of_readers_that_never_let_go_are_bounded_and_the_oldest_go_first(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_PINS", 40_000)
    table = SlotTable(8 * K, None, FIRST)
    store(table, "a", "b")
    names = ["a", "b"] * 2048
    for reader in range(20):
        table.lookup(LABEL, names, reader, 600.0, 0.0)
        assert kept(table).pins <= 40_000
    assert kept(table).readers < 20
    table.touch(LABEL, [], 601.0)
    assert kept(table).pins == 0
    audit(table)


def test_calls_that_come_and_go_leave_nothing_behind() -> None:
    table = SlotTable(8 * K, None, FIRST)
    store(table, "a")
    for call in range(5000):
        table.lookup(LABEL, ["a"], call, 600.0, 0.0)
        table.release(call, 0.0)
        table.reserve(LABEL, call, [f"n{call}"], [K], 600.0, 0.0)
        table.reserve(f"label{call}".encode(), 1, ["x"], [64 * K], 600.0, 0.0)
    left = kept(table)
    assert left.timers < 3000 and left.labels <= MOST_LABELS + 1 and left.requests <= 8
    audit(table)


def test_sizes_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_SIZES", 50)
    table = SlotTable(1 << 40, None, FIRST)
    given = [table.reserve(LABEL, size, [f"n{size}"], [size * K], 60.0, 0.0)[0] for size in range(1, 61)]
    assert [bool(slot) for slot in given] == [True] * 50 + [False] * 10
    audit(table)


def test_an_extent_of_many_slots_is_emptied_whole_but_for_what_is_read() -> None:
    table = SlotTable(32 * 32 * K, None, FIRST, extents=32)  # of 32 slots each
    slots = store(table, *(f"n{number}" for number in range(32 * 32)))
    assert len({slot.extent for slot in slots}) == 32
    table.lookup(LABEL, ["n1000"], 1, 60.0, 1.0)
    for attempt in range(40):  # as the storage does
        if table.reserve(LABEL, attempt, [f"large{attempt}"], [32 * K], 60.0, 2.0) == [False]:
            gone = table.retired([])
            table.removed(gone)
            if not gone:  # all but what is read
                break
            assert isinstance(table.reserve(LABEL, attempt, [f"large{attempt}"], [32 * K], 60.0, 2.0)[0], Slot)
    audit(table)
    assert table.usage(LABEL).objects == 1
    assert table.exists(LABEL, ["n1000"]) == [True]
    assert attempt == 31, "the extent that is read does not hold up the others"
    table.release(1, 3.0)
    assert table.reserve(LABEL, 10**6, ["one more"], [32 * K], 60.0, 3.0) == [False]
    assert len(table.retired([])) == 1
    audit(table)


def test_two_sizes_in_use_do_not_take_their_room_from_each_other_in_turn() -> None:
    table, moved = SlotTable(64 * K, None, FIRST), 0
    for number in range(1000):
        name, slots, now = [f"n{number}"], 1 + 3 * (number % 2), float(number)
        for _ in range(2):
            (slot,) = table.reserve(LABEL, number, name, [slots * K], 60.0, now)
            if isinstance(slot, Slot):
                table.commit(LABEL, number, name, [slot], [1], now)
                break
            retired = table.retired([])
            moved += len(retired)
            table.removed(retired)
    assert moved < 100, "the oldest of both are about equally old"
    audit(table)


def test_quarantine_is_longer_than_a_deadline_that_was_noticed_late() -> None:
    table = SlotTable(K, None, FIRST)
    table.reserve(LABEL, 1, ["a"], [K], 10.0, 0.0)
    table.touch(LABEL, [], 100.0)
    assert table.reserve(LABEL, 2, ["b"], [K], 10.0, 10.0 + QUARANTINE_S - 1) == [False]
    assert table.reserve(LABEL, 2, ["b"], [K], 10.0, 10.0 + QUARANTINE_S) != [False]


def test_a_store_that_may_hold_less_from_now_on_keeps_what_was_just_looked_up() -> None:
    """The pins of a lookup are put on after its answer, and a smaller capacity may come before."""
    table = SlotTable(64 * K, None, FIRST, extents=64)
    names = [f"{number}-x" for number in range(64)]
    store(table, *names)
    assert all(table.lookup(LABEL, names, 7, 60.0, 1.0))
    table.configure(32 * K, None)
    assert all(table.exists(LABEL, names)) and not table.retired([])
    audit(table)
    table.release(7, 2.0)
    audit(table)
