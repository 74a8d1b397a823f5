"""From a claim to the first forward: a lease waits for storage, its pages are loaded, and it resumes.

A lease is ready at the deepest boundary that the device can serve then; copies that come later change nothing for it.
"""

from collections.abc import Sequence

from kvarve.core.context import Context
from kvarve.core.copies.effects import Ended, Verified
from kvarve.core.copies.in_flight import LOAD, Op, Part, PartOutcome, note_asked, note_bad
from kvarve.core.lease import Cause, Lease, Phase
from kvarve.core.policies import WritePolicy
from kvarve.core.requests.growth import Growth
from kvarve.core.requests.paths import ON_DEVICE, Paths
from kvarve.core.requests.prefetch import Prefetch
from kvarve.core.tree.tree import Run, downward, slots_of, upward
from kvarve.pages import boundaries
from kvarve.pages.boundaries import chosen, deepest, members, needed, ones
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier


class Resumption:
    def __init__(self, context: Context, paths: Paths, prefetch: Prefetch) -> None:
        self._context, self._counters, self._paths, self._prefetch = context, context.counters, paths, prefetch
        self._backups, self._residency, self._pools = paths.backups, paths.residency, paths.pools
        self._copies, self._storage = paths.backups.copies, paths.backups.storage
        self._hosts = paths.dirty.hosts
        self.growth = Growth(context, paths)

    def begin(self, lease: Lease) -> None:
        """A claimed lease without copies in flight: load its pages, or probe storage again."""
        if not lease.reads:
            self._ready(lease, ones(1))
        elif not self._prefetch.look_again(lease):
            self.load_pages(lease)

    def fetch(self, lease: Lease) -> None:
        """Fetch the pages of a lease of which storage has told what it has; if there are none, go on."""
        if not self._prefetch.fetch(lease):
            self._queue(lease)

    def stop_waiting(self, lease: Lease) -> None:
        """Go on with the pages that have come from storage so far."""
        self._copies.leave_all(lease)
        self._prefetch.land(lease)
        self._queue(lease)

    def _queue(self, lease: Lease) -> None:
        """End the lease's wait for storage: load its pages if it is claimed, else queue it."""
        self._prefetch.end(lease)
        if lease.claimed:
            self.load_pages(lease)
        else:
            self._prefetch.queue(lease)

    def check_deadline(self, lease: Lease) -> None:
        if not lease.claimed or self._context.now < lease.deadline:
            return
        if lease.phase in (Phase.PROBING, Phase.FETCHING):
            self.stop_waiting(lease)
        elif lease.phase is Phase.LOADING:
            self._copies.leave_all(lease)
            self._ready(lease, ones(lease.limit + 1))

    def load_pages(self, lease: Lease) -> None:
        """Load to the device the pages that the deepest boundary in memory needs, as far as there are slots."""
        paths, policies = self._paths, self._context.config.policies
        self._prefetch.release(lease)
        lease.move(Cause.LOAD)
        self._prefetch.begin_load(lease)
        allowed, available = -1, [len(lease.tokens)] * len(self._pools)
        while True:
            # Anew each time: evicting for it may have cost a page of it.
            run, path, known = paths.find(lease.root, lease.tokens)
            device, memory = paths.present(path, known, lease.outside)
            near = deepest(paths.legal(device, lease))
            boundary = near if memory == device else deepest(paths.legal(memory, lease) & allowed)
            if (boundary - near) * paths.page_tokens < policies.load_at_least:
                boundary = min(boundary, near)
            need = []  # where the device alone can serve, it lacks nothing
            if boundary != near:
                need = [needed(boundary, back) & ~here for back, here in zip(paths.lookbacks, device, strict=True)]
            if not any(need):
                self._note_found(lease, path, known, memory)
                self._resume(lease, boundary, run, device)
                return
            paths.hold(lease, run, *paths.pins_for(boundary, device))
            taken = paths.reserve(lease, Tier.DEVICE, need, available)
            if taken is not None:
                break
            if self._prefetch.put_off(lease):
                return
            allowed = ones(boundary)
        self._send_load(lease, run, need, taken)

    def _send_load(self, lease: Lease, run: Run, need: list[int], targets: Sequence[Sequence[int]]) -> None:
        """Load pages (bits), by pool, into these slots, in one piece, so that it can be copied layer by layer."""
        lease.loaded |= boundaries.union(need)
        note_asked(lease, need)
        parts = [
            Part(pool, bits, slots_of(run, self._hosts[pool], bits), targets[pool])
            for pool, bits in enumerate(need)
            if bits
        ]
        self._copies.send(Op(LOAD, parts, lease, run))

    def _arrived(self, lease: Lease) -> None:
        """All loads have ended. If one failed, a shallower boundary may still be loaded: one more round."""
        if lease.torn and not lease.reloaded:
            lease.reloaded = True
            self.load_pages(lease)
        else:
            self._ready(lease, ones(lease.limit + 1))

    def _ready(self, lease: Lease, allowed: int) -> None:
        """The engine may start, at the deepest of the allowed boundaries that the device can serve."""
        run, path, known = self._paths.find(lease.root, lease.tokens)
        device, memory = self._paths.present(path, known, lease.outside)
        self._note_found(lease, path, known, memory)
        self._resume(lease, deepest(self._paths.legal(device, lease) & allowed), run, device)

    def _resume(self, lease: Lease, boundary: int, run: Run, device: list[int]) -> None:
        paths = self._paths
        while not paths.leaves_room(lease, run, boundary):
            boundary = deepest(paths.legal(device, lease) & ones(boundary))
        self.growth.note_ends(lease, run, boundary)  # first: the tree may lose pages that the lease held so far
        # Pages beyond the boundary that are resident are not kept a second time, so they must not be evicted.
        positions, prefix_pins = paths.pins_for(boundary, device)
        paths.hold(lease, run, positions, prefix_pins | paths.ahead(device), ON_DEVICE)
        self._start(lease, boundary, device)
        if lease.reads:
            fetched = any(lease.fetched)
            if fetched:
                self._drop_loaded(lease, run)
            paths.tree.touch(run, paths.near(boundary))
            self._count_use(lease, run)
            if fetched and self._storage.attached and not lease.again:
                self._count_saved(lease)

    def _start(self, lease: Lease, boundary: int, device: list[int]) -> None:
        """A lease is ready at a boundary; `device`: by pool, the pages that are there."""
        lease.found = device
        self.growth.begin(lease, boundary, device)
        lease.move(Cause.READY)

    def _note_found(self, lease: Lease, path: list[Run], known: int, memory: list[int]) -> None:
        """What there is of a prompt when it becomes ready, and what has left the tree."""
        lease.known, lease.memory = known, memory
        lease.left = self._paths.tree.ghosts.of(lease.root, lease.tokens, known)
        lease.storage = self._storage.attached or self._storage.down
        for run in path if self._residency.bad_pages else ():
            for place, bad in enumerate(run.bad):
                note_bad(lease, place % len(self._pools), bad << run.first & ones(known))

    # --- uses

    def _drop_loaded(self, lease: Lease, run: Run) -> None:
        """Drop host copies of pages that came from storage and are on the device now, unless the write policy would
        have made them: they take host slots from other pages."""
        dirty, slot_pools = self._paths.dirty, self._paths.slot_pools
        for each, share in upward(run, boundaries.union(lease.fetched) & ones(lease.boundary)):
            if not dirty.lazy(each) and dirty.used_enough(each):
                continue
            for pool, (place, fetched) in enumerate(zip(self._hosts, lease.fetched, strict=True)):
                passed = fetched >> each.first & share & each.here[place] & slot_pools.on(each, Tier.DEVICE, pool)
                for local in reversed([*members(passed)]):
                    self._residency.drop(each, place, each.first + local)

    def _count_use(self, lease: Lease, run: Run) -> None:
        """A request resumes: count a use of the runs that it reads, and renew their retry budgets."""
        paths, governor = self._paths, self._backups.governor
        if shared := 0 if lease.again else min(lease.boundary, lease.known):  # an engine may have more pages
            for tell in self._context.tell.resumed:
                tell(lease.root, run, shared)
        selective = governor.paused or self._context.config.policies.write is WritePolicy.WRITE_THROUGH_SELECTIVE
        whole = selective or self._residency.candidates.counts_uses
        whole = whole or (self._storage.attached and paths.dirty.lacks_above(run))
        for each, _ in upward(run, ones(lease.boundary) if whole else paths.near(lease.boundary)):
            paths.tree.count(each, lease.priority, lease.again)
            paths.dirty.used(each)

    def _count_saved(self, lease: Lease) -> None:
        """Count the tokens and bytes that storage saved a request that resumes."""
        self._counters.used_tokens += lease.from_tiers()[2] * self._paths.page_tokens
        keys = lease.keys
        for pool, spec in enumerate(self._context.config.pools):
            used = lease.fetched[pool] & needed(lease.boundary, spec.lookback)
            self._counters.used_bytes += used.bit_count() * spec.payload_bytes
            found = [keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in members(used)]
            self._backups.governor.used(found, spec.payload_bytes)

    # --- loads that have ended

    def verified(self, event: Verified) -> None:
        """A load's pages are being copied after their check: its lease need not wait for the copy."""
        op = self._copies.ops.get(event.op)
        if op is None or op.edge != LOAD or op.verified is not None:
            self._counters.strays += 1
            return
        op.verified = event.good
        outcomes = op.outcomes(event)
        self._loaded(op, outcomes)
        waited = op.lease is not None and event.op in op.lease.ops
        if op.lease is not None:
            self._copies.leave(op.lease, event.op)
        self._waited(op, waited, outcomes)

    def load_ended(self, op: Op, end: Ended, waited: bool) -> None:
        """`waited`: whether its lease still waited for it."""
        if op.verified is not None:
            assert not op.verified & ~end.good, "a request resumed from a page whose copy has failed"
            self._copied(op)
            return
        outcomes = op.outcomes(end)
        self._loaded(op, outcomes)
        self._waited(op, waited, outcomes)

    def _copied(self, op: Op) -> None:
        """The copy of a verified load has ended."""
        assert op.run is not None and op.lease is not None
        for part in op.parts:
            targets = chosen(part.targets, part.positions, op.owned(part))
            self._residency.give_back(part.pool, targets, op.lease.root)
        for run, _ in upward(op.run, op.pinned):
            if any(run.bad):
                self._backups.heal(run)
        self._drop_loaded(op.lease, op.run)

    def _waited(self, op: Op, waited: bool, outcomes: list[PartOutcome]) -> None:
        """A lease that waited for a load goes on."""
        if waited and op.lease is not None:
            op.lease.torn = op.lease.torn or any(outcome.lost for outcome in outcomes)
            for part, _, bad in outcomes:
                note_bad(op.lease, part.pool, bad)
            if not op.lease.ops:
                self._arrived(op.lease)

    def _loaded(self, op: Op, outcomes: list[PartOutcome]) -> None:
        """Pages of a load are on the device, or are being copied there after their check."""
        assert op.run is not None and op.lease is not None
        with self._residency.offered_once():
            for outcome in outcomes:
                part, resident = outcome.part, self._fill(op.run, outcome)
                if op.verified is not None:  # another rank may be copying a page that is bad here
                    op.given[part.pool] = resident
                elif left := part.positions & ~resident:
                    self._residency.give_back(part.pool, chosen(part.targets, part.positions, left), op.lease.root)
        self._copies.fill(op)

    def _fill(self, tail: Run, outcome: PartOutcome) -> int:
        """Pages of one pool have been loaded; returns the positions that the tree has taken."""
        part, good, bad = outcome
        taken = 0
        self._count_loaded(outcome)
        for run, local, targets in downward(tail, part.positions, part.targets):
            self._residency.mark_bad(run, self._hosts[part.pool], bad >> run.first & local)
            here = good >> run.first & local
            taken |= self._backups.make_resident(run, part.pool, here, chosen(targets, local, here)) << run.first
            if any(run.bad):
                self._backups.heal(run)
        return taken

    def _count_loaded(self, outcome: PartOutcome) -> None:
        self._counters.loaded += outcome.good.bit_count()
        self._counters.bad_host += outcome.bad.bit_count()
        self._counters.failed += outcome.failed.bit_count()

    # --- what is another matter over an engine's blocks (`EngineBlocks`)

    def backed_up(self, op: Op, outcomes: list[PartOutcome]) -> None:
        """A backup or store has ended."""
        assert op.run is not None
        self._backups.ended(op, op.run, outcomes)

    def ended(self, number: int, op: Op) -> None:
        """A copy or probe has ended, and all that follows has been done."""
