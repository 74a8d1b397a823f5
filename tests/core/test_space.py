"""Which pages the core keeps, evicts and forgets when slots are short."""

from array import array

from kvarve.core.lease import Phase
from kvarve.pages.keys import root_key
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, INDEX, STATE, World, config, fork, prompt

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


# --- when slots are short


def test_a_request_is_kept_as_far_as_there_is_room() -> None:
    world = World(config=config(ATTENTION, STATE, device=[4, 8]))
    lease = world.request(prompt(6))
    assert world.core.counters.uncached == 2 and lease.done == 4
    assert world.hit(prompt(6)) == (4, 4), "the last boundary that the device can hold has its state"
    assert world.resident(DEVICE) == 4


def test_a_deeper_hit_that_has_no_room_becomes_a_shallower_one() -> None:
    world = World(config=config(ATTENTION, device=6, host=64))
    world.request(prompt(6))
    world.flush(DEVICE)
    other = world.start(prompt(3, seed=1))
    world.grow(other, 3)
    lease = world.request(prompt(6))
    assert lease.boundary == 3 and lease.from_tiers() == (0, 3, 0)


def test_eviction_takes_the_tail_first() -> None:
    world = World(config=config(ATTENTION, device=6))
    world.request(prompt(6))
    world.request(prompt(2, seed=1))
    assert world.hit(prompt(6)) == (4, 4) and world.hit(prompt(2, seed=1)) == (2, 2)


def test_what_the_device_has_of_a_prompt_stays_while_the_rest_of_it_is_loaded() -> None:
    world = World(config=config(ATTENTION, host=64))
    for word in (7, 8):
        world.request(fork(3, word))
    world.flush(DEVICE)
    world.request(prompt(3))
    lease = world.start(fork(3, 7))
    assert lease.phase is Phase.LOADING and world.resident(DEVICE) == 3
    assert world.flush(DEVICE) == 0
    assert world.ready(lease) and lease.from_tiers() == (3, 2, 0)


def test_a_state_goes_with_the_attention_pages_that_lead_to_it() -> None:
    world = World(config=config(ATTENTION, STATE, device=8))
    world.request(prompt(4))
    assert world.resident(DEVICE, pool=1) == 1
    world.request(prompt(7, seed=1))
    assert world.resident(DEVICE, pool=1) == 1 and world.hit(prompt(4)) == (0, 0)
    assert world.hit(prompt(7, seed=1)) == (7, 7)


def test_attention_pages_go_with_the_index_keys_of_their_positions() -> None:
    world = World(config=config(ATTENTION, INDEX, STATE, device=[16, 6, 16]))
    world.request(prompt(4))
    world.request(prompt(4, seed=1))
    assert [world.resident(DEVICE, pool) for pool in range(3)] == [6, 6, 1]


# --- how much is worth keeping


def test_a_sequence_computes_in_slots_that_lie_in_a_row_if_there_are_such() -> None:
    world = World(config=config(ATTENTION, device=64))
    slot_pools = world.core.slot_pools
    slot_pools.free[0] = array("i", [40, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 3, 9, 1, 7])
    slot_pools.straighten(0, 3, after=-1)
    assert [slot_pools.free[0].pop() for _ in range(3)] == [20, 21, 22]
    slot_pools.straighten(0, 1, after=22)
    assert slot_pools.free[0].pop() == 23
    slot_pools.straighten(0, 2, after=7)
    assert [slot_pools.free[0].pop() for _ in range(2)] == [24, 25]


# --- roots, orders and flushes


def test_a_salt_under_which_nothing_is_kept_is_forgotten() -> None:
    world = World(config=config(ATTENTION))
    world.close(world.open(prompt(4), salt="shy"))
    assert not world.core.tree.roots
    world.request(prompt(4), salt="loud")
    assert [*world.core.tree.roots] == [root_key(b"world", "loud")]
    world.flush(DEVICE)
    assert not world.core.tree.roots
