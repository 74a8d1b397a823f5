"""Tiers are one storage: the first that can answers, the others get copies, and no wrong object is read."""

from collections.abc import Callable, Iterator

import pytest
from light import light
from memories import in_memory, over_memories
from tier_rows import LONG_S, ROOM, MakeRow, Row, page, read

from gates import lose_patience_with_stalled_calls
from kvarve.errors import StorageError
from kvarve.storage import Breaker, Storage, Tiers
from kvarve.testing import FaultyStorage, MakeStorage, Rule, StorageSuite
from kvarve.testing.suite import Damage, get, put, there


@light
class TestTiers(StorageSuite):
    @pytest.fixture(
        params=[
            "two that promote",
            *(pytest.param(it, marks=pytest.mark.long) for it in ("two", "three", "with a dead one behind")),
        ]
    )
    def make_storage(self, request: pytest.FixtureRequest) -> Iterator[MakeStorage]:
        kind = request.param

        def build(memory: Callable[[int], Storage]) -> Tiers:
            tiers = [memory(number) for number in range(3 if kind == "three" else 2)]
            if "dead" in kind:
                tiers[1] = FaultyStorage(tiers[1])
                tiers[1].dead = True
            breakers = [Breaker(tier, deadline_s=LONG_S, probe_first_s=0.001) for tier in tiers]
            return Tiers(breakers, whole=(lambda _: True) if "promote" in kind else None, patience_s=LONG_S)

        with over_memories(build) as make:
            yield make

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        return in_memory()

    def settle(self, storage: Tiers) -> None:
        assert storage.settle(LONG_S)


def test_a_touch_is_a_use_in_every_tier_that_answers(make_row: MakeRow) -> None:
    row = make_row([120, 120, 120])
    for name in "abc":
        for sick in row.sick:
            put(sick.inner, **{name: page(name)})
    row.sick[1].rules = [Rule("raise", "touch")]
    row.storage.touch(["a"])
    for sick in (row.sick[0], row.sick[2]):
        assert put(sick.inner, d=page("d")) == [True]
        assert there(sick.inner, *"abcd") == "a c d"


@pytest.mark.parametrize("number", [0, 1])
def test_a_tier_that_was_down_gets_its_backlog(row: Row, number: int) -> None:
    row.go_down(number)
    assert row.put("a", "b") == [True, True]
    assert row.storage.up
    assert read(row.storage, "a") == page("a")
    row.settle()
    assert row.has(number, "a", "b") == ""
    assert row.storage.counts["backlog: down"] == 2 == row.backlogs()[number]
    row.storage.delete(["b"])
    row.come_up(number)
    row.settle()
    assert row.has(number, "a", "b") == "a"
    assert row.backlogs() == [0, 0]


def test_of_a_backlog_the_oldest_name_is_dropped_if_it_is_too_long_and_those_that_are_gone(make_row: MakeRow) -> None:
    row = make_row((80, ROOM), backlog=2)
    row.go_down(1)
    row.put("a", "b")
    row.put("c")  # the near tier evicts "b" for it, and "a" is the oldest of the backlog
    assert row.storage.counts["dropped: backlog full"] == 1
    row.come_up(1)
    row.settle()
    assert row.has(1, *"abc") == "c"
    assert row.storage.counts["dropped: gone from all tiers"] == 1


def test_a_copy_that_raises_joins_the_backlog_until_another_goes_through(make_row: MakeRow) -> None:
    row = make_row(failures=3)
    row.sick[1].rules = [Rule("raise", "put", nth=1)]
    row.put("a")
    row.settle()
    assert row.breakers[1].up
    assert (row.has(1, "a"), row.storage.counts["backlog: down"]) == ("", 1)
    row.put("b")
    row.settle()
    assert row.has(1, "a", "b") == "a b"


def test_a_far_tier_that_hangs_delays_no_call(row: Row) -> None:
    row.sick[1].stall()
    assert row.put("a") == [True]
    row.sick[1].wait_for_stalled_call()
    assert row.put("b", "c") == [True, True]
    assert read(row.storage, "b") == page("b")
    assert row.storage.exists(["a", "b", "c"]) == [True] * 3
    row.sick[1].release()
    row.settle()
    assert row.has(1, "a", "b", "c") == "a b c"


@pytest.mark.parametrize("number", [0, 1])
def test_a_tier_that_is_late_with_what_it_has_is_passed_over_until_it_answers(
    row: Row, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_patience_with_stalled_calls(monkeypatch, *row.sick)
    row.put("a", "b")
    row.settle()
    other = 1 - number
    row.sick[other].inner.delete(["b"])
    row.sick[number].stall()
    asked = row.sick[number].counts["exists"]
    assert there(row.storage, "a", "b") == "a", (
        "an object that both have is found, and one that only that tier has is not"
    )
    row.sick[number].wait_for_stalled_call()
    assert there(row.storage, "a", "b") == "a"
    assert read(row.storage, "a") == page("a")
    assert read(row.storage, "b") is None
    assert row.put("c") == [True]
    assert row.sick[number].counts["exists"] == asked + 1, "and no other call has reached it"
    assert row.has(other, "c") == "c"
    assert row.storage.counts["exists missed: late"] >= 2
    row.sick[number].release()
    while there(row.storage, "b") != "b":  # until its late answer has come
        pass
    row.settle()
    assert row.has(number, "c") == "c"
    assert read(row.storage, "b") == page("b")


def test_a_read_waits_if_all_tiers_are_late(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_patience_with_stalled_calls(monkeypatch, *row.sick)
    row.put("a")
    row.settle()
    for sick in row.sick:
        sick.stall()
    assert there(row.storage, "a") == ""
    reading = row.callers.submit(lambda: read(row.storage, "a"))
    for sick in row.sick:
        sick.wait_for_stalled_call()
    row.sick[0].wait_for_stalled_call()  # that one reads
    for sick in row.sick:
        sick.release()
    assert reading.result(LONG_S) == page("a")


def test_the_callers_buffer_is_the_callers_again_after_the_put(row: Row) -> None:
    row.sick[1].stall()
    row.put("first")
    row.sick[1].wait_for_stalled_call()
    buffer = bytearray(page("a"))
    assert row.storage.put(["a"], [memoryview(buffer)]) == [True]
    buffer[:] = bytes(len(buffer))
    row.sick[1].release()
    row.settle()
    assert get(row.sick[1].inner, "a") == page("a")


def test_a_backlog_is_not_served_from_a_damaged_copy(make_row: MakeRow) -> None:
    row = make_row((ROOM, ROOM, ROOM))
    row.go_down(2)
    row.put("a", "b")
    row.settle()
    row.sick[0].flip("a")
    row.sick[0].flip("b")
    row.sick[1].inner.delete(["b"])
    row.come_up(2)
    row.settle()
    assert get(row.sick[2].inner, "a") == page("a")
    assert row.has(2, "b") == ""


def test_a_tier_that_is_behind_gets_a_backlog_instead_of_filling_memory(make_row: MakeRow) -> None:
    row = make_row(waiting_bytes=80)
    row.sick[1].stall()
    row.put("first")
    row.sick[1].wait_for_stalled_call()
    assert row.put("a", "b", "c", "d") == [True] * 4
    assert row.waiting_bytes() == [0, 80]
    assert row.storage.counts["backlog: behind"] == 2
    row.sick[1].release()
    row.settle()
    assert row.has(1, *"abcd") == "a b c d"
    assert row.waiting_bytes() == [0, 0]


def test_an_object_larger_than_may_wait_waits_alone(make_row: MakeRow) -> None:
    row = make_row(waiting_bytes=10)
    put(row.sick[1].inner, far=page("far"))
    assert read(row.storage, "far") == page("far")
    row.settle()
    row.put("a")
    row.settle()
    assert (row.has(0, "far"), row.has(1, "a")) == ("far", "a")
    assert row.storage.counts["backlog: behind"] == row.storage.counts["promotion dropped: behind"] == 0


def test_what_one_tier_has_no_room_for_another_takes(make_row: MakeRow) -> None:
    row = make_row((30, ROOM))
    assert row.put("a") == [True]
    row.settle()
    assert (row.has(0, "a"), row.has(1, "a")) == ("", "a")
    assert row.backlogs() == [0, 0]
    assert make_row((30, 30)).put("a") == [False]
    far = make_row((ROOM, 30))
    assert far.put("a") == [True]
    far.settle()
    assert far.storage.counts["dropped: no space"] == 1
    assert far.backlogs() == [0, 0]


def test_a_put_raises_when_every_tier_does_and_is_a_miss_when_all_are_down(row: Row) -> None:
    for sick in row.sick:
        sick.dead = True
    with pytest.raises(StorageError, match="injected"):
        row.put("a")
    assert not row.storage.up
    assert row.put("a") == [False]
    assert row.storage.exists(["a"]) == [False]
    assert read(row.storage, "a") is None
    row.come_up(1)
    assert row.storage.up
    assert row.put("a") == [True]


def test_what_only_the_far_tier_has_is_found_and_promoted(row: Row) -> None:
    put(row.sick[1].inner, a=page("a"), c=page("c"))
    put(row.sick[0].inner, b=page("b"))
    assert row.storage.exists(list("abcd")) == [True, True, True, False]
    assert [read(row.storage, name) for name in "abcd"] == [page("a"), page("b"), page("c"), None]
    row.settle()
    assert row.has(0, *"abcd") == "a b c"
    assert row.storage.counts["promoted"] == 2
    asked = row.sick[1].counts["get"]
    assert read(row.storage, "a") == page("a")
    assert row.sick[1].counts["get"] == asked


@pytest.mark.parametrize(
    ("how", "data"), [({"whole": None}, page("a")), ({}, b"?" * 40)], ids=["without a judge", "not whole"]
)
def test_what_is_not_known_to_be_whole_is_not_promoted(make_row: MakeRow, how: dict[str, None], data: bytes) -> None:
    row = make_row(**how)
    put(row.sick[1].inner, a=data)
    assert read(row.storage, "a") == data, "the caller decides for itself, and deletes it"
    row.settle()
    assert row.has(0, "a") == ""


def test_a_near_tier_that_is_behind_or_down_is_no_place_to_promote_to(make_row: MakeRow) -> None:
    row = make_row(waiting_bytes=40)
    put(row.sick[1].inner, a=page("a"), b=page("b"), c=page("c"))
    row.sick[0].stall("put")
    assert read(row.storage, "a") == page("a")
    row.sick[0].wait_for_stalled_call()
    assert read(row.storage, "b") == page("b")
    assert read(row.storage, "c") == page("c")
    assert row.storage.counts["promotion dropped: behind"] == 1
    row.sick[0].release()
    row.settle()
    assert row.has(0, *"abc") == "a b"
    row.go_down(0)
    assert read(row.storage, "c") == page("c")
    assert row.storage.counts["promotion dropped: down"] == 1


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_copy_is_read_from_the_next_tier_and_mended_where_it_lay(row: Row, damage: str) -> None:
    row.put("a")
    row.settle()
    getattr(row.sick[0], damage)("a")
    assert read(row.storage, "a") == page("a")
    row.settle()
    assert get(row.sick[0].inner, "a") == page("a")


def test_what_is_dropped_comes_back_from_no_tier(row: Row) -> None:
    row.sick[1].stall("put")
    row.put("a")
    row.sick[1].wait_for_stalled_call()  # "a" is on its way to the far tier, and "b" waits
    row.put("b")
    assert row.storage.drop() == 2
    row.sick[1].release()
    row.settle()
    assert (row.has(0, "a", "b"), row.has(1, "a", "b")) == ("", "")


def test_a_drop_that_a_tier_fails_is_done_in_the_others_and_told(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    row.put("a")
    row.settle()
    row.sick[1].rules = [Rule("raise", "drop")]
    assert row.storage.drop() == 1
    assert (row.has(0, "a"), row.has(1, "a")) == ("", "a")
    assert "keeps objects that were dropped" in caplog.text
    row.sick[0].rules = [Rule("raise", "drop")]
    with pytest.raises(StorageError, match="injected"):
        row.storage.drop()
