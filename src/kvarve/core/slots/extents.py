"""Which pool has which part of a memory tier: one budget, cut into extents of equal size that go from pool to pool.

An extent holds `per[pool]` slots of one pool at a time: slot s of a pool lies in extent s // per[pool]. It may leave
its pool only while all its slots are free, so nothing in it is pinned, read or written. Each pool can always have
`least` extents.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NONE = -1  # no pool has it
LOST = 5  # extents' worth of memory that pages in part of an extent keep from other pools
TIMES = 16  # slots of the largest kind in an extent, at most
PARTS = (1, 2, 6, 12, 24, 60, 120)  # numbers that can be divided in many ways


@dataclass(frozen=True)
class Cut:
    """How a memory tier is cut: into `count` extents, of which each holds `per[pool]` slots of a pool, and of which
    each pool can always have `least[pool]`, and at most `bounds[pool]` where that is given. `nbytes`: bytes of an
    extent, for the arenas; the core does not use it."""

    count: int
    per: tuple[int, ...]
    least: tuple[int, ...]
    nbytes: int = 0
    bounds: tuple[int | None, ...] = ()

    def slots(self, pool: int) -> int:
        """The slots that a pool would have in all of them."""
        return self.count * self.per[pool]

    def most_bytes(self, sizes: Sequence[int]) -> int:
        """The bytes of pages in all of them, if all have the pool whose pages of `sizes` bytes fill an extent best."""
        return self.count * max(per * size for per, size in zip(self.per, sizes, strict=True))

    def most(self, pool: int) -> int:
        """The slots that a pool can have at most."""
        most, bound = self.count - sum(self.least) + self.least[pool], self.bounds[pool] if self.bounds else None
        return (most if bound is None else min(most, bound)) * self.per[pool]


class Extents:
    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.pool_of = [NONE] * cut.count
        self._had: dict[int, int] = {}  # the pools of those that were moved since `moved` was asked, at that time
        self.owned = [0] * len(cut.per)  # extents of each pool
        self.loose = array("i", range(cut.count - 1, -1, -1))  # of no pool
        self._taken = [0] * cut.count  # of its slots, how many are not free
        self._empty: list[set[int]] = [set() for _ in cut.per]  # extents of each pool whose slots are all free

    def in_use(self, extent: int) -> int:
        """How many of its slots are not free."""
        return self._taken[extent]

    def may_grow(self, pool: int) -> bool:
        """Whether a pool could have another extent, if one were loose."""
        return self.owned[pool] * self.cut.per[pool] < self.cut.most(pool)

    def may_shrink(self, pool: int) -> bool:
        return self.owned[pool] > self.cut.least[pool]

    def grow(self, pool: int) -> range | None:
        """The slots of a loose extent, which the pool has from now on; None if none is to spare."""
        kept = sum(
            max(0, least - owned)
            for each, (least, owned) in enumerate(zip(self.cut.least, self.owned, strict=True))
            if each != pool
        )
        if len(self.loose) <= kept:
            return None
        extent = self.loose.pop()
        self._had.setdefault(extent, NONE)
        self.pool_of[extent] = pool
        self.owned[pool] += 1
        self._empty[pool].add(extent)
        return range(extent * self.cut.per[pool], (extent + 1) * self.cut.per[pool])

    def take(self, pool: int, slots: Iterable[int]) -> None:
        """Slots are in use."""
        per, taken, empty = self.cut.per[pool], self._taken, self._empty[pool]
        for slot in slots:
            extent = slot // per
            if not taken[extent]:
                empty.discard(extent)
            taken[extent] += 1

    def give(self, pool: int, slots: Iterable[int]) -> None:
        """Slots are free again."""
        per, taken, empty = self.cut.per[pool], self._taken, self._empty[pool]
        for slot in slots:
            extent = slot // per
            taken[extent] -= 1
            if not taken[extent]:
                empty.add(extent)

    def loosen(self, pool: int, free: "array[int]") -> "array[int]":
        """Take the empty extents of a pool away from it, but for its least; returns what is left of its free slots."""
        count = min(len(self._empty[pool]), self.owned[pool] - self.cut.least[pool])
        if count <= 0:
            return free
        # The last ones, so that a pool's slots gather at the start of the tier, whatever the order of a set is.
        gone = set(sorted(self._empty[pool])[-count:])
        self._empty[pool] -= gone
        self.owned[pool] -= len(gone)
        for extent in gone:
            self._had.setdefault(extent, pool)
            self.pool_of[extent] = NONE
        self.loose.extend(sorted(gone, reverse=True))
        per = self.cut.per[pool]
        return array("i", [slot for slot in free if slot // per not in gone])

    def moved(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Since the last call, which extents have left which pool (pool, extent), and then which have joined which."""
        had, self._had = self._had, {}
        moves = [(had[extent], self.pool_of[extent], extent) for extent in had if had[extent] != self.pool_of[extent]]
        left = sorted((before, extent) for before, _, extent in moves if before != NONE)
        return left, sorted((now, extent) for _, now, extent in moves if now != NONE)


def cut(
    budget: int,
    sizes: Sequence[int],
    fewest: Sequence[int],
    shares: Sequence[float] = (),
    unit: int = 1,
    most: Sequence[int | None] = (),
    granule: int = 1,
    rows: Sequence[int] = (),
) -> Cut | None:
    """Cut `budget` bytes for pools whose slots take `sizes` bytes, of which each needs `fewest`. `shares`: the part of
    the bytes that each pool is likely to have; equal ones by default. `unit`: slots begin at multiples of it and fill
    their extent; of single bytes they leave a rest. `most`: slots that a pool may have, rounded up to whole extents.
    `granule`: the bytes that the driver moves at once, so extents are multiples of it. `rows`: how many slots of a
    pool fill whole granules, one behind the other whatever the unit is; 0: its slots lie by units. None if so few bytes
    cannot be cut.

    Large extents waste little where slots do not fill them; of small ones few pages have to leave before one is empty.
    """
    shares = shares or [1 / len(sizes)] * len(sizes)
    rows = rows or [int(unit == 1)] * len(sizes)
    found: list[tuple[float, Cut]] = []
    for extent in _extents([size * (row or 1) for size, row in zip(sizes, rows, strict=True)], unit, granule):
        per = tuple(
            extent // (size * row) * row if row else _fit(extent // unit, -(-size // unit))
            for size, row in zip(sizes, rows, strict=True)
        )
        least = tuple(-(-few // each) for few, each in zip(fewest, per, strict=True))
        if sum(least) + len(sizes) > budget // extent:
            continue
        waste = sum(share * (1 - each * size / extent) for share, each, size in zip(shares, per, sizes, strict=True))
        count = budget // extent
        bounds = tuple(
            None if slots is None else -(-slots // each) for slots, each in zip(most, per, strict=bool(most))
        )
        found.append((waste + LOST / count, Cut(count, per, least, extent, bounds)))
    return min(found, key=lambda each: each[0])[1] if found else None


def _extents(sizes: Sequence[int], unit: int, granule: int) -> list[int]:
    """Bytes that an extent might have: about a few of the largest slots, in whole slots of one of the pools; and of a
    multiple of units, or of granules, that can be divided in many ways."""
    largest = max(sizes)
    whole = {-(-times * largest // size) * size for size in sizes for times in range(1, TIMES + 1)}
    steps = [max(unit, granule) * parts for parts in PARTS] if unit > 1 else [1]
    return sorted({-(-extent // step) * step for extent in whole for step in steps})


def _fit(units: int, size: int) -> int:
    """Into how many equal parts of whole units, each of at least `size`, an extent can be divided."""
    low = [part for part in range(1, math.isqrt(units) + 1) if not units % part]
    return max(parts for part in low for parts in (part, units // part) if units // parts >= size)
