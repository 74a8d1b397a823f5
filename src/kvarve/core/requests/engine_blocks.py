"""Requests where the nearest tier is an engine's: the engine owns the blocks, and says which pages are in them.

The core keeps no account of that device, since the engine evicts at will. `open` and `claim` take what the engine has
at that moment, a claimed lease offers the pages that a deeper boundary needs, `load` copies them into blocks that the
engine names, and `save` copies pages out of its blocks. A handle names the blocks of one page, whatever their number
and sizes. Blocks that a copy uses are the engine's again when `released` names their handles.
"""

from collections.abc import Mapping, Sequence

from kvarve.core.context import Context
from kvarve.core.copies.effects import Ended, Release
from kvarve.core.copies.in_flight import BACKUP, LOAD, Op, Part, PartOutcome, batches
from kvarve.core.lease import Cause, Lease, Phase
from kvarve.core.requests.paths import Paths
from kvarve.core.requests.prefetch import Prefetch
from kvarve.core.requests.resume import Resumption
from kvarve.core.tree.tree import upward
from kvarve.pages.boundaries import chosen, deepest, leading, members, needed, of, ones, read_before, span, union
from kvarve.pages.pools import Tier

IN_HOST = (Tier.HOST,)


class EngineBlocks(Resumption):
    def __init__(self, context: Context, paths: Paths, prefetch: Prefetch) -> None:
        super().__init__(context, paths, prefetch)
        self._chains = paths.slot_pools.chains
        self._batch_pages = context.config.batch_pages
        self._released: list[Release] = []

    def released(self) -> list[Release]:
        """The copies that have ended since the last call, with the blocks that are the engine's again."""
        released, self._released = self._released, []
        return released

    def choices(self, lease: Lease) -> int:
        """The boundaries (bits) beyond the engine's own pages at which a lease that is offered could resume from the
        host. From now on it pins the pages of all of them, so that the engine may `choose` any."""
        assert lease.phase is Phase.OFFERED
        paths = self._paths
        run, path, known = paths.find(lease.root, lease.tokens)
        device, memory = paths.present(path, known, lease.outside)
        legal = paths.legal(memory, lease) & ~ones(deepest(paths.legal(device, lease)) + 1)
        short = union(read_before(legal, back) for back in paths.lookbacks if back is not None)
        paths.hold(lease, run, short & ones(known), paths.ends(min(deepest(legal), known)), IN_HOST)
        return legal

    def choose(self, lease: Lease, boundary: int) -> None:
        """Offer the pages of another one of a lease's `choices`, for `load`."""
        assert lease.phase is Phase.OFFERED
        lacks = zip(self._paths.lookbacks, lease.outside, strict=True)
        lease.offered = [needed(boundary, back) & ~here for back, here in lacks]
        self.growth.offer(lease, boundary)

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
        self._prefetch.begin_load(lease)
        handles = [[handle for _, handle in sorted(each.items())] for each in targets]
        self._send_load(lease, lease.run, lease.offered, handles)

    def save(self, lease: Lease, pages: Sequence[Mapping[int, int]]) -> list[int]:
        """Copy pages of a ready lease's sequence out of the engine's blocks: by pool, a handle for each position.

        Returns by pool the positions (bits) of which a copy has begun: not those that the host has already, lacks slots
        for, or could not reach, as a chain has a gap before them; nor those that are still being loaded. The engine
        keeps those blocks unchanged until `released` names them.
        """
        assert lease.phase is Phase.READY
        kept = self._kept(lease)
        arriving: list[set[int]] = [set() for _ in pages]
        for op in self._copies.ops.values():
            for part in op.parts if op.edge == LOAD else ():
                arriving[part.pool].update(part.targets)
        there = [
            of(at for at, handle in handles.items() if handle not in coming)
            for handles, coming in zip(pages, arriving, strict=True)
        ]
        # The tokens of an unfinished chunk still get other names (`bind_to_chunk`).
        whole = lease.pages // self._paths.grid * self._paths.grid
        wanted = [has & ~here & ones(whole) for has, here in zip(there, kept, strict=True)]
        end = self._reach(kept, wanted, whole)
        # What is reserved for later pages must not take the slots of those that they rest on.
        run, _, known = self._paths.find(lease.root, lease.tokens)
        self._paths.mark_ends(run, known, lease.ends)  # another request may have brought these pages meanwhile
        self._residency.pin(run, 0, self._paths.ends(known), IN_HOST)
        taken: list[dict[int, int]] = [{} for _ in wanted]
        for pool in self._chains:
            taken[pool] = self._paths.slots_for(lease, self._hosts[pool], wanted[pool] & ones(end), end)
        end = self._reach(kept, [of(slots) for slots in taken], end)
        for pool, lookback in enumerate(self._paths.lookbacks):
            if lookback is not None:
                taken[pool] = self._paths.slots_for(lease, self._hosts[pool], wanted[pool] & ones(end), end)
        self._residency.unpin(run, 0, self._paths.ends(known), IN_HOST)
        begun, parts = [of(slots) & ones(end) for slots in taken], list[Part]()
        for pool, slots in enumerate(taken):
            self._residency.give_back(self._hosts[pool], [slots[at] for at in slots if at >= end], lease.root)
            if begun[pool]:
                sources = [pages[pool][at] for at in members(begun[pool])]
                parts.append(Part(pool, begun[pool], sources, [slots[at] for at in members(begun[pool])]))
        self._paths.name(lease)
        # All pages of a position are in one copy: the tree takes a position only with the pages of all chains.
        for batch in batches(parts, self._batch_pages):
            self._copies.send(Op(BACKUP, batch, lease))
        for pool, bits in enumerate(wanted):
            self._counters.uncached += (bits & ~begun[pool] & ~lease.uncached[pool]).bit_count()
            lease.uncached[pool] |= bits & ~begun[pool]
        return begun

    def kept(self, lease: Lease, coming: bool = True) -> int:
        """The first pages of a lease's sequence that are in the host, or `coming` there, in all chains."""
        kept = self._kept(lease) if coming else self.in_host(lease)
        return self._reach(kept, [0] * len(self._pools), lease.pages)

    def _kept(self, lease: Lease) -> list[int]:
        """By pool, the positions that are in the host or being saved for this lease."""
        return [here | saving for here, saving in zip(self.in_host(lease), self._saving(lease), strict=True)]

    def in_host(self, lease: Lease) -> list[int]:
        """By pool, the positions of a lease's sequence that are in the host."""
        _, path, known = self._paths.find(lease.root, lease.tokens)
        return self._paths.present(path, known)[1]

    def _saving(self, lease: Lease) -> list[int]:
        """By pool, the positions of a lease that are being saved."""
        saving = [0] * len(self._pools)
        for op in self._copies.ops.values():
            for part in op.parts if op.edge == BACKUP and op.lease is lease else ():
                saving[part.pool] |= part.positions
        return saving

    def _reach(self, kept: Sequence[int], more: Sequence[int], end: int) -> int:
        """The end of the positions, at most `end`, that every chain reaches without a gap: no page rests on one that is
        not kept."""
        return min([end, *(leading(kept[pool] | more[pool]) for pool in self._chains)])

    def load_pages(self, lease: Lease) -> None:
        """Offer the pages that the deepest boundary needs and the engine lacks, pinned in the host."""
        paths = self._paths
        self._prefetch.release(lease)
        run, path, known = paths.find(lease.root, lease.tokens)
        device, memory = paths.present(path, known, lease.outside)
        near, boundary = (deepest(paths.legal(pages, lease)) for pages in (device, memory))
        if (boundary - near) * paths.page_tokens < max(1, self._context.config.policies.load_at_least):
            self._ready(lease, -1)
            return
        lease.move(Cause.OFFER)
        self.growth.offer(lease, boundary)
        lease.offered = [needed(boundary, back) & ~here for back, here in zip(paths.lookbacks, device, strict=True)]
        windows, _ = paths.pins_for(boundary, device)
        paths.hold(lease, run, windows & ones(known), paths.ends(min(boundary, known)), IN_HOST)

    def _arrived(self, lease: Lease) -> None:
        self._ready(lease, -1)

    def _ready(self, lease: Lease, allowed: int) -> None:
        """The engine may start, at the deepest allowed boundary for which it has pages or was brought them."""
        paths = self._paths
        run, path, known = paths.find(lease.root, lease.tokens)
        self._note_found(lease, path, known, paths.present(path, known, lease.outside)[1])
        seen = [*lease.arrived]
        for pool, pages in enumerate(lease.outside):
            seen[pool] |= pages
        boundary = deepest(paths.legal(seen, lease) & allowed)
        self.growth.note_ends(lease, run, boundary)
        self._start(lease, boundary, seen)
        paths.hold(lease, run, 0, 0)  # the engine has pages of its own now
        if lease.reads:
            paths.tree.touch(run, paths.near(boundary) & span(0, min(known, boundary)))
            self._count_use(lease, run)
            if self._storage.attached and any(lease.fetched):
                self._count_saved(lease)

    def _loaded(self, op: Op, outcomes: list[PartOutcome]) -> None:
        assert op.run is not None and op.lease is not None
        for outcome in outcomes:
            part, good, bad = outcome
            self._count_loaded(outcome)
            op.lease.arrived[part.pool] |= good
            for run, local in upward(op.run, bad):
                self._residency.mark_bad(run, self._hosts[part.pool], local)

    def load_ended(self, op: Op, end: Ended, waited: bool) -> None:
        if op.verified is None:
            super().load_ended(op, end, waited)
        elif op.lease is not None:  # it is ready, and the engine waits for each layer: some may not have come after all
            for part, good, _ in op.outcomes(end):
                op.lease.arrived[part.pool] &= good | ~part.positions

    def backed_up(self, op: Op, outcomes: list[PartOutcome]) -> None:
        if op.lease is None:
            super().backed_up(op, outcomes)
            return
        lease = op.lease
        saved: list[dict[int, int]] = [{} for _ in self._pools]
        for outcome in outcomes:
            (pool, positions, _, targets), good, _ = outcome
            self._counters.backed_up += good.bit_count()
            self._counters.failed += outcome.lost.bit_count()
            saved[pool] = dict(zip(members(good), chosen(targets, positions, good), strict=True))
            left = chosen(targets, positions, outcome.lost)
            self._residency.give_back(self._hosts[pool], left, lease.root)
        tail, end = self._paths.insert(lease, Tier.HOST, saved)
        for run, _ in upward(tail, of(at for slots in saved for at in slots) & ones(end)):
            self._paths.tree.brought(run, lease.priority)
        self._paths.tree.touch(tail, self._paths.near(end))
        self._paths.tree.forget(lease.root)

    def ended(self, number: int, op: Op) -> None:
        if Tier.DEVICE in op.edge:
            at = op.edge.index(Tier.DEVICE)
            handles = tuple(
                (part.pool, handle) for part in op.parts for handle in (part.targets if at else part.sources)
            )
            self._released.append(Release(number, handles))
