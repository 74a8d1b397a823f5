"""Which page each order evicts first, by example; random lives check that every order keeps the invariants."""

from typing import get_args

import pytest

from kvarve.core.policies import Order
from kvarve.core.slots.orders import ORDERS
from kvarve.core.slots.orders.order import OrderContext
from kvarve.core.slots.orders.s3fifo import S3Fifo
from kvarve.core.tree.tree import Run
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, EVERY_PAGE, PAGE_TOKENS, STATE, World, config, prompt


def survivors(world: World, seeds: int, pages: int = 2) -> list[int]:
    """Which of the prompts still hit in full."""
    return [seed for seed in range(seeds) if world.hit(prompt(pages, seed=seed)) == (pages, pages)]


def test_lru_keeps_what_was_used_last() -> None:
    world = World(config=config(ATTENTION, device=6, eviction="lru"))
    for seed in (0, 1, 2, 0, 3):  # an order by arrival would evict the first
        world.request(prompt(2, seed=seed))
    assert survivors(world, 4) == [0, 2, 3]


def test_each_order_has_a_name_in_the_settings() -> None:
    assert get_args(Order) == tuple(ORDERS)


def test_lfu_keeps_what_was_used_most() -> None:
    world = World(config=config(ATTENTION, device=6, eviction="lfu"))
    for seed in (0, 0, 0, 1, 2, 3, 4):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 5) == [0, 3, 4]


def test_s3fifo_lets_pages_that_are_used_once_pass_by() -> None:
    world = World(config=config(ATTENTION, device=8, eviction="s3fifo"))
    for seed in (0, 0, 1, 1):
        world.request(prompt(2, seed=seed))
    for seed in range(2, 30):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 2) == [0, 1], "a scan does not evict pages that were used again"


def test_s3fifo_remembers_what_left_it_lately() -> None:
    world = World(config=config(ATTENTION, device=6, eviction="s3fifo"))
    for seed in (0, 1, 2, 3):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 4) == [1, 2, 3]
    world.request(prompt(2, seed=0))  # it comes back, so it was worth more than it seemed
    for seed in range(4, 20):
        world.request(prompt(2, seed=seed))
    assert survivors(world, 1) == [0]


def test_a_page_that_an_important_request_used_goes_last() -> None:
    world = World(config=config(ATTENTION, device=6, eviction="priority"))
    for seed, priority in ((0, 5), (1, 0), (2, 1), (3, 0), (4, 0)):
        lease = world.open(prompt(2, seed=seed), priority=priority)
        world.compute(lease)
    assert survivors(world, 5) == [0, 2, 4]


@pytest.mark.parametrize("order", ORDERS)
def test_states_inside_of_prompts_go_before_those_at_their_ends(order: str) -> None:
    """With a snapshot of each page, 4 pages a prompt: room for all states of one prompt and a half."""
    settings = config(ATTENTION, STATE, device=[64, 6], eviction=order, keep_states=EVERY_PAGE)
    world = World(config=settings)
    for seed in range(5):
        world.request(prompt(4, seed=seed))
    assert survivors(world, 5, pages=4) == [0, 1, 2, 3, 4], "LRU over all states would leave the last prompt's"


def test_a_state_from_which_a_request_has_resumed_stays_as_one_at_an_end_does() -> None:
    world = World(config=config(ATTENTION, STATE, device=[64, 6], keep_states=EVERY_PAGE))
    world.request(prompt(6))
    assert world.request(prompt(6)[: 4 * PAGE_TOKENS + 1]).boundary == 4
    for seed in range(1, 4):
        world.request(prompt(6, seed=seed))
    assert world.hit(prompt(6)[: 4 * PAGE_TOKENS + 1]) == (4, 4)
    assert world.hit(prompt(6)[: 3 * PAGE_TOKENS + 1]) == (0, 0), "the states beside it have gone"


def test_the_end_of_a_prompt_stays_when_its_conversation_has_gone_on() -> None:
    """Another answer to the same question resumes where the question ended."""
    world = World(config=config(ATTENTION, STATE, device=[64, 5], keep_states=EVERY_PAGE))
    world.request(prompt(3))
    world.request(prompt(6))
    for seed in range(1, 3):
        world.request(prompt(6, seed=seed))
    assert world.hit(prompt(3, extra=1))[0] == 3


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_forgets_what_left_the_tree(order: str) -> None:
    world = World(config=config(ATTENTION, device=8, eviction=order))
    for request in range(40):
        world.request(prompt(2, seed=request // 2))
    kept = world.core.candidates.orders[int(Tier.DEVICE)]
    assert len(kept.runs()) <= 16
    world.flush(Tier.DEVICE)
    assert not isinstance(kept, S3Fifo) or (not kept._proven and not kept._counted)


@pytest.mark.parametrize(("pages", "expected"), [(1, 0.0), (4, 50.0), (200, 99.0)])
def test_a_state_ages_slower_the_more_it_saves_for_its_bytes(pages: int, expected: float) -> None:
    context = OrderContext(lambda: 100, chain_bytes_of_snapshot=0.5)  # it takes as much as two pages
    run = Run(None, 0, bytes(TOKEN_BYTES * pages), b"", pools=2, page_tokens=1)
    assert context.last_use(run) == expected


def test_states_age_slower_only_where_what_leaves_is_lost() -> None:
    def saved_by(**tiers: int) -> list[float]:
        """The bytes of a page as part of those of a state, by tier."""
        core = World(config=config(ATTENTION, STATE, **tiers)).core
        places = [core.slot_pools.place(tier, 1) for tier in core.slot_pools.memory]
        return [core.candidates.orders[place].context.chain_bytes_of_snapshot for place in places]

    assert saved_by(device=8) == [1.0, 0.0]
    assert saved_by(device=8, host=8) == [0.0, 1.0], "what leaves the device comes back from the host, byte by byte"
