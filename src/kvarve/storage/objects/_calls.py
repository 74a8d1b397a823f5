"""Requests of one call, some at once on daemon threads. The library cannot be interrupted: a caller whose time has
passed leaves, and what comes afterwards touches nothing of its memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvarve.errors import StorageError
from kvarve.storage.base import left_s
from kvarve.system.background import WorkerPool

T = TypeVar("T")
CALL_S = 60.0  # for a call whose caller has not said how long it waits


class Left(Exception):
    """The caller of a batch has left: its memory is no longer ours."""


class Batch(Generic[T]):
    """The work of one call. `answers`: by its places, an exception where there is trouble."""

    def __init__(self, work: Sequence[int], do: "Callable[[Batch[T], int], T]") -> None:
        self._do, self._work = do, deque(work)
        self._lock = threading.Lock()  # held while the caller's memory is read or written
        self._open = len(work)
        self.ended = threading.Event()
        self.left = False
        self.answers: dict[int, T | Exception] = {}

    @contextmanager
    def memory(self) -> Iterator[None]:
        """The caller's memory may be used within the block. Left: not any more."""
        with self._lock:
            if self.left:
                raise Left
            yield

    def share(self) -> None:
        """Do a part of the work, until there is none."""
        while True:
            with self._lock:
                if self.left or not self._work:
                    return
                place = self._work.popleft()
            answer: T | Exception
            try:
                answer = self._do(self, place)
            except Exception as error:  # noqa: BLE001  the caller gets it
                answer = error.with_traceback(None)
            with self._lock:
                self.answers[place] = answer
                self._open -= 1
                if not self._open:
                    self.ended.set()

    def leave(self) -> bool:
        """The caller goes; whether all was done."""
        with self._lock:
            self.left = True
            self._work.clear()
            return not self._open


class Calls:
    """`threads` of one storage, which all its calls share."""

    def __init__(self, threads: int, where: str) -> None:
        self._pool, self._threads, self._where = WorkerPool(threads, "kvarve objects"), threads, where
        self._lock = threading.Lock()  # guards all below
        self._under_way: set[Batch[object]] = set()
        self.closed = False

    def each(self, work: Sequence[int], do: Callable[[Batch[T], int], T]) -> dict[int, T | Exception]:
        """`do(batch, place)` for all places, the first ones first; each with its answer or its exception. StorageError:
        the caller's time has passed, or the storage was closed meanwhile."""
        if not work:
            return {}
        batch = Batch(work, do)
        with self._lock:
            self.require_open()
            self._under_way.add(batch)  # type: ignore[arg-type]
        try:
            for _ in range(min(self._threads, len(work))):
                self._pool.run(batch.share)
            seconds = min(left_s(), CALL_S)
            batch.ended.wait(seconds)
        finally:
            done = batch.leave()
            with self._lock:
                self._under_way.discard(batch)
        if not done:
            self.require_open()
            raise StorageError(f"{self._where}: {len(batch.answers)} of {len(work)} answers within {seconds:.3g} s")
        return batch.answers

    def apart(self, do: Callable[[], object]) -> None:
        """Work for which no caller waits; what becomes of it is not told."""
        self._pool.run(do)

    def require_open(self) -> None:
        if self.closed:
            raise StorageError("this storage is closed, or was opened before a fork")

    def close(self) -> None:
        """End the calls under way, whose requests go on without them."""
        with self._lock:
            self.closed = True
            under_way = [*self._under_way]
        for batch in under_way:
            batch.ended.set()
        self._pool.shutdown()
