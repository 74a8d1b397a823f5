"""How full memory is, and how long pages stay there."""

from flights import fetching

from kvarve.core.copies.in_flight import BACKUP, FETCH, LOAD, STORE, Edge
from kvarve.core.observe.headroom import pinned
from kvarve.core.policies import WAIT_COMPLETE
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, STATE, WINDOW, World, config, fork, prompt
from tests.sim.world.engine_blocks_world import EngineWorld

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def used(world: World) -> list[int]:
    slot_pools = world.core.slot_pools
    return [slot_pools.committed(place) - len(slot_pools.free[place]) for place in range(len(slot_pools.capacity))]


def edges(world: World) -> list[Edge]:
    return [op.edge for op in world.core.copies.ops.values()]


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


def test_pages_on_which_pinned_ones_rest_are_pinned_whoever_came_first() -> None:
    for order in ([fork(4, 1, more=5), prompt(2)], [prompt(2), fork(4, 1, more=5)]):
        world = World(config=config(ATTENTION, device=24))
        for word in (1, 2):
            world.request(fork(4, word, more=9))
        leases = [world.start(each) for each in order]
        assert all(world.ready(lease) for lease in leases)
        before, most = pinned(world.core), max(lease.boundary for lease in leases)
        assert before[0] == most < used(world)[0], "all that the deepest request uses, and nothing else"
        world.flush(DEVICE)
        assert used(world) == before == pinned(world.core)


def test_slots_that_a_copy_fills_are_pinned() -> None:
    world = World(config=config(ATTENTION, device=8, host=8))
    world.request(prompt(4))
    world.flush(DEVICE)
    assert not any(pinned(world.core))
    lease = world.start(prompt(4))
    assert not world.claim(lease)
    held = pinned(world.core)
    assert held[0] == 4 and held[1] >= 4, "targets on the device, and sources in the host"
    (load,) = world.loads()
    world.step([world.verify(load)])
    assert pinned(world.core) == held, "whether the copy or the tree has the targets"


def test_pages_that_a_copy_reads_are_pinned_though_no_request_needs_them() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    lease = world.start(prompt(4))
    assert world.ready(lease)
    world.grow(lease, 4)
    world.publish(lease, 4)
    world.close(lease)
    world.step()
    assert {*edges(world)} == {BACKUP}
    assert pinned(world.core) == used(world), "its pages on the device, and its targets in the host"
    assert sum(pinned(world.core)[:2]) >= 5
    while BACKUP in edges(world):
        world.step([world.end(op) for op in [*world.flying]])
    assert {*edges(world)} == {STORE}
    before = pinned(world.core)
    world.flush(DEVICE, HOST)
    assert used(world) == before == pinned(world.core)
    assert sum(before[:2]) == 0 < sum(before[2:])
    world.settle()
    assert not any(pinned(world.core))


def test_pages_that_have_come_from_storage_for_a_request_that_waits_for_more_are_pinned() -> None:
    world = fetching(WAIT_COMPLETE)
    world.step([world.end([*world.flying][1])])
    assert edges(world) == [FETCH, FETCH] and any(lease.landed[0] for lease in world.leases)
    assert pinned(world.core) == used(world) == [0, 6], "two have come, and four are on their way"


def test_a_load_into_an_engines_blocks_pins_its_sources_in_the_host_and_nothing_else() -> None:
    world = EngineWorld(config(ATTENTION, device=None, host=8), blocks=200)
    world.request(prompt(4))
    world.evict()
    lease = world.open(prompt(4))
    world.claim(lease)
    world.load(lease)
    world.close(lease)
    assert edges(world) == [LOAD]
    assert pinned(world.core) == used(world) == [4]
    world.settle()
    assert pinned(world.core) == [0]


def test_a_page_lives_from_its_arrival_to_its_eviction_and_idles_from_its_last_use() -> None:
    world = World(config=config(ATTENTION, device=8))
    ages = world.core.ages
    world.request(prompt(4))
    world.step(later_s=20.0)
    world.request(prompt(4))
    world.step(later_s=7.0)
    assert ages.reuse_s.sum >= 20.0 and sum(ages.lifetime_s[0].counts) == 0
    world.flush(DEVICE)
    lifetime, idle = ages.lifetime_s[0], ages.idle_s[0]
    assert sum(lifetime.counts) == sum(idle.counts) == 4
    assert lifetime.sum >= 4 * 27.0 and 4 * 7.0 <= idle.sum < 4 * 20.0
