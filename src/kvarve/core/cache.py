"""The core: which pages are where, who holds them, what to copy next. Pure: no clock, thread, tensor, socket or log.

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
from kvarve.core.effects import Began, Effect, Ended, Event
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

ON_DEVICE = (Tier.DEVICE,)  # where a lease that is ready holds its pages


class Hit(NamedTuple):
    """Boundaries in pages: where a prompt may resume by what is on the device alone, and with the host.

    `known` pages have their tokens in the tree; `by_pool` says how deep each pool alone would allow, so that a pool
    that holds all others back can be named.
    """

    device: int
    memory: int
    known: int
    by_pool: tuple[int, ...]


class Core:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.pools = config.pools
        self.slot_pools = SlotPools(config.pools, config.slots, config.page_tokens, config.eviction, config.cost)
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

    # --- questions: they change nothing

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
        """Whether no more will happen by itself: nothing is in flight, but on a storage that is gone, and no backup
        waits that could be sent."""
        return all(op.void for op in self.copies.ops.values()) and not self.backups.waits()

    def dirty(self) -> int:
        """How many pages in memory the write policy wants in storage that are not known to be there, as far as there is
        a storage, be it one that does not answer."""
        return self.backups.dirty()

    def patience_ends(self) -> float:
        """When the next of those whose turn has come goes on with what it has, whatever is under way for it."""
        waiting = (lease for lease in self.leases.values() if lease.claimed and not lease.ready)
        return min((lease.deadline for lease in waiting), default=inf)

    def take(self) -> list[Effect]:
        """The effects that came up since the last call, in order."""
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
        """A request begins to wait: storage is asked what memory does not have, and brings it to the host.

        Nothing is taken on the device before its turn comes (`claim`). With `read` false it resumes from nothing.
        `priority`: for eviction by priority, of the pages that it uses.
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
        """The engine has a place for this request: pages come to the device now, and the lease waits for storage no
        longer than its patience. True once it is ready; ask again after each `step`."""
        self.now = self.backups.now = now
        if not lease.claimed:
            lease.claimed = True
            if lease.phase is Phase.QUEUED:
                self._begin(lease)
        self._lose_patience(lease)
        return lease.phase is Phase.READY

    def resumed(self, lease: Lease) -> None:
        """The engine has its own copies of the windows and states that it resumed from: those pages need not stay.

        The pages of chains stay until the lease is closed, for what it publishes rests on them.
        """
        assert lease.phase is Phase.READY
        if not lease.resumed:
            lease.resumed = True
            self.paths.hold(lease, lease.run, 0, lease.prefix_pins, ON_DEVICE)

    def extend(self, lease: Lease, tokens: bytes, instead: int = 0) -> None:
        """The sequence of a ready lease goes on: with what was decoded, or with the next turn of a session.

        The last bytes of what it had, so many as `instead` says, are known by others from now on: `tokens` has them
        first. What was not full before may be now, so `grow` and `publish` may go further. It ends elsewhere now, so
        that is where its windows and states are kept.
        """
        assert lease.phase is Phase.READY and len(tokens) % TOKEN_BYTES == 0
        pages, stays = len(lease.tokens) // self.width, len(lease.tokens) - instead
        assert lease.done * self.width <= stays, "what has been published keeps its name"
        lease.tokens = lease.tokens[:stays] + tokens
        lease.named = lease.named[: stays // self.width * KEY_BYTES]
        if lease.pages < pages:  # room ran out on the way, so nothing beyond can be kept
            return
        lease.pages = len(lease.tokens) // self.width
        lease.snapshots = (lease.snapshots & ones(lease.room + 1)) | self._snapshots(lease) & ~ones(lease.room + 1)

    def slots(self, lease: Lease, pool: int) -> tuple[range, list[int]]:
        """The device pages that a ready lease resumes from in one pool: their positions and slots."""
        assert lease.phase is Phase.READY
        need = needed(lease.boundary, self.lookbacks[pool])
        positions = range(lease.boundary - need.bit_count(), lease.boundary)
        return positions, [covering(lease.run, position).slot(pool, position) for position in positions]

    def seat(self, lease: Lease, upto: int) -> bool:
        """Take room on the device for a ready lease to compute in: of each chain all pages before `upto`, whole or not.

        False, and nothing taken, if there is no such room now. `grow` keeps the pages where they lie.
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
        """Where the page before the first of these positions lies on the device."""
        before = (positions & -positions).bit_length() - 2
        if before < 0:
            return NOWHERE
        own = lease.own[pool].get(before)
        return covering(lease.run, before).slot(pool, before) if own is None else own

    def seats(self, lease: Lease, pool: int, start: int) -> list[int]:
        """The device slots of a chain's pages from `start` on, as far as a ready lease has them.

        Those before `done`, and those that were there when it became ready (`seen`), are everybody's.
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
        """Take room on the device for the pages up to `upto` that are worth keeping.

        Returns for each pool the new slots by position, for the engine to fill before it publishes. Where there is
        no room left the request goes on without keeping: its later pages are not offered any more.
        """
        assert lease.phase is Phase.READY and upto <= lease.pages
        fresh: list[dict[int, int]] = [{} for _ in self.pools]
        if upto <= lease.room:
            return fresh
        wanted = [
            self._worth_keeping(lease, pool, lease.room, upto) & ~lease.seen[pool] for pool in range(len(self.pools))
        ]
        for pool in self.slot_pools.chains:
            held = lease.own[pool]  # of what it has room to compute in some may be held already
            missing = [at for at in members(wanted[pool]) if at not in held]
            got = dict(zip(missing, self.slot_pools.reserve(pool, len(missing)), strict=False))
            fresh[pool] = {at: held.get(at, got.get(at, NOWHERE)) for at in members(wanted[pool])} if held else got
            if len(got) < len(missing):
                # Nothing can rest on a page that is not kept, so this is as far as the request is kept at all.
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
        """Whether `grow` would be short of room that is on its way: evictions that wait for their copy are started."""
        for pool, here in enumerate(lease.seen):
            keep = self._worth_keeping(lease, pool, lease.room, upto) & ~here & ~boundaries.of(lease.own[pool])
            wanted = keep.bit_count() - len(self.slot_pools.free[pool])
            if wanted > 0 and self.slot_pools.evict(pool, wanted) < wanted and self.backups.leaving():
                return True
        return False

    def keepable(self, lease: Lease) -> int:
        """The page up to which this request can be kept: all its full pages, unless room ran out on the way."""
        return lease.pages

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the filled pages before `upto` to the tree; what somebody else published meanwhile is given back."""
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
        """End a request in whatever phase it is. Its published pages stay; what it still owned is free at once."""
        if lease.phase is Phase.CLOSED:
            return
        for pool, slots in enumerate(lease.own):
            for slot in slots.values():
                self.slot_pools.give_back(pool, slot)
            slots.clear()
        if lease.phase is Phase.FETCHING:
            self.prefetch.land(lease)
        self.prefetch.release(lease)
        lease.ops.clear()  # what is still in flight for it nobody waits for
        self.paths.hold(lease, lease.run, 0, 0)
        lease.phase = Phase.CLOSED
        del self.leases[lease.number]
        self.slot_pools.forget(lease.root)

    def step(self, events: Iterable[Event], now: float) -> None:
        """Apply what began and ended, in the order given; then let patience run out and send new backups."""
        self.now = self.backups.now = now
        moved = False
        for event in events:
            op = self._began(event) if isinstance(event, Began) else self._apply(event)
            moved = moved or (op is not None and op.edge in (PROBE, FETCH) and not op.void)
        if moved:
            self.prefetch.moved()
        self.backups.send_staged()
        for lease in [*self.leases.values()]:
            self._lose_patience(lease)
            if lease.phase is Phase.LOADING and not lease.ops:  # it was put off
                self._load(lease)
        for lease in self.prefetch.next_in_line():
            self._fetch(lease)
        self.backups.evict_ahead()
        self.backups.send_pending()

    def retry(self) -> None:
        """Stores that rest since storage has failed need not rest any longer: one is tried in the next step."""
        self.backups.back_off_until = self.now

    def flush(self, tiers: Sequence[Tier]) -> int:
        """Evict from memory tiers everything that nobody holds; returns how many pages went."""
        before = sum(self.slot_pools.evicted)
        for tier in tiers:
            self.slot_pools.shed(tier)
        return sum(self.slot_pools.evicted) - before

    def attach(self, back_up: bool = False, again: bool = False) -> None:
        """There is a storage from now on, in place of any other, and nothing is known of it. With `back_up`, what is in
        memory goes there, whatever the write policy; it is the same one `again`, and gets what by the policy it has
        missed."""
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
        """The storage goes, or (`down`) does not answer for now. Requests that wait for it go on with what has arrived;
        copies in flight still have to end."""
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
        """Everything in memory is to go to storage now, whatever the write policy."""
        for run in self.slot_pools.runs():
            run.wanted = True
            self.backups.mark_dirty(run)

    def write_by(self, policy: WritePolicy) -> None:
        """From now on pages are backed up by another policy; what was owed by the one before still is."""
        self.config = self.backups.config = replace(self.config, write=policy)

    # --- prompts that share

    def parting(self, ahead: Lease, behind: Lease) -> int:
        """Where two prompts part, as the deepest boundary at which `behind` could resume from what `ahead` keeps."""
        if ahead.root != behind.root or not behind.reads:
            return 0
        most = min(behind.limit, ahead.pages)
        return same_pages(ahead.tokens, behind.tokens, 0, most, self.width) // self.grid * self.grid

    def mark(self, lease: Lease, boundary: int) -> bool:
        """Have a ready lease keep its windows and states at a boundary too, since another prompt leaves it there.

        False, and nothing changed, if it has passed what has to be kept for that.
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
        """A lease whose turn has come, and for which nothing is under way."""
        if not lease.reads:
            self._ready(lease, ones(1))
            return
        if lease.promised and self.copies.storage:
            # What memory promised may have gone while the request waited.
            _, path, known = self.paths.find(lease.root, lease.tokens)
            _, memory = self.paths.present(path, known)
            boundary = deepest(self.paths.legal(memory, lease))
            if boundary < lease.promised and self.prefetch.ask(lease, boundary, memory):
                return
        self._load(lease)

    def _queue(self, lease: Lease) -> None:
        """Nothing more comes from storage for now."""
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
        """Go on with what has come from storage so far."""
        if lease.phase is Phase.FETCHING:
            self.prefetch.land(lease)
        self._queue(lease)

    def _lose_patience(self, lease: Lease) -> None:
        if not lease.claimed or self.now < lease.deadline:
            return
        if lease.phase in (Phase.PROBING, Phase.FETCHING):
            self._stop_waiting(lease)
        elif lease.phase is Phase.LOADING:
            lease.ops.clear()
            self._ready(lease, ones(lease.limit + 1))

    def _load(self, lease: Lease) -> None:
        """Bring to the device what the deepest boundary in memory needs, as far as there is room."""
        self.prefetch.release(lease)
        lease.phase, lease.deadline = Phase.LOADING, self.now + self.config.load_deadline_s
        allowed, room = -1, [len(lease.tokens)] * len(self.pools)
        while True:
            # Anew each time: making room may have cost a page of it.
            run, path, known = self.paths.find(lease.root, lease.tokens)
            device, memory = self.paths.present(path, known)
            near = deepest(self.paths.legal(device, lease))
            boundary = near if memory == device else deepest(self.paths.legal(memory, lease) & allowed)
            if (boundary - near) * self.config.page_tokens < self.config.load_at_least:
                boundary = min(boundary, near)
            need = [needed(boundary, back) & ~here for back, here in zip(self.lookbacks, device, strict=True)]
            if not any(need):
                self._resume(lease, boundary, run, known, device)
                return
            self.paths.hold(lease, run, *self.paths.pins_for(boundary, device))
            taken = self.paths.reserve(Tier.DEVICE, need, room)
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
        for start in range(0, len(pages), self.config.batch_pages):
            self.copies.send(Op(LOAD, pages[start : start + self.config.batch_pages], lease, run))

    def _arrived(self, lease: Lease) -> None:
        """All loads have ended. What was lost on the way may leave a shallower boundary to bring: one more round."""
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
        # Pages beyond the boundary that are here already need not be kept again, so they must not go meanwhile.
        positions, prefix_pins = self.paths.pins_for(lease.boundary, device)
        self.paths.hold(lease, run, positions, prefix_pins | self.paths.ahead(device), ON_DEVICE)
        lease.seen = device
        lease.done = lease.room = lease.boundary
        lease.snapshots = self._snapshots(lease)
        lease.phase = Phase.READY
        if lease.reads:
            self._free_passed(lease, run)
            self.slot_pools.touch(run, self.paths.near(lease.boundary))
            self._count_use(lease, run)
            if self.copies.storage and any(lease.fetched):
                self._count_saved(lease)

    def _free_passed(self, lease: Lease, run: Run) -> None:
        """Copies in the host of what came from storage and is on the device now go, unless the write policy would have
        put them there: or storage would cost room that the host has for others."""
        for each, share in upward(run, boundaries.union(lease.fetched) & ones(lease.boundary)):
            if self.backups.keeps_in_host(each):
                continue
            for pool, fetched in enumerate(lease.fetched):
                place = self.slot_pools.place(Tier.HOST, pool)
                passed = fetched >> each.first & share & each.here[pool] & each.here[place]
                for local in reversed([*members(passed)]):
                    self.slot_pools.drop(each, place, each.first + local)

    def _count_use(self, lease: Lease, run: Run) -> None:
        """A request resumes: what it reads was used once more, and backups of it are worth new tries."""
        selective = self.config.write is WritePolicy.WRITE_THROUGH_SELECTIVE or self.governor.paused
        whole = selective or self.slot_pools.counts_uses
        for each, _ in upward(run, ones(lease.boundary) if whole else self.paths.near(lease.boundary)):
            each.uses += 1
            each.priority = max(each.priority, lease.priority)
            each.failed_backups = 0
            each.backed_up_since_use = [0] * len(self.pools)
            self.backups.mark_dirty(each)

    def _count_saved(self, lease: Lease) -> None:
        """What storage has saved a request that resumes."""
        self.counters.used_tokens += lease.from_tiers()[2] * self.config.page_tokens
        for pool, lookback in enumerate(self.lookbacks):
            used = lease.fetched[pool] & needed(lease.boundary, lookback)
            size_bytes = self.pools[pool].payload_bytes
            self.counters.used_bytes += used.bit_count() * size_bytes
            self.governor.used([lease.key(position) for position in members(used)], size_bytes)

    # --- what is worth keeping

    def _snapshots(self, lease: Lease) -> int:
        """The boundaries at which this prompt's windows and states are kept."""
        config, limit, kept = self.config, self.paths.limit(lease.tokens), 0
        if config.snapshots.gap:
            short = [pool for pool, back in enumerate(self.lookbacks) if back is not None]
            backs = [self.lookbacks[pool] for pool in short]
            kept = boundaries.resume_at([lease.seen[pool] for pool in short], backs, limit, self.grid) & ~1
        branch = min(lease.known, lease.pages)
        return config.snapshots.boundaries(lease.pages, limit, branch, kept, config.page_tokens, self.grid)

    def _worth_keeping(self, lease: Lease, pool: int, start: int, stop: int) -> int:
        """The positions in [start, stop) of a pool that some kept boundary needs."""
        lookback = self.lookbacks[pool]
        if lookback is None:
            return span(start, stop)
        keep = 0
        for boundary in members(lease.snapshots & span(start + 1, stop + lookback)):
            keep |= needed(boundary, lookback)
        return keep & span(start, stop)

    # --- what has begun and ended

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
        outcomes = [
            CopyOutcome(page, bool(end.good >> i & 1), bool(end.bad >> i & 1)) for i, page in enumerate(op.pages)
        ]
        if op.edge == PROBE:
            if lease is not None and waited:
                self.prefetch.answered(lease, outcomes)
                self._fetch(lease)
        elif op.edge == FETCH:
            assert lease is not None
            self.prefetch.arrived(op, outcomes, waited)
            if waited and not lease.ops:
                self.prefetch.land(lease)
                self._fetch(lease)  # what was lost on the way may leave a shallower boundary to bring
        elif op.edge == LOAD:
            assert op.run is not None
            self._loaded(op.run, outcomes)
            if waited and lease is not None:
                lease.torn = lease.torn or not all(good for _, good, _ in outcomes)
                if not lease.ops:
                    self._arrived(lease)
        else:
            assert op.run is not None
            self.backups.ended(op, op.run, outcomes)
        return op

    def _loaded(self, tail: Run, outcomes: list[CopyOutcome]) -> None:
        for page, good, bad in outcomes:
            run = covering(tail, page.position)
            self.counters.loaded += good
            self.counters.bad_host += bad
            self.counters.failed += not good and not bad
            if bad:
                self.slot_pools.mark_bad(run, self.slot_pools.place(Tier.HOST, page.pool), page.position)
            if not good or not self.backups.make_resident(run, page.pool, page.position, page.target):
                self.slot_pools.give_back(page.pool, page.target)
            if any(run.bad):
                self.backups.heal(run)
