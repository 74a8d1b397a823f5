"""Calls on daemon threads: a result or an exception, a caller that stops waiting, no thread that outlives its owner."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from gates import LONG_S, Gate, threads
from kvarve.background import Abandoned, BackgroundCall, WorkerPool
from kvarve.errors import StorageError


def refuse_threads(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """The system starts no more threads, after some."""
    start: Callable[[threading.Thread], None] = threading.Thread.start
    left = [None] * after

    def refusing(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


# --- one call


def test_a_call_gives_its_result_on_a_daemon_thread_of_its_name_that_has_ended_then() -> None:
    call = BackgroundCall("test name", threading.current_thread)
    thread = call.result(LONG_S)
    assert thread.name == "test name"
    assert thread.daemon
    assert not thread.is_alive()
    assert call.result() is thread, "as often as it is asked for"


def test_a_call_raises_its_exception_even_a_timeout_of_its_own() -> None:
    gate = Gate(TimeoutError("the work's own"))
    call = BackgroundCall("test exception", gate)
    gate.may_end.set()
    with pytest.raises(TimeoutError, match="the work's own"):
        call.result(LONG_S)


def test_the_late_result_of_an_abandoned_call_is_cleaned_up_once() -> None:
    gate, cleaned = Gate("a storage"), list[str]()
    call = BackgroundCall("test late", gate)
    with pytest.raises(Abandoned):
        call.result(0.0, late=cleaned.append)
    assert not call.ended()
    assert cleaned == []
    gate.may_end.set()
    assert call.ended(LONG_S)
    assert cleaned == ["a storage"]


def test_the_late_exception_of_an_abandoned_call_needs_no_cleaning_up() -> None:
    gate, cleaned = Gate(ValueError("no")), list[str]()
    call = BackgroundCall("test late", gate)
    with pytest.raises(Abandoned):
        call.result(0.0, late=cleaned.append)
    gate.may_end.set()
    assert call.ended(LONG_S)
    assert cleaned == []


def test_an_abandoned_call_may_be_waited_for_again() -> None:
    gate = Gate(7)
    call = BackgroundCall("test again", gate)
    with pytest.raises(Abandoned):
        call.result(0.0)
    gate.may_end.set()
    assert call.result(LONG_S) == 7


def test_a_system_without_threads_is_trouble_of_a_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    with pytest.raises(StorageError, match="the system starts no thread for 'test none': can't start new thread"):
        BackgroundCall("test none", lambda: 7)


# --- a pool


def test_work_is_done_in_its_order_and_its_error_goes_to_its_caller() -> None:
    pool, done, gate = WorkerPool(1, "test order"), list[int](), Gate("first")

    def fails() -> None:
        raise ValueError("no")

    first = pool.run(gate)
    later: list[Future[Any]] = [pool.run(lambda i=i: done.append(i)) for i in range(5)]  # type: ignore[misc]
    failed = pool.run(fails)
    gate.may_end.set()
    assert first.result(LONG_S) == "first"
    with pytest.raises(ValueError, match="no"):
        failed.result(LONG_S)
    assert done == [0, 1, 2, 3, 4]
    assert all(each.done() for each in later)


def test_work_that_is_cancelled_before_it_begins_is_never_done() -> None:
    pool, gate = WorkerPool(1, "test cancel"), Gate()
    pool.run(gate)
    waiting = pool.run(lambda: pytest.fail("it was done"))
    assert waiting.cancel()
    gate.may_end.set()
    with pytest.raises(CancelledError):
        waiting.result(LONG_S)
    assert pool.run(lambda: 7).result(LONG_S) == 7


def test_work_that_has_begun_cannot_be_cancelled_and_ends() -> None:
    pool, gate = WorkerPool(1, "test begun"), Gate(7)
    future = pool.run(gate)
    assert gate.begun.wait(LONG_S)
    assert not future.cancel()
    gate.may_end.set()
    assert future.result(LONG_S) == 7


def test_the_result_goes_to_the_future_that_the_caller_supplies() -> None:
    future: Future[int] = Future()
    assert WorkerPool(1, "test future").run(lambda: 7, future) is future
    assert future.result(LONG_S) == 7


def test_an_idle_pool_keeps_nothing_of_its_last_work_alive() -> None:
    pool = WorkerPool(1, "test idle")
    gate = Gate()
    held = weakref.ref(gate)
    gate.may_end.set()
    pool.run(gate).result(LONG_S)
    del gate
    waiting = pool.run(lambda: 7)  # after which the thread has left the work before
    assert waiting.result(LONG_S) == 7
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("end", ["collected", "shut down"])
def test_a_pool_that_is_collected_or_shut_down_ends_its_threads_when_its_work_is_done(end: str) -> None:
    pool, gate = WorkerPool(3, f"test {end}"), Gate(7)
    found = threads(f"test {end}")
    assert len(found) == 3
    assert all(thread.daemon for thread in found)
    first, second = pool.run(gate), pool.run(lambda: 8)
    if end == "shut down":
        pool.shutdown()
    del pool
    gc.collect()
    gate.may_end.set()
    assert (first.result(LONG_S), second.result(LONG_S)) == (7, 8)
    for thread in found:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_pool_works_with_the_threads_that_the_system_starts_if_it_is_one_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_threads(monkeypatch, after=1)
    assert WorkerPool(3, "test few").run(lambda: 7).result(LONG_S) == 7
    with pytest.raises(StorageError, match="the system starts no thread for 'test none 0'"):
        WorkerPool(3, "test none")
