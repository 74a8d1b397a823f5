"""Makes room: gives free slots, and evicts pages for the rest. `candidates` chooses; `residency` frees their slots."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil

from kvarve.core.context import Context
from kvarve.core.policies import WritePolicy
from kvarve.core.slots.candidates import Victim
from kvarve.core.slots.extents import Extents
from kvarve.core.slots.residency import Residency
from kvarve.core.slots.shares import SaltShares
from kvarve.core.tree.tree import Run, root_of
from kvarve.pages.boundaries import members, of, ones, span

ROOM = 4  # of which a part is unused: there is room for what nobody is known to need


class Evictions:
    # Pages of a run and a place are about to leave memory: copy down what is to be copied first, and of the stuck ones,
    # on which pages that stay rest. Returns those that must not leave yet; None if nothing was done. `Backups` sets it.
    rescue: Callable[[Run, int, int, int], int | None]
    moving: Callable[[], Iterator[tuple[Run, int, int]]]  # runs, places and counts of pages that leave once copied down

    def __init__(self, context: Context, residency: Residency) -> None:
        self._context, self.residency = context, residency
        self.slot_pools, self.candidates = residency.slot_pools, residency.candidates
        self._shares = self.candidates.salt_shares
        self._pools, self._places = len(self.slot_pools.pools), len(self.slot_pools.capacity)
        self._short = [pool for pool in range(self._pools) if not self.slot_pools.is_chain(pool)]

    def reserve(self, place: int, wanted: int, root: bytes, spare: bool = False, after: int | None = None) -> list[int]:
        """Up to `wanted` free slots for prompts under a root key, evicting unpinned pages for them, or for `spare` ones
        only such; the caller owns them. `after`: they are to be consecutive, behind that slot if they can."""
        self.make_way(place, wanted, root)
        if (lacks := wanted - len(self.slot_pools.free[place])) > 0:
            self.make_room(place, lacks, spare)
        if after is not None and wanted:
            self.slot_pools.straighten(place, wanted, after)
        slots = self.slot_pools.take(place, wanted)
        if slots and self._shares is not None:
            self.candidates.charge(root, place, len(slots))
        return slots

    def has_room(self, root: bytes) -> bool:
        """Whether the device has room for windows and states that nobody is known to need, for prompts under a root
        key: a quarter of what each of their pools could have, and of the salt's share."""
        pools, short = self.slot_pools, self._short
        roomy = all(pools.unused(pool) * ROOM >= pools.capacity[pool] for pool in short)
        return bool(short) and roomy and (self._shares is None or self._shares.has_room(root, short, ROOM))

    def make_room(self, place: int, wanted: int, spare: bool = False) -> int:
        """Have up to `wanted` more free slots; where pools share a tier, of pages of all pools that are worth least.
        `spare`: evict only spare pages. Returns how many came free at once; others come when copies have ended."""
        number, pool = divmod(place, self._pools)
        extents = self.slot_pools.extents[number]
        if extents is None:
            return self.evict(place, wanted, spare)
        per, waits = extents.cut.per, self._context.config.policies.write is WritePolicy.WRITE_BACK
        free, stay = self.slot_pools.free, list[Victim]()
        # `moving`: slots that come free when copies have ended, or their share of an extent that does.
        enough, moving = len(free[place]) + wanted, 0.0
        while len(free[place]) + moving < enough:
            if self.slot_pools.grow(place):
                continue
            givers = self._givers(extents, number, pool)
            found = self.candidates.next_victim(self.candidates.orders, 0, givers, spare=spare)
            if found is None:
                break
            theirs = found.order % self._places
            # Of another pool one at a time, as with a chain's page its position leaves, and perhaps an extent is empty;
            # but together where they wait for copies.
            worth = per[pool] / per[theirs % self._pools]
            most = ceil((enough - len(free[place]) - moving) / worth) if theirs == place or waits else 1
            moving += self._shorten(found, most, 0, stay)[1] * worth
        self._offer_again(stay, 0)
        return wanted - max(0, enough - len(free[place]))

    def _givers(self, extents: Extents, number: int, pool: int) -> Sequence[int]:
        """The places whose pages may go for a pool. Those of another pool if that may give an extent to this one."""
        first, grows = number * self._pools, extents.may_grow(pool)
        return [first + each for each in range(self._pools) if each == pool or (grows and extents.may_shrink(each))]

    def evict(self, place: int, wanted: int, spare: bool = False) -> int:
        """Free up to `wanted` slots, coldest run first, `spare` pages before others or alone; returns how many came
        free at once.

        Slots of pages that are copied down first come free only when the copy has ended.
        """
        before, stay, orders = len(self.slot_pools.free[place]), list[Victim](), self.candidates.orders
        while wanted > 0 and (found := self.candidates.next_victim(orders, 0, (place,), spare=spare)):
            wanted -= self._shorten(found, wanted, 0, stay)[0]
        self._offer_again(stay, 0)
        return len(self.slot_pools.free[place]) - before

    def _shorten(self, victim: Victim, most: int, shift: int, stay: list[Victim]) -> tuple[int, int]:
        """Take up to `most` pages of a victim: how many go, and how many of these wait for copies. One of which none
        goes is to `stay`."""
        run, order, pages = victim
        place = order % self._places
        before = self.residency.evicted[place]
        went = self.trim(run, place, most, pages)
        if went:
            self.candidates.offer_again(run, order, shift)
        else:
            stay.append(victim)
        return went, max(0, went - (self.residency.evicted[place] - before))

    def _offer_again(self, victims: list[Victim], shift: int) -> None:
        for run, order, _ in victims:
            self.candidates.offer_again(run, order, shift)

    def trim(self, run: Run, place: int, wanted: int, droppable: int) -> int:
        """Drop, or start to copy down, up to `wanted` of the droppable pages of a run; returns how many."""
        slot_pools, chain = self.slot_pools, self.slot_pools.is_chain(place)
        # A chain loses its last page first; windows and states the earliest, since prompts grow at the end.
        if chain:
            take = droppable & ~ones(max(0, droppable.bit_length() - wanted))
        elif droppable.bit_count() <= wanted:
            take = droppable
        else:
            take = of(islice(members(droppable), wanted))
        lost = take & ~slot_pools.elsewhere(run, place)  # in no memory tier after this
        stuck = self._stuck(run, place, lost) if chain and lost else 0
        moving = 0
        if lost and (copied := self.rescue(run, place, lost, stuck)) is not None:
            moving = copied
            # Evicting for the copies' targets may have dropped other pages, also of this run.
            take &= self.candidates.droppable(run, place) | moving
        safe = slot_pools.elsewhere(run, place)
        leaving = take & ~moving & ~stuck & (lost | safe)
        if chain:
            leaving &= span((take & ~leaving).bit_length(), run.pages)
        if leaving:
            if gone := leaving & ~safe & ~run.bad[place]:
                self.residency.dropped(run, place % self._pools, gone)
            self.residency.leave_all(run, place, leaving)
            self.residency.prune_after(run, place)
        return leaving.bit_count() + moving.bit_count()

    def _stuck(self, run: Run, place: int, lost: int) -> int:
        """Of pages that are about to leave memory, those on which pages of another tier rest: a page that only the host
        has may rest on one that only the device has, whose backup failed."""
        stuck = 0
        for other in self.slot_pools.others[place]:
            stuck |= lost if run.kids[other] else lost & ones(run.here[other].bit_length())
        return stuck

    def make_way(self, place: int, wanted: int, root: bytes) -> None:
        """Slots are about to be reserved for prompts under a root key; beyond its share its own pages leave first."""
        if (shares := self._shares) is not None and wanted:
            self._cut(shares, root, shares.budget[place], wanted * shares.page_bytes[place])

    def cut_back(self) -> None:
        """The salts that have more than their share lose their own coldest pages."""
        if (shares := self._shares) is not None:
            over, shares.over = shares.over, {}
            for salt in over:
                for budget in range(len(shares.most)):
                    self._cut(shares, salt, budget)

    def _cut(self, shares: SaltShares, salt: bytes, budget: int, more: int = 0) -> None:
        """Evict a salt's own coldest pages until the salt could have `more` bytes without exceeding its share. The next
        step tries again to evict pages that wait for a copy, or for a slot to be copied to."""
        excess, orders = shares.excess(salt, budget, more), self.candidates.of_salt.get(salt)
        if excess <= 0 or orders is None:
            return
        held, shift, before = shares.held[salt], self.candidates.shift, sum(self.residency.evicted)
        leaving, stay = self._leaving(shares, salt, budget), list[Victim]()
        excess, wait = excess - leaving, leaving > 0
        while excess > 0 and (found := self.candidates.next_victim(orders, shift, shares.places[budget])):
            had, size = held[budget], shares.page_bytes[found.order % self._places]
            _, moving = self._shorten(found, -(-excess // size), shift, stay)
            wait |= moving > 0
            excess -= had - held[budget] + moving * size
        self._offer_again(stay, shift)
        if wait:
            shares.over[salt] = None
        self._context.counters.over_share += sum(self.residency.evicted) - before

    def _leaving(self, shares: SaltShares, salt: bytes, budget: int) -> int:
        """The bytes of a salt's pages that leave as soon as they have been copied down."""
        return sum(
            shares.page_bytes[place] * pages
            for run, place, pages in self.moving()
            if shares.budget.get(place) == budget and root_of(run).named == salt
        )
