"""What is cheap to compute anew goes sooner than its last use says, and what is dear goes later.

The weighing of recency against FLOPs saved per byte is Marconi's (Pan et al., 2024). All pages of a place are of one
size, so cost alone is compared. A page of a chain costs itself, which is dear where much comes before it; a window or a
state costs everything since the boundary before it that is kept, so one that stands alone and deep is dear and one
close behind another is cheap. The unit of time is how long an average page lasts at the moment: a page of twice the
average cost outlives it by half of that. Where all costs are equal this is LRU.
"""

from typing import Any

from kvarve.core.eviction.order import OrderContext, Ranked
from kvarve.core.tree import Run

WEIGHT = 0.5  # lifetimes that a page outlives another by, if it costs more by the average cost
MOST = 4.0  # times the average cost, beyond which dearer is no better
MEMORY = 64  # how many of the pages that left last make the average
LOOK_UP = 16  # runs towards the root in which the state before this one is looked for


class Flops(Ranked):
    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._lifetime = 0.0  # from the last use of a page to its turn to go, in ticks
        self._average = 0.0  # cost of the pages whose turn came lately

    def rank(self, run: Run) -> tuple[float, int]:
        dear = min(MOST, self._cost(run) / self._average) if self._average else 0.0
        return run.used + WEIGHT * self._lifetime * dear, run.used

    def stale(self, rank: Any, run: Run) -> bool:
        return bool(rank[1] != run.used)  # it keeps the worth that it had when it was put here

    def taken(self, run: Run) -> None:
        steps = 1 / MEMORY
        self._lifetime += (self.context.tick() - run.used - self._lifetime) * steps
        self._average += (self._cost(run) - self._average) * (steps if self._average else 1)

    def _cost(self, run: Run) -> float:
        """Of the page that would go first."""
        here = run.here[self.context.number]
        if not here:
            return 0.0
        if self.context.lookback is None:
            last = run.first + here.bit_length() - 1
            return self.context.cost.of(last, last + 1)
        first = run.first + (here & -here).bit_length() - 1
        return self.context.cost.of(self._before(run), first + 1)

    def _before(self, run: Run) -> int:
        """The boundary before a run at which this pool was kept last."""
        above = run.parent
        for _ in range(LOOK_UP):
            if above is None:
                return 0
            if here := above.here[self.context.number]:
                return above.first + here.bit_length()
            above = above.parent
        return above.first if above is not None else 0
