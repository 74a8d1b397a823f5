"""Slot pools: how many slots each pool has in each memory tier, and which of them are free.

The index of a slot pool is called its *place*: the number of its tier, near to far, * pools + pool. Pools that need all
pages before a boundary (lookback None) are called chains: each page rests on the one before it, so a tier evicts them
from the tail. A window or state page can go alone.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain

from kvarve.core.core_config import CoreConfig
from kvarve.core.slots.extents import Cut, Extents
from kvarve.core.tree.tree import Run
from kvarve.errors import ConfigError
from kvarve.pages.pools import MEMORY_TIERS, Tier

NEAR = 64  # free slots that are searched for a row, at least
SPARE = 8  # free slots behind a row that make it a better choice


class SlotPools:
    def __init__(self, config: CoreConfig) -> None:
        """Slots for the memory tiers of the settings; a pool without slots in one of them is never there."""
        self.pools, self.memory = config.pools, config.memory
        pools, tiers = len(self.pools), range(len(self.memory))
        self._numbers = {tier: number for number, tier in enumerate((*self.memory, Tier.STORAGE))}
        sets: list[tuple[Tier, ...]] = [MEMORY_TIERS, *((tier,) for tier in Tier)]
        # By a set of tiers: the numbers of those of them that are memory of ours.
        self.memory_in = {tiers: [self._numbers[tier] for tier in tiers if tier in self.memory] for tiers in sets}
        # By place: the same pool in the other memory tiers.
        self.others = [
            [other * pools + pool for other in tiers if other != tier] for tier in tiers for pool in range(pools)
        ]
        divided = [config.slots.get(tier, (0,) * pools) for tier in self.memory]
        self.extents = [Extents(each) if isinstance(each, Cut) else None for each in divided]
        # The slots that a place can have at most: where pools share a tier, it has fewer for now (`committed`).
        self.capacity = [
            slots for each in divided for slots in (map(each.most, range(pools)) if isinstance(each, Cut) else each)
        ]
        for place, count in enumerate(self.capacity):
            if count < 0:
                tier, pool = self.tier(place), self.pools[place % pools]
                raise ConfigError(f"pool {pool.name} cannot have {count} slots on the {tier.name.lower()}")
        self.free = [
            array("i", range(0 if self.extents[place // pools] else count)[::-1])
            for place, count in enumerate(self.capacity)
        ]
        self.lookbacks = [pool.lookback for pool in self.pools] * len(self.memory)  # by place
        self.chains = tuple(i for i, pool in enumerate(self.pools) if pool.lookback is None)
        # Positions leave the tree with a chain's page, or with the last one of all.
        self.rests_on = self.chains or tuple(range(pools))
        self._step = config.step
        self.freed: list[tuple[int, int]] | None = None  # places and slots, where they are to be told

    def place(self, tier: Tier, pool: int) -> int:
        """The index of a slot pool, or of a pool in storage, behind those of all memory tiers."""
        return self._numbers[tier] * len(self.pools) + pool

    def tier(self, place: int) -> Tier:
        return self.memory[place // len(self.pools)]

    def is_chain(self, place: int) -> bool:
        return self.lookbacks[place] is None

    def committed(self, place: int) -> int:
        """How many slots a place has now: of a tier that pools share, those of its extents."""
        number, pool = divmod(place, len(self.pools))
        extents = self.extents[number]
        return self.capacity[place] if extents is None else extents.owned[pool] * extents.cut.per[pool]

    def unused(self, place: int) -> int:
        """How many slots a place could reserve without an eviction."""
        number, pool = divmod(place, len(self.pools))
        extents = self.extents[number]
        loose = 0 if extents is None or not extents.may_grow(pool) else len(extents.loose) * extents.cut.per[pool]
        return len(self.free[place]) + loose

    def step(self, pages: int) -> int:
        """How many pages lie between two snapshots on the way through a prompt of `pages`. 0: the prompt keeps none,
        because an operator bounds their number, the pools do not share the device, or the prompt does not fit and
        would lose slots to them."""
        extents = self.extents[0] if self.memory[0] is Tier.DEVICE else None
        if extents is None or any(extents.cut.bounds) or not self._step:
            return 0
        return self._step if pages <= min(self.capacity[pool] for pool in self.chains) else 0

    def elsewhere(self, run: Run, place: int) -> int:
        """Local positions of a run of which another memory tier has a good page."""
        good = 0
        for other in self.others[place]:
            good |= run.here[other] & ~run.bad[other]
        return good

    def on(self, run: Run, tier: Tier, pool: int) -> int:
        """Local positions of a run that are resident in a tier; none where that tier's slots are not ours."""
        return run.here[self.place(tier, pool)] if tier in self.memory else 0

    def good(self, run: Run, pool: int) -> int:
        """Local positions of a run of which any memory tier has a good page."""
        good = 0
        for place in range(pool, len(self.capacity), len(self.pools)):
            good |= run.here[place] & ~run.bad[place]
        return good

    def take(self, place: int, wanted: int) -> list[int]:
        """Up to `wanted` free slots, which the caller owns."""
        free = self.free[place]
        keep = max(0, len(free) - wanted)
        slots = free[keep:].tolist()[::-1]
        del free[keep:]
        if (extents := self.extents[place // len(self.pools)]) is not None:
            extents.take(place % len(self.pools), slots)
        return slots

    def give(self, place: int, slots: Sequence[int]) -> None:
        """Slots are free again."""
        self.free[place].extend(slots)
        if (extents := self.extents[place // len(self.pools)]) is not None:
            extents.give(place % len(self.pools), slots)
        if self.freed is not None:
            self.freed += [(place, slot) for slot in slots]

    def grow(self, place: int) -> bool:
        """Another extent for a place of a tier that pools share, a loose one or an empty one of another pool; False if
        there is none."""
        number, pool = divmod(place, len(self.pools))
        extents = self.extents[number]
        if extents is None or not extents.may_grow(pool):
            return False
        if not (slots := extents.grow(pool)):
            first = number * len(self.pools)
            for other in range(len(self.pools)):
                if other != pool:
                    self.free[first + other] = extents.loosen(other, self.free[first + other])
            slots = extents.grow(pool)
        self.free[place].extend(reversed(slots or ()))
        return bool(slots)

    def straighten(self, place: int, wanted: int, after: int) -> None:
        """Have `take` return consecutive slots next: behind the slot `after` if those are free, else where the row can
        go on. Pages in consecutive slots need no gathering."""
        free = self.free[place]
        near = sorted(free[-max(NEAR, 4 * wanted) :])
        at = bisect_left(near, after + 1)
        behind = [(at, wanted)] if at < len(near) and near[at] == after + 1 else []
        others = ((start, row) for row in (wanted + SPARE, wanted) for start in range(len(near) - row + 1))
        start = next((start for start, row in chain(behind, others) if _is_row(near, start, row)), 0)
        near = near[start : start + wanted] + near[:start] + near[start + wanted :]
        free[-len(near) :] = array("i", reversed(near))


def _is_row(slots: Sequence[int], start: int, count: int) -> bool:
    """Whether `count` of the ascending slots from `start` on are consecutive."""
    last = start + count - 1
    return last < len(slots) and slots[last] - slots[start] == count - 1
