"""The shadow of a simulated core: it knows the true bytes of every page, and checks them after every input.

It audits the invariants, counts slots, compares ranks, and checks the content of every slot, copy and page that a
request reads. It derives keys from the tokens alone, and reads the core only from outside.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import inf
from typing import TypeVar

from kvarve.core.audit import audit
from kvarve.core.copies.effects import Copy, Ended, Hurry, Probe, Transfer, Verified
from kvarve.core.core import Core
from kvarve.core.core_config import CoreConfig
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.reasons import HITS, Reason, explain
from kvarve.core.policies import BEST_EFFORT
from kvarve.core.requests.prefetch import EVICTION_RETRIES
from kvarve.core.tree.tree import Run
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES, extend, pack, root_key
from kvarve.pages.pools import Tier
from tests.sim.world.dirty import Dirty
from tests.sim.world.scenes import configure, draw
from tests.sim.world.transfers import FREE, ROTTEN, SimulatedTransfers, Store
from tests.sim.world.views import differ, runs

T = TypeVar("T")
# Steps in which a lease that waits for no copy gets ready: probe, fetch, wait for slots, load, again.
TURNS = 2 * EVICTION_RETRIES + 12


class Shadow:
    """The cores of all ranks, their arenas and storage, and what the true content of each page is."""

    def __init__(self, seed: int = 0, config: CoreConfig | None = None, ranks: int = 1) -> None:
        """Without a `config` the settings are drawn from the seed."""
        config = config or configure(draw(random.Random(seed)))
        self.cores = [Core(config) for _ in range(ranks)]
        self.core = self.cores[0]
        self.transfers = [self._transfers(rank, ranks) for rank in range(ranks)]
        self.storage = Store()
        self.attached = self.core.storage.attached
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
        self._reasons: dict[
            int, dict[Reason, int]
        ] = {}  # by lease: why its tokens were cached or not, once it was ready
        self._met: set[bytes] = set()  # keys of all pages that have been in the tree
        self._asked_s: dict[int, float] = {}  # by lease: when storage was asked about it last, or answered
        self._stalled: Counter[int] = Counter()  # by lease: steps in which no copy was in flight
        self._failures, self._back_off_until = 0, 0.0  # stores that failed in a row, and the end of the back-off
        self._void_until = 0  # copies up to this one were for a detached storage, or one that was down
        self._began_s: dict[int, float] = {}  # by copy: when a worker began with it
        self._paused = False
        self._swept = [slots[:0] for slots in self.core.slot_pools.free]
        self._dirty, self._confirmed = Dirty(self.core), 0
        self._check()

    def _transfers(self, rank: int, ranks: int) -> SimulatedTransfers:
        return SimulatedTransfers(self.core.slot_pools, rank, ranks)

    def _outside(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """By pool, which of these pages an engine has on a device of its own."""
        return ()

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

    def _leaves_room(self, lease: Lease, boundary: int) -> bool:
        """Whether a request that is alone could have its whole prompt on the device while it resumes at a boundary, if
        no extent with a window or state that it reads there goes to the chain."""
        extents = self.core.slot_pools.extents[0]
        if extents is None or not self.core.slot_pools.chains:
            return True
        chain, most = self.core.slot_pools.chains[0], extents.cut.count
        tail, _, _ = self.core.paths.find(lease.root, lease.tokens)
        others = [pool for pool in range(len(self.core.pools)) if pool != chain]
        reads = {at for pool in others for at in self._reads(pool, boundary)}  # a pin is on all pools' pages there
        for pool in range(len(self.core.pools)):
            if pool != chain:
                read = set[int]()
                run: Run | None = tail
                while run is not None and run.tokens:
                    table = run.slots[pool] or ()
                    read |= {
                        slot // extents.cut.per[pool]
                        for at, slot in enumerate(table, run.first)
                        if at in reads and slot >= 0
                    }
                    run = run.parent
                few = len(reads) <= extents.cut.least[pool]
                most -= extents.cut.least[pool] if few else max(extents.cut.least[pool], len(read))
        pages = -(-len(lease.tokens) // (self.core.config.page_tokens * TOKEN_BYTES))
        return most * extents.cut.per[chain] >= pages

    def _key(self, tokens: Sequence[int], position: int, salt: str) -> bytes:
        return extend(root_key(b"world", salt), pack(tokens), self.core.config.page_tokens)[position]

    def _may_find_more(self, lease: Lease) -> bool:
        """Whether a request that is queued, and was not looked up in storage for a second, could resume further from
        what is there now."""
        waited_s = self.now - self._asked_s[lease.number]
        if lease.phase is not Phase.QUEUED or waited_s < 1.0 or not lease.reads or not self.attached:
            return False
        if lease.patience == BEST_EFFORT:  # it does not wait for the answer
            return False
        keys, tokens, outside = self._prompts[lease.number], len(lease.tokens) // TOKEN_BYTES, lease.outside
        near = self._expected_hit(keys, tokens, outside)[1]
        gain = self._expected_hit(keys, tokens, outside, stored=True)[1] - near
        page_tokens, policies = self.core.config.page_tokens, self.core.config.policies
        return gain * page_tokens >= max(1, policies.fetch_at_least)

    def _expected_hit(
        self, keys: list[bytes], tokens: int, outside: Sequence[int] = (), stored: bool = False
    ) -> tuple[int, int, tuple[int, ...]]:
        """By brute force: the deepest boundary from the device, from memory, and in memory for each pool. With `stored`
        pages that storage has count as being in memory."""
        pools = range(len(self.core.pools))
        wanted = {key: position for position, key in enumerate(keys)}
        near: list[set[int]] = [set() for _ in pools]
        for pool, pages in enumerate(outside):
            near[pool] = {position for position in range(len(keys)) if pages >> position & 1}
        memory: list[set[int]] = [{*pages} for pages in near]
        for pool in pools if stored else ():
            for at, key in enumerate(keys):
                if {transfers.name(key, pool) for transfers in self.transfers} <= self.storage.objects.keys():
                    memory[pool].add(at)
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
                capacity = self.core.slot_pools.capacity if ours else ()  # an engine limits its own prompts
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

    def _check(self, stepped: bool = False) -> None:
        self.steps += 1
        self._take()
        self._sweep()
        audit(self.core, stepped)
        for rank, core in enumerate(self.cores[1:], 1):
            assert not (what := differ(self.core, core)), f"rank {rank} differs from rank 0: {what}"
        for lease in self.leases:
            self._check_reasons(lease)  # before its input's pages count as met: it may have been ready before they came
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
                here = {*self.flying, *self.lost}
                assert effect.ops and here.union(end.op for end in self.ended).issuperset(effect.ops), (
                    "only a copy in flight, or one that has just ended, becomes urgent"
                )
                self.urgent.update(here.intersection(effect.ops))
                continue
            assert effect.pages, "an effect is about something"
            if isinstance(effect, Copy) and effect.source is Tier.STORAGE:
                names = [transfers.name(page.key, page.pool) for transfers in self.transfers for page in effect.pages]
                assert self.storage.ever.issuperset(names), "nothing is fetched that storage never had"
                self._check_alone(effect)
            assert self.attached or (isinstance(effect, Copy) and Tier.STORAGE not in (effect.source, effect.target)), (
                "without a storage nothing is asked of it"
            )
            if isinstance(effect, Copy) and effect.target is Tier.STORAGE and self._failures:
                assert self.now >= self._back_off_until, "stores back off when one has failed"
                others = [each for op, each in (self.flying | self.lost).items() if op > self._void_until]
                tried = [each for each in others if isinstance(each, Copy) and each.target is Tier.STORAGE]
                assert not tried, "and then one tries alone"
            assert effect.op not in self.flying and effect.op not in self.lost, "every copy has a number of its own"
            if isinstance(effect, Probe) and (asker := self.core.copies.ops[effect.op].lease) is not None:
                self._asked_s[asker.number] = self.now
            if isinstance(effect, Copy) and effect.urgent:
                self.urgent.add(effect.op)
            self.flying[effect.op] = effect
            self._stores[effect.op] = self.storage
            self._carried[effect.op] = [None] * len(self.transfers)
            for transfers in self.transfers:
                transfers.start(effect)
        self.log += [each for each in effects if not isinstance(each, Hurry)]

    def _check_alone(self, fetch: Copy) -> None:
        """No page is fetched twice at the same time, unless the other fetch has run for longer than one waits."""
        lease = self.core.copies.ops[fetch.op].lease
        assert lease is not None
        patience_s = lease.patience.base_s or self.core.config.policies.storage_deadline_s
        pages = {(page.pool, page.key) for page in fetch.pages}
        for op, other in [*self.flying.items(), *self.lost.items()]:
            if op > self._void_until and isinstance(other, Copy) and other.source is Tier.STORAGE:
                if pages.isdisjoint((page.pool, page.key) for page in other.pages):
                    continue
                began_s = self._began_s.get(op, inf)
                assert self.now >= began_s + patience_s, f"fetch {fetch.op} brings pages that fetch {op} brings too"
                self.seen["fetched anew, as the first fetch took too long"] += 1

    def _check_reasons(self, lease: Lease) -> None:
        """Every token of a lease's prompt has one reason, and always the same once it is ready."""
        reasons = self._all(lease, lambda core, twin: explain(twin, core.paths))
        assert sum(reasons.values()) == lease.length and all(some > 0 for some in reasons.values())
        if not lease.ready:
            assert {*reasons} <= {Reason.NOT_READ}, "a lease that is not ready has read nothing"
            return
        pages = {reason: tokens // self.core.config.page_tokens for reason, tokens in reasons.items()}
        hits = [pages.get(reason, 0) for reason in HITS]
        assert hits == [*lease.from_tiers()] and sum(hits) == lease.boundary, (
            "what is hit is what the lease resumed from"
        )
        if lease.number not in self._reasons:
            self._reasons[lease.number] = reasons
            self.seen.update([f"reason {reason.value}" for reason in reasons])
            new = sum(key not in self._met for key in self._prompts[lease.number])
            assert pages.get(Reason.NEVER_SEEN, 0) <= new, "what was never seen was never in memory"
        assert reasons == self._reasons[lease.number], "what happens later changes no reason"

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
                    for page in effect.pages:
                        counts[slot_pools.place(effect.target, page.pool)] += 1
                    for pool, given in self.core.copies.ops[effect.op].given.items():
                        counts[slot_pools.place(effect.target, pool)] -= given.bit_count()
        committed = [slot_pools.committed(place) for place in range(len(counts))]
        assert counts == committed, f"slots are conserved: {counts} of {committed}"

    def _keys_of(self, run: Run) -> bytes:
        """A run's keys as the shadow derives them, whether the core has computed them or not."""
        if run.parent is None:
            return next(name for name, root in self.core.tree.roots.items() if root is run)
        above, seen = self._keys_of(run.parent), self._names.get(id(run))
        if seen and seen[0] is run and seen[1] is run.tokens and seen[3] is above:
            return seen[2]
        before, keys = above[-KEY_BYTES:], []
        for local in range(len(run.tokens) // run.width):
            page = run.tokens[local * run.width : (local + 1) * run.width]
            before, first = sha256(before + page).digest(), before
            assert self._truth.get(before) == (first, page), "what is in the tree stood in a prompt"
            keys.append(before)
        self._met.update(keys)
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
            positions, slots = self.core.growth.slots(lease, pool)
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
