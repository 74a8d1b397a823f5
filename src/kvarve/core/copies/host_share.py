"""How much of the host copies to and from storage may hold: fetches a share of each *budget*, stores half as much.

A budget is the bytes of a host that pools share, else one pool's slots.
"""

from collections.abc import Sequence

from kvarve.core.core_config import CoreConfig
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.pages.pools import Tier


class HostShare:
    """Pages are counted by pool. A share holds at least what two boundaries read of each window and state, and two
    pages of each chain, as far as the host does."""

    def __init__(self, config: CoreConfig, slot_pools: SlotPools) -> None:
        self._page_bytes = [pool.payload_bytes for pool in config.pools]
        self.budgets = [[pool] for pool in range(len(self._page_bytes))]  # the pools of each
        slots = [slot_pools.capacity[slot_pools.place(Tier.HOST, pool)] for (pool,) in self.budgets]
        few = [min(count, 2 * (pool.lookback or 1)) for pool, count in zip(config.pools, slots, strict=True)]
        whole = [count * size for count, size in zip(slots, self._page_bytes, strict=True)]
        if (extents := slot_pools.extents[-1]) is not None:
            self.budgets, whole = [[*range(len(slots))]], [extents.cut.most_bytes(self._page_bytes)]
        self.whole_bytes = sum(whole)  # of the host
        share = config.policies.host_share
        self.most = [  # by budget, bytes that fetches may hold
            max(int(share * nbytes), self._bytes(pools, few)) for pools, nbytes in zip(self.budgets, whole, strict=True)
        ]
        self._budget_of = [number for number, pools in enumerate(self.budgets) for _ in pools]

    def _bytes(self, pools: Sequence[int], pages: Sequence[int]) -> int:
        return sum(pages[pool] * self._page_bytes[pool] for pool in pools)

    def fits(self, need: Sequence[int], *held: Sequence[int]) -> bool:
        """Whether fetches may hold the pages that they need beside those that are held. A budget of which they need
        nothing may be spent."""
        return all(
            not any(need[pool] for pool in pools) or sum(self._bytes(pools, each) for each in (need, *held)) <= most
            for pools, most in zip(self.budgets, self.most, strict=True)
        )

    def left(self, pool: int, *held: Sequence[int]) -> int:
        """How many pages of a pool stores may hold beside those that are held; one of each pool fits."""
        pools, most = self.budgets[self._budget_of[pool]], self.most[self._budget_of[pool]]
        half = max(most // 2, sum(self._page_bytes[each] for each in pools))
        return max(0, half - sum(self._bytes(pools, each) for each in held)) // self._page_bytes[pool]
