"""Copies that hang on a detached storage take nothing from the next one."""

from kvarve.core.copies.in_flight import STORE
from kvarve.core.core_config import CoreConfig
from kvarve.core.lease import Phase
from kvarve.pages.keys import pack
from kvarve.pages.pools import Tier
from tests.sim.world import World
from tests.sim.world.scenes import ATTENTION, STATE, config, prompt


def hanging(settings: CoreConfig, *seeds: int) -> World:
    """Stores of these prompts never end, and the storage has been detached because of that."""
    world = World(config=settings)
    for seed in seeds:
        world.request(prompt(4, seed=seed), rest=False)
        world.step()
        while others := [op for op in sorted(world.flying) if world.core.copies.ops[op].edge != STORE]:
            world.step([world.end(op) for op in others])
    assert world.flying, "stores are in flight"
    for op in [*world.flying]:
        world.lose(op)
    world.detach()
    return world


def carry_all(world: World, lost: int = 0) -> None:
    """All copies in flight to the attached storage end, and those that follow from them."""
    for _ in range(100):
        world.step([world.end(op, lost=lost) for op in [*world.flying]], later_s=0.0 if world.flying else 1.0)
        lost = 0


def test_the_share_of_stores_that_hang_on_a_storage_that_is_gone_is_there_for_the_next() -> None:
    world = hanging(config(ATTENTION, device=64, host=20, storage=True), 1, 2, 3)
    world.attach(back_up=True)
    carry_all(world)
    assert len(world.storage.objects) == 12 and not world.core.backups.count_dirty()


def test_a_store_that_fails_is_tried_again_though_others_hang_on_a_storage_that_is_gone() -> None:
    """One store probes alone after a back-off; stores that hang on another storage do not count."""
    world = hanging(config(ATTENTION, device=64, host=64, storage=True), 1)
    world.attach(back_up=True)
    world.request(prompt(4, seed=2), rest=False)
    carry_all(world, lost=-1)
    assert len(world.storage.objects) == 8 and not world.core.backups.count_dirty()


def test_the_share_of_fetches_that_hang_on_a_storage_that_is_gone_is_there_for_the_next() -> None:
    world = World(config=config(ATTENTION, device=64, host=20, storage=True))
    world.stock(pack(prompt(12, seed=1)))
    before = world.open(prompt(12, seed=1))
    world.step([world.end(op) for op in [*world.flying]])
    assert before.phase is Phase.FETCHING
    for op in [*world.flying]:
        world.lose(op)
    world.detach()
    world.close(before)
    world.attach()
    world.stock(pack(prompt(6, seed=2)))
    lease = world.open(prompt(6, seed=2))
    world.claim(lease)
    carry_all(world)
    assert lease.ready and lease.boundary == 6
    world.close(lease)


def test_evictions_do_not_wait_for_a_copy_to_a_storage_that_is_gone() -> None:
    """Under write-back; a store that hangs never frees the slots that an eviction would wait for."""
    world = World(config=config(ATTENTION, device=8, host=8, storage=True, write_policy="back"))
    world.request(prompt(4))
    world.flush(Tier.DEVICE)
    world.step([world.end(op) for op in [*world.flying]])
    world.flush(Tier.HOST)
    assert [op.edge for op in world.core.copies.ops.values() if op.leaving] == [STORE]
    stores = [*world.flying]
    world.detach()
    assert not world.core.backups.leaving()
    world.step([world.end(op) for op in stores])
    assert world.resident(Tier.HOST) == 4, "its copy is nowhere that a fetch would look"


def test_a_storage_that_is_down_and_up_again_holds_no_more_of_the_host_than_its_share() -> None:
    """Its stores hang whenever it is up."""
    world = World(config=config(ATTENTION, device=64, host=20, storage=True))
    for seed in range(5):
        store = world.storage
        world.request(prompt(4, seed=seed), rest=False)
        for _ in range(5):
            others = [op for op in sorted(world.flying) if world.core.copies.ops[op].edge != STORE]
            world.step([world.end(op) for op in others])
        for op in [*world.flying]:
            world.lose(op)
        world.detach(down=True)
        world.attach(store)
    world.step()
    hanging = sum(op.page_count for op in world.core.copies.ops.values())
    assert hanging == world.core.backups.host_share.left(0) == 8
    assert world.core.idle(), "no other copy would end"


def test_after_the_storage_was_emptied_what_is_in_memory_is_stored_again() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(6))
    stored = dict(world.storage.objects)
    world.request(prompt(6, seed=1), rest=False)  # its stores are in flight
    world.cleared()
    world.settle()
    assert stored.items() <= world.storage.objects.items() and len(world.storage.objects) == 2 * len(stored)
    world.flush(Tier.DEVICE, Tier.HOST)
    assert world.hit(prompt(6)) == (0, 0)
    lease = world.open(prompt(6))
    assert world.ready(lease) and lease.from_tiers() == (0, 0, 6)
