"""The simulator of the core: ranks, arenas, lanes, a storage and a clock, driven by a test or by a seed.

After every input it audits the invariants, counts slots and compares ranks. A shadow model that knows the true bytes of
every page checks the content of every slot, copy and page that a request reads. It derives keys from the tokens alone,
and reads the core only from outside.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import inf
from typing import TypeVar

from kvarve.boundaries import union
from kvarve.core.audit import audit
from kvarve.core.cache import Core
from kvarve.core.copies import FETCH, LOAD, STORE, Moving, Op
from kvarve.core.effects import Copy, Ended, Event, Hurry, Transfer, Verified, agreed
from kvarve.core.lease import Lease, Phase
from kvarve.core.outside import core_for
from kvarve.core.policies import WAIT_COMPLETE, Patience
from kvarve.core.prefetch import ROOM_RETRIES
from kvarve.core.settings import CoreConfig
from kvarve.core.tree import Run, covering, walk
from kvarve.keys import KEY_BYTES, TOKEN_BYTES, extend, pack, root_key
from kvarve.model import Tier
from kvarve.testing.world.dirty import Dirty
from kvarve.testing.world.looks import differ, runs
from kvarve.testing.world.scenes import configure, draw
from kvarve.testing.world.transfers import BROKEN, FREE, ROTTEN, SimulatedTransfers, Store, empty

T = TypeVar("T")
TURNS = (
    2 * ROOM_RETRIES + 12
)  # steps in which a lease that waits for no copy gets ready: probe, fetch, room, load, again


class World:
    """One core per rank, and everything that they talk to. Every method checks everything afterwards."""

    def __init__(self, seed: int = 0, config: CoreConfig | None = None, ranks: int = 1) -> None:
        """Without a `config` the settings are drawn from the seed."""
        config = config or configure(draw(random.Random(seed)))
        self.cores = [core_for(config) for _ in range(ranks)]
        self.core = self.cores[0]
        self.transfers = [self._transfers(rank, ranks) for rank in range(ranks)]
        self.storage = Store()
        self.attached = self.core.copies.storage
        self.flying: dict[int, Transfer] = {}  # in flight, on at least one rank
        self.lost: dict[int, Transfer] = {}  # will never end by themselves
        self.verified: dict[int, Verified] = {}  # loads whose pages are being copied after their check
        self.ended: list[Ended] = []  # the latest ends given to the core
        self.leases: list[Lease] = []  # those of the first rank
        self.log: list[Transfer] = []
        self.urgent: set[int] = set()  # copies for requests that have been claimed, then or since
        self.now = 0.0
        self.steps = 0  # inputs, each followed by all checks
        self.hits = [0, 0, 0]  # pages that leases resumed from, by the farthest tier they came from
        self.seen: Counter[str] = Counter()  # counts by kind of event
        self._twins: dict[int, list[Lease]] = {}  # by lease: the same on all ranks
        self._stores: dict[int, Store] = {}  # by copy: the storage that it was sent to
        self._carried: dict[int, list[tuple[int, int] | None]] = {}  # by copy: its outcome on each rank
        self._truth: dict[bytes, tuple[bytes, bytes]] = {}  # by key: the key before it, and the page's tokens
        self._names: dict[int, tuple[Run, bytes, bytes, bytes]] = {}  # by run: its tokens, its keys and those above
        self._stored: dict[int, tuple[Run, bytes, list[int], Store]] = {}  # runs whose pages have been in storage
        self._prompts: dict[int, list[bytes]] = {}  # by lease: the keys of its pages
        self._handed: dict[int, list[tuple[list[int], list[bytes]]]] = {}  # by lease and pool: slots, what is in them
        self._grown: dict[int, list[dict[int, int]]] = {}  # by lease and pool: room that is not published yet
        self._stalled: Counter[int] = Counter()  # by lease: steps in which no copy was in flight
        self._failures, self._rest_until = 0, 0.0  # stores that failed in a row, and the end of the back-off
        self._void_until = 0  # copies up to this one were for a detached storage, or one that was down
        self._paused = False
        self._swept = [slots[:0] for slots in self.core.slot_pools.free]
        self._dirty, self._confirmed = Dirty(self.core), 0
        self._check()

    def _transfers(self, rank: int, ranks: int) -> SimulatedTransfers:
        return SimulatedTransfers(self.core.slot_pools, rank, ranks)

    def _outside(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """By pool, which of these pages an engine has on a device of its own."""
        return ()

    # --- calls of the runtime

    def open(
        self,
        tokens: Sequence[int],
        salt: str = "",
        patience: Patience = WAIT_COMPLETE,
        read: bool = True,
        priority: int = 0,
    ) -> Lease:
        return self.open_packed(pack(tokens), salt, patience, read, priority)

    def open_packed(
        self,
        tokens: bytes,
        salt: str,
        patience: Patience = WAIT_COMPLETE,
        read: bool = True,
        priority: int = 0,
        expected: tuple[int, float] = (0, 0.0),
    ) -> Lease:
        root = root_key(b"world", salt)
        keys = self._learn(root, tokens)
        outside = self._outside(keys)
        hit = self.core.lookup(root, tokens, outside)  # on one rank only: if it changed state, the ranks would differ
        right = self._expected_hit(keys, len(tokens) // TOKEN_BYTES, outside)
        assert (hit.device, hit.memory, hit.by_pool) == right, "a hit is what a brute force finds"
        rest = self.now, patience, read, priority, outside, expected
        twins = [core.open(root, tokens, *rest) for core in self.cores]
        lease = twins[0]
        self._twins[lease.number] = twins
        self._prompts[lease.number] = keys
        self._grown[lease.number] = [{} for _ in self.core.pools]
        self.leases.append(lease)
        self._check()
        return lease

    def start(self, tokens: Sequence[int], salt: str = "", read: bool = True) -> Lease:
        """A request that is claimed at once."""
        lease = self.open(tokens, salt, read=read)
        self.claim(lease)
        return lease

    def claim(self, lease: Lease) -> bool:
        waited = not lease.ready
        ready = self._all(lease, lambda core, twin: core.claim(twin, self.now))
        self._check()
        if waited and ready and lease.reads:
            hit = self._expected_hit(self._prompts[lease.number], len(lease.tokens) // TOKEN_BYTES)
            assert lease.boundary == hit[0], (
                "a lease that is ready at once resumes from the deepest boundary on the device"
            )
        return ready

    def ready(self, lease: Lease) -> bool:
        """Claim it, and end everything in flight."""
        self.claim(lease)
        self.settle()
        return self.claim(lease)

    def resumed(self, lease: Lease) -> None:
        self._all(lease, lambda core, twin: core.resumed(twin))
        self._check()

    def extend(self, lease: Lease, tokens: Sequence[int]) -> None:
        self.extend_packed(lease, pack(tokens))

    def extend_packed(self, lease: Lease, tokens: bytes) -> None:
        self._prompts[lease.number] = self._learn(lease.root, lease.tokens + tokens)
        self._all(lease, lambda core, twin: core.extend(twin, tokens))
        self._check()

    def reserve(self, lease: Lease, upto: int) -> bool:
        """Slots to compute in, for partial pages too; checks the content of the lease's pages."""
        reserved = self._all(lease, lambda core, twin: core.reserve(twin, upto))
        for pool in self.core.slot_pools.chains:
            for position, slot in lease.own[pool].items():
                if position not in self._grown[lease.number][pool]:
                    assert reserved, "all or nothing"
                    self._fill(pool, slot, empty(lease.number))
                    self._grown[lease.number][pool][position] = slot
            slots = self.core.block_table(lease, pool, 0)
            assert not reserved or len(slots) >= upto, "every page has its place"
            for position, slot in enumerate(slots[: lease.done]):
                for transfers in self.transfers:
                    assert transfers.arenas[pool][slot] == self._prompts[lease.number][position], (
                        "and that page lies there"
                    )
        self._check()
        return reserved

    def mark(self, lease: Lease, boundary: int) -> bool:
        marked = self._all(lease, lambda core, twin: core.mark(twin, boundary))
        assert not marked or lease.done < boundary <= lease.pages, "what is to be kept is still to come"
        self._check()
        return marked

    def grow(self, lease: Lease, upto: int) -> list[dict[int, int]]:
        start = lease.grown
        fresh = self._all(lease, lambda core, twin: core.grow(twin, upto))
        for pool, slots in enumerate(fresh):
            for position, slot in slots.items():
                assert start <= position < lease.grown, "room is where it was asked for"
                self._fill(pool, slot, empty(lease.number))
            self._grown[lease.number][pool].update(slots)
        self._check()
        return fresh

    def short(self, lease: Lease, upto: int) -> bool:
        short = self._all(lease, lambda core, twin: core.short(twin, upto))
        self._check()
        return short

    def publish(self, lease: Lease, upto: int) -> None:
        keys = self._prompts[lease.number]
        for pool, slots in enumerate(self._grown[lease.number]):
            for position in [position for position in slots if position < upto]:
                slot = slots.pop(position)
                for transfers in self.transfers:
                    assert transfers.arenas[pool][slot] == empty(lease.number), "room is ours until published"
                self._fill(pool, slot, keys[position])
        self._all(lease, lambda core, twin: core.publish(twin, upto))
        self._check()

    def close(self, lease: Lease) -> None:
        self.seen[f"closed while {lease.phase.value}"] += 1
        self.seen["closed between grow and publish"] += any(self._grown[lease.number])
        if lease.ready:
            self.hits = [had + more for had, more in zip(self.hits, lease.from_tiers(), strict=True)]
        self._all(lease, lambda core, twin: core.close(twin))
        self.leases.remove(lease)
        for notes in (self._twins, self._prompts, self._handed, self._grown, self._stalled):
            notes.pop(lease.number, None)
        self._check()

    def flush(self, *tiers: Tier) -> int:
        self.seen["flushed with copies in flight"] += any(isinstance(each, Copy) for each in self.flying.values())
        gone = self._each(lambda core: core.flush(tiers))
        self._check()
        return gone

    def attach(self, store: Store | None = None, back_up: bool = False) -> None:
        """Attach a known storage or an empty one; or the one that was down is up again."""
        again = self.core.backups.down and store is self.storage
        self.storage, self.attached, self._void_until = store or Store(), True, self.core.copies.sent
        self._failures, self._rest_until = 0, self.now
        for core in self.cores:
            core.attach(back_up, again)
        self._dirty.begin_anew(back_up or again)
        self._check()

    def detach(self, down: bool = False) -> None:
        """Detach the storage, whatever is in flight; or (`down`) it stops answering."""
        self.attached, self._void_until = False, self.core.copies.sent
        self._failures, self._rest_until = 0, self.now
        for core in self.cores:
            core.detach(down)
        if not down:
            self._dirty.begin_anew(back_up=False)
        self._check()

    def retry(self) -> None:
        """End the back-off of stores."""
        self.seen["tried at once"] += self._failures > 0
        self._rest_until = self.now
        for core in self.cores:
            core.retry()
        self._check()

    def step(self, events: Sequence[Event] = (), later_s: float = 0.0) -> None:
        self.now += later_s
        if len(self.cores) > 1:  # as ranks/agreement.py has it
            unique = {(event.op, type(event)): event for event in events}.values()
            events = sorted(unique, key=lambda event: (event.op, isinstance(event, Ended)))
        ended = [event for event in events if isinstance(event, Ended)]
        self.ended = [*self.ended, *[end for end in ended if end.op in self.core.copies.ops]][-40:]
        for end in ended:
            self._note_failure(end)
            op = self.core.copies.ops.get(end.op)
            if op is not None and op.edge == STORE:
                self._confirmed += end.good.bit_count()
            elif op is not None and op.edge == FETCH:  # shows that a page in memory is in storage too
                self._confirmed += sum(end.good >> i & self._resident(op, page) for i, page in enumerate(op.pages))
        for core in self.cores:
            core.step(events, self.now)
        self._check()
        self._check_waiting()
        if self._paused != self.core.governor.paused:
            self._paused = not self._paused
            self.seen["storing paused" if self._paused else "storing went on"] += 1

    def _resident(self, op: Op, page: Moving) -> bool:
        """Whether the tree has a page of a fetch in memory."""
        assert op.lease is not None
        root = self.core.slot_pools.roots.get(op.lease.root)
        passed, known = walk(root, op.lease.tokens) if root is not None else ([], 0)
        if page.position >= known:
            return False
        run = covering(passed[-1], page.position)
        here = union(run.here[page.pool :: len(self.core.pools)])
        return bool(here >> page.position - run.first & 1)

    def _note_failure(self, end: Ended) -> None:
        """The shadow's back-off: after a store that lost pages, doubling each time."""
        op = self.core.copies.ops.get(end.op)
        if op is None or op.edge != (Tier.HOST, Tier.STORAGE) or op.void:
            return
        told = end.good | end.bad
        if any(not told >> i & 1 for i in range(len(op.pages))):
            self.seen["stores rested"] += 1
            if self.now >= self._rest_until:
                self._rest_until = self.now + min(30.0, 0.1 * 2.0**self._failures)
                self._failures += 1
        elif end.good:
            self._failures, self._rest_until = 0, self.now

    # --- lanes and storage

    def end(self, op: int, lost: int = 0, rotten: int = 0, rank: int = -1) -> Ended:
        """Perform one effect on all ranks that have not done so, and agree on the outcome.

        Bit i of `lost`: page i does not arrive; of `rotten`: its source is corrupted; on one rank, or on all.
        """
        if op in self.verified:
            return self._copied(op, self.flying.pop(op))
        for each in range(len(self.transfers)):
            if self._carried[op][each] is None:
                self.carry(op, each, lost if rank in (-1, each) else 0, rotten if rank in (-1, each) else 0)
        effect = self.flying.pop(op)
        del self._stores[op]
        end = agreed([Ended(op, *director) for director in self._carried.pop(op) if director is not None])
        self.seen["torn"] += isinstance(effect, Copy) and end.good not in (0, (1 << len(effect.pages)) - 1)
        return end

    def loads(self) -> list[int]:
        """The loads in flight that no rank has begun with."""
        return [
            op
            for op, effect in self.flying.items()
            if isinstance(effect, Copy)
            and (effect.source, effect.target) == LOAD
            and op not in self.verified
            and not any(self._carried[op])
        ]

    def verify(self, op: int, rotten: int = 0, rank: int = -1) -> Verified:
        """Check the pages of one of the `loads` on all ranks, and begin to copy them."""
        effect = self.flying[op]
        assert isinstance(effect, Copy)
        decays = [rotten if rank in (-1, each) else 0 for each in range(len(self.transfers))]
        told = [transfers.verify(effect, decay) for transfers, decay in zip(self.transfers, decays, strict=True)]
        self.verified[op] = agreed([Verified(op, *each) for each in told])
        self.seen["verified"] += 1
        return self.verified[op]

    def _copied(self, op: int, effect: Transfer) -> Ended:
        """A verified load has been copied."""
        told = self.verified.pop(op)
        assert isinstance(effect, Copy)
        for transfers in self.transfers:
            transfers.copied(effect, told.good)
        del self._stores[op], self._carried[op]
        return Ended(op, told.good, told.bad)

    def carry(self, op: int, rank: int, lost: int = 0, rotten: int = 0) -> None:
        """Perform one effect on one rank only, so it does not end yet."""
        if self._carried[op][rank] is None and op not in self.verified:
            effect = self.flying[op]
            self._carried[op][rank] = self.transfers[rank].carry(effect, self._stores[op], lost, rotten)

    def lose(self, op: int) -> None:
        """This effect does not end until the lane gives it up, however far it got."""
        self.lost[op] = self.flying.pop(op)
        self.seen["lost"] += 1

    def give_up(self, op: int) -> Ended:
        """The lane ends a lost effect as failed."""
        effect = self.lost.pop(op)
        if op in self.verified:  # a copy to the device that has begun cannot be given up
            return self._copied(op, effect)
        del self._stores[op], self._carried[op]
        if isinstance(effect, Copy) and effect.target is not Tier.STORAGE:
            for page in effect.pages:
                for transfers in self.transfers:
                    transfers.arena(effect.target, page.pool)[page.target] = BROKEN
        return Ended(op, 0)

    def rot(self, tier: Tier, position: int, tokens: Sequence[int], pool: int = 0, salt: str = "") -> None:
        """Corrupt one resident page of a prompt silently, in the host or in storage."""
        key = self._key(tokens, position, salt)
        if tier is Tier.STORAGE:
            assert (key, pool, 0) in self.storage.objects
            self.storage.objects[key, pool, 0] = ROTTEN
        else:
            arena = self.transfers[0].arena(tier, pool)
            arena[arena.index(key)] = ROTTEN

    def forget(self, position: int, tokens: Sequence[int], pool: int = 0, salt: str = "") -> None:
        """Let the storage lose one page of a prompt."""
        del self.storage.objects[self._key(tokens, position, salt), pool, 0]

    def begin_stock(self, tokens: bytes, salt: str = "") -> None:
        """Another server begins to store a prompt's pages."""
        for key in self._learn(root_key(b"world", salt), tokens):
            for pool in range(len(self.core.pools)):
                self.storage.coming.update(transfers.name(key, pool) for transfers in self.transfers)

    def stock(self, tokens: bytes, salt: str = "", missing: int = 0) -> None:
        """Another server stores a prompt's pages, without some of them (bits)."""
        for position, key in enumerate(self._learn(root_key(b"world", salt), tokens)):
            for pool in range(len(self.core.pools) if not missing >> position & 1 else 0):
                for transfers in self.transfers:
                    name = transfers.name(key, pool)
                    self.storage.objects.setdefault(name, key)
                    self.storage.ever.add(name)

    def settle(self, lost: bool = False) -> None:
        """End everything in flight, well or badly, until nothing new is sent."""
        for _ in range(400):
            later_s = 0.0 if self.flying else 0.25  # stores may back off
            self.step([self.end(op, lost=-1 if lost else 0) for op in [*self.flying]], later_s)
            if not self.flying and (self.core.idle() or self.lost):
                return
        raise AssertionError("the core never comes to rest")

    # --- whole requests

    def request(
        self, tokens: Sequence[int], salt: str = "", read: bool = True, chunks: int = 1, rest: bool = True
    ) -> Lease:
        """A request from open to close without faults, computed and published in `chunks` parts."""
        lease = self.open(tokens, salt, read=read)
        self.compute(lease, chunks, rest)
        return lease

    def compute(self, lease: Lease, chunks: int = 1, rest: bool = True) -> None:
        """The rest of a request's life; with `rest`, everything in flight ends before and after it."""
        if rest:
            self.settle()
        self.claim(lease)
        for _ in range(TURNS):
            if not lease.ready:  # its own copies end; if it waits for slots, those of others
                mine = [op for op in sorted(lease.ops) if op in self.flying]
                if mine and mine[0] % 2 and mine[0] in self.loads():
                    self.step([self.verify(mine[0])])
                    continue
                waits = self.lost or lease.ask_again < inf
                self.step([self.end(op) for op in mine or [*self.flying]], later_s=1.0 if waits else 0.0)
                self.claim(lease)
        assert lease.ready, "probe, fetch, room, load: no request waits for more"
        grid = self.core.grid
        start, pages = lease.done, self.core.keepable(lease) // grid * grid
        for chunk in range(1, chunks + 1):
            upto = min((start + (pages - start) * chunk // chunks) // grid * grid, self.core.keepable(lease))
            self.grow(lease, max(lease.grown, upto))
            self.publish(lease, max(lease.done, min(upto, lease.grown // grid * grid)))
        self.close(lease)
        if rest:
            self.settle()

    def hit(self, tokens: Sequence[int], salt: str = "") -> tuple[int, int]:
        found = self.core.lookup(root_key(b"world", salt), pack(tokens))
        return found.device, found.memory

    def resident(self, tier: Tier, pool: int = 0) -> int:
        """How many pages of a pool the tree has in a tier."""
        place = self.core.slot_pools.place(tier, pool)
        return sum(run.here[place].bit_count() for run in runs(self.core))

    def everybody(self) -> None:
        """Claim all leases and end all copies that are not lost; then every lease becomes ready in bounded time."""
        for lease in self.leases:
            self.claim(lease)
        self.settle()
        for _ in range(TURNS):
            self.step([self.end(op) for op in [*self.flying]], later_s=10.0)
        waiting = [lease for lease in self.leases if not lease.ready and lease.patience.base_s < inf]
        assert not waiting, f"lease {waiting[0].number} is still {waiting[0].phase.value}"
        self.step([self.give_up(op) for op in [*self.lost]])
        self.settle()
        assert all(lease.ready for lease in self.leases), "when all copies have ended, every lease is ready"

    def drain(self) -> None:
        """The end of a life: close all leases, end everything in flight; nothing may be left behind."""
        for lease in [*self.leases]:
            self.close(lease)
        self.step([self.give_up(op) for op in [*self.lost]])
        self.settle()
        assert not self.core.copies.ops and not self.core.leases and self.core.idle()
        assert not any(run.pinned() for run in runs(self.core)), "without leases and copies nothing is pinned"
        for _ in range(10 + 8 * sum(self.core.slot_pools.capacity)):  # a small tier takes few at a time
            self.flush(Tier.DEVICE, Tier.HOST)
            self.settle()
            if not self.core.slot_pools.roots:
                break
        free = [len(slots) for slots in self.core.slot_pools.free]
        assert free == self.core.slot_pools.capacity, "after a flush everything is free"
        assert not self.core.slot_pools.roots, "after a flush nothing is remembered"

    def happened(self) -> Counter[str]:
        """The core's counters, and hit pages by tier."""
        counted = Counter({f"counted {what}": times for what, times in vars(self.core.counters).items()})
        counted.update({f"hit pages from {tier.name.lower()}": self.hits[tier] for tier in Tier})
        return counted

    # --- all ranks at once

    def _each(self, call: Callable[[Core], T]) -> T:
        answers = [call(core) for core in self.cores]
        assert all(answer == answers[0] for answer in answers), "every rank gives the same answer"
        return answers[0]

    def _all(self, lease: Lease, call: Callable[[Core, Lease], T]) -> T:
        twins = iter(self._twins[lease.number])
        return self._each(lambda core: call(core, next(twins)))

    def _fill(self, pool: int, slot: int, content: bytes) -> None:
        for transfers in self.transfers:
            transfers.arenas[pool][slot] = content

    # --- the shadow model

    def _learn(self, root: bytes, tokens: bytes) -> list[bytes]:
        """The keys of a prompt's pages; records the tokens of each."""
        page_tokens = self.core.config.page_tokens
        keys = extend(root, tokens, page_tokens)
        width = page_tokens * TOKEN_BYTES
        for at in range(len(keys)):
            self._truth[keys[at]] = (keys[at - 1] if at else root, tokens[at * width : (at + 1) * width])
        return keys

    def _key(self, tokens: Sequence[int], position: int, salt: str) -> bytes:
        return extend(root_key(b"world", salt), pack(tokens), self.core.config.page_tokens)[position]

    def _expected_hit(
        self, keys: list[bytes], tokens: int, outside: Sequence[int] = ()
    ) -> tuple[int, int, tuple[int, ...]]:
        """By brute force: the deepest boundary from the device, from memory, and in memory for each pool."""
        pools = range(len(self.core.pools))
        wanted = {key: position for position, key in enumerate(keys)}
        near: list[set[int]] = [set() for _ in pools]
        for pool, pages in enumerate(outside):
            near[pool] = {position for position in range(len(keys)) if pages >> position & 1}
        memory: list[set[int]] = [{*pages} for pages in near]
        ours, host = Tier.DEVICE in self.core.config.slots, self.core.slot_pools.place(Tier.HOST, 0)
        for run in runs(self.core):
            names = self._keys_of(run)
            for local in range(len(run.tokens) // run.width):
                position = wanted.get(names[local * KEY_BYTES : (local + 1) * KEY_BYTES])
                if position is not None:
                    for pool in pools:
                        if ours and run.here[pool] >> local & 1:
                            near[pool].add(position)
                        far = run.here[host + pool] & ~run.bad[host + pool]
                        if far >> local & 1 or position in near[pool]:
                            memory[pool].add(position)

        def deepest(present: list[set[int]], those: Sequence[int]) -> int:
            for boundary in range(max(0, tokens - 1) // self.core.config.page_tokens, 0, -1):
                capacity = self.core.config.slots.get(Tier.DEVICE, ())  # an engine limits its own prompts
                reads = [len(self._reads(pool, boundary)) for pool in pools]
                fits = all(pages <= slots for pages, slots in zip(reads, capacity, strict=False))
                if (
                    boundary % self.core.grid == 0
                    and fits
                    and all(position in present[pool] for pool in those for position in self._reads(pool, boundary))
                ):
                    return boundary
            return 0

        return deepest(near, pools), deepest(memory, pools), tuple(deepest(memory, [pool]) for pool in pools)

    def _reads(self, pool: int, boundary: int) -> range:
        """The positions that a boundary needs of a pool."""
        lookback = self.core.pools[pool].lookback
        return range(0 if lookback is None else max(0, boundary - lookback), boundary)

    # --- checks after every input

    def _check(self) -> None:
        self.steps += 1
        self._take()
        self._sweep()
        audit(self.core)
        for rank, core in enumerate(self.cores[1:], 1):
            assert not (what := differ(self.core, core)), f"rank {rank} differs from rank 0: {what}"
        here = [*runs(self.core)]
        self._count(here)
        for run in here:
            self._check_names(run)
            self._check_stored(run)
        self._dirty.look(here, self._confirmed)
        self._confirmed = 0
        for lease in self.leases:
            if lease.phase is Phase.READY and lease.number not in self._handed:
                self._hand(lease)
        for rank, transfers in enumerate(self.transfers):
            if rank == 0 or transfers.arenas != self.transfers[0].arenas:
                for run in here:
                    self._check_bytes(run, transfers)
                for lease in self.leases:
                    if lease.number in self._handed:
                        self._check_handed(lease, transfers)

    def _take(self) -> None:
        effects = self._each(lambda core: core.take())
        for effect in effects:
            if isinstance(effect, Hurry):
                assert effect.op in self.flying or effect.op in self.lost, "only a copy in flight becomes urgent"
                self.urgent.add(effect.op)
                continue
            assert effect.pages, "an effect is about something"
            if isinstance(effect, Copy) and effect.source is Tier.STORAGE:
                names = [transfers.name(page.key, page.pool) for transfers in self.transfers for page in effect.pages]
                assert self.storage.ever.issuperset(names), "nothing is fetched that storage never had"
            assert self.attached or (isinstance(effect, Copy) and Tier.STORAGE not in (effect.source, effect.target)), (
                "without a storage nothing is asked of it"
            )
            if isinstance(effect, Copy) and effect.target is Tier.STORAGE and self._failures:
                assert self.now >= self._rest_until, "stores rest when one has failed"
                others = [each for op, each in (self.flying | self.lost).items() if op > self._void_until]
                tried = [each for each in others if isinstance(each, Copy) and each.target is Tier.STORAGE]
                assert not tried, "and then one tries alone"
            assert effect.op not in self.flying and effect.op not in self.lost, "every copy has a number of its own"
            if isinstance(effect, Copy) and effect.urgent:
                self.urgent.add(effect.op)
            self.flying[effect.op] = effect
            self._stores[effect.op] = self.storage
            self._carried[effect.op] = [None] * len(self.transfers)
            for transfers in self.transfers:
                transfers.start(effect)
        self.log += [each for each in effects if not isinstance(each, Hurry)]

    def _sweep(self) -> None:
        """Mark the contents of free slots."""
        for place, slots in enumerate(self.core.slot_pools.free):
            if slots != self._swept[place]:
                self._swept[place] = slots[:]
                for transfers in self.transfers:
                    arena = transfers.arenas[place]
                    for slot in slots:
                        arena[slot] = FREE

    def _count(self, here: list[Run]) -> None:
        """Slots are conserved: free, in the tree, a request's, or a copy's target."""
        pools, slot_pools = len(self.core.pools), self.core.slot_pools
        counts = [len(slots) for slots in slot_pools.free]
        for run in here:
            for place, bits in enumerate(run.here):
                counts[place] += bits.bit_count()
        for lease in self.leases:
            for pool in range(pools):
                counts[pool] += len(self._grown[lease.number][pool])
                counts[slot_pools.place(Tier.HOST, pool)] += len(lease.landed[pool])
        for effects in (self.flying, self.lost):
            for effect in effects.values():
                if isinstance(effect, Copy) and effect.target in slot_pools.memory:
                    given = self.core.copies.ops[effect.op].given
                    for i, page in enumerate(effect.pages):
                        counts[slot_pools.place(effect.target, page.pool)] += not given >> i & 1
        assert counts == slot_pools.capacity, f"slots are conserved: {counts} of {slot_pools.capacity}"

    def _keys_of(self, run: Run) -> bytes:
        """A run's keys as the shadow derives them, whether the core has computed them or not."""
        if run.parent is None:
            return next(name for name, root in self.core.slot_pools.roots.items() if root is run)
        above, seen = self._keys_of(run.parent), self._names.get(id(run))
        if seen and seen[0] is run and seen[1] is run.tokens and seen[3] is above:
            return seen[2]
        before, keys = above[-KEY_BYTES:], []
        for local in range(len(run.tokens) // run.width):
            page = run.tokens[local * run.width : (local + 1) * run.width]
            before, first = sha256(before + page).digest(), before
            assert self._truth.get(before) == (first, page), "what is in the tree stood in a prompt"
            keys.append(before)
        self._names[id(run)] = (run, run.tokens, b"".join(keys), above)
        return self._names[id(run)][2]

    def _check_names(self, run: Run) -> None:
        """The keys that the core has computed of a run are those of its tokens and all before them."""
        assert run.parent is None or self._keys_of(run).startswith(run.named), "a page's key is that of its tokens"

    def _check_stored(self, run: Run) -> None:
        """Pages that the core believes stored have been in the storage that is attached now."""
        if not any(run.stored) or not self.attached:
            return
        seen, names = self._stored.get(id(run)), self._keys_of(run)
        if seen and seen[0] is run and seen[1] is names and seen[2] == run.stored and seen[3] is self.storage:
            return
        for pool, stored in enumerate(run.stored):
            for local in range(stored.bit_length()):
                if stored >> local & 1:
                    key = names[local * KEY_BYTES : (local + 1) * KEY_BYTES]
                    there = all(transfers.name(key, pool) in self.storage.ever for transfers in self.transfers)
                    assert there, "what is known to be stored has been stored"
        self._stored[id(run)] = (run, names, [*run.stored], self.storage)

    def _check_bytes(self, run: Run, transfers: SimulatedTransfers) -> None:
        for place, here in enumerate(run.here):
            table = run.slots[place]
            if not here or table is None:
                continue
            arena = transfers.arenas[place]
            names = self._keys_of(run)
            if b"".join([arena[slot] for slot in table if slot >= 0]) == names:
                continue
            host = self.core.slot_pools.tier(place) is Tier.HOST
            for local in range(here.bit_length()):
                if here >> local & 1:
                    content = arena[table[local]]
                    right = names[local * KEY_BYTES : (local + 1) * KEY_BYTES]
                    assert content == right or (host and content == ROTTEN), f"a page is what it says, not {content!r}"

    def _hand(self, lease: Lease) -> None:
        """A lease has become ready: check that it resumes from exactly its own prompt's pages."""
        keys = self._prompts[lease.number]
        assert lease.boundary % self.core.grid == 0
        assert lease.boundary * self.core.config.page_tokens < max(1, len(lease.tokens) // TOKEN_BYTES)
        handed = []
        for pool in range(len(self.core.pools)):
            positions, slots = self.core.slots(lease, pool)
            assert positions == self._reads(pool, lease.boundary), "it has what its boundary reads"
            handed.append((slots, [keys[position] for position in positions]))
        self._handed[lease.number] = handed

    def _check_handed(self, lease: Lease, transfers: SimulatedTransfers) -> None:
        """Pages that a request reads stay: windows and states until `resumed`, chains until `close`."""
        for pool, (slots, contents) in enumerate(self._handed[lease.number]):
            if not lease.resumed or self.core.pools[pool].lookback is None:
                arena = transfers.arenas[pool]
                found = [arena[slot] for slot in slots]
                assert found == contents, f"lease {lease.number} reads {found} in pool {pool}, not its own pages"

    def _check_waiting(self) -> None:
        """A claimed lease waits until its deadline at most, and only while a copy is in flight."""
        for lease in self.leases:
            if lease.claimed and not lease.ready and lease.phase is not Phase.OFFERED:
                assert self.now < lease.deadline, f"lease {lease.number} waits longer than it should"
                self._stalled[lease.number] += not self.flying and not self.lost and lease.ask_again == inf
                assert self._stalled[lease.number] <= TURNS, f"lease {lease.number} waits for nothing"
