"""Threads for long work: short work passes long work, cancelled work is dropped, and no thread outlives its owner."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from gates import LONG_S, Gate, threads
from kvarve.server.lanes import LANES, Lane, Lanes, apart


def test_the_short_passes_the_long() -> None:
    lanes, gates = Lanes("test sizes"), [Gate() for _ in range(10)]
    for gate in gates:
        lanes.run(1 << 30, gate)
    assert gates[0].begun.wait(LONG_S)
    for size in (0, LANES[0][0] or 0, LANES[1][0] or 0):
        assert lanes.run(size, lambda: 7).result(LONG_S) == 7
    assert not gates[-1].begun.is_set()
    for gate in gates:
        gate.may_end.set()


def test_what_is_cancelled_before_it_begins_is_never_done_and_holds_nothing() -> None:
    lane, gate = Lane(1, "test cancel"), Gate()

    class Book:
        pass

    book = Book()
    held = weakref.ref(book)
    lane.run(gate)
    assert gate.begun.wait(LONG_S)
    waiting = lane.run(lambda book=book: pytest.fail(f"{book} was read"))  # type: ignore[misc]
    del book
    assert held() is not None
    assert waiting.cancel()
    gc.collect()
    assert held() is None  # although the lane's thread has not reached it
    gate.may_end.set()
    with pytest.raises(CancelledError):
        waiting.result(LONG_S)
    assert lane.run(lambda: 7).result(LONG_S) == 7


def test_a_lane_that_is_forgotten_ends_its_threads_when_its_work_is_done() -> None:
    lane, gate = Lane(3, "test forgotten"), Gate(7)
    found = threads("test forgotten")
    assert len(found) == 3 and all(thread.daemon for thread in found)
    first, second = lane.run(gate), lane.run(lambda: 8)
    del lane
    gc.collect()
    gate.may_end.set()
    assert (first.result(LONG_S), second.result(LONG_S)) == (7, 8)
    for thread in found:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_work_apart_has_a_thread_of_its_own_that_no_program_waits_for() -> None:
    async def several() -> list[threading.Thread]:
        return await asyncio.gather(*[apart(threading.current_thread) for _ in range(3)])

    found = asyncio.run(several())
    assert all(thread.daemon for thread in found) and threading.current_thread() not in found

    async def fails() -> None:
        await apart(lambda: pytest.fail("no"))

    with pytest.raises(BaseException, match="no"):
        asyncio.run(fails())
