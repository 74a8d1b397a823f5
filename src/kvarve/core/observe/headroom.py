"""How many device slots could be reserved now: free ones, and those of unpinned pages; and how full memory is.

A query, built once for many requests: it changes nothing, and its cost grows with pinned pages, not resident ones.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvarve.core.copies.in_flight import BACKUP, LOAD, PROBE, STORE, Op
from kvarve.core.core import Core
from kvarve.core.lease import Lease
from kvarve.core.slots.extents import Extents
from kvarve.core.tree.tree import Run, same_pages
from kvarve.pages.boundaries import of, ones
from kvarve.pages.pools import Tier


def _stuck(core: Core, places: Sequence[int]) -> dict[Run, list[int]]:
    """Of each of these places, the local positions of runs whose pages requests or copies in flight need there, or that
    pages of such rest on. The cost grows with these, not with resident pages."""
    slot_pools, stuck = core.slot_pools, dict[Run, list[int]]()
    for tail in (*(lease.run for lease in core.leases.values()), *(op.run for op in core.copies.ops.values())):
        run, below = tail, [False] * len(places)
        while run is not None and run.tokens:
            now = []
            for rests, place in zip(below, places, strict=True):
                here = run.here[place]
                if not slot_pools.is_chain(place):
                    here &= run.pins[place // len(slot_pools.pools)].held()
                elif not rests:
                    here &= ones(core.candidates.held_until(run, place))
                now.append(here)
            if (before := stuck.get(run)) is not None:
                now = [one | other for one, other in zip(now, before, strict=True)]
                if now == before:
                    break
            stuck[run] = now
            below, run = [pages > 0 for pages in now], run.parent
    return stuck


def _to_fill(core: Core) -> list[int]:
    """By place, the slots that requests and copies in flight own, which are to be filled."""
    slot_pools = core.slot_pools
    counts = [0] * len(slot_pools.capacity)
    for lease in core.leases.values():
        for tier, pages in ((Tier.DEVICE, lease.own), (Tier.HOST, lease.landed)):
            for pool, slots in enumerate(pages if tier in slot_pools.memory else ()):
                counts[slot_pools.place(tier, pool)] += len(slots)
    for op in core.copies.ops.values():
        for part in op.parts if op.edge[1] in slot_pools.memory else ():
            counts[slot_pools.place(op.edge[1], part.pool)] += op.owned(part).bit_count()
    return counts


def pinned(core: Core) -> list[int]:
    """By place, the slots in use whose pages cannot be evicted now, and those that are to be filled."""
    counts = _to_fill(core)
    for pages in _stuck(core, range(len(counts))).values():
        counts = [count + bits.bit_count() for count, bits in zip(counts, pages, strict=True)]
    return counts


class Headroom:
    """`loose[i]`: device slots of the i-th chain (`SlotPools.chains`) that are free or evictable."""

    def __init__(self, core: Core) -> None:
        self._core, self._chains = core, core.slot_pools.chains
        self._stuck, self._filling = _stuck(core, self._chains), _to_fill(core)
        self.loose = [core.slot_pools.capacity[pool] - self._filling[pool] for pool in self._chains]
        for pages in self._stuck.values():
            self.loose = [loose - bits.bit_count() for loose, bits in zip(self.loose, pages, strict=True)]
        if (extents := core.slot_pools.extents[0]) is not None and self._chains:
            self.loose[0] -= self._blocked(extents) * extents.cut.per[self._chains[0]]

    def _blocked(self, extents: Extents) -> int:
        """How many of the device's extents, beyond its least, another pool cannot give to the chain: each of its slots
        that is in use for now may be in an extent of its own."""
        busy = self._filling[: len(self._core.pools)]
        for run in self._stuck:
            held = run.pins[0].held()
            for pool, here in enumerate(run.here[: len(busy)]):
                busy[pool] += (here & held).bit_count()
        return sum(
            max(0, min(slots, owned) - least)
            for pool, (slots, owned, least) in enumerate(zip(busy, extents.owned, extents.cut.least, strict=True))
            if pool not in self._chains
        )

    def needs(self, lease: Lease, upto: int) -> list[int]:
        """Of each chain, how many of the `loose` slots a lease would take to hold all pages before `upto`."""
        if lease.ready:
            here = [ones(lease.done) | lease.seen[pool] | of(lease.own[pool]) for pool in self._chains]
            return [upto - (pages & ones(upto)).bit_count() for pages in here]
        have, at, width = [0] * len(self._chains), 0, self._core.width
        run: Run | None = self._core.tree.roots.get(lease.root)
        while run is not None and at < upto:
            run = run.children.get(lease.tokens[at * width : (at + 1) * width])
            stuck = None if run is None else self._stuck.get(run)
            if run is None or stuck is None:
                break
            same = same_pages(run.tokens, lease.tokens, at * width, run.pages, width)
            for i, pages in enumerate(stuck):
                have[i] += min(pages.bit_length(), same, upto - at)
            at += run.pages
            if same < run.pages:
                break
        loads = [op for number in lease.ops if (op := self._core.copies.ops[number]).edge == LOAD]
        coming = [sum(op.of_pool(pool).bit_count() for op in loads) for pool in self._chains]
        return [max(0, upto - pages - more) for pages, more in zip(have, coming, strict=True)]


class Demand(NamedTuple):
    """Of each chain the `loose` device slots, free or evictable, and how many of them each lease asked about would
    take: plain data."""

    loose: list[int]
    needs: list[list[int]]


def demand(core: Core, asked: Iterable[tuple[Lease, int]]) -> Demand:
    """The loose slots, and what leases would take to hold all pages before a page each."""
    headroom = Headroom(core)
    return Demand([*headroom.loose], [headroom.needs(lease, upto) for lease, upto in asked])


def device_state(core: Core) -> tuple[tuple[int, ...], frozenset[int]]:
    """What has to change before a request finds more device slots: the free slots of each chain, and the copies in
    flight. Probes are left out, as they hold no slots."""
    free = tuple(len(core.slot_pools.free[pool]) for pool in core.slot_pools.chains)
    return free, frozenset(number for number, op in core.copies.ops.items() if op.edge != PROBE)


def making_room(core: Core) -> bool:
    """Whether evictions wait for copies in flight: from the device, or from the host to free slots for those."""
    return core.backups.leaving()


def copying(core: Core) -> bool:
    """Whether copies in flight pin device pages or own device slots."""
    return any(
        op.edge in (BACKUP, LOAD) or (op.edge == STORE and _holds_device(core, op)) for op in core.copies.ops.values()
    )


def _holds_device(core: Core, store: Op) -> bool:
    """Whether a store keeps pages on the device: the positions that it reads stay in the tree, and with them the pages
    before them of all chains, of which the host may lack some."""
    run, before = store.run, store.pinned.bit_length()
    while run is not None and run.tokens:
        pages = ones(max(0, min(before, run.end) - run.first))
        for pool in core.slot_pools.chains:
            if run.here[pool] & pages & ~core.slot_pools.elsewhere(run, pool):
                return True
        run = run.parent
    return False
