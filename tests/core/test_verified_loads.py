"""A load that has been verified: its request resumes while the pages are still being copied to the device."""

import pytest

from kvarve.core.copies.effects import Copy, Ended, Verified
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, STATE, World, config, prompt


def host_only(world: World, pages: int = 4) -> None:
    """A prompt whose pages are in the host alone."""
    world.request(prompt(pages))
    world.flush(Tier.DEVICE)
    assert world.hit(prompt(pages)) == (0, pages)


def load_of(world: World) -> int:
    (op,) = [op for op, effect in world.flying.items() if isinstance(effect, Copy) and effect.target is Tier.DEVICE]
    return op


def test_a_request_is_ready_as_soon_as_its_load_is_verified() -> None:
    world = World(config=config(ATTENTION, STATE, host=64))
    host_only(world)
    lease = world.open(prompt(4))
    assert not world.claim(lease)
    world.step([world.verify(load_of(world))])
    assert lease.ready and lease.boundary == 4 and lease.from_tiers() == (0, 4, 0)
    world.settle()
    assert world.core.counters.loaded == 5
    world.drain()


def test_pages_that_are_being_copied_keep_their_slots_when_the_request_is_aborted() -> None:
    """Otherwise the copy would overwrite pages of the next owner of the slot."""
    world = World(config=config(ATTENTION, device=8, host=64))
    host_only(world)
    lease = world.open(prompt(4))
    world.claim(lease)
    world.step([world.verify(op := load_of(world))])
    world.close(lease)
    world.flush(Tier.DEVICE, Tier.HOST)
    assert world.hit(prompt(4)) == (4, 4), "both ends of the copy are pinned"
    other = world.start(prompt(8, seed=3))
    assert world.reserve(other, 4) and not world.reserve(other, 5)
    world.step([world.end(op)])
    assert world.reserve(other, 8), "the pages may be evicted once they have been copied"
    world.close(other)
    world.drain()


def test_a_page_that_two_requests_load_is_copied_twice_and_kept_once() -> None:
    world = World(config=config(ATTENTION, host=64))
    host_only(world)
    leases = [world.open(prompt(4)), world.open(prompt(4))]
    for lease in leases:
        assert not world.claim(lease)
    first, second = world.loads()
    world.step([world.verify(first)])
    world.step([world.verify(second)])
    assert all(lease.ready and lease.boundary == 4 for lease in leases)
    world.step([world.end(second)])
    world.step([world.end(first)])
    assert world.resident(Tier.DEVICE) == 4
    for lease in leases:
        world.close(lease)
    world.drain()


def test_host_copies_of_fetched_pages_are_dropped_when_the_load_has_ended() -> None:
    """As long as it is being read a host page has to stay, though the write policy does not want it."""
    world = World(config=config(ATTENTION, host=64, storage=True, write_policy="through:9"))
    world.stock(world.open(prompt(4)).tokens)
    world.drain()
    lease = world.open(prompt(4))
    world.settle()
    world.claim(lease)
    world.step([world.verify(op := load_of(world))])
    assert lease.ready and world.resident(Tier.HOST) == 4
    world.step([world.end(op)])
    assert world.resident(Tier.HOST) == 0 and world.resident(Tier.DEVICE) == 4
    world.close(lease)
    world.drain()


def test_a_verified_page_whose_copy_fails_is_a_bug() -> None:
    world = World(config=config(ATTENTION, host=64))
    host_only(world)
    world.step([Verified(99, 1)])
    assert world.core.counters.strays == 1, "no load in flight has this number"
    lease = world.open(prompt(4))
    world.claim(lease)
    world.step([world.verify(op := load_of(world))])
    with pytest.raises(AssertionError, match="whose copy has failed"):
        world.core.step([Ended(op, 0)], world.now)
