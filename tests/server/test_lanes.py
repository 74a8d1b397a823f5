"""Threads for long work: short work passes long work, and no program waits for work apart."""

import asyncio
import threading

import pytest

from gates import LONG_S, Gate
from kvarve.reference.server.work_threads import LANES, Lanes, Shared, apart


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


def test_work_apart_has_a_thread_of_its_own_that_no_program_waits_for() -> None:
    async def several() -> list[threading.Thread]:
        return await asyncio.gather(*[apart(threading.current_thread) for _ in range(3)])

    found = asyncio.run(several())
    assert all(thread.daemon for thread in found) and threading.current_thread() not in found

    async def fails() -> None:
        await apart(lambda: pytest.fail("no"))

    with pytest.raises(BaseException, match="no"):
        asyncio.run(fails())


def test_all_who_ask_before_shared_work_begins_get_its_result_and_one_runs_at_a_time() -> None:
    async def asked() -> None:
        begun, go = list[int](), [asyncio.Event() for _ in range(3)]

        async def work() -> int:
            number = len(begun)
            begun.append(number)
            await go[number].wait()
            if number == 2:
                raise OSError
            return number

        shared = Shared(work)
        first = asyncio.create_task(shared.get())
        while not begun:
            await asyncio.sleep(0)
        others = [asyncio.create_task(shared.get()) for _ in range(40)]
        await asyncio.sleep(0)
        others.pop().cancel()  # a client that leaves takes nothing from the others
        await asyncio.sleep(0)
        assert begun == [0]
        go[0].set()
        go[1].set()
        assert (await first, {*await asyncio.gather(*others)}) == (0, {1}) and begun == [0, 1]
        go[2].set()
        with pytest.raises(OSError):
            await shared.get()

    asyncio.run(asked())
