"""Simulated engines: the real scheduler over the real core, with the world's storage, lanes and clock.

No tensor and no thread: an answer is a count of tokens, a chunk is a grow and a publish. After each admission the law
of admission is checked (`tests/sim/law.py`), and at the end every accepted request has had exactly one last chunk.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvarve.core.copies.effects import Copy
from kvarve.core.lease import Lease
from kvarve.core.observe.headroom import Demand, copying, demand, device_state, making_room
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import MEMORY_TIERS
from kvarve.reference.engine.request_scheduler import STALL_S, Scheduler, Task, within
from tests.sim.law import Passes, waits_in_vain
from tests.sim.world.scenes import PATIENCES, configure, draw, draw_prompt, words
from tests.sim.world.world import World

TURNS = 4000  # in which all waiting requests have ended once no new ones arrive


class Order(Task):
    """A request of the simulated engine; its output tokens are drawn beforehand."""

    def __init__(self, number: int, prompt: bytes, answer: bytes, salt: str, patience: int, reads: bool, lease: Lease):
        """`answer`: its output tokens at most; it may end earlier."""
        super().__init__(lease, len(prompt) // TOKEN_BYTES, len(answer) // TOKEN_BYTES)
        self.number, self.text, self.answer, self.salt = number, prompt, answer, salt
        self.patience, self.reads = patience, reads
        self.ends = self.max_new_tokens  # tokens after which it ends
        self.spoken = self.done = 0
        self.leased_tokens = self.prefill_until

    @property
    def output_tokens(self) -> int:
        return self.spoken

    @property
    def computed(self) -> int:
        return self.done

    def tokens(self, start: int, stop: int) -> bytes:
        return (self.text + self.answer)[start * TOKEN_BYTES : stop * TOKEN_BYTES]


class Pages:
    """The world behind the scheduler's protocols."""

    def __init__(self, world: World) -> None:
        self._world = world

    def demand(self, asked: Sequence[tuple[Lease, int]]) -> Demand:
        return demand(self._world.core, asked)

    def device_state(self) -> object:
        return device_state(self._world.core)

    def making_room(self) -> bool:
        return making_room(self._world.core)

    def copying(self) -> bool:
        return copying(self._world.core)

    def found(self, lease: Lease) -> int:
        return self._world.core.lookup(lease.root, lease.tokens).memory

    def shape(self) -> int:
        return self._world.core.tree.shape

    def shared_prefix(self, ahead: Lease, behind: Lease) -> int:
        return self._world.core.shared_prefix(ahead, behind)

    def claim(self, lease: Lease) -> bool:
        return self._world.claim(lease)

    def reserve(self, lease: Lease, upto: int) -> bool:
        return self._world.reserve(lease, upto)

    def mark(self, lease: Lease, boundary: int) -> bool:
        return self._world.mark(lease, boundary)

    def close(self, lease: Lease) -> None:
        self._world.close(lease)


class Shop:
    """A simulated engine: its steps in a world."""

    def __init__(self, config: Mapping[str, Any], places: int, turn_tokens: int, again: bool) -> None:
        """`again`: a preempted request decodes its output again token by token; else the output joins its prompt."""
        self.world = World(config=configure(config))
        core = self.world.core
        self.again, self.turn_tokens = again, turn_tokens
        self.page, self.chunk = core.config.page_tokens, core.config.chunk_tokens
        pages = Pages(self.world)
        self.scheduler: Scheduler[Order] = Scheduler(
            pages,
            pages,
            max_running=places,
            page_tokens=self.page,
            chunk_tokens=self.chunk,
            reopen=self._open_again,
            begin=self._begin,
            stop=self._stop,
            fail=self._fail,
            clock=lambda: self.world.now,
        )
        self.orders: dict[int, Order] = {}  # without their last chunk
        self.last: Counter[int] = Counter()  # last chunks by request
        self.accepted = 0
        self.passes = Passes()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Shop":
        return cls(plain["core"], plain["places"], plain["turn_tokens"], plain["again"])

    @property
    def room(self) -> int:
        """Tokens of the longest sequence that fits on the device."""
        capacity = self.world.core.slot_pools.capacity
        return min((capacity[pool] for pool in self.world.core.slot_pools.chains), default=1 << 20) * self.page

    def come(self, text: str, salt: str, patience: int, reads: int, most: int, ends: int) -> bool:
        prompt = words(text)
        if not prompt or most < 1 or len(prompt) // TOKEN_BYTES + most - 1 > self.room:
            self.world.seen["refused"] += 1
            return False
        self.accepted += 1
        answer = words("".join("01"[(self.accepted + at) % 2] for at in range(most)))
        lease = self._open(prompt, salt, patience, bool(reads))
        order = Order(self.accepted, prompt, answer, salt, patience, bool(reads), lease)
        order.ends = min(most, ends)
        self.orders[order.number] = order
        self.scheduler.join(order)
        return True

    def leave(self, pick: int) -> bool:
        """A client disconnects."""
        if not self.orders:
            return False
        order = [*self.orders.values()][pick % len(self.orders)]
        self.world.seen["left while running" if order in self.scheduler.running else "left while waiting"] += 1
        self._end(order)
        return True

    def turn(self, later_s: float, ends: list[list[int]]) -> bool:
        world = self.world
        ended = []
        for pick, lost, rotten in ends:
            if world.flying:
                ended.append(world.end([*world.flying][pick % len(world.flying)], lost, rotten))
        world.step(ended, later_s)
        self.passes.before(self.scheduler, world.core)
        self.scheduler.admit()
        assert not (why := waits_in_vain(self.scheduler, world.core)), f"no request waits in vain: {why}"
        assert not (why := self.passes.after(self.scheduler, world.core)), f"no request is passed for ever: {why}"
        running = len(self.scheduler.running) + len(self.scheduler.loading)
        assert running <= self.scheduler.max_running, "no more run than there are places"
        assert not any(order.lease.ready for order in self.scheduler.waiting), "what waits in line holds nothing"
        world.seen["ran beside others"] += running > 1
        self._answer()
        self._prefill()
        return True

    def _answer(self) -> None:
        world = self.world
        answers = [order for order in self.scheduler.running if not order.prefilling]
        holders = [*self.scheduler.running, *self.scheduler.loading]
        oldest = min(holders, key=lambda order: order.admitted_seq, default=None)
        free = not copying(world.core)  # else it may be preempted while it waits for a copy
        reserved = [order for order in sorted(answers, key=lambda order: order.admitted_seq) if self._seated(order)]
        if oldest in answers and len(holders) > 1 and free:
            assert oldest in self.scheduler.running, "the oldest is never preempted"
        for order in reserved:
            if order not in self.scheduler.running:  # preempted by a later one's growth
                continue
            order.done += 1
            if not self.again and order.done % self.chunk == 0:
                self.world.extend_packed(order.lease, order.tokens(order.leased_tokens, order.done))
                order.leased_tokens = order.done
                self._keep(order)
            self._say(order)

    def _seated(self, order: Order) -> bool:
        return order in self.scheduler.running and self.scheduler.reserved(order)

    def _prefill(self) -> None:
        pieces = []
        for order in self.scheduler.running:
            if order.prefilling:
                line = min(order.prefill_until, (order.done // self.chunk + 1) * self.chunk)
                pieces.append((order, line - order.done))
        for order in [*within(self.turn_tokens, pieces)]:
            order.done = min(order.prefill_until, (order.done // self.chunk + 1) * self.chunk)
            self.scheduler.running.remove(order)
            self.scheduler.running.append(order)
            self._keep(order)
            self._say(order)

    def _keep(self, order: Order) -> None:
        lease, upto = order.lease, min(order.done // self.page, order.lease.pages)
        if order.done % self.chunk == 0 and upto > lease.grown:
            self.world.grow(lease, upto)
            self.world.publish(lease, lease.grown)

    def _say(self, order: Order) -> None:
        assert order.done <= order.reserved_pages * self.page, "it computes where it has room"
        if order.done == order.length:
            order.spoken += 1
            if order.spoken >= order.ends:
                self.world.seen["answered"] += 1
                self._end(order)

    # --- called by the scheduler

    def _open(self, tokens: bytes, salt: str, patience: int, reads: bool) -> Lease:
        return self.world.open_packed(tokens, salt, PATIENCES[patience], reads)

    def _open_again(self, order: Order) -> Lease:
        if not self.again:
            order.prefill_until = order.length
        order.leased_tokens = order.prefill_until
        return self._open(order.tokens(0, order.prefill_until), order.salt, order.patience, order.reads)

    def _begin(self, order: Order) -> None:
        order.done = order.lease.boundary * self.page
        self.world.seen["began"] += 1
        self.world.resumed(order.lease)

    def _stop(self, order: Order) -> None:
        self.world.seen["preempted"] += 1
        order.done = 0

    def _fail(self, order: Order, why: str) -> None:
        under_way = [*self.world.lost.values(), *self.world.flying.values()]
        assert any(isinstance(each, Copy) for each in under_way), f"it fails though no copy is under way: {why}"
        self.world.seen["failed for a copy that does not end"] += 1
        self._end(order)

    def _end(self, order: Order) -> None:
        self.scheduler.leave(order)
        self.world.close(order.lease)
        del self.orders[order.number]
        self.last[order.number] += 1

    # --- the end

    def finish(self) -> None:
        """No new requests, and all copies end: every request is answered, and nothing is left behind."""
        world = self.world
        world.storage.mute = 0
        world.step([world.give_up(op) for op in [*world.lost]])
        for turn in range(TURNS):
            if not self.orders:
                break
            self.turn(0.5, [[0, 0, 0]] * len(world.flying))
            assert turn < TURNS - 1, f"{len(self.orders)} requests are never answered"
        assert sorted(self.last) == [*range(1, self.accepted + 1)], "every accepted request has a last output"
        assert set(self.last.values()) <= {1}, "and only one"
        assert not self.scheduler.running and not self.scheduler.loading and not len(self.scheduler.waiting)
        world.drain()


# --- lives


def _come(shop: Shop, text: str, salt: str, patience: int, reads: int, most: int, ends: int) -> bool:
    return shop.come(text, salt, patience, reads, most, ends)


def _leave(shop: Shop, pick: int) -> bool:
    return shop.leave(pick)


def _turn(shop: Shop, later_s: float, ends: list[list[int]]) -> bool:
    return shop.turn(later_s, ends)


def _lose(shop: Shop, pick: int) -> bool:
    flying = [*shop.world.flying]
    if flying:
        shop.world.lose(flying[pick % len(flying)])
    return bool(flying)


def _verify(shop: Shop, pick: int) -> bool:
    """The check of a load ends before its copy."""
    loads = shop.world.loads()
    if loads:
        shop.world.step([shop.world.verify(loads[pick % len(loads)])])
    return bool(loads)


def _give_up(shop: Shop) -> bool:
    """The lanes end lost effects as failed."""
    lost = [*shop.world.lost]
    shop.world.step([shop.world.give_up(op) for op in lost])
    return bool(lost)


def _flush(shop: Shop, tiers: int) -> bool:
    shop.world.flush(*[tier for tier in MEMORY_TIERS if tiers >> tier & 1])
    return True


def _mute(shop: Shop, ranks: int) -> bool:
    shop.world.storage.mute = ranks
    return True


def _forget(shop: Shop, pick: int) -> bool:
    objects = shop.world.storage.objects
    if objects:
        objects.pop([*objects][pick % len(objects)])
    return bool(objects)


ACTIONS: Mapping[str, Callable[..., bool]] = {
    "come": _come,
    "leave": _leave,
    "turn": _turn,
    "lose": _lose,
    "verify": _verify,
    "give up": _give_up,
    "flush": _flush,
    "mute": _mute,
    "forget": _forget,
}


class Director:
    """Draws arrivals, answer lengths and faults."""

    def __init__(self, dice: random.Random, room: int) -> None:
        self.dice, self.room = dice, room
        self.told = dice.choice([0.2, 0.6, 1.0])
        self.trouble = dice.choice([0.0, 0.0, 0.1])
        self.most = dice.choice([1, 3, 12, 30])
        self.crowd = dice.choice([2, 5, 12, 30])
        self.known: list[str] = []
        faults = dice.choice([0.0, 0.0, 1.0])
        self.kinds = [*ACTIONS]
        come = dice.choice([5, 15, 40])
        self.weights = [
            come,
            dice.choice([0, 2]),
            60,
            0.5 * faults,
            dice.choice([0, 8]),
            2,
            dice.choice([0, 1]),
            0.3 * faults,
            faults,
        ]

    def action(self, shop: Shop) -> list[Any]:
        dice = self.dice
        (kind,) = dice.choices(self.kinds, self.weights)
        if kind == "come" and len(shop.orders) >= self.crowd:
            kind = "turn"
        match kind:
            case "come":
                most = dice.choice([1, dice.randint(1, self.most)])
                reads, salt = int(dice.random() < 0.9), dice.choice("aaab")
                ends = most if dice.random() < 0.6 else dice.randint(1, most)
                return [kind, self._prompt(most), salt, dice.randrange(4), reads, most, ends]
            case "turn":
                flying = len(shop.world.flying)
                many = round(dice.random() ** 0.5 * self.told * flying)
                ended = [[dice.randrange(flying), self._some(), 0] for _ in range(many)]
                return [kind, dice.choice([0.0, 0.1, 0.5, STALL_S / 10]), ended]
            case "give up":
                return [kind]
            case "flush":
                return [kind, dice.choice([1, 2, 3])]
            case "mute":
                return [kind, dice.randrange(2)]
            case _:
                return [kind, dice.randrange(60)]

    def _prompt(self, most: int) -> str:
        """A known prompt or a new one; sometimes one that exactly fills the device."""
        dice = self.dice
        if dice.random() < 0.1:
            return "0" * max(1, self.room - most + 1) if self.room < 100 else "01"
        if self.known and dice.random() < 0.5:
            return dice.choice(self.known) + dice.choice(["", "", "1", "10", "0111"])
        self.known = [*self.known, draw_prompt(dice) + dice.choice("01") * dice.choice([1, 1, 5, 16])][-4:]
        return self.known[-1]

    def _some(self) -> int:
        return self.dice.getrandbits(6) if self.dice.random() < self.trouble else 0


def setting(dice: random.Random) -> dict[str, Any]:
    """Draw a core with a chain, as every engine's model has, and the engine's settings."""
    config = draw(dice)
    while not any(pool["lookback"] is None for pool in config["pools"]):
        config = draw(dice)
    return {
        "core": config,
        "places": dice.choice([1, 2, 3, 8]),
        "turn_tokens": dice.choice([1, 6, 20]),
        "again": dice.random() < 0.3,
    }
