"""One rank of several, in a process of its own: `python one_rank.py rank ranks socket`; prints JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from filling import Clock, Request, a_config, a_store, an_identity, nothing_is_left, prompt

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.pages.keys import object_name
from kvarve.ranks.group import Group
from kvarve.ranks.star import Listener, Star, alike, connect
from kvarve.records.record import HEADER_BYTES

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
    stepped(cache, cache.scheduler.core.idle)


def stepped(cache: PrefixCache, until: Callable[[], bool], clock: Clock | None = None) -> None:
    """Step until something holds that all ranks agree on."""
    for _ in range(2000):
        cache.step()
        cache.scheduler.audit()
        if clock is not None:
            clock.now += 0.001
        if until():
            return
        cache.wait(0.01)
    raise AssertionError("that does not end")


def met(rank: int, ranks: int, socket: Path) -> Star:
    if rank:
        return connect(socket, rank, ranks, alike("a test"), DEADLINE_S)
    listener = Listener([socket])
    try:
        return listener.accept(ranks, alike("a test"), DEADLINE_S)
    finally:
        listener.close()


if __name__ == "__main__":
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    star = met(rank, ranks, Path(sys.argv[3]))
    print(json.dumps(caches(star, rank, ranks)))
    star.close()
