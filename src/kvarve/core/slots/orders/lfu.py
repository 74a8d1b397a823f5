"""Least frequently used goes first; among equals, least recently used."""

from kvarve.core.slots.orders.order import Ranked
from kvarve.core.tree.tree import Run


class Lfu(Ranked):
    counts_uses = True

    def rank(self, run: Run) -> tuple[int, int]:
        return run.uses, run.used
