"""Worker threads for slow work off the event loop, by size, so that a short request never waits behind a long one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from kvarve.system.background import BackgroundCall, WorkerPool

T = TypeVar("T")

# (most bytes of text of a work item, threads) of each lane; the last takes any size.
LANES = ((64 << 10, 2), (1 << 20, 1), (None, 1))


class Lanes:
    """Lanes by size."""

    def __init__(self, name: str) -> None:
        self._lanes = [(most, WorkerPool(threads, f"{name} {i}")) for i, (most, threads) in enumerate(LANES)]

    def run(self, size: int, work: Callable[[], T]) -> "Future[T]":
        """Queue work on a text of `size` bytes."""
        return next(lane for most, lane in self._lanes if most is None or size <= most).run(work)


async def apart(work: Callable[[], T]) -> T:
    """Run slow work on a daemon thread of its own, for which the interpreter does not wait at exit."""
    return await asyncio.wrap_future(BackgroundCall("kvarve apart", work).future)


class Shared(Generic[T]):
    """Work that is done once at a time, whoever asks. Belongs to the event loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work, self._one = work, asyncio.Lock()
        self._made: tuple[float, T] | None = None  # when it was begun, and the result

    async def get(self, fresh_s: float = 0.0) -> T:
        """The result of work that has begun since the question, or up to `fresh_s` before it."""
        asked_s = time.monotonic()
        async with self._one:
            if self._made is None or self._made[0] < asked_s - fresh_s:
                self._made = time.monotonic(), await self._work()
            return self._made[1]
