"""The order that would have hit most, found at run time by miniature simulations.

Each candidate evicts from a shadow cache of its own: hashes of pages without bytes, as many of them as the tier has
pages, or a sample. A page's hash decides whether it is in the sample, and the shadow is smaller than the tier as the
sample is than the traffic, so that it hits about as often (SHARDS and miniature simulations, Waldspurger et al., FAST
2015 and ATC 2017). The tier takes the order whose shadow has hit most lately.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from kvarve.core.slots.orders.cost import PageCost
from kvarve.core.slots.orders.lru import Lru
from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.slots.orders.s3fifo import S3Fifo
from kvarve.core.tree.tree import Run

CANDIDATES = {"lru": Lru, "s3fifo": S3Fifo}  # that judge a page by its uses alone; the first until another is better
MOST = 2048  # pages of a shadow cache
AHEAD = 1.1  # times the hits of the order in use that another one needs
KEPT = 0.9  # of all hits before, the share that counts when a shadow's memory has been filled anew


class Auto(Order):
    """Evicts by one of the candidates, and goes on with another one when it is told to."""

    counts_uses = True

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self.name = next(iter(CANDIDATES))
        self._order: Order = CANDIDATES[self.name](context)

    def become(self, name: str) -> None:
        """Evict by another candidate, which gets the runs that stand here, the one used longest ago first."""
        runs = sorted((run for run in self.runs() if run.tokens), key=lambda run: run.used)
        self.name, self._order = name, CANDIDATES[name](self.context)
        for run in runs:
            self._order.push(run)

    def push(self, run: Run) -> None:
        self._order.push(run)

    def pop(self) -> Run | None:
        return self._order.pop()

    def peek(self) -> Run | None:
        return self._order.peek()

    def worth(self, run: Run) -> Any:
        return self._order.worth(run)

    def forget(self, run: Run, stands: bool) -> None:
        self._order.forget(run, stands)

    def runs(self) -> list[Run]:
        return self._order.runs()


class Shadows:
    """The shadow caches of a tier of `pages` pages, and whose order is `best`."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.best = next(iter(CANDIDATES))
        self.of = {name: Shadow(name) for name in CANDIDATES}
        self._scores = dict.fromkeys(CANDIDATES, 0.0)
        self._shift = max(0, (pages // MOST).bit_length())
        self._missed = 0

    def see(self, traces: Sequence[int]) -> bool:
        """A request has pages of these traces; answers whether `best` changed."""
        sample = (1 << self._shift) - 1
        if sampled := [trace for trace in traces if not trace & sample]:
            room = max(1, self.pages >> self._shift)
            for name, shadow in self.of.items():
                hits = shadow.see(sampled, room)
                self._scores[name] += hits
                self._missed += len(sampled) - hits
            if self._missed >= room * len(self.of):  # each shadow has been filled anew, about
                return self._judge()
        return False

    def _judge(self) -> bool:
        before, best = self.best, max(CANDIDATES, key=lambda name: self._scores[name])
        if self._scores[best] > AHEAD * self._scores[before]:
            self.best = best
        self._missed = 0
        self._scores = {name: KEPT * score for name, score in self._scores.items()}
        return self.best != before


class Page(Run):
    """A page in a shadow cache: of a run it has what the candidates ask for."""

    __slots__ = ()

    def __init__(self, trace: int, tick: int) -> None:
        self.parent, self.traced, self.tokens, self.width = None, array("Q", [trace]), b"there", 1
        self.used, self.uses = tick, 1


class Shadow:
    def __init__(self, name: str) -> None:
        self.pages: dict[int, Page] = {}
        self._tick = 0
        self.order = CANDIDATES[name](OrderContext(0, None, PageCost(), lambda: self._tick))

    def see(self, traces: Sequence[int], room: int) -> int:
        """Use these pages, or add them; returns how many were here before the first that was not."""
        pages = self.pages
        hits = next((at for at, trace in enumerate(traces) if trace not in pages), len(traces))
        for trace in reversed(traces):  # the last page of a chain goes first
            self._tick += 1
            if (page := pages.get(trace)) is None:
                pages[trace] = page = Page(trace, self._tick)
                self.order.push(page)
            else:
                page.used = self._tick
                page.uses += 1
        while len(pages) > room and (victim := self.order.pop()) is not None:
            del pages[victim.traces[0]]
            victim.tokens = b""
            self.order.forget(victim, stands=False)
        return hits
