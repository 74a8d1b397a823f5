"""What is cheap to compute anew goes first, for each byte that it takes, unless it was used lately or often.

This is GreedyDual-Size-Frequency (Cherkasova 1998): a page is worth `uses * cost / size` above the worth of what was
evicted last, so worth ages as others leave. All pages of a place have one size, so cost alone is compared. A page of
a chain costs itself, which is dear where much comes before it; a window or a state costs everything from the boundary
before it that is kept, so one that stands alone and deep is dear and one that stands close behind another is cheap.
"""

from typing import Any

from kvarve.core.eviction.order import Place, Ranked
from kvarve.core.tree import Run

LOOK_UP = 16  # runs towards the root in which the state before this one is looked for


class Flops(Ranked):
    counts_uses = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._age = 0.0  # the worth of what was asked last

    def rank(self, run: Run) -> tuple[float, int, int]:
        return self._age + max(1, run.uses) * self._cost(run), run.uses, run.used

    def stale(self, rank: Any, run: Run) -> bool:
        return bool(rank[1:] != (run.uses, run.used))  # its worth is of the time of its last use

    def taken(self, rank: Any) -> None:
        self._age = rank[0]

    def _cost(self, run: Run) -> float:
        here = run.here[self.place.number]
        if not here:
            return 0.0
        if self.place.lookback is None:
            last = run.first + here.bit_length() - 1
            return self.place.cost.of(last, last + 1)
        first = run.first + (here & -here).bit_length() - 1
        return self.place.cost.of(self._before(run, first), first + 1)

    def _before(self, run: Run, position: int) -> int:
        """The boundary before a position at which this pool was kept last."""
        above = run.parent
        for _ in range(LOOK_UP):
            if above is None:
                return 0
            if here := above.here[self.place.number]:
                return above.first + here.bit_length()
            above = above.parent
        return above.first if above is not None else 0
