"""The core: which pages are where, who holds them, what to copy next. Pure: no clock, thread, tensor, socket or log.

Inputs come in (`lookup`, `open`, `claim`, `grow`, `publish`, `close`, `step`, `flush`), effects go out (`take`). The
same inputs give the same tree and the same effects, so ranks that agree on inputs cannot drift apart, any failure
replays from its seed, and the simulator runs this very code.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvarve import boundaries
from kvarve.boundaries import deepest, members, needed, ones, span
from kvarve.core.backups import Backups
from kvarve.core.copies import FETCH, LOAD, PROBE, Copies, Fate, Moving, Op
from kvarve.core.effects import Effect, Ended
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import BEST_EFFORT, Patience, WritePolicy
from kvarve.core.settings import CoreConfig, Counters
from kvarve.core.shelves import Shelves
from kvarve.core.tree import NOWHERE, Run, covering, upward, walk
from kvarve.keys import KEY_BYTES, TOKEN_BYTES, extend
from kvarve.model import Tier

ROOM_RETRIES = 8  # how often a lease waits for evictions under write-back before it makes do with what there is


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
        self.lookbacks = [pool.lookback for pool in config.pools]
        self.grid = config.chunk_tokens // config.page_tokens
        self.width = config.page_tokens * TOKEN_BYTES
        self.shelves = Shelves(config.pools, config.slots, config.page_tokens)
        self.has_host = any(self.shelves.capacity[len(self.pools) :])
        self.counters = Counters()
        self.copies = Copies(self.shelves)
        self.backups = Backups(config, self.shelves, self.copies, self.counters)
        self.leases: dict[int, Lease] = {}

    # --- questions: they change nothing

    def lookup(self, root: bytes, tokens: bytes) -> Hit:
        """How deep a prompt (packed tokens, under a root key) could resume from memory now."""
        top = self.shelves.roots.get(root)
        limit = self._limit(tokens)
        if top is None:
            return Hit(0, 0, 0, tuple(0 for _ in self.pools))
        path, known = walk(top, 0, tokens)
        device, memory = self._present(path, known)
        legal = [boundaries.legal(pages, back, limit) for pages, back in zip(memory, self.lookbacks, strict=True)]
        grid = boundaries.multiples(self.grid, limit)
        return Hit(
            deepest(boundaries.resume_at(device, self.lookbacks, limit, self.grid)),
            deepest(boundaries.shared(legal, limit) & grid),
            known,
            tuple(deepest(each & grid) for each in legal),
        )

    def idle(self) -> bool:
        """Whether nothing is in flight and no backup waits."""
        return not self.copies.ops and not self.backups.owing

    def take(self) -> list[Effect]:
        """The effects that came up since the last call, in order."""
        effects, self.copies.effects = self.copies.effects, []
        return effects

    # --- a request's life

    def open(
        self, root: bytes, tokens: bytes, now: float, patience: Patience = BEST_EFFORT, read: bool = True
    ) -> Lease:
        """Start a request: pin what is in memory, ask storage for more. With `read` false it resumes from nothing."""
        run, path, known = self._find(root, tokens)
        keys = b"".join(each.keys for each in path)[: known * KEY_BYTES]
        keys += b"".join(extend(keys[-KEY_BYTES:] or root, tokens[known * self.width :], self.config.page_tokens))
        self.counters.requests += 1
        lease = Lease(self.counters.requests, root, tokens, keys, self._limit(tokens), run, len(self.pools))
        lease.known = known
        self.leases[lease.number] = lease
        self._plan_snapshots(lease)
        if not read:
            self._ready(lease, ones(1))
            return lease
        device, memory = self._present(path, known)
        boundary = deepest(self._legal(memory, lease))
        self._hold(lease, run, self._footing(boundary, device))
        self._touch(run, boundary)
        self._count_use(run, boundary)
        ask = self._worth_asking(lease, boundary, memory) if self.config.storage and self.has_host else []
        if ask:
            lease.deadline = now + patience.seconds((lease.limit - boundary) * self.config.page_tokens)
            pages = [Moving(pool, position, NOWHERE, NOWHERE) for pool, position in ask]
            self.copies.send(Op(PROBE, pages, lease), lease.key)
        else:
            self._load(lease)
        return lease

    def claim(self, lease: Lease, now: float) -> bool:
        """The engine has a place for this request: from now on the lease waits no longer than its patience.

        True once it is ready; ask again after each `step`.
        """
        lease.claimed = True
        self._lose_patience(lease, now)
        return lease.phase is Phase.READY

    def slots(self, lease: Lease, pool: int) -> tuple[range, list[int]]:
        """The device pages that a ready lease resumes from in one pool: their positions and slots."""
        assert lease.phase is Phase.READY
        need = needed(lease.boundary, self.lookbacks[pool])
        positions = range(lease.boundary - need.bit_count(), lease.boundary)
        return positions, [covering(lease.run, position).slot(pool, position) for position in positions]

    def grow(self, lease: Lease, upto: int) -> list[dict[int, int]]:
        """Take room on the device for the pages up to `upto` that are worth keeping.

        Returns for each pool the new slots by position, for the engine to fill before it publishes. Where there is
        no room left the request goes on without keeping: its later pages are not offered any more.
        """
        assert lease.phase is Phase.READY and upto <= len(lease.keys) // KEY_BYTES
        fresh: list[dict[int, int]] = [{} for _ in self.pools]
        if upto <= lease.room:
            return fresh
        wanted = [
            self._worth_keeping(lease, pool, lease.room, upto) & ~lease.seen[pool] for pool in range(len(self.pools))
        ]
        for pool in self.shelves.chains:
            slots = self.shelves.reserve(pool, wanted[pool].bit_count())
            fresh[pool] = dict(zip(members(wanted[pool]), slots, strict=False))
            if len(slots) < wanted[pool].bit_count():
                # Nothing can rest on a page that is not kept, so this is as far as the request is kept at all.
                first_lost = next(at for at in members(wanted[pool]) if at not in fresh[pool])
                self.counters.uncached += upto - first_lost
                upto = min(upto, first_lost)
                lease.snapshots &= ones(first_lost + 1)
                lease.keys = lease.keys[: first_lost * KEY_BYTES]
        for pool in range(len(self.pools)):
            if pool not in self.shelves.chains:
                bits = wanted[pool] & ones(upto)
                fresh[pool] = dict(zip(members(bits), self.shelves.reserve(pool, bits.bit_count()), strict=False))
            for position in [at for at in fresh[pool] if at >= upto]:
                self.shelves.give_back(pool, fresh[pool].pop(position))
            lease.own[pool].update(fresh[pool])
        lease.room = upto
        return fresh

    def short(self, lease: Lease, upto: int) -> bool:
        """Whether `grow` would be short of room that is on its way: evictions that wait for their copy are started."""
        for pool, here in enumerate(lease.seen):
            keep = self._worth_keeping(lease, pool, lease.room, upto) & ~here
            wanted = keep.bit_count() - len(self.shelves.free[pool])
            if wanted > 0 and self.shelves.evict(pool, wanted) < wanted and self.backups.leaving():
                return True
        return False

    def keepable(self, lease: Lease) -> int:
        """The page up to which this request can be kept: all its full pages, unless room ran out on the way."""
        return len(lease.keys) // KEY_BYTES

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the filled pages before `upto` to the tree; what somebody else published meanwhile is given back."""
        assert lease.phase is Phase.READY and lease.done <= upto <= lease.room
        if upto == lease.done:
            return
        pages = [{at: slots.pop(at) for at in sorted(slots) if at < upto} for slots in lease.own]
        tail, end = self._insert(lease, Tier.DEVICE, pages)
        lease.done = upto
        if kept := min(upto, end):
            self._hold(lease, tail, 1 << kept - 1 | self._ahead(lease.seen))
            self._touch(tail, kept)
        for run, _ in upward(tail, span(0, end) & ~ones(min(lease.boundary, end))):
            run.uses = max(run.uses, 1)
            self.backups.owe(run)

    def close(self, lease: Lease) -> None:
        """End a request in whatever phase it is. Its published pages stay; what it still owned is free at once."""
        if lease.phase is Phase.CLOSED:
            return
        for pool, slots in enumerate(lease.own):
            for slot in slots.values():
                self.shelves.give_back(pool, slot)
            slots.clear()
        self._drop_landed(lease)
        self._hold(lease, lease.run, 0)
        lease.phase = Phase.CLOSED
        del self.leases[lease.number]
        self.shelves.forget(lease.root)

    def step(self, ended: Iterable[Ended], now: float) -> None:
        """Apply what ended, in the order given; then let patience run out and send new backups."""
        for end in ended:
            self._apply(end)
        for lease in [*self.leases.values()]:
            self._lose_patience(lease, now)
            if not lease.ops and lease.phase is Phase.PROBING:
                self._fetch(lease)
            elif not lease.ops and lease.phase is Phase.LOADING:
                self._load(lease)
        self.backups.keep_room()
        self.backups.send_owed()

    def flush(self, tiers: Sequence[Tier]) -> int:
        """Evict from memory tiers everything that nobody holds; returns how many pages went."""
        before = sum(self.shelves.evicted)
        for tier in tiers:
            self.shelves.shed(tier)
        return sum(self.shelves.evicted) - before

    # --- what is here

    def _limit(self, tokens: bytes) -> int:
        return max(0, len(tokens) // TOKEN_BYTES - 1) // self.config.page_tokens

    def _find(self, root: bytes, tokens: bytes) -> tuple[Run, list[Run], int]:
        """The deepest run that a prompt reaches, all runs on the way there, and how many of its pages they know."""
        top = self.shelves.root(root)
        path, known = walk(top, 0, tokens)
        return path[-1] if path else top, path, known

    def _present(self, path: list[Run], known: int) -> tuple[list[int], list[int]]:
        """For each pool the positions of a path that are on the device, and those in memory at all (and not bad)."""
        pools = len(self.pools)
        device, memory = [0] * pools, [0] * pools
        for run in path:
            for pool in range(pools):
                near = run.here[pool]
                far = run.here[pools + pool] & ~run.bad[pools + pool]
                device[pool] |= near << run.first
                memory[pool] |= (near | far) << run.first
        mask = ones(known)
        return [bits & mask for bits in device], [bits & mask for bits in memory]

    def _legal(self, present: list[int], lease: Lease) -> int:
        return boundaries.resume_at(present, self.lookbacks, lease.limit, self.grid)

    def _reserve(self, tier: Tier, need: list[int], room: list[int]) -> list[list[int]] | None:
        """A slot for each page needed of each pool, or None and nothing taken; `room` learns what could be had."""
        if any(bits.bit_count() > places for bits, places in zip(need, room, strict=True)):
            return None
        places = [self.shelves.place(tier, pool) for pool in range(len(self.pools))]
        taken = [self.shelves.reserve(place, bits.bit_count()) for place, bits in zip(places, need, strict=True)]
        if all(len(slots) == bits.bit_count() for slots, bits in zip(taken, need, strict=True)):
            return taken
        for pool, slots in enumerate(taken):
            room[pool] = len(slots)
            for slot in slots:
                self.shelves.give_back(places[pool], slot)
        return None

    def _footing(self, boundary: int, device: list[int]) -> int:
        """The positions to pin so that a boundary stays legal in memory.

        Pages rest on each other, so the last page of a chain pins all of it; and the last one on the device pins
        what the device has of it.
        """
        positions = span(max(0, boundary - 1), boundary)
        for pool, lookback in enumerate(self.lookbacks):
            if lookback is not None:
                positions |= needed(boundary, lookback)
            elif on_device := boundaries.leading(device[pool] & ones(boundary)):
                positions |= 1 << on_device - 1
        return positions

    def _ahead(self, device: list[int]) -> int:
        """The positions to pin so that the device keeps all that it has of a prompt's chains."""
        return boundaries.of(here - 1 for pool in self.shelves.chains if (here := boundaries.leading(device[pool])))

    def _hold(self, lease: Lease, run: Run, positions: int) -> None:
        """Exchange what a lease pins. It refers to the deepest run that it pins something in, which therefore stays."""
        self.shelves.pin(run, positions)
        self.shelves.unpin(lease.run, lease.held)
        lease.run = covering(run, deepest(positions)) if positions else self.shelves.root(lease.root)
        lease.held = positions

    def _touch(self, run: Run, boundary: int) -> None:
        """A prompt resumed at, or was published up to, a boundary: everything that was read there is fresh again."""
        self.shelves.touch(run, self._near(boundary))

    def _near(self, boundary: int) -> int:
        """The positions that windows and states read before a boundary."""
        reach = max((back for back in self.lookbacks if back is not None), default=1)
        return span(max(0, boundary - reach), boundary)

    def _count_use(self, run: Run, boundary: int) -> None:
        """A request resumes at a boundary: what it reads was used once more, and backups of it are worth new tries."""
        whole = self.config.write is WritePolicy.WRITE_THROUGH_SELECTIVE
        for each, _ in upward(run, ones(boundary) if whole else self._near(boundary)):
            each.uses += 1
            each.tries = 0
            each.asked = [0] * len(self.pools)
            self.backups.owe(each)

    # --- before a lease is ready

    def _worth_asking(self, lease: Lease, boundary: int, memory: list[int]) -> list[tuple[int, int]]:
        """The pages beyond a boundary that could make a deeper one legal and that memory does not have."""
        ask: list[tuple[int, int]] = []
        for pool, lookback in enumerate(self.lookbacks):
            want = 0
            for deeper in range((boundary // self.grid + 1) * self.grid, lease.limit + 1, self.grid):
                want |= needed(deeper, lookback)
                if lookback is None:
                    want = ones(lease.limit // self.grid * self.grid)
                    break
            ask.extend((pool, position) for position in members(want & ~memory[pool]))
        return ask

    def _not_stored(self, lease: Lease, pages: list[Moving]) -> None:
        """Storage says that it does not have these pages: where we thought that it had, they are to be stored again."""
        top = self.shelves.roots.get(lease.root)
        path, known = walk(top, 0, lease.tokens) if top else ([], 0)
        for page in pages:
            if page.position < known:
                run = covering(path[-1], page.position)
                run.stored[page.pool] &= ~(1 << page.position - run.first)
                self.backups.owe(run)

    def _fetch(self, lease: Lease) -> None:
        """Storage has answered: bring what the deepest boundary needs to the host, as far as there is room."""
        run, path, known = self._find(lease.root, lease.tokens)
        allowed, room = -1, [len(lease.tokens)] * len(self.pools)
        while True:
            device, memory = self._present(path, known)
            both = [near | far for near, far in zip(memory, lease.probed, strict=True)]
            boundary = deepest(self._legal(both, lease) & allowed)
            if boundary <= deepest(self._legal(memory, lease)):
                self._load(lease)
                return
            need = [needed(boundary, back) & ~near for back, near in zip(self.lookbacks, memory, strict=True)]
            # What is in memory of it must not go to make room for the rest.
            self._hold(lease, run, (self._footing(boundary, device) | self._ahead(memory)) & ones(known))
            taken = self._reserve(Tier.HOST, need, room)
            if taken is not None:
                break
            if self._put_off(lease):
                return
            allowed = ones(boundary)
        lease.phase = Phase.FETCHING
        pages = [
            Moving(pool, position, NOWHERE, slot)
            for pool, bits in enumerate(need)
            for position, slot in zip(members(bits), taken[pool], strict=True)
        ]
        # Shallow pages first: if patience runs out, what has arrived is a prefix.
        pages.sort(key=lambda page: page.position)
        for start in range(0, len(pages), self.config.batch_pages):
            batch = pages[start : start + self.config.batch_pages]
            self.copies.send(Op(FETCH, batch, lease), lease.key)

    def _put_off(self, lease: Lease) -> bool:
        """Whether a lease that found no room should try again in the next step, since evictions are under way."""
        lease.retries += 1
        return self.backups.leaving() and lease.retries <= ROOM_RETRIES

    def _land(self, lease: Lease) -> None:
        """The wait for storage is over: give the tree what has arrived, as deep as it reaches."""
        landed = [dict(slots) for slots in lease.landed]
        for slots in lease.landed:
            slots.clear()
        for slots in landed:
            for position in slots:
                lease.fetched |= 1 << position
        self._insert(lease, Tier.HOST, landed)
        self._load(lease)

    def _load(self, lease: Lease) -> None:
        """Bring to the device what the deepest boundary in memory needs, as far as there is room."""
        run, path, known = self._find(lease.root, lease.tokens)
        allowed, room = -1, [len(lease.tokens)] * len(self.pools)
        while True:
            device, memory = self._present(path, known)  # anew each time: making room may have cost a page of it
            boundary = deepest(self._legal(memory, lease) & allowed)
            need = [needed(boundary, back) & ~near for back, near in zip(self.lookbacks, device, strict=True)]
            self._hold(lease, run, self._footing(boundary, device))
            taken = self._reserve(Tier.DEVICE, need, room)
            if taken is not None:
                break
            if self._put_off(lease):
                lease.phase = Phase.LOADING
                return
            allowed = ones(boundary)
        pages = []
        for pool, bits in enumerate(need):
            for position, slot in zip(members(bits), taken[pool], strict=True):
                source = covering(run, position).slot(self._host(pool), position)
                pages.append(Moving(pool, position, source, slot))
                lease.loaded |= 1 << position
        if not pages:
            self._ready(lease, ones(boundary + 1))
            return
        lease.phase = Phase.LOADING
        pages.sort(key=lambda page: page.position)
        self.copies.send(Op(LOAD, pages, lease, run), lease.key)

    def _ready(self, lease: Lease, allowed: int) -> None:
        """The engine may start, at the deepest of the allowed boundaries that the device can serve."""
        run, path, known = self._find(lease.root, lease.tokens)
        device, _ = self._present(path, known)
        lease.boundary = deepest(self._legal(device, lease) & allowed)
        # Pages beyond the boundary that are here already need not be kept again, so they must not go meanwhile.
        self._hold(lease, run, self._footing(lease.boundary, device) | self._ahead(device))
        lease.seen = device
        lease.done = lease.room = lease.boundary
        lease.phase = Phase.READY

    def _lose_patience(self, lease: Lease, now: float) -> None:
        if not lease.claimed or now < lease.deadline:
            return
        if lease.phase is Phase.PROBING:
            lease.ops.clear()
            self._load(lease)
        elif lease.phase is Phase.FETCHING:
            lease.ops.clear()
            self._land(lease)

    def _drop_landed(self, lease: Lease) -> None:
        for pool, slots in enumerate(lease.landed):
            for slot in slots.values():
                self.shelves.give_back(self._host(pool), slot)
            slots.clear()

    # --- what is worth keeping

    def _plan_snapshots(self, lease: Lease) -> None:
        """Boundaries at which windows and recurrent states are kept: where this prompt ends for a continuation, where
        it can be resumed if it comes again, where it leaves a known prompt, and every so many tokens if asked."""
        pages = len(lease.keys) // KEY_BYTES
        marks = {pages, lease.limit, min(lease.known, pages)}
        if self.config.snapshot_every:
            every = max(1, self.config.snapshot_every // self.config.page_tokens)
            marks.update(range(every, pages + 1, every))
        lease.snapshots = boundaries.of({mark // self.grid * self.grid for mark in marks} - {0})

    def _worth_keeping(self, lease: Lease, pool: int, start: int, stop: int) -> int:
        """The positions in [start, stop) of a pool that some kept boundary needs."""
        lookback = self.lookbacks[pool]
        if lookback is None:
            return span(start, stop)
        keep = 0
        for boundary in members(lease.snapshots):
            keep |= needed(boundary, lookback)
        return keep & span(start, stop)

    # --- the tree gains pages

    def _insert(self, lease: Lease, tier: Tier, pages: list[dict[int, int]]) -> tuple[Run, int]:
        """Give filled slots to the tree, making positions for them as far as every chain reaches without a gap.

        What does not fit in (there already, or with nothing to rest on) goes back to the free list. Returns the
        deepest run of the prompt and how many of its pages the tree now knows.
        """
        tail, _, known = self._find(lease.root, lease.tokens)
        end = known
        if self.shelves.chains:
            while all(end in pages[pool] for pool in self.shelves.chains):
                end += 1
        else:
            end = max([known, *(position + 1 for slots in pages for position in slots)])
        if end > known:
            tail = self._lengthen(tail, known, end, lease)
        for pool, slots in enumerate(pages):
            place = self.shelves.place(tier, pool)
            for position, slot in slots.items():
                if position >= end or not self.backups.settle(covering(tail, position), place, position, slot):
                    self.counters.duplicates += 1
                    self.shelves.give_back(place, slot)
                elif tier is Tier.HOST:
                    run = covering(tail, position)
                    run.stored[pool] |= 1 << position - run.first
        return tail, end

    def _lengthen(self, tail: Run, known: int, end: int, lease: Lease) -> Run:
        """Make positions [known, end) of a prompt below the run where it left the tree."""
        tokens, keys = (
            lease.tokens[known * self.width : end * self.width],
            lease.keys[known * KEY_BYTES : end * KEY_BYTES],
        )
        if known < tail.end:
            owing, tail = tail in self.backups.owing, self.shelves.split(tail, known)
            if owing:
                self.backups.owe(tail)
        if tail.parent is not None and not tail.children:
            tail.append(tokens, keys)
            return tail
        child = Run(tail, known, tokens, keys, len(self.pools), self.config.page_tokens)
        tail.children[tokens[: self.width]] = child
        return child

    def _host(self, pool: int) -> int:
        return len(self.pools) + pool

    # --- what has ended

    def _apply(self, end: Ended) -> None:
        op = self.copies.end(end.op)
        lease = op.lease
        waited = lease is not None and end.op in lease.ops
        if lease is not None:
            lease.ops.discard(end.op)
        fates = [Fate(page, bool(end.good >> i & 1), bool(end.bad >> i & 1)) for i, page in enumerate(op.pages)]
        if op.edge == PROBE:
            assert lease is not None
            for page, good, _ in fates:
                lease.probed[page.pool] |= good << page.position
            self._not_stored(lease, [page for page, good, _ in fates if not good])
            if waited and lease.phase is Phase.PROBING:
                self._fetch(lease)
        elif op.edge == FETCH:
            assert lease is not None
            self._fetched(lease, fates, waited)
        elif op.edge == LOAD:
            assert lease is not None and op.run is not None
            self._loaded(op.run, fates)
            if waited and lease.phase is Phase.LOADING and not lease.ops:
                self._ready(lease, ones(lease.limit + 1))
        else:
            assert op.run is not None
            self.backups.ended(op, op.run, fates)

    def _fetched(self, lease: Lease, fates: list[Fate], waited: bool) -> None:
        waited = waited and lease.phase is Phase.FETCHING
        for page, good, bad in fates:
            self.counters.fetched += good
            self.counters.bad_storage += bad
            self.counters.failed += not good and not bad
            if good and waited:
                lease.landed[page.pool][page.position] = page.target
            else:
                self.counters.late += good
                self.shelves.give_back(self._host(page.pool), page.target)
        if waited and not lease.ops:
            self._land(lease)

    def _loaded(self, tail: Run, fates: list[Fate]) -> None:
        for page, good, bad in fates:
            run = covering(tail, page.position)
            local = page.position - run.first
            self.counters.loaded += good
            self.counters.bad_host += bad
            self.counters.failed += not good and not bad
            if bad and run.here[self._host(page.pool)] >> local & 1:
                run.bad[self._host(page.pool)] |= 1 << local
            if not good or not self.backups.settle(run, page.pool, page.position, page.target):
                self.shelves.give_back(page.pool, page.target)
