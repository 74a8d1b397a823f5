"""Least often used goes first; of equals, the one that was used longest ago."""

from kvarve.core.eviction.order import Ranked
from kvarve.core.tree import Run


class Lfu(Ranked):
    counts_uses = True

    def rank(self, run: Run) -> tuple[int, int]:
        return run.uses, run.used
