"""Threads for what would hold up the event loop: the short apart from the long, so that nobody waits for a book.

Not the executor of the standard library: a program that ends waits for that one's threads, and what was cancelled stays
in its queue, with all that it holds, until a thread comes to it.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# Up to how many bytes of text a piece of work may have for a lane, and the lane's threads; the last takes all.
LANES = ((64 << 10, 2), (1 << 20, 1), (None, 1))


class Lane:
    """A few threads that do one thing after the other, in the order in which it was given. They end with the lane."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue = _Queue()
        for i in range(threads):
            threading.Thread(target=_serve, args=(self._queue,), name=f"{name} {i}", daemon=True).start()
        weakref.finalize(self, self._queue.close).atexit = False

    def run(self, work: Callable[[], T]) -> "Future[T]":
        """Have it done. Cancelled before it has begun it is gone at once, and so is what it holds."""
        future: Future[T] = Future()
        self._queue.put(future, work)
        future.add_done_callback(self._queue.drop)
        return future


class Lanes:
    """Lanes by size."""

    def __init__(self, name: str) -> None:
        self._lanes = [(most, Lane(threads, f"{name} {i}")) for i, (most, threads) in enumerate(LANES)]

    def run(self, size: int, work: Callable[[], T]) -> "Future[T]":
        """Have work done on a text of so many bytes."""
        return next(lane for most, lane in self._lanes if most is None or size <= most).run(work)


async def apart(work: Callable[[], T]) -> T:
    """Wait for something that may take long, on a thread of its own. A program that ends does not wait for it."""
    answer: Future[T] = Future()
    threading.Thread(target=_answer, args=(answer, work), name="kvarve apart", daemon=True).start()
    return await asyncio.wrap_future(answer)


class _Queue:
    """What waits for a lane's threads, oldest first."""

    def __init__(self) -> None:
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        self._change = threading.Condition()
        self._closed = False

    def put(self, future: "Future[T]", work: Callable[[], T]) -> None:
        with self._change:
            self._work[future] = work
            self._change.notify()

    def take(self) -> "tuple[Future[Any], Callable[[], Any]] | None":
        """The next; None if there will never be one."""
        with self._change:
            self._change.wait_for(lambda: self._work or self._closed)
            for future, work in self._work.items():
                del self._work[future]
                return future, work
            return None

    def drop(self, future: "Future[Any]") -> None:
        with self._change:
            self._work.pop(future, None)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


def _serve(queue: _Queue) -> None:
    while (found := queue.take()) is not None:
        _answer(*found)
        del found  # what it held is not to live on in a thread that waits


def _answer(future: "Future[T]", work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as e:  # noqa: BLE001  it belongs to whoever asked, who gets it from the future
        future.set_exception(e)
    else:
        future.set_result(result)
