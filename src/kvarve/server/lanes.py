"""Worker threads for slow work off the event loop, by size, so that a short request never waits behind a long one.

Not the standard library's executor: the interpreter waits for its threads at exit, and a cancelled item stays in its
queue, with everything it references, until a thread takes it.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# (most bytes of text of a work item, threads) of each lane; the last takes any size.
LANES = ((64 << 10, 2), (1 << 20, 1), (None, 1))


class Lane:
    """Worker threads over one FIFO queue. They end when the lane is collected."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue = _Queue()
        for i in range(threads):
            threading.Thread(target=_serve, args=(self._queue,), name=f"{name} {i}", daemon=True).start()
        weakref.finalize(self, self._queue.close).atexit = False

    def run(self, work: Callable[[], T]) -> "Future[T]":
        """Queue work. Cancelled before it starts, it leaves the queue at once with everything it references."""
        future: Future[T] = Future()
        self._queue.put(future, work)
        future.add_done_callback(self._queue.drop)
        return future


class Lanes:
    """Lanes by size."""

    def __init__(self, name: str) -> None:
        self._lanes = [(most, Lane(threads, f"{name} {i}")) for i, (most, threads) in enumerate(LANES)]

    def run(self, size: int, work: Callable[[], T]) -> "Future[T]":
        """Queue work on a text of `size` bytes."""
        return next(lane for most, lane in self._lanes if most is None or size <= most).run(work)


async def apart(work: Callable[[], T]) -> T:
    """Run slow work on a daemon thread of its own, for which the interpreter does not wait at exit."""
    answer: Future[T] = Future()
    threading.Thread(target=_answer, args=(answer, work), name="kvarve apart", daemon=True).start()
    return await asyncio.wrap_future(answer)


class _Queue:
    """A lane's pending work, oldest first."""

    def __init__(self) -> None:
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        self._change = threading.Condition()
        self._closed = False

    def put(self, future: "Future[T]", work: Callable[[], T]) -> None:
        with self._change:
            self._work[future] = work
            self._change.notify()

    def take(self) -> "tuple[Future[Any], Callable[[], Any]] | None":
        """The next item, blocking; None once the queue is closed and empty."""
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
        del found  # an idle thread must not keep it alive


def _answer(future: "Future[T]", work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as e:  # noqa: BLE001  the caller gets it from the future
        future.set_exception(e)
    else:
        future.set_result(result)
