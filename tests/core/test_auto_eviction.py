"""The traffic chooses the eviction order: shadow caches say which one would have hit more."""

import random
from collections.abc import Iterable, Iterator

import pytest

from kvarve.core.audit import audit
from kvarve.core.cache import Core
from kvarve.core.slots.orders.auto import CANDIDATES, MOST, Auto, Shadow, Shadows
from kvarve.core.tree.tree import traces_of
from kvarve.pages.keys import pack, root_key
from tests.sim.world import ATTENTION, STATE, config, prompt

ROOT = root_key(b"auto")


def scan(requests: int) -> Iterator[list[int]]:
    """A few prompts that come again and again among many that never do."""
    for at in range(requests):
        yield prompt(2, seed=at % 30 // 3) if at % 3 == 0 else prompt(4, seed=1000 + at)


def conversations(requests: int, seed: int = 7) -> Iterator[list[int]]:
    """A few at a time, which end for good after some turns."""
    talks: list[tuple[int, int]] = []
    dice = random.Random(seed)
    for at in range(requests):
        if len(talks) < 8:
            talks.append((10**6 + at, 0))
        number = dice.randrange(len(talks))
        talk, turns = talks[number]
        talks[number] = talk, turns + 1
        yield prompt(2 * turns + 1, seed=talk)
        if turns == 4:
            del talks[number]


def new_core(eviction: str, slots: int = 64) -> Core:
    return Core(config(ATTENTION, device=slots, eviction=eviction))


def hits(core: Core, requests: Iterable[list[int]]) -> int:
    """Pages from which requests resumed, each of them computed and published before the next."""
    found = 0
    for tokens in requests:
        lease = core.open(ROOT, pack(tokens), 0.0)
        assert core.claim(lease, 0.0)
        found += lease.boundary
        core.grow(lease, core.keepable(lease))
        core.publish(lease, lease.grown)
        core.close(lease)
    return found


def order_of(core: Core) -> str:
    order = core.slot_pools.orders[0]
    assert isinstance(order, Auto)
    return order.name


@pytest.mark.parametrize(
    ("traffic", "chosen"), [([*scan(600)], "s3fifo"), ([*conversations(500)], "lru")], ids=["scan", "conversations"]
)
def test_it_becomes_the_order_that_hits_more(traffic: list[list[int]], chosen: str) -> None:
    found = {name: hits(core := new_core(name), traffic) for name in ("lru", "s3fifo", "auto")}
    assert order_of(core) == chosen
    assert min(found["lru"], found["s3fifo"]) < 0.9 * found[chosen], "this traffic tells them apart"
    assert found["auto"] > 0.8 * found[chosen]


def test_it_follows_traffic_that_changes() -> None:
    core = new_core("auto")
    hits(core, scan(500))
    assert order_of(core) == "s3fifo"
    hits(core, conversations(800))
    assert order_of(core) == "lru"
    audit(core)


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_shadow_of_a_sample_hits_as_often_as_the_whole(name: str) -> None:
    dice, whole, sample = random.Random(7), Shadow(name), Shadow(name)
    names = [dice.getrandbits(64) for _ in range(8000)]
    seen = found = of_sample = found_there = 0
    for _ in range(10_000):
        trace = dice.choice(names[:1500] if dice.random() < 0.7 else names)
        seen, found = seen + 1, found + whole.see([trace], 2000)
        if not trace & 7:
            of_sample, found_there = of_sample + 1, found_there + sample.see([trace], 2000 >> 3)
    assert 0.3 < found / seen < 0.8
    assert abs(found_there / of_sample - found / seen) < 0.03


@pytest.mark.parametrize("pages", [1, 100, MOST, 10 * MOST, 1000 * MOST])
def test_shadows_are_bounded_whatever_the_memory(pages: int) -> None:
    shadows, dice = Shadows(pages), random.Random(7)
    for _ in range(200):
        shadows.see([dice.getrandbits(64 - zeros) << zeros for zeros in range(12) for _ in range(10)])
    for shadow in shadows.of.values():
        assert 0 < len(shadow.pages) <= min(pages, MOST)
        assert len(shadow.order.runs()) <= 2 * len(shadow.pages)


def test_a_shadow_counts_pages_up_to_the_first_that_is_missing() -> None:
    shadow = Shadow("lru")
    assert shadow.see([1, 2, 3, 4], 3) == 0
    assert shadow.see([1, 2, 3, 4], 3) == 3, "the last page of a prompt leaves first"
    assert shadow.see([9, 2, 3], 3) == 0, "a page cannot be used without the one before it"


def test_every_tier_that_has_memory_chooses_for_itself_but_with_states_it_stays_lru() -> None:
    for host, tiers in ((64, {0, 1}), (0, {0})):
        core = Core(config(ATTENTION, device=16, host=host, eviction="auto"))
        assert core.slot_pools.shadows.keys() == tiers
    for pools, order in (((ATTENTION,), "lru"), ((ATTENTION, STATE), "auto")):
        assert not Core(config(*pools, device=16, host=64, eviction=order)).slot_pools.shadows


def test_the_trace_of_a_page_is_the_same_whether_the_tree_knows_it_or_not() -> None:
    core, tokens = new_core("lru"), pack(prompt(6))
    root = core.slot_pools.root(ROOT)
    unknown = traces_of(root, 0, tokens)
    assert len(unknown) == 6
    hits(core, [prompt(3), prompt(2, extra=0) + prompt(3, seed=5)])  # the prompt now leaves the tree inside of it
    tail, _, known = core.paths.find(ROOT, tokens)
    assert known == 3
    assert traces_of(tail, known, tokens) == unknown
