"""A core whose nearest tier is an engine's: the engine owns the blocks, and says which pages are in them.

The core keeps no account of that device, since the engine evicts at will. `open` and `claim` take what the engine has
at that moment, a claimed lease offers the pages that a deeper boundary needs, `load` copies them into blocks that the
engine names, and `save` copies pages out of its blocks. A handle names the blocks of one page, whatever their number
and sizes. Blocks that a copy uses are the engine's again when `released` names their handles.
"""

from collections.abc import Mapping, Sequence

from kvarve.core.cache import Core
from kvarve.core.copies.effects import Ended, Release
from kvarve.core.copies.in_flight import BACKUP, LOAD, Op, Part, PartOutcome, batches
from kvarve.core.core_config import CoreConfig
from kvarve.core.requests.lease import Cause, Lease, Phase
from kvarve.core.tree.tree import slots_of, upward
from kvarve.pages.boundaries import chosen, deepest, leading, members, needed, of, ones, span, union
from kvarve.pages.pools import Tier

IN_HOST = (Tier.HOST,)


class EngineCore(Core):
    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self._released: list[Release] = []

    def released(self) -> list[Release]:
        """The copies that have ended since the last call, with the blocks that are the engine's again."""
        released, self._released = self._released, []
        return released

    def load(self, lease: Lease, targets: Sequence[Mapping[int, int]]) -> None:
        """Copy the pages that a lease offers (`lease.offered`, by pool) into the engine's blocks: by pool, a handle for
        each position. The lease is ready when they have come, at a shallower boundary if some did not.

        Without any target the engine declines, and resumes from what it has.
        """
        assert lease.phase is Phase.OFFERED
        if not any(targets):
            self._ready(lease, -1)
            return
        assert [of(pages) for pages in targets] == lease.offered, "a handle for each page that is offered"
        lease.move(Cause.LOAD)
        lease.deadline = self.now + self.config.load_deadline_s
        lease.asked = [asked | offered for asked, offered in zip(lease.asked, lease.offered, strict=True)]
        lease.loaded |= union(lease.offered)
        parts = [
            Part(
                pool,
                lease.offered[pool],
                slots_of(lease.run, self.slot_pools.place(Tier.HOST, pool), lease.offered[pool]),
                [handle for _, handle in sorted(handles.items())],
            )
            for pool, handles in enumerate(targets)
            if handles
        ]
        self.copies.send(Op(LOAD, parts, lease, lease.run))

    def save(self, lease: Lease, pages: Sequence[Mapping[int, int]]) -> list[int]:
        """Copy pages of a ready lease's sequence out of the engine's blocks: by pool, a handle for each position.

        Returns by pool the positions (bits) of which a copy has begun: not those that the host has already, lacks slots
        for, or could not reach, as a chain has a gap before them; nor those that are still being loaded. The engine
        keeps those blocks unchanged until `released` names them.
        """
        assert lease.phase is Phase.READY
        kept = self._kept(lease)
        arriving: list[set[int]] = [set() for _ in pages]
        for op in self.copies.ops.values():
            for part in op.parts if op.edge == LOAD else ():
                arriving[part.pool].update(part.targets)
        there = [
            of(at for at, handle in handles.items() if handle not in coming)
            for handles, coming in zip(pages, arriving, strict=True)
        ]
        # The tokens of an unfinished chunk still get other names (`bind_to_chunk`).
        whole = lease.pages // self.grid * self.grid
        wanted = [has & ~here & ones(whole) for has, here in zip(there, kept, strict=True)]
        end = self._reach(kept, wanted, whole)
        # What is reserved for later pages must not take the slots of those that they rest on.
        run, _, known = self.paths.find(lease.root, lease.tokens)
        self.paths.mark_ends(run, known, lease.ends)  # another request may have brought these pages meanwhile
        self.slot_pools.pin(run, 0, self.paths.ends(known), IN_HOST)
        taken: list[dict[int, int]] = [{} for _ in wanted]
        places = [self.slot_pools.place(Tier.HOST, pool) for pool in range(len(self.pools))]
        for pool in self.slot_pools.chains:
            taken[pool] = self.paths.slots_for(lease, places[pool], wanted[pool] & ones(end), end)
        end = self._reach(kept, [of(slots) for slots in taken], end)
        for pool, lookback in enumerate(self.lookbacks):
            if lookback is not None:
                taken[pool] = self.paths.slots_for(lease, places[pool], wanted[pool] & ones(end), end)
        self.slot_pools.unpin(run, 0, self.paths.ends(known), IN_HOST)
        begun, parts = [of(slots) & ones(end) for slots in taken], list[Part]()
        for pool, slots in enumerate(taken):
            self.slot_pools.give_back(places[pool], [slots[at] for at in slots if at >= end], lease.root)
            if begun[pool]:
                sources = [pages[pool][at] for at in members(begun[pool])]
                parts.append(Part(pool, begun[pool], sources, [slots[at] for at in members(begun[pool])]))
        # All pages of a position are in one copy: the tree takes a position only with the pages of all chains.
        for batch in batches(parts, self.config.batch_pages):
            self.copies.send(Op(BACKUP, batch, lease))
        for pool, bits in enumerate(wanted):
            self.counters.uncached += (bits & ~begun[pool] & ~lease.uncached[pool]).bit_count()
            lease.uncached[pool] |= bits & ~begun[pool]
        return begun

    def kept(self, lease: Lease, coming: bool = True) -> int:
        """The first pages of a lease's sequence that are in the host, or `coming` there, in all chains."""
        kept = self._kept(lease) if coming else self._in_host(lease)
        return self._reach(kept, [0] * len(self.pools), lease.pages)

    def _kept(self, lease: Lease) -> list[int]:
        """By pool, the positions that are in the host or being saved for this lease."""
        return [here | saving for here, saving in zip(self._in_host(lease), self._saving(lease), strict=True)]

    def _in_host(self, lease: Lease) -> list[int]:
        _, path, known = self.paths.find(lease.root, lease.tokens)
        return self.paths.present(path, known)[1]

    def _saving(self, lease: Lease) -> list[int]:
        """By pool, the positions of a lease that are being saved."""
        saving = [0] * len(self.pools)
        for op in self.copies.ops.values():
            for part in op.parts if op.edge == BACKUP and op.lease is lease else ():
                saving[part.pool] |= part.positions
        return saving

    def _reach(self, kept: Sequence[int], more: Sequence[int], end: int) -> int:
        """The end of the positions, at most `end`, that every chain reaches without a gap: no page rests on one that is
        not kept."""
        return min([end, *(leading(kept[pool] | more[pool]) for pool in self.slot_pools.chains)])

    # --- before a lease is ready

    def _load(self, lease: Lease) -> None:
        """Offer the pages that the deepest boundary needs and the engine lacks, pinned in the host."""
        self.prefetch.release(lease)
        run, path, known = self.paths.find(lease.root, lease.tokens)
        device, memory = self.paths.present(path, known, lease.outside)
        near, boundary = (deepest(self.paths.legal(pages, lease)) for pages in (device, memory))
        if (boundary - near) * self.config.page_tokens < max(1, self.config.policies.load_at_least):
            self._ready(lease, -1)
            return
        lease.move(Cause.OFFER)
        lease.boundary = boundary
        lease.offered = [needed(boundary, back) & ~here for back, here in zip(self.lookbacks, device, strict=True)]
        windows, _ = self.paths.pins_for(boundary, device)
        self.paths.hold(lease, run, windows & ones(known), self.paths.ends(min(boundary, known)), IN_HOST)

    def _arrived(self, lease: Lease) -> None:
        self._ready(lease, -1)

    def _ready(self, lease: Lease, allowed: int) -> None:
        """The engine may start, at the deepest allowed boundary for which it has pages or was brought them."""
        run, path, known = self.paths.find(lease.root, lease.tokens)
        self._note_found(lease, path, known, self.paths.present(path, known, lease.outside)[1])
        lease.seen = [*lease.arrived]
        for pool, pages in enumerate(lease.outside):
            lease.seen[pool] |= pages
        lease.found = lease.seen
        lease.boundary = deepest(self.paths.legal(lease.seen, lease) & allowed)
        lease.done = lease.grown = lease.boundary
        lease.snapshots = self._snapshots(lease)
        self._note_ends(lease, run)
        lease.move(Cause.READY)
        self.paths.hold(lease, run, 0, 0)  # the engine has pages of its own now
        if lease.reads:
            known = span(0, min(lease.known, lease.boundary))
            self.slot_pools.touch(run, self.paths.near(lease.boundary) & known)
            self._count_use(lease, run)
            if self.copies.storage and any(lease.fetched):
                self._count_saved(lease)

    # --- copies that have ended

    def _loaded(self, op: Op, outcomes: list[PartOutcome]) -> None:
        assert op.run is not None and op.lease is not None
        for outcome in outcomes:
            part, good, bad = outcome
            self.counters.loaded += good.bit_count()
            self.counters.bad_host += bad.bit_count()
            self.counters.failed += outcome.failed.bit_count()
            op.lease.arrived[part.pool] |= good
            for run, local in upward(op.run, bad):
                self.slot_pools.mark_bad(run, self.slot_pools.place(Tier.HOST, part.pool), local)

    def _copied(self, op: Op, end: Ended) -> None:
        assert op.verified is not None
        assert not op.verified & ~end.good, "a request resumed from a page whose copy has failed"

    def _backed_up(self, op: Op, outcomes: list[PartOutcome]) -> None:
        if op.lease is None:
            super()._backed_up(op, outcomes)
            return
        lease = op.lease
        saved: list[dict[int, int]] = [{} for _ in self.pools]
        for outcome in outcomes:
            (pool, positions, _, targets), good, _ = outcome
            self.counters.backed_up += good.bit_count()
            self.counters.failed += outcome.lost.bit_count()
            saved[pool] = dict(zip(members(good), chosen(targets, positions, good), strict=True))
            left = chosen(targets, positions, outcome.lost)
            self.slot_pools.give_back(self.slot_pools.place(Tier.HOST, pool), left, lease.root)
        tail, end = self.paths.insert(lease, Tier.HOST, saved)
        for run, _ in upward(tail, of(at for slots in saved for at in slots) & ones(end)):
            run.uses = max(run.uses, 1)
            run.priority = max(run.priority, lease.priority)
        self.slot_pools.touch(tail, self.paths.near(end))
        self.slot_pools.forget(lease.root)

    def _ended(self, number: int, op: Op) -> None:
        if Tier.DEVICE in op.edge:
            at = op.edge.index(Tier.DEVICE)
            handles = tuple(
                (part.pool, handle) for part in op.parts for handle in (part.targets if at else part.sources)
            )
            self._released.append(Release(number, handles))


def core_for(config: CoreConfig) -> Core:
    """A core for these settings: with device slots of its own, or over an engine's blocks."""
    return Core(config) if Tier.DEVICE in config.slots else EngineCore(config)
