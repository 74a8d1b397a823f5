"""The moves of a lease are one table."""

import pytest

from kvarve.core.lease import MOVES, WAITS_FOR, Cause, Phase
from tests.sim.world import ATTENTION, World, config, prompt


def test_a_lease_makes_no_move_that_is_not_in_the_table() -> None:
    world = World(config=config(ATTENTION))
    lease = world.start(prompt(2))
    assert lease.phase is Phase.READY
    with pytest.raises(AssertionError, match="a lease that is ready cannot move because pages are fetched"):
        lease.move(Cause.FETCH)
    world.close(lease)
    with pytest.raises(AssertionError, match="a lease that is closed cannot move"):
        lease.move(Cause.READY)


def test_every_phase_is_reached_and_left_and_ends_closed() -> None:
    assert {phase for phase, _ in MOVES} == {*Phase} - {Phase.CLOSED}
    assert {*MOVES.values()} == {*Phase}
    assert all(MOVES[phase, Cause.CLOSE] is Phase.CLOSED for phase in Phase if phase is not Phase.CLOSED)
    assert {*WAITS_FOR} == {Phase.PROBING, Phase.FETCHING, Phase.LOADING}
