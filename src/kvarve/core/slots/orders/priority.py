"""Pages that only requests of low priority used go first; among equals, least recently used."""

from kvarve.core.slots.orders.order import Ranked
from kvarve.core.tree.tree import Run


class Priority(Ranked):
    def rank(self, run: Run) -> tuple[int, int]:
        return run.priority, run.used
