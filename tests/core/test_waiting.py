"""Requests that wait: for a storage within their patience, and to be claimed."""

import pytest
from flights import fetching, in_flight

from kvarve.core.copies.effects import Began, Probe
from kvarve.core.lease import Phase
from kvarve.core.policies import BEST_EFFORT, Patience, Policies
from kvarve.errors import ConfigError
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, STATE, World, config, prompt

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


# --- patience


def test_what_has_arrived_when_patience_runs_out_is_used() -> None:
    world = fetching(Patience(3))
    (lease,) = world.leases
    first, second, third = world.flying
    assert not world.claim(lease)
    world.step([Began(first)])
    world.step([world.end(first)], later_s=2.9)
    assert lease.phase is Phase.FETCHING
    world.step(later_s=0.2)
    assert lease.phase is Phase.LOADING
    load = max(world.flying)
    world.step([world.end(load)])
    assert lease.ready and (lease.boundary, lease.from_tiers()) == (2, (0, 0, 2))
    world.step([world.end(third), world.end(second)])
    assert world.core.counters.late == 4
    assert world.resident(HOST) == 4, "late pages are kept if they fit on; the third copy came before the second"
    world.drain()


def test_patience_grows_with_what_is_missing() -> None:
    assert Patience(1.5, 2.0).seconds(512) == 2.5
    assert Policies(storage_wait="2s+0.25s/Ki").patience().seconds(4096) == 3.0
    assert Policies(storage_wait="none").patience() == BEST_EFFORT
    assert Policies(storage_wait="all", storage_deadline_s=7.0).patience() == Patience(7.0, each=True)
    with pytest.raises(ConfigError, match="storage_wait must be none, all, or seconds"):
        Policies(storage_wait="-1s")


def test_patience_does_not_run_out_while_a_request_waits_in_the_queue() -> None:
    world = fetching(Patience(3))
    (lease,) = world.leases
    world.step(later_s=100)
    assert lease.phase is Phase.FETCHING
    assert world.ready(lease) and lease.boundary == 0, "but by the time it is claimed it has"


def test_best_effort_does_not_wait_for_storage() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(4), patience=BEST_EFFORT)
    assert isinstance(in_flight(world), Probe) and not lease.ready
    assert world.claim(lease) and lease.boundary == 0
    world.step([world.end(in_flight(world).op)])
    assert not world.flying, "the answer comes too late to fetch anything"


# --- while requests wait


def test_a_request_that_waited_behind_one_that_computed_its_prefix_resumes_from_it() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    waiting = [world.open(prompt(6)) for _ in range(3)]
    world.request(prompt(6))
    for lease in waiting:
        assert world.ready(lease) and lease.boundary == 6
        world.close(lease)


def test_waiting_requests_hold_what_came_from_storage_and_nothing_on_the_device() -> None:
    world = World(config=config(ATTENTION, STATE, host=16, storage=True, device=8))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    waiting = world.open(prompt(6))
    world.settle()
    assert waiting.phase is Phase.QUEUED and world.resident(HOST) == 6
    world.flush(HOST)
    assert world.resident(HOST) == 6, "pages that landed for a request stay until it is claimed"
    world.request(prompt(6, seed=1))
    world.request(prompt(6, seed=2))
    assert world.ready(waiting) and waiting.boundary == 6 and waiting.from_tiers() == (0, 0, 6)


def test_what_a_waiting_request_lost_in_memory_is_asked_of_storage_when_its_turn_comes() -> None:
    world = World(config=config(ATTENTION, STATE, host=8, storage=True, device=8))
    world.request(prompt(6))
    waiting = world.open(prompt(6))
    world.request(prompt(6, seed=1))
    assert world.hit(prompt(6)) == (0, 0)
    assert world.ready(waiting) and waiting.boundary == 6 and waiting.from_tiers() == (2, 0, 4)


def test_waiting_for_storage_never_holds_more_of_the_host_than_its_share() -> None:
    world = World(config=config(ATTENTION, host=16, storage=True, device=16, host_share=0.5))
    for seed in range(4):
        world.request(prompt(4, seed=seed))
    world.flush(DEVICE, HOST)
    waiting = [world.open(prompt(4, seed=seed)) for seed in range(4)]
    for _ in range(20):
        world.step([world.end(op) for op in [*world.flying]])
        assert 16 - len(world.core.slot_pools.free[1]) <= 8
    assert [lease.phase for lease in waiting] == [Phase.QUEUED] * 2 + [Phase.PROBING] * 2
    for lease in waiting:
        assert world.ready(lease) and lease.boundary == 4
        world.close(lease)


def test_room_for_the_rest_of_a_prompt_is_never_made_at_the_cost_of_its_beginning() -> None:
    world = World(config=config(ATTENTION, host=6, storage=True))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.request(prompt(3))
    world.request(prompt(3, seed=1))
    world.flush(DEVICE)
    lease = world.open(prompt(6))
    world.open(prompt(3, seed=1))  # so the first one's beginning is the coldest that there is
    assert world.ready(lease) and lease.boundary == 6 and lease.from_tiers() == (0, 3, 3)
