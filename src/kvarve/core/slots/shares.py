"""What one salt may have of memory, where a share bounds it.

A slot counts from when it is reserved for a salt until it is free again. A salt that takes more than its share loses
its own coldest pages first, so no other salt's leave for them. What its requests have pinned may exceed the share until
they let go; the next step cuts the salt back.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvarve.core.slots.orders import ORDERS
from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.tree.tree import Run, root_of

if TYPE_CHECKING:
    from kvarve.core.slots.slot_pools import SlotPools
    from kvarve.core.state import State

# A salt has eviction orders of its own from the first part of its share on, and no more below the second: most salts
# are small, and few pages are looked through to begin them.
ORDERED, UNORDERED = 8, 16


class SaltShares:
    """A salt may have `share` of each *budget*: of the bytes of a tier that pools share, else of each place's slots, at
    least what one boundary reads. Salts are known by their root keys, while they have anything."""

    def __init__(self, state: "State", slot_pools: "SlotPools", contexts: list[OrderContext]) -> None:
        policies, self._counters = state.config.policies, state.counters
        self._slot_pools, self._contexts, self._new_order = slot_pools, contexts, ORDERS[policies.eviction]
        share = policies.salt_share
        pools = len(slot_pools.pools)
        self.page_bytes = [pool.payload_bytes for pool in slot_pools.pools] * len(slot_pools.memory)  # by place
        self.places: list[list[int]] = []  # by budget
        self.most: list[int] = []  # by budget, bytes
        for tier, extents in enumerate(slot_pools.extents):
            places = [*range(tier * pools, (tier + 1) * pools)]
            if extents is not None:
                self.places.append(places)
                self.most.append(int(share * extents.cut.most_bytes(self.page_bytes[:pools])))
                continue
            for place in places:
                slots = max(int(share * slot_pools.capacity[place]), slot_pools.pools[place % pools].lookback or 1)
                self.places.append([place])
                self.most.append(slots * self.page_bytes[place])
        self.budget = {place: budget for budget, places in enumerate(self.places) for place in places}
        self.shift = 2 * len(contexts)  # of `Run.queued`, the first bit that is about a salt's own orders
        self.held: dict[bytes, list[int]] = {}  # by salt and budget, bytes
        self.orders: dict[bytes, dict[int, Order]] = {}  # of the larger salts, as those of all
        self._over: dict[bytes, None] = {}  # to be cut back in the next step, in order

    def charge(self, salt: bytes, place: int, slots: int) -> None:
        """Slots were reserved for a salt, or (below zero) are free again."""
        held, budget = self.held.get(salt), self.budget[place]
        if held is None:
            held = self.held[salt] = [0] * len(self.most)
        held[budget] += slots * self.page_bytes[place]
        if salt not in self.orders:
            if held[budget] * ORDERED > self.most[budget]:
                self._begin(salt)
        elif slots < 0 and all(has * UNORDERED <= most for has, most in zip(held, self.most, strict=True)):
            self._end(salt)
        if not any(held):
            del self.held[salt]

    def _begin(self, salt: bytes) -> None:
        self.orders[salt] = {
            number: self._new_order(self._contexts[number % len(self._contexts)]) for number in self._slot_pools.orders
        }
        if top := self._slot_pools.roots.get(salt):
            stack: list[Run] = [*top.children.values()]
            while stack:
                run = stack.pop()
                for place in range(len(self._contexts)):
                    self.offer(run, place)
                stack.extend(run.children.values())

    def _end(self, salt: bytes) -> None:
        for number, order in self.orders.pop(salt).items():
            for run in order.runs():
                run.queued &= ~(1 << self.shift + number)

    def of(self, run: Run) -> Iterator[tuple[int, Order]]:
        """The orders of a run's salt, by their bits in `Run.queued`."""
        for number, order in self.orders.get(root_of(run).named, {}).items():
            yield self.shift + number, order

    def offer(self, run: Run, place: int) -> None:
        """A run may have pages that may be evicted."""
        salt = root_of(run).named
        if (orders := self.orders.get(salt)) is None:
            return
        self._slot_pools.push(orders, self.shift, run, place)
        budget = self.budget[place]
        if self.held[salt][budget] > self.most[budget]:
            self._over[salt] = None

    def has_room(self, salt: bytes, places: Sequence[int], room: int) -> bool:
        """Whether a salt has left a `room`-th part of its share of these places."""
        held = self.held.get(salt)
        budgets = {self.budget[place] for place in places}
        return held is None or all((self.most[each] - held[each]) * room >= self.most[each] for each in budgets)

    def make_way(self, salt: bytes, place: int, slots: int) -> None:
        """Slots are about to be reserved for a salt."""
        if slots:
            self._cut(salt, self.budget[place], slots * self.page_bytes[place])

    def enforce(self) -> None:
        """Cut back the salts that have more than their share."""
        over, self._over = self._over, {}
        for salt in over:
            for budget in range(len(self.most)):
                self._cut(salt, budget)

    def _cut(self, salt: bytes, budget: int, more: int = 0) -> None:
        """Evict a salt's own coldest pages until the salt could have `more` bytes without exceeding its share. The next
        step tries again to evict pages that wait for a copy, or for a slot to be copied to."""
        held, orders, slot_pools = self.held.get(salt), self.orders.get(salt), self._slot_pools
        if held is None or orders is None or held[budget] + more <= self.most[budget]:
            return
        leaving, stay = self._leaving(salt, budget), list[tuple[Run, int]]()
        excess, wait = held[budget] + more - self.most[budget] - leaving, leaving > 0
        before = sum(slot_pools.evicted)
        while excess > 0 and (found := slot_pools.next_victim(orders, self.shift, self.places[budget])):
            run, number = found
            place = number % len(self._contexts)
            pages = slot_pools.droppable if number == place else slot_pools.spare
            had, evicted = held[budget], slot_pools.evicted[place]
            size = self.page_bytes[place]
            went = slot_pools.trim(run, place, -(-excess // size), pages(run, place))
            moving = went - (slot_pools.evicted[place] - evicted)
            wait |= moving > 0
            if not went:
                stay.append(found)
                continue
            excess -= had - held[budget] + max(0, moving) * size
            run.queued &= ~(1 << self.shift + number)
            self.offer(run, place)
        for run, number in stay:
            run.queued &= ~(1 << self.shift + number)
            self.offer(run, number % len(self._contexts))
        if wait:
            self._over[salt] = None
        self._counters.over_share += sum(slot_pools.evicted) - before

    def _leaving(self, salt: bytes, budget: int) -> int:
        """The bytes of a salt's pages that leave as soon as they have been copied down."""
        return sum(
            self.page_bytes[place] * part.positions.bit_count()
            for op in self._slot_pools.leaving()
            if op.run is not None and root_of(op.run).named == salt
            for part in op.parts
            if self.budget.get(place := self._slot_pools.place(op.edge[0], part.pool)) == budget
        )
