"""A request's life in the core by example: side by side with others, its private copies, limits and illegal calls."""

from typing import Any

import pytest
from flights import fetching

from kvarve.core.core import Core
from kvarve.core.core_config import CoreConfig
from kvarve.core.lease import Phase
from kvarve.core.policies import WAIT_COMPLETE
from kvarve.errors import ConfigError
from kvarve.pages.keys import TOKEN_BYTES, extend, pack
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, EVERY_PAGE, PAGE_TOKENS, STATE, World, config, dump, prompt

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


# --- requests side by side


def test_what_two_requests_publish_at_once_is_kept_once() -> None:
    world = World(config=config(ATTENTION, STATE, device=16))
    one, two = world.start(prompt(4)), world.start(prompt(4))
    for lease in (one, two):
        world.grow(lease, 4)
    world.publish(one, 4)
    world.publish(two, 4)
    assert world.core.counters.duplicates == 5
    assert world.resident(DEVICE) == 4 and len(world.core.slot_pools.free[0]) == 12
    world.close(one)
    world.close(two)
    world.drain()


def test_a_lease_closed_half_way_through_a_fetch_leaves_behind_what_fits_on() -> None:
    world = fetching(WAIT_COMPLETE)
    world.step([world.end(next(iter(world.flying)))])
    world.close(world.leases[0])
    assert len(world.core.slot_pools.free[1]) == 64 - 6 and world.resident(HOST) == 2
    last = [*world.flying][1]
    world.step([world.end(last)])
    assert len(world.core.slot_pools.free[1]) == 64 - 4, "there is a gap before it"
    world.settle()
    assert world.resident(HOST) == 4 and world.core.counters.late == 4 and world.core.prefetch.held == [0]


# --- private copies, and sequences that go on


def test_a_sequence_that_goes_on_is_kept_where_it_ends_now() -> None:
    world = World(config=config(ATTENTION, STATE))
    lease = world.start(prompt(3))
    world.extend(lease, prompt(6)[3 * PAGE_TOKENS + 1 :])
    assert lease.pages == 6
    world.grow(lease, 6)
    world.publish(lease, 6)
    world.close(lease)
    assert world.request(prompt(8)).boundary == 6
    assert world.request(prompt(3)).boundary == 0, "its first end was not the end"


def test_what_an_engine_decodes_has_a_state_at_its_end_alone() -> None:
    world = World(config=config(ATTENTION, STATE, keep_states=EVERY_PAGE))
    lease = world.start(prompt(3))
    world.grow(lease, 3)
    world.extend(lease, prompt(6)[3 * PAGE_TOKENS + 1 :])
    assert [[*pages] for pages in world.grow(lease, 6)] == [[3, 4, 5], [5]]


def test_a_sequence_may_be_known_otherwise_from_where_it_is_not_published() -> None:
    """A chunk that is not whole yet gets its last name when it is."""
    world = World(config=config(ATTENTION))
    core, lease = world.core, world.start(prompt(3, extra=1))
    world.grow(lease, 2)
    world.publish(lease, 2)
    begun, other = lease.keys, prompt(4, seed=9)[2 * PAGE_TOKENS :]
    with pytest.raises(AssertionError, match="keeps its name"):
        core.growth.extend(lease, pack(other), 2 * TOKEN_BYTES * PAGE_TOKENS)  # of which one page is published
    assert lease.keys == begun
    core.growth.extend(lease, pack(other), (PAGE_TOKENS + 1) * TOKEN_BYTES)
    whole = prompt(2, extra=0) + other
    assert lease.keys == b"".join(extend(lease.root, pack(whole), PAGE_TOKENS))
    assert lease.pages == 4


def test_a_lease_that_is_used_out_of_turn_says_what_comes_first() -> None:
    world = World(config=config(ATTENTION, host=64))
    lease = world.start(prompt(4))
    growth = world.core.growth
    growth.grow(lease, 2)
    with pytest.raises(AssertionError, match="published after they were grown"):
        growth.publish(lease, 4)
    world.close(lease)
    for call in (growth.grow, growth.publish, growth.reserve, growth.slots):
        with pytest.raises(AssertionError, match="a lease is claimed, and not closed, before its pages"):
            call(lease, 0)


# --- thresholds, deadlines, and answers about no copy in flight


def test_what_saves_too_little_is_not_brought_to_the_device() -> None:
    world = World(config=config(ATTENTION, host=64, load_at_least=4 * PAGE_TOKENS))
    world.request(prompt(3))
    world.request(prompt(4, seed=1))
    world.flush(DEVICE)
    assert world.request(prompt(3)).boundary == 0
    assert world.request(prompt(4, seed=1)).boundary == 4


def test_a_copy_to_the_device_that_never_ends_is_not_waited_for_for_ever() -> None:
    world = World(config=config(ATTENTION, host=64, load_deadline_s=5.0))
    world.request(prompt(4))
    world.flush(DEVICE)
    lease = world.start(prompt(4))
    world.step(later_s=4.9)
    assert lease.phase is Phase.LOADING
    world.step(later_s=0.2)
    assert lease.ready and lease.boundary == 0
    world.settle()
    world.close(lease)
    assert world.request(prompt(4)).from_tiers() == (4, 0, 0), "it arrived after all"


# --- illegal calls raise, and change nothing


def test_illegal_calls_raise_and_change_nothing() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    early = world.start(prompt(4))
    ready = world.start(prompt(5, seed=1), read=False)
    world.grow(ready, 4)
    world.publish(ready, 2)
    core, before = world.core, dump(world.core)
    for illegal in (
        lambda: core.growth.grow(early, 1),
        lambda: core.growth.publish(early, 0),
        lambda: core.growth.slots(early, 0),
        lambda: core.growth.grow(ready, 6),
        lambda: core.growth.publish(ready, 5),
        lambda: core.growth.publish(ready, 1),
    ):
        with pytest.raises(AssertionError):
            illegal()
        assert dump(core) == before
    with pytest.raises(ValueError, match="between 0 and"):
        pack([-1])


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"device": -1}, "attention cannot have -1 slots on the device"),
        ({"offload_horizon_bytes": -1}, "cannot be negative"),
        ({"host": -1}, "attention cannot have -1 slots on the host"),
        ({"backup_bytes": -1}, "less than no bytes"),
        ({"write_policy": "through:0"}, "through:N"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        World(config=config(ATTENTION, **({"device": 4} | wrong)))


def test_a_cache_needs_slots_and_a_storage_needs_a_host() -> None:
    with pytest.raises(ConfigError, match="slots on the device or in the host"):
        CoreConfig((ATTENTION,), {})
    with pytest.raises(ConfigError, match="host"):
        Core(config(ATTENTION)).attach()


def test_closing_twice_changes_nothing() -> None:
    world = World(config=config(ATTENTION))
    lease = world.open(prompt(2))
    world.close(lease)
    before = dump(world.core)
    world.core.close(lease)
    assert dump(world.core) == before
