"""A storage that is slow, failing or down costs only its own hits, and gets what the policy wants in the end."""

import random

import pytest

from kvarve.core.copies.dirty import QUARANTINE_S, RETRY_BUDGET
from kvarve.core.copies.effects import Refusal
from kvarve.core.copies.in_flight import STORE
from kvarve.core.copies.limits import MAX_BACK_OFF_S
from kvarve.pages.keys import pack
from kvarve.pages.pools import Tier
from tests.sim.world import World
from tests.sim.world.dirty import WHY
from tests.sim.world.scenes import ATTENTION, STATE, config, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def stores(world: World) -> list[int]:
    return [op for op in sorted(world.flying) if world.core.copies.ops[op].edge == STORE]


def others(world: World) -> list[int]:
    return [op for op in sorted(world.flying) if op not in stores(world)]


def write(world: World, *seeds: int, pages: int = 4) -> None:
    """Prompts are computed and copied to the host; stores from there stay in flight."""
    for seed in seeds:
        world.request(prompt(pages, seed=seed), rest=False)
        world.step()
        while others(world):
            world.step([world.end(op) for op in others(world)])


# --- what a store pins


def test_a_store_that_hangs_keeps_its_pages_in_the_host_and_nothing_on_the_device() -> None:
    world = World(config=config(ATTENTION, STATE, device=8, host=32, storage=True))
    write(world, 1, 2)
    assert stores(world), "they hang from here on"
    write(world, 3, 4)
    assert world.hit(prompt(4, seed=3, extra=2))[0] == world.hit(prompt(4, seed=4, extra=2))[0] == 4
    assert world.hit(prompt(4, seed=1, extra=2)) == (0, 4), "the host has the pages that the device evicted"


# --- dirty pages are stored, wait, or are counted


def test_what_the_host_lost_before_it_was_stored_is_stored_from_the_device() -> None:
    """15 prompts of which the host holds a third, and a store ends now and then."""
    world = World(config=config(ATTENTION, STATE, device=128, host=20, storage=True))
    for seed in range(15):
        write(world, seed)
        world.step([world.end(op) for op in stores(world)[: seed % 3 == 0]])
    assert len(world.storage.objects) < 15 * 5 / 2
    world.settle()
    assert len(world.storage.objects) == 15 * (4 + 1) and not world.core.backups.count_dirty()
    assert world.core.counters.dropped_evicted == 0


@pytest.mark.parametrize("prompts", [30, pytest.param(255, marks=pytest.mark.long)])
def test_after_an_outage_everything_that_is_in_memory_is_stored(prompts: int) -> None:
    world = World(config=config(ATTENTION, device=4 * prompts, host=prompts // 3, storage=True))
    store = world.storage
    world.detach(down=True)
    for seed in range(prompts):
        world.request(prompt(1, seed=seed, extra=1))
    world.attach(store)
    world.settle()
    assert len(store.objects) == prompts and not world.core.backups.count_dirty()


def with_a_run_that_storage_refuses() -> World:
    """All stores of the first run have failed, until it was quarantined; those of all others have not."""
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1)
    poison = world.log[0].pages[0].key
    for seed in range(2, 2 + 2 * RETRY_BUDGET):
        write(world, seed)
        keys = {op: world.flying[op].pages[0].key for op in stores(world)}
        world.step([world.end(op, lost=-1 if key == poison else 0) for op, key in keys.items()], later_s=1.0)
    world.settle()
    return world


def test_a_run_whose_stores_fail_is_tried_again_after_a_while_without_being_used() -> None:
    world = with_a_run_that_storage_refuses()
    assert world.core.counters.given_up == 1 and len(world.storage.objects) == 4 * 2 * RETRY_BUDGET
    assert world.core.idle() and world.core.backups.count_dirty(), "it is dirty, and `idle` does not wait for it"
    world.step(later_s=QUARANTINE_S)
    world.settle()
    assert len(world.storage.objects) == 4 * (1 + 2 * RETRY_BUDGET) and not world.core.backups.count_dirty()


@pytest.mark.parametrize("down", [False, True], ids=["storage that fails", "storage that is down"])
def test_what_leaves_memory_unstored_is_counted_by_its_reason(down: bool) -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    if down:
        world.detach(down=True)
    write(world, 1)
    for _ in range(0 if down else RETRY_BUDGET):
        world.step([world.end(op, lost=-1) for op in stores(world)], later_s=MAX_BACK_OFF_S)
    if stores(world):
        world.step([world.end(op, lost=-1) for op in stores(world)])
    world.flush(DEVICE, HOST)
    counters = world.core.counters
    assert (counters.dropped_down, counters.dropped_evicted) == ((5, 0) if down else (0, 5))


@pytest.mark.parametrize(("why", "counter"), [(Refusal.FULL, "full"), (Refusal.READ_ONLY, "read_only")])
def test_what_leaves_memory_while_storage_takes_nothing_is_counted_by_why_it_does(why: Refusal, counter: str) -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    write(world, 1)
    for _ in range(2 * RETRY_BUDGET):
        world.step([world.end(op, lost=-1, refused=why) for op in stores(world)], later_s=MAX_BACK_OFF_S)
    world.step([world.end(op, lost=-1, refused=why) for op in stores(world)])
    world.flush(DEVICE, HOST)
    assert getattr(world.core.counters, f"dropped_{counter}") == 5 and world.core.counters.dropped_evicted == 0
    assert world.core.counters.given_up == 0, "no run of pages is at fault"
    write(world, 2)
    world.step(later_s=MAX_BACK_OFF_S)
    world.settle()
    assert len(world.storage.objects) == 5
    assert world.core.storage.refused is Refusal.NONE, "there is room again"


def test_to_a_storage_that_is_only_to_be_read_nothing_is_sent_and_nothing_is_given_up() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(4, seed=1))
    world.settle()
    world.core.storage.only_read = True
    write(world, 2)
    assert not stores(world) and not world.core.backups.count_dirty() and world.core.idle()
    world.flush(DEVICE, HOST)
    assert not any(getattr(world.core.counters, f"dropped_{why}") for why in WHY)
    assert world.core.counters.stored == len(world.storage.objects) == 5
    world.request(prompt(4, seed=1, extra=2))
    assert world.core.counters.fetched, "what it has is read"


def test_what_is_parked_when_it_leaves_memory_is_counted_as_failed() -> None:
    world = with_a_run_that_storage_refuses()
    world.flush(DEVICE, HOST)
    assert world.core.counters.dropped_failed == 4 and world.core.counters.dropped_evicted == 0


def test_lines_of_what_waits_remember_nothing_that_has_left_the_tree() -> None:
    world = World(config=config(ATTENTION, device=16, host=16, storage=True))
    for seed in range(30):
        write(world, seed, pages=2)
    dirty = world.core.backups.dirty
    assert stores(world) and len(dirty.to_store) + len(dirty.to_host) + len(dirty.quarantined) <= 32


# --- storage and the host's pages


@pytest.mark.long
@pytest.mark.parametrize("policy", ["through:2", "back"])
def test_a_storage_leaves_the_host_what_it_keeps_without_one(policy: str) -> None:
    """Pages fetched through the host do not stay there, if the write policy would not put them there:
    memory hits as much as without a storage, within a twentieth."""
    dice = random.Random(1)
    picks = dice.choices(range(60), [1 / (at + 1) ** 0.9 for at in range(60)], k=500)
    found = []
    for storage in (False, True):
        world = World(config=config(ATTENTION, device=32, host=32, storage=storage, write_policy=policy))
        hits = 0
        for pick in picks:
            hits += world.hit(prompt(2, seed=pick, extra=2))[1]
            world.request(prompt(2, seed=pick, extra=2))
        found.append(hits)
        if storage:
            assert world.hits[Tier.STORAGE] > 50, "and storage adds to that"
    assert found[1] >= 0.95 * found[0]


def test_nothing_is_fetched_for_a_boundary_that_the_device_cannot_hold() -> None:
    world = World(config=config(ATTENTION, STATE, device=(16, 4), host=64, storage=True))
    world.stock(pack(prompt(16)))
    world.stock(pack(prompt(32)))
    lease = world.open(prompt(40))
    assert world.ready(lease) and lease.boundary == 16
    assert world.core.counters.fetched == 16 + 1


# --- eviction orders and slots freed ahead of time


def test_room_that_is_coming_in_one_pool_is_not_taken_for_room_in_another() -> None:
    """Under write-back each pool has slots freed ahead, however many pages leave other pools."""
    world = World(config=config(ATTENTION, STATE, device=(56, 8), host=256, write_policy="back"))
    for seed in range(8):
        world.request(prompt(7, seed=seed), rest=False)
    assert not world.core.slot_pools.free[1], "all states are in use"
    world.step()
    leaving = [part.pool for op in world.core.copies.ops.values() if op.leaving for part in op.parts]
    assert 0 in leaving and 1 in leaving
