"""A prompt that is handed over goes to storage whatever the policies say, and again if the storage has evicted it."""

from kvarve.core.copies.effects import Copy
from kvarve.core.lease import Lease
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, World, config, prompt


def handed_over(world: World, seed: int = 0) -> tuple[Lease, int]:
    """A prompt of 6 pages is computed and handed over: its lease, and how many pages went to storage for it."""
    lease = world.start(prompt(6, seed=seed))
    world.settle()
    world.claim(lease)
    if lease.grown < 6:
        world.grow(lease, 6)
        world.publish(lease, 6)
    before = len(world.log)
    assert world.hand_over(lease) == 6
    world.settle()
    world.close(lease)
    world.settle()
    sent = [effect for effect in world.log[before:] if isinstance(effect, Copy) and effect.target is Tier.STORAGE]
    return lease, sum(len(effect.pages) for effect in sent)


def stored(world: World, lease: Lease) -> int:
    names = [world.transfers[0].name(lease.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], 0) for at in range(6)]
    return sum(name in world.storage.objects for name in names)


def test_prompts_that_are_handed_over_are_stored_though_storing_does_not_pay() -> None:
    """A prefill server stores much and reads nothing back."""
    world = World(config=config(ATTENTION, device=64, host=64, storage=True, offload_pays_at=0.5))
    world.core.governor.reset(paused=True)
    for seed in range(12):
        lease, _ = handed_over(world, seed)
        assert stored(world, lease) == 6


def test_hand_overs_do_not_make_storing_pause() -> None:
    world = World(
        config=config(
            ATTENTION,
            device=64,
            host=64,
            storage=True,
            offload_pays_at=0.5,
            offload_horizon_bytes=24 * ATTENTION.payload_bytes,
        )
    )
    for seed in range(12):
        handed_over(world, seed)
    assert not world.core.governor.paused


def test_a_prompt_that_storage_has_evicted_goes_there_again() -> None:
    world = World(config=config(ATTENTION, device=64, host=64, storage=True))
    lease, sent = handed_over(world)
    assert sent == 6
    for position in range(6):
        world.forget(position, prompt(6))
    lease, sent = handed_over(world)
    assert sent == 6 and stored(world, lease) == 6
