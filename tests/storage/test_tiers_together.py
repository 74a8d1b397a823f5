"""A delete reaches all tiers; closing, usage, and any history of calls and faults."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tier_rows import LONG_S, ROOM, MakeRow, Row, page, read, whole

from gates import Gate
from kvarve.errors import StorageError
from kvarve.storage import MemoryStorage, Storage, StorageUsage
from kvarve.system.regions import HostRegion
from kvarve.testing import Rule
from kvarve.testing.suite import get, put


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


def slow_puts(row: Row, number: int) -> tuple[Gate, Gate]:
    """Gates before and after a put of one tier."""
    real, before, after = row.sick[number].put, Gate(), Gate()

    def slow(names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        before()
        stored = real(names, data)
        after()
        return stored

    row.sick[number].put = slow  # type: ignore[method-assign]
    return before, after


def test_an_object_that_is_deleted_in_flight_is_hidden_and_removed_when_it_has_arrived(row: Row) -> None:
    before, after = slow_puts(row, 1)
    row.put("a")
    assert before.begun.wait(LONG_S)
    assert row.storage.delete(["a"]) == [True]
    before.may_end.set()
    assert after.begun.wait(LONG_S)
    assert row.has(1, "a") == "a"
    assert row.storage.exists(["a"]) == [False]
    assert read(row.storage, "a") is None
    assert row.storage.delete(["a"]) == [False]
    put(row.storage, a=page("another", 40))
    after.may_end.set()
    row.settle()
    assert get(row.sick[1].inner, "a") == page("another", 40)


def test_a_put_that_a_delete_overtakes_is_not_carried_on(row: Row) -> None:
    before, after = slow_puts(row, 0)
    before.may_end.set()
    putting = row.callers.submit(row.put, "a")
    assert after.begun.wait(LONG_S)
    assert row.storage.delete(["a"]) == [True]
    after.may_end.set()
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


def test_each_tier_can_be_looked_at_also_while_one_hangs(make_row: MakeRow) -> None:
    row = make_row((ROOM, 1000))
    row.put("a")
    row.settle()
    assert row.storage.usage() == StorageUsage(1, 40, ROOM, 0)
    row.settle()
    known = [StorageUsage(1, 40, ROOM, 0), StorageUsage(1, 40, 1000, 0)]
    assert [tier.known for tier in row.storage.tiers] == known
    row.sick[1].stall()
    assert row.storage.usage().objects == 1
    assert [tier.known for tier in row.storage.tiers] == known
    row.sick[1].release()
    row.settle()
    row.go_down(1)
    assert [tier.up for tier in row.storage.tiers] == [True, False]
    assert row.storage.last_error == "tier 1: exists: injected: the backend is dead, exists did 0 of 1"
    assert row.storage.since == row.breakers[1].since


def test_closing_carries_what_waits(row: Row) -> None:
    row.put(*(f"page-{i}" for i in range(50)))
    row.storage.close()
    assert row.storage.counts["copied"] == 50
    assert row.is_closed(0) and row.is_closed(1)


def test_closing_leaves_a_tier_that_hangs_and_closes_the_others(make_row: MakeRow) -> None:
    row = make_row(close_s=0.01)
    row.sick[1].stall()
    row.put("a")
    row.sick[1].wait_for_stalled_call()
    row.put("b")
    row.storage.close()
    assert row.is_closed(0) and not row.is_closed(1)
    assert row.storage.counts["dropped: closed"] == 1
    with pytest.raises(StorageError, match="closed"):
        row.put("c")


def test_closing_closes_all_even_if_one_cannot(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise StorageError("the last sync failed")

    monkeypatch.setattr(row.sick[0], "close", failing)
    with pytest.raises(StorageError, match="the last sync failed"):
        row.storage.close()
    assert row.is_closed(1)


def test_any_history_of_calls_and_faults_gives_back_what_was_put_or_nothing() -> None:
    """Three small tiers that fail, lose, cut and flip. Every intact object is one that was put; all tiers recover."""
    names = st.sampled_from([f"page-{i}" for i in range(8)])
    faults = st.sampled_from(["raise", "lose", "truncate", "flip", "short"])

    class History(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.row = Row((200, 300, 400), probes=True)
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
                self.row.recover()
                all_names = [f"page-{i}" for i in range(8)]
                self.row.storage.delete(all_names)
                self.row.settle()
                assert [self.row.has(number, *all_names) for number in range(3)] == ["", "", ""]
                assert self.row.put("page-0", "page-1") == [True, True]
                self.row.settle()
                assert [self.row.has(number, "page-0", "page-1") for number in range(3)] == ["page-0 page-1"] * 3
                assert not any(self.row.backlogs() + self.row.waiting_bytes())

            finally:
                self.row.close()

    run_state_machine_as_test(
        History, settings=settings(max_examples=12, stateful_step_count=30, deadline=None, print_blob=True)
    )


def test_threads_on_failing_tiers_get_what_was_put_or_nothing() -> None:
    seed = 11
    row = Row((2000, 4000), probes=True)
    for sick in row.sick:
        sick.rules = [Rule("raise", call, probability=0.05) for call in ("exists", "get", "put", "delete")]
        sick.rules += [Rule("flip", probability=0.05), Rule("truncate", probability=0.05)]
    start = threading.Barrier(6, timeout=LONG_S)

    def work(worker: int) -> None:
        luck = random.Random(seed * 1000 + worker)
        start.wait()
        for _ in range(50):
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
    row.recover()
    names = [f"page-{i}" for i in range(60)]
    row.storage.delete(names)
    row.storage.usage()
    row.settle()
    assert row.storage.exists(names) == [False] * 60
    assert [tier.known.bytes for tier in row.storage.tiers] == [0, 0], f"seed {seed}"
    row.close()


def test_memory_that_is_lent_is_lent_to_every_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[tuple[Storage, HostRegion]] = []
    monkeypatch.setattr(MemoryStorage, "register", lambda storage, region: lent.append((storage, region)))
    row, region = Row(), HostRegion(memoryview(bytearray(64)))
    row.storage.register(region)
    assert [(storage, it is region) for storage, it in lent] == [(sick.inner, True) for sick in row.sick]
    row.storage.close()
