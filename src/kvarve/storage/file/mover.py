"""Moves the bytes of objects between memory and slabs, several runs of slots at once, and syncs."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvarve.background import WorkerPool
from kvarve.storage.file.slabs import RowSpan, Slab, runs

_MOVE, _SYNC = 0, 1  # two pools: else a sync would queue behind the writes of other puts
_Work = TypeVar("_Work")


class Mover:
    """`lock` and `require_open` are the store's: after it was closed no thread is started."""

    def __init__(self, threads: int, lock: threading.Lock, require_open: Callable[[], None]) -> None:
        self._threads, self._lock, self._require_open = threads, lock, require_open
        self._pools: list[WorkerPool] = []

    def read(self, pieces: Sequence[RowSpan]) -> tuple[dict[int, int], dict[int, OSError]]:
        """The bytes read of each piece, and the errors, by number."""
        counts: dict[int, int] = {}
        troubles: dict[int, OSError] = {}

        def read(run: list[RowSpan]) -> None:
            count = run[0].slab.read(run)
            for piece in run:
                counts[piece.number] = max(0, min(count, piece.view.nbytes))
                count -= piece.view.nbytes

        for run, error in self._each(runs(pieces), read):
            for piece in run if error is not None else ():
                try:
                    counts[piece.number] = piece.slab.read([piece])
                except OSError as its_own:
                    troubles[piece.number] = its_own
        return counts, troubles

    def write(self, pieces: Sequence[RowSpan], moving: list[Future[OSError | None]]) -> dict[int, OSError]:
        """The errors, by number. Writes that go on if this is interrupted are in `moving`."""
        troubles: dict[int, OSError] = {}
        for run, error in self._each(runs(pieces), lambda run: run[0].slab.write(run), moving=moving):
            for piece in run if error is not None else ():
                try:
                    piece.slab.write([piece])
                except OSError as its_own:
                    troubles[piece.number] = its_own
        return troubles

    def sync(self, files: Sequence[tuple[Slab, int]]) -> list[tuple[tuple[Slab, int], OSError | None]]:
        """Sync files of slabs; returns each with its error."""
        return list(self._each(files, lambda one: one[0].sync(one[1]), _SYNC))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        self._pools = []

    def leave_to_parent(self) -> None:
        """In a child after fork: the threads are the parent's."""
        self._pools = []

    def _each(
        self,
        work: Sequence[_Work],
        do: Callable[[_Work], None],
        pool: int = _MOVE,
        moving: "list[Future[OSError | None]] | None" = None,
    ) -> Iterator[tuple[_Work, OSError | None]]:
        """Do all work, several at once; yields each with its error. The futures are added to `moving`."""

        def tried(one: _Work) -> OSError | None:
            try:
                do(one)
            except OSError as error:
                return error
            return None

        if len(work) < 2 or self._threads == 1:
            yield from [(one, tried(one)) for one in work]
            return
        with self._lock:
            self._require_open()
            if not self._pools:
                self._pools = [WorkerPool(self._threads, f"kvarve files {what}") for what in ("move", "sync")]
            futures: list[Future[OSError | None]] = [Future() for _ in work]
            if moving is not None:
                moving += futures
            for one, future in zip(work, futures, strict=True):
                self._pools[pool].run(partial(tried, one), future)
        yield from [(one, future.result()) for one, future in zip(work, futures, strict=True)]
