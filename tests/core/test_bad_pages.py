"""Pages that are lost or corrupted in the host or in storage: never used, counted, and replaced."""

import pytest
from flights import in_flight

from kvarve.core.copies.effects import Copy
from kvarve.core.lease import Phase
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, EVERY_PAGE, STATE, WINDOW, World, config, prompt

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


def test_a_host_page_that_fails_its_check_is_not_used_and_a_recomputed_one_replaces_it() -> None:
    world = World(config=config(ATTENTION, host=64))
    world.request(prompt(5))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(5))
    lease = world.request(prompt(5))
    assert lease.boundary == 2 and world.core.counters.bad_host == 1
    world.flush(DEVICE)
    lease = world.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (5, (0, 5, 0)) and world.core.counters.bad_host == 1


def test_a_host_page_found_bad_on_its_way_to_storage_is_backed_up_anew_from_the_device() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    lease = world.start(prompt(4))
    world.settle()
    world.grow(lease, 4)
    world.publish(lease, 4)
    world.close(lease)
    world.step()
    world.step([world.end(in_flight(world).op)])
    store = in_flight(world)
    assert isinstance(store, Copy) and store.target is STORAGE
    world.step([world.end(store.op, rotten=0b100)])
    world.settle()
    assert world.core.counters.bad_host == 1
    world.flush(DEVICE)
    world.settle()
    assert world.hit(prompt(4)) == (0, 4), "the device had a good page all the time"
    assert len(world.storage.objects) == 4


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_state_with_a_bad_copy_in_the_host_gives_its_room_though_that_copy_is_still_read(policy: str) -> None:
    world = World(config=config(ATTENTION, STATE, device=8, host=64, write_policy=policy))
    world.request(prompt(4))
    for _ in range(2):  # under write-back the first copies them down
        world.flush(DEVICE)
        world.settle()
    world.rot(HOST, 3, prompt(4), pool=1)
    one, two = world.start(prompt(4)), world.start(prompt(4))
    first, second = world.flying
    world.step([world.end(first)])
    world.close(two)  # its copy stays in flight
    world.compute(one, rest=False)
    assert world.resident(DEVICE, pool=1) == 1
    world.flush(DEVICE)
    assert world.resident(DEVICE, pool=1) == 0 and [*world.flying] == [second], "and none goes down in vain"
    world.step([world.end(second)])
    assert world.hit(prompt(4)) == (0, 0), "there was none but the bad one"


def test_a_bad_host_page_is_not_replaced_while_a_copy_still_reads_it() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(4))
    one, two = world.start(prompt(4)), world.start(prompt(4))
    first, second = world.flying
    world.step([world.end(first)])
    three = world.open(prompt(4))
    while three.ops:  # storage has a good one, and brings it
        world.step([world.end(op) for op in sorted(three.ops)])
    world.step([world.end(second)])
    assert one.boundary == two.boundary == 2 and world.core.counters.fetched == 1
    for lease in (one, two, three):
        world.close(lease)
    assert world.request(prompt(4)).boundary == 4, "now it may"


def test_a_page_that_storage_loses_between_probe_and_fetch_lowers_the_boundary() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(5))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(5))
    world.step([world.end(in_flight(world).op)])
    assert lease.phase is Phase.FETCHING
    world.forget(1, prompt(5))
    world.settle()
    assert world.ready(lease) and lease.boundary == 1
    assert world.core.counters.failed == 1
    assert world.core.counters.fetched == 4 and world.resident(HOST) == 1, "pages that no path leads to are freed"


def test_a_page_that_storage_corrupted_is_counted_and_lowers_the_boundary() -> None:
    world = World(config=config(ATTENTION, WINDOW, host=64, storage=True, keep_states=EVERY_PAGE))
    world.request(prompt(7))
    world.flush(DEVICE, HOST)
    world.rot(STORAGE, 5, prompt(7), pool=0)
    lease = world.request(prompt(7))
    # Windows 4 to 6 were fetched for boundary 7; those for boundary 5 come in a second round.
    assert lease.boundary == 5 and world.core.counters.bad_storage == 1
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(5))
    world.flush(DEVICE, HOST)
    world.rot(STORAGE, 3, prompt(5))
    lease = world.request(prompt(5))
    assert lease.boundary == 3 and world.core.counters.bad_storage == 1
    world.flush(DEVICE, HOST)
    assert world.request(prompt(5)).boundary == 5, "recomputed pages have been stored again"


def test_a_page_that_storage_lost_is_stored_again_when_it_was_recomputed() -> None:
    world = World(config=config(ATTENTION, STATE, device=[32, 2], host=[32, 1], storage=True))
    world.request(prompt(4))
    for seed in (1, 2, 3):  # the state leaves memory, the attention pages stay
        world.request(prompt(2, seed=seed))
    assert world.hit(prompt(4)) == (0, 0) and world.resident(DEVICE) == 10
    kept = len(world.storage.objects)
    world.forget(3, prompt(4), pool=1)
    assert world.request(prompt(4)).boundary == 0
    assert len(world.storage.objects) == kept


def test_a_page_that_fails_to_load_is_tried_once_more_and_then_a_miss() -> None:
    world = World(config=config(ATTENTION, host=64))
    world.request(prompt(4))
    world.flush(DEVICE)
    lease = world.start(prompt(4))
    world.step([world.end(in_flight(world).op, lost=0b0100)])
    world.step([world.end(in_flight(world).op, lost=0b01)])
    assert lease.ready and lease.boundary == 2 and world.core.counters.failed == 2
    world.close(lease)
    assert world.request(prompt(4)).boundary == 4
