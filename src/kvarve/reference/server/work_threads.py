"""Worker threads for slow work off the event loop, by size, so that a short request never waits behind a long one."""

import asyncio
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
    """Work that is done once at a time, whoever asks: all who ask before it begins get its result, so that none gets
    one from before the question. Belongs to the event loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work, self._one = work, asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # it waits for the one that runs

    async def get(self) -> T:
        if self._next is None:
            self._next = asyncio.create_task(self._done())
        return await asyncio.shield(self._next)

    async def _done(self) -> T:
        async with self._one:
            self._next = None
            return await self._work()
