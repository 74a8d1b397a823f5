"""A network and a clock for the ranks' own protocol (`ranks/group.py`): deterministic, with faults, without sockets.

Each rank runs in a thread, of which one runs at a time: it gives way where it would wait, and a seed says which goes
on.
Time passes only while all wait. Frames of one link come in order, those of different links in any; a link that loses
one loses all that follow, as a broken connection does.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from math import inf

from kvarve.ranks.star import Dead, Late, Link, Star

QUICK_S = 0.001  # most frames take less
Work = Callable[[int], object]


class Over(BaseException):
    """The life has ended while this rank was stopped."""


class Hang(AssertionError):
    """Ranks wait for what will never come."""


class Network:
    def __init__(self, ranks: int, seed: int, deadline_s: float) -> None:
        self.dice, self.now, self.ranks = random.Random(seed), 0.0, ranks
        self.stopped: set[int] = set()  # ranks that run no more, but have closed nothing
        self.lost: set[tuple[int, int]] = set()  # directions in which nothing arrives any more
        self.slow: dict[tuple[int, int], float] = {}  # seconds that every frame takes in a direction
        ends = {(a, b): _Way(self, a, b) for far in range(1, ranks) for a, b in ((0, far), (far, 0))}
        self.stars = [_Star(self, rank, ranks, ends, deadline_s) for rank in range(ranks)]
        self._batons = [threading.Semaphore(0) for _ in range(ranks)]
        self._back = threading.Semaphore(0)
        self._waits: dict[int, tuple[Callable[[], bool], float]] = {}
        self._over = False

    def run(self, work: Work) -> list[object]:
        """What `work(rank)` returned or raised on each rank; None of a rank that was stopped. Hang, if any is stuck.

        After a run in which none was stopped another may follow."""
        self._over = False
        found: list[object] = [None] * self.ranks

        def life(rank: int) -> None:
            self._batons[rank].acquire()
            try:
                found[rank] = work(rank)
            except Over:
                pass
            except BaseException as e:  # noqa: BLE001  whatever it is, the test looks at it
                found[rank] = e
            self._back.release()

        threads = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for rank, thread in enumerate(threads):
            thread.start()
            self._waits[rank] = (lambda: True, inf)
        try:
            while left := sorted(self._waits.keys() - self.stopped):
                ready = [rank for rank in left if self._waits[rank][0]() or self._waits[rank][1] <= self.now]
                if ready:
                    self._resume(self.dice.choice(ready))
                else:
                    self._pass_time(left)
        finally:
            self._over = True
            for rank in sorted(self._waits):
                self._resume(rank)
            for thread in threads:
                thread.join()
        return found

    def wait(self, rank: int, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Let others run until something is so, or time is up; whether it is."""
        self._waits[rank] = ready, self.now + timeout_s
        self._back.release()
        self._batons[rank].acquire()
        if self._over:
            raise Over
        return ready()

    def _resume(self, rank: int) -> None:
        del self._waits[rank]
        self._batons[rank].release()
        self._back.acquire()

    def _pass_time(self, left: list[int]) -> None:
        coming = [way.next_s for star in self.stars for way in star.ways if way.next_s > self.now]
        then = min([*coming, *(self._waits[rank][1] for rank in left)], default=inf)
        if then == inf:
            raise Hang(f"ranks {left} wait for ever")
        self.now = then


class _Way:
    """One direction of a link: frames that are under way."""

    def __init__(self, network: Network, source: int, target: int) -> None:
        self._network, self._ends = network, (source, target)
        self._frames: deque[tuple[float, bytes]] = deque()
        self.closed = False  # at its source
        self.refused = False  # at its target
        self._last_s = 0.0

    def put(self, frame: bytes) -> None:
        network = self._network
        if self._ends in network.lost:
            return
        takes_s = network.slow.get(self._ends) or network.dice.random() * QUICK_S
        self._last_s = max(self._last_s, network.now + takes_s)
        self._frames.append((self._last_s, frame))

    @property
    def next_s(self) -> float:
        return self._frames[0][0] if self._frames else inf

    @property
    def ready(self) -> bool:
        """Whether a frame, or the end of the link, can be read."""
        return self.next_s <= self._network.now or (self.closed and not self._frames)

    def take(self) -> bytes:
        if not self._frames:
            raise Dead
        return self._frames.popleft()[1]


class _Link(Link):
    def __init__(self, network: Network, rank: int, out: _Way, into: _Way, deadline_s: float) -> None:
        self._network, self._rank, self.out, self.into = network, rank, out, into
        self._deadline_s = deadline_s

    def wait_at_most(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def send(self, content: bytes) -> None:
        if self.out.refused:
            raise Dead
        self.out.put(content)

    def offer(self, content: bytes) -> bool:
        if self._network.dice.random() < 0.1:  # the socket is full
            return False
        self.send(content)
        return True

    def receive(self) -> bytes:
        if not self.into.ready and not self._network.wait(self._rank, lambda: self.into.ready, self._deadline_s):
            raise Late
        return self.into.take()

    def close(self) -> None:
        self.out.closed = self.into.refused = True


class _Star(Star):
    def __init__(
        self, network: Network, rank: int, ranks: int, ways: dict[tuple[int, int], _Way], deadline_s: float
    ) -> None:
        self._network, self.rank, self.ranks, self.deadline_s = network, rank, ranks, deadline_s
        others = range(1, ranks) if rank == 0 else (0,)
        self._own = {other: _Link(network, rank, ways[rank, other], ways[other, rank], deadline_s) for other in others}
        self.links, self.groups = {**self._own}, 0
        self.sending, self._bell, self._rung = threading.Lock(), (), False
        self.ways = [link.into for link in self._own.values()]

    def clock(self) -> float:
        return self._network.now

    def ready(self, timeout_s: float) -> list[int]:
        def found() -> list[int]:
            return [other for other in self.links if self._own[other].into.ready] + [self.rank] * self._rung

        if not found() and timeout_s > 0:
            self._network.wait(self.rank, lambda: bool(found()), timeout_s)
        ready, self._rung = found(), False
        return ready

    def ring(self) -> None:
        self._rung = True

    def leave(self, rank: int) -> None:
        self.links.pop(rank).close()
