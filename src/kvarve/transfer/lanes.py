"""Lanes: bounded queues with worker threads, one for each kind of work, which report when each piece has ended.

A lane knows nothing of pages: a piece of work is a call that returns which pages are good and which are bad. Pieces
that are cheaper done together name the same work and bring their parts; those that wait become one call. Each piece
ends exactly once. A piece that could not start before its deadline ends without having been started, even if all
workers hang: `Ends.collect` sees to that. A call that hangs keeps its slots until it returns, so memory that it may
still write to is not reused. Another worker replaces its thread, since it may be one of several storages that hangs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from kvarve.core.copies.effects import Began, Ended, Event, Refusal
from kvarve.errors import KvarveError

log = logging.getLogger(__name__)

T = TypeVar("T")
Outcome = tuple[int, int] | tuple[int, int, Refusal]
Work = Callable[[], Outcome]
SharedWork = Callable[[Sequence[T]], list[Outcome]]

TOGETHER = 64  # pages, at most, of pieces that become one call: these can be late together
PASSED = 8  # urgent pieces that pass the oldest one, at most
MOST_HANGING = 16  # hanging workers of one lane that are replaced


@dataclass
class LaneCounts:
    """Totals of a lane, in pieces unless the name says otherwise."""

    done: int = 0
    failed: int = 0  # raised, so no page of it arrived
    late: int = 0  # past its deadline before it could start
    refused: int = 0  # the lane was full, or closed
    calls: int = 0  # fewer than pieces, where several became one
    last_error: str = ""


@dataclass(eq=False)
class _Piece:
    op: int
    work: SharedWork[Any]
    part: Any
    size: float
    deadline: float
    urgent: bool = False  # may change while it waits, with the lane's lock held


class Ends:
    """The queue of events of all lanes, from which one thread collects them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[Event] = []
        self._lanes: list[Lane] = []  # that may have pieces waiting
        self._woken = threading.Event()
        self.taken: Callable[[Event], bool] = lambda event: False  # hands an event on at once; if not, `collect` does
        self.rings: Callable[[], None] = lambda: None  # ends the sleep of a thread that waits elsewhere until `woken`

    def put(self, event: Event) -> None:
        if self.taken(event):
            return
        with self._lock:
            self._ended.append(event)
        self.wake()

    def wake(self) -> None:
        """End a `wait`, with an event or without."""
        self._woken.set()
        self.rings()

    def woken(self) -> bool:
        """Whether `wait` would return at once."""
        return self._woken.is_set()

    def collect(self) -> list[Event]:
        """The events since the last call, in order.

        A piece that is still waiting after its deadline ends here; no worker has to be free for that.
        """
        with self._lock:
            lanes = self._lanes
        for lane in lanes:
            lane.expire()
        self._woken.clear()
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait for an event, a piece's deadline or `wake`; False after `timeout_s`."""
        with self._lock:
            left_s = min((lane.left_s() for lane in self._lanes), default=inf)
        return self._woken.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    def watch(self, lane: "Lane") -> None:
        """From now on `collect` ends pieces of this lane that are past their deadline."""
        with self._lock:
            self._lanes = [*self._lanes, lane]

    def unwatch(self, lane: "Lane") -> None:
        with self._lock:
            self._lanes = [each for each in self._lanes if each is not lane]


@dataclass(eq=False)
class Lane:
    """A queue of at most `depth` pieces and `workers` threads, and one more for each that has been in one call for
    longer than `patience_s`."""

    name: str
    ends: Ends
    depth: int = 1024
    workers: int = 1
    patience_s: float = inf
    clock: Callable[[], float] = time.monotonic
    together: float = TOGETHER
    tells_begin: bool = False  # whether it puts a `Began` when a worker begins a piece
    counts: LaneCounts = field(default_factory=LaneCounts)

    def __post_init__(self) -> None:
        self._waiting: deque[_Piece] = deque()
        self._passed = 0  # urgent pieces that have passed the oldest, in a row
        self._earliest = inf  # no waiting piece has an earlier deadline
        self._running: dict[int, float] = {}  # by worker: when its call began
        self._hanging: set[int] = set()  # workers that have been replaced
        self._next_hang = inf  # no other call counts as hanging before that
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a piece waits, or the lane is closed
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._started = 0
        self.ends.watch(self)
        try:
            for _ in range(self.workers):
                self._start_worker()
        except RuntimeError:  # a thread did not start: end those that did
            self.close()
            raise

    def send(self, op: int, work: Work, deadline_s: float, urgent: bool = False) -> None:
        """Take a piece of work that has to start within `deadline_s`; a full or closed lane ends it at once. An
        `urgent` one passes those that are not, at most `PASSED` in a row."""
        self._take(_Piece(op, lambda _: [work()], None, inf, self.clock() + deadline_s, urgent))

    def hurry(self, ops: Iterable[int]) -> None:
        """Pieces are urgent from now on, as far as they still wait."""
        hurried = frozenset(ops)
        with self._lock:
            for piece in self._waiting:
                piece.urgent |= piece.op in hurried

    def send_part(self, op: int, work: SharedWork[T], part: T, size: int, deadline_s: float) -> None:
        """The same for work that is cheaper done together: adjacent waiting pieces of equal work become one call, up to
        a total size of `together`. The call returns an outcome for each part, in order."""
        self._take(_Piece(op, work, part, size, self.clock() + deadline_s))

    def waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> int:
        """How many calls are under way."""
        return len(self._running)

    def stuck_s(self) -> float:
        """For how long the oldest running call has been running; 0 if there is none."""
        with self._lock:
            return self.clock() - min(self._running.values()) if self._running else 0.0

    def busy_s(self) -> float:
        """For how long all workers have been busy; 0 if one is free."""
        with self._lock:
            all_busy = len(self._running) == self.workers + len(self._hanging)
            return self.clock() - max(self._running.values()) if all_busy else 0.0

    def left_s(self) -> float:
        """How long until a piece's deadline may pass, or a call may count as hanging."""
        return min(self._earliest, self._next_hang) - self.clock()

    def expire(self) -> None:
        """End pieces that are past their deadline, and replace workers that hang."""
        now = self.clock()
        if now <= self._earliest and now <= self._next_hang:  # the usual case: every token passes here
            return
        with self._lock:
            self._replace(now)
            late = [piece for piece in self._waiting if now > piece.deadline]
            self._waiting = deque(piece for piece in self._waiting if now <= piece.deadline)
            self._earliest = min((piece.deadline for piece in self._waiting), default=inf)
            self.counts.late += len(late)
        self._end(late)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let waiting pieces be done, then stop; False if a worker still hangs after `timeout_s`. It is abandoned, and
        pieces behind it end without having been started."""
        end = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            left, self._waiting = self._waiting, deque()
            self.counts.late += len(left)
        self._end(left)
        self.ends.unwatch(self)
        return not any(thread.is_alive() for thread in self._threads)

    def _take(self, piece: _Piece) -> None:
        with self._lock:
            taken = not self._closed and len(self._waiting) < self.depth
            if taken:
                self._waiting.append(piece)
                self._earliest = min(self._earliest, piece.deadline)
                self._changed.notify()
            else:
                self.counts.refused += 1
        if not taken:
            self._end([piece])

    def _start_worker(self) -> None:
        """RuntimeError: the system starts no more threads."""
        worker = self._started
        thread = threading.Thread(target=self._serve, args=(worker,), name=f"kvarve {self.name} {worker}", daemon=True)
        thread.start()
        self._started += 1
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _replace(self, now: float) -> None:
        """Start a worker for each that hangs; with the lock held."""
        self._next_hang = inf
        for worker, since in self._running.items():
            if worker in self._hanging:
                continue
            if now - since > self.patience_s and len(self._hanging) < MOST_HANGING and not self._closed:
                try:
                    self._start_worker()
                    self._hanging.add(worker)
                except RuntimeError as e:
                    log.warning("%s: a worker that hangs cannot be replaced: %s", self.name, e)
            if worker not in self._hanging:
                hangs_at = since + self.patience_s
                self._next_hang = min(self._next_hang, hangs_at if hangs_at >= now else now + self.patience_s)

    def _end(self, pieces: Sequence[_Piece]) -> None:
        """End pieces that were not done."""
        for piece in pieces:
            self.ends.put(Ended(piece.op, 0))

    def _serve(self, worker: int) -> None:
        while (pieces := self._next(worker)) is not None:
            stays = self._do(worker, pieces)
            del pieces  # else what their work refers to, such as pinned memory, would live on while the worker waits
            if not stays:
                return

    def _next(self, worker: int) -> list[_Piece] | None:
        """The pieces of the next call; None when the lane is closed and no piece waits."""
        with self._lock:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            pieces = [self._first()]
            left = self.together - pieces[0].size
            while self._waiting and self._waiting[0].work == pieces[0].work and self._waiting[0].size <= left:
                pieces.append(self._waiting.popleft())
                left -= pieces[-1].size
            self._running[worker] = now = self.clock()
            self._next_hang = min(self._next_hang, now + self.patience_s)
        for piece in pieces if self.tells_begin else ():
            self.ends.put(Began(piece.op))
        return pieces

    def _first(self) -> _Piece:
        """Take the oldest piece that is urgent, or the oldest of all if none is, or if that has been passed too often;
        with the lock held."""
        at = next((at for at, piece in enumerate(self._waiting) if piece.urgent), 0)
        at = 0 if self._passed >= PASSED else at
        self._passed = self._passed + 1 if at else 0
        piece = self._waiting[at]
        del self._waiting[at]
        return piece

    def _do(self, worker: int, pieces: list[_Piece]) -> bool:
        """Do the work of some pieces in one call, without those past their deadline. False if the worker has been
        replaced meanwhile."""
        now = self.clock()
        late = [piece for piece in pieces if now > piece.deadline]
        pieces = [piece for piece in pieces if now <= piece.deadline]
        outcomes: list[Outcome] = [(0, 0) for _ in pieces]
        why = ""
        if pieces:
            try:
                answers = pieces[0].work([piece.part for piece in pieces])
                assert len(answers) == len(pieces), "there is an answer for each part"
                outcomes = answers
            except KvarveError as e:
                why = str(e)
            except Exception as e:  # a worker must outlive any bug in its work: the pieces end, and it is logged
                why = f"{type(e).__name__}: {e}"
                log.exception("lane %s: a bug in its work", self.name)
        with self._lock:
            del self._running[worker]
            stays = worker not in self._hanging
            self._hanging.discard(worker)
            news = bool(why) and why != self.counts.last_error
            self.counts.last_error = why or self.counts.last_error
            self.counts.late += len(late)
            self.counts.calls += bool(pieces)
            self.counts.failed += len(pieces) if why else 0
            self.counts.done += 0 if why else len(pieces)
        if news:
            log.warning("%s: %s", self.name, why)
        self._end(late)
        for piece, outcome in zip(pieces, outcomes, strict=True):
            self.ends.put(Ended(piece.op, *outcome))
        return stays
