"""A prompt's path through the tree: which of its pages are known and resident, pinned by a lease, or added by it."""

from collections.abc import Sequence
from functools import reduce
from operator import and_

from kvarve.core.context import Context
from kvarve.core.copies.backups import Backups
from kvarve.core.lease import Lease
from kvarve.core.slots.eviction import Evictions
from kvarve.core.tree.tree import Run, covering, downward, upward, walk
from kvarve.pages import boundaries
from kvarve.pages.boundaries import deepest, members, needed, ones, read_before, span
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES
from kvarve.pages.pools import MEMORY_TIERS, Tier

ON_DEVICE = (Tier.DEVICE,)  # where a ready lease pins its pages


class Paths:
    def __init__(self, context: Context, evictions: Evictions, backups: Backups) -> None:
        self._context, self.evictions, self.backups = context, evictions, backups
        config, self.slot_pools, self.residency = context.config, evictions.slot_pools, evictions.residency
        self.tree = self.residency.tree
        self.dirty = backups.dirty
        self.pools, self.page_tokens = range(len(config.pools)), config.page_tokens
        self.lookbacks = [pool.lookback for pool in config.pools]
        self.reach = max((back for back in self.lookbacks if back is not None), default=1)
        self.grid = config.chunk_tokens // config.page_tokens
        self.width = config.page_tokens * TOKEN_BYTES
        # A boundary whose pages do not fit on the device is never served; an engine limits its own prompts.
        slots = self.slot_pools.capacity if Tier.DEVICE in config.slots else []
        pages = (count for back, count in zip(self.lookbacks, slots, strict=False) if back is None or count < back)
        self.most = min(pages, default=1 << 32)
        self._ours = self.slot_pools.memory[0] is Tier.DEVICE  # else the slots there are an engine's
        self._host = self.slot_pools.place(Tier.HOST, 0)
        self._found: tuple[bytes, bytes, int, tuple[Run, list[Run], int]] | None = None  # the last answer of `find`

    # --- residency

    def limit(self, tokens: bytes) -> int:
        """The deepest boundary that leaves at least one token to compute, and that the device could hold."""
        return min(self.most, max(0, len(tokens) // TOKEN_BYTES - 1) // self.page_tokens)

    def find(self, root: bytes, tokens: bytes) -> tuple[Run, list[Run], int]:
        """The deepest run that a prompt reaches, the runs on its path, and how many of its pages they know.

        A request asks this several times in a row, so the last answer is cached until the tree changes its shape.
        """
        last = self._found
        if last is not None and last[0] is tokens and last[1] == root and last[2] == self.tree.shape:
            return last[3]
        top = self.tree.root(root)
        path, known = walk(top, tokens)
        found = path[-1] if path else top, path, known
        self._found = tokens, root, self.tree.shape, found
        return found

    def name(self, lease: Lease) -> None:
        """The keys of the pages that the tree knows need not be computed for a lease."""
        if not lease.named:
            _, path, known = self.find(lease.root, lease.tokens)
            lease.name(b"".join([run.keys for run in path])[: known * KEY_BYTES])

    def present(self, path: list[Run], known: int, outside: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """For each pool the positions of a path that are on the device, and those in any memory tier (not bad).

        `outside`: by pool, what an engine has on a device of its own.
        """
        pools = len(self.pools)
        device, memory, mask = [0] * pools, [0] * pools, ones(known)
        bad_pages, ours, host = self.residency.bad_pages, self._ours, self._host
        for pool, lookback in enumerate(self.lookbacks):
            if lookback is None and not bad_pages:
                # By the laws a chain has no gap on the device, and all its pages are in memory.
                for run in reversed(path) if ours else ():
                    if here := run.here[pool]:
                        device[pool] = ones(min(known, run.first + here.bit_length()))
                        break
                memory[pool] = mask
                continue
            near_all, far_all = 0, 0
            for run in path:
                near, far = run.here[pool] if ours else 0, run.here[host + pool]
                if near or far:
                    near_all |= near << run.first
                    far_all |= (far & ~run.bad[host + pool]) << run.first
            device[pool] = near_all & mask
            memory[pool] = (near_all | far_all) & mask
        for pool, pages in enumerate(outside):
            device[pool] |= pages
            memory[pool] |= pages
        return device, memory

    def whole(self, path: list[Run], pages: int, tier: Tier) -> int:
        """The first `pages` positions of a path that every chain has in a tier, as far as the core knows; of a model
        without chains those that any pool has there."""
        found = []
        for pool in self.slot_pools.chains or self.pools if tier in (*self.slot_pools.memory, Tier.STORAGE) else ():
            place = None if tier is Tier.STORAGE else self.slot_pools.place(tier, pool)
            here = (run.stored[pool] if place is None else run.here[place] for run in path)
            found.append(boundaries.union(some << run.first for some, run in zip(here, path, strict=True)))
        if not self.slot_pools.chains:
            return boundaries.union(found) & ones(pages)
        return reduce(and_, found, ones(pages)) if found else 0

    def legal(self, present: list[int], lease: Lease) -> int:
        """The boundaries on the prefill grid at which a lease could resume from these pages."""
        return boundaries.resume_at(present, self.lookbacks, lease.limit, self.grid)

    def leaves_room(self, lease: Lease, run: Run, boundary: int) -> bool:
        """Whether the windows and states that a lease pins until it has resumed at a boundary leave as many of the
        device's extents as its prompt needs for its chain, even if it is alone. One that needs more than there are
        resumes wherever it can: it is kept as far as slots go."""
        extents = self.slot_pools.extents[0]
        if extents is None or not boundary or not self.slot_pools.chains:
            return True
        left, short = extents.cut.count, [pool for pool, back in enumerate(self.lookbacks) if back is not None]
        per, pages = extents.cut.per[self.slot_pools.chains[0]], -(-len(lease.tokens) // self.width)
        if (left - sum(extents.cut.least[pool] for pool in short)) * per < pages:
            return True
        # A pin keeps the pages of all pools at its position, so also states inside of a window.
        held = self.pins_for(boundary, [0] * len(self.pools))[0]
        for pool in short:
            pinned = set[int]()
            if held.bit_count() > extents.cut.least[pool]:  # each of its pages could be in an extent of its own
                for each, share in upward(run, held):
                    table = each.slots[pool] or ()
                    pinned |= {table[at] // extents.cut.per[pool] for at in members(share & each.here[pool])}
            left -= max(extents.cut.least[pool], len(pinned))
        return left * per >= pages

    def reserve(self, lease: Lease, tier: Tier, need: Sequence[int], available: list[int]) -> list[list[int]] | None:
        """Slots for the pages that a lease needs of each pool; or None, no slot taken, and `available` set to each
        pool's count."""
        if any(bits.bit_count() > slots for bits, slots in zip(need, available, strict=True)):
            return None
        places = [self.slot_pools.place(tier, pool) for pool in self.pools]
        counts = [bits.bit_count() for bits in need]
        taken = [self.evictions.reserve(*each, lease.root) for each in zip(places, counts, strict=True)]
        if all(len(slots) == count for slots, count in zip(taken, counts, strict=True)):
            return taken
        for pool, slots in enumerate(taken):
            available[pool] = len(slots)
            self.residency.give_back(places[pool], slots, lease.root)
        return None

    def slots_for(self, lease: Lease, place: int, positions: int, end: int) -> dict[int, int]:
        """Slots for pages of a lease by ascending position, as many as can be had. Of windows and states, a page inside
        of the prompt, whose pages `end` there, takes no slot of one at the end of another."""
        lookback, last = self.lookbacks[place % len(self.pools)], positions
        if lookback is not None:
            last &= read_before(lease.ends | 1 << end, lookback)
        found = dict(zip(members(last), self.evictions.reserve(place, last.bit_count(), lease.root), strict=False))
        if inside := positions & ~last:
            slots = self.evictions.reserve(place, inside.bit_count(), lease.root, spare=True)
            found |= zip(members(inside), slots, strict=False)
            return dict(sorted(found.items()))
        return found

    # --- pins

    def pins_for(self, boundary: int, device: list[int]) -> tuple[int, int]:
        """The pins that keep a boundary legal in memory: windows and states, and the ends of chains.

        A page rests on the one before it, so pinning a chain's last page keeps all of it, and pinning its last page on
        the device keeps its pages there.
        """
        positions, prefix_pins = 0, self.ends(boundary)
        for pool, lookback in enumerate(self.lookbacks):
            if lookback is not None:
                positions |= needed(boundary, lookback)
            elif on_device := boundaries.leading(device[pool] & ones(boundary)):
                prefix_pins |= 1 << on_device - 1
        return positions, prefix_pins

    def ends(self, boundary: int) -> int:
        """The position at which the chains of a boundary end."""
        return span(boundary - 1, boundary) if boundary and self.slot_pools.chains else 0

    def ahead(self, present: list[int]) -> int:
        """The positions whose pins keep all present pages of chains."""
        reach = [boundaries.leading(present[pool]) for pool in self.slot_pools.chains]
        return boundaries.of([here - 1 for here in reach if here])

    def hold(
        self, lease: Lease, run: Run, positions: int, prefix_pins: int, tiers: tuple[Tier, ...] = MEMORY_TIERS
    ) -> None:
        """Replace a lease's pins, and their tiers. The lease refers to the deepest run in which it has pins, which
        therefore stays in the tree."""
        if both := positions | prefix_pins:
            self.residency.pin(run, positions, prefix_pins, tiers)
        if lease.holds:
            self.residency.unpin(lease.run, lease.held, lease.prefix_pins, lease.tiers)
        lease.run = covering(run, deepest(both)) if both else self.tree.root(lease.root)
        lease.held, lease.prefix_pins, lease.tiers = positions, prefix_pins, tiers

    def mark_ends(self, run: Run, known: int, ends: int) -> None:
        """Note that prompts ended, or requests resumed, at these boundaries, as far as the tree knows the pages."""
        for each, share in upward(run, ends >> 1 & ones(known)):
            each.ends |= share
        if len(self.slot_pools.chains) == len(self.pools) or not self._context.config.policies.snapshots.chunks:
            return
        for each, _ in upward(run, read_before(ends, self.reach) & ones(known)):
            for pool, lookback in enumerate(self.lookbacks) if any(each.passing) else ():
                share = 0 if lookback is None else (read_before(ends, lookback) & ones(known)) >> each.first
                if self.dirty.keep(each, pool, share):
                    self.dirty.mark_dirty(each)

    def near(self, boundary: int) -> int:
        """The positions that windows and states read before a boundary."""
        return span(max(0, boundary - self.reach), boundary)

    # --- adding pages to the tree

    def chain_end(self, lease: Lease, pages: Sequence[dict[int, int]]) -> int:
        """How far every chain would reach without a gap if the tree got these pages of a lease."""
        return self._chain_end(self.find(lease.root, lease.tokens)[2], [_positions(slots) for slots in pages])

    def _chain_end(self, known: int, given: Sequence[int]) -> int:
        if chains := self.slot_pools.chains:
            return known + min([boundaries.leading(given[pool] >> known) for pool in chains])
        return max([known, *[bits.bit_length() for bits in given]])

    def insert(
        self, lease: Lease, tier: Tier, pages: Sequence[dict[int, int]], stored: bool = False
    ) -> tuple[Run, int]:
        """Give filled slots to the tree, adding positions for them as far as every chain reaches without a gap.

        `pages`, by pool: slots by position, in any order. Slots of pages that are resident already, or have no parent
        to rest on, are freed. `stored`: the storage has the pages. Returns the deepest run of the prompt and how many
        of its pages the tree now knows.
        """
        tail, _, known = self.find(lease.root, lease.tokens)
        given = [_positions(slots) for slots in pages]
        end = self._chain_end(known, given)
        if end > known:
            tail = self._lengthen(tail, known, end, lease)
            for tell in self._context.tell.came:
                tell(lease.root, tail, known, end)
        self.mark_ends(tail, end, lease.ends)
        for pool, slots in enumerate(pages):
            if not slots:
                continue
            place = self.slot_pools.place(tier, pool)
            passing = self._passing(lease, pool) if lease.passing else 0
            taken = 0  # the others are there already, or cannot be
            inside = given[pool] & ones(end)
            ascending = [*map(slots.__getitem__, sorted(slots))]
            for run, local, mine in downward(tail, inside, ascending[: inside.bit_count()]):
                new = self.backups.make_resident(run, place, local, mine)
                taken |= new << run.first
                if some := passing >> run.first & new:
                    self._note_passing(run, place, some)
            if back := given[pool] & ~taken:
                self._context.counters.duplicates += back.bit_count()
                self.residency.give_back(place, [slots[at] for at in members(back)], lease.root)
            if stored:
                for run, share in upward(tail, given[pool] & ones(end)):
                    self.dirty.store(run, pool, share)
        if not stored and self.dirty.has_host:
            for run, _ in upward(tail, boundaries.union(given) & ones(end)):
                self.dirty.mark_dirty(run)
        return tail, end

    def _passing(self, lease: Lease, pool: int) -> int:
        """The positions of a lease's windows and states that are kept only while there is room."""
        lookback = self.lookbacks[pool]
        if lookback is None:
            return 0
        return read_before(lease.passing, lookback) & ~read_before(lease.snapshots | lease.ends, lookback)

    def _note_passing(self, run: Run, place: int, local: int) -> None:
        """Pages have come that are worth no copy, unless another prompt ended there or another tier has them."""
        pool = place % len(self.pools)
        lookback = self.lookbacks[pool]
        assert lookback is not None
        known = read_before(run.ends << 1, lookback) | self.slot_pools.elsewhere(run, place) | run.stored[pool]
        self.dirty.pass_by(run, pool, local & ~known)

    def _lengthen(self, tail: Run, known: int, end: int, lease: Lease) -> Run:
        """Add positions [known, end) of a prompt below the run where it left the tree."""
        followed = self.tree.ghosts.came(lease.root, lease.tokens, known, end)
        if known < tail.end:
            tail = self.residency.split(tail, known)
        # What goes on from a prompt's end is a run of its own: the states at that end are used less often than it.
        short = len(self.slot_pools.chains) < len(self.pools)
        ended = bool(short and tail.pages and tail.ends >> tail.pages - 1)
        head, named = tail.head_bytes, lease.named[known * KEY_BYTES : end * KEY_BYTES]
        pages = lease.tokens[known * self.width : end * self.width], named, lease.heads[known * head : end * head]
        run = self.tree.lengthen(tail, pages, ended, followed)
        if run is tail:
            self.residency.lengthened(run)
        return run


def _positions(slots: dict[int, int]) -> int:
    """The positions that have slots; mostly they have no gap."""
    if not slots:
        return 0
    first, last = min(slots), max(slots)
    return span(first, last + 1) if last - first < len(slots) else boundaries.of(slots)
