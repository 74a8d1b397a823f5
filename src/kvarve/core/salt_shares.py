"""What the prompts of one salt may keep of each memory tier, where a share bounds it.

A page counts from when it is in the tree until it leaves its slot. A salt that exceeds its share loses its own coldest
pages in the next step; what requests have pinned may exceed it until they let go.
"""

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from kvarve.core.tree import Root, Run, root_of

if TYPE_CHECKING:
    from kvarve.core.slot_pools import SlotPools

SLACK = 16  # a salt that exceeds its share loses a sixteenth of that more, so that it is not looked through often


class SaltShares:
    """Of each tier of `slot_pools`, a salt may keep `share`. Salts are known by their root keys, while they keep
    anything."""

    def __init__(self, slot_pools: "SlotPools", share: float) -> None:
        self._slot_pools, self._pools = slot_pools, len(slot_pools.pools)
        self.most = [int(share * self._tier_bytes(tier)) for tier in range(len(slot_pools.memory))]
        self.held: dict[bytes, list[int]] = {}  # bytes in each tier
        self.evicted = 0  # pages
        self._over: dict[bytes, None] = {}  # to be looked at in the next step, in order

    def counted(self, run: Run, place: int, pages: int) -> None:
        """Pages of a run came into a slot pool, or (below zero) left it."""
        root, tier = root_of(run).named, place // self._pools
        held = self.held.setdefault(root, [0] * len(self.most))
        held[tier] += pages * self._page_bytes(place)
        if held[tier] > self.most[tier]:
            self._over[root] = None
        elif not any(held):
            del self.held[root]

    def unpinned(self, run: Run) -> None:
        """Pages of a run may be evicted again."""
        root = root_of(run).named
        if any(self._excess(root, tier) > 0 for tier in range(len(self.most))):
            self._over[root] = None

    def enforce(self) -> None:
        """Evict from each salt that exceeds its share of a tier the coldest pages that it has there."""
        over, self._over = self._over, {}
        for key in over:
            for tier, most in enumerate(self.most):
                if (root := self._slot_pools.roots.get(key)) and (excess := self._excess(key, tier)) > 0:
                    before = sum(self._slot_pools.evicted)
                    self._evict(root, tier, excess + most // SLACK)
                    self.evicted += sum(self._slot_pools.evicted) - before

    def _evict(self, root: Root, tier: int, nbytes: int) -> None:
        """Evict so many bytes of the pages below a root from a tier, spare ones first, then the least recently used."""
        slot_pools, places = self._slot_pools, range(tier * self._pools, (tier + 1) * self._pools)
        kinds, tickets = (slot_pools.spare, slot_pools.droppable), count()
        queue: list[tuple[int, int, int, Run, int]] = []

        def add(run: Run) -> None:
            for place in places:
                for kind in (1,) if slot_pools.is_chain(place) else (0, 1):
                    if kinds[kind](run, place):
                        heappush(queue, (kind, run.used, next(tickets), run, place))

        stack: list[Run] = [*root.children.values()]
        while stack:
            run = stack.pop()
            add(run)
            stack.extend(run.children.values())
        while queue and nbytes > 0:
            kind, _, _, run, place = heappop(queue)
            if not (pages := kinds[kind](run, place)):
                continue
            parent, page_bytes = run.parent, self._page_bytes(place)
            nbytes -= page_bytes * slot_pools.trim(run, place, -(-nbytes // page_bytes), pages)
            if parent is not None and parent is not root and slot_pools.is_chain(place) and not parent.kids[place]:
                add(parent)  # no page rests on its last one any more

    def _excess(self, root: bytes, tier: int) -> int:
        held = self.held.get(root)
        return (held[tier] if held else 0) - self.most[tier]

    def _tier_bytes(self, tier: int) -> int:
        """The bytes of all pages that a tier can have."""
        places = range(tier * self._pools, (tier + 1) * self._pools)
        extents = self._slot_pools.extents[tier]
        if extents is None:
            return sum(self._slot_pools.capacity[place] * self._page_bytes(place) for place in places)
        per = zip(extents.cut.per, places, strict=True)
        return extents.cut.count * max(pages * self._page_bytes(place) for pages, place in per)

    def _page_bytes(self, place: int) -> int:
        return self._slot_pools.pools[place % self._pools].payload_bytes
