"""The simulator of the core: ranks, arenas, lanes, a storage and a clock, driven by a test or by a seed.

Every input goes to the core of each rank, and its shadow (`shadow.py`) checks everything afterwards.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

from kvarve.core.copies.effects import Began, Copy, Ended, Event, Outcome, Refusal, Transfer, Verified, agreed
from kvarve.core.copies.in_flight import FETCH, LOAD, PROBE, STORE, Op
from kvarve.core.lease import Ask, Lease, Phase, Prompt
from kvarve.core.policies import WAIT_COMPLETE, Patience
from kvarve.core.tree.tree import covering, walk
from kvarve.pages.boundaries import members, union
from kvarve.pages.keys import TOKEN_BYTES, pack, root_key
from kvarve.pages.pools import Tier
from tests.sim.world.shadow import TURNS, Shadow
from tests.sim.world.transfers import BROKEN, ROTTEN, Store, empty
from tests.sim.world.views import runs


class World(Shadow):
    """One core per rank, and everything that they talk to. Every method checks everything afterwards."""

    # --- calls of the scheduler

    def open(
        self,
        tokens: Sequence[int],
        salt: str = "",
        patience: Patience = WAIT_COMPLETE,
        read: bool = True,
        priority: int = 0,
        again: bool = False,
    ) -> Lease:
        return self.open_packed(pack(tokens), salt, patience, read, priority, again=again)

    def open_packed(
        self,
        tokens: bytes,
        salt: str,
        patience: Patience = WAIT_COMPLETE,
        read: bool = True,
        priority: int = 0,
        expected: tuple[int, float] = (0, 0.0),
        again: bool = False,
    ) -> Lease:
        root = root_key(b"world", salt)
        keys = self._learn(root, tokens)
        outside = self._outside(keys)
        hit = self.core.lookup(root, tokens, outside)  # on one rank only: if it changed state, the ranks would differ
        right = self._expected_hit(keys, len(tokens) // TOKEN_BYTES, outside)
        assert (hit.device, hit.memory, hit.by_pool) == right, "a hit is what a brute force finds"
        ask = Ask(patience, read, priority, outside, expected, again)
        twins = [core.open(Prompt(root, tokens), self.now, ask) for core in self.cores]
        self._opened(twins, keys)
        self._check()
        return twins[0]

    def _opened(self, twins: list[Lease], keys: list[bytes]) -> None:
        number = twins[0].number
        self._twins[number], self._prompts[number], self._asked_s[number] = twins, keys, self.now
        self._grown[number] = [{} for _ in self.core.pools]
        self.leases.append(twins[0])

    def start(self, tokens: Sequence[int], salt: str = "", read: bool = True) -> Lease:
        """A request that is claimed at once."""
        lease = self.open(tokens, salt, read=read)
        self.claim(lease)
        return lease

    def claim(self, lease: Lease) -> bool:
        waited = not lease.ready
        may_ask = self._may_find_more(lease)
        ready = self._all(lease, lambda core, twin: core.claim(twin, self.now))
        assert not may_ask or lease.phase is Phase.PROBING, "what came to storage while a request waited is found"
        self.seen["asked again as its turn came"] += may_ask
        self._check()
        if waited and ready and lease.reads:
            hit = self._expected_hit(self._prompts[lease.number], len(lease.tokens) // TOKEN_BYTES)
            assert lease.boundary == hit[0] or not self._leaves_room(lease, hit[0]), (
                "a lease that is ready at once resumes from the deepest boundary on the device"
            )
        return ready

    def ready(self, lease: Lease) -> bool:
        """Claim it, and end everything in flight."""
        self.claim(lease)
        self.settle()
        return self.claim(lease)

    def resumed(self, lease: Lease) -> None:
        self._all(lease, lambda core, twin: core.growth.resumed(twin))
        self._check()

    def extend(self, lease: Lease, tokens: Sequence[int], replaced: int = 0) -> None:
        self.extend_packed(lease, pack(tokens), replaced * TOKEN_BYTES)

    def extend_packed(self, lease: Lease, tokens: bytes, replaced_bytes: int = 0) -> None:
        stays = lease.tokens[: len(lease.tokens) - replaced_bytes]
        self._prompts[lease.number] = self._learn(lease.root, stays + tokens)
        self._all(lease, lambda core, twin: core.growth.extend(twin, tokens, replaced_bytes))
        assert lease.snapshots < 2 << max(lease.pages, lease.grown), "no window or state is kept behind its end"
        self._check()

    def reserve(self, lease: Lease, upto: int) -> bool:
        """Slots to compute in, for partial pages too; checks the content of the lease's pages."""
        reserved = self._all(lease, lambda core, twin: core.growth.reserve(twin, upto))
        for pool in self.core.slot_pools.chains:
            for position, slot in lease.own[pool].items():
                if position not in self._grown[lease.number][pool]:
                    assert reserved, "all or nothing"
                    self._fill(pool, slot, empty(lease.number))
                    self._grown[lease.number][pool][position] = slot
            slots = self.core.growth.block_table(lease, pool, 0)
            assert not reserved or len(slots) >= upto, "every page has its place"
            for position, slot in enumerate(slots[: lease.done]):
                for transfers in self.transfers:
                    assert transfers.arenas[pool][slot] == self._prompts[lease.number][position], (
                        "and that page lies there"
                    )
        self._check()
        return reserved

    def mark(self, lease: Lease, boundary: int) -> bool:
        marked = self._all(lease, lambda core, twin: core.growth.mark(twin, boundary))
        assert not marked or lease.done < boundary <= lease.pages, "what is to be kept is still to come"
        self._check()
        return marked

    def grow(self, lease: Lease, upto: int) -> list[dict[int, int]]:
        start = lease.grown
        fresh = self._all(lease, lambda core, twin: core.growth.grow(twin, upto))
        for pool, slots in enumerate(fresh):
            for position, slot in slots.items():
                assert start <= position < lease.grown, "slots are for the pages that were asked for"
                self._fill(pool, slot, empty(lease.number))
            self._grown[lease.number][pool].update(slots)
        self._check()
        return fresh

    def short(self, lease: Lease, upto: int) -> bool:
        short = self._all(lease, lambda core, twin: core.growth.short(twin, upto))
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
        self._all(lease, lambda core, twin: core.growth.publish(twin, upto))
        self._check()

    def hand_over(self, lease: Lease) -> int:
        boundary = self._all(lease, lambda core, twin: core.hand_over(twin))
        assert boundary == self._each(lambda core: core.lookup(lease.root, lease.tokens).memory)
        self._check()
        return boundary

    def close(self, lease: Lease) -> None:
        self.seen[f"closed while {lease.phase.value}"] += 1
        self.seen["closed between grow and publish"] += any(self._grown[lease.number])
        if lease.ready:
            self.hits = [had + more for had, more in zip(self.hits, lease.from_tiers(), strict=True)]
        self._all(lease, lambda core, twin: core.close(twin))
        self.leases.remove(lease)
        for notes in (
            self._twins,
            self._prompts,
            self._handed,
            self._grown,
            self._reasons,
            self._stalled,
            self._asked_s,
        ):
            notes.pop(lease.number, None)
        self._check()

    def flush(self, *tiers: Tier) -> int:
        self.seen["flushed with copies in flight"] += any(isinstance(each, Copy) for each in self.flying.values())
        gone = self._each(lambda core: core.flush(tiers))
        self._check()
        return gone

    def attach(self, store: Store | None = None, back_up: bool = False) -> None:
        """Attach a known storage or an empty one; or the one that was down is up again."""
        again = self.core.storage.down and store is self.storage
        self.storage, self.attached, self._void_until = store or Store(), True, self.core.copies.sent
        self._failures, self._back_off_until = 0, self.now
        for core in self.cores:
            core.attach(back_up, again)
        self._dirty.begin_anew(back_up or again)
        self._check()

    def detach(self, down: bool = False) -> None:
        """Detach the storage, whatever is in flight; or (`down`) it stops answering."""
        self.attached, self._void_until = False, self.core.copies.sent
        self._failures, self._back_off_until = 0, self.now
        for core in self.cores:
            core.detach(down)
        if not down:
            self._dirty.begin_anew(back_up=False)
        self._check()

    def cleared(self) -> None:
        """The storage is emptied, also of what stores in flight have written to it."""
        self.storage.objects.clear()
        if self.attached:
            self._void_until = self.core.copies.sent
            self._failures, self._back_off_until = 0, self.now
            self._dirty.begin_anew(back_up=True)
        for core in self.cores:
            core.cleared()
        self._check()

    def retry(self) -> None:
        """End the back-off of stores."""
        self.seen["tried at once"] += self._failures > 0
        self._back_off_until = self.now
        for core in self.cores:
            core.storage.retry()
        self._check()

    def step(self, events: Sequence[Event] = (), later_s: float = 0.0) -> None:
        self.now += later_s
        events = self._heard(events)
        for event in events:
            if isinstance(event, Began):
                self._began_s.setdefault(event.op, self.now)
        ended = [event for event in events if isinstance(event, Ended)]
        self.ended = [*self.ended, *[end for end in ended if end.op in self.core.copies.ops]][-40:]
        for end in ended:
            self._note_failure(end)
            op = self.core.copies.ops.get(end.op)
            if op is not None and op.edge == PROBE and op.lease is not None:
                self._asked_s[op.lease.number] = self.now
            if op is not None and op.edge == STORE:
                self._confirmed += end.good.bit_count()
            elif op is not None and op.edge == FETCH:  # shows that a page in memory is in storage too
                for part, good, _ in op.outcomes(end):
                    self._confirmed += sum(self._resident(op, part.pool, position) for position in members(good))
        for core in self.cores:
            core.step(events, self.now)
        self._check(stepped=True)
        self._check_waiting()
        if self._paused != self.core.governor.paused:
            self._paused = not self._paused
            self.seen["storing paused" if self._paused else "storing went on"] += 1

    def _heard(self, events: Sequence[Event]) -> Sequence[Event]:
        """What the cores hear of these events of all ranks."""
        if len(self.cores) == 1:
            return events
        unique = {(event.op, type(event)): event for event in events}.values()
        return sorted(unique, key=lambda event: (event.op, isinstance(event, Ended)))

    def _told(self, told: Sequence[Outcome]) -> Outcome:
        """What all ranks say together of a copy, from what each has said."""
        return agreed(told)

    def _resident(self, op: Op, pool: int, position: int) -> bool:
        """Whether the tree has a page of a fetch in memory."""
        assert op.lease is not None
        root = self.core.tree.roots.get(op.lease.root)
        passed, known = walk(root, op.lease.tokens) if root is not None else ([], 0)
        if position >= known:
            return False
        run = covering(passed[-1], position)
        here = union(run.here[pool :: len(self.core.pools)])
        return bool(here >> position - run.first & 1)

    def _note_failure(self, end: Ended) -> None:
        """The shadow's back-off: after a store that lost pages, doubling each time."""
        op = self.core.copies.ops.get(end.op)
        if op is None or op.edge != (Tier.HOST, Tier.STORAGE) or op.void:
            return
        told = end.good | end.bad
        if any(not told >> i & 1 for i in range(op.page_count)):
            self.seen["stores backed off"] += 1
            if self.now >= self._back_off_until:
                self._back_off_until = self.now + min(30.0, 0.1 * 2.0**self._failures)
                self._failures += 1
        elif end.good:
            self._failures, self._back_off_until = 0, self.now

    # --- lanes and storage

    def end(self, op: int, lost: int = 0, rotten: int = 0, rank: int = -1, refused: Refusal = Refusal.NONE) -> Ended:
        """Perform one effect on all ranks that have not done so, and agree on the outcome.

        Bit i of `lost`: page i does not arrive; of `rotten`: its source is corrupted; on one rank, or on all.
        `refused`: why a storage did not take what is lost.
        """
        if op in self.verified:
            return self._copied(op, self.flying.pop(op))
        for each in range(len(self.transfers)):
            if self._carried[op][each] is None:
                self.carry(op, each, lost if rank in (-1, each) else 0, rotten if rank in (-1, each) else 0)
        effect = self.flying.pop(op)
        del self._stores[op]
        ends = [Ended(op, *director, refused) for director in self._carried.pop(op) if director is not None]
        end = self._told(ends)
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
        self.verified[op] = self._told([Verified(op, *each) for each in told])
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
            arena = self.transfers[0].arenas[self.core.slot_pools.place(tier, pool)]
            arena[arena.index(key)] = ROTTEN

    def forget(self, position: int, tokens: Sequence[int], pool: int = 0, salt: str = "") -> None:
        """Let the storage lose one page of a prompt."""
        del self.storage.objects[self._key(tokens, position, salt), pool, 0]

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
        start, pages = lease.done, lease.pages // grid * grid
        for chunk in range(1, chunks + 1):
            upto = min((start + (pages - start) * chunk // chunks) // grid * grid, lease.pages)
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
        self._go_on()
        waiting = [lease for lease in self.leases if not lease.ready and lease.patience.base_s < inf]
        assert not waiting, f"lease {waiting[0].number} is still {waiting[0].phase.value}"
        self.step([self.give_up(op) for op in [*self.lost]])
        self.settle()
        self._go_on()  # some ask storage again after a moment
        assert all(lease.ready for lease in self.leases), "when all copies have ended, every lease is ready"

    def _go_on(self) -> None:
        for _ in range(TURNS):
            self.step([self.end(op) for op in [*self.flying]], later_s=10.0)

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
            if not self.core.tree.roots:
                break
        free = [len(slots) for slots in self.core.slot_pools.free]
        committed = [self.core.slot_pools.committed(place) for place in range(len(free))]
        assert free == committed, "after a flush everything is free"
        assert not self.core.tree.roots, "after a flush nothing is remembered"

    def happened(self) -> Counter[str]:
        """The core's counters, and hit pages by tier."""
        counted = Counter({f"counted {what}": times for what, times in vars(self.core.counters).items()})
        counted.update({f"hit pages from {tier.name.lower()}": self.hits[tier] for tier in Tier})
        return counted
