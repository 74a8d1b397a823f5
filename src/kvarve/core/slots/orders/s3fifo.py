"""New pages enter a small queue; only those that are used again there move to the main one.

S3-FIFO (Yang et al., SOSP 2023): most pages are never used again, so they pass through a small queue quickly and do not
evict used ones. A page that left the small queue lately and comes back goes to the main queue at once.
"""

from collections import OrderedDict, deque

from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.tree.tree import Run

SMALL_SHARE = 10  # a tenth of all runs stand in the small queue
MOST_USES = 3  # how many uses count for another turn in the main queue


class S3Fifo(Order):
    counts_uses = True

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._small: deque[Run] = deque()
        self._main: deque[Run] = deque()
        self._proven: dict[Run, bool] = {}  # whether a run belongs in the main queue
        self._counted: dict[Run, int] = {}  # how many of its uses have been counted
        # Traces of the first pages of runs that left the small queue, oldest first: a dict would search for its oldest
        # entry among those that it has lost.
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._last: Run | None = None  # the last victim: if it has more pages to evict, it stays next
        self._dead = 0

    def push(self, run: Run) -> None:
        if run not in self._proven:
            self._proven[run] = run.traces[0] in self._ghosts
            self._ghosts.pop(run.traces[0], None)
            self._counted[run] = max(1, run.uses)  # computing it counts as its first use
        queue = self._main if self._proven[run] else self._small
        if run is self._last:
            queue.appendleft(run)
        else:
            queue.append(run)

    def pop(self) -> Run | None:
        while self._small or self._main:
            small = len(self._small) * SMALL_SHARE >= len(self._small) + len(self._main) or not self._main
            run = (self._small if small else self._main).popleft()
            if not run.tokens:
                self._dead = max(0, self._dead - 1)
                continue
            uses = min(MOST_USES, run.uses - self._counted[run])
            if uses <= 0:
                if small:
                    self._remember(run)
                self._last = run
                return run
            self._counted[run] = run.uses - (0 if small else uses - 1)
            self._proven[run] = True
            self._main.append(run)
        return None

    def worth(self, run: Run) -> float:
        return self.context.last_use(run)

    def forget(self, run: Run, stands: bool) -> None:
        self._proven.pop(run, None)
        self._counted.pop(run, None)
        self._last = None if self._last is run else self._last
        self._dead += stands
        if 2 * self._dead > len(self._small) + len(self._main):
            self._small = deque(each for each in self._small if each.tokens)
            self._main = deque(each for each in self._main if each.tokens)
            self._dead = 0

    def runs(self) -> list[Run]:
        return [*self._small, *self._main]

    def _remember(self, run: Run) -> None:
        self._ghosts[run.traces[0]] = None
        while len(self._ghosts) > 16 + len(self._main) + len(self._small):
            self._ghosts.popitem(last=False)
