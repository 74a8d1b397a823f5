"""Pages that are cheap to recompute are evicted sooner than their last use says, costly ones later.

The weighing of recency against FLOPs saved per byte is Marconi's (Pan et al., 2024). All pages of a slot pool are of
one size, so cost alone is compared. A page of a chain costs itself, and more the deeper it is; a window or a state
costs all pages since the kept boundary before it, so one that is far from the last is costly and one close behind it is
cheap. The unit of time is the current lifetime of an average page: a page of twice the average cost outlives it by half
of that. Where all costs are equal this is LRU.
"""

from typing import Any

from kvarve.core.slots.orders.order import OrderContext, Ranked
from kvarve.core.tree.tree import Run

WEIGHT = 0.5  # lifetimes that a page outlives another by, if it costs more by the average cost
MOST = 4.0  # times the average cost, beyond which a higher cost does not count
MEMORY = 64  # how many of the pages evicted last make the average
LOOK_UP = 16  # runs towards the root that are searched for the state before this one


class Flops(Ranked):
    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._lifetime = 0.0  # from a page's last use to its eviction, in ticks
        self._average = 0.0  # cost of the pages evicted lately

    def rank(self, run: Run) -> tuple[float, int]:
        relative = min(MOST, self._cost(run) / self._average) if self._average else 0.0
        return run.used + WEIGHT * self._lifetime * relative, run.used

    def stale(self, rank: Any, run: Run) -> bool:
        return bool(rank[1] != run.used)  # a change of cost alone does not count

    def taken(self, run: Run) -> None:
        steps = 1 / MEMORY
        self._lifetime += (self.context.tick() - run.used - self._lifetime) * steps
        self._average += (self._cost(run) - self._average) * (steps if self._average else 1)

    def _cost(self, run: Run) -> float:
        """The cost of the run's page that would go first."""
        here = run.here[self.context.number]
        if not here:
            return 0.0
        if self.context.lookback is None:
            last = run.first + here.bit_length() - 1
            return self.context.cost.of(last, last + 1)
        first = run.first + (here & -here).bit_length() - 1
        return self.context.cost.of(self._before(run), first + 1)

    def _before(self, run: Run) -> int:
        """The last boundary before a run at which this pool has a page."""
        above = run.parent
        for _ in range(LOOK_UP):
            if above is None:
                return 0
            if here := above.here[self.context.number]:
                return above.first + here.bit_length()
            above = above.parent
        return above.first if above is not None else 0
