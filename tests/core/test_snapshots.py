"""Which windows and states are worth keeping: pure arithmetic on a prompt's marks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.boundaries import members, of
from kvarve.core.snapshots import Snapshots
from kvarve.errors import ConfigError
from kvarve.testing.world import ATTENTION, STATE, World, config, fork, prompt

PAGE = 64


def kept(snapshots: Snapshots, pages: int, branch: int = 0, had: int = 0, grid: int = 1) -> list[int]:
    return [*members(snapshots.boundaries(pages, pages - 1, branch, had, PAGE, grid))]


def test_a_prompt_is_kept_where_it_ends_for_its_continuation_and_for_itself() -> None:
    assert kept(Snapshots(), 10) == [9, 10]
    assert kept(Snapshots(), 10, grid=4) == [8]


def test_a_prompt_is_kept_where_it_leaves_a_known_one() -> None:
    assert kept(Snapshots(), 10, branch=4) == [4, 9, 10]
    assert kept(Snapshots(branches=False), 10, branch=4) == [9, 10]
    assert kept(Snapshots(ends=False), 10, branch=4) == [4]


def test_states_are_kept_every_so_many_tokens() -> None:
    assert kept(Snapshots(every=3 * PAGE), 10) == [3, 6, 9, 10]
    assert kept(Snapshots(every=1), 3) == [1, 2, 3]


def test_a_gap_counts_from_what_is_kept_already() -> None:
    assert kept(Snapshots(every=PAGE, gap=3 * PAGE), 9) == [3, 6, 9]
    assert kept(Snapshots(every=PAGE, gap=3 * PAGE), 9, had=of([4])) == [3, 4, 7]


@given(
    st.integers(1, 60),
    st.integers(0, 60),
    st.sets(st.integers(1, 60)),
    st.integers(0, 10),
    st.integers(0, 10),
    st.sampled_from([1, 2, 4]),
)
def test_every_snapshot_is_on_the_grid_and_in_the_prompt_and_far_from_the_one_before(
    pages: int, branch: int, had: set[int], every: int, gap: int, grid: int
) -> None:
    had = {boundary for boundary in had if boundary % grid == 0}
    found = kept(Snapshots(every=every * PAGE, gap=gap * PAGE), pages, min(branch, pages), of(had), grid)
    assert all(0 < boundary <= pages and boundary % grid == 0 for boundary in found)
    for boundary in set(found) - had:
        before = max((each for each in {*had, *found, 0} if each < boundary), default=0)
        assert boundary - before >= gap


@pytest.mark.parametrize("wrong", [{"every": -1}, {"gap": -1}])
def test_less_than_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="give 0 or more"):
        Snapshots(**wrong)


def test_without_branch_points_a_shared_beginning_is_resumed_from_where_another_prompt_ended() -> None:
    world = World(config=config(ATTENTION, STATE, snapshot_branches=False))
    world.request(prompt(6))
    world.request(fork(4, word=1))
    assert world.request(fork(4, word=2)).boundary == 0
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(6))
    world.request(fork(4, word=1))
    assert world.request(fork(4, word=2)).boundary == 4
