"""Pools that share a memory tier: extents go from pool to pool as the traffic asks."""

import random
from array import array
from itertools import product

import pytest

from kvarve.cache.config import cut_memory, split
from kvarve.core.slots.extents import Cut, Extents, cut
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from tests.sim.world import World, config, prompt
from tests.sim.world.scenes import ATTENTION, PAGE_TOKENS, STATE

DEVICE = Tier.DEVICE


def shared(*pools: PoolSpec, count: int, per: list[int], least: list[int] | None = None, **rest: object) -> World:
    cut = {"device": (count, per, least or [1] * len(pools))}
    return World(config=config(*pools, device=1, cut=cut, **rest))  # type: ignore[arg-type]


def owned(world: World) -> list[int]:
    extents = world.core.slot_pools.extents[0]
    assert extents is not None
    return extents.owned


def test_a_budget_is_cut_into_whole_slots_of_every_pool() -> None:
    for budget, sizes in product([10**4, 10**6, 10**9], [(12, 77), (4096, 8192, 4096), (1, 1000), (7, 7)]):
        if (found := cut(budget, sizes, [2] * len(sizes))) is not None:
            assert found.count * found.nbytes <= budget and all(found.per)
            assert all(per * size <= found.nbytes for per, size in zip(found.per, sizes, strict=True))
            assert all(least * per >= 2 for least, per in zip(found.least, found.per, strict=True))
    assert cut(100, (12, 77), (2, 2)) is None, "too little for two slots of each"


def test_slots_of_the_pool_that_is_likely_to_have_most_fill_an_extent() -> None:
    pages, states = (cut(1 << 30, (700_000, 1_111_000), (8, 2), shares) for shares in ((0.9, 0.1), (0.1, 0.9)))
    assert pages is not None and pages.nbytes % 700_000 == 0
    assert states is not None and states.nbytes % 1_111_000 == 0


@pytest.mark.parametrize("sizes", [(3 * 4096, 19 * 4096), (4096, 5 * 4096, 7 * 4096)])
def test_the_slots_of_an_extent_begin_at_whole_blocks(sizes: tuple[int, ...]) -> None:
    found = cut(4096 * 10**5, sizes, [2] * len(sizes), unit=4096)
    assert found is not None
    for per, size in zip(found.per, sizes, strict=True):
        assert found.nbytes % per == 0 and found.nbytes // per % 4096 == 0 and found.nbytes // per >= size


def test_what_has_moved_is_told_once_and_pools_have_no_more_memory_than_there_is() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice, extents = random.Random(seed), Extents(Cut(9, (4, 1), (1, 2)))
    behind = set[tuple[int, int]]()  # pools and extents that have memory
    for _ in range(400):
        pool = dice.randrange(2)
        mine, per = [at for at, owner in enumerate(extents.pool_of) if owner == pool], extents.cut.per[pool]
        if mine and dice.random() < 0.5:  # all but the chosen ones are in use
            used = [slot for extent in mine for slot in range(extent * per, (extent + 1) * per) if dice.random() < 0.5]
            extents.take(pool, used)
            extents.loosen(pool, array("i"))
            extents.give(pool, used)
        else:
            extents.grow(pool)
        if dice.random() < 0.4:
            left, joined = extents.moved()
            assert {*left} <= behind
            behind -= {*left}
            assert not behind & {*joined}
            behind |= {*joined}
            assert behind == {(owner, extent) for extent, owner in enumerate(extents.pool_of) if owner >= 0}
            assert len({extent for _, extent in behind}) == len(behind), "an extent is behind one pool"


def test_states_are_bounded_where_an_operator_wants_that() -> None:
    pools = [PoolSpec(str(back), (BufferSpec("x", (64 * 2**10,), "uint8"),), back) for back in (None, 3, 1)]
    free, bound = (cut_memory(64 << 20, pools, 16, 64, records=False, states=states) for states in (0, 5))
    assert free is not None and bound is not None
    for at, slots in ((1, 15), (2, 5)):
        assert slots <= bound.most(at) < slots + bound.per[at] and free.most(at) > bound.most(at)
    assert free.most(0) == bound.most(0)
    assert split(64 << 20, pools, 16, 64, records=False, what="device", states=5)[1:] == (15, 5)


def test_an_extent_goes_only_while_all_its_slots_are_free() -> None:
    extents = Extents(Cut(4, (2, 1), (1, 1)))
    assert [extents.grow(0) for _ in range(4)] == [range(2), range(2, 4), range(4, 6), None], "one is the other's"
    extents.take(0, [0, 2, 3])
    world = shared(ATTENTION, STATE, count=4, per=[2, 1])
    free = world.core.slot_pools.free[0][:0]
    free.extend([1, 4, 5])
    assert extents.loosen(0, free).tolist() == [1] and extents.owned == [2, 0]
    extents.give(0, [2])
    free = extents.loosen(0, free[:1])
    assert extents.owned == [2, 0], "slot 3 is in use"
    extents.give(0, [3])
    assert extents.grow(1) == range(2, 3) and extents.owned == [2, 1]


def test_prompts_alone_take_what_states_do_not_use_and_states_take_it_back() -> None:
    world = shared(ATTENTION, STATE, count=16, per=[4, 1], keep_states="none")
    for seed in range(4):
        world.request(prompt(15, seed=seed))
    assert all(world.hit(prompt(15, seed=seed))[0] == 0 for seed in range(4)), "no states are kept"
    assert owned(world)[0] == 15, "all but the least of the states"
    assert len(world.core.evictions.reserve(1, 15, b"any")) == 15 and owned(world) == [1, 15]


def test_the_pool_whose_next_victim_was_used_longest_ago_gives() -> None:
    world = shared(ATTENTION, STATE, count=8, per=[4, 1])
    for seed in range(4):
        world.request(prompt(4, seed=seed))
    assert owned(world) == [4, 4]
    world.request(prompt(4, seed=0))  # the oldest one now is that of seed 1
    world.request(prompt(8, seed=9))
    assert [world.hit(prompt(4, seed=seed))[0] for seed in range(4)] == [4, 0, 0, 4]
    assert world.hit(prompt(8, seed=9))[0] == 8


def test_a_state_that_saves_many_pages_outlives_pages_that_were_used_after_it() -> None:
    world = shared(ATTENTION, STATE, count=48, per=[1, 1])
    instructions = prompt(8, extra=0)
    for question in range(2):
        world.request([*instructions, *(question for _ in range(PAGE_TOKENS))])
    for seed in range(1, 10):
        world.request([*instructions, *(0 for _ in range((1 + seed) * PAGE_TOKENS))])
        world.request(prompt(5, seed=seed))
    assert world.hit([*instructions, 9, 9])[0] == 8
    assert world.hit(prompt(5, seed=1))[0] == 0, "it was used later, and has left"


def test_a_prompt_that_memory_cannot_hold_resumes_from_what_memory_has_of_it() -> None:
    """Else long histories hit nothing where a divided memory hits: 5% of 64% in a replay of agents."""
    world = shared(ATTENTION, STATE, count=8, per=[4, 1], keep_states=f"ends,branches,every:{4 * PAGE_TOKENS}")
    world.request(prompt(20))
    assert world.hit(prompt(60))[0] == 20
    assert world.start(prompt(60)).boundary == 20
