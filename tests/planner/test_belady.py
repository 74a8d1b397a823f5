"""Belady's bound: nothing hits more, and where no prompt ends with a full page something hits as much."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from kvarve.core.policies import Policies
from kvarve.planner import SimulationConfig, TraceRequest, replayed
from kvarve.planner.sweep import COMPARED, Belady, most_pages

BLOCK = 4
PAGE_BYTES = 4096  # what a host record is a multiple of


def prompts(seed: int, requests: int, deepest: int = 4, ragged: bool = True) -> list[TraceRequest]:
    """Prompts that go on from one another at random; each ends inside of a page, or, if not `ragged`, some with one."""
    dice, known = random.Random(seed), [()]
    found, fresh = [], iter(range(10**6))
    for at in range(requests):
        base = dice.choice(known)
        ids = (*base[: dice.randint(0, len(base))], *(next(fresh) for _ in range(dice.randint(0, 2))))[:deepest]
        known.append(ids)
        again = ids or (next(fresh),)
        extra = 1 if ragged else dice.choice((0, 1))
        found.append(TraceRequest(1000.0 * at, len(again) * BLOCK + extra, 1, again))
    return found


def config(pages: int, **more: object) -> SimulationConfig:
    kv = {"kv_bytes_per_token": PAGE_BYTES // BLOCK, "block_tokens": BLOCK, "page_tokens": BLOCK}
    return SimulationConfig(pages * PAGE_BYTES, **kv | more)  # type: ignore[arg-type]


def best_of_all(requests: Sequence[TraceRequest], pages: int) -> int:
    """The most pages hit by any choice of what to keep after each request, by trying all of them."""
    best = {frozenset[int](): 0}
    for request in requests:
        most = (request.input_length - 1) // BLOCK
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            here = next(
                (at for at, page in enumerate(request.ids[:most]) if page not in kept), min(most, len(request.ids))
            )
            for choice in subsets([*kept.union(request.ids)], pages):
                after[choice] = max(after.get(choice, 0), hits + here)
        best = after
    return max(best.values())


def subsets(pages: list[int], most: int) -> Iterator[frozenset[int]]:
    for size in range(min(most, len(pages)) + 1):
        yield from map(frozenset, combinations(pages, size))


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_the_bound_is_the_best_of_all_choices(pages: int) -> None:
    for seed in range(10):
        requests = prompts(seed, 7, deepest=3)
        bound = Belady(requests, BLOCK, BLOCK).hit_tokens(pages)
        assert bound == best_of_all(requests, pages) * BLOCK, f"seed {seed}"


SHORT: list[dict[str, object]] = [
    *({"policies": Policies(eviction=order)} for order in ("lru", "s3fifo")),
    {"host_memory": 8 * 8192, "storage_memory": 8 * 8192},
    {"window_tokens": 6, "window_bytes_per_token": 100, "state_bytes": 3000},
    {"replicas": 2, "host_memory": 8 * 8192, "storage_memory": 20 * 8192, "routing": "random"},
]
LONG: list[dict[str, object]] = [
    *SHORT,
    *({"policies": Policies(eviction=order)} for order in (*COMPARED, "priority") if order not in ("lru", "s3fifo")),
    {"state_bytes": 5000},
    {"state_bytes": 5000, "host_memory": 1 << 18},
    {"replicas": 3},
    {"chunk_tokens": 2 * BLOCK},
]


@pytest.mark.parametrize(
    ("more", "seeds"),
    [*((more, 3) for more in SHORT), *(pytest.param(more, 30, marks=pytest.mark.long) for more in LONG)],
)
def test_no_cache_with_the_same_bytes_hits_more(more: dict[str, object], seeds: int) -> None:
    for seed in range(seeds):
        requests = prompts(seed, 60, deepest=8, ragged=bool(seed % 2))
        for pages in (8, 12):
            settings = config(pages, **more)
            hit = sum(replayed(requests, settings).hit_tokens.values())
            assert hit <= Belady(requests, BLOCK, BLOCK).hit_tokens(most_pages(settings)), f"seed {seed}, {pages} pages"


def test_with_room_for_everything_the_bound_is_what_was_seen_before() -> None:
    requests = prompts(7, 200, deepest=20)
    belady = Belady(requests, BLOCK, BLOCK)
    seen = replayed(requests, config(belady.pages)).infinite_hit_tokens
    assert belady.hit_tokens(belady.pages) == belady.hit_tokens(float("inf")) == seen > 0
    assert belady.hit_tokens(0) == 0
