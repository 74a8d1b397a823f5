"""Calls on daemon threads. Each has a name, and ends with a result or an exception; one that hangs can be abandoned.

Not the standard library's executor: the interpreter waits for its threads at exit, and so for ever if a call to a disk
hangs in one of them.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvarve.errors import StorageError

T = TypeVar("T")
W = TypeVar("W")
_Works = SimpleQueue[Callable[[], None] | None]


class Abandoned(Exception):
    """A call takes longer than its caller waits. It goes on, and its thread ends with it."""


class BackgroundCall(Generic[T]):
    """`work()` on a daemon thread of its own, begun at once. StorageError: the system starts no more threads."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._thread = threading.Thread(target=answer, args=(self.future, work), name=name, daemon=True)
        _start(self._thread)

    def ended(self, within_s: float = 0.0) -> bool:
        """Wait until the call and its thread have ended; False if that takes longer."""
        self._thread.join(min(within_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def result(self, within_s: float = inf, late: Callable[[T], object] = lambda _: None) -> T:
        """The result of `work`, or its exception. Abandoned: neither came in time; a result that comes afterwards goes
        to `late`, once, which is to clean up."""
        if not self.ended(within_s):
            self.future.add_done_callback(lambda it: late(it.result()) if it.exception() is None else None)
            raise Abandoned
        return self.future.result()


class WorkerPool:
    """Daemon threads over one FIFO queue; they end when the pool is garbage collected and its work is done.

    StorageError: the system starts not even one thread.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._works: _Works = SimpleQueue()
        self._threads = threads
        self._end = weakref.finalize(self, _dismiss, self._works, threads)
        self._end.atexit = False
        for i in range(threads):
            try:
                _start(threading.Thread(target=_serve, args=(self._works,), name=f"{name} {i}", daemon=True))
            except StorageError:
                if i == 0:
                    raise
                return

    def run(self, work: Callable[[], T], future: "Future[T] | None" = None) -> "Future[T]":
        """Queue `work`; its result or exception goes to the future, which the caller may supply. Cancelled before it
        begins, it is never done, and lets go at once of everything that it references."""
        asked: Future[T] = Future() if future is None else future
        held = [work]

        def take_and_do() -> T:
            return held.pop()()

        asked.add_done_callback(lambda _: held.clear())
        self._works.put(lambda: answer(asked, take_and_do))
        return asked

    def each(self, work: Iterable[W], do: Callable[[W], object]) -> dict[W, OSError | None]:
        """Do all work, some at once; each with its OSError."""
        troubles: dict[W, OSError | None] = {}
        left = deque(work)

        def share() -> None:  # a future for each thread, not for each piece: those cost as much as a checksum
            with suppress(IndexError):  # another thread has taken the last one
                while True:
                    one = left.popleft()
                    try:
                        do(one)
                        troubles[one] = None
                    except OSError as error:
                        troubles[one] = error.with_traceback(None)  # which would keep what it has seen

        for future in [self.run(share) for _ in range(min(self._threads, len(left)))]:
            future.result()
        return troubles

    def shutdown(self) -> None:
        """Let the threads end once all queued work is done, without waiting for them."""
        self._end()


def answer(future: "Future[T]", work: Callable[[], T]) -> None:
    """Do the work of a future, unless that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as e:  # noqa: BLE001  the caller gets it from the future
        future.set_exception(e)
    else:
        future.set_result(result)


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as e:
        raise StorageError(f"the system starts no thread for {thread.name!r}: {e}") from None


def _serve(works: _Works) -> None:
    while (work := works.get()) is not None:
        work()
        del work  # else its buffers would live on while the thread waits


def _dismiss(works: _Works, threads: int) -> None:
    for _ in range(threads):
        works.put(None)
