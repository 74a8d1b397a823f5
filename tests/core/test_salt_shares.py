"""One salt's prompts cannot flush another's out of memory: beyond its share of a tier it loses its own pages."""

from collections import deque

import pytest

from kvarve.core.core import Core
from kvarve.core.core_config import CoreConfig
from kvarve.core.lease import Lease, Prompt
from kvarve.core.slots.shares import SaltShares
from kvarve.pages.keys import pack, root_key
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, STATE, WINDOW, World, config, prompt


def shares(world: World) -> SaltShares:
    found = world.core.candidates.salt_shares
    assert found is not None
    return found


def held(world: World, salt: str) -> list[int]:
    """Bytes that a salt has, by budget."""
    return shares(world).held.get(root_key(b"world", salt), [0] * len(shares(world).most))


def exceeds(world: World, salt: str) -> bool:
    return any(have > most for have, most in zip(held(world, salt), shares(world).most, strict=True))


def ask(world: World, seed: int, salt: str, pages: int = 4) -> None:
    world.request(prompt(pages, seed=seed), salt)
    world.step()


def hit(world: World, seed: int, salt: str, pages: int = 4) -> int:
    return world.core.lookup(root_key(b"world", salt), pack(prompt(pages, seed=seed))).memory


def test_a_salt_beyond_its_share_loses_its_own_coldest_pages_and_no_other_salts() -> None:
    world = World(config=config(ATTENTION, device=16, salt_share=0.5))
    ask(world, 0, "quiet")
    for seed in range(10):
        ask(world, seed, "loud")
        assert not exceeds(world, "loud")
    assert hit(world, 0, "quiet") == 4
    assert hit(world, 9, "loud") == 4 and hit(world, 0, "loud") == 0
    assert world.core.counters.over_share > 0


def test_without_a_share_one_salt_takes_all() -> None:
    world = World(config=config(ATTENTION, device=16))
    ask(world, 0, "quiet")
    for seed in range(10):
        ask(world, seed, "loud")
    assert hit(world, 0, "quiet") == 0


@pytest.mark.parametrize("beside", [8, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 32))])
def test_a_quiet_tenant_hits_all_beside_a_flood_of_requests_that_run_side_by_side(beside: int) -> None:
    core = Core(config(ATTENTION, device=500, salt_share=0.5))
    running, asked, hits = deque[Lease](), 0, 0

    def begin(salt: str, seed: int) -> Lease:
        lease = core.open(Prompt(root_key(b"world", salt), pack(prompt(8, seed))), 0.0)
        core.claim(lease, 0.0)
        core.growth.grow(lease, lease.pages)
        return lease

    def end(lease: Lease) -> None:
        core.growth.publish(lease, lease.grown)
        core.close(lease)
        core.step([], 0.0)

    for seed in range(400):
        running.append(begin("loud", seed))
        if len(running) == beside:
            end(running.popleft())
        if seed % 4 == 3:
            quiet = begin("quiet", seed // 4 % 20)
            asked, hits = asked + 1, hits + quiet.boundary
            end(quiet)
    assert hits == 8 * (asked - 20), "but the first time"


@pytest.mark.parametrize(
    "memory",
    [
        config(ATTENTION, WINDOW, STATE, device=[24, 12, 6], host=[48, 24, 12], salt_share=0.5),
        config(ATTENTION, STATE, device=[64, 4], salt_share=0.5),
        config(ATTENTION, STATE, device=[32, 32], cut={"device": (8, [4, 4], [1, 1])}, salt_share=0.5),
    ],
    ids=["tiers", "divided", "shared"],
)
def test_the_share_holds_in_each_tier_and_for_each_kind_of_pages(memory: CoreConfig) -> None:
    world = World(config=memory)
    ask(world, 0, "quiet")
    for seed in range(12):
        ask(world, seed, "loud")
        assert not exceeds(world, "loud")
    assert hit(world, 0, "quiet") == 4


def test_a_running_request_keeps_what_it_pins_and_its_salt_is_cut_back_when_it_ends() -> None:
    world = World(config=config(ATTENTION, device=16, salt_share=0.25))
    lease = world.start(prompt(8), "long")
    world.grow(lease, 8)
    world.publish(lease, 8)
    world.step()
    assert held(world, "long")[0] == 8 * ATTENTION.payload_bytes, "it is in use"
    world.close(lease)
    world.step()
    assert not exceeds(world, "long")
    assert 0 < hit(world, 0, "long", 8) <= 4, "of a prompt its beginning stays"


def test_salts_that_keep_nothing_are_forgotten() -> None:
    world = World(config=config(ATTENTION, device=16, salt_share=0.5))
    for number in range(20):
        ask(world, 0, f"salt {number}")
    world.flush(Tier.DEVICE)
    assert not shares(world).held and not world.core.candidates.of_salt
