"""What an eviction order is: a line of runs of which each may have a page to give, and the next one to ask.

There is one order for each place (a pool in a memory tier), so the pages in it are all of one size. A run stands in it
at most once; who asks takes it out, and puts it back if it has more to give.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from kvarve.core.policies import PageCost
from kvarve.core.tree import Run


@dataclass(frozen=True)
class OrderContext:
    """What an order may know of its slot pool: its number, its pool's lookback, the cost of computing a page, and the
    tick (how often anything has been used so far)."""

    number: int
    lookback: int | None
    cost: PageCost
    tick: Callable[[], int]


class Order(ABC):
    counts_uses = False  # whether every run of a hit has to count it, not only those that are read last

    def __init__(self, context: OrderContext) -> None:
        self.context = context

    @abstractmethod
    def push(self, run: Run) -> None:
        """A run that does not stand here may have a page to give."""

    @abstractmethod
    def pop(self) -> Run | None:
        """Take out the run that should give next; None if there is none."""

    @abstractmethod
    def forget(self, run: Run, stands: bool) -> None:
        """A run has left the tree and has no pages now: nothing of it is remembered, and if it `stands` here `pop` must
        never answer it."""

    @abstractmethod
    def runs(self) -> list[Run]:
        """All that stand here, those that have left the tree too."""


class Ranked(Order):
    """An order by a number: the lowest goes first, of equals the one that has stood longest.

    A run whose rank has risen since it was put here is found out when its turn comes, and put back; so using a page
    costs nothing here.
    """

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._heap: list[tuple[Any, int, Run]] = []
        self._ticket = count()
        self._dead = 0  # about how many of them have left the tree

    @abstractmethod
    def rank(self, run: Run) -> Any:
        """What is compared; it must not fall while a run stands here."""

    def push(self, run: Run) -> None:
        heappush(self._heap, (self.rank(run), next(self._ticket), run))

    def pop(self) -> Run | None:
        while self._heap:
            rank, _, run = heappop(self._heap)
            if not run.tokens:
                self._dead = max(0, self._dead - 1)
            elif self.stale(rank, run):
                self.push(run)
            else:
                self.taken(run)
                return run
        return None

    def stale(self, rank: Any, run: Run) -> bool:
        """Whether a run stands at a rank that is not its own any more."""
        return bool(rank != self.rank(run))

    def taken(self, run: Run) -> None:
        """The turn of a run has come."""

    def forget(self, run: Run, stands: bool) -> None:
        self._dead += stands
        if 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].tokens]
            heapify(self._heap)
            self._dead = 0

    def runs(self) -> list[Run]:
        return [run for _, _, run in self._heap]
