"""Which pages are backed up and stored, and what changes when a storage is attached or detached."""

import pytest
from flights import copies, fetching

from kvarve.core.copies.dirty import RETRY_BUDGET
from kvarve.core.copies.effects import Probe
from kvarve.core.copies.limits import SAMPLE
from kvarve.core.policies import WAIT_COMPLETE
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, PAGE_TOKENS, STATE, World, config, fork, prompt

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


# --- backups


def test_write_through_backs_up_what_was_computed_once_and_stores_it() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(4))
    assert world.resident(HOST) == 4 and len(world.storage.objects) == 5
    counters = world.core.counters
    assert (counters.backed_up, counters.stored) == (5, 5)
    world.request(prompt(4))
    assert (counters.backed_up, counters.stored) == (5, 5), "and does not do it again"


def test_a_failing_backup_is_tried_so_many_times_and_again_after_the_next_use() -> None:
    world = World(config=config(ATTENTION, host=64))
    lease = world.start(prompt(4))
    world.grow(lease, 4)
    world.publish(lease, 4)
    world.close(lease)
    world.settle(lost=True)
    assert len(copies(world, DEVICE, HOST)) == RETRY_BUDGET and world.core.idle()
    assert world.core.counters.failed == 4 * RETRY_BUDGET and world.core.counters.given_up == 1
    for _ in range(5):
        world.step()
    assert len(copies(world, DEVICE, HOST)) == RETRY_BUDGET
    lease = world.start(prompt(4))
    assert lease.boundary == 4
    world.close(lease)
    world.settle()
    assert len(copies(world, DEVICE, HOST)) == RETRY_BUDGET + 1 and world.resident(HOST) == 4


def test_backups_in_flight_are_bounded() -> None:
    world = World(config=config(ATTENTION, host=64, batch_pages=2, backup_pages=4))
    for seed in range(1, 5):
        lease = world.start(prompt(5, seed=seed))
        world.grow(lease, 5)
        world.publish(lease, 5)
        world.close(lease)
    most = 0
    while True:
        world.step([world.end(op) for op in [*world.flying][:1]])
        most = max(most, sum(len(effect.pages) for effect in world.flying.values()))
        if world.core.idle():
            break
    assert most <= 4 + 1 and world.resident(HOST) == 20  # the bound is looked at before each copy of 2


def test_a_run_that_is_split_before_it_was_backed_up_is_backed_up_whole() -> None:
    world = World(config=config(ATTENTION, host=64))
    for tokens in (prompt(6), fork(3, 7)):
        lease = world.start(tokens)
        world.grow(lease, 6)
        world.publish(lease, 6)
        world.close(lease)
    world.settle()
    assert world.resident(HOST) == world.resident(DEVICE) == 9


def test_a_selective_backup_waits_for_enough_uses_and_a_request_is_one_however_it_goes_on() -> None:
    world = World(config=config(ATTENTION, host=64, write_policy="through:3"))
    world.request(prompt(4), chunks=4)
    world.request(prompt(6))
    assert world.resident(HOST) == 0
    world.request(prompt(6))
    assert world.resident(HOST) >= 4


def test_samples_of_one_prompt_are_one_use() -> None:
    world = World(config=config(ATTENTION, host=64, write_policy="through:2"))
    leases = [world.open(prompt(4), again=again) for again in (False, True, True)]
    for lease in leases:
        world.compute(lease)
    assert [lease.boundary for lease in leases] == [0, 4, 4] and world.resident(HOST) == 0
    world.request(prompt(4))
    assert world.resident(HOST) == 4


def test_write_back_demotes_before_it_drops() -> None:
    world = World(config=config(ATTENTION, device=8, host=8, storage=True, write_policy="back"))
    world.request(prompt(6))
    assert not copies(world, DEVICE, HOST), "nothing is copied before it has to be evicted"
    assert world.flush(DEVICE) == 0 and world.resident(DEVICE) == 6, "it is evicted when its copy has landed"
    world.settle()
    assert (world.resident(DEVICE), world.resident(HOST)) == (0, 6)
    for _ in range(2):  # a storage may hold half of the share of the host at once
        assert world.flush(HOST) == 0
        world.settle()
    assert (world.resident(HOST), len(world.storage.objects)) == (0, 6)
    assert world.request(prompt(6)).from_tiers() == (0, 0, 6)


@pytest.mark.parametrize(
    ("slots", "cut", "lengths"),
    [
        ({"device": [8, 2], "host": [2, 3]}, {"host": (2, [1, 1], [1, 1])}, [4, 4]),
        ({"device": [8, 3], "host": [2, 3]}, {"device": (4, [2, 1], [1, 1])}, [3, 3, 1]),
    ],
    ids=["pools of their own", "pools that share the device"],
)
def test_a_run_of_which_nothing_could_be_evicted_is_evicted_later(
    slots: dict[str, list[int]], cut: dict[str, tuple[int, list[int], list[int]]], lengths: list[int]
) -> None:
    """Its pages are to be copied down first, and the host has no slot for them."""
    world = World(config=config(ATTENTION, STATE, **slots, cut=cut, storage=True, write_policy="back"))
    for seed, pages in enumerate(lengths):
        lease = world.start(prompt(pages, seed=seed))
        while not lease.ready:
            world.step([world.end(op) for op in [*world.flying]])
            world.claim(lease)
        world.grow(lease, pages)
        world.publish(lease, pages)
        world.close(lease)
    world.settle()
    for _ in range(8):
        world.flush(DEVICE)
        world.settle()
        world.flush(HOST)
        world.settle()
    assert world.resident(DEVICE) == world.resident(DEVICE, pool=1) == 0


def test_a_run_with_more_states_than_the_host_holds_comes_to_rest() -> None:
    world = World(
        config=config(ATTENTION, STATE, device=32, host=[32, 2], keep_states=f"ends,branches,every:{2 * PAGE_TOKENS}")
    )
    world.request(prompt(8))
    assert world.resident(HOST, pool=1) == 2


def test_another_write_policy_holds_for_what_is_used_from_then_on_and_what_was_dirty_stays_dirty() -> None:
    world = World(config=config(ATTENTION, host=64, write_policy="back"))
    world.request(prompt(4))
    world.core.write_by("through")
    world.settle()
    assert world.resident(HOST) == 0, "it was not dirty"
    world.request(prompt(4))
    assert world.resident(HOST) == 4
    lease = world.start(prompt(4, seed=1))
    world.grow(lease, 4)
    world.publish(lease, 4)
    world.core.write_by("back")
    world.close(lease)
    world.settle()
    assert world.resident(HOST) == 8
    world.request(prompt(4, seed=2))
    assert world.resident(HOST) == 8


def test_what_a_pause_held_back_goes_to_storage_when_storing_pays_again() -> None:
    page_bytes = ATTENTION.payload_bytes
    policies = {"offload_pays_at": 0.5, "offload_horizon_bytes": 2 * SAMPLE * page_bytes}
    world = World(config=config(ATTENTION, device=256, host=256, storage=True, **policies))
    governor, seeds = world.core.backups.governor, range(64)
    governor.reset(paused=True)
    governor.used_bytes = page_bytes  # of the sample, some was used
    for seed in seeds:
        world.request(prompt(1, seed=seed))
        if not governor.paused:
            break
    assert 2 < seed < 63 and len(world.storage.objects) == seed + 1, "two of the sample were stored"


# --- a storage that is attached and detached


def test_a_storage_that_is_detached_is_asked_nothing_and_given_nothing() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    waiting = world.open(prompt(4))
    world.detach()
    assert world.ready(waiting) and waiting.boundary == 0
    world.close(waiting)
    log = len(world.log)
    world.request(prompt(4, seed=1))
    assert not [each for each in world.log[log:] if isinstance(each, Probe) or STORAGE in (each.source, each.target)]


def test_a_storage_that_is_attached_gets_what_is_in_memory_when_asked() -> None:
    world = World(config=config(ATTENTION, STATE, host=64))
    world.request(prompt(4))
    world.attach()
    world.settle()
    assert not world.storage.objects
    world.attach(world.storage, back_up=True)
    world.settle()
    assert len(world.storage.objects) == 5
    world.detach()
    world.attach(back_up=True)
    world.settle()
    assert len(world.storage.objects) == 5, "another storage has nothing of that"


def test_a_storage_that_is_attached_gets_all_that_a_prompt_resumes_from_also_what_others_share() -> None:
    world = World(config=config(ATTENTION, STATE, host=64))
    asked, other = (fork(4, word, more=4 * PAGE_TOKENS + 1) for word in (1, 2))
    world.request(asked)
    world.request(other)  # so the first four pages are a run of their own
    world.attach()
    world.request(asked)
    world.flush(DEVICE)
    world.flush(HOST)
    assert world.request(asked).boundary == 8


def test_what_comes_late_from_a_storage_that_has_gone_is_stored_in_the_next_one() -> None:
    world = fetching(WAIT_COMPLETE)
    world.detach()
    world.attach()
    world.step([world.end(op) for op in [*world.flying]])
    assert world.core.counters.late == 6
    world.close(world.leases[0])
    assert world.request(prompt(6)).boundary == 6
    assert len(world.storage.objects) == 6


@pytest.mark.parametrize("detached", [True, False])
def test_a_storage_that_is_attached_in_place_of_another_is_not_taken_for_it(detached: bool) -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4), rest=False)
    while not copies(world, HOST, STORAGE):
        world.step([world.end(op) for op in [*world.flying]])
    if detached:
        world.detach()
    world.attach()
    world.step([world.end(op) for op in [*world.flying]])
    world.request(prompt(4))
    assert len(world.storage.objects) == 4
