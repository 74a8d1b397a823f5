"""Pages that another server is still writing to storage: they are asked for again, for a bounded time."""

import pytest

from kvarve.core.copies.effects import Probe
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import Patience
from kvarve.core.requests.prefetch import ASK_AGAIN_S, ASK_ALL_S
from kvarve.pages.keys import pack
from tests.sim.world import ATTENTION, EVERY_PAGE, STATE, World, config, prompt

PATIENT = Patience(10)


def opened(world: World, patience: Patience = PATIENT, expected: tuple[int, float] = (4, 5.0)) -> Lease:
    lease = world.open_packed(pack(prompt(4)), "", patience, expected=expected)
    world.claim(lease)
    return lease


def probes(world: World) -> list[Probe]:
    return [effect for effect in world.flying.values() if isinstance(effect, Probe)]


def answer(world: World, later_s: float = 0.0) -> None:
    world.step([world.end(op) for op in [*world.flying]], later_s)


def test_expected_pages_are_asked_for_again_until_they_are_there() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    lease = opened(world)
    answer(world)
    assert lease.phase is Phase.PROBING and not world.flying, "no page is there yet"
    world.step(later_s=ASK_AGAIN_S / 2)
    assert not world.flying
    world.step(later_s=ASK_AGAIN_S)
    assert len(probes(world)) == 1
    answer(world)
    world.stock(pack(prompt(4)))
    world.step(later_s=ASK_AGAIN_S)
    world.settle()
    assert lease.ready and lease.boundary == 4 and lease.from_tiers() == (0, 0, 4)


def asked(world: World, lease: Lease) -> list[int]:
    (probe,) = probes(world)
    return [position for page in probe.pages for position in range(4) if page.key == lease.key(position)]


def test_the_last_of_the_missing_pages_is_asked_for_until_it_has_come_and_then_the_others() -> None:
    """All of a long prompt's pages every 50 ms would keep the engine's thread from its work."""
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.stock(pack(prompt(4)), missing=0b1110)
    lease = opened(world)
    answer(world)
    for _ in range(3):
        world.step(later_s=ASK_AGAIN_S)
        assert asked(world, lease) == [3]
        answer(world)
    world.stock(pack(prompt(4)))
    world.step(later_s=ASK_AGAIN_S)
    answer(world)
    world.step()
    assert asked(world, lease) == [1, 2], "at once"


def test_all_missing_pages_are_asked_for_now_and_then() -> None:
    """So that a request whose time is up resumes from those that have come."""
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.stock(pack(prompt(4)), missing=0b1100)
    lease = opened(world)
    answer(world)
    seen = set()
    for _ in range(int(2 * ASK_ALL_S / ASK_AGAIN_S)):
        world.step(later_s=ASK_AGAIN_S)
        seen.add(tuple(asked(world, lease)))
        answer(world)
    assert seen == {(3,), (2, 3)}
    world.stock(pack(prompt(4)), missing=0b1000)
    for _ in range(int(5.0 / ASK_AGAIN_S) + 1):
        answer(world, ASK_AGAIN_S)
    world.settle()
    assert lease.ready and lease.boundary == 3


@pytest.mark.parametrize(("patience", "ticket_s", "landed"), [(PATIENT, 1.0, 2), (Patience(1.0), 1000.0, 0)])
def test_a_request_waits_no_longer_than_its_ticket_says_and_than_its_patience(
    patience: Patience, ticket_s: float, landed: int
) -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.stock(pack(prompt(4)), missing=0b1100)
    lease = opened(world, patience, expected=(4, ticket_s))
    for _ in range(40):
        answer(world, ASK_AGAIN_S)
    assert lease.ready and lease.boundary == landed, "it continues with the pages that have landed"


def test_pages_beyond_the_ticket_are_not_waited_for() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.stock(pack(prompt(4)), missing=0b1000)
    lease = opened(world, expected=(3, 5.0))
    world.settle()
    assert lease.ready and lease.boundary == 3


def test_a_scheduler_sleeps_until_it_is_time_to_ask_again() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    opened(world)
    answer(world)
    assert world.core.patience_ends() == pytest.approx(world.now + ASK_AGAIN_S)


def test_states_that_the_boundary_of_a_ticket_does_not_read_are_not_waited_for() -> None:
    """They were perhaps never kept."""
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.stock(pack(prompt(4)))
    for position in range(3):
        world.forget(position, prompt(4), pool=1)
    lease = opened(world)
    world.settle()
    assert lease.ready and lease.boundary == 4


def test_pages_that_storage_has_lost_are_dirty_again_though_others_are_awaited() -> None:
    settings = config(ATTENTION, STATE, device=(64, 4), host=(64, 4), storage=True, keep_states=EVERY_PAGE)
    world = World(config=settings)
    world.request(prompt(6))
    for seed in range(9, 13):
        world.request(prompt(1, seed=seed))  # their states take the slots of the first prompt's
    run = next(run for run in world.core.tree.runs() if run.pages == 6)
    stored = run.stored[1]
    assert stored & 0b11 == 0b11
    for position in (0, 1):
        world.forget(position, prompt(6), pool=1)
    lease = world.open_packed(pack(prompt(6)), "", PATIENT, expected=(1, 1.0))
    world.claim(lease)
    answer(world)
    assert lease.phase is Phase.PROBING and lease.awaited == [0, 0b01]
    assert run.stored[1] == stored & ~0b10
