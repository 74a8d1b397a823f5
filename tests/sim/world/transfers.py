"""Simulated transfers of one rank: arenas are lists, storage is a dict, and the content of a page is its key.

So a core that mixes up two slots, frees one that is still read, or resumes a prompt from another prompt's page is
caught at once. Other slots have distinct contents too: free, reserved and not filled, target of a copy in flight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvarve.core.copies.effects import Copy, Page, Probe, Transfer
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.pages.pools import Tier

FREE, ROTTEN, BROKEN, OTHERS = b"free", b"rotten", b"broken", b"another pool's"
PAGE = 32  # bytes: only a page's key is as long as this

Name = tuple[bytes, int, int]  # key, pool, rank


def flying(op: int) -> bytes:
    return b"target of %d" % op


def empty(lease: int) -> bytes:
    return b"room of %d" % lease


@dataclass
class Store:
    """A storage for all ranks: its objects, all names it ever had, and the ranks to which it answers misses (bits)."""

    objects: dict[Name, bytes] = field(default_factory=dict)
    ever: set[Name] = field(default_factory=set)
    mute: int = 0


class Arena(Protocol):
    """A pool's pages in one tier: by slot, or by an engine's handle."""

    def __getitem__(self, slot: int, /) -> bytes: ...
    def __setitem__(self, slot: int, content: bytes, /) -> None: ...


class Shared(list[bytes]):
    """A pool's pages in a tier whose extents go from pool to pool: what is written to a slot destroys all that other
    pools had in its extent."""

    def __init__(self, slots: int, per: int) -> None:
        super().__init__([FREE] * slots)
        self._per, self.others = per, list["Shared"]()

    def __setitem__(self, slot: Any, content: Any) -> None:
        super().__setitem__(slot, content)
        if content != FREE:
            for other in self.others:
                for at in range(slot // self._per * other._per, (slot // self._per + 1) * other._per):
                    list.__setitem__(other, at, OTHERS)


def _arenas(slot_pools: SlotPools) -> Iterator[list[bytes]]:
    """By place."""
    pools = len(slot_pools.pools)
    for number, extents in enumerate(slot_pools.extents):
        if extents is None:
            yield from ([FREE] * slots for slots in slot_pools.capacity[number * pools : (number + 1) * pools])
        else:
            shared = [Shared(extents.cut.count * per, per) for per in extents.cut.per]
            for each in shared:
                each.others = [other for other in shared if other is not each]
            yield from shared


class SimulatedTransfers:
    """The arenas of one rank, by place (`SlotPools.place`), and its lanes' copies."""

    def __init__(self, slot_pools: SlotPools, rank: int, ranks: int) -> None:
        self.pools, self.rank, self.ranks = slot_pools.pools, rank, ranks
        self._memory = slot_pools.memory
        self.arenas = [*_arenas(slot_pools)]
        self.filling: dict[tuple[int, int, int], int] = {}  # by tier, pool and slot: the load that still copies to it

    def arena(self, tier: Tier, pool: int) -> Arena:
        return self.arenas[self._memory.index(tier) * len(self.pools) + pool]

    def name(self, key: bytes, pool: int) -> Name:
        """A page's name in storage; a replicated page has one name for all ranks."""
        return key, pool, 0 if self.pools[pool].replicated else self.rank

    def start(self, effect: Transfer) -> None:
        """Check both ends of a copy that begins, and mark its targets."""
        if isinstance(effect, Probe):
            return
        mark = flying(effect.op)
        for page in effect.pages:
            if effect.source is not Tier.STORAGE:
                self._source(effect, page)
                busy = (int(effect.source), page.pool, page.source) in self.filling
                assert not busy, "no copy reads a page that is not there yet"
            if effect.target is not Tier.STORAGE:
                # A slot freed by this call may be taken again in it.
                self.arena(effect.target, page.pool)[page.target] = mark

    def verify(self, copy: Copy, rotten: int) -> tuple[int, int]:
        """Check the pages of a load, whose copy begins then; the engine sees a good page as if it had arrived."""
        good = bad = 0
        for i, page in enumerate(copy.pages):
            content = self._read(copy, page, bool(rotten >> i & 1))
            arena = self.arena(copy.target, page.pool)
            assert arena[page.target] == flying(copy.op), "a copy's target is its own until it has ended"
            arena[page.target] = page.key if content == page.key else BROKEN
            if content == page.key:
                self.filling[int(copy.target), page.pool, page.target] = copy.op
            good |= (content == page.key) << i
            bad |= (content == ROTTEN) << i
        return good, bad

    def copied(self, copy: Copy, good: int) -> None:
        """The copy of a load that was verified has ended: neither end may have changed hands meanwhile."""
        for i, page in enumerate(copy.pages):
            if good >> i & 1:
                self._source(copy, page)
                content = self.arena(copy.target, page.pool)[page.target]
                assert content == page.key, f"a page that is being copied keeps its slot, now with {content!r}"
        self.filling = {slot: op for slot, op in self.filling.items() if op != copy.op}

    def carry(self, effect: Transfer, store: Store, lost: int, rotten: int) -> tuple[int, int]:
        """Perform an effect on this rank; returns the good and the bad pages as bits.

        Bit i of `lost`: page i does not arrive; of `rotten`: its source is corrupted before it is read.
        """
        good = bad = 0
        for i, page in enumerate(effect.pages):
            away, decayed = bool(lost >> i & 1), bool(rotten >> i & 1)
            if isinstance(effect, Probe):
                arrived = (
                    self.name(page.key, page.pool) in store.objects and not away and not store.mute >> self.rank & 1
                )
                spoiled = False
            elif effect.target is Tier.STORAGE:
                arrived, spoiled = self._store(effect, page, store, away, decayed)
            else:
                if effect.source is Tier.STORAGE:
                    content = self._fetched(page, store, decayed)
                else:
                    content = self._read(effect, page, decayed)
                arrived, spoiled = content == page.key and not away, content == ROTTEN and not away
                arena = self.arena(effect.target, page.pool)
                assert arena[page.target] == flying(effect.op), "a copy's target is its own until it has ended"
                arena[page.target] = page.key if arrived else BROKEN
            good |= arrived << i
            bad |= spoiled << i
        return good, bad

    def _source(self, copy: Copy, page: Page) -> bytes:
        content = self.arena(copy.source, page.pool)[page.source]
        assert content == page.key or (content == ROTTEN and copy.source is Tier.HOST), (
            f"a copy from the {copy.source.name.lower()} reads the page that it names until it has ended, "
            f"not {content!r} (pool {page.pool}, slot {page.source})"
        )
        return content

    def _read(self, copy: Copy, page: Page, decayed: bool) -> bytes:
        content = self._source(copy, page)
        if decayed and copy.source is Tier.HOST:
            content = self.arena(Tier.HOST, page.pool)[page.source] = ROTTEN
        return content

    def _has(self, store: Store, page: Page) -> bool:
        return not store.mute >> self.rank & 1 and self.name(page.key, page.pool) in store.objects

    def _fetched(self, page: Page, store: Store, decayed: bool) -> bytes | None:
        """A page's content in storage; a bad one is deleted there, so that a later store writes it again."""
        name = self.name(page.key, page.pool)
        if not self._has(store, page):
            return None
        content = ROTTEN if decayed else store.objects[name]
        if content == ROTTEN:
            del store.objects[name]
        return content

    def _store(self, copy: Copy, page: Page, store: Store, away: bool, decayed: bool) -> tuple[bool, bool]:
        content = self._read(copy, page, decayed)
        if content == ROTTEN:
            return False, True
        if self.pools[page.pool].replicated and page.key[0] % self.ranks != self.rank:  # another rank writes it for all
            return True, False
        if away or store.mute >> self.rank & 1:
            return False, False
        name = self.name(page.key, page.pool)
        store.objects.setdefault(name, content)
        store.ever.add(name)
        return True, False
