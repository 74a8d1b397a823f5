"""From a claim to the first forward: a lease waits for storage, its pages are loaded, and it resumes.

A lease is ready at the deepest boundary that the device can serve then; copies that come later change nothing for it.
"""

from math import inf

from kvarve.core.copies.effects import Ended, Verified
from kvarve.core.copies.in_flight import LOAD, Op, Part, PartOutcome, note_bad
from kvarve.core.core_config import CoreConfig
from kvarve.core.policies import WritePolicy
from kvarve.core.requests.lease import Cause, Lease, Phase
from kvarve.core.requests.prefetch import LOOK_AGAIN_S
from kvarve.core.state import State
from kvarve.core.tree.tree import Run, downward, slots_of, upward
from kvarve.pages import boundaries
from kvarve.pages.boundaries import chosen, deepest, members, needed, ones
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier

ON_DEVICE = (Tier.DEVICE,)  # where a ready lease pins its pages


class Resuming(State):
    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.pools = config.pools
        self.has_host, self.governor = self.backups.has_host, self.backups.governor
        self.copies.storage = config.storage and self.has_host
        self.lookbacks, self.grid, self.width = self.paths.lookbacks, self.paths.grid, self.paths.width

    def _begin(self, lease: Lease) -> None:
        """A claimed lease without copies in flight: load its pages, or probe storage again."""
        if not lease.reads:
            self._ready(lease, ones(1))
            return
        if not self._look_again(lease):
            self._load(lease)

    def _look_again(self, lease: Lease) -> bool:
        """Whether storage is asked again about a lease that waited: of what it was promised pages may have been evicted
        meanwhile, and others may have come to storage."""
        late = self.now >= lease.looked_s + LOOK_AGAIN_S
        if not self.copies.storage or not lease.reads or not (late or lease.claimed):
            return False
        _, path, known = self.paths.find(lease.root, lease.tokens)
        _, memory = self.paths.present(path, known, lease.outside)
        boundary = deepest(self.paths.legal(memory, lease))
        if not late and boundary >= lease.promised and not (self.now > lease.looked_s and self._stored(lease, known)):
            return False
        lease.looked_s, lease.promised = self.now, boundary
        lease.asked_again = self.prefetch.ask(lease, boundary, memory)
        return lease.asked_again

    def _stored(self, lease: Lease, known: int) -> bool:
        """Whether a prompt's pages behind the `known` ones were stored before they left memory."""
        return any(tier is Tier.STORAGE for tier, _ in self.slot_pools.ghosts.of(lease.root, lease.tokens, known).tiers)

    def _queue(self, lease: Lease) -> None:
        """End the lease's wait for storage: load its pages if it is claimed, else queue it."""
        if lease.asked_s is not None:
            self.slot_pools.ages.storage_wait_s.observe(self.now - lease.asked_s)
            lease.asked_s = None
        if lease.phase is not Phase.QUEUED:
            lease.move(Cause.DONE)
        self.prefetch.note_come(lease)
        lease.ask_again = inf
        self.prefetch.deferred.pop(lease.number, None)
        if lease.claimed:
            self._load(lease)
            return
        _, path, known = self.paths.find(lease.root, lease.tokens)
        _, memory = self.paths.present(path, known, lease.outside)
        lease.promised = deepest(self.paths.legal(memory, lease))

    def _fetch(self, lease: Lease) -> None:
        if not self.prefetch.fetch(lease):
            self._queue(lease)

    def _stop_waiting(self, lease: Lease) -> None:
        """Go on with the pages that have come from storage so far."""
        lease.ops.clear()
        self.prefetch.land(lease)
        self._queue(lease)

    def _check_deadline(self, lease: Lease) -> None:
        if not lease.claimed or self.now < lease.deadline:
            return
        if lease.phase in (Phase.PROBING, Phase.FETCHING):
            self._stop_waiting(lease)
        elif lease.phase is Phase.LOADING:
            lease.ops.clear()
            self._ready(lease, ones(lease.limit + 1))

    def _load(self, lease: Lease) -> None:
        """Load to the device the pages that the deepest boundary in memory needs, as far as there are slots."""
        self.prefetch.release(lease)
        lease.move(Cause.LOAD)
        lease.deadline = self.now + self.config.load_deadline_s
        allowed, available = -1, [len(lease.tokens)] * len(self.pools)
        while True:
            # Anew each time: evicting for it may have cost a page of it.
            run, path, known = self.paths.find(lease.root, lease.tokens)
            device, memory = self.paths.present(path, known, lease.outside)
            near = deepest(self.paths.legal(device, lease))
            boundary = near if memory == device else deepest(self.paths.legal(memory, lease) & allowed)
            if (boundary - near) * self.config.page_tokens < self.config.policies.load_at_least:
                boundary = min(boundary, near)
            need = []  # where the device alone can serve, it lacks nothing
            if boundary != near:
                need = [needed(boundary, back) & ~here for back, here in zip(self.lookbacks, device, strict=True)]
            if not any(need):
                self._note_found(lease, path, known, memory)
                self._resume(lease, boundary, run, known, device)
                return
            self.paths.hold(lease, run, *self.paths.pins_for(boundary, device))
            taken = self.paths.reserve(lease, Tier.DEVICE, need, available)
            if taken is not None:
                break
            if self.prefetch.put_off(lease):
                return
            allowed = ones(boundary)
        lease.loaded |= boundaries.union(need)
        lease.asked = [asked | bits for asked, bits in zip(lease.asked, need, strict=True)]
        parts = [
            Part(pool, bits, slots_of(run, self.slot_pools.place(Tier.HOST, pool), bits), taken[pool])
            for pool, bits in enumerate(need)
            if bits
        ]
        self.copies.send(Op(LOAD, parts, lease, run))  # in one piece, so that it can be copied layer by layer

    def _arrived(self, lease: Lease) -> None:
        """All loads have ended. If one failed, a shallower boundary may still be loaded: one more round."""
        if lease.torn and not lease.reloaded:
            lease.reloaded = True
            self._load(lease)
        else:
            self._ready(lease, ones(lease.limit + 1))

    def _ready(self, lease: Lease, allowed: int) -> None:
        """The engine may start, at the deepest of the allowed boundaries that the device can serve."""
        run, path, known = self.paths.find(lease.root, lease.tokens)
        device, memory = self.paths.present(path, known, lease.outside)
        self._note_found(lease, path, known, memory)
        self._resume(lease, deepest(self.paths.legal(device, lease) & allowed), run, known, device)

    def _resume(self, lease: Lease, boundary: int, run: Run, known: int, device: list[int]) -> None:
        while not self.paths.leaves_room(lease, run, boundary):
            boundary = deepest(self.paths.legal(device, lease) & ones(boundary))
        lease.boundary = boundary
        self._note_ends(lease, run)  # first: the tree may lose pages that the lease held so far
        # Pages beyond the boundary that are resident are not kept a second time, so they must not be evicted.
        positions, prefix_pins = self.paths.pins_for(lease.boundary, device)
        self.paths.hold(lease, run, positions, prefix_pins | self.paths.ahead(device), ON_DEVICE)
        lease.seen = lease.found = device
        lease.done = lease.grown = lease.boundary
        lease.snapshots = self._snapshots(lease)
        lease.move(Cause.READY)
        if lease.reads:
            if any(lease.fetched):
                self._drop_loaded(lease, run)
            self.slot_pools.touch(run, self.paths.near(lease.boundary))
            self._count_use(lease, run)
            if self.copies.storage and any(lease.fetched) and not lease.again:
                self._count_saved(lease)

    def _note_found(self, lease: Lease, path: list[Run], known: int, memory: list[int]) -> None:
        """What there is of a prompt when it becomes ready, and what has left the tree. Where other prompts went another
        way it branches off; where one ended, it may only have grown."""
        left = self.slot_pools.ghosts.of(lease.root, lease.tokens, known)
        lease.known = lease.branch = known
        if left.followed and known + left.pages < len(lease.tokens) // self.width:
            lease.branch += left.pages
        lease.left, lease.memory, lease.storage = left, memory, self.copies.storage or self.backups.down
        if self.slot_pools.bad_pages:
            for run in path:
                for place, bad in enumerate(run.bad):
                    lease.bad[place % len(self.pools)] |= bad << run.first & ones(known)

    def _drop_loaded(self, lease: Lease, run: Run) -> None:
        """Drop host copies of pages that came from storage and are on the device now, unless the write policy would
        have made them: they take host slots from other pages."""
        for each, share in upward(run, boundaries.union(lease.fetched) & ones(lease.boundary)):
            if self.backups.keeps_in_host(each):
                continue
            for pool, fetched in enumerate(lease.fetched):
                place = self.slot_pools.place(Tier.HOST, pool)
                passed = fetched >> each.first & share & each.here[place] & self.slot_pools.on(each, Tier.DEVICE, pool)
                for local in reversed([*members(passed)]):
                    self.slot_pools.drop(each, place, each.first + local)

    def _count_use(self, lease: Lease, run: Run) -> None:
        """A request resumes: count a use of the runs that it reads, and renew their retry budgets."""
        shared = 0 if lease.again else min(lease.boundary, lease.known)  # an engine may have more pages
        if self.hot is not None and shared:
            self.hot.resumed(lease.root, run, shared)
        selective = self.config.policies.write is WritePolicy.WRITE_THROUGH_SELECTIVE or self.governor.paused
        whole = selective or self.slot_pools.counts_uses or (self.copies.storage and self.backups.lacks(run))
        for each, _ in upward(run, ones(lease.boundary) if whole else self.paths.near(lease.boundary)):
            each.uses += not lease.again
            each.priority = max(each.priority, lease.priority)
            each.failed_backups = 0
            each.backed_up_since_use = [0] * len(self.pools)
            self.backups.mark_dirty(each)

    def _count_saved(self, lease: Lease) -> None:
        """Count the tokens and bytes that storage saved a request that resumes."""
        self.counters.used_tokens += lease.from_tiers()[2] * self.config.page_tokens
        keys = lease.keys
        for pool, lookback in enumerate(self.lookbacks):
            used = lease.fetched[pool] & needed(lease.boundary, lookback)
            size_bytes = self.pools[pool].payload_bytes
            self.counters.used_bytes += used.bit_count() * size_bytes
            self.governor.used([keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in members(used)], size_bytes)

    def _verified(self, event: Verified) -> None:
        """A load's pages are being copied after their check: its lease need not wait for the copy."""
        op = self.copies.ops.get(event.op)
        if op is None or op.edge != LOAD or op.verified is not None:
            self.counters.strays += 1
            return
        op.verified = event.good
        outcomes = op.outcomes(event)
        self._loaded(op, outcomes)
        waited = op.lease is not None and event.op in op.lease.ops
        if op.lease is not None:
            op.lease.ops.discard(event.op)
        self._waited(op, waited, outcomes)

    def _copied(self, op: Op, end: Ended) -> None:
        """The copy of a verified load has ended."""
        assert op.verified is not None and op.run is not None and op.lease is not None
        assert not op.verified & ~end.good, "a request resumed from a page whose copy has failed"
        for part in op.parts:
            targets = chosen(part.targets, part.positions, op.owned(part))
            self.slot_pools.give_back(part.pool, targets, op.lease.root)
        for run, _ in upward(op.run, op.pinned):
            if any(run.bad):
                self.backups.heal(run)
        self._drop_loaded(op.lease, op.run)

    def _waited(self, op: Op, waited: bool, outcomes: list[PartOutcome]) -> None:
        """A lease that waited for a load goes on."""
        if waited and op.lease is not None:
            op.lease.torn = op.lease.torn or any(outcome.lost for outcome in outcomes)
            note_bad(op.lease, outcomes)
            if not op.lease.ops:
                self._arrived(op.lease)

    def _loaded(self, op: Op, outcomes: list[PartOutcome]) -> None:
        """Pages of a load are on the device, or are being copied there after their check."""
        assert op.run is not None and op.lease is not None
        with self.slot_pools.offered_once():
            for outcome in outcomes:
                part, resident = outcome.part, self._fill(op.run, outcome)
                if op.verified is not None:  # another rank may be copying a page that is bad here
                    op.given[part.pool] = resident
                elif left := part.positions & ~resident:
                    self.slot_pools.give_back(part.pool, chosen(part.targets, part.positions, left), op.lease.root)
        if op.given:
            op.filling = boundaries.union(op.given.values())
            self.slot_pools.pin(op.run, op.filling, tiers=op.edge[1:])

    def _fill(self, tail: Run, outcome: PartOutcome) -> int:
        """Pages of one pool have been loaded; returns the positions that the tree has taken."""
        part, good, bad = outcome
        host, taken = self.slot_pools.place(Tier.HOST, part.pool), 0
        self.counters.loaded += good.bit_count()
        self.counters.bad_host += bad.bit_count()
        self.counters.failed += outcome.failed.bit_count()
        for run, local, targets in downward(tail, part.positions, part.targets):
            self.slot_pools.mark_bad(run, host, bad >> run.first & local)
            here = good >> run.first & local
            taken |= self.backups.make_resident(run, part.pool, here, chosen(targets, local, here)) << run.first
            if any(run.bad):
                self.backups.heal(run)
        return taken

    def _note_ends(self, lease: Lease, run: Run) -> None:
        """A lease resumes at its boundary, and its prompt branches off others and ends: others will resume there, or on
        the way, where it keeps its windows and states since they take little."""
        ends = 1 << lease.boundary if lease.reads else 0
        if self.config.policies.snapshot_ends:
            ends |= 1 << lease.pages - lease.pages % self.grid | 1 << lease.limit - lease.limit % self.grid
        if self.config.policies.snapshot_branches:
            ends |= 1 << lease.branch - lease.branch % self.grid
        if step := self._step(lease):
            ends |= boundaries.of(range(step, lease.pages + 1, step))
        lease.ends = ends & ~1
        self.paths.mark_ends(run, lease.known, lease.ends)

    def _snapshots(self, lease: Lease) -> int:
        """The boundaries at which this prompt's windows and states are kept."""
        config, limit, kept = self.config, self.paths.limit(lease.tokens), 0
        if config.policies.snapshots.gap:
            short = [pool for pool, back in enumerate(self.lookbacks) if back is not None]
            backs = [self.lookbacks[pool] for pool in short]
            kept = boundaries.resume_at([lease.seen[pool] for pool in short], backs, limit, self.grid) & ~1
        return config.policies.snapshots.boundaries(
            lease.pages, limit, lease.branch, kept, config.page_tokens, self.grid, self._step(lease)
        )

    def _step(self, lease: Lease) -> int:
        """The pages after which a prompt keeps windows and states because they take little (see `SlotPools.step`)."""
        return 0 if self.config.policies.snapshot_every else self.slot_pools.step(lease.pages)
