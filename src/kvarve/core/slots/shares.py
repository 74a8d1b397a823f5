"""What one salt may have of memory, where a share bounds it.

A slot counts from when it is reserved for a salt until it is free again. A salt that takes more than its share loses
its own coldest pages first, so no other salt's leave for them. What its requests have pinned may exceed the share until
they let go; the next step cuts the salt back.
"""

from collections.abc import Sequence

from kvarve.core.slots.slot_pools import SlotPools

# A salt has eviction orders of its own from the first part of its share on, and no more below the second: most salts
# are small, and few pages are looked through to begin them.
ORDERED, UNORDERED = 8, 16


class SaltShares:
    """A salt may have `share` of each *budget*: of the bytes of a tier that pools share, else of each place's slots, at
    least what one boundary reads. Salts are known by their root keys, while they have anything."""

    def __init__(self, share: float, slot_pools: SlotPools) -> None:
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
                slots = max(int(share * slot_pools.capacity[place]), slot_pools.lookbacks[place] or 1)
                self.places.append([place])
                self.most.append(slots * self.page_bytes[place])
        self.budget = {place: budget for budget, places in enumerate(self.places) for place in places}
        self.held: dict[bytes, list[int]] = {}  # by salt and budget, bytes
        self.over: dict[bytes, None] = {}  # to be cut back in the next step, in order

    def charge(self, salt: bytes, place: int, slots: int) -> None:
        """Slots were reserved for a salt, or (below zero) are free again."""
        held = self.held.setdefault(salt, [0] * len(self.most))
        held[self.budget[place]] += slots * self.page_bytes[place]
        if not any(held):
            del self.held[salt]

    def large(self, salt: bytes, place: int) -> bool:
        """Whether a salt has so much of a place's budget that it needs orders of its own."""
        budget = self.budget[place]
        return salt in self.held and self.held[salt][budget] * ORDERED > self.most[budget]

    def small(self, salt: bytes) -> bool:
        """Whether a salt has so little of all budgets that it needs no orders."""
        held = self.held.get(salt)
        return held is None or all(has * UNORDERED <= most for has, most in zip(held, self.most, strict=True))

    def excess(self, salt: bytes, budget: int, more: int) -> int:
        """The bytes by which a salt would exceed its share if it had `more`."""
        return self.held[salt][budget] + more - self.most[budget] if salt in self.held else 0

    def note_offered(self, salt: bytes, place: int) -> None:
        """Pages of a salt may go: the next step looks at it if it has more than its share."""
        if self.excess(salt, self.budget[place], 0) > 0:
            self.over[salt] = None

    def has_room(self, salt: bytes, places: Sequence[int], room: int) -> bool:
        """Whether a salt has left a `room`-th part of its share of these places."""
        held = self.held.get(salt)
        budgets = {self.budget[place] for place in places}
        return held is None or all((self.most[each] - held[each]) * room >= self.most[each] for each in budgets)
