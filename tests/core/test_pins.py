"""Many small counters at once, against one counter per position in a dict."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.core.tree.tree import Pins
from kvarve.pages.boundaries import members, of

POSITIONS = 24
SETS = st.integers(0, 2**POSITIONS - 1)


def check(pins: Pins, counts: Counter[int]) -> None:
    assert [pins.count(position) for position in range(POSITIONS)] == [counts[at] for at in range(POSITIONS)]
    assert pins.held() == of(at for at in counts if counts[at])


@given(st.lists(st.tuples(st.booleans(), SETS), max_size=40))
def test_counters_count(changes: list[tuple[bool, int]]) -> None:
    pins, counts = Pins(), Counter[int]()
    for adding, positions in changes:
        if adding:
            pins.add(positions)
            counts.update(members(positions))
        else:
            held = positions & pins.held()
            pins.remove(held)
            counts.subtract([*members(held)])
        check(pins, counts)


@given(st.lists(SETS, max_size=12), st.integers(0, POSITIONS), st.lists(SETS, max_size=6))
def test_a_cut_shares_the_counters_out_and_both_sides_go_on_counting(
    before: list[int], at: int, after: list[int]
) -> None:
    high, counts = Pins(), Counter[int]()
    for positions in before:
        high.add(positions)
        counts.update(members(positions))
    low = high.cut(at)
    check(low, Counter({position: count for position, count in counts.items() if position < at}))
    counts = Counter({position - at: count for position, count in counts.items() if position >= at})
    check(high, counts)
    for positions in after:
        high.add(positions)
        counts.update(members(positions))
        check(high, counts)


def test_unpinning_an_unpinned_position_is_a_bug_and_changes_nothing() -> None:
    pins = Pins()
    pins.add(0b011)
    with pytest.raises(AssertionError):
        pins.remove(0b110)
    assert [pins.count(position) for position in range(3)] == [1, 1, 0]
