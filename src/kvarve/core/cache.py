"""The core: which pages are where, which leases pin them, which copies come next. It knows no clock, thread, tensor,
socket or log.

Inputs come in (`lookup`, `open`, `claim`, `grow`, `publish`, `close`, `step`, `flush`), effects go out (`take`). The
same inputs give the same tree and the same effects, so ranks that agree on inputs cannot drift apart, any failure
replays from its seed, and the simulator runs this very code.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import NamedTuple

from kvarve import boundaries
from kvarve.boundaries import deepest, members, needed, ones, span
from kvarve.core.backups import Backups
from kvarve.core.copies import FETCH, LOAD, PROBE, STORE, Copies, CopyOutcome, Moving, Op
from kvarve.core.effects import Began, Effect, Ended, Event, Verified
from kvarve.core.lease import Lease, Phase
from kvarve.core.paths import Paths
from kvarve.core.policies import BEST_EFFORT, Patience, WritePolicy
from kvarve.core.prefetch import Prefetch
from kvarve.core.settings import CoreConfig, Counters
from kvarve.core.slot_pools import SlotPools
from kvarve.core.tree import NOWHERE, Run, covering, same_pages, upward, walk
from kvarve.errors import ConfigError
from kvarve.keys import KEY_BYTES, TOKEN_BYTES
from kvarve.model import Tier

ON_DEVICE = (Tier.DEVICE,)  # where a ready lease pins its pages


class Hit(NamedTuple):
    """Boundaries in pages at which a prompt may resume: from the device alone, and from memory (device and host).

    `known` pages have their tokens in the tree; `by_pool` is the deepest boundary that each pool alone would allow, so
    that the limiting pool can be named.
    """

    device: int
    memory: int
    known: int
    by_pool: tuple[int, ...]


class Core:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.pools = config.pools
        self.slot_pools = SlotPools(
            config.pools,
            config.slots,
            config.page_tokens,
            config.policies.eviction,
            config.policies.cost(config.page_tokens),
        )
        self.counters = Counters()
        self.copies = Copies(self.slot_pools)
        self.backups = Backups(config, self.slot_pools, self.copies, self.counters)
        self.has_host = self.backups.has_host
        self.copies.storage = config.storage and self.has_host
        self.governor = self.backups.governor
        self.paths = Paths(config, self.slot_pools, self.backups, self.counters)
        self.leases: dict[int, Lease] = {}
        self.prefetch = Prefetch(config, self.paths, self.copies, self.backups, self.counters, self.leases)
        self.lookbacks, self.grid, self.width = self.paths.lookbacks, self.paths.grid, self.paths.width
        self.now = 0.0

    # --- queries: they change nothing

    def lookup(self, root: bytes, tokens: bytes) -> Hit:
        """How deep a prompt (packed tokens, under a root key) could resume from memory now."""
        top = self.slot_pools.roots.get(root)
        limit = self.paths.limit(tokens)
        if top is None:
            return Hit(0, 0, 0, tuple(0 for _ in self.pools))
        path, known = walk(top, tokens)
        device, memory = self.paths.present(path, known)
        legal = [boundaries.legal(pages, back, limit) for pages, back in zip(memory, self.lookbacks, strict=True)]
        grid = boundaries.multiples(self.grid, limit)
        both = deepest(boundaries.shared(legal, limit) & grid)
        near = device == memory  # nothing is in the host alone
        return Hit(
            both if near else deepest(boundaries.resume_at(device, self.lookbacks, limit, self.grid)),
            both,
            known,
            tuple(deepest(each & grid) for each in legal),
        )

    def idle(self) -> bool:
        """Whether no copy is in flight, except to or from a storage that is gone or down, and no pending backup can be
        sent."""
        return all(op.void for op in self.copies.ops.values()) and not self.backups.waits()

    def dirty(self) -> int:
        """How many pages in memory are dirty; 0 without a storage, but not with one that is down."""
        return self.backups.dirty()

    def patience_ends(self) -> float:
        """The earliest deadline of a claimed lease that still waits: it then goes on with the pages that it has."""
        waiting = (lease for lease in self.leases.values() if lease.claimed and not lease.ready)
        return min((lease.deadline for lease in waiting), default=inf)

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self.copies.effects = self.copies.effects, []
        return effects

    # --- a request's life

    def open(
        self,
        root: bytes,
        tokens: bytes,
        now: float,
        patience: Patience = BEST_EFFORT,
        read: bool = True,
        priority: int = 0,
    ) -> Lease:
        """Open a lease for a request that begins to wait: pages that memory lacks are fetched from storage to the host.

        It takes no device slots before `claim`. With `read` false the request resumes from nothing. `priority`: of the
        pages that it uses, for eviction by priority.
        """
        self.now = self.backups.now = now
        run, path, known = self.paths.find(root, tokens)
        self.counters.requests += 1
        lease = Lease(
            self.counters.requests,
            root,
            tokens,
            self.config.page_tokens,
            self.paths.limit(tokens),
            self.slot_pools.root(root),
            len(self.pools),
            patience,
            priority,
            read,
        )
        self.leases[lease.number] = lease
        if read:
            self.slot_pools.touch(run, self.paths.near(known))  # it will be read soon
            if self.copies.storage:
                _, memory = self.paths.present(path, known)
                lease.promised = deepest(self.paths.legal(memory, lease))
                self.prefetch.ask(lease, lease.promised, memory)
        return lease

    def claim(self, lease: Lease, now: float) -> bool:
        """The engine admits this request: its pages are loaded to the device, after a wait for storage of at most its
        patience. True once the lease is ready; ask again after each `step`."""
        self.now = self.backups.now = now
        if not lease.claimed:
            lease.claimed = True
            self.copies.hurry(lease)
            if lease.phase is Phase.QUEUED:
                self._begin(lease)
        self._check_deadline(lease)
        return lease.phase is Phase.READY

    def resumed(self, lease: Lease) -> None:
        """Unpin the windows and states that the engine resumed from: it has copies of its own now.

        Chains stay pinned until the lease is closed, since the pages that it publishes rest on them.
        """
        assert lease.phase is Phase.READY
        if not lease.resumed:
            lease.resumed = True
            self.paths.hold(lease, lease.run, 0, lease.prefix_pins, ON_DEVICE)

    def extend(self, lease: Lease, tokens: bytes, instead: int = 0) -> None:
        """Append tokens to the sequence of a ready lease: decoded ones, or the next turn of a session.

        `tokens` replaces the last `instead` bytes of the sequence. More pages may be full now, so `grow` and `publish`
        may go further, and windows and states are kept at the new end.
        """
        assert lease.phase is Phase.READY and len(tokens) % TOKEN_BYTES == 0
        pages, stays = len(lease.tokens) // self.width, len(lease.tokens) - instead
        assert lease.done * self.width <= stays, "what has been published keeps its name"
        lease.tokens = lease.tokens[:stays] + tokens
        lease.named = lease.named[: stays // self.width * KEY_BYTES]
        if lease.pages < pages:  # slots ran out on the way, so no later page can be kept
            return
        lease.pages = len(lease.tokens) // self.width
        lease.snapshots = (lease.snapshots & ones(lease.room + 1)) | self._snapshots(lease) & ~ones(lease.room + 1)

    def slots(self, lease: Lease, pool: int) -> tuple[range, list[int]]:
        """The device pages of one pool that a ready lease resumes from: their positions and slots."""
        assert lease.phase is Phase.READY
        need = needed(lease.boundary, self.lookbacks[pool])
        positions = range(lease.boundary - need.bit_count(), lease.boundary)
        return positions, [covering(lease.run, position).slot(pool, position) for position in positions]

    def seat(self, lease: Lease, upto: int) -> bool:
        """Reserve device slots for a ready lease to compute in: of each chain all pages before `upto`, full or not.

        False, and none reserved, if there are too few now. `grow` keeps the pages in these slots.
        """
        assert lease.phase is Phase.READY
        taken: dict[int, dict[int, int]] = {}
        for pool in self.slot_pools.chains:
            missing = span(lease.done, upto) & ~lease.seen[pool] & ~boundaries.of(lease.own[pool])
            if missing:
                self.slot_pools.straighten(pool, missing.bit_count(), self._slot_before(lease, pool, missing))
            slots = self.slot_pools.reserve(pool, missing.bit_count())
            taken[pool] = dict(zip(members(missing), slots, strict=False))
            if len(slots) < missing.bit_count():
                for place, pages in taken.items():
                    for slot in pages.values():
                        self.slot_pools.give_back(place, slot)
                return False
        for pool, pages in taken.items():
            lease.own[pool].update(pages)
        return True

    def _slot_before(self, lease: Lease, pool: int, positions: int) -> int:
        """The device slot of the page before the first of these positions."""
        before = (positions & -positions).bit_length() - 2
        if before < 0:
            return NOWHERE
        own = lease.own[pool].get(before)
        return covering(lease.run, before).slot(pool, before) if own is None else own

    def seats(self, lease: Lease, pool: int, start: int) -> list[int]:
        """The device slots of a chain's pages from `start` on, as far as a ready lease has them.

        Pages before `done`, and those resident when the lease became ready (`seen`), belong to the tree.
        """
        assert lease.phase is Phase.READY and pool in self.slot_pools.chains
        slots, own, seen = [], lease.own[pool], lease.seen[pool]
        for position in count(start):
            if position < lease.done or seen >> position & 1:
                slots.append(covering(lease.run, position).slot(pool, position))
            elif position in own:
                slots.append(own[position])
            else:
                return slots
        raise AssertionError("a count ends")

    def grow(self, lease: Lease, upto: int) -> list[dict[int, int]]:
        """Reserve device slots for the pages up to `upto` that are worth keeping.

        Returns for each pool the new slots by position, for the engine to fill before it publishes. Once slots run out
        the request goes on uncached: its later pages are not kept.
        """
        assert lease.phase is Phase.READY and upto <= lease.pages
        fresh: list[dict[int, int]] = [{} for _ in self.pools]
        if upto <= lease.room:
            return fresh
        wanted = [
            self._worth_keeping(lease, pool, lease.room, upto) & ~lease.seen[pool] for pool in range(len(self.pools))
        ]
        for pool in self.slot_pools.chains:
            held = lease.own[pool]  # some may have been reserved by `seat`
            missing = [at for at in members(wanted[pool]) if at not in held]
            got = dict(zip(missing, self.slot_pools.reserve(pool, len(missing)), strict=False))
            fresh[pool] = {at: held.get(at, got.get(at, NOWHERE)) for at in members(wanted[pool])} if held else got
            if len(got) < len(missing):
                # No page can rest on one that is not kept, so the request is kept up to here at most.
                first_lost = missing[len(got)]
                self.counters.uncached += upto - first_lost
                upto = min(upto, first_lost)
                lease.snapshots &= ones(first_lost + 1)
                lease.pages = first_lost
        for pool in range(len(self.pools)):
            if pool not in self.slot_pools.chains:
                bits = wanted[pool] & ones(upto)
                fresh[pool] = dict(zip(members(bits), self.slot_pools.reserve(pool, bits.bit_count()), strict=False))
            for position in [at for at in fresh[pool] if at >= upto]:
                slot = fresh[pool].pop(position)
                if slot != NOWHERE and position not in lease.own[pool]:
                    self.slot_pools.give_back(pool, slot)
            lease.own[pool].update(fresh[pool])
        lease.room = upto
        return fresh

    def short(self, lease: Lease, upto: int) -> bool:
        """Whether `grow` would lack slots that are about to come free; starts the evictions, which wait for copies."""
        for pool, here in enumerate(lease.seen):
            keep = self._worth_keeping(lease, pool, lease.room, upto) & ~here & ~boundaries.of(lease.own[pool])
            wanted = keep.bit_count() - len(self.slot_pools.free[pool])
            if wanted > 0 and self.slot_pools.evict(pool, wanted) < wanted and self.backups.leaving():
                return True
        return False

    def keepable(self, lease: Lease) -> int:
        """The page up to which this request can be kept: all its full pages, unless slots ran out on the way."""
        return lease.pages

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the filled pages before `upto` to the tree; slots of pages that are there already are freed."""
        assert lease.phase is Phase.READY and lease.done <= upto <= lease.room
        if upto == lease.done:
            return
        if all(not slots or max(slots) < upto for slots in lease.own):
            pages, lease.own = lease.own, [{} for _ in lease.own]
        else:
            pages = [{at: slots.pop(at) for at in [*slots] if at < upto} for slots in lease.own]
        tail, end = self.paths.insert(lease, Tier.DEVICE, pages)
        lease.done, lease.resumed = upto, True
        if kept := min(upto, end):
            self.paths.hold(lease, tail, 0, self.paths.ends(kept) | self.paths.ahead(lease.seen), ON_DEVICE)
            self.slot_pools.touch(tail, self.paths.near(kept))
        for run, _ in upward(tail, span(0, end) & ~ones(min(lease.boundary, end))):
            run.uses = max(run.uses, 1)
            run.priority = max(run.priority, lease.priority)

    def close(self, lease: Lease) -> None:
        """Close a lease in any phase. Its published pages stay; slots that it still owned are free at once."""
        if lease.phase is Phase.CLOSED:
            return
        for pool, slots in enumerate(lease.own):
            for slot in slots.values():
                self.slot_pools.give_back(pool, slot)
            slots.clear()
        if lease.phase is Phase.FETCHING:
            self.prefetch.land(lease)
        self.prefetch.release(lease)
        lease.ops.clear()  # copies still in flight for it end without a lease
        self.paths.hold(lease, lease.run, 0, 0)
        lease.phase = Phase.CLOSED
        del self.leases[lease.number]
        self.slot_pools.forget(lease.root)

    def step(self, events: Iterable[Event], now: float) -> None:
        """Apply events in the order given; then apply deadlines that have passed, and send new backups."""
        self.now = self.backups.now = now
        moved = False
        for event in events:
            if isinstance(event, Verified):
                self._verified(event)
                continue
            op = self._began(event) if isinstance(event, Began) else self._apply(event)
            moved = moved or (op is not None and op.edge in (PROBE, FETCH) and not op.void)
        if moved:
            self.prefetch.moved()
        self.backups.send_staged()
        for lease in [*self.leases.values()]:
            self._check_deadline(lease)
            if lease.phase is Phase.LOADING and not lease.ops:  # it waits for evictions
                self._load(lease)
        for lease in self.prefetch.next_in_line():
            self._fetch(lease)
        self.backups.evict_ahead()
        self.backups.send_pending()

    def retry(self) -> None:
        """End the back-off of stores: one is tried in the next step."""
        self.backups.back_off_until = self.now

    def flush(self, tiers: Sequence[Tier]) -> int:
        """Evict every unpinned page from memory tiers; returns how many went at once."""
        before = sum(self.slot_pools.evicted)
        for tier in tiers:
            self.slot_pools.shed(tier)
        return sum(self.slot_pools.evicted) - before

    def attach(self, back_up: bool = False, again: bool = False) -> None:
        """Attach a storage, in place of any other, of whose content nothing is known. With `back_up`, all pages in
        memory are dirty, whatever the write policy. `again`: the same storage answers again, and gets the pages that it
        missed by the policy."""
        if not self.has_host:
            raise ConfigError("storage needs a host tier, through which its pages travel")
        if not again:
            self.detach()
        self.copies.storage, self.backups.down = True, False
        for run in self.slot_pools.runs():
            run.stored = [0] * len(self.pools)
            run.failed_backups = 0
            run.wanted = run.wanted if again else back_up
            if back_up or again:
                self.backups.mark_dirty(run)

    def detach(self, down: bool = False) -> None:
        """Detach the storage, or note that it is `down`. Requests that wait for it go on with the pages that have
        arrived; copies in flight still have to end."""
        self.copies.storage = False
        self.backups.reset(down)
        for op in self.copies.ops.values():
            if op.edge == STORE:
                self.backups.void(op, gone=not down)
            elif op.edge == FETCH:
                self.prefetch.void(op, gone=not down)
            op.void = op.void or Tier.STORAGE in op.edge
            op.counts = op.counts and (down or not op.void)
        for lease in self.leases.values():
            if lease.phase in (Phase.PROBING, Phase.FETCHING):
                self._stop_waiting(lease)

    def back_up(self) -> None:
        """Mark all pages in memory dirty, whatever the write policy."""
        for run in self.slot_pools.runs():
            run.wanted = True
            self.backups.mark_dirty(run)

    def write_by(self, policy: WritePolicy) -> None:
        """Change the write policy; pages that are dirty by the policy before it stay dirty."""
        policies = replace(self.config.policies, write_policy=policy.value)
        self.config = self.backups.config = replace(self.config, policies=policies)

    # --- prompts that share

    def parting(self, ahead: Lease, behind: Lease) -> int:
        """The deepest boundary at which `behind` could resume from pages that `ahead` keeps."""
        if ahead.root != behind.root or not behind.reads:
            return 0
        most = min(behind.limit, ahead.pages)
        return same_pages(ahead.tokens, behind.tokens, 0, most, self.width) // self.grid * self.grid

    def mark(self, lease: Lease, boundary: int) -> bool:
        """Have a ready lease keep its windows and states at a boundary too, since another prompt branches off there.

        False, and nothing changed, if the lease is past the pages that this needs.
        """
        assert lease.phase is Phase.READY
        if lease.snapshots >> boundary & 1:
            return lease.done < boundary
        reach = [lookback for lookback in self.lookbacks if lookback is not None]
        if boundary > lease.pages or lease.room > boundary - max(reach, default=0) or lease.room >= boundary:
            return False
        lease.snapshots |= 1 << boundary
        return True

    # --- before a lease is ready

    def _begin(self, lease: Lease) -> None:
        """A claimed lease without copies in flight: load its pages, or probe storage again."""
        if not lease.reads:
            self._ready(lease, ones(1))
            return
        if lease.promised and self.copies.storage:
            # Pages that it was promised may have been evicted while it waited.
            _, path, known = self.paths.find(lease.root, lease.tokens)
            _, memory = self.paths.present(path, known)
            boundary = deepest(self.paths.legal(memory, lease))
            if boundary < lease.promised and self.prefetch.ask(lease, boundary, memory):
                return
        self._load(lease)

    def _queue(self, lease: Lease) -> None:
        """End the lease's wait for storage: load its pages if it is claimed, else queue it."""
        lease.phase = Phase.QUEUED
        lease.ops.clear()
        self.prefetch.deferred.pop(lease.number, None)
        if lease.claimed:
            self._load(lease)
            return
        _, path, known = self.paths.find(lease.root, lease.tokens)
        _, memory = self.paths.present(path, known)
        lease.promised = deepest(self.paths.legal(memory, lease))

    def _fetch(self, lease: Lease) -> None:
        if not self.prefetch.fetch(lease):
            self._queue(lease)

    def _stop_waiting(self, lease: Lease) -> None:
        """Go on with the pages that have come from storage so far."""
        if lease.phase is Phase.FETCHING:
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
        lease.phase, lease.deadline = Phase.LOADING, self.now + self.config.load_deadline_s
        allowed, available = -1, [len(lease.tokens)] * len(self.pools)
        while True:
            # Anew each time: evicting for it may have cost a page of it.
            run, path, known = self.paths.find(lease.root, lease.tokens)
            device, memory = self.paths.present(path, known)
            near = deepest(self.paths.legal(device, lease))
            boundary = near if memory == device else deepest(self.paths.legal(memory, lease) & allowed)
            if (boundary - near) * self.config.page_tokens < self.config.policies.load_at_least:
                boundary = min(boundary, near)
            need = [needed(boundary, back) & ~here for back, here in zip(self.lookbacks, device, strict=True)]
            if not any(need):
                self._resume(lease, boundary, run, known, device)
                return
            self.paths.hold(lease, run, *self.paths.pins_for(boundary, device))
            taken = self.paths.reserve(Tier.DEVICE, need, available)
            if taken is not None:
                break
            if self.prefetch.put_off(lease):
                return
            allowed = ones(boundary)
        pages = []
        for pool, bits in enumerate(need):
            for position, slot in zip(members(bits), taken[pool], strict=True):
                source = covering(run, position).slot(self.slot_pools.place(Tier.HOST, pool), position)
                pages.append(Moving(pool, position, source, slot))
                lease.loaded |= 1 << position
        pages.sort(key=lambda page: page.position)
        self.copies.send(Op(LOAD, pages, lease, run))  # in one piece, so that it can be copied layer by layer

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
        device, _ = self.paths.present(path, known)
        self._resume(lease, deepest(self.paths.legal(device, lease) & allowed), run, known, device)

    def _resume(self, lease: Lease, boundary: int, run: Run, known: int, device: list[int]) -> None:
        lease.boundary, lease.known = boundary, known
        # Pages beyond the boundary that are resident are not kept a second time, so they must not be evicted.
        positions, prefix_pins = self.paths.pins_for(lease.boundary, device)
        self.paths.hold(lease, run, positions, prefix_pins | self.paths.ahead(device), ON_DEVICE)
        lease.seen = device
        lease.done = lease.room = lease.boundary
        lease.snapshots = self._snapshots(lease)
        lease.phase = Phase.READY
        if lease.reads:
            self._drop_loaded(lease, run)
            self.slot_pools.touch(run, self.paths.near(lease.boundary))
            self._count_use(lease, run)
            if self.copies.storage and any(lease.fetched):
                self._count_saved(lease)

    def _drop_loaded(self, lease: Lease, run: Run) -> None:
        """Drop host copies of pages that came from storage and are on the device now, unless the write policy would
        have made them: they take host slots from other pages."""
        for each, share in upward(run, boundaries.union(lease.fetched) & ones(lease.boundary)):
            if self.backups.keeps_in_host(each):
                continue
            for pool, fetched in enumerate(lease.fetched):
                place = self.slot_pools.place(Tier.HOST, pool)
                passed = fetched >> each.first & share & each.here[pool] & each.here[place]
                for local in reversed([*members(passed)]):
                    self.slot_pools.drop(each, place, each.first + local)

    def _count_use(self, lease: Lease, run: Run) -> None:
        """A request resumes: count a use of the runs that it reads, and renew their retry budgets."""
        selective = self.config.policies.write is WritePolicy.WRITE_THROUGH_SELECTIVE or self.governor.paused
        whole = selective or self.slot_pools.counts_uses
        for each, _ in upward(run, ones(lease.boundary) if whole else self.paths.near(lease.boundary)):
            each.uses += 1
            each.priority = max(each.priority, lease.priority)
            each.failed_backups = 0
            each.backed_up_since_use = [0] * len(self.pools)
            self.backups.mark_dirty(each)

    def _count_saved(self, lease: Lease) -> None:
        """Count the tokens and bytes that storage saved a request that resumes."""
        self.counters.used_tokens += lease.from_tiers()[2] * self.config.page_tokens
        for pool, lookback in enumerate(self.lookbacks):
            used = lease.fetched[pool] & needed(lease.boundary, lookback)
            size_bytes = self.pools[pool].payload_bytes
            self.counters.used_bytes += used.bit_count() * size_bytes
            self.governor.used([lease.key(position) for position in members(used)], size_bytes)

    # --- windows and states to keep

    def _snapshots(self, lease: Lease) -> int:
        """The boundaries at which this prompt's windows and states are kept."""
        config, limit, kept = self.config, self.paths.limit(lease.tokens), 0
        if config.policies.snapshots.gap:
            short = [pool for pool, back in enumerate(self.lookbacks) if back is not None]
            backs = [self.lookbacks[pool] for pool in short]
            kept = boundaries.resume_at([lease.seen[pool] for pool in short], backs, limit, self.grid) & ~1
        branch = min(lease.known, lease.pages)
        return config.policies.snapshots.boundaries(lease.pages, limit, branch, kept, config.page_tokens, self.grid)

    def _worth_keeping(self, lease: Lease, pool: int, start: int, stop: int) -> int:
        """The positions in [start, stop) of a pool that some kept boundary needs."""
        lookback = self.lookbacks[pool]
        if lookback is None:
            return span(start, stop)
        keep = 0
        for boundary in members(lease.snapshots & span(start + 1, stop + lookback)):
            keep |= needed(boundary, lookback)
        return keep & span(start, stop)

    # --- events

    def _began(self, event: Began) -> Op | None:
        op = self.copies.ops.get(event.op)
        if op is not None and op.lease is not None and event.op in op.lease.ops and op.edge in (PROBE, FETCH):
            self.prefetch.began(op.lease)
        return op

    def _apply(self, end: Ended) -> Op | None:
        op = self.copies.end(end.op)
        if op is None:
            self.counters.strays += 1
            return None
        lease = op.lease
        waited = lease is not None and end.op in lease.ops
        if lease is not None:
            lease.ops.discard(end.op)
            if waited and op.edge in (PROBE, FETCH):
                self.prefetch.began(lease)  # at the latest
        outcomes = _outcomes(op, end)
        if op.edge == PROBE:
            if lease is not None and waited:
                self.prefetch.answered(lease, outcomes)
                self._fetch(lease)
        elif op.edge == FETCH:
            assert lease is not None
            self.prefetch.arrived(op, outcomes, waited)
            if waited and not lease.ops:
                self.prefetch.land(lease)
                self._fetch(lease)  # if pages were lost, a shallower boundary may still be fetched
        elif op.edge == LOAD:
            if op.verified is None:
                self._loaded(op, outcomes)
                self._waited(op, waited, outcomes)
            else:
                self._copied(op, end)
        else:
            assert op.run is not None
            self.backups.ended(op, op.run, outcomes)
        return op

    def _verified(self, event: Verified) -> None:
        """A load's pages are being copied after their check: its lease need not wait for the copy."""
        op = self.copies.ops.get(event.op)
        if op is None or op.edge != LOAD or op.verified is not None:
            self.counters.strays += 1
            return
        op.verified = event.good
        outcomes = _outcomes(op, event)
        self._loaded(op, outcomes)
        waited = op.lease is not None and event.op in op.lease.ops
        if op.lease is not None:
            op.lease.ops.discard(event.op)
        self._waited(op, waited, outcomes)

    def _copied(self, op: Op, end: Ended) -> None:
        """The copy of a verified load has ended."""
        assert op.verified is not None and op.run is not None and op.lease is not None
        assert not op.verified & ~end.good, "a request resumed from a page whose copy has failed"
        for i, page in enumerate(op.pages):
            if not op.given >> i & 1:
                self.slot_pools.give_back(page.pool, page.target)
            if any((run := covering(op.run, page.position)).bad):
                self.backups.heal(run)
        self._drop_loaded(op.lease, op.run)

    def _waited(self, op: Op, waited: bool, outcomes: list[CopyOutcome]) -> None:
        """A lease that waited for a load goes on."""
        if waited and op.lease is not None:
            op.lease.torn = op.lease.torn or not all(good for _, good, _ in outcomes)
            if not op.lease.ops:
                self._arrived(op.lease)

    def _loaded(self, op: Op, outcomes: list[CopyOutcome]) -> None:
        """Pages of a load are on the device, or are being copied there after their check."""
        assert op.run is not None
        for i, (page, good, bad) in enumerate(outcomes):
            run = covering(op.run, page.position)
            self.counters.loaded += good
            self.counters.bad_host += bad
            self.counters.failed += not good and not bad
            if bad:
                self.slot_pools.mark_bad(run, self.slot_pools.place(Tier.HOST, page.pool), page.position)
            resident = good and self.backups.make_resident(run, page.pool, page.position, page.target)
            if op.verified is not None and good:
                op.given |= resident << i
                if resident and not op.filling >> page.position & 1:
                    self.slot_pools.pin(op.run, 1 << page.position, tiers=op.edge[1:])
                    op.filling |= 1 << page.position
            elif not resident:
                self.slot_pools.give_back(page.pool, page.target)
                op.given |= 1 << i
            if any(run.bad):
                self.backups.heal(run)


def _outcomes(op: Op, event: Verified | Ended) -> list[CopyOutcome]:
    return [CopyOutcome(page, bool(event.good >> i & 1), bool(event.bad >> i & 1)) for i, page in enumerate(op.pages)]
