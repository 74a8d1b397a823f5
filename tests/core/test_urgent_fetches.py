"""A fetch is urgent once its request has been claimed, whichever came first; no other copy is."""

import pytest

from kvarve.core.copies.effects import Copy, Probe
from kvarve.core.policies import Patience
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, World, config, prompt

PATIENT = Patience(base_s=100.0)


def stored(world: World) -> None:
    world.request(prompt(4))
    world.flush(Tier.DEVICE, Tier.HOST)
    world.urgent.clear()


def fetches(world: World) -> list[int]:
    return [op for op, each in world.flying.items() if isinstance(each, Copy) and each.source is Tier.STORAGE]


@pytest.mark.parametrize("claimed_first", [True, False])
def test_a_fetch_is_urgent_once_a_request_that_waits_for_it_is_claimed(claimed_first: bool) -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    stored(world)
    lease, other = (world.open(prompt(4), patience=PATIENT) for _ in range(2))
    if claimed_first:
        world.claim(other)
    assert not world.urgent, "a probe has a lane of its own"
    probes = [op for op, each in world.flying.items() if isinstance(each, Probe)]
    world.step([world.end(op) for op in probes])
    (fetch,) = fetches(world)
    assert bool(world.urgent) is claimed_first
    world.claim(other)
    world.claim(other)
    assert world.urgent == {fetch}
    world.settle()
    world.close(lease)
    world.close(other)
    world.drain()
