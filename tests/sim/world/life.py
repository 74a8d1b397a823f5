"""Lives: lists of plain actions, drawn from a seed, saved to a file, replayed in a world.

An action is a name and a few numbers. It refers to its object by an index modulo the number of objects at that moment,
so it stays meaningful when shrinking removes actions before it; an action without an object (to close a lease where
there is none) does nothing.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from kvarve.core.copies.effects import Began, Copy, Ended, Probe, Refusal, Transfer
from kvarve.core.lease import Lease, Phase
from kvarve.errors import ConfigError
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import MEMORY_TIERS, Tier
from tests.sim.world import engines
from tests.sim.world.divided import DividedWorld
from tests.sim.world.engine_blocks_world import EngineWorld
from tests.sim.world.engines import Shop
from tests.sim.world.scenes import PATIENCES, configure, draw, draw_engine, draw_prompt, words
from tests.sim.world.transfers import PAGE, ROTTEN
from tests.sim.world.world import World

T = TypeVar("T")
Action = list[Any]

FORMAT = "kvarve-life/1"
WRAPPED = ("core", "outside", "divided")  # where the core's settings are in those of other worlds
LONGEST = 32  # tokens of a session


@dataclass
class Life:
    """The settings of one world and its actions in order."""

    seed: int
    ranks: int
    config: dict[str, Any]
    actions: list[Action] = field(default_factory=list)

    def world(self) -> World | Shop:
        """A fresh world for it: the core alone, with the ranks' protocol, over an engine's blocks, or an engine's
        scheduler over it."""
        if "divided" in self.config:
            return DividedWorld(configure(self.config["divided"]), self.ranks, self.seed)
        if "outside" in self.config:
            config = configure(self.config["outside"])
            return EngineWorld(config, self.ranks, self.config["blocks"], self.config["pieces"])
        return Shop.of(self.config) if "core" in self.config else World(config=configure(self.config), ranks=self.ranks)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Life":
        """ConfigError if the file is not one that `write` has written."""
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            if plain.pop("format") != FORMAT:
                raise ConfigError(f"{path}: not a life in the format {FORMAT}")
            life = cls(**plain)
            life.check()
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}") from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"{path}: not a life that tests.sim.world has written ({e!r})") from e
        return life

    def check(self) -> None:
        """ConfigError if there is no such core or no such action."""
        known = engines.ACTIONS if "core" in self.config else ACTIONS
        configure(next((self.config[kind] for kind in WRAPPED if kind in self.config), self.config))
        for name, *rest in self.actions:
            if name not in known:
                raise ConfigError(f"not a life: nothing is called {name!r}")
            try:
                signature(known[name]).bind(None, *rest)
            except TypeError as e:
                raise ConfigError(f"not a life: {name} {rest}: {e}") from e


def play(life: Life) -> World | Shop:
    """Replay a life from beginning to end."""
    world = life.world()
    for action in life.actions:
        act(world, action)
    finish(world)
    return world


def finish(world: World | Shop) -> None:
    if isinstance(world, Shop):
        world.finish()
    else:
        world.everybody()
        world.drain()


def act(world: World | Shop, action: Action) -> bool:
    """Apply one action; False if it had no object."""
    known = engines.ACTIONS if isinstance(world, Shop) else ACTIONS
    return known[action[0]](world, *action[1:])


# --- the actions


def _open(world: World, text: str, salt: str, patience: int, read: int, priority: int) -> bool:
    """`read`: 2 if the prompt is one that its request has read before."""
    world.open_packed(words(text), salt, PATIENCES[patience], bool(read), priority, again=read == 2)
    return True


def _request(world: World, text: str, salt: str, chunks: int, rest: int) -> bool:
    """A request from open to close without faults; its patience is finite, since others' copies may be lost."""
    world.compute(world.open_packed(words(text), salt, PATIENCES[2]), chunks, bool(rest))
    return True


def _claim(world: World, pick: int) -> bool:
    lease = _one(pick, [lease for lease in world.leases if not lease.ready])
    if lease is not None:
        world.claim(lease)
    return lease is not None


def _resumed(world: World, pick: int) -> bool:
    lease = _one(pick, _ready(world))
    if lease is not None:
        world.resumed(lease)
    return lease is not None


def _extend(world: World, pick: int, text: str, replaced: int = 0) -> bool:
    """A session continues under its open lease, perhaps in place of its last tokens that are not computed."""
    lease = _one(pick, _ready(world))
    if lease is None or len(lease.tokens) // TOKEN_BYTES + len(text) > LONGEST:
        return False
    tokens, page = len(lease.tokens) // TOKEN_BYTES, lease.page_tokens
    # An engine may have begun to save every page that is full.
    kept = tokens // page if isinstance(world, EngineWorld) else lease.grown
    replaced = min(replaced, tokens - kept * page)
    world.seen["extended in place of others" if replaced else "extended"] += 1
    world.extend_packed(lease, words(text), replaced * TOKEN_BYTES)
    return True


def _reserve(world: World, pick: int, more: int) -> bool:
    lease = _one(pick, _ready(world))
    if lease is None:
        return False
    reserved = world.reserve(lease, lease.done + more)
    world.seen["reserved" if reserved else "not reserved"] += 1
    return True


def _mark(world: World, pick: int, boundary: int) -> bool:
    lease, grid = _one(pick, _ready(world)), world.core.grid
    if lease is None:
        return False
    world.seen["marked" if world.mark(lease, boundary * grid) else "passed before it was marked"] += 1
    return True


def _grow(world: World, pick: int, more: int) -> bool:
    lease, upto = _further(world, pick, more)
    if lease is not None:
        world.grow(lease, upto)
    return lease is not None


def _short(world: World, pick: int, more: int) -> bool:
    """Ask whether slots will be short; under write-back this starts evictions."""
    lease, upto = _further(world, pick, more)
    if lease is not None:
        world.short(lease, upto)
    return lease is not None


def _publish(world: World, pick: int, less: int) -> bool:
    lease, grid = _one(pick, _ready(world)), world.core.grid
    if lease is None:
        return False
    world.publish(lease, max(lease.done, (lease.grown - less) // grid * grid))
    return True


def _hand_over(world: World, pick: int) -> bool:
    lease = _one(pick, _ready(world))
    if lease is not None:
        world.seen["handed over"] += world.hand_over(lease) > 0
    return lease is not None


def _close(world: World, pick: int) -> bool:
    lease = _one(pick, world.leases)
    if lease is not None:
        world.close(lease)
    return lease is not None


def _flush(world: World, tiers: int) -> bool:
    world.flush(*[tier for tier in MEMORY_TIERS if tiers >> tier & 1])
    return True


def _attach(world: World, empty: int, back_up: int) -> bool:
    """Attach the last storage again, or an empty one."""
    if world.attached or not world.core.backups.dirty.has_host:
        return False
    world.seen["attached an empty storage" if empty else "attached again"] += 1
    world.attach(None if empty else world.storage, bool(back_up))
    return True


def _detach(world: World, down: int) -> bool:
    if not world.attached:
        return False
    world.seen["went down"] += down
    busy = any(isinstance(each, Probe) or Tier.STORAGE in (each.source, each.target) for each in world.flying.values())
    world.seen["detached in flight" if busy else "detached"] += 1
    world.detach(bool(down))
    return True


def _step(world: World, later_s: float, ends: Sequence[Sequence[int]]) -> bool:
    """Time passes and some effects in flight end: [pick, lost pages, rotten pages, on which rank (-1: all)]."""
    ended = []
    for pick, lost, rotten, rank in ends:
        op = _one(pick, [*world.flying])
        if op is not None:
            effect, where = world.flying[op], rank % len(world.cores) if rank >= 0 else -1
            stores = lost and isinstance(effect, Copy) and effect.target is Tier.STORAGE
            ended.append(world.end(op, lost, rotten, where, Refusal(max(0, op % 8 - 5)) if stores else Refusal.NONE))
    world.step(ended, later_s)
    return True


def _began(world: World, pick: int) -> bool:
    """A worker begins with an effect in flight; the core may receive that event more than once."""
    op = _one(pick, [*world.flying])
    if op is not None:
        world.step([Began(op)])
    return op is not None


def _verify(world: World, pick: int, rotten: int, rank: int) -> bool:
    """The check of a load ends before its copy."""
    op = _one(pick, world.loads())
    if op is not None:
        world.step([world.verify(op, rotten, rank % len(world.cores) if rank >= 0 else -1)])
    return op is not None


def _half(world: World, pick: int, rank: int, lost: int, rotten: int) -> bool:
    """One rank completes an effect before the others."""
    op = _one(pick, [*world.flying])
    if op is not None:
        world.carry(op, rank % len(world.cores), lost, rotten)
    return op is not None


def _lose(world: World, pick: int) -> bool:
    op = _one(pick, [*world.flying])
    if op is not None:
        world.lose(op)
    return op is not None


def _again(world: World, pick: int) -> bool:
    """An effect that has ended ends again."""
    ended = _one(pick, world.ended)
    if ended is not None:
        world.seen["duplicated"] += 1
        world.step([ended])
    return ended is not None


def _unheard(world: World, ahead: int, good: int) -> bool:
    """The end of an effect that was never sent."""
    world.seen["ended before it began"] += 1
    world.step([Ended(max((effect.op for effect in world.log[-1:]), default=0) + ahead, good)])
    return True


def _rot(world: World, pick: int, rank: int, storage: int) -> bool:
    """A page is corrupted silently, in the host on one rank or in storage."""
    if storage:
        name = _one(pick, [*world.storage.objects])
        if name is not None:
            world.storage.objects[name] = ROTTEN
        found = name is not None
    else:
        transfers, pools = world.transfers[rank % len(world.transfers)], range(len(world.core.pools))
        arenas = [transfers.arenas[world.core.slot_pools.place(Tier.HOST, pool)] for pool in pools]
        pages = [(arena, at) for arena in arenas for at, content in enumerate(arena) if len(content) == PAGE]
        page = _one(pick, pages)
        if page is not None:
            page[0][page[1]] = ROTTEN
        found = page is not None
    world.seen[f"rotten in {'storage' if storage else 'the host'}"] += found
    return found


def _coming(world: World, text: str, salt: str, patience: int, for_s: float) -> bool:
    """A prompt that another server is still writing is opened: its ticket says until when."""
    world.open_packed(words(text), salt, PATIENCES[patience], expected=(len(text), for_s))
    world.seen["asked for what is coming"] += 1
    return True


def _elsewhere(world: World, text: str, salt: str, missing: int) -> bool:
    """Another server stores a prompt in the shared storage, without some pages (bits)."""
    world.stock(words(text), salt, missing)
    return True


def _forget(world: World, pick: int, many: int) -> bool:
    """Storage loses some objects."""
    names = [*world.storage.objects]
    for at in range(many if names else 0):
        world.storage.objects.pop(names[(pick + at) % len(names)], None)
    world.seen["forgotten by storage"] += bool(names)
    return bool(names)


def _mute(world: World, ranks: int) -> bool:
    """From now on storage answers misses to some ranks (bits)."""
    world.storage.mute = ranks
    world.seen["storage answers nothing"] += bool(ranks)
    return True


def _clear(world: World) -> bool:
    """An operator empties the storage."""
    world.seen["emptied the storage"] += world.attached
    world.cleared()
    return True


def _retry(world: World) -> bool:
    world.retry()
    return True


def _load(world: World, pick: int, decline: int) -> bool:
    """The engine names blocks for the pages that a lease offers."""
    assert isinstance(world, EngineWorld)
    lease = _one(pick, [lease for lease in world.leases if lease.phase is Phase.OFFERED])
    if lease is not None:
        world.load(lease, bool(decline))
    return lease is not None


def _forward(world: World, pick: int, more: int) -> bool:
    """The engine computes pages of a ready lease."""
    assert isinstance(world, EngineWorld)
    lease = _one(pick, _ready(world))
    if lease is not None:
        world.forward(lease, lease.boundary + more)
    return lease is not None


def _save(world: World, pick: int, positions: int) -> bool:
    """The engine offers some of the pages that it has."""
    assert isinstance(world, EngineWorld)
    lease = _one(pick, _ready(world))
    if lease is not None:
        world.save(lease, positions)
    return lease is not None


def _evict(world: World, pick: int, many: int) -> bool:
    assert isinstance(world, EngineWorld)
    return world.evict(pick, many)


ACTIONS: Mapping[str, Callable[..., bool]] = {
    "load": _load,
    "forward": _forward,
    "save": _save,
    "evict": _evict,
    "open": _open,
    "request": _request,
    "claim": _claim,
    "resumed": _resumed,
    "extend": _extend,
    "reserve": _reserve,
    "mark": _mark,
    "grow": _grow,
    "short": _short,
    "publish": _publish,
    "hand_over": _hand_over,
    "close": _close,
    "flush": _flush,
    "attach": _attach,
    "detach": _detach,
    "step": _step,
    "began": _began,
    "verify": _verify,
    "half": _half,
    "lose": _lose,
    "again": _again,
    "unheard": _unheard,
    "rot": _rot,
    "coming": _coming,
    "elsewhere": _elsewhere,
    "forget": _forget,
    "mute": _mute,
    "clear": _clear,
    "retry": _retry,
}


def _one(pick: int, those: Sequence[T]) -> T | None:
    return those[pick % len(those)] if those else None


def _further(world: World, pick: int, more: int) -> tuple[Lease | None, int]:
    """A ready lease that can keep more pages, and a page on the prefill grid up to which it can."""
    lease, grid = _one(pick, _ready(world)), world.core.grid
    upto = min(lease.pages, lease.grown + grid * more) // grid * grid if lease is not None else 0
    return (lease, upto) if lease is not None and upto > lease.grown else (None, 0)


def _ready(world: World) -> list[Lease]:
    return [lease for lease in world.leases if lease.ready]


# --- from a seed


class Director:
    """Draws the actions of one life; the frequency of each kind and of faults is drawn first."""

    def __init__(self, dice: random.Random, outside: bool = False) -> None:
        """`outside`: the nearest tier is an engine's."""
        self.dice = dice
        self.trouble = dice.choice([0.0, 0.05, 0.3])  # chance that a page of a copy does not arrive
        self.told = dice.choice([0.2, 0.6, 1.0])  # share of the effects in flight that end in a step
        self.crowd = dice.choice([1, 2, 4, 8])
        self.newest = dice.random() < 0.3  # the newest effect ends first, so old ones are very late
        # Storage calls that hang throughout this life, except those of a `request`.
        self.hanging = dice.choice([(), (), (), ("put",), ("get",), ("exists",), ("put", "get", "exists")])
        self.salts = dice.choice(["aaab", "aaab", "abcdefghijkl"])
        self.known: list[str] = []
        faults = dice.choice([0.0, 0.3, 1.0])
        weights = {
            "step": dice.choice([30, 60]),
            "request": dice.choice([2, 12]),
            "open": 18,
            "claim": dice.choice([4, 20]),
            "resumed": 3,
            "extend": dice.choice([0, 3]),
            "reserve": dice.choice([0, 6]),
            "mark": dice.choice([0, 1]),
            "grow": 12,
            "short": 2,
            "publish": 10,
            "hand_over": dice.choice([0, 0, 3]),
            "close": dice.choice([6, 14]),
            "flush": dice.choice([0, 4, 10]),
            "attach": 1,
            "detach": dice.choice([0, 0, 0.6]),
            "again": 1,
            "unheard": 0.5,
            "began": dice.choice([0, 6]),
            "verify": dice.choice([0, 10, 40]),
            "half": 6,
            "lose": 1.5 * faults,
            "elsewhere": dice.choice([0, 3, 6]),
            "coming": dice.choice([0, 2]),
            "rot": 4 * faults,
            "forget": 2 * faults,
            "mute": 0.5 * faults,
            "clear": dice.choice([0, 0, 0.5]),
            "retry": dice.choice([0, 1, 3]),
        }
        if outside:
            for kind in ("resumed", "reserve", "mark", "grow", "short", "publish"):
                del weights[kind]
            weights |= {"load": 20, "forward": 14, "save": 14, "evict": dice.choice([4, 12, 30])}
        # Weights vary between lives, so that an action that is rare in one is common in another.
        self.kinds, self.weights = [*weights], [weight * dice.choice([0.3, 1, 1, 3]) for weight in weights.values()]

    def action(self, world: World) -> Action:
        dice, pick = self.dice, self.dice.randrange(60)
        (kind,) = dice.choices(self.kinds, self.weights)
        salt = dice.choice(self.salts)
        if kind == "open" and len(world.leases) >= self.crowd:
            kind = "claim"
        match kind:
            case "step":
                return ["step", dice.choice([0.0, 0.5, 2.0]), self._ends(world)]
            case "request":
                return ["request", self._prompt(), salt, dice.randint(1, 3), int(dice.random() < 0.5)]
            case "open":
                reads, priority = dice.choices((0, 1, 2), (15, 75, 10))[0], dice.choice([0, 0, 1, 2])
                return ["open", self._prompt(), salt, dice.randrange(len(PATIENCES)), reads, priority]
            case "grow" | "short":
                return [kind, pick, dice.randint(1, 12)]
            case "load":
                return ["load", pick, int(dice.random() < 0.1)]
            case "forward":
                return ["forward", pick, dice.randint(1, 12)]
            case "save":
                return ["save", pick, dice.choice([2**70 - 1, 2**70 - 1, dice.getrandbits(12)])]
            case "evict":
                return ["evict", pick % 5, dice.choice([1, 3, 100])]
            case "reserve":
                return ["reserve", pick, dice.randint(1, 12)]
            case "mark":
                return ["mark", pick, dice.randint(1, 8)]
            case "publish":
                return ["publish", pick, dice.choice([0, 0, 1, 3])]
            case "flush":
                return ["flush", dice.choice([1, 2, 3, 3])]
            case "extend":
                text = dice.choice(["0", "1", "11", "0111", "101010"])
                return ["extend", pick, text, dice.choice([0, 0, 1, 3, 9])]
            case "attach":
                return ["attach", dice.randrange(2), dice.randrange(2)]
            case "detach":
                return ["detach", dice.randrange(2)]
            case "clear" | "retry":
                return [kind]
            case "unheard":
                return ["unheard", dice.choice([1, 2, 1000]), dice.choice([0, 1, 2**70 - 1])]
            case "half":
                return ["half", pick, dice.randrange(4), self._some(self.trouble), self._some(self.trouble / 3)]
            case "verify":
                return ["verify", pick, self._some(self.trouble / 3), dice.choice([-1, 0, 1])]
            case "rot":
                return ["rot", pick, dice.randrange(4), dice.randrange(2)]
            case "coming":
                patience = dice.randrange(len(PATIENCES))
                return ["coming", self._prompt(), salt, patience, dice.choice([0.0, 0.5, 4.0])]
            case "elsewhere":
                return ["elsewhere", self._prompt(), salt, self._some(self.trouble)]
            case "forget":
                return ["forget", pick, dice.choice([1, 1, 3, 100])]
            case "mute":
                return ["mute", dice.choice([0, 0, 0, 0, 1, 2, 15])]
            case _:
                return [kind, pick]

    def _ends(self, world: World) -> list[list[int]]:
        dice, ends = self.dice, []
        flying = [at for at, effect in enumerate(world.flying.values()) if _call(effect) not in self.hanging]
        for at in range(round(dice.random() ** 0.5 * self.told * len(flying))):
            pick = flying[-1 - at] if self.newest else dice.choice(flying)
            decay = self._some(self.trouble / 2) if dice.random() < 0.3 else 0
            ends.append([pick, self._some(self.trouble), decay, dice.choice([-1, -1, 0, 1, 2, 3])])
        return ends

    def _prompt(self) -> str:
        dice = self.dice
        if self.known and dice.random() < 0.8:
            return dice.choice(self.known) + dice.choice(["", "", "", "1", "10", "0111"])
        self.known = [*self.known, draw_prompt(dice)][-3:]
        return self.known[-1]

    def _some(self, chance: float) -> int:
        if not chance or self.dice.random() < 0.4:
            return 0
        if self.dice.random() < 0.1:
            return 2**70 - 1
        return sum((self.dice.random() < chance) << i for i in range(12))


def _call(effect: Transfer) -> str:
    """The storage call of an effect; empty if it is none."""
    if isinstance(effect, Probe):
        return "exists"
    return {Tier.STORAGE: "put"}.get(effect.target) or {Tier.STORAGE: "get"}.get(effect.source, "")


def born(seed: int, kind: str = "core") -> tuple[Life, random.Random]:
    """A life without actions, and the random generator that will draw them: of the core alone, of several ranks with
    their protocol ("ranks"), of an engine's scheduler over it ("engine"), or of a core over an engine's blocks
    ("blocks")."""
    dice = random.Random(seed)
    if kind == "engine":
        return Life(seed, 1, engines.setting(dice)), dice
    if kind == "ranks":
        return Life(seed, dice.randint(2, 8), {"divided": draw(dice)}), dice
    config = draw_engine(dice) if kind == "blocks" else draw(dice)
    return Life(seed, dice.choice([1, 1, 1, 1, 2, 3, 4, 8]), config), dice


def live(life: Life, dice: random.Random, steps: int | None = None) -> World:
    """Draw and apply the actions of a life; `life` holds them if it fails. Same seed, same life."""
    here = life.world()
    world = here.world if isinstance(here, Shop) else here
    director = (
        engines.Director(dice, here.room) if isinstance(here, Shop) else Director(dice, isinstance(here, EngineWorld))
    )
    steps = dice.randint(200, 900) if steps is None else steps
    while world.steps < steps:
        life.actions.append(director.action(here))  # type: ignore[arg-type]
        if not act(here, life.actions[-1]):
            life.actions.pop()
    finish(here)
    return world
