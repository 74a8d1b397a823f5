"""A pool of daemon threads.

Not the standard library's executor: the interpreter waits for its threads at exit, and so for ever if a call to a disk
hangs in one of them.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from kvarve.errors import StorageError

T = TypeVar("T")
_Calls = SimpleQueue[Callable[[], None] | None]


class WorkerPool:
    """`threads` daemon threads, which end when the pool is garbage collected."""

    def __init__(self, threads: int, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._end = weakref.finalize(self, _dismiss, self._calls, threads)
        self._end.atexit = False
        started = 0
        try:
            for i in range(threads):
                threading.Thread(target=_serve, args=(self._calls,), name=f"{name} {i}", daemon=True).start()
                started += 1
        except RuntimeError as error:  # the system has no more threads
            if not started:
                raise StorageError(f"no threads for a storage: {error}") from None

    def submit(self, do: Callable[[Any], T], what: Any, answer: "Future[T] | None" = None) -> "Future[T]":
        """Call `do(what)` on a thread; its result or exception goes to `answer`, which the caller may supply."""
        answer = Future() if answer is None else answer

        def call() -> None:
            try:
                answer.set_result(do(what))
            except BaseException as error:  # noqa: BLE001  the caller gets it from the future
                answer.set_exception(error)

        self._calls.put(call)
        return answer

    def shutdown(self) -> None:
        """Let the threads end once all submitted calls are done, without waiting for them."""
        self._end()


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # else its buffers would live on while the thread waits


def _dismiss(calls: _Calls, threads: int) -> None:
    for _ in range(threads):
        calls.put(None)
