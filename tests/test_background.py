"""Calls on daemon threads: a result or an exception, a caller that stops waiting, no thread that outlives its owner."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from gates import LONG_S, Gate, threads
from kvarve.errors import StorageError
from kvarve.system.background import Abandoned, BackgroundCall, WorkerPool


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
    assert thread.name == "test name" and thread.daemon and not thread.is_alive()
    assert call.result() is thread, "as often as it is asked for"


def test_a_call_raises_its_exception_even_a_timeout_of_its_own() -> None:
    gate = Gate(TimeoutError("the work's own"))
    call = BackgroundCall("test exception", gate)
    gate.may_end.set()
    with pytest.raises(TimeoutError, match="the work's own"):
        call.result(LONG_S)


@pytest.mark.parametrize(("answer", "kept"), [("a storage", ["a storage"]), (ValueError("no"), [])])
def test_the_late_result_of_an_abandoned_call_is_cleaned_up_once_and_an_exception_needs_none(
    answer: object, kept: list[str]
) -> None:
    gate, cleaned = Gate(answer), list[str]()
    call = BackgroundCall("test late", gate)
    with pytest.raises(Abandoned):
        call.result(0.0, late=cleaned.append)
    assert not call.ended() and cleaned == []
    gate.may_end.set()
    assert call.ended(LONG_S)
    assert cleaned == kept


def test_an_abandoned_call_may_be_waited_for_again() -> None:
    gate = Gate(7)
    call = BackgroundCall("test again", gate)
    with pytest.raises(Abandoned):
        call.result(0.0)
    gate.may_end.set()
    assert call.result(LONG_S) == 7


# --- a pool


def test_work_is_done_in_its_order_and_its_answer_or_error_goes_to_the_future_of_its_caller() -> None:
    pool, done, gate, future = WorkerPool(1, "test order"), list[int](), Gate("first"), Future[str]()

    def fails() -> None:
        raise ValueError("no")

    assert pool.run(gate, future) is future
    for i in range(5):
        pool.run(lambda i=i: done.append(i))  # type: ignore[misc]
    failed = pool.run(fails)
    assert gate.begun.wait(LONG_S)
    assert not future.cancel(), "it has begun"
    gate.may_end.set()
    assert future.result(LONG_S) == "first"
    with pytest.raises(ValueError, match="no"):
        failed.result(LONG_S)
    assert done == [0, 1, 2, 3, 4]


def test_work_that_is_cancelled_before_it_begins_is_never_done_and_holds_nothing() -> None:
    pool, gate = WorkerPool(1, "test cancel"), Gate()

    class Book:
        pass

    book = Book()
    held = weakref.ref(book)
    pool.run(gate)
    assert gate.begun.wait(LONG_S)
    waiting = pool.run(lambda book=book: pytest.fail(f"{book} was read"))  # type: ignore[misc]
    del book
    assert held() is not None
    assert waiting.cancel()
    gc.collect()
    assert held() is None  # although the pool's thread has not come to it
    gate.may_end.set()
    with pytest.raises(CancelledError):
        waiting.result(LONG_S)
    assert pool.run(lambda: 7).result(LONG_S) == 7


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
