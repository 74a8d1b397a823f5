"""A copy moves a part of each pool; how it ended, and how a long one is cut into several."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from kvarve.core.copies.effects import Ended
from kvarve.core.copies.in_flight import FETCH, GROWTH, Op, Part, batches
from kvarve.pages.boundaries import members, ones

POSITIONS = st.lists(st.integers(0, 2**14 - 1), min_size=1, max_size=3)


def parts_of(positions: list[int]) -> list[Part]:
    return [
        Part(pool, bits, [100 * pool + at for at in members(bits)], [1000 + 100 * pool + at for at in members(bits)])
        for pool, bits in enumerate(positions)
        if bits
    ]


def pages_of(parts: Sequence[Part]) -> list[tuple[int, int, int, int]]:
    """Position, pool, and the slots at both ends, in the order in which an effect has them."""
    return [
        (position, part.pool, *slots)
        for part in parts
        for position, *slots in zip(members(part.positions), part.sources, part.targets, strict=True)
    ]


@given(POSITIONS, st.integers(0, 2**42 - 1), st.integers(0, 2**42 - 1))
def test_a_page_has_the_outcome_of_its_number_in_the_effect(positions: list[int], good: int, bad: int) -> None:
    op = Op(FETCH, parts_of(positions))
    pages = pages_of(op.parts)
    assert len(pages) == op.page_count
    outcomes = op.outcomes(Ended(1, good, bad))
    for number, (position, pool, _, _) in enumerate(pages):
        (outcome,) = (each for each in outcomes if each.part.pool == pool)
        assert outcome.good >> position & 1 == good >> number & 1
        assert outcome.bad >> position & 1 == bad >> number & 1
        assert outcome.lost >> position & 1 == 1 - (good >> number & 1)
    assert not any((outcome.good | outcome.bad) & ~outcome.part.positions for outcome in outcomes)


@given(POSITIONS, st.integers(1, 9))
@example([ones(3000), 0, 7 << 500, 1 << 2999], 3)
def test_a_copy_is_cut_between_positions_and_no_batch_could_be_cut_again(positions: list[int], most: int) -> None:
    cut = [*batches(parts_of(positions), most)]
    assert [page for batch in cut for page in sorted(pages_of(batch))] == sorted(pages_of(parts_of(positions)))
    for batch, after in pairwise(cut):
        last, first = (max(part.positions for part in batch), min(part.positions & -part.positions for part in after))
        assert last < first, "a position is in one copy"
    earlier = 0
    for number, batch in enumerate(cut):
        end = max(part.positions for part in batch).bit_length()
        count = sum(part.positions.bit_count() for part in batch)
        before = sum((part.positions & ones(end - 1)).bit_count() for part in batch)
        size = max(most, earlier // GROWTH)
        assert before < size and (count >= size or number == len(cut) - 1)
        earlier += count
