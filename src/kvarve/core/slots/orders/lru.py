"""Least recently used goes first."""

from kvarve.core.slots.orders.order import Ranked
from kvarve.core.tree.tree import Run


class Lru(Ranked):
    def rank(self, run: Run) -> int:
        return run.used

    def worth(self, run: Run) -> float:
        return self.context.last_use(run)
