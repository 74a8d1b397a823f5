"""How long things take in memory: figures for people, by which nothing is decided."""

from collections.abc import Callable

from kvarve.core.observe.histograms import AGE_S, LATENCY_S, Histogram
from kvarve.core.tree.tree import Run


class Ages:
    """Times by the clock that the ranks agree on."""

    def __init__(self, pools: int, tiers: int, now: Callable[[], float]) -> None:
        self._pools, self._now = pools, now
        # By memory tier: from the arrival there of a page, or of its run's first one, until it left; and from its last
        # use until then.
        self.lifetime_s = [Histogram(AGE_S) for _ in range(tiers)]
        self.idle_s = [Histogram(AGE_S) for _ in range(tiers)]
        self.reuse_s = Histogram(AGE_S)  # from the last use of a prefix to the next request for it
        self.storage_wait_s = Histogram(LATENCY_S)  # from a request's question to storage until it waits no longer

    def left(self, run: Run, place: int, local: int) -> None:
        tier, pages, now = place // self._pools, local.bit_count(), self._now()
        self.lifetime_s[tier].observe(now - run.came_s[place], pages)
        self.idle_s[tier].observe(now - run.used_s, pages)

    def asked(self, tail: Run) -> None:
        if tail.tokens:
            self.reuse_s.observe(self._now() - tail.used_s)

    def waited(self, seconds: float) -> None:
        self.storage_wait_s.observe(seconds)
