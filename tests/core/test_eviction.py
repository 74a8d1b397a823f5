"""Who goes first when room is short, by example; that every order obeys the laws is for the random lives."""

import pytest
from world import ATTENTION, STATE, World, config, prompt

from kvarve.core.eviction import ORDERS
from kvarve.core.policies import PageCost
from kvarve.errors import ConfigError
from kvarve.model import Tier


def survivors(world: World, seeds: int, pages: int = 2) -> list[int]:
    """Which of the prompts still hit in full."""
    return [seed for seed in range(seeds) if world.hit(prompt(pages, seed=seed)) == (pages, pages)]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_makes_room(order: str) -> None:
    world = World(config(ATTENTION, STATE, device=[6, 3], host=[8, 4], eviction=order))
    for seed in range(12):
        assert world.request(prompt(2, seed=seed)).done == 2
    world.drain()


def test_lru_keeps_what_was_used_last() -> None:
    world = World(config(ATTENTION, device=6, eviction="lru"))
    for seed in (0, 0, 1, 2, 3):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 4) == [1, 2, 3]


def test_lfu_keeps_what_was_used_most() -> None:
    world = World(config(ATTENTION, device=6, eviction="lfu"))
    for seed in (0, 0, 0, 1, 2, 3, 4):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 5) == [0, 3, 4]


def test_lfu_counts_the_use_of_a_shared_beginning() -> None:
    world = World(config(ATTENTION, device=8, eviction="lfu"))
    for tail in range(4):
        world.request(prompt(2, extra=0) + [900 + tail] * 5)
    for seed in range(1, 4):
        world.request(prompt(2, seed=seed))
    assert world.hit(prompt(2)) == (2, 2)


def test_s3fifo_lets_pages_that_are_used_once_pass_by() -> None:
    world = World(config(ATTENTION, device=8, eviction="s3fifo"))
    for seed in (0, 0, 1, 1):
        world.request(prompt(2, seed=seed))
    for seed in range(2, 30):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 2) == [0, 1], "a scan does not push out what was used again"


def test_s3fifo_remembers_what_left_it_lately() -> None:
    world = World(config(ATTENTION, device=6, eviction="s3fifo"))
    for seed in (0, 1, 2, 3):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 4) == [1, 2, 3]
    world.request(prompt(2, seed=0))  # it comes back, so it was worth more than it seemed
    for seed in range(4, 20):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 1) == [0]


def test_a_page_that_an_important_request_used_goes_last() -> None:
    world = World(config(ATTENTION, device=6, eviction="priority"))
    for seed, priority in ((0, 5), (1, 0), (2, 1), (3, 0), (4, 0)):
        lease = world.open(prompt(2, seed=seed), priority=priority)
        world.compute(lease)
    assert survivors(world, 5) == [0, 2, 4]


def test_a_page_far_into_a_prompt_is_dear_to_compute_and_stays() -> None:
    world = World(config(ATTENTION, device=12, eviction="flops", cost=PageCost(1.0, 1.0)))
    world.request(prompt(8, seed=0))
    for seed in (1, 2, 3):
        world.request(prompt(2, seed=seed))
    assert world.hit(prompt(8, seed=0)) == (8, 8) and world.hit(prompt(2, seed=1))[0] < 2


def test_a_state_that_stands_alone_is_dearer_than_one_close_behind_another() -> None:
    world = World(config(ATTENTION, STATE, device=[64, 3], eviction="flops"))
    world.request(prompt(8, seed=0))
    world.request(prompt(2, seed=1))
    world.request(prompt(3, seed=2))
    world.request(prompt(4, seed=3))
    assert world.hit(prompt(8, seed=0)) == (8, 8)
    assert world.hit(prompt(2, seed=1)) == (0, 0)


def test_what_is_dear_ages_too() -> None:
    world = World(config(ATTENTION, STATE, device=[64, 2], eviction="flops"))
    world.request(prompt(8, seed=0))
    for seed in range(1, 12):
        world.request(prompt(2, seed=seed))
    assert world.hit(prompt(8, seed=0)) == (0, 0), "nobody used it while much else went by"


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_forgets_what_left_the_tree(order: str) -> None:
    world = World(config(ATTENTION, device=8, eviction=order))
    for seed in range(200):
        world.request(prompt(2, seed=seed))
    place = int(Tier.DEVICE)
    assert len(world.core.shelves.orders[place].runs()) <= 16


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: lru"):
        World(config(ATTENTION, eviction="mru"))
