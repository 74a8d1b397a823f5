"""A fetch is urgent once its request has been claimed, whichever came first; no other copy is."""

from kvarve.core.effects import Copy, Probe
from kvarve.core.policies import Patience
from kvarve.model import Tier
from kvarve.testing.world import ATTENTION, World, config, prompt

PATIENT = Patience(base_s=100.0)


def stored(world: World) -> None:
    world.request(prompt(4))
    world.flush(Tier.DEVICE, Tier.HOST)
    world.urgent.clear()


def fetches(world: World) -> list[int]:
    return [op for op, each in world.flying.items() if isinstance(each, Copy) and each.source is Tier.STORAGE]


def probes(world: World) -> list[int]:
    return [op for op, each in world.flying.items() if isinstance(each, Probe)]


def test_a_fetch_becomes_urgent_when_a_request_that_waits_for_it_is_claimed() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    stored(world)
    lease, other = (world.open(prompt(4), patience=PATIENT) for _ in range(2))
    world.step([world.end(op) for op in probes(world)])
    (fetch,) = fetches(world)
    assert not world.urgent
    world.claim(other)
    world.claim(other)
    assert world.urgent == {fetch}
    world.settle()
    world.close(lease)
    world.close(other)
    world.drain()


def test_a_fetch_of_a_request_that_was_claimed_before_is_urgent_from_the_start() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    stored(world)
    lease = world.open(prompt(4), patience=PATIENT)
    world.claim(lease)
    assert not world.urgent, "a probe has a lane of its own"
    world.step([world.end(op) for op in probes(world)])
    assert world.urgent == {*fetches(world)} != set()
    world.settle()
    world.close(lease)
    world.drain()
