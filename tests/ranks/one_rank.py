"""One rank of several, in a process of its own: `python one_rank.py what rank ranks socket`; prints JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from filling import Clock, Request, a_config, a_store, an_identity, nothing_is_left, prompt

from kvarve.changes import CHANGE_S
from kvarve.errors import StorageError
from kvarve.keys import object_name
from kvarve.memory.record import HEADER_BYTES
from kvarve.prefix_cache import PrefixCache
from kvarve.ranks.group import Group
from kvarve.ranks.star import Listener, Star, alike, connect
from kvarve.worker import Change

DEADLINE_S = 60.0


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


def met(rank: int, ranks: int, socket: Path) -> Star:
    if rank:
        return connect(socket, rank, ranks, alike("a test"), DEADLINE_S)
    listener = Listener([socket])
    try:
        return listener.accept(ranks, alike("a test"), DEADLINE_S)
    finally:
        listener.close()


def main(what: str, rank: int, ranks: int, socket: str) -> None:
    parts: dict[str, Callable[[Star, int, int], object]] = {"caches": caches, "changes": changes}
    said = {}
    for number, part in enumerate(what.split(",")):
        star = met(rank, ranks, Path(f"{socket}-{number}"))
        said[part] = parts[part](star, rank, ranks)
        star.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
