"""Figures for people, by which nothing is decided: histograms, rates, and how long things take in memory.

One thread observes, any thread reads.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from kvarve.core.tree.tree import Run

# Upper bounds. A warm prompt takes milliseconds on a small model, a cold long one minutes.
LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
CALL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0)
AGE_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
TOKENS = tuple(float(4**power) for power in range(11))
BYTES = tuple(float(4**power) for power in range(6, 17))  # 4 KiB to 4 GiB
BYTES_PER_S = (1e6, 1e7, 5e7, 1e8, 5e8, 1e9, 5e9, 1e10, 5e10, 1e11)


@dataclass
class Histogram:
    """How many values fell below each bound, and their sum."""

    bounds: tuple[float, ...] = LATENCY_S
    counts: list[int] = field(default_factory=list)  # one per bound and one for values above all
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self, scale: float = 1.0) -> list[tuple[str, float]]:
        """Values at or below each bound, as Prometheus wants them; bounds are multiplied by `scale`."""
        names = [*(repr(bound * scale) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Rate:
    """How much was added per second, over the last whole `SECONDS`."""

    SECONDS = 10

    def __init__(self) -> None:
        self._ring = [(-1, 0.0)] * (2 * self.SECONDS)  # a second, and what was added in it

    def add(self, now: float, amount: float) -> None:
        second = int(now)
        at = second % len(self._ring)
        before = self._ring[at]
        self._ring[at] = second, amount + (before[1] if before[0] == second else 0.0)

    def total(self, now: float) -> float:
        """What was added in the last `SECONDS` before this one."""
        last = int(now)
        return sum(amount for second, amount in self._ring if last - self.SECONDS <= second < last)

    def per_second(self, now: float) -> float:
        return self.total(now) / self.SECONDS


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
