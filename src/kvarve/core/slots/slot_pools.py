"""Slot pools: the slots of each pool in each memory tier, the pages in them, and which page is evicted next.

The index of a slot pool is called its *place*: the number of its tier, near to far, * pools + pool. Pools that need all
pages before a boundary (lookback None) are called chains: each page rests on the one before it, so a tier evicts them
from the tail. A window or state page can go alone. Those go first that are read only at boundaries at which no prompt
ended or branched and no request has resumed: the *spare* pages. Once a position has lost a chain's page from every
memory tier no prompt can resume through it, so it leaves the tree with all its other pages.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from math import ceil
from typing import TYPE_CHECKING, Any

from kvarve.core.observe.ghosts import Ghosts
from kvarve.core.observe.levels import Ages
from kvarve.core.observe.page_events import Residency
from kvarve.core.policies import WritePolicy
from kvarve.core.slots.extents import Cut, Extents
from kvarve.core.slots.orders import ORDERS
from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.slots.shares import SaltShares
from kvarve.core.tree.tree import Root, Run, root_of, upward
from kvarve.errors import ConfigError
from kvarve.pages.boundaries import leading, members, of, ones, read_before, span, union
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import MEMORY_TIERS, Tier

if TYPE_CHECKING:
    from kvarve.core.copies.in_flight import Op
    from kvarve.core.state import State

NEAR = 64  # free slots that are searched for a row, at least
GHOSTS = 4  # the ghost list remembers this many times the pages that memory holds
ROOM = 4  # of which a part is unused: there is room for what nobody is known to need
SPARE = 8  # free slots behind a row that make it a better choice


class SlotPools:
    def __init__(self, state: "State") -> None:
        """Slots for the memory tiers of the settings; a pool without slots in one of them is never there."""
        config = state.config
        self._state, self.pools, self.page_tokens = state, config.pools, config.page_tokens
        self.memory = config.memory
        pools, tiers = len(self.pools), range(len(self.memory))
        self._numbers = {tier: number for number, tier in enumerate((*self.memory, Tier.STORAGE))}
        sets: list[tuple[Tier, ...]] = [MEMORY_TIERS, *((tier,) for tier in Tier)]
        # By a set of tiers: the numbers of those of them that are memory of ours.
        self._memory_in = {tiers: [self._numbers[tier] for tier in tiers if tier in self.memory] for tiers in sets}
        # By place: the same pool in the other memory tiers.
        self._others = [
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
                raise ConfigError(f"pool {pool.name}: {count} slots on the {tier.name.lower()}")
        self.free = [
            array("i", range(0 if self.extents[place // pools] else count)[::-1])
            for place, count in enumerate(self.capacity)
        ]
        self._lookbacks = [pool.lookback for pool in self.pools] * len(self.memory)  # by place
        chains = sum(pool.payload_bytes for pool in self.pools if pool.lookback is None)
        snapshot = sum(pool.lookback * pool.payload_bytes for pool in self.pools if pool.lookback is not None)
        # What leaves the last tier has to be computed again; of what leaves another, bytes are brought back.
        last = max((place // pools for place, count in enumerate(self.capacity) if count), default=0)
        contexts = [
            OrderContext(lambda: self.tick, chains / snapshot if back and place // pools == last else 0.0)
            for place, back in enumerate(self._lookbacks)
        ]
        # By place; behind all places, those of spare pages, which a chain has none of.
        new_order = ORDERS[config.policies.eviction]
        self.orders = {place: new_order(context) for place, context in enumerate(contexts)}
        for place, context in enumerate(contexts):
            if not self.is_chain(place):
                self.orders[len(contexts) + place] = new_order(context)
        self._step = config.step(snapshot / chains) if snapshot and chains else 0
        self.counts_uses = any(order.counts_uses for order in self.orders.values())
        self.chains = tuple(i for i, pool in enumerate(self.pools) if pool.lookback is None)
        # Positions leave the tree with a chain's page, or with the last one of all.
        self._rests_on = self.chains or tuple(range(len(self.pools)))
        pages = sum(sum(self.capacity[pool :: len(self.pools)]) for pool in self._rests_on)
        self.ghosts = Ghosts(GHOSTS * pages, config.page_tokens * TOKEN_BYTES)
        self.roots: dict[bytes, Root] = {}
        self.salt_shares: SaltShares | None = None  # where a share bounds nothing, nothing is counted
        if config.policies.salt_share < 1:
            self.salt_shares = SaltShares(state, self, contexts)
        self.evicted = [0] * len(self.capacity)
        self.ages = Ages(pools, len(self.memory))
        self.freed: list[tuple[int, int]] | None = None  # places and slots, where they are to be told
        self.residency: Residency | None = None  # where it is to be told
        self.tick = 0
        self.shape = 0  # how often runs were made, split, lengthened or dropped
        self.bad_pages = 0  # pages that are bad
        self._entered: dict[tuple[Run, int], None] | None = None  # runs and places, of `offered_once`

    def place(self, tier: Tier, pool: int) -> int:
        """The index of a slot pool, or of a pool in storage, behind those of all memory tiers."""
        return self._numbers[tier] * len(self.pools) + pool

    def tier(self, place: int) -> Tier:
        return self.memory[place // len(self.pools)]

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

    def has_room(self, root: bytes) -> bool:
        """Whether the device has room for windows and states that nobody is known to need, for prompts under a root
        key: a quarter of what each of their pools could have, and of the salt's share."""
        short = [pool for pool, spec in enumerate(self.pools) if spec.lookback is not None]
        roomy = all(self.unused(pool) * ROOM >= self.capacity[pool] for pool in short)
        return bool(short) and roomy and (self.salt_shares is None or self.salt_shares.has_room(root, short, ROOM))

    def step(self, pages: int) -> int:
        """How many pages lie between two snapshots on the way through a prompt of `pages`. 0: the prompt keeps none,
        because an operator bounds their number, the pools do not share the device, or the prompt does not fit and
        would lose slots to them."""
        extents = self.extents[0] if self.memory[0] is Tier.DEVICE else None
        if extents is None or any(extents.cut.bounds) or not self._step:
            return 0
        return self._step if pages <= min(self.capacity[pool] for pool in self.chains) else 0

    def is_chain(self, place: int) -> bool:
        return self._lookbacks[place] is None

    def others(self, place: int) -> list[int]:
        """The same pool in the other memory tiers."""
        return self._others[place]

    def elsewhere(self, run: Run, place: int) -> int:
        """Local positions of a run of which another memory tier has a good page."""
        good = 0
        for other in self.others(place):
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

    def root(self, key: bytes) -> Run:
        """The empty run above all prompts that share this root key."""
        root = self.roots.get(key)
        if root is None:
            self.shape += 1
            root = self.roots[key] = Root(key, len(self.pools), self.page_tokens, len(self.memory))
        return root

    def runs(self) -> Iterator[Run]:
        """All runs of the tree, parents first."""
        stack: list[Run] = [*self.roots.values()]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    def forget(self, key: bytes) -> None:
        """Drop a root without runs, so that salts out of use cost no memory."""
        root = self.roots.get(key)
        if root is not None and not root.children:
            self.shape += 1
            del self.roots[key]

    # --- slots and residency

    def make_resident(self, run: Run, place: int, local: int, slots: Sequence[int]) -> None:
        """Put pages at these local positions of a run into slots, in order, which the tree owns from here on."""
        if not run.here[place]:
            run.came_s[place] = self._state.now
        run.put(place, local, slots)
        run.passing[place % len(self.pools)] &= ~local
        if self.residency is not None:
            self.residency.moved(run, place, local, entered=True)
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
        self._note_inside(run, place)
        self.offer(run, place)
        for other in self._others[place]:
            if run.here[other]:
                self.offer(run, other)

    def lengthened(self, run: Run) -> None:
        """A run has new positions: those that were its last are inside of it now."""
        for place, here in enumerate(run.here):
            if here:
                self._note_inside(run, place)
                self.offer(run, place)

    def _note_inside(self, run: Run, place: int) -> None:
        lookback = self._lookbacks[place]
        if lookback is None or run.inside >> place & 1 or not run.here[place] & ones(max(0, run.pages - lookback)):
            return  # all but some runs, at little cost
        if run.here[place] & ~self._last(run, place):
            run.inside |= 1 << place

    def _last(self, run: Run, place: int) -> int:
        """The local positions of a run that are read where a prompt is known to resume."""
        lookback = self._lookbacks[place]
        assert lookback is not None
        return read_before(run.ends << 1 | 1 << run.pages, lookback)

    def leave(self, run: Run, place: int, position: int) -> None:
        """A page leaves its slot, which is free; the page that it rested on may go next."""
        if self.residency is not None:
            self.residency.moved(run, place, 1 << position - run.first, entered=False)
        self.bad_pages -= run.bad[place] >> position - run.first & 1
        self.ages.left(run, place, 1, self._state.now)
        self._free(place, [run.take(place, position)])
        self._left(run, place, 1)
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
        if self.residency is not None:
            self.residency.moved(run, place, leaving, entered=False)
        if run.bad[place]:
            self.bad_pages -= (run.bad[place] >> start).bit_count()
        self.ages.left(run, place, count, self._state.now)
        self._free(place, [*reversed(run.take_tail(place, start))])
        self._left(run, place, count)
        if start == 0:
            self._let_parent_go(run, place)

    def _let_parent_go(self, run: Run, place: int) -> None:
        """A run's first page has left: its parent's last page may go next."""
        if run.parent is not None and run.parent.kids[place] == 0:
            run.parent.used = max(run.parent.used, run.used)
            self.offer(run.parent, place)

    def store(self, run: Run, pool: int, local: int) -> None:
        """Storage has a pool's pages at these local positions of a run."""
        run.stored[pool] |= local
        if self.residency is not None:
            self.residency.moved(run, self.place(Tier.STORAGE, pool), local, entered=True)

    def mark_bad(self, run: Run, place: int, local: int) -> None:
        """The bytes of pages at these local positions failed their check."""
        local &= run.here[place] & ~run.bad[place]
        run.bad[place] |= local
        self.bad_pages += local.bit_count()

    def _left(self, run: Run, place: int, pages: int) -> None:
        """Pages of a run have left their slots."""
        if self.salt_shares is not None:
            self.salt_shares.charge(root_of(run).named, place, -pages)

    def give_back(self, place: int, slots: Sequence[int], root: bytes) -> None:
        """Slots that a lease or a copy owned, for prompts under this root key, are free again."""
        self._free(place, slots)
        if slots and self.salt_shares is not None:
            self.salt_shares.charge(root, place, -len(slots))

    def _free(self, place: int, slots: Sequence[int]) -> None:
        self.free[place].extend(slots)
        if (extents := self.extents[place // len(self.pools)]) is not None:
            extents.give(place % len(self.pools), slots)
        if self.freed is not None:
            self.freed += [(place, slot) for slot in slots]

    def touch(self, run: Run, positions: int) -> None:
        """The runs that hold these positions have just been used: a request uses the pages up to `run`."""
        self.tick += 1
        for each, _ in upward(run, positions):
            each.used = self.tick
        at, now = run, self._state.now
        while at.parent is not None:
            at.used_s = now
            at = at.parent

    def pin(self, run: Run, positions: int, prefix_pins: int = 0, tiers: tuple[Tier, ...] = MEMORY_TIERS) -> None:
        """Pin in these tiers all pages at `positions`, and the chains' pages at `prefix_pins`. Pinned positions stay in
        the tree, whichever tier has their chains."""
        numbers = self._memory_in[tiers]
        for each, share in upward(run, positions) if positions else ():
            for tier in numbers:
                each.pins[tier].add(share)
        for each, share in upward(run, prefix_pins):
            for tier in numbers:
                each.prefix_pins[tier].add(share)

    def unpin(self, run: Run, positions: int, prefix_pins: int = 0, tiers: tuple[Tier, ...] = MEMORY_TIERS) -> None:
        numbers = self._memory_in[tiers]
        for each, share in upward(run, positions) if positions else ():
            for tier in numbers:
                each.pins[tier].remove(share)
            self._let_go(each)
        for each, share in upward(run, prefix_pins):
            for tier in numbers:
                each.prefix_pins[tier].remove(share)
            self._let_go(each)

    def _let_go(self, run: Run) -> None:
        self.offer_all(run)
        if not self.chains:  # a pinned position may have been the last of its run
            self.prune(run, self.memory[-1])

    def split(self, run: Run, at: int) -> Run:
        self.shape += 1
        front = run.split(at)
        self._state.backups.divided(front, run)
        self.offer_all(front)
        return front

    # --- eviction

    def offer(self, run: Run, place: int) -> None:
        """Put a run into a slot pool's eviction orders if it has a page there that may go."""
        if run.here[place]:
            self.push(self.orders, 0, run, place)
            if self.salt_shares is not None:
                self.salt_shares.offer(run, place)

    def push(self, orders: dict[int, Order], shift: int, run: Run, place: int) -> None:
        """Add a run to those of these orders, whose bits in `Run.queued` begin at `shift`, that it belongs in."""
        if not run.queued >> shift + place & 1 and self.droppable(run, place):
            run.queued |= 1 << shift + place
            orders[place].push(run)
        if run.inside >> place & 1:
            spares = len(self.capacity) + place
            if not run.queued >> shift + spares & 1 and self.spare(run, place):
                run.queued |= 1 << shift + spares
                orders[spares].push(run)

    def offer_all(self, run: Run) -> None:
        """The same in every slot pool."""
        for place, here in enumerate(run.here):
            if here:
                self.offer(run, place)

    def droppable(self, run: Run, place: int) -> int:
        """The local positions of a run whose page may leave a slot pool now."""
        here = run.here[place]
        if not here:
            return 0
        if not self.is_chain(place):
            return here & ~run.pins[place // len(self.pools)].held()
        return 0 if run.kids[place] else here & span(self.held_until(run, place), run.pages)

    def spare(self, run: Run, place: int) -> int:
        """Of a window's or state's pages, those that may leave and are worth least: nobody is known to resume there."""
        return self.droppable(run, place) & ~self._last(run, place)

    def held_until(self, run: Run, place: int) -> int:
        """The local position before which a run's pages of a chain must stay: they are pinned, or pinned pages rest on
        them."""
        tier = place // len(self.pools)
        first = run.held(tier).bit_length()
        if first >= run.here[place].bit_length():  # all must stay, as while a copy reads them
            return first
        for other in range(len(self.memory)):
            held = run.held(other).bit_length() if other != tier else 0
            if held > first:  # that position stays in memory, so pages before it that only this tier has stay too
                first = max(first, (run.here[place] & ~self.elsewhere(run, place) & ones(held)).bit_length())
        return first

    def evict(self, place: int, wanted: int) -> int:
        """Free up to `wanted` slots, coldest run first; returns how many came free at once.

        Slots of pages that are copied down first come free only when the copy has ended.
        """
        before, handled = len(self.free[place]), self.evict_spares(place, wanted)
        self._evict(place, wanted - handled, place, self.droppable)
        return len(self.free[place]) - before

    def make_room(self, place: int, wanted: int, spare: bool = False) -> int:
        """Have up to `wanted` more free slots; where pools share a tier, of pages of all pools that are worth least.
        `spare`: evict only spare pages. Returns how many came free at once; others come when copies have ended."""
        number, pool = divmod(place, len(self.pools))
        extents = self.extents[number]
        if extents is None:
            return (self.evict_spares if spare else self.evict)(place, wanted)
        per, waits = extents.cut.per, self._state.config.policies.write is WritePolicy.WRITE_BACK
        # `moving`: slots that come free when copies have ended, or their share of an extent that does.
        enough, moving, stay = len(self.free[place]) + wanted, 0.0, list[tuple[Run, int]]()
        while len(self.free[place]) + moving < enough:
            if extents.may_grow(pool) and (slots := extents.grow(pool) or self._grow(number, pool)):
                self.free[place].extend(reversed(slots))
                continue
            found = self._next_victim(number, pool, spare)
            if found is None:
                break
            run, order = found
            theirs = order % len(self.capacity)
            evicted, pages = self.evicted[theirs], self.droppable if order == theirs else self.spare
            # Of another pool one at a time, as with a chain's page its position leaves, and perhaps an extent is empty;
            # but together where they wait for copies.
            worth = per[pool] / per[theirs % len(self.pools)]
            most = ceil((enough - len(self.free[place]) - moving) / worth) if theirs == place or waits else 1
            went = self.trim(run, theirs, most, pages(run, theirs))
            left = self.evicted[theirs] - evicted
            if not went:
                stay.append(found)
                continue
            moving += max(0, went - left) * worth
            run.queued &= ~(1 << order)
            self.offer(run, theirs)
        for run, order in stay:
            run.queued &= ~(1 << order)
            self.offer(run, order % len(self.capacity))
        return wanted - max(0, enough - len(self.free[place]))

    def _grow(self, number: int, pool: int) -> range | None:
        """An extent for a pool of a tier, from the empty ones of the others."""
        extents, first = self.extents[number], number * len(self.pools)
        assert extents is not None
        for other in range(len(self.pools)):
            if other != pool:
                self.free[first + other] = extents.loosen(other, self.free[first + other])
        return extents.grow(pool)

    def _next_victim(self, number: int, pool: int, spare: bool) -> tuple[Run, int] | None:
        """The next victim of a tier. Pages of another pool count if that may give an extent to this one."""
        extents, first = self.extents[number], number * len(self.pools)
        assert extents is not None
        grows = extents.may_grow(pool)
        givers = [
            first + each for each in range(len(self.pools)) if each == pool or (grows and extents.may_shrink(each))
        ]
        return self.next_victim(self.orders, 0, givers, spare)

    def next_victim(
        self, orders: dict[int, Order], shift: int, places: Sequence[int], spare: bool = False
    ) -> tuple[Run, int] | None:
        """The run whose pages in these places are worth least, spare ones first, and the number of its order, which it
        has left (though `queued` says otherwise). `shift`: as for `push`."""
        for behind, pages in ((len(self.capacity), self.spare), (0, self.droppable))[: 1 if spare else 2]:
            best: tuple[Any, int] | None = None
            for place in places:
                if (order := orders.get(behind + place)) is None:
                    continue
                while (run := order.peek()) is not None and not pages(run, place):  # unpinning it offers it again
                    order.pop()
                    run.queued &= ~(1 << shift + behind + place)
                if run is not None and (best is None or order.worth(run) < best[0]):
                    best = order.worth(run), behind + place
            if best is not None:
                taken = orders[best[1]].pop()
                assert taken is not None
                return taken, best[1]
        return None

    def evict_spares(self, place: int, wanted: int) -> int:
        """Evict up to `wanted` spare pages; returns how many go."""
        spares = len(self.capacity) + place
        return self._evict(place, wanted, spares, self.spare) if spares in self.orders else 0

    def _evict(self, place: int, wanted: int, order: int, pages: Callable[[Run, int], int]) -> int:
        """Evict up to `wanted` of the `pages` of the runs in one order; returns how many go."""
        handled, stay, queued = 0, [], 1 << order
        while handled < wanted:
            run = self.orders[order].pop()
            if run is None:
                break
            if not (droppable := pages(run, place)):  # unpinning it offers it again
                run.queued &= ~queued
                continue
            # The run counts as queued meanwhile, so that `trim` cannot queue it a second time.
            went = self.trim(run, place, wanted - handled, droppable)
            handled += went
            if went:
                run.queued &= ~queued
                self.offer(run, place)
            else:
                stay.append(run)
        for run in stay:
            run.queued &= ~queued
            self.offer(run, place)
        return handled

    def trim(self, run: Run, place: int, wanted: int, droppable: int) -> int:
        """Drop, or start to copy down, up to `wanted` of the droppable pages of a run; returns how many."""
        others, chain = self.others(place), self.is_chain(place)
        # A chain loses its last page first; windows and states the earliest, since prompts grow at the end.
        if chain:
            take = droppable & ~ones(max(0, droppable.bit_length() - wanted))
        elif droppable.bit_count() <= wanted:
            take = droppable
        else:
            take = of(islice(members(droppable), wanted))
        lost = take & ~self.elsewhere(run, place)  # in no memory tier after this
        stuck = 0
        if chain:
            # A page that only the host has may rest on one that only the device has, whose backup failed.
            for other in others:
                stuck |= lost if run.kids[other] else lost & ones(run.here[other].bit_length())
        moving = 0
        if lost and (copied := self._state.backups.rescue(run, place, lost, stuck)) is not None:
            moving = copied
            # Evicting for the copies' targets may have dropped other pages, also of this run.
            take &= self.droppable(run, place) | moving
        safe = self.elsewhere(run, place)
        leaving = take & ~moving & ~stuck & (lost | safe)
        if chain:
            leaving &= span((take & ~leaving).bit_length(), run.pages)
        if leaving:
            if gone := leaving & ~safe & ~run.bad[place]:
                self._state.backups.count_dropped(run, place % len(self.pools), gone)
            self._leave_all(run, place, leaving)
            if chain or not self.chains:
                self.prune(run, self.tier(place))
        return leaving.bit_count() + moving.bit_count()

    def drop(self, run: Run, place: int, position: int) -> None:
        """Evict one page, if it may go and no page rests on it."""
        local = position - run.first
        if not self.droppable(run, place) >> local & 1 or (self.is_chain(place) and run.here[place] >> local + 1):
            return
        self.leave(run, place, position)
        self.evicted[place] += 1
        if self.is_chain(place) or not self.chains:
            self.prune(run, self.tier(place))

    def prune(self, run: Run, tier: Tier) -> None:
        """Take positions that lost a chain's page from every memory tier, and last from this one, out of the tree, from
        the run's tail up."""
        while run.parent is not None and not run.children:
            alive = self._alive(run)
            if alive == run.end:
                return
            self.shape += 1
            start, parent = alive - run.first, run.parent
            assert not run.pinned() >> start, "a pinned position lost its page"
            if any(run.here):
                gone = span(start, run.pages)
                for pool in range(len(self.pools)) if self._state.backups.counts_dropped else ():
                    if good := self.good(run, pool) & gone:
                        self._state.backups.count_dropped(run, pool, good)
                for place, here in enumerate(run.here):
                    if here & gone:
                        self._leave_all(run, place, here & gone)
            self._remember(run, start, tier)
            if start:
                run.trim(alive)
                return
            run.detach()
            for number, order in self.orders.items():
                order.forget(run, bool(run.queued >> number & 1))
            for bit, order in self.salt_shares.of(run) if self.salt_shares is not None else ():
                order.forget(run, bool(run.queued >> bit & 1))
            run.queued = 0
            self._state.backups.removed(run)
            if isinstance(parent, Root):
                self.forget(parent.named)
                return
            parent.used = max(parent.used, run.used)
            self.offer_all(parent)
            run = parent

    def _remember(self, run: Run, start: int, tier: Tier) -> None:
        """The pages of a run from a local position on leave the tree: storage may have the first of them."""
        middle, end = start, run.pages
        if any(run.stored):
            middle = min(end, *[start + leading(run.stored[pool] >> start) for pool in self._rests_on])
        if middle < end:
            self.ghosts.left(run, middle, end, tier)
        if start < middle:
            self.ghosts.left(run, start, middle, Tier.STORAGE)

    def _alive(self, run: Run) -> int:
        """The end of the positions of a leaf run that a prompt could still resume through."""
        if self.chains:
            pages = run.pages
            for pool in self.chains:
                pages = min(pages, leading(union(run.here[pool :: len(self.pools)])))
            return run.first + pages
        anything = run.pinned()
        for here in run.here:
            anything |= here
        return run.first + anything.bit_length()

    # --- free slots

    def make_way(self, place: int, wanted: int, root: bytes) -> None:
        """Slots are about to be reserved for prompts under a root key; beyond its share its own pages leave first."""
        if self.salt_shares is not None:
            self.salt_shares.make_way(root, place, wanted)

    def cut_back(self) -> None:
        """The salts that have more than their share lose their own coldest pages."""
        if self.salt_shares is not None:
            self.salt_shares.enforce()

    def leaving(self) -> list["Op"]:
        """The copies in flight that evictions wait for."""
        return [op for op in self._state.copies.ops.values() if op.leaving and not op.void]

    def reserve(self, place: int, wanted: int, root: bytes, spare: bool = False) -> list[int]:
        """Up to `wanted` free slots for prompts under a root key, evicting unpinned pages for them, or for `spare` ones
        only such; the caller owns them."""
        self.make_way(place, wanted, root)
        if len(self.free[place]) < wanted:
            self.make_room(place, wanted - len(self.free[place]), spare)
        free = self.free[place]
        keep = max(0, len(free) - wanted)
        slots = free[keep:].tolist()[::-1]
        del free[keep:]
        if (extents := self.extents[place // len(self.pools)]) is not None:
            extents.take(place % len(self.pools), slots)
        if slots and self.salt_shares is not None:
            self.salt_shares.charge(root, place, len(slots))
        return slots

    def straighten(self, place: int, wanted: int, root: bytes, after: int) -> None:
        """Have `reserve` return consecutive slots next: behind the slot `after` if those are free, else where the row
        can go on. Pages in consecutive slots need no gathering."""
        self.make_way(place, wanted, root)
        if len(self.free[place]) < wanted:
            self.make_room(place, wanted - len(self.free[place]))
        free = self.free[place]
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
