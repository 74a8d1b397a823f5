"""Several requests for the same pages of storage: each page is fetched once, and awaited by all."""

from kvarve.core.copies.effects import Began, Copy
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import WAIT_COMPLETE, Patience
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, STATE, World, config, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PATIENCE_S = 3.0


def stored(pages: int = 6, *pools: object, **settings: object) -> World:
    """Storage has a prompt that memory has not; a fetch takes two pages."""
    settings = {"host": 64, "storage": True, "batch_pages": 2} | settings
    world = World(config=config(*(pools or (ATTENTION,)), **settings))  # type: ignore[arg-type]
    world.request(prompt(pages))
    world.flush(DEVICE, HOST)
    return world


def ask(world: World, tokens: list[int], patience: Patience = WAIT_COMPLETE) -> Lease:
    """A request whose probe has been answered."""
    lease = world.open(tokens, patience=patience)
    world.step([world.end(op) for op in sorted(lease.ops)])
    return lease


def fetched(world: World) -> int:
    """Pages that were asked of storage so far."""
    return sum(len(each.pages) for each in world.log if isinstance(each, Copy) and each.source is Tier.STORAGE)


def test_sixteen_requests_for_one_stored_prompt_read_it_once() -> None:
    world = stored(12, ATTENTION, STATE)
    leases = [world.open(prompt(12)) for _ in range(16)]
    world.settle()
    assert fetched(world) == 13, "its pages and the state at its end"
    for lease in leases:
        assert world.ready(lease) and lease.boundary == 12
    assert leases[0].from_tiers() == (0, 0, 12)
    assert all(each.from_tiers() == (0, 0, 12) for each in leases), "each has waited for storage"


def test_a_fetch_that_fails_is_tried_once_more_for_all_that_waited_for_it() -> None:
    world = stored(2)
    leases = [ask(world, prompt(2)) for _ in range(8)]
    (fetch,) = world.flying
    world.step([world.end(fetch, lost=-1)])
    (again,) = world.flying
    assert all(lease.ops == {again} for lease in leases[1:]) and leases[0].phase is Phase.QUEUED
    world.step([world.end(again, lost=-1)])
    assert not world.flying and all(lease.phase is Phase.QUEUED for lease in leases), "what fails twice is computed"


def test_only_pages_that_both_prompts_have_go_to_the_one_that_stays() -> None:
    world = stored()
    longer = ask(world, prompt(6))
    shorter = ask(world, prompt(3))
    one, two, _ = sorted(world.flying)
    assert shorter.ops == {one, two}
    world.close(longer)
    world.step([world.end(one), world.end(two)])
    assert world.resident(HOST) == 4, "the page behind it is nobody's, and stays while there is room"
    assert world.ready(shorter) and shorter.boundary == 3


def test_a_fetch_that_hangs_is_awaited_for_a_patience_and_begun_anew_by_those_who_come_later() -> None:
    world = stored(2)
    ask(world, prompt(2), Patience(PATIENCE_S))
    (hangs,) = world.flying
    world.step([Began(hangs)])
    joins = ask(world, prompt(2), Patience(PATIENCE_S))
    world.claim(joins)
    assert joins.ops == {hangs}
    world.step(later_s=PATIENCE_S)
    assert world.claim(joins) and joins.boundary == 0, "it goes on without"
    later = ask(world, prompt(2), Patience(PATIENCE_S))
    (own,) = later.ops
    assert own != hangs
    world.step([world.end(own)])
    assert world.ready(later) and later.boundary == 2
