"""Which windows and states are worth keeping: pure arithmetic on a prompt's marks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.core.core import Core
from kvarve.core.policies import Snapshots
from kvarve.pages.boundaries import members
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, PAGE_TOKENS, STATE, World, config, fork, prompt

PAGE = 64


def kept(snapshots: Snapshots, pages: int, branch: int = 0, grid: int = 1) -> list[int]:
    return [*members(snapshots.boundaries(pages, pages - 1, branch, PAGE, grid))]


def test_a_prompt_is_kept_where_it_ends_and_where_it_leaves_a_known_one_and_every_so_many_tokens() -> None:
    assert kept(Snapshots(), 10) == [9, 10], "for its continuation and for itself"
    assert kept(Snapshots(), 10, grid=4) == [8]
    assert kept(Snapshots(), 10, branch=4) == [4, 9, 10]
    assert kept(Snapshots(branches=False), 10, branch=4) == [9, 10]
    assert kept(Snapshots(ends=False), 10, branch=4) == [4]
    assert kept(Snapshots(every=3 * PAGE), 10) == [3, 6, 9, 10]
    assert kept(Snapshots(every=1), 3) == [1, 2, 3]


@given(
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 10),
    st.sampled_from([1, 2, 4]),
)
def test_every_snapshot_is_on_the_grid_and_in_the_prompt(pages: int, branch: int, every: int, grid: int) -> None:
    found = kept(Snapshots(every=every * PAGE), pages, min(branch, pages), grid)
    assert all(0 < boundary <= pages and boundary % grid == 0 for boundary in found)


# --- on the way, where they take little


def on_the_way(extents: int = 64, bounds: tuple[int | None, ...] = (), **more: Any) -> World:
    """A device of which each extent has a page or a state; a state after four pages takes a quarter of their bytes."""
    cut = {"device": [extents, [1, 1], [2, 2], *([bounds] if bounds else [])]}
    settings: dict[str, Any] = {"device": 64, "cut": cut, "step_share": 0.25, "step_tokens": 2 * PAGE_TOKENS}
    return World(config=config(ATTENTION, STATE, **settings | more))


def kept_of(world: World, pages: int) -> list[int]:
    """Where the states of a prompt are kept."""
    world.request(prompt(pages), chunks=pages)
    found = [at for at in range(pages + 1) if world.hit(fork(at, 7))[0] == at]
    assert world.resident(Tier.DEVICE, pool=1) == len(found) - 1
    return found


def test_a_prompt_keeps_states_on_the_way_where_they_take_little() -> None:
    assert kept_of(on_the_way(), 11) == [0, 4, 8, 11]
    assert kept_of(on_the_way(step_share=1.0), 5) == [0, 2, 4, 5], "no closer than that"
    assert kept_of(on_the_way(step_share=0.2), 9) == [0, 8, 9], "a power of two"
    assert kept_of(on_the_way(step_share=1.0, grid=3), 9) == [0, 3, 6, 9], "on the grid"
    assert kept_of(on_the_way(step_share=1.0, prefill_tokens=3 * PAGE_TOKENS), 9) == [0, 3, 6, 9], (
        "and no forward is cut"
    )


@pytest.mark.parametrize(
    "where",
    [
        {"extents": 12},  # the prompt does not fit
        {"bounds": (None, 8)},
        {"cut": {}},
        {"keep_states": f"ends,branches,every:{11 * PAGE_TOKENS}"},
    ],
)
def test_it_keeps_none_on_the_way_where_they_take_what_others_need(where: dict[str, Any]) -> None:
    world = on_the_way(**where)
    world.request(prompt(11), chunks=11)
    assert [at for at in range(1, 9) if world.hit(fork(at, 7))[0]] == []


def test_a_device_of_an_engine_keeps_what_the_engine_wants() -> None:
    cut = {"host": [64, [1, 1], [2, 2]]}
    assert not Core(config(ATTENTION, STATE, device=None, host=64, cut=cut, step_share=1.0)).slot_pools.step(64)


def test_a_prompt_that_has_lost_its_end_is_resumed_on_the_way() -> None:
    world = on_the_way(extents=20)
    world.request(prompt(11), chunks=11)
    world.request(prompt(8, seed=1), chunks=8)
    assert world.hit(prompt(11)) == (8, 8)


# --- at the end of each chunk, while there is room


def test_with_room_a_prompt_is_resumed_at_the_last_chunk_that_it_shares_with_the_first_of_its_kind() -> None:
    world = World(config=config(ATTENTION, STATE, device=40, grid=2, keep_states="ends,branches,chunks"))
    world.request(prompt(8), chunks=4)
    assert world.resident(Tier.DEVICE, pool=1) == 4
    assert world.request(fork(5, word=1)).boundary == 4


def test_without_room_states_are_kept_where_prompts_end_and_the_others_leave_first() -> None:
    world = World(config=config(ATTENTION, STATE, device=(200, 12), keep_states="ends,branches,chunks"))
    for seed in range(3):
        world.request(prompt(20, seed), chunks=20)
        assert world.resident(Tier.DEVICE, pool=1) == [11, 12, 12][seed], "10, while a quarter is free, and each end"
    assert [world.hit(prompt(20, seed)) for seed in range(3)] == [(20, 20)] * 3


def test_states_that_are_kept_because_there_is_room_are_copied_nowhere_until_a_prompt_has_ended_there() -> None:
    world = World(config=config(ATTENTION, STATE, device=40, host=40, storage=True, keep_states="ends,branches,chunks"))
    world.request(prompt(8), chunks=8)
    world.settle()
    assert (world.resident(Tier.DEVICE, pool=1), world.resident(Tier.HOST, pool=1)) == (8, 1)
    assert world.core.backups.count_dirty() == 0
    world.request(fork(5, word=1), chunks=8)
    world.settle()
    assert world.resident(Tier.HOST, pool=1) == 4, "where each ends or can be resumed, and where one left the other"
    assert world.core.backups.count_dirty() == 0
