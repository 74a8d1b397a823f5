"""What an eviction order is: a queue of runs that may have an evictable page, and which of them is the next victim.

All pages of an order are of one slot pool, so of one size. A run stands in it at most once; `Candidates.pop` takes it
out, and `offer_again` pushes it back if it has more evictable pages.
"""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from kvarve.core.tree.tree import Run

# By its name in the settings, what an order ranks a run by: the lowest goes first. A rank must not fall while the run
# stands in the order.
RANKS: Mapping[str, Callable[[Run], Any]] = {
    "lru": lambda run: run.used,
    "lfu": lambda run: (run.uses, run.used),
    "priority": lambda run: (run.priority, run.used),  # that of the most important request that used it
}


class Order:
    """A heap by rank; among equals that goes first which was pushed first.

    A run whose rank has risen since it was pushed is pushed again when it comes up, so using a page costs nothing here.
    """

    def __init__(self, by: str, tick: Callable[[], int], chain_bytes_of_snapshot: float = 0.0) -> None:
        """`tick`: the count of uses so far. `chain_bytes_of_snapshot`: the bytes of a page of all chains as part of
        those of all windows and states that a request resumes from (0 if this is a chain, there are none, or another
        tier has what leaves)."""
        self._rank, self._ages = RANKS[by], by == "lru"
        self._tick, self.chain_bytes_of_snapshot = tick, chain_bytes_of_snapshot
        self._heap: list[tuple[Any, int, Run]] = []
        self._ticket = count()
        self._dead = 0  # about how many of its runs have left the tree

    def push(self, run: Run) -> None:
        """Add a run that may have an evictable page; it does not stand here yet."""
        heappush(self._heap, (self._rank(run), next(self._ticket), run))

    def pop(self) -> Run | None:
        """Take out the run that is the next victim; None if there is none."""
        run = self.peek()
        if run is not None:
            heappop(self._heap)
        return run

    def peek(self) -> Run | None:
        """The next victim, which stays."""
        while self._heap:
            rank, _, run = self._heap[0]
            if run.tokens and rank == self._rank(run):
                return run
            heappop(self._heap)
            if run.tokens:
                self.push(run)
            else:
                self._dead = max(0, self._dead - 1)
        return None

    def worth(self, run: Run) -> Any:
        """What a run is worth, to be compared between the orders of a tier's pools: the lowest goes first. By last use,
        windows and states save about the pages of the run that they end, and age slower the fewer bytes they take than
        those pages."""
        if not self._ages:
            return self._rank(run)
        now = self._tick()
        return now - (now - run.used) / max(1.0, self.chain_bytes_of_snapshot * run.pages)

    def forget(self, run: Run, stands: bool) -> None:
        """A run has left the tree; if it `stands` here, `pop` never returns it."""
        if not stands:
            return
        self._dead += 1
        if 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].tokens]
            heapify(self._heap)
            self._dead = 0

    def runs(self) -> list[Run]:
        """All runs that stand here, including those that have left the tree."""
        return [run for _, _, run in self._heap]
