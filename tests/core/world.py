"""Honest hands for the core: arenas, lanes and a storage made of dicts, in which every page says what it is.

A page's content is the key and the pool that it was computed for, so a core that mixes up two slots, frees one that is
still read, or resumes a prompt from another prompt's page is found out at once. What is not a page says so too: a slot
that is free, room that nobody has filled, the target of a copy that is still in flight.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvarve.core.audit import audit
from kvarve.core.cache import Core
from kvarve.core.effects import Copy, Effect, Ended, Probe
from kvarve.core.eviction import ORDERS
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import BEST_EFFORT, WAIT_COMPLETE, PageCost, Patience, WritePolicy
from kvarve.core.prefetch import ROOM_RETRIES
from kvarve.core.settings import CoreConfig
from kvarve.core.snapshots import Snapshots
from kvarve.core.tree import Run
from kvarve.keys import extend, pack, root_key
from kvarve.model import BufferSpec, PoolSpec, Tier

Content = tuple[Any, ...]

FREE: Content = ("free",)
ROTTEN: Content = ("rotten",)
PAGE_TOKENS = 2


def pool(name: str, lookback: int | None) -> PoolSpec:
    return PoolSpec(name, (BufferSpec("x", (4,), "float32"),), lookback)


ATTENTION, INDEX, WINDOW, STATE = pool("attention", None), pool("index", None), pool("window", 3), pool("state", 1)


def config(
    *pools: PoolSpec, device: int | Sequence[int] = 64, host: int | Sequence[int] = 0, grid: int = 1, **rest: Any
) -> CoreConfig:
    """A small core: slots for every pool, or one number for each; no host tier unless it is asked for."""
    slots = {Tier.DEVICE: (device,) * len(pools) if isinstance(device, int) else tuple(device)}
    if host:
        slots[Tier.HOST] = (host,) * len(pools) if isinstance(host, int) else tuple(host)
    return CoreConfig(pools, slots, page_tokens=PAGE_TOKENS, chunk_tokens=PAGE_TOKENS * grid, **rest)


def prompt(pages: int, seed: int = 0, extra: int = 1) -> list[int]:
    """Tokens that fill so many pages and begin another; prompts of one seed are prefixes of each other."""
    return [1000 * seed + at for at in range(pages * PAGE_TOKENS + extra)]


def fork(pages: int, word: int, more: int = 6) -> list[int]:
    """A prompt that shares so many pages with `prompt` and goes on with other words."""
    return prompt(pages, extra=0) + [10**6 + word] * more


class World:
    """A core and everything it talks to. Every method checks the laws of the core and every byte in it afterwards."""

    def __init__(self, config: CoreConfig) -> None:
        self.core = Core(config)
        pools = len(config.pools)
        self.arenas: dict[Tier, list[list[Content]]] = {
            tier: [[FREE] * self.core.shelves.capacity[int(tier) * pools + at] for at in range(pools)]
            for tier in (Tier.DEVICE, Tier.HOST)
        }
        self.storage: dict[tuple[bytes, int], Content] = {}
        self.flying: dict[int, Effect] = {}
        self.leases: list[Lease] = []
        self.log: list[Effect] = []
        self.now = 0.0
        self.hits = [0, 0, 0]  # pages that leases resumed from, by the farthest tier that they came from
        self._prompts: dict[int, list[bytes]] = {}  # by lease: the keys of its pages, from the tokens alone
        self._resumed: dict[int, list[list[tuple[int, Content]]]] = {}  # by lease and pool: slots and what is in them
        self._grown: dict[int, list[dict[int, int]]] = {}  # by lease and pool: room that is not published yet
        self._check()

    # --- what the house does

    def open(
        self,
        tokens: Sequence[int],
        salt: str = "",
        patience: Patience = WAIT_COMPLETE,
        read: bool = True,
        priority: int = 0,
    ) -> Lease:
        root, packed = root_key(b"world", salt), pack(tokens)
        keys = extend(root, packed, self.core.config.page_tokens)
        before = dump(self.core)
        hit = self.core.lookup(root, packed)
        assert dump(self.core) == before, "a lookup changes nothing"
        assert (hit.device, hit.memory) == self._expected_hit(keys, len(tokens)), "a hit is what a brute force finds"
        lease = self.core.open(root, packed, self.now, patience, read, priority)
        self._prompts[lease.number] = keys
        self._grown[lease.number] = [{} for _ in self.core.pools]
        self.leases.append(lease)
        self._check()
        return lease

    def start(self, tokens: Sequence[int], salt: str = "", read: bool = True) -> Lease:
        """A request whose turn comes at once."""
        lease = self.open(tokens, salt, read=read)
        self.claim(lease)
        return lease

    def claim(self, lease: Lease) -> bool:
        ready = self.core.claim(lease, self.now)
        self._check()
        return ready

    def ready(self, lease: Lease) -> bool:
        """Its turn has come, and everything in flight ends."""
        self.claim(lease)
        self.settle()
        return self.claim(lease)

    def resumed(self, lease: Lease) -> None:
        self.core.resumed(lease)
        self._check()

    def extend(self, lease: Lease, tokens: Sequence[int]) -> None:
        self.core.extend(lease, pack(tokens))
        self._prompts[lease.number] = extend(lease.root, lease.tokens, self.core.config.page_tokens)
        self._check()

    def grow(self, lease: Lease, upto: int) -> list[dict[int, int]]:
        start = lease.room
        fresh = self.core.grow(lease, upto)
        for at, slots in enumerate(fresh):
            for position, slot in slots.items():
                assert start <= position < lease.room, "room is where it was asked for"
                assert self.arenas[Tier.DEVICE][at][slot][0] not in ("flying", "empty"), "room was nobody's before"
                self.arenas[Tier.DEVICE][at][slot] = ("empty", lease.number)
            self._grown[lease.number][at].update(slots)
        self._check()
        return fresh

    def publish(self, lease: Lease, upto: int) -> None:
        keys = self._prompts[lease.number]
        for at, slots in enumerate(self._grown[lease.number]):
            for position in [position for position in slots if position < upto]:
                slot = slots.pop(position)
                assert self.arenas[Tier.DEVICE][at][slot] == ("empty", lease.number), "room is ours until published"
                self.arenas[Tier.DEVICE][at][slot] = (keys[position], at)
        self.core.publish(lease, upto)
        self._check()

    def close(self, lease: Lease) -> None:
        if lease.ready:
            self.hits = [had + more for had, more in zip(self.hits, lease.from_tiers(), strict=True)]
        self.core.close(lease)
        self.leases.remove(lease)
        for notes in (self._prompts, self._resumed, self._grown):
            notes.pop(lease.number, None)
        self._check()

    def flush(self, *tiers: Tier) -> int:
        gone = self.core.flush(tiers)
        self._check()
        return gone

    def step(self, ended: Sequence[Ended] = (), later_s: float = 0.0) -> None:
        self.now += later_s
        self.core.step(ended, self.now)
        self._check()

    # --- what the lanes and the storage do

    def end(self, op: int, lost: int = 0, rotten: int = 0) -> Ended:
        """Carry out one effect. Bit i of `lost`: page i does not arrive; of `rotten`: its source has decayed."""
        effect = self.flying.pop(op)
        if isinstance(effect, Probe):
            there = sum(((page.key, page.pool) in self.storage) << i for i, page in enumerate(effect.pages))
            return Ended(op, there & ~lost)
        good = bad = 0
        for i, page in enumerate(effect.pages):
            name, here = (page.key, page.pool), (page.key, page.pool)
            content: Content | None
            if effect.source is Tier.STORAGE:
                if rotten >> i & 1 and name in self.storage:
                    self.storage[name] = ROTTEN
                content = self.storage.get(name)
            else:
                content = self.arenas[effect.source][page.pool][page.source]
                assert content in (here, ROTTEN), f"the source of a copy stays until it has ended, not {content}"
                assert effect.source is Tier.HOST or content == here, "a device page is what its name says"
                if rotten >> i & 1 and effect.source is Tier.HOST:
                    content = self.arenas[Tier.HOST][page.pool][page.source] = ROTTEN
            arrived = content == here and not lost >> i & 1
            good |= arrived << i
            bad |= (content == ROTTEN and not lost >> i & 1) << i
            if effect.target is Tier.STORAGE:
                if arrived:
                    self.storage[name] = here
            else:
                arena = self.arenas[effect.target][page.pool]
                assert arena[page.target] == ("flying", op), "the target of a copy is nobody else's until it has ended"
                arena[page.target] = here if arrived else ("broken",)
        return Ended(op, good, bad)

    def rot(self, tier: Tier, position: int, tokens: Sequence[int], pool: int = 0, salt: str = "") -> None:
        """Let one resident page of a prompt decay in the host or in storage, before anybody has noticed."""
        key = extend(root_key(b"world", salt), pack(tokens), self.core.config.page_tokens)[position]
        if tier is Tier.STORAGE:
            assert (key, pool) in self.storage
            self.storage[key, pool] = ROTTEN
        else:
            at = self.arenas[tier][pool].index((key, pool))
            self.arenas[tier][pool][at] = ROTTEN

    def lose(self, position: int, tokens: Sequence[int], pool: int = 0, salt: str = "") -> None:
        """Let the storage lose one page of a prompt."""
        del self.storage[extend(root_key(b"world", salt), pack(tokens), self.core.config.page_tokens)[position], pool]

    def settle(self, lost: bool = False) -> None:
        """Let everything in flight end, well or badly, until nothing new comes up."""
        for _ in range(400):
            self.step([self.end(op, lost=-1 if lost else 0) for op in [*self.flying]])
            if not self.flying and self.core.idle():
                return
        raise AssertionError("the core never comes to rest")

    # --- whole requests

    def request(
        self, tokens: Sequence[int], salt: str = "", read: bool = True, chunks: int = 1, rest: bool = True
    ) -> Lease:
        """A prompt from beginning to end, with nothing going wrong; computed and published in so many parts."""
        lease = self.open(tokens, salt, read=read)
        self.compute(lease, chunks, rest)
        return lease

    def compute(self, lease: Lease, chunks: int = 1, rest: bool = True) -> None:
        """The rest of a request's life; with `rest`, everything that is in flight ends before and after it."""
        if rest:
            self.settle()
        self.claim(lease)
        for _ in range(12 + 2 * ROOM_RETRIES):
            if not lease.ready:  # its own copies end; if it waits for room, those of others do
                self.step([self.end(op) for op in sorted(lease.ops) or [*self.flying]])
                self.claim(lease)
        assert lease.ready, "probe, fetch, room, load: no request waits for more"
        grid = self.core.grid
        start, pages = lease.done, self.core.keepable(lease) // grid * grid
        for chunk in range(1, chunks + 1):
            upto = min((start + (pages - start) * chunk // chunks) // grid * grid, self.core.keepable(lease))
            self.grow(lease, max(lease.room, upto))
            self.publish(lease, max(lease.done, min(upto, lease.room // grid * grid)))
        self.close(lease)
        if rest:
            self.settle()

    def hit(self, tokens: Sequence[int], salt: str = "") -> tuple[int, int]:
        found = self.core.lookup(root_key(b"world", salt), pack(tokens))
        return found.device, found.memory

    def resident(self, tier: Tier, pool: int = 0) -> int:
        """How many pages of a pool the tree has in a tier."""
        place = int(tier) * len(self.core.pools) + pool
        return sum(run.here[place].bit_count() for run in runs(self.core))

    def drain(self) -> None:
        """The end of a life: everybody leaves, everything in flight ends, and nothing must be left behind."""
        for lease in [*self.leases]:
            self.close(lease)
        self.settle()
        assert not self.core.copies.ops and not self.core.leases and self.core.idle()
        assert not any(run.held() for run in runs(self.core)), "nobody is here, so nothing is pinned"
        for _ in range(40):
            self.flush(Tier.DEVICE, Tier.HOST)
            self.settle()
            if not self.core.shelves.roots:
                break
        free = [len(slots) for slots in self.core.shelves.free]
        assert free == self.core.shelves.capacity, "after a flush everything is free"
        assert not self.core.shelves.roots, "after a flush nothing is remembered"

    # --- what must hold after every input

    def _check(self) -> None:
        for effect in self.core.take():
            self._start(effect)
        for place, slots in enumerate(self.core.shelves.free):
            tier, at = divmod(place, len(self.core.pools))
            for slot in slots:
                self.arenas[Tier(tier)][at][slot] = FREE
        audit(self.core)
        self._check_bytes()
        for lease in self.leases:
            if lease.phase is Phase.READY:
                self._check_lease(lease)

    def _start(self, effect: Effect) -> None:
        self.log.append(effect)
        assert effect.pages, "an effect is about something"
        self.flying[effect.op] = effect
        if isinstance(effect, Copy):
            for page in effect.pages:
                if effect.source is not Tier.STORAGE:
                    content = self.arenas[effect.source][page.pool][page.source]
                    fine = (page.key, page.pool) if effect.source is Tier.DEVICE else content
                    assert content == fine and content in ((page.key, page.pool), ROTTEN), "a copy takes the right page"
                if effect.target is not Tier.STORAGE:
                    # Slots that came free in this very call may be taken again in it; what they held is gone.
                    self.arenas[effect.target][page.pool][page.target] = ("flying", effect.op)

    def _check_bytes(self) -> None:
        for run in runs(self.core):
            for place, here in enumerate(run.here):
                tier, at = divmod(place, len(self.core.pools))
                for position in range(run.first, run.end):
                    if here >> position - run.first & 1:
                        content = self.arenas[Tier(tier)][at][run.slot(place, position)]
                        right = (run.key(position), at)
                        assert content == right or (tier == Tier.HOST and content == ROTTEN), "a page is what it says"

    def _check_lease(self, lease: Lease) -> None:
        """A ready lease resumes from exactly its own prompt's pages, and they stay as long as it may read them."""
        if lease.number not in self._resumed:
            keys = self._prompts[lease.number]
            assert lease.boundary % self.core.grid == 0
            assert lease.boundary * self.core.config.page_tokens < max(1, len(lease.tokens) // 4)
            self._resumed[lease.number] = []
            for at, spec in enumerate(self.core.pools):
                positions, slots = self.core.slots(lease, at)
                far = lease.boundary if spec.lookback is None else min(lease.boundary, spec.lookback)
                assert [*positions] == [*range(lease.boundary - far, lease.boundary)]
                pages = [(slot, (keys[position], at)) for position, slot in zip(positions, slots, strict=True)]
                self._resumed[lease.number].append(pages)
        for at, pages in enumerate(self._resumed[lease.number]):
            if not lease.resumed or self.core.pools[at].lookback is None:
                for slot, content in pages:
                    found = self.arenas[Tier.DEVICE][at][slot]
                    assert found == content, f"lease {lease.number} reads {found} in pool {at}, not its own page"

    def _expected_hit(self, keys: list[bytes], tokens: int) -> tuple[int, int]:
        """The deepest boundary from the device, and from memory, as the definition reads."""
        pools = len(self.core.pools)
        near: set[tuple[bytes, int]] = set()
        memory: set[tuple[bytes, int]] = set()
        for run in runs(self.core):
            for local in range(run.pages):
                for at in range(pools):
                    page = (run.key(run.first + local), at)
                    if run.here[at] >> local & 1:
                        near.add(page)
                    if run.here[at] >> local & 1 or (run.here[pools + at] & ~run.bad[pools + at]) >> local & 1:
                        memory.add(page)

        def deepest(present: set[tuple[bytes, int]]) -> int:
            for boundary in range(max(0, tokens - 1) // PAGE_TOKENS, 0, -1):
                back = [boundary if spec.lookback is None else spec.lookback for spec in self.core.pools]
                if boundary % self.core.grid == 0 and all(
                    (keys[position], at) in present
                    for at in range(pools)
                    for position in range(max(0, boundary - back[at]), boundary)
                ):
                    return boundary
            return 0

        return deepest(near), deepest(memory)


def runs(core: Core) -> Iterator[Run]:
    stack = [*core.shelves.roots.values()]
    while stack:
        run = stack.pop()
        yield run
        stack.extend(run.children.values())


def dump(core: Core) -> Mapping[str, Any]:
    """All that a core knows, as plain values: equal dumps, equal cores."""
    places = range(2 * len(core.pools))
    pointers = {"parent", "children", "slots", "pins", "rests"}
    names: dict[int, tuple[bytes, bytes]] = {}

    def describe(root: bytes, run: Run) -> Any:
        names[id(run)] = (root, run.keys[:32])
        return (
            [(each, _plain(getattr(run, each), {})) for each in Run.__slots__ if each not in pointers],
            [table and table.tolist() for table in run.slots],
            [(run.pins.count(local), run.rests.count(local)) for local in range(run.pages)],
            [(first, describe(root, child)) for first, child in run.children.items()],
        )

    trees = [(root, describe(root, run)) for root, run in core.shelves.roots.items()]
    gone = (b"", b"")
    return {
        "trees": trees,
        "free": [slots.tolist() for slots in core.shelves.free],
        "orders": [[names.get(id(run), gone) for run in core.shelves.orders[place].runs()] for place in places],
        "evicted": [*core.shelves.evicted],
        "tick": core.shelves.tick,
        "owing": [names.get(id(run), gone) for run in core.backups.owing],
        "background": core.backups.flying,
        "number": core.copies._number,
        "effects": [*core.copies.effects],
        "counters": vars(core.counters).copy(),
        "leases": [
            [(each, _plain(getattr(lease, each), names)) for each in Lease.__slots__] for lease in core.leases.values()
        ],
        "ops": [
            (number, op.edge, [*op.pages], op.lease and op.lease.number, names.get(id(op.run)), op.pinned, op.leaving)
            for number, op in core.copies.ops.items()
        ],
    }


def _plain(value: Any, names: dict[int, tuple[bytes, bytes]]) -> Any:
    if isinstance(value, Run):
        return names.get(id(value))
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, list):
        return [dict(each) if isinstance(each, dict) else each for each in value]
    return value


# --- long lives from a seed

PATIENCES = (BEST_EFFORT, WAIT_COMPLETE, Patience(3), Patience(1, 100))


def random_config(dice: random.Random) -> CoreConfig:
    pools = dice.sample([ATTENTION, INDEX, WINDOW, STATE], dice.randint(1, 4))
    return config(
        *pools,
        device=[dice.randint(3, 24) if dice.random() < 0.95 else 1 for _ in pools],
        host=[dice.randint(4, 40) if dice.random() < 0.95 else 0 for _ in pools] if dice.random() < 0.85 else 0,
        grid=dice.choice([1, 1, 2]),
        storage=dice.random() < 0.7,
        write=dice.choice([*WritePolicy]),
        selective_uses=dice.randint(1, 3),
        eviction=dice.choice([*ORDERS]),
        snapshots=Snapshots(every=dice.choice([0, 0, 4]), gap=dice.choice([0, 0, 3])),
        load_at_least=dice.choice([0, 0, 5]),
        fetch_at_least=dice.choice([0, 0, 5]),
        host_share=dice.choice([0.2, 0.5, 1.0]),
        cost=PageCost(1, dice.choice([0, 0.5])),
        batch_pages=dice.choice([1, 3, 64]),
        backup_pages=dice.choice([2, 50]),
    )


def live(seed: int, steps: int) -> World:
    """A random life of a random core; the same seed is the same life."""
    dice = random.Random(seed)
    world = World(random_config(dice))
    grid, trouble = world.core.grid, dice.choice([0.0, 0.1, 0.3])
    flushes, crowd, told = dice.choice([0.0, 0.03, 0.1]), dice.choice([2, 5, 9]), dice.choice([0.1, 0.5, 1.0])
    known: list[list[int]] = []
    for _ in range(steps):
        ready = [lease for lease in world.leases if lease.ready]
        chance = dice.random()
        if chance < flushes:
            world.flush(
                *dice.choice([(Tier.DEVICE,), (Tier.HOST,), (Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.HOST)])
            )
        elif chance < 0.16:
            known = (known + [_tokens(dice)])[-4:]
            world.request(known[-1], dice.choice("aaab"), chunks=dice.randint(1, 3), rest=dice.random() < 0.4)
        elif chance < 0.32 and len(world.leases) < crowd:
            tokens = _tokens(dice) if dice.random() < 0.4 or not known else dice.choice(known) + [2]
            world.open(tokens, dice.choice("aaab"), dice.choice(PATIENCES), dice.random() < 0.85)
        elif chance < 0.36 and len(ready) < len(world.leases):
            world.claim(dice.choice([lease for lease in world.leases if not lease.ready]))
        elif chance < 0.44 and ready:
            lease = dice.choice(ready)
            upto = min(world.core.keepable(lease), lease.room + grid * dice.randint(1, 12)) // grid * grid
            if upto > lease.room:
                world.grow(lease, upto)
        elif chance < 0.52 and ready:
            lease = dice.choice(ready)
            upto = lease.room if dice.random() < 0.5 else dice.randint(lease.done, lease.room)
            world.publish(lease, max(lease.done, upto // grid * grid))
        elif chance < 0.56 and world.leases:
            world.close(dice.choice(world.leases))
        else:
            ops = dice.sample([*world.flying], round(dice.random() ** 0.5 * told * len(world.flying)))
            if world.storage and dice.random() < trouble / 3:
                world.storage[dice.choice([*world.storage])] = ROTTEN
            decay = trouble if dice.random() < 0.3 else 0.0
            strays = [Ended(op + 1, 1) for op in ops[:1] if op + 1 not in world.flying and dice.random() < 0.05]
            world.step(
                strays + [world.end(op, lost=_some(dice, trouble), rotten=_some(dice, decay)) for op in ops],
                later_s=dice.choice([0.0, 0.5, 2.0]),
            )
    return world


def _tokens(dice: random.Random) -> list[int]:
    """A prompt that shares a beginning with others, or several: few tokens, few places to branch."""
    tokens = [0] * dice.choice([0, 4, 8, 13, 20])
    tokens += [dice.randint(0, 1)] * dice.choice([0, 1, 4, 6])
    return tokens + [dice.randint(0, 1) for _ in range(dice.choice([0, 0, 1, 3]))]


def _some(dice: random.Random, chance: float) -> int:
    if chance and dice.random() < 0.1:
        return -1
    return sum((dice.random() < chance) << i for i in range(70)) if chance else 0
