"""Which pages may be evicted, and which go first: a run with an evictable page stands in the eviction orders.

Those windows and states go first that are read only at boundaries at which no prompt ended or branched and no request
has resumed: the *spare* pages. A salt that has much of its share has eviction orders of its own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvarve.core.context import Context
from kvarve.core.slots.orders import ORDERS
from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.slots.shares import SaltShares
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.core.tree.prefix_tree import PrefixTree
from kvarve.core.tree.tree import Run, root_of
from kvarve.pages.boundaries import ones, read_before, span


class Victim(NamedTuple):
    """A run that has left an order of this number (though `queued` says otherwise), and its pages that may go."""

    run: Run
    order: int
    pages: int


class Candidates:
    def __init__(self, context: Context, slot_pools: SlotPools, tree: PrefixTree) -> None:
        config = context.config
        self._slot_pools, self._tree, self._lookbacks = slot_pools, tree, slot_pools.lookbacks
        self._pools, self._places = len(config.pools), len(slot_pools.capacity)
        # What leaves the last tier has to be computed again; of what leaves another, bytes are brought back.
        last = max((place // self._pools for place, count in enumerate(slot_pools.capacity) if count), default=0)
        self._contexts = [
            OrderContext(
                lambda: tree.tick,
                config.chain_bytes / config.snapshot_bytes if back and place // self._pools == last else 0.0,
            )
            for place, back in enumerate(self._lookbacks)
        ]
        self._new_order = ORDERS[config.policies.eviction]
        # By place; behind all places, those of spare pages, which a chain has none of.
        spares = [self._places + place for place, back in enumerate(self._lookbacks) if back is not None]
        self._numbers = [*range(self._places), *spares]
        self.orders = self._new_orders()
        self.counts_uses = any(order.counts_uses for order in self.orders.values())
        self.salt_shares: SaltShares | None = None  # where a share bounds nothing, nothing is counted
        if config.policies.salt_share < 1:
            self.salt_shares = SaltShares(config.policies.salt_share, slot_pools)
        self.shift = 2 * self._places  # of `Run.queued`, the first bit that is about a salt's own orders
        self.of_salt: dict[bytes, dict[int, Order]] = {}  # orders of the larger salts, as those of all

    def _new_orders(self) -> dict[int, Order]:
        return {number: self._new_order(self._contexts[number % self._places]) for number in self._numbers}

    def droppable(self, run: Run, place: int) -> int:
        """The local positions of a run whose page may leave a slot pool now."""
        here = run.here[place]
        if not here:
            return 0
        if self._lookbacks[place] is not None:
            return here & ~run.pins[place // self._pools].held()
        return 0 if run.kids[place] else here & span(self.held_until(run, place), run.pages)

    def spare(self, run: Run, place: int) -> int:
        """Of a window's or state's pages, those that may leave and are worth least: nobody is known to resume there."""
        return self.droppable(run, place) & ~self._last(run, place)

    def among(self, run: Run, number: int) -> int:
        """The local positions of a run for which it stands in an order."""
        place = number % self._places
        return self.droppable(run, place) if number == place else self.spare(run, place)

    def _last(self, run: Run, place: int) -> int:
        """The local positions of a run that are read where a prompt is known to resume."""
        lookback = self._lookbacks[place]
        assert lookback is not None
        return read_before(run.ends << 1 | 1 << run.pages, lookback)

    def held_until(self, run: Run, place: int) -> int:
        """The local position before which a run's pages of a chain must stay: they are pinned, or pinned pages rest on
        them."""
        tier = place // self._pools
        first = run.held(tier).bit_length()
        if first >= run.here[place].bit_length():  # all must stay, as while a copy reads them
            return first
        for other in range(len(self._slot_pools.memory)):
            held = run.held(other).bit_length() if other != tier else 0
            if held > first:  # that position stays in memory, so pages before it that only this tier has stay too
                only_here = run.here[place] & ~self._slot_pools.elsewhere(run, place)
                first = max(first, (only_here & ones(held)).bit_length())
        return first

    def note_inside(self, run: Run, place: int) -> None:
        """A run has new pages, or new positions behind them: some may be spare."""
        lookback = self._lookbacks[place]
        if lookback is None or run.inside >> place & 1 or not run.here[place] & ones(max(0, run.pages - lookback)):
            return  # all but some runs, at little cost
        if run.here[place] & ~self._last(run, place):
            run.inside |= 1 << place

    def offer(self, run: Run, place: int) -> None:
        """Put a run into a slot pool's eviction orders if it has a page there that may go."""
        if run.here[place]:
            self._push(self.orders, 0, run, place)
            if self.of_salt:
                self._offer_to_salt(run, place)

    def offer_all(self, run: Run) -> None:
        """The same in every slot pool."""
        for place, here in enumerate(run.here):
            if here:
                self.offer(run, place)

    def offer_again(self, run: Run, number: int, shift: int = 0) -> None:
        """A run was taken from an order, and may have more pages to evict. `shift`: as for `next_victim`."""
        run.queued &= ~(1 << shift + number)
        self.offer(run, number % self._places)

    def _push(self, orders: dict[int, Order], shift: int, run: Run, place: int) -> None:
        """Add a run to those of these orders, whose bits in `Run.queued` begin at `shift`, that it belongs in."""
        if not run.queued >> shift + place & 1 and self.droppable(run, place):
            run.queued |= 1 << shift + place
            orders[place].push(run)
        if run.inside >> place & 1:
            spares = self._places + place
            if not run.queued >> shift + spares & 1 and self.spare(run, place):
                run.queued |= 1 << shift + spares
                orders[spares].push(run)

    def next_victim(
        self, orders: dict[int, Order], shift: int, places: Sequence[int], *, spare: bool = False
    ) -> Victim | None:
        """The run whose pages in these places are worth least, spare ones first. `shift`: of `Run.queued`, the first
        bit that is about these orders, of all or of a salt."""
        for behind in (self._places, 0)[: 1 if spare else 2]:
            best: tuple[Any, Victim] | None = None
            for number in [behind + place for place in places if behind + place in orders]:
                order, pages = orders[number], 0
                while (run := order.peek()) is not None and not (pages := self.among(run, number)):
                    order.pop()
                    run.queued &= ~(1 << shift + number)  # unpinning it offers it again
                if run is not None and (best is None or order.worth(run) < best[0]):
                    best = order.worth(run), Victim(run, number, pages)
            if best is not None:
                orders[best[1].order].pop()
                return best[1]
        return None

    def forget(self, run: Run) -> None:
        """A run has left the tree."""
        for number, order in self.orders.items():
            order.forget(run, bool(run.queued >> number & 1))
        for number, order in self.of_salt.get(root_of(run).named, {}).items() if self.of_salt else ():
            order.forget(run, bool(run.queued >> self.shift + number & 1))
        run.queued = 0

    def charge(self, salt: bytes, place: int, slots: int) -> None:
        """Slots were reserved for a salt, or (below zero) are free again."""
        if (shares := self.salt_shares) is None:
            return
        shares.charge(salt, place, slots)
        if salt not in self.of_salt:
            if shares.large(salt, place):
                self._begin(salt)
        elif slots < 0 and shares.small(salt):
            for number, order in self.of_salt.pop(salt).items():
                for run in order.runs():
                    run.queued &= ~(1 << self.shift + number)

    def _begin(self, salt: bytes) -> None:
        """A salt has orders of its own from now on."""
        self.of_salt[salt] = self._new_orders()
        for run in self._tree.runs(salt):
            for place in range(self._places) if run.tokens else ():
                self._offer_to_salt(run, place)

    def _offer_to_salt(self, run: Run, place: int) -> None:
        salt = root_of(run).named
        if (orders := self.of_salt.get(salt)) is not None:
            self._push(orders, self.shift, run, place)
            assert self.salt_shares is not None
            self.salt_shares.note_offered(salt, place)
