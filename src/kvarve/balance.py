"""Does one pool evict while another has idle slots? Plain numbers in, findings out.

Memory is divided among the pools once, by how far apart windows and states are expected to be (`config.spacing`). If
traffic differs, one pool evicts pages that would be hit while another has free slots, and only a low hit rate shows it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FULL, IDLE = 0.9, 0.5  # of a pool's slots
WORTH = 0.25  # of a tier's bytes: less idle memory is not reported
LEAST_EVICTED = 0.05  # of a pool's slots
LOOK_S = 30.0  # between two looks
SAY_S = 600.0  # before the same advice is repeated


@dataclass(frozen=True)
class Imbalance:
    """A full pool has evicted pages, and another pool of its tier uses less than half of its slots."""

    tier: str
    pool: str
    evicted: int
    slots: int
    idle: str
    idle_used: int
    idle_slots: int
    closer: bool  # the spacing of windows and states should be smaller, not larger

    def advice(self, tokens_per_snapshot: int) -> str:
        """One sentence: the imbalance, and the flag that changes it."""
        return (
            f"{self.tier}: pool {self.pool} evicted {self.evicted:,} pages (it has {self.slots:,} slots) "
            f"while {self.idle} uses {self.idle_used:,} of {self.idle_slots:,}: a --tokens-per-snapshot "
            f"{'below' if self.closer else 'above'} {tokens_per_snapshot:,} divides this memory better"
        )


class Watch:
    """Compares a cache's figures from time to time; `found` is the last result, by tier and pool."""

    def __init__(self) -> None:
        self.due_s = 0.0  # when to look next
        self.found: dict[tuple[str, str], Imbalance] = {}
        self._before: Mapping[str, float] | None = None
        self._silent_until_s: dict[tuple[str, bool], float] = {}

    def look(self, stats: Mapping[str, float], now_s: float) -> list[Imbalance]:
        """Compare with the last look; returns the findings to report now, the same advice of a tier once in `SAY_S`."""
        seen = [] if self._before is None else imbalances(self._before, stats)
        self.found = {(each.tier, each.pool): each for each in seen}
        self._before, self.due_s = stats, now_s + LOOK_S
        due = []
        for each in self.found.values():
            if now_s >= self._silent_until_s.get((each.tier, each.closer), now_s):
                self._silent_until_s[each.tier, each.closer] = now_s + SAY_S
                due.append(each)
        return due


def _missed(stats: Mapping[str, float], tier: str, pool: str) -> float:
    """Evicted pages, without windows and states inside of prompts, which take slots that nothing else needs."""
    return stats.get(f"evicted.{tier}.{pool}", 0) - stats.get(f"evicted_spare.{tier}.{pool}", 0)


def imbalances(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[Imbalance]:
    """The pools that suffered between two looks at a cache's figures (`PrefixCache.stats`), each once.

    A pool that fills for the first time evicts no page, and one that was flushed is not full: neither suffers.
    """
    places = [(tier, pool) for name in now if name.startswith("slots.") for _, tier, pool in [name.split(".", 2)]]
    slots = {place: int(now[f"slots.{'.'.join(place)}"]) for place in places}
    used = {place: int(now[f"used.{'.'.join(place)}"]) for place in places}
    page_bytes = {place: now[f"page_bytes.{place[1]}"] for place in places}
    for place in places:
        tier, pool = place
        evicted = int(_missed(now, tier, pool) - _missed(before, tier, pool))
        if evicted < max(1, LEAST_EVICTED * slots[place]) or used[place] < FULL * slots[place]:
            continue
        closer = now[f"lookback.{pool}"] > 0  # windows or states have too few slots
        beside = [other for other in places if other[0] == tier and (now[f"lookback.{other[1]}"] > 0) is not closer]
        total = sum(slots[other] * page_bytes[other] for other in places if other[0] == tier)
        for other in beside:
            spare = (slots[other] - used[other]) * page_bytes[other]
            if used[other] < IDLE * slots[other] and spare >= WORTH * total:
                yield Imbalance(tier, pool, evicted, slots[place], other[1], used[other], slots[other], closer)
                break
