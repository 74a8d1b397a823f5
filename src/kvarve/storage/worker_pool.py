"""A few threads that do what they are given, several calls at once.

Not the executor of the standard library: a program that ends waits for that one's threads, and so for ever if a call to
a disk hangs in one of them.
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
    """`threads` of them. A crew that nobody knows any more ends by itself."""

    def __init__(self, threads: int, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._leave = weakref.finalize(self, _dismiss, self._calls, threads)
        self._leave.atexit = False
        started = 0
        try:
            for i in range(threads):
                threading.Thread(target=_serve, args=(self._calls,), name=f"{name} {i}", daemon=True).start()
                started += 1
        except RuntimeError as error:  # no more threads are to be had
            if not started:
                raise StorageError(f"no threads for a storage: {error}") from None

    def submit(self, do: Callable[[Any], T], what: Any, answer: "Future[T] | None" = None) -> "Future[T]":
        """Have it done; what comes of it is in the answer, which the caller may have made before."""
        answer = Future() if answer is None else answer

        def call() -> None:
            try:
                answer.set_result(do(what))
            except BaseException as error:  # noqa: BLE001  it belongs to the caller, who gets it from the future
                answer.set_exception(error)

        self._calls.put(call)
        return answer

    def leave(self) -> None:
        """End when all that was given is done; nobody waits for that."""
        self._leave()


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # what it has moved is not to live on in a thread that waits


def _dismiss(calls: _Calls, threads: int) -> None:
    for _ in range(threads):
        calls.put(None)
