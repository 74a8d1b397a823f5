"""How full memory is and how long things take in it: figures for people, by which nothing is decided."""

from typing import TYPE_CHECKING

from kvarve.core.observe.histograms import AGE_S, LATENCY_S, Histogram
from kvarve.core.tree.tree import Run
from kvarve.pages.boundaries import ones
from kvarve.pages.pools import Tier

if TYPE_CHECKING:
    from kvarve.core.cache import Core


class Ages:
    """Times by the clock that the ranks agree on."""

    def __init__(self, pools: int, tiers: int) -> None:
        self._pools = pools
        # By memory tier: from the arrival there of a page, or of its run's first one, until it left; and from its last
        # use until then.
        self.lifetime_s = [Histogram(AGE_S) for _ in range(tiers)]
        self.idle_s = [Histogram(AGE_S) for _ in range(tiers)]
        self.reuse_s = Histogram(AGE_S)  # from the last use of a prefix to the next request for it
        self.storage_wait_s = Histogram(LATENCY_S)  # from a request's question to storage until it waits no longer

    def left(self, run: Run, place: int, pages: int, now: float) -> None:
        tier = place // self._pools
        self.lifetime_s[tier].observe(now - run.came_s[place], pages)
        self.idle_s[tier].observe(now - run.used_s, pages)

    def asked(self, tail: Run, now: float) -> None:
        """A request begins that is to use the pages up to `tail`."""
        if tail.tokens:
            self.reuse_s.observe(now - tail.used_s)


def pinned(core: "Core") -> list[int]:
    """By place, the slots in use whose pages cannot be evicted now: pages that requests or copies in flight need, and
    slots that are to be filled. The cost grows with these, not with resident pages."""
    slot_pools = core.slot_pools
    stuck: dict[Run, list[int]] = {}  # [place] local positions
    counts = [0] * len(slot_pools.capacity)

    def hold(run: Run | None) -> None:
        """Note what of a run cannot go, and of the runs above it, on which that rests."""
        below = [False] * len(counts)
        while run is not None and run.tokens:
            now = []
            for place, rests in enumerate(below):
                here = run.here[place]
                if not slot_pools.is_chain(place):
                    here &= run.pins[place // len(slot_pools.pools)].held()
                elif not rests:
                    here &= ones(slot_pools.held_until(run, place))
                now.append(here)
            if (before := stuck.get(run)) is not None:
                now = [one | other for one, other in zip(now, before, strict=True)]
                if now == before:
                    return
            stuck[run] = now
            below, run = [pages > 0 for pages in now], run.parent

    for lease in core.leases.values():
        hold(lease.run)
        if slot_pools.memory[0] is Tier.DEVICE:
            for pool, slots in enumerate(lease.own):
                counts[pool] += len(slots)
        for pool, slots in enumerate(lease.landed):
            counts[slot_pools.place(Tier.HOST, pool)] += len(slots)
    for op in core.copies.ops.values():
        hold(op.run)
        if op.edge[1] in slot_pools.memory:
            for part in op.parts:
                counts[slot_pools.place(op.edge[1], part.pool)] += op.owned(part).bit_count()
    for pages in stuck.values():
        for place, bits in enumerate(pages):
            counts[place] += bits.bit_count()
    return counts
