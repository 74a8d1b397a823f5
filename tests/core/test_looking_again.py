"""A request that waits for its turn finds what has come to storage meanwhile."""

from kvarve.core.copies.effects import Probe
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.reasons import Reason, explain
from kvarve.core.requests.prefetch import LOOK_AGAIN_S, LOOK_AHEAD
from kvarve.pages.keys import pack
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, STATE, World, config, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def waiting(requests: int = 1, seeds: range = range(1)) -> tuple[World, list[Lease]]:
    """Requests for prompts that storage lacks, as it has said."""
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    leases = [world.open(prompt(6, seed=seed)) for seed in seeds for _ in range(requests)]
    world.settle()
    assert all(lease.phase is Phase.QUEUED and lease.promised == 0 for lease in leases)
    return world, leases


def probes(world: World) -> list[int]:
    return [op for op, each in world.flying.items() if isinstance(each, Probe)]


def test_what_another_server_stored_is_fetched_before_the_request_has_its_turn() -> None:
    world, (lease,) = waiting()
    world.stock(pack(prompt(6)))
    world.step(later_s=LOOK_AGAIN_S / 2)
    assert not world.flying
    world.step(later_s=LOOK_AGAIN_S / 2)
    world.settle()
    assert lease.phase is Phase.QUEUED and lease.promised == 6
    assert world.ready(lease) and lease.from_tiers() == (0, 0, 6)


def test_what_was_stored_and_has_left_memory_since_is_found_at_once() -> None:
    world, (lease,) = waiting()
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.now += LOOK_AGAIN_S / 2
    assert world.ready(lease) and lease.from_tiers() == (0, 0, 6)
    assert Reason.EVICTED_STORAGE not in explain(lease, world.core.paths)


def test_what_storage_has_evicted_is_told_so() -> None:
    world, _ = waiting()
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.storage.objects.clear()
    lease = world.open(prompt(6))
    world.settle()
    world.now += LOOK_AGAIN_S / 2
    assert world.ready(lease) and lease.boundary == 0
    assert explain(lease, world.core.paths)[Reason.EVICTED_STORAGE] == 12


def test_those_that_wait_longest_are_looked_up_again() -> None:
    world, leases = waiting(seeds=range(LOOK_AHEAD + 4))
    world.step(later_s=LOOK_AGAIN_S)
    assert len(probes(world)) == LOOK_AHEAD
    assert [lease.phase for lease in leases[LOOK_AHEAD:]] == [Phase.QUEUED] * 4
    world.step([world.end(op) for op in probes(world)])
    assert not world.flying, "once a second"
