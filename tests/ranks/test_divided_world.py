"""Real cores on two to eight ranks in random lives, which hear of each other's copies by the ranks' own protocol."""

import pytest

from kvarve.core.copies.effects import Event
from kvarve.ranks.agreement import Votes
from tests.sim.world import born, live

SHORT, LONG, STEPS = (1, 3), 60, 100


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SHORT else pytest.mark.long) for seed in range(LONG)]
)
def test_ranks_that_hear_of_copies_by_their_own_protocol_break_no_law(seed: int) -> None:
    print(f"python -m tests.sim.world --ranks --seeds {seed}:{seed + 1}")
    world = live(*born(seed, "ranks"), steps=STEPS)
    assert len(world.cores) > 1 and world.steps >= STEPS
    assert world.seen["turns without an exchange"] > 0


def test_the_world_sees_a_copy_that_ends_with_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = Votes.merge

    def first(self: Votes, news: list[list[Event]]) -> list[Event]:
        return merge(self, [max(news, key=len)] * len(news))

    monkeypatch.setattr(Votes, "merge", first)
    with pytest.raises(AssertionError, match=r"all ranks hear the same|when it has on every rank"):
        for seed in (7, 12):
            live(*born(seed, "ranks"), steps=STEPS)
