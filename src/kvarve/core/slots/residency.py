"""Which page is in which slot, and which must stay there. Once a position has lost a chain's page from every memory
tier no prompt can resume through it, so it leaves the tree with all its other pages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvarve.core.context import Context
from kvarve.core.slots.candidates import Candidates
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.core.tree.prefix_tree import PrefixTree
from kvarve.core.tree.tree import Root, Run, root_of, upward
from kvarve.pages.boundaries import leading, members, span, union
from kvarve.pages.pools import MEMORY_TIERS, Tier


class Residency:
    """What memory asks and tells the copies down the tiers, a floor above, goes by these, which `Backups` sets."""

    loses: Callable[[], bool]  # whether a page that leaves memory unstored is lost
    dropped: Callable[[Run, int, int], None]  # good pages of a run and a pool leave their last memory tier
    divided: Callable[[Run, Run], None]  # a run was split: its front and its tail
    removed: Callable[[Run], None]  # a run has left the tree

    def __init__(self, context: Context, slot_pools: SlotPools, tree: PrefixTree, candidates: Candidates) -> None:
        self._context, self._tell = context, context.tell
        self.slot_pools, self.tree, self.candidates = slot_pools, tree, candidates
        self._charges = candidates.salt_shares is not None
        self.evicted = [0] * len(slot_pools.capacity)  # by place
        self.bad_pages = 0  # pages that are bad
        self._entered: dict[tuple[Run, int], None] | None = None  # runs and places, of `offered_once`

    def enter(self, run: Run, place: int, local: int, slots: Sequence[int]) -> None:
        """Put pages at these local positions of a run into slots, in order, which the tree owns from here on."""
        if not run.here[place]:
            run.came_s[place] = self._context.now
        run.put(place, local, slots)
        for tell in self._tell.entered:
            tell(run, place, local)
        self._offer_all(run, place)

    @contextmanager
    def offered_once(self) -> Iterator[None]:
        """A run of which pages become resident in this block is offered to the eviction orders at its end."""
        assert self._entered is None
        entered: dict[tuple[Run, int], None] = {}
        self._entered = entered
        try:
            yield
        finally:
            self._entered = None
        for run, place in entered:
            self._offer_all(run, place)

    def _offer_all(self, run: Run, place: int) -> None:
        """A page became resident: it may be evicted, and so may its copies in other tiers now."""
        if self._entered is not None:
            self._entered[run, place] = None
            return
        self.candidates.note_inside(run, place)
        self.candidates.offer(run, place)
        for other in self.slot_pools.others[place]:
            if run.here[other]:
                self.candidates.offer(run, other)

    def lengthened(self, run: Run) -> None:
        """A run has new positions: those that were its last are inside of it now."""
        for place, here in enumerate(run.here):
            if here:
                self.candidates.note_inside(run, place)
                self.candidates.offer(run, place)

    def split(self, run: Run, at: int) -> Run:
        front = self.tree.split(run, at)
        self.divided(front, run)
        self.candidates.offer_all(front)
        return front

    def mark_bad(self, run: Run, place: int, local: int) -> None:
        """The bytes of pages at these local positions failed their check."""
        local &= run.here[place] & ~run.bad[place]
        run.bad[place] |= local
        self.bad_pages += local.bit_count()

    def pin(self, run: Run, positions: int, prefix_pins: int = 0, tiers: tuple[Tier, ...] = MEMORY_TIERS) -> None:
        """Pin in these tiers all pages at `positions`, and the chains' pages at `prefix_pins`. Pinned positions stay in
        the tree, whichever tier has their chains."""
        numbers = self.slot_pools.memory_in[tiers]
        for each, share in upward(run, positions) if positions else ():
            for tier in numbers:
                each.pins[tier].add(share)
        for each, share in upward(run, prefix_pins):
            for tier in numbers:
                each.prefix_pins[tier].add(share)

    def unpin(self, run: Run, positions: int, prefix_pins: int = 0, tiers: tuple[Tier, ...] = MEMORY_TIERS) -> None:
        numbers = self.slot_pools.memory_in[tiers]
        for each, share in upward(run, positions) if positions else ():
            for tier in numbers:
                each.pins[tier].remove(share)
            self._let_go(each)
        for each, share in upward(run, prefix_pins):
            for tier in numbers:
                each.prefix_pins[tier].remove(share)
            self._let_go(each)

    def _let_go(self, run: Run) -> None:
        self.candidates.offer_all(run)
        if not self.slot_pools.chains:  # a pinned position may have been the last of its run
            self.prune(run, self.slot_pools.memory[-1])

    def leave(self, run: Run, place: int, position: int) -> None:
        """A page leaves its slot, which is free; the page that it rested on may go next."""
        local = 1 << position - run.first
        for tell in self._tell.left:
            tell(run, place, local)
        self.bad_pages -= bool(run.bad[place] & local)
        self._free(run, place, [run.take(place, position)])
        if position == run.first:
            self._let_parent_go(run, place)

    def leave_all(self, run: Run, place: int, leaving: int) -> None:
        """Pages of a run leave a slot pool, the last first."""
        count = leaving.bit_count()
        self.evicted[place] += count
        start = leaving.bit_length() - count
        if leaving != span(start, start + count) or run.here[place] >> start + count:
            for local in reversed([*members(leaving)]):
                self.leave(run, place, run.first + local)
            return
        for tell in self._tell.left:
            tell(run, place, leaving)
        if run.bad[place]:
            self.bad_pages -= (run.bad[place] >> start).bit_count()
        self._free(run, place, [*reversed(run.take_tail(place, start))])
        if start == 0:
            self._let_parent_go(run, place)

    def _free(self, run: Run, place: int, slots: Sequence[int]) -> None:
        self.give_back(place, slots, root_of(run).named if self._charges else b"")

    def give_back(self, place: int, slots: Sequence[int], root: bytes) -> None:
        """Slots for prompts under this root key are free again."""
        self.slot_pools.give(place, slots)
        if slots and self._charges:
            self.candidates.charge(root, place, -len(slots))

    def _let_parent_go(self, run: Run, place: int) -> None:
        """A run's first page has left: its parent's last page may go next."""
        if run.parent is not None and run.parent.kids[place] == 0:
            self.tree.inherit(run.parent, run)
            self.candidates.offer(run.parent, place)

    def drop(self, run: Run, place: int, position: int) -> None:
        """Evict one page, if it may go and no page rests on it."""
        local, chain = position - run.first, self.slot_pools.is_chain(place)
        if not self.candidates.droppable(run, place) >> local & 1 or (chain and run.here[place] >> local + 1):
            return
        self.leave(run, place, position)
        self.evicted[place] += 1
        self.prune_after(run, place)

    def prune_after(self, run: Run, place: int) -> None:
        """Pages of a run have left a place: `prune` if positions may leave with them."""
        if self.slot_pools.is_chain(place) or not self.slot_pools.chains:
            self.prune(run, self.slot_pools.tier(place))

    def prune(self, run: Run, tier: Tier) -> None:
        """Take positions that lost a chain's page from every memory tier, and last from this one, out of the tree, from
        the run's tail up."""
        while run.parent is not None and not run.children:
            alive = self._alive(run)
            if alive == run.end:
                return
            start, parent = alive - run.first, run.parent
            assert not run.pinned() >> start, "a pinned position lost its page"
            if any(run.here):
                self._drop_from(run, start)
            self._remember(run, start, tier)
            if not self.tree.cut(run, alive):
                return
            self.candidates.forget(run)
            self.removed(run)
            if isinstance(parent, Root):
                self.tree.forget(parent.named)
                return
            self.tree.inherit(parent, run)
            self.candidates.offer_all(parent)
            run = parent

    def _drop_from(self, run: Run, start: int) -> None:
        """All pages of a run from a local position on leave memory."""
        gone = span(start, run.pages)
        for pool in range(len(self.slot_pools.pools)) if self.loses() else ():
            if good := self.slot_pools.good(run, pool) & gone:
                self.dropped(run, pool, good)
        for place, here in enumerate(run.here):
            if here & gone:
                self.leave_all(run, place, here & gone)

    def _remember(self, run: Run, start: int, tier: Tier) -> None:
        """The pages of a run from a local position on leave the tree: storage may have the first of them."""
        middle, end = start, run.pages
        if any(run.stored):
            middle = min(end, *[start + leading(run.stored[pool] >> start) for pool in self.slot_pools.rests_on])
        if middle < end:
            self.tree.ghosts.left(run, middle, end, tier)
        if start < middle:
            self.tree.ghosts.left(run, start, middle, Tier.STORAGE)

    def _alive(self, run: Run) -> int:
        """The end of the positions of a leaf run that a prompt could still resume through."""
        slot_pools = self.slot_pools
        if slot_pools.chains:
            pages = run.pages
            for pool in slot_pools.chains:
                pages = min(pages, leading(union(run.here[pool :: len(slot_pools.pools)])))
            return run.first + pages
        anything = run.pinned()
        for here in run.here:
            anything |= here
        return run.first + anything.bit_length()
