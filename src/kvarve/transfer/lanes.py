"""Lanes: bounded workers that carry one kind of work each, in order, and say when each piece has ended.

A lane knows nothing of what it carries: a piece of work is a call that answers which pages are good and which are
bad. It ends exactly once. Work that could not start before its deadline ends without having been started; work that
hangs keeps what it holds until it comes back, so nobody reuses memory that it may still write to.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from kvarve.core.effects import Ended
from kvarve.errors import KvarveError

log = logging.getLogger(__name__)

Work = Callable[[], tuple[int, int]]


@dataclass
class LaneCounts:
    """What a lane has done so far."""

    done: int = 0
    failed: int = 0  # raised, so nothing of it arrived
    late: int = 0  # past its deadline before it could start
    refused: int = 0  # the lane was full
    busy_s: float = 0.0
    last_error: str = ""


@dataclass(frozen=True)
class _Piece:
    op: int
    work: Work
    deadline: float


class Ends:
    """Where lanes put what has ended, and where one thread collects it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._woken = threading.Event()

    def put(self, ended: Ended) -> None:
        self._queue.put(ended)
        self._woken.set()

    def wake(self) -> None:
        """End a `wait` without anything having ended."""
        self._woken.set()

    def collect(self) -> list[Ended]:
        """Everything that ended since the last call, in the order in which it ended."""
        self._woken.clear()
        ended = []
        while True:
            try:
                ended.append(self._queue.get_nowait())
            except queue.Empty:
                return ended

    def wait(self, timeout_s: float) -> bool:
        """Until something has ended, or somebody woke us; False after `timeout_s`."""
        return self._woken.wait(timeout_s)


@dataclass
class Lane:
    """One kind of work: at most `depth` pieces waiting, `workers` threads."""

    name: str
    ends: Ends
    depth: int = 1024
    workers: int = 1
    clock: Callable[[], float] = time.monotonic
    counts: LaneCounts = field(default_factory=LaneCounts)

    def __post_init__(self) -> None:
        self._queue: queue.Queue[_Piece | None] = queue.Queue(self.depth)
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvarve {self.name} {i}", daemon=True)
            for i in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, op: int, work: Work, deadline_s: float) -> None:
        """Take a piece of work that has to start within `deadline_s`; a full or closed lane ends it at once."""
        try:
            if self._closed:
                raise queue.Full
            self._queue.put_nowait(_Piece(op, work, self.clock() + deadline_s))
        except queue.Full:
            self._count("refused")
            self.ends.put(Ended(op, 0))

    def waiting(self) -> int:
        return self._queue.qsize()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let what waits be done, then stop. After `timeout_s` what has not begun ends undone, and a worker that hangs
        is left behind: False, and it stops when it comes back."""
        end = time.monotonic() + timeout_s
        self._closed = True
        for _ in self._threads:
            with suppress(queue.Full):  # a worker hangs with a full lane behind it
                self._queue.put(None, timeout=max(0.0, end - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        hangs = any(thread.is_alive() for thread in self._threads)
        if hangs:
            self._give_up()
        return not hangs

    def _give_up(self) -> None:
        """Nobody but those who hang would do what waits: it ends here. The workers find word to stop instead."""
        with suppress(queue.Empty):
            while True:
                piece = self._queue.get_nowait()
                if piece is not None:
                    self._count("late")
                    self.ends.put(Ended(piece.op, 0))
        for _ in self._threads:
            self._queue.put_nowait(None)

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self.counts, what, getattr(self.counts, what) + 1)

    def _serve(self) -> None:
        while (piece := self._queue.get()) is not None:
            if self.clock() > piece.deadline:
                self._count("late")
                self.ends.put(Ended(piece.op, 0))
                continue
            start = time.monotonic()
            good = bad = 0
            try:
                good, bad = piece.work()
                self._count("done")
            except KvarveError as e:
                self._failed(str(e))
            except (
                Exception
            ) as e:  # a worker must outlive any bug in its work: who waits for it is told, and it is logged
                self._failed(f"{type(e).__name__}: {e}")
                log.exception("lane %s: a bug in its work", self.name)
            with self._lock:
                self.counts.busy_s += time.monotonic() - start
            self.ends.put(Ended(piece.op, good, bad))

    def _failed(self, why: str) -> None:
        if self.counts.last_error != why:
            log.warning("%s: %s", self.name, why)
        self.counts.last_error = why
        self._count("failed")
