"""One rank of several, in a process of its own: `python one_rank.py what rank ranks socket`; prints JSON."""

import json
import random
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from filling import Clock, Request, a_config, a_region, a_store, an_identity, nothing_is_left, prompt

from kvarve.changes import CHANGE_S
from kvarve.core.effects import Began, Ended, Event
from kvarve.core.lease import Phase
from kvarve.errors import StorageError
from kvarve.keys import object_name
from kvarve.memory.record import HEADER_BYTES
from kvarve.prefix_cache import PrefixCache
from kvarve.ranks.group import Group
from kvarve.ranks.star import Listener, Star, alike, connect
from kvarve.testing import FaultyStorage
from kvarve.testing.faulty import Call
from kvarve.worker import Change

OPS, STEPS, PAGES = 60, 25, 200
NEVER = STEPS
DEADLINE_S = 60.0
PATIENCE_S = 3.0  # more than a request waits for storage here, less than a call may take


def ends_of(rank: int) -> list[tuple[int, Ended]]:
    """For each op the step in which it ends on this rank, and how; some never end on some rank."""
    rng = random.Random(rank)
    ends = []
    for op in range(OPS):
        step = NEVER if op % 20 == rank else rng.randrange(STEPS)
        good, bad = rng.getrandbits(PAGES), rng.getrandbits(PAGES)
        ends.append((step, Ended(op, good & ~bad, bad if rng.random() < 0.5 else 0)))
    rng.shuffle(ends)
    return ends


def begins_of(rank: int) -> dict[int, int]:
    """For some ops the step in which they begin on this rank; of the others it says nothing before they end."""
    ends = {end.op: step for step, end in ends_of(rank)}
    return {op: min(ends[op] // 2, 4 + rank) for op in range(1, OPS, 2)}


def clock_of(rank: int, step: int) -> float:
    return 1e6 * rank + step / 7


def agreement(star: Star, rank: int, ranks: int) -> object:
    group, heard = Group(star), []
    for step in range(STEPS):
        mine: list[Event] = [Began(op) for op, at in begins_of(rank).items() if at == step]
        mine += [end for at, end in ends_of(rank) if at == step]
        both, now, *_ = group.agree(mine, clock_of(rank, step))
        heard.append([now, [plain(event) for event in both]])
    return heard


def plain(event: Event) -> list[object]:
    return [event.op] if isinstance(event, Began) else [event.op, hex(event.good), hex(event.bad)]


def caches(star: Star, rank: int, ranks: int) -> object:
    """Two whole caches, of which the second one's storage loses and spoils pages."""
    store, clock = a_store(seed=rank), Clock()
    clock.now += 1000 * rank
    cache = PrefixCache(
        an_identity(), a_config(device=40_000), storage=store, rank=rank, agreement=Group(star), clock=clock
    )
    stem = prompt(6, seed=99)
    prompts = [prompt(8.5 + i, seed=i, prefix=stem if i % 2 else ()) for i in range(5)]
    said: list[object] = []

    def serve(tokens: list[int]) -> None:
        said.append(served(cache, clock, tokens, rank))

    def settle() -> None:
        settled(cache)

    for tokens in prompts:
        serve(tokens)
    settle()
    said.append(cache.scheduler.core.flush((0, 1)))  # type: ignore[arg-type]
    cache._send()
    settle()
    keys = [Request(cache, tokens, rank=rank) for tokens in (prompts[0], prompts[2], prompts[4])]
    spoilt, lost, stateless = (request.close() for request in keys)
    settle()
    if rank == 1:
        store.flip(object_name(spoilt.root, spoilt.key(5), "attention", rank, ranks), HEADER_BYTES)
        assert store.delete([object_name(lost.root, lost.key(6), "attention", rank, ranks)]) == [True]
        states = [object_name(stateless.root, stateless.key(page), "state", rank, ranks) for page in range(12)]
        assert any(store.delete(states))
    for _ in range(3):
        for tokens in prompts:
            serve(tokens)
        settle()
    said.append(vars(cache.scheduler.core.counters))
    said.append(nothing_is_left(cache))
    cache.shutdown(5)
    return said


def served(cache: PrefixCache, clock: Clock, tokens: list[int], rank: int) -> list[int]:
    """A whole request, and its hits: all ranks take the same steps."""
    request = Request(cache, tokens, rank=rank)
    stepped(cache, lambda: cache.claim(request.lease), clock)
    request.look()
    request.compute()
    return [request.lease.boundary, *request.close().from_tiers()]


def settled(cache: PrefixCache) -> None:
    stepped(cache, cache.idle)


def stepped(cache: PrefixCache, until: Callable[[], bool], clock: Clock | None = None) -> None:
    """Step until something holds that all ranks agree on."""
    for _ in range(2000):
        cache.step()
        cache.audit()
        if clock is not None:
            clock.now += 0.001
        if until():
            return
        cache.wait(0.01)
    raise AssertionError("that does not end")


def changes(star: Star, rank: int, ranks: int) -> object:
    """Changes of the storage that ranks propose at different moments, that fail on one, or that not all propose.

    `alike` has to be the same on all ranks, and `own` is how it ended on this one.
    """
    clock = Clock()
    clock.now += 1000 * rank
    cache = PrefixCache(an_identity(), a_config(), rank=rank, agreement=Group(star), clock=clock)
    tokens, alike, own = prompt(8.5), [], []
    stores = [a_store(seed=rank) for _ in range(3)]

    def ask(what: Callable[[], Change] | None, later_s: float = 0.0) -> None:
        """Ranks propose one after the other; after each step every rank says which storage is attached."""
        change = None
        for step in range(2 * ranks + 1):
            if step == 2 * rank and what is not None:
                change = what()
            cache.step()
            attached = None if cache.attached is None else stores.index(cache.attached.storage.inner.inner)  # type: ignore[arg-type]
            alike.append([attached, cache.scheduler.core.copies.storage])
            clock.now += later_s
        why = None if change is None or not change.made.done() else change.made.exception(0)
        own.append("nothing asked" if change is None else type(why).__name__ if change.made.done() else "waits")

    alike.append(served(cache, clock, tokens, rank))
    settled(cache)
    ask(lambda: cache.attach(stores[0], back_up=True))
    settled(cache)
    cache.flush()
    alike.append(served(cache, clock, tokens, rank))
    ask(lambda: cache.decline(StorageError("refused")) if rank else cache.attach(stores[1]))
    ask(lambda: cache.detach() if rank else cache.attach(stores[1]))
    ask(None if rank else lambda: cache.attach(stores[1]), later_s=CHANGE_S)
    alike.append(served(cache, clock, tokens, rank))
    ask(lambda: cache.attach(stores[2], back_up=True))
    settled(cache)
    cache.flush()
    alike.append(served(cache, clock, tokens, rank))
    stores[2].dead = rank == 1
    seed = 50
    while cache.scheduler.core.copies.storage:
        alike.append(served(cache, clock, prompt(4.5, seed=seed), rank))
        cache.step()
        seed += 1
    stores[2].dead = False
    alike.append(served(cache, clock, tokens, rank))
    stepped(cache, lambda: cache.scheduler.core.copies.storage)
    settled(cache)
    cache.flush()
    alike.append(served(cache, clock, tokens, rank))
    ask(cache.detach)
    settled(cache)
    alike.append(nothing_is_left(cache))
    cache.shutdown(5)
    return {"alike": alike, "own": own}


class Heard(Group):
    """Knows which copies have ended on this rank, whatever they have on others."""

    def __init__(self, star: Star) -> None:
        self._ended_here, self._more = set[int](), threading.Condition()
        super().__init__(star)

    def happened(self, event: Event) -> bool:
        told = super().happened(event)
        with self._more:
            if isinstance(event, Ended):
                self._ended_here.add(event.op)
                self._more.notify_all()
        return told

    def wait_for_ends(self, ops: Collection[int]) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self._ended_here.issuperset(ops), DEADLINE_S)


def stalls(star: Star, rank: int, ranks: int) -> object:
    """What all ranks open on, if on one of them, each in turn, a call of the storage stalls: a probe, or a read."""
    return [
        _beside_a_stalled_call(star, rank, call, rank == slow) for slow in range(ranks) for call in ("exists", "get")
    ]


def _beside_a_stalled_call(star: Star, rank: int, call: Call, stalled_here: bool) -> dict[str, object]:
    """A request that finds half of its pages in memory, and all of them in a storage that has stalled on one rank."""
    group, clock, phase = Heard(star), Clock(), Phase.PROBING if call == "exists" else Phase.FETCHING
    clock.now += 1000 * rank
    store = FaultyStorage(a_region(), seed=rank, stall_limit_s=2 * DEADLINE_S)
    cache = PrefixCache(an_identity(), a_config(), storage=store, rank=rank, agreement=group, clock=clock)
    stem = prompt(4, seed=1)
    half, whole = prompt(4.5, seed=2, prefix=stem), prompt(8.5, seed=3, prefix=stem)
    for tokens in (half, whole):
        served(cache, clock, tokens, rank)
    settled(cache)
    cache.flush()
    before = served(cache, clock, half, rank)
    settled(cache)
    if stalled_here:
        store.stall(call)
    try:
        request = Request(cache, whole, rank=rank)
        lease, waited = request.lease, [not cache.claim(request.lease)]
        stepped(cache, lambda: lease.phase is phase and lease.begun)
        if stalled_here:
            store.wait_for_stalled_call()
        else:
            group.wait_for_ends([*lease.ops])
        for _ in range(5):
            cache.step()
            waited.append(not cache.claim(lease))
        if not rank:  # whose time is that of all
            clock.now += PATIENCE_S
        cache.step()
        opened = cache.claim(lease)
        request.look()
    finally:
        store.release()
    found = {"before": before, "waited": waited, "opened": opened, "boundary": lease.boundary, "digest": group._digest}
    request.compute().close()
    settled(cache)
    cache.flush()
    found |= {"after": served(cache, clock, whole, rank), "nothing_left": nothing_is_left(cache)}
    cache.shutdown(5)
    return found | {"last_digest": group._digest}


def met(rank: int, ranks: int, socket: Path) -> Star:
    if rank:
        return connect(socket, rank, ranks, alike("a test"), DEADLINE_S)
    listener = Listener([socket])
    try:
        return listener.accept(ranks, alike("a test"), DEADLINE_S)
    finally:
        listener.close()


def main(what: str, rank: int, ranks: int, socket: str) -> None:
    parts: dict[str, Callable[[Star, int, int], object]] = {
        "agreement": agreement,
        "caches": caches,
        "changes": changes,
        "stalls": stalls,
    }
    said = {}
    for number, part in enumerate(what.split(",")):
        star = met(rank, ranks, Path(f"{socket}-{number}"))
        said[part] = parts[part](star, rank, ranks)
        star.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
