"""Storages in a row are one storage: the first that can answers, the others follow, and nothing comes back wrong."""

import hashlib
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from memories import over_memories

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import Breaker, MemoryStorage, Storage, StorageUsage, Tiers
from kvarve.testing import FaultyStorage, MakeStorage, Rule, StorageSuite
from kvarve.testing.suite import LABEL, get, put, there

LONG_S = 20.0  # nothing here waits so long unless something is broken
ROOM = 1 << 20


def page(name: str, size_bytes: int = 40) -> bytes:
    """What is stored under a name: it says whether it is whole."""
    body = (name.encode() * size_bytes)[: size_bytes - 4]
    return hashlib.sha256(body).digest()[:4] + body


def whole(record: memoryview) -> bool:
    return hashlib.sha256(record[4:]).digest()[:4] == record[:4]


def read(storage: Storage, name: str, size_bytes: int = 40) -> bytes | None:
    """A page of a known size."""
    buffer = bytearray(size_bytes)
    (found,) = storage.get([name], [memoryview(buffer)])
    return None if found is None else bytes(buffer[:found])


class Row:
    """Tiers that fail as told, each behind a breaker that opens at the first failure and asks when the test says so."""

    def __init__(self, capacities: Sequence[int] = (ROOM, ROOM), **more: object) -> None:
        self.before = threading.active_count()
        self.sick = [FaultyStorage(MemoryStorage(size, LABEL, "model A"), stall_limit_s=LONG_S) for size in capacities]
        self.pauses = [queue.Queue[threading.Event]() for _ in capacities]
        self.told: queue.Queue[bool] = queue.Queue()
        self.breakers = [
            Breaker(sick, deadline_s=LONG_S, failures=1, close_s=1.0, pause=self._pause(pauses))
            for sick, pauses in zip(self.sick, self.pauses, strict=True)
        ]
        self.storage = Tiers(
            self.breakers, **({"whole": whole, "changed": lambda: self.told.put(self.storage.up)} | more)
        )
        self.callers = ThreadPoolExecutor(4)
        self.settle()

    @staticmethod
    def _pause(pauses: queue.Queue[threading.Event]) -> Callable[[threading.Event, float], None]:
        def pause(event: threading.Event, _: float) -> None:
            pauses.put(event)
            assert event.wait(LONG_S)

        return pause

    def put(self, *names: str) -> list[bool]:
        return put(self.storage, **{name: page(name) for name in names})

    def has(self, number: int, *names: str) -> str:
        """Which of the names one tier has, whatever its state."""
        return there(self.sick[number].inner, *names)

    def settle(self) -> None:
        assert self.storage.settle(LONG_S)

    def go_down(self, number: int) -> None:
        """Notice it by a call of its own."""
        self.sick[number].dead = True
        with pytest.raises(StorageError):
            self.breakers[number].exists(["x"])
        assert not self.breakers[number].up

    def come_up(self, number: int) -> None:
        self.sick[number].dead = False
        event = self.pauses[number].get(timeout=LONG_S)
        while not self.told.empty():
            self.told.get()
        event.set()
        self.told.get(timeout=LONG_S)
        assert self.breakers[number].up

    def hang(self, number: int, call: Callable[[], object]) -> Future[object]:
        self.sick[number].stall()
        hanging = self.callers.submit(call)
        self.sick[number].wait_for_stalled_call()
        return hanging

    def close(self) -> None:
        for sick in self.sick:
            sick.release()
        self.storage.close()
        self.callers.shutdown()


MakeRow = Callable[..., Row]


@pytest.fixture
def make_row() -> Iterator[MakeRow]:
    rows = []

    def make(*args: object, **more: object) -> Row:
        rows.append(Row(*args, **more))
        return rows[-1]

    yield make
    for row in rows:
        row.close()
    for thread in threading.enumerate():
        if thread.name.startswith("kvarve asks a tier"):
            thread.join(LONG_S)
    assert all(threading.active_count() <= row.before for row in rows[:1])


@pytest.fixture
def row(make_row: MakeRow) -> Row:
    return make_row()


class TestTiers(StorageSuite):
    @pytest.fixture(params=["two", "two that promote", "three", "with a dead one behind"])
    def make_storage(self, request: pytest.FixtureRequest) -> Iterator[MakeStorage]:
        kind = request.param

        def build(memory: Callable[[int], Storage]) -> Tiers:
            tiers = [memory(number) for number in range(3 if kind == "three" else 2)]
            if "dead" in kind:
                tiers[1] = FaultyStorage(tiers[1])
                tiers[1].dead = True
            breakers = [Breaker(tier, deadline_s=LONG_S, probe_first_s=0.001) for tier in tiers]
            return Tiers(breakers, whole=(lambda _: True) if "promote" in kind else None)

        with over_memories(build) as make:
            yield make


# --- what is put


def test_what_is_put_is_carried_to_every_tier(row: Row) -> None:
    assert row.put("a", "b") == [True, True]
    assert row.has(0, "a", "b") == "a b"
    row.settle()
    assert row.has(1, "a", "b") == "a b"
    assert row.storage.counts["copied"] == 2


def test_a_far_tier_that_hangs_keeps_nobody_waiting(row: Row) -> None:
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
def test_a_tier_that_is_late_with_what_it_has_is_passed_over_until_it_answers(make_row: MakeRow, number: int) -> None:
    row = make_row(patience_s=0.01)
    row.put("a", "b")
    row.settle()
    other = 1 - number
    row.sick[other].inner.delete(["b"])
    row.sick[number].stall()
    asked = row.sick[number].counts["exists"]
    assert there(row.storage, "a", "b") == "a", "what both have is found, and what only that one has is not"
    row.sick[number].wait_for_stalled_call()
    assert there(row.storage, "a", "b") == "a"
    assert read(row.storage, "a") == page("a")
    assert read(row.storage, "b") is None
    assert row.put("c") == [True]
    assert row.sick[number].counts["exists"] == asked + 1, "and no other call has asked it"
    assert row.has(other, "c") == "c"
    assert row.storage.counts["exists missed: late"] >= 2
    row.sick[number].release()
    while there(row.storage, "b") != "b":  # until its late answer has come
        pass
    row.settle()
    assert row.has(number, "c") == "c"
    assert read(row.storage, "b") == page("b")


def test_storages_that_are_all_late_are_waited_for_by_who_reads(make_row: MakeRow) -> None:
    row = make_row(patience_s=0.01)
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


def test_a_tier_that_was_down_gets_its_backlog(row: Row) -> None:
    row.go_down(1)
    row.put("a", "b")
    row.settle()
    assert row.has(1, "a", "b") == ""
    assert row.storage.counts["owed: down"] == 2
    assert [part.backlog for part in row.storage.parts()] == [0, 2]
    row.come_up(1)
    row.settle()
    assert row.has(1, "a", "b") == "a b"
    assert [part.backlog for part in row.storage.parts()] == [0, 0]


def test_the_first_tier_has_a_backlog_as_any_other(row: Row) -> None:
    row.go_down(0)
    assert row.put("a") == [True]
    assert row.storage.up
    assert read(row.storage, "a") == page("a")
    row.come_up(0)
    row.settle()
    assert row.has(0, "a") == "a"


def test_a_copy_that_raises_joins_the_backlog_until_another_goes_through(make_row: MakeRow) -> None:
    row = make_row()
    row.breakers[1]._failures = 3
    row.sick[1].rules = [Rule("raise", "put", nth=1)]
    row.put("a")
    row.settle()
    assert row.breakers[1].up
    assert (row.has(1, "a"), row.storage.counts["owed: down"]) == ("", 1)
    row.put("b")
    row.settle()
    assert row.has(1, "a", "b") == "a b"


def test_of_a_backlog_that_is_too_long_the_oldest_name_is_dropped(make_row: MakeRow) -> None:
    row = make_row(backlog=2)
    row.go_down(1)
    row.put("a", "b", "c")
    assert row.storage.counts["owed no more: too many"] == 1
    row.come_up(1)
    row.settle()
    assert row.has(1, "a", "b", "c") == "b c"


def test_what_is_gone_leaves_the_backlog(make_row: MakeRow) -> None:
    row = make_row((80, ROOM))
    row.go_down(1)
    row.put("a", "b")
    row.put("c")  # "b" makes room
    row.come_up(1)
    row.settle()
    assert row.has(1, "a", "b", "c") == "a c"
    assert row.storage.counts["owed no more: gone"] == 1


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
    assert [part.waiting_bytes for part in row.storage.parts()] == [0, 80]
    assert row.storage.counts["owed: too much waits"] == 2
    row.sick[1].release()
    row.settle()
    assert row.has(1, *"abcd") == "a b c d"
    assert [part.waiting_bytes for part in row.storage.parts()] == [0, 0]


def test_an_object_larger_than_may_wait_waits_alone(make_row: MakeRow) -> None:
    row = make_row(waiting_bytes=10)
    put(row.sick[1].inner, far=page("far"))
    assert read(row.storage, "far") == page("far")
    row.settle()
    row.put("a")
    row.settle()
    assert (row.has(0, "far"), row.has(1, "a")) == ("far", "a")
    assert row.storage.counts["owed: too much waits"] == row.storage.counts["promotion dropped: too much waits"] == 0


def test_what_one_tier_has_no_room_for_another_takes(make_row: MakeRow) -> None:
    row = make_row((30, ROOM))
    assert row.put("a") == [True]
    row.settle()
    assert (row.has(0, "a"), row.has(1, "a")) == ("", "a")
    assert [part.backlog for part in row.storage.parts()] == [0, 0]
    full = make_row((30, 30))
    assert full.put("a") == [False]


def test_a_far_tier_without_space_has_no_backlog(make_row: MakeRow) -> None:
    row = make_row((ROOM, 30))
    assert row.put("a") == [True]
    row.settle()
    assert row.storage.counts["dropped: no room"] == 1
    assert [part.backlog for part in row.storage.parts()] == [0, 0]


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


# --- what is read


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


def test_without_a_judge_nothing_is_promoted(make_row: MakeRow) -> None:
    row = make_row(whole=None)
    put(row.sick[1].inner, a=page("a"))
    assert read(row.storage, "a") == page("a")
    row.settle()
    assert row.has(0, "a") == ""


def test_what_is_not_whole_is_not_promoted(row: Row) -> None:
    put(row.sick[1].inner, a=b"?" * 40)
    assert read(row.storage, "a") == b"?" * 40, "the caller judges for himself, and deletes it"
    row.settle()
    assert row.has(0, "a") == ""


def test_a_near_tier_that_hangs_is_no_place_to_promote_to(make_row: MakeRow) -> None:
    row = make_row(waiting_bytes=40)
    put(row.sick[1].inner, a=page("a"), b=page("b"), c=page("c"))
    row.sick[0].rules = [Rule("lose")]
    event = threading.Event()
    stalled, real = threading.Event(), row.sick[0].put

    def slow(names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        stalled.set()
        assert event.wait(LONG_S)
        return real(names, data)

    row.sick[0].put = slow  # type: ignore[method-assign]
    assert read(row.storage, "a") == page("a")
    assert stalled.wait(LONG_S)
    assert read(row.storage, "b") == page("b")
    assert read(row.storage, "c") == page("c")
    assert row.storage.counts["promotion dropped: too much waits"] == 1
    event.set()
    row.settle()


def test_nothing_is_promoted_to_a_tier_that_is_down(row: Row) -> None:
    put(row.sick[1].inner, a=page("a"))
    row.go_down(0)
    assert read(row.storage, "a") == page("a")
    assert row.storage.counts["promotion dropped: down"] == 1


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_copy_is_read_from_the_next_tier_and_mended_where_it_lay(row: Row, damage: str) -> None:
    row.put("a")
    row.settle()
    getattr(row.sick[0], damage)("a")
    assert read(row.storage, "a") == page("a")
    row.settle()
    assert get(row.sick[0].inner, "a") == page("a")


def test_of_two_damaged_copies_the_nearer_is_answered_and_the_buffers_end_stays(row: Row) -> None:
    put(row.sick[0].inner, a=b"near")
    put(row.sick[1].inner, a=b"far away")
    buffer = bytearray(b".......")
    assert row.storage.get(["a"], [memoryview(buffer)]) == [4]
    assert buffer == b"near..."


def test_a_tier_that_raises_is_passed_by(row: Row) -> None:
    row.put("a")
    row.settle()
    row.sick[0].dead = True
    assert read(row.storage, "a") == page("a")
    assert not row.breakers[0].up
    row.sick[1].dead = True
    assert read(row.storage, "a") is None
    row.come_up(0)
    row.come_up(1)
    row.sick[0].dead = row.sick[1].dead = True
    with pytest.raises(StorageError):
        read(row.storage, "a")


# --- what is deleted


def test_what_is_deleted_is_gone_from_all(row: Row) -> None:
    row.put("a", "b")
    row.settle()
    assert row.storage.delete(["a", "x"]) == [True, False]
    assert [row.has(number, "a", "b") for number in range(2)] == ["b", "b"]


def test_what_is_deleted_before_it_was_carried_is_not_carried(row: Row) -> None:
    row.sick[1].stall()
    row.put("first")
    row.sick[1].wait_for_stalled_call()
    row.put("a", "b")
    deleting = row.callers.submit(row.storage.delete, ["a"])
    row.sick[1].wait_for_stalled_call()  # the far tier is asked to delete it as well
    row.sick[1].release()
    assert deleting.result(LONG_S) == [True]
    row.settle()
    assert row.has(1, "first", "a", "b") == "first b"
    assert row.storage.counts["copied"] == 2


def test_what_is_deleted_on_its_way_is_there_for_nobody_and_goes_when_it_has_arrived(row: Row) -> None:
    arrived, go_on, real = threading.Event(), threading.Event(), row.sick[1].put

    def slow(names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        assert go_on.wait(LONG_S)
        stored = real(names, data)
        arrived.set()
        assert leave.wait(LONG_S)
        return stored

    leave = threading.Event()
    row.sick[1].put = slow  # type: ignore[method-assign]
    row.put("a")
    while row.storage._replicators[1].in_flight != {"a"}:
        row.storage.settle(0.001)
    assert row.storage.delete(["a"]) == [True]
    go_on.set()
    assert arrived.wait(LONG_S)
    assert row.has(1, "a") == "a"
    assert row.storage.exists(["a"]) == [False]
    assert read(row.storage, "a") is None
    assert row.storage.delete(["a"]) == [False]
    put(row.storage, a=page("another", 40))
    leave.set()
    row.settle()
    assert get(row.sick[1].inner, "a") == page("another", 40)


def test_what_is_deleted_leaves_the_backlog(row: Row) -> None:
    row.go_down(1)
    row.put("a", "b")
    row.storage.delete(["a"])
    row.come_up(1)
    row.settle()
    assert row.has(1, "a", "b") == "b"


def test_a_put_that_a_delete_overtakes_is_not_carried_on(row: Row) -> None:
    stored, go_on, real = threading.Event(), threading.Event(), row.sick[0].put

    def slow(names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        answers = real(names, data)
        stored.set()
        assert go_on.wait(LONG_S)
        return answers

    row.sick[0].put = slow  # type: ignore[method-assign]
    putting = row.callers.submit(row.put, "a")
    assert stored.wait(LONG_S)
    assert row.storage.delete(["a"]) == [True]
    go_on.set()
    assert putting.result(LONG_S) == [True]
    row.settle()
    assert [row.has(number, "a") for number in range(2)] == ["", ""]


def test_a_delete_that_one_tier_cannot_do_is_done_in_the_others(row: Row) -> None:
    row.put("a")
    row.settle()
    row.sick[0].rules = [Rule("raise", "delete")]
    assert row.storage.delete(["a"]) == [True]
    assert row.has(1, "a") == ""
    row.sick[1].rules = [Rule("raise", "delete")]
    row.come_up(0)
    with pytest.raises(StorageError, match="delete failed"):
        row.storage.delete(["a"])


# --- the whole


def test_each_tier_can_be_looked_at(make_row: MakeRow) -> None:
    row = make_row((ROOM, 1000))
    row.put("a")
    row.settle()
    row.storage.parts()
    row.settle()
    assert row.storage.usage() == StorageUsage(1, 40, ROOM, 0)
    assert [part.usage for part in row.storage.parts()] == [StorageUsage(1, 40, ROOM, 0), StorageUsage(1, 40, 1000, 0)]
    row.go_down(1)
    assert [part.up for part in row.storage.parts()] == [True, False]
    assert row.storage.last_error == "tier 1: exists: injected: the backend is dead, exists did 0 of 1"
    assert row.storage.since == row.breakers[1].since


def test_a_tier_that_hangs_keeps_nobody_waiting_who_looks(row: Row) -> None:
    row.put("a")
    row.settle()
    row.storage.parts()
    row.settle()
    row.sick[1].stall()
    for _ in range(3):
        assert [part.usage.objects for part in row.storage.parts()] == [1, 1]
    row.sick[1].release()


def test_closing_carries_what_waits(row: Row) -> None:
    names = [f"page-{i}" for i in range(50)]
    row.put(*names)
    region = row.sick[1].inner._region
    row.storage.close()
    assert [*region.objects] == names


def test_closing_leaves_a_tier_that_hangs_and_closes_the_others(make_row: MakeRow) -> None:
    row = make_row(close_s=0.01)
    row.breakers[1]._close_s = 0.01
    row.sick[1].stall()
    row.put("a")
    row.sick[1].wait_for_stalled_call()
    row.put("b")
    row.storage.close()
    assert row.sick[0].inner._region is None
    assert row.sick[1].inner._region is not None
    assert row.storage.counts["dropped: closed"] == 1
    with pytest.raises(StorageError, match="closed"):
        row.put("c")
    row.sick[1].release()
    for replicator in row.storage._replicators:
        replicator.thread.join(LONG_S)
    row.breakers[1]._close_s = LONG_S


def test_closing_closes_all_even_if_one_cannot(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise StorageError("the last sync failed")

    monkeypatch.setattr(row.sick[0], "close", failing)
    with pytest.raises(StorageError, match="the last sync failed"):
        row.storage.close()
    assert row.sick[1].inner._region is None


def test_a_name_that_cannot_be_is_refused_though_all_are_down(row: Row) -> None:
    row.go_down(0)
    row.go_down(1)
    with pytest.raises(ConfigError, match="cannot name"):
        row.storage.exists(["a/b"])


def test_any_history_of_calls_and_faults_gives_back_what_was_put_or_nothing() -> None:
    """Three tiers of little room that fail, lose, cut and flip. What is whole is what was put; and all heals."""
    names = st.sampled_from([f"page-{i}" for i in range(8)])
    faults = st.sampled_from(["raise", "lose", "truncate", "flip", "short"])

    class History(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.row = Row((200, 300, 400))
            for breaker in self.row.breakers:
                breaker._pause, breaker._probe_first_s, breaker._probe_s = threading.Event.wait, 0.0005, 0.0005
                breaker._probe_most_s = 0.001
            self.put_once: set[str] = set()

        @rule(batch=st.lists(names, max_size=4))
        def put(self, batch: list[str]) -> None:
            with suppress(StorageError):
                self.row.storage.put(batch, [memoryview(page(name)) for name in batch])
            self.put_once |= {*batch}

        @rule(batch=st.lists(names, max_size=4))
        def get(self, batch: list[str]) -> None:
            buffers = [bytearray(40) for _ in batch]
            try:
                sizes = self.row.storage.get(batch, [memoryview(buffer) for buffer in buffers])
            except StorageError:
                return
            bad = []
            for name, size, buffer in zip(batch, sizes, buffers, strict=True):
                assert size is None or name in self.put_once
                if size == 40 and whole(memoryview(buffer)):
                    assert buffer == page(name)
                elif size is not None:
                    bad.append(name)
            self.delete(bad)

        @rule(batch=st.lists(names, max_size=3))
        def delete(self, batch: list[str]) -> None:
            with suppress(StorageError):
                self.row.storage.delete(batch)

        @rule(batch=st.lists(names, max_size=4))
        def exists(self, batch: list[str]) -> None:
            try:
                found = self.row.storage.exists(batch)
            except StorageError:
                return
            assert {name for name, there in zip(batch, found, strict=True) if there} <= self.put_once

        @rule(number=st.integers(0, 2), fault=faults, probability=st.sampled_from([0.1, 0.5, 1.0]))
        def fail(self, number: int, fault: str, probability: float) -> None:
            self.row.sick[number].rules = [Rule(fault, probability=probability)]  # type: ignore[arg-type]

        @rule(number=st.integers(0, 2), dead=st.booleans())
        def die(self, number: int, dead: bool) -> None:
            self.row.sick[number].dead = dead

        @rule(number=st.integers(0, 2))
        def get_well(self, number: int) -> None:
            self.row.sick[number].rules, self.row.sick[number].dead = [], False

        @rule()
        def settle(self) -> None:
            self.row.settle()

        def teardown(self) -> None:
            try:
                for number in range(3):
                    self.get_well(number)
                while not all(breaker.up for breaker in self.row.breakers):
                    self.row.told.get(timeout=LONG_S)
                all_names = [f"page-{i}" for i in range(8)]
                self.row.settle()
                self.row.storage.delete(all_names)
                self.row.settle()
                assert [self.row.has(number, *all_names) for number in range(3)] == ["", "", ""]
                assert self.row.put("page-0", "page-1") == [True, True]
                self.row.settle()
                assert [self.row.has(number, "page-0", "page-1") for number in range(3)] == ["page-0 page-1"] * 3
                assert all(part.waiting_bytes == part.backlog == 0 for part in self.row.storage.parts())
                assert not any(
                    replicator.deleted_in_flight or replicator.in_flight for replicator in self.row.storage._replicators
                )
            finally:
                self.row.close()

    run_state_machine_as_test(
        History, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, print_blob=True)
    )


def test_threads_on_failing_tiers_get_what_was_put_or_nothing() -> None:
    seed = 11
    row = Row((2000, 4000))
    for breaker in row.breakers:
        breaker._pause, breaker._probe_s = threading.Event.wait, 0.0005
        breaker._probe_first_s, breaker._probe_most_s = 0.0005, 0.001
    for sick in row.sick:
        sick.rules = [Rule("raise", call, probability=0.05) for call in ("exists", "get", "put", "delete")]
        sick.rules += [Rule("flip", probability=0.05), Rule("truncate", probability=0.05)]
    start = threading.Barrier(6, timeout=LONG_S)

    def work(worker: int) -> None:
        luck = random.Random(seed * 1000 + worker)
        start.wait()
        for _ in range(150):
            name = f"page-{luck.randrange(60)}"
            try:
                row.put(name, f"page-{luck.randrange(60)}")
                data = read(row.storage, name)
                if data is not None and len(data) == 40 and whole(memoryview(data)):
                    assert data == page(name)
                elif data is not None or luck.random() < 0.1:
                    row.storage.delete([name])
                row.storage.exists([name])
            except StorageError:
                pass

    with ThreadPoolExecutor(6) as callers:
        for ended in [callers.submit(work, worker) for worker in range(6)]:
            ended.result(LONG_S)
    for sick in row.sick:
        sick.rules = []
    while not all(breaker.up for breaker in row.breakers):
        row.told.get(timeout=LONG_S)
    row.settle()
    names = [f"page-{i}" for i in range(60)]
    row.storage.delete(names)
    row.storage.parts()
    row.settle()
    assert row.storage.exists(names) == [False] * 60
    assert [part.usage.bytes for part in row.storage.parts()] == [0, 0], f"seed {seed}"
    row.close()


def test_memory_that_is_lent_is_lent_to_every_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[tuple[Storage, memoryview]] = []
    monkeypatch.setattr(MemoryStorage, "register", lambda storage, memory: lent.append((storage, memory)))
    row, memory = Row(), memoryview(bytearray(64))
    row.storage.register(memory)
    assert [(storage, view is memory) for storage, view in lent] == [(sick.inner, True) for sick in row.sick]
    row.storage.close()
