"""From which boundary a prompt resumes, and from which tier its pages come."""

import pytest
from flights import copies, in_flight

from kvarve.core.lease import Prompt
from kvarve.pages.keys import pack, root_key
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, EVERY_PAGE, INDEX, STATE, WINDOW, World, config, dump, fork, prompt

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


# --- hits


def test_six_attention_pages_a_state_after_page_three_and_three_index_keys_give_boundary_zero() -> None:
    world = World(config=config(ATTENTION, STATE, INDEX, host=64))
    world.request(prompt(4))
    world.request(prompt(6))
    world.flush(DEVICE)
    world.rot(HOST, 3, prompt(6), pool=2)
    world.rot(HOST, 5, prompt(6), pool=1)
    lease = world.open(prompt(6))
    world.settle()
    assert world.ready(lease) and lease.boundary == 0
    hit = world.core.lookup(root_key(b"world"), pack(prompt(6)))
    # The state resumes at 4, which the index keys do not reach; the index keys reach 3, where there is no state.
    assert hit.by_pool == (6, 4, 3)
    assert (hit.device, hit.memory, hit.known) == (0, 0, 6)


@pytest.mark.parametrize(("pages", "extra", "hit"), [(4, 0, 3), (4, 1, 4), (1, 0, 0), (0, 1, 0), (0, 0, 0)])
def test_a_resume_leaves_at_least_one_token_to_compute(pages: int, extra: int, hit: int) -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(pages, extra=extra))
    assert world.request(prompt(pages, extra=extra)).boundary == hit


def test_a_state_is_kept_where_a_prompt_leaves_a_known_one() -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(6))
    assert world.request(fork(3, 7)).boundary == 0, "no earlier prompt branched off here"
    assert world.request(fork(3, 8)).boundary == 3


def test_salts_share_nothing() -> None:
    world = World(config=config(ATTENTION))
    world.request(prompt(4), salt="mine")
    assert world.hit(prompt(4), salt="mine") == (4, 4)
    assert world.hit(prompt(4), salt="yours") == world.hit(prompt(4)) == (0, 0)
    assert world.request(prompt(4), salt="yours").boundary == 0
    assert world.resident(DEVICE) == 8


def test_salts_share_nothing_even_where_the_tokens_are_the_same_bytes_in_memory() -> None:
    world = World(config=config(ATTENTION))
    world.request(prompt(4), salt="mine")
    tokens = pack(prompt(4))
    mine, yours = (world.core.open(Prompt(root_key(b"world", salt), tokens), now=0.0) for salt in ("mine", "yours"))
    assert world.core.claim(mine, now=0.0) and world.core.claim(yours, now=0.0)
    assert (mine.boundary, yours.boundary) == (4, 0)


def test_a_request_that_must_not_read_resumes_from_nothing_and_still_keeps_what_is_new() -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(4))
    assert world.request(prompt(6), read=False).boundary == 0
    assert world.hit(prompt(6)) == (6, 6)


def test_a_lookup_changes_nothing() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, device=12, host=12, storage=True))
    for tokens in (prompt(5), fork(3, 7), prompt(2, seed=1)):
        world.request(tokens)
    lease = world.open(prompt(8))
    before = dump(world.core)
    for pages in range(9):
        for salt in ("", "nobody"):
            world.core.lookup(root_key(b"world", salt), pack(prompt(pages)))
            world.core.lookup(root_key(b"world", salt), pack(fork(pages // 2, 7, 5)))
    assert dump(world.core) == before
    world.close(lease)


# --- where it comes from


def test_a_hit_in_storage_says_so_and_outlives_a_restart() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(5))
    reborn = World(config=world.core.config)
    reborn.storage = world.storage
    lease = reborn.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (5, (0, 0, 5))
    assert reborn.core.counters.fetched == reborn.core.counters.loaded == 6
    assert reborn.core.counters.stored == 0, "pages from storage are not stored again"


def test_a_hit_in_all_three_tiers_is_told_apart() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.request(prompt(4))
    world.flush(DEVICE)
    world.request(prompt(2))
    lease = world.request(prompt(6))
    assert (lease.boundary, lease.from_tiers()) == (6, (2, 2, 2))


def test_the_host_brings_back_the_windows_tail_and_one_state_and_no_more() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, host=64, keep_states=EVERY_PAGE))
    world.request(prompt(8))
    assert [world.resident(HOST, pool) for pool in range(3)] == [8, 8, 8]
    world.flush(DEVICE)
    lease = world.start(prompt(8))
    (load,) = copies(world, HOST, DEVICE)
    assert [sum(page.pool == pool for page in load.pages) for pool in range(3)] == [8, 3, 1]
    world.settle()
    assert lease.ready and lease.boundary == 8


def test_shallow_pages_travel_first() -> None:
    world = World(config=config(STATE, ATTENTION, host=64, storage=True, batch_pages=2))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(6))
    world.step([world.end(in_flight(world).op)])
    order = [{lease.keys.index(page.key) // 32 for page in copy.pages} for copy in copies(world, STORAGE, HOST)]
    assert order == [{0, 1}, {2, 3}, {4, 5}]  # with the state at 5
