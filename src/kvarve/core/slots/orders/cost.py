"""The cost of recomputing a page, for the eviction orders that weigh it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageCost:
    """The cost of recomputing a page, in any unit: a part that is the same for each page (linear layers), and a part
    for each page before it (attention)."""

    page: float = 1.0
    per_page_before: float = 0.0

    def of(self, start: int, stop: int) -> float:
        """The cost of pages [start, stop) of a prompt."""
        return (stop - start) * (self.page + self.per_page_before * (start + stop - 1) / 2)


FLAT_COST = PageCost()
