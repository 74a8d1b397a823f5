"""Where a sequence may resume, against a brute force that reads like the definition."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvarve.pages import boundaries as b

LOOKBACKS = st.one_of(st.none(), st.integers(1, 9))


def brute_legal(pages: set[int], lookback: int | None, limit: int) -> set[int]:
    far = limit + 1 if lookback is None else lookback
    return {at for at in range(limit + 1) if all(page in pages for page in range(max(0, at - far), at))}


def test_six_attention_pages_a_state_after_three_and_two_index_keys_give_boundary_zero() -> None:
    present = [b.span(0, 6), b.of([3]), b.span(0, 3)]
    assert b.deepest(b.resume_at(present, [None, 1, None], limit=6)) == 0


def test_a_state_saved_at_page_4_is_no_use_at_page_3() -> None:
    assert b.legal(b.of([3]), 1, limit=6) == b.of([0, 4])


@given(st.integers(0, 2**24 - 1), LOOKBACKS, st.integers(0, 24))
def test_legal_boundaries_equal_the_definition(pages: int, lookback: int | None, limit: int) -> None:
    assert set(b.members(b.legal(pages, lookback, limit))) == brute_legal(set(b.members(pages)), lookback, limit)


@given(
    st.lists(st.tuples(st.integers(0, 2**20 - 1), LOOKBACKS), min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(1, 5),
)
def test_the_hit_is_the_deepest_boundary_legal_in_every_pool(
    pools: list[tuple[int, int | None]], limit: int, grid: int
) -> None:
    sets = [brute_legal(set(b.members(pages)), lookback, limit) for pages, lookback in pools]
    expected = set.intersection(*sets) & set(range(0, limit + 1, grid))
    got = b.resume_at([pages for pages, _ in pools], [lookback for _, lookback in pools], limit, grid)
    assert set(b.members(got)) == expected
    assert b.deepest(got) == max(expected)


@given(st.integers(0, 2**16 - 1), st.integers(1, 9))
def test_the_pages_read_before_several_boundaries_are_those_that_any_of_them_needs(several: int, lookback: int) -> None:
    assert b.read_before(several, lookback) == b.union(b.needed(each, lookback) for each in b.members(several))


SETS = st.integers(0, 2**12 - 1)


@given(SETS)
def test_spans_are_the_rows_of_a_set(bits: int) -> None:
    rows = [*b.spans(bits)]
    assert b.union(b.span(*row) for row in rows) == bits
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(rows)), "rows do not touch"


@given(SETS, SETS, st.integers(0, 14))
def test_elements_have_numbers_in_their_order(bits: int, other: int, count: int) -> None:
    elements, some = [*b.members(bits)], bits & other
    values = [f"of {element}" for element in elements]
    assert b.chosen(values, bits, some) == [f"of {element}" for element in b.members(some)]
    assert b.numbered(bits, other) == b.of(each for number, each in enumerate(elements) if other >> number & 1)
    assert [*b.members(b.first(bits, count))] == elements[:count]
    assert [*b.members(b.last(bits, count))] == elements[max(0, len(elements) - count) :]
