"""Slot pools: the slots of each pool in each memory tier, the pages in them, and which page is evicted next.

The index of a slot pool is called `place`: tier * pools + pool. Pools that need all pages before a boundary (lookback
None) are called chains: each page rests on the one before it, so a tier evicts them from the tail. A window or state
page can go alone. Once a position has lost a chain's page from every memory tier no prompt can resume through it, so it
leaves the tree with all its other pages.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice

from kvarve.boundaries import leading, members, of, ones, span
from kvarve.core.eviction import order_for
from kvarve.core.eviction.cost import FLAT_COST, PageCost
from kvarve.core.eviction.order import OrderContext
from kvarve.core.tree import Root, Run, upward
from kvarve.errors import ConfigError
from kvarve.model import MEMORY_TIERS, PoolSpec, Tier

NEAR = 64  # free slots that are searched for a row, at least
SPARE = 8  # free slots behind a row that make it a better choice


class SlotPools:
    def __init__(
        self,
        pools: Sequence[PoolSpec],
        slots: Mapping[Tier, Sequence[int]],
        page_tokens: int,
        eviction: str = "lru",
        cost: PageCost = FLAT_COST,
    ) -> None:
        """`slots[tier][pool]`: how many pages fit. A tier that is not given, or has no slots, does not exist."""
        self.pools = tuple(pools)
        self.page_tokens = page_tokens
        self.capacity = [0] * (2 * len(self.pools))
        for tier in MEMORY_TIERS:
            for pool, count in enumerate(slots.get(tier, ())):
                if count < 0:
                    raise ConfigError(f"pool {self.pools[pool].name}: {count} slots on the {tier.name.lower()}")
                self.capacity[self.place(tier, pool)] = count
        self.free = [array("i", range(count - 1, -1, -1)) for count in self.capacity]
        lookbacks = [pool.lookback for pool in self.pools]
        self.orders = [
            order_for(eviction, OrderContext(place, lookbacks[place % len(self.pools)], cost, lambda: self.tick))
            for place in range(len(self.capacity))
        ]
        self.counts_uses = any(order.counts_uses for order in self.orders)
        self.chains = tuple(i for i, pool in enumerate(self.pools) if pool.lookback is None)
        self.roots: dict[bytes, Root] = {}
        self.evicted = [0] * len(self.capacity)
        self.tick = 0
        self.shape = 0  # how often runs were made, split, lengthened or dropped
        self.bad_pages = 0  # pages that are bad
        # Called before pages are evicted (run, place, local positions, those of them that must not be lost); returns
        # the positions that are copied down first, and leave when their copy has ended.
        self.rescue: Callable[[Run, int, int, int], int] = lambda run, place, lost, stuck: 0
        # Called with the parts of a run that was split (front, tail), and with a run that has left the tree.
        self.divided: Callable[[Run, Run], None] = lambda front, tail: None
        self.removed: Callable[[Run], None] = lambda run: None
        # Called with pages (run, pool, local positions) just before they leave their last memory tier.
        self.on_last_copy_evicted: Callable[[Run, int, int], None] | None = None

    def place(self, tier: Tier, pool: int) -> int:
        return int(tier) * len(self.pools) + pool

    def is_chain(self, place: int) -> bool:
        return self.pools[place % len(self.pools)].lookback is None

    def other(self, place: int) -> int:
        """The same pool in the other memory tier."""
        return (place + len(self.pools)) % len(self.capacity)

    def root(self, key: bytes) -> Run:
        """The empty run above all prompts that share this root key."""
        if key not in self.roots:
            self.shape += 1
            self.roots[key] = Root(key, len(self.pools), self.page_tokens)
        return self.roots[key]

    def runs(self) -> Iterator[Run]:
        """All runs of the tree, parents first."""
        stack: list[Run] = [*self.roots.values()]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    def forget(self, key: bytes) -> None:
        """Drop a root without runs, so that salts out of use cost no memory."""
        if key in self.roots and not self.roots[key].children:
            self.shape += 1
            del self.roots[key]

    # --- slots and residency

    def make_resident(self, run: Run, place: int, position: int, slot: int) -> None:
        """Put a page into a slot, which the tree owns from here on."""
        run.put(place, position, slot)
        self._offer_both(run, place)

    def make_row_resident(self, run: Run, place: int, position: int, slots: Sequence[int]) -> None:
        """The same for all pages from `position` to the end of a run."""
        run.put_row(place, position, slots)
        self._offer_both(run, place)

    def _offer_both(self, run: Run, place: int) -> None:
        """A page became resident: it may be evicted, and so may its copy in the other tier now."""
        self.offer(run, place)
        self.offer(run, self.other(place))

    def leave(self, run: Run, place: int, position: int) -> None:
        """A page leaves its slot, which is free; the page that it rested on may go next."""
        self.bad_pages -= run.bad[place] >> position - run.first & 1
        self.free[place].append(run.take(place, position))
        if position == run.first:
            self._let_parent_go(run, place)

    def _leave_all(self, run: Run, place: int, leaving: int) -> None:
        """Pages of a run leave a slot pool, the last first."""
        count = leaving.bit_count()
        self.evicted[place] += count
        start = leaving.bit_length() - count
        if leaving != span(start, start + count) or run.here[place] >> start + count:
            for local in reversed([*members(leaving)]):
                self.leave(run, place, run.first + local)
            return
        if run.bad[place]:
            self.bad_pages -= (run.bad[place] >> start).bit_count()
        self.free[place].extend(reversed(run.take_tail(place, start)))
        if start == 0:
            self._let_parent_go(run, place)

    def _let_parent_go(self, run: Run, place: int) -> None:
        """A run's first page has left: its parent's last page may go next."""
        if run.parent is not None and run.parent.kids[place] == 0:
            run.parent.used = max(run.parent.used, run.used)
            self.offer(run.parent, place)

    def mark_bad(self, run: Run, place: int, position: int) -> None:
        """A page's bytes failed their check."""
        local = 1 << position - run.first
        if run.here[place] & ~run.bad[place] & local:
            run.bad[place] |= local
            self.bad_pages += 1

    def give_back(self, place: int, slot: int) -> None:
        """A slot that a lease or a copy owned is free again."""
        self.free[place].append(slot)

    def touch(self, run: Run, positions: int) -> None:
        """The runs that hold these positions have just been used."""
        self.tick += 1
        for each, _ in upward(run, positions):
            each.used = self.tick

    def pin(self, run: Run, positions: int, prefix_pins: int = 0, tiers: Sequence[Tier] = MEMORY_TIERS) -> None:
        """Pin in these tiers all pages at `positions`, and the chains' pages at `prefix_pins`. Pinned positions stay in
        the tree, whichever tier has their chains."""
        for each, share in upward(run, positions):
            for tier in tiers:
                each.pins[tier].add(share)
        for each, share in upward(run, prefix_pins):
            for tier in tiers:
                each.prefix_pins[tier].add(share)

    def unpin(self, run: Run, positions: int, prefix_pins: int = 0, tiers: Sequence[Tier] = MEMORY_TIERS) -> None:
        for each, share in upward(run, positions):
            for tier in tiers:
                each.pins[tier].remove(share)
            self._let_go(each)
        for each, share in upward(run, prefix_pins):
            for tier in tiers:
                each.prefix_pins[tier].remove(share)
            self._let_go(each)

    def _let_go(self, run: Run) -> None:
        for place in range(len(self.capacity)):
            self.offer(run, place)
        if not self.chains:  # a pinned position may have been the last of its run
            self.prune(run)

    def split(self, run: Run, at: int) -> Run:
        self.shape += 1
        front = run.split(at)
        self.divided(front, run)
        for place in range(len(self.capacity)):
            self.offer(front, place)
        return front

    # --- eviction

    def offer(self, run: Run, place: int) -> None:
        """Put a run into a slot pool's eviction order if it has a page there that may go."""
        if not run.queued >> place & 1 and self.droppable(run, place):
            run.queued |= 1 << place
            self.orders[place].push(run)

    def droppable(self, run: Run, place: int) -> int:
        """The local positions of a run whose page may leave a slot pool now."""
        here = run.here[place]
        if not here:
            return 0
        if not self.is_chain(place):
            return here & ~run.pins[place // len(self.pools)].held()
        return 0 if run.kids[place] else here & span(self.held_until(run, place), run.pages)

    def held_until(self, run: Run, place: int) -> int:
        """The local position before which a run's pages of a chain must stay: they are pinned, or pinned pages rest on
        them."""
        tier, far = place // len(self.pools), self.other(place)
        first, elsewhere = run.held(tier).bit_length(), run.held(1 - tier).bit_length()
        if elsewhere > first:  # that position stays in memory, so pages before it that only this tier has stay too
            only_here = run.here[place] & ~(run.here[far] & ~run.bad[far]) & ones(elsewhere)
            first = max(first, only_here.bit_length())
        return first

    def evict(self, place: int, wanted: int) -> int:
        """Free up to `wanted` slots, coldest run first; returns how many came free at once.

        Slots of pages that are copied down first come free only when the copy has ended.
        """
        before, handled, order, spared = len(self.free[place]), 0, self.orders[place], []
        while handled < wanted:
            run = order.pop()
            if run is None:
                break
            if not self.droppable(run, place):  # unpinning it offers it again
                run.queued &= ~(1 << place)
                continue
            # The run counts as queued meanwhile, so that `_trim` cannot queue it a second time.
            went = self._trim(run, place, wanted - handled)
            handled += went
            if went:
                self._requeue(run, place)
            else:
                spared.append(run)
        for run in spared:
            self._requeue(run, place)
        return len(self.free[place]) - before

    def _requeue(self, run: Run, place: int) -> None:
        run.queued &= ~(1 << place)
        self.offer(run, place)

    def _trim(self, run: Run, place: int, wanted: int) -> int:
        """Drop, or start to copy down, up to `wanted` droppable pages of a run; returns how many."""
        other, chain, droppable = self.other(place), self.is_chain(place), self.droppable(run, place)
        # A chain loses its last page first; windows and states the earliest, since prompts grow at the end.
        if chain:
            take = droppable & ~ones(max(0, droppable.bit_length() - wanted))
        elif droppable.bit_count() <= wanted:
            take = droppable
        else:
            take = of(islice(members(droppable), wanted))
        lost = take & ~(run.here[other] & ~run.bad[other])  # in no memory tier after this
        stuck = 0
        if chain:
            # A page that only the host has may rest on one that only the device has, whose backup failed.
            stuck = lost if run.kids[other] else lost & ones(run.here[other].bit_length())
        moving = 0
        if lost:
            moving = self.rescue(run, place, lost, stuck)
            # Evicting for the copies' targets may have dropped other pages, also of this run.
            take &= self.droppable(run, place) | moving
        safe = run.here[other] & ~run.bad[other]
        leaving = take & ~moving & ~stuck & (lost | safe)
        if chain:
            leaving &= span((take & ~leaving).bit_length(), run.pages)
        if leaving:
            if self.on_last_copy_evicted is not None and (gone := leaving & ~safe & ~run.bad[place]):
                self.on_last_copy_evicted(run, place % len(self.pools), gone)
            self._leave_all(run, place, leaving)
            if chain or not self.chains:
                self.prune(run)
        return leaving.bit_count() + moving.bit_count()

    def drop(self, run: Run, place: int, position: int) -> None:
        """Evict one page, if it may go and no page rests on it."""
        local = position - run.first
        if not self.droppable(run, place) >> local & 1 or (self.is_chain(place) and run.here[place] >> local + 1):
            return
        self.leave(run, place, position)
        self.evicted[place] += 1
        if self.is_chain(place) or not self.chains:
            self.prune(run)

    def prune(self, run: Run) -> None:
        """Take positions that lost a chain's page from every memory tier out of the tree, from the run's tail up."""
        while run.parent is not None and not run.children:
            alive = self._alive(run)
            if alive == run.end:
                return
            self.shape += 1
            held = run.pinned()
            assert not held >> alive - run.first, "a pinned position lost its page"
            if self.on_last_copy_evicted is not None:
                self._report_last_copies(self.on_last_copy_evicted, run, alive - run.first)
            for place, here in enumerate(run.here):
                for local in members(here & span(alive - run.first, run.pages)):
                    self.leave(run, place, run.first + local)
                    self.evicted[place] += 1
            if alive > run.first:
                run.trim(alive)
                return
            parent = run.parent
            run.detach()
            for place, order in enumerate(self.orders):
                order.forget(run, stands=bool(run.queued >> place & 1))
            run.queued = 0
            self.removed(run)
            if isinstance(parent, Root):
                self.forget(parent.named)
                return
            parent.used = max(parent.used, run.used)
            for place in range(len(self.capacity)):
                self.offer(parent, place)
            run = parent

    def _report_last_copies(self, report: Callable[[Run, int, int], None], run: Run, local: int) -> None:
        """All pages of a run from a local position on leave memory."""
        for pool in range(len(self.pools)):
            host = self.place(Tier.HOST, pool)
            if gone := (run.here[pool] | run.here[host] & ~run.bad[host]) & span(local, run.pages):
                report(run, pool, gone)

    def _alive(self, run: Run) -> int:
        """The end of the positions of a leaf run that a prompt could still resume through."""
        if self.chains:
            pages = run.pages
            for pool in self.chains:
                pages = min(pages, leading(run.here[pool] | run.here[self.other(pool)]))
            return run.first + pages
        anything = run.pinned()
        for here in run.here:
            anything |= here
        return run.first + anything.bit_length()

    # --- free slots

    def reserve(self, place: int, wanted: int) -> list[int]:
        """Up to `wanted` free slots, evicting unpinned pages for them; the caller owns them."""
        free = self.free[place]
        if len(free) < wanted:
            self.evict(place, wanted - len(free))
        return [free.pop() for _ in range(min(wanted, len(free)))]

    def straighten(self, place: int, wanted: int, after: int) -> None:
        """Have `reserve` return consecutive slots next: behind the slot `after` if those are free, else where the row
        can go on. Pages in consecutive slots need no gathering."""
        free = self.free[place]
        if len(free) < wanted:
            self.evict(place, wanted - len(free))
        near = sorted(free[-max(NEAR, 4 * wanted) :])
        at = bisect_left(near, after + 1)
        behind = [(at, wanted)] if at < len(near) and near[at] == after + 1 else []
        others = ((start, row) for row in (wanted + SPARE, wanted) for start in range(len(near) - row + 1))
        start = next((start for start, row in chain(behind, others) if _is_row(near, start, row)), 0)
        near = near[start : start + wanted] + near[:start] + near[start + wanted :]
        free[-len(near) :] = array("i", reversed(near))

    def shed(self, tier: Tier) -> None:
        """Evict every unpinned page from a tier."""
        for pool in range(len(self.pools)):
            place = self.place(tier, pool)
            self.evict(place, self.capacity[place])


def _is_row(slots: Sequence[int], start: int, count: int) -> bool:
    """Whether `count` of the ascending slots from `start` on are consecutive."""
    last = start + count - 1
    return last < len(slots) and slots[last] - slots[start] == count - 1
