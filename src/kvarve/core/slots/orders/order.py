"""What an eviction order is: a queue of runs that may have an evictable page, and which of them is the next victim.

All pages of an order are of one slot pool, so of one size. A run stands in it at most once; `Candidates.pop` takes it
out, and `offer_again` pushes it back if it has more evictable pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from kvarve.core.tree.tree import Run


@dataclass(frozen=True)
class OrderContext:
    """What an order may know of its slot pool: the current tick (the count of uses so far), and the bytes of a page of
    all chains as part of those of all windows and states that a request resumes from (0 if this is a chain, there are
    none, or another tier has what leaves)."""

    tick: Callable[[], int]
    chain_bytes_of_snapshot: float = 0.0

    def last_use(self, run: Run) -> float:
        """When a run was used last, in ticks, for a comparison with other pools of the tier. Windows and states save
        about the pages of the run that they end, and age slower the fewer bytes they take than those pages."""
        now = self.tick()
        return now - (now - run.used) / max(1.0, self.chain_bytes_of_snapshot * run.pages)


class Order(ABC):
    counts_uses = False  # whether a hit counts as a use of all its runs, not only of the last ones

    def __init__(self, context: OrderContext) -> None:
        self.context = context

    @abstractmethod
    def push(self, run: Run) -> None:
        """Add a run that may have an evictable page; it does not stand here yet."""

    @abstractmethod
    def pop(self) -> Run | None:
        """Take out the run that is the next victim; None if there is none."""

    def peek(self) -> Run | None:
        """The next victim, which stays."""
        run = self.pop()
        if run is not None:
            self.push(run)
        return run

    @abstractmethod
    def worth(self, run: Run) -> Any:
        """What a run is worth, to be compared between the orders of a tier's pools: the lowest goes first."""

    @abstractmethod
    def forget(self, run: Run, stands: bool) -> None:
        """A run has left the tree: drop all state of it; if it `stands` here, `pop` must never return it."""

    @abstractmethod
    def runs(self) -> list[Run]:
        """All runs that stand here, including those that have left the tree."""


class Ranked(Order):
    """A heap by rank: the lowest goes first, among equals the one that was pushed first.

    A run whose rank has risen since it was pushed is pushed again when it comes up, so using a page costs nothing here.
    """

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._heap: list[tuple[Any, int, Run]] = []
        self._ticket = count()
        self._dead = 0  # about how many of its runs have left the tree

    @abstractmethod
    def rank(self, run: Run) -> Any:
        """A run's rank; it must not fall while the run stands here."""

    def push(self, run: Run) -> None:
        heappush(self._heap, (self.rank(run), next(self._ticket), run))

    def pop(self) -> Run | None:
        run = self.peek()
        if run is not None:
            heappop(self._heap)
        return run

    def peek(self) -> Run | None:
        while self._heap:
            rank, _, run = self._heap[0]
            if run.tokens and rank == self.rank(run):
                return run
            heappop(self._heap)
            if run.tokens:
                self.push(run)
            else:
                self._dead = max(0, self._dead - 1)
        return None

    def worth(self, run: Run) -> Any:
        return self.rank(run)

    def forget(self, run: Run, stands: bool) -> None:
        if not stands:
            return
        self._dead += 1
        if 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].tokens]
            heapify(self._heap)
            self._dead = 0

    def runs(self) -> list[Run]:
        return [run for _, _, run in self._heap]


class Lru(Ranked):
    """Least recently used goes first."""

    def rank(self, run: Run) -> int:
        return run.used

    def worth(self, run: Run) -> float:
        return self.context.last_use(run)


class Lfu(Ranked):
    """Least frequently used goes first; among equals, least recently used."""

    counts_uses = True

    def rank(self, run: Run) -> tuple[int, int]:
        return run.uses, run.used


class Priority(Ranked):
    """Pages that only requests of low priority used go first; among equals, least recently used."""

    def rank(self, run: Run) -> tuple[int, int]:
        return run.priority, run.used
