"""How full memory is, and how long pages stay there."""

from kvarve.core.levels import pinned
from kvarve.model import Tier
from kvarve.testing.world import ATTENTION, STATE, WINDOW, World, config, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def used(world: World) -> list[int]:
    slot_pools = world.core.slot_pools
    return [slot_pools.committed(place) - len(slot_pools.free[place]) for place in range(len(slot_pools.capacity))]


def test_what_a_flush_leaves_is_what_was_pinned() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, device=24, host=64))
    for seed in range(3):
        world.request(prompt(3, seed=seed))
    lease = world.start(prompt(4, seed=1))
    world.settle()
    assert world.ready(lease)
    world.grow(lease, 4)
    before = pinned(world.core)
    assert 0 < sum(before) < sum(used(world))
    world.flush(DEVICE, HOST)
    assert used(world) == before == pinned(world.core)
    world.close(lease)
    assert not any(pinned(world.core))


def test_slots_that_a_copy_fills_are_pinned() -> None:
    world = World(config=config(ATTENTION, device=8, host=8))
    world.request(prompt(4))
    world.flush(DEVICE)
    assert not any(pinned(world.core))
    lease = world.start(prompt(4))
    assert not world.claim(lease)
    held = pinned(world.core)
    assert held[0] == 4 and held[1] >= 4, "targets on the device, and sources in the host"


def test_a_page_lives_from_its_arrival_to_its_eviction_and_idles_from_its_last_use() -> None:
    world = World(config=config(ATTENTION, device=8))
    ages = world.core.slot_pools.ages
    world.request(prompt(4))
    world.step(later_s=20.0)
    world.request(prompt(4))
    world.step(later_s=7.0)
    assert ages.reuse_s.sum >= 20.0 and sum(ages.lifetime_s[0].counts) == 0
    world.flush(DEVICE)
    lifetime, idle = ages.lifetime_s[0], ages.idle_s[0]
    assert sum(lifetime.counts) == sum(idle.counts) == 4
    assert lifetime.sum >= 4 * 27.0 and 4 * 7.0 <= idle.sum < 4 * 20.0
