"""Copies in a World: those that its core sent, and a request that waits for some from storage."""

from kvarve.core.copies.effects import Copy, Probe
from kvarve.core.lease import Phase
from kvarve.core.policies import Patience
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, World, config, prompt


def copies(world: World, source: Tier, target: Tier) -> list[Copy]:
    """All copies along an edge so far."""
    return [each for each in world.log if isinstance(each, Copy) and (each.source, each.target) == (source, target)]


def in_flight(world: World) -> Copy | Probe:
    (effect,) = world.flying.values()
    return effect


def fetching(how_patient: Patience) -> World:
    """A prompt of six pages on its way from storage, in three copies."""
    world = World(config=config(ATTENTION, host=64, storage=True, batch_pages=2))
    world.request(prompt(6))
    world.flush(Tier.DEVICE, Tier.HOST)
    lease = world.open(prompt(6), patience=how_patient)
    world.step([world.end(in_flight(world).op)])
    assert lease.phase is Phase.FETCHING and len(world.flying) == 3
    return world
