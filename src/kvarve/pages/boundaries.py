"""Where may a sequence resume? Pure arithmetic; nothing here knows what a tensor is.

A set of pages or boundaries is a Python int: bit p of a page set says "page p is here", bit b of a boundary set says
"resuming after b pages is legal". Intersection is `&`, the deepest boundary is the highest bit, and two ranks can
agree on a set by sending an int.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

Value = TypeVar("Value")


def ones(count: int) -> int:
    """The set {0, ..., count - 1}."""
    return (1 << count) - 1


def span(start: int, stop: int) -> int:
    """The set {start, ..., stop - 1}; empty if stop <= start."""
    return (1 << stop) - (1 << start) if stop > start else 0


def members(bits: int) -> Iterator[int]:
    """The elements of a set, lowest first."""
    low = bits & -bits
    if not bits & bits + low:  # a span, as most sets here are
        return iter(range(low.bit_length() - 1, bits.bit_length())) if bits else iter(())
    return _scattered(bits)


def _scattered(bits: int) -> Iterator[int]:
    digits = f"{bits:b}"[::-1]  # as text, which is searched once: each step on the number itself would cost its length
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)


def of(elements: Iterable[int]) -> int:
    """The set of the elements given."""
    bits = 0
    for element in elements:
        bits |= 1 << element
    return bits


def spans(bits: int) -> Iterator[tuple[int, int]]:
    """The rows of consecutive elements in a set: where each starts and stops."""
    low = bits & -bits
    if not bits & bits + low:  # one row, as in most sets here
        return iter([(low.bit_length() - 1, bits.bit_length())] if bits else [])
    return _rows(bits)


def _rows(bits: int) -> Iterator[tuple[int, int]]:
    digits = f"{bits:b}"[::-1]  # as in `_scattered`
    start = digits.find("1")
    while start >= 0:
        stop = digits.find("0", start)
        yield start, stop if stop >= 0 else len(digits)
        start = digits.find("1", stop) if stop >= 0 else -1


def chosen(values: Sequence[Value], elements: int, some: int) -> Sequence[Value]:
    """Of `values`, one for each element of a set in their order, those that belong to a subset."""
    if some == elements or not some:
        return values if some else values[:0]
    return [value for value, element in zip(values, members(elements), strict=True) if some >> element & 1]


def first(elements: int, count: int) -> int:
    """The first `count` elements of a set, or all."""
    return elements if count >= elements.bit_count() else of(islice(members(elements), count))


def last(elements: int, count: int) -> int:
    """The last `count` elements of a set, or all."""
    return elements & ~first(elements, max(0, elements.bit_count() - count))


def numbered(elements: int, numbers: int) -> int:
    """The elements of a set that have these numbers, counted from 0 in their order."""
    low = elements & -elements
    if not numbers or not elements & elements + low:  # a span
        return numbers << max(0, low.bit_length() - 1) & elements
    if numbers == ones(elements.bit_count()):
        return elements
    return of(element for number, element in enumerate(members(elements)) if numbers >> number & 1)


def union(sets: Iterable[int]) -> int:
    """What is in any of the sets."""
    bits = 0
    for each in sets:
        bits |= each
    return bits


def leading(pages: int) -> int:
    """How many pages are here without a gap from page 0 on."""
    return (pages + 1 & ~pages).bit_length() - 1


def legal(pages: int, lookback: int | None, limit: int) -> int:
    """Boundaries up to `limit` at which a pool whose present pages are `pages` may resume; always holds 0.

    lookback None needs every page before the boundary, k the last k of them (or all, if there are fewer).
    """
    if lookback is None:
        return ones(min(leading(pages), limit) + 1)
    # Pages before the first one count as present: fewer than k pages before a boundary are all there is to need.
    # `run` says where the last `width` pages are all here; doubling the width makes k shifts into log k.
    run, width = (pages << 1) | 1, 1
    while width < lookback:
        step = min(width, lookback - width)
        run &= (run << step) | ones(step)
        width += step
    return (run | 1) & ones(limit + 1)


def shared(sets: Iterable[int], limit: int) -> int:
    """Boundaries up to `limit` that are legal in every set."""
    both = ones(limit + 1)
    for boundaries in sets:
        both &= boundaries
    return both


def multiples(stride: int, limit: int) -> int:
    """The boundaries 0, stride, 2 * stride, ... up to `limit`: the prefill grid."""
    if stride == 1:
        return ones(limit + 1)
    # A geometric series in base 2**stride, written as one division.
    count = limit // stride + 1
    return ((1 << stride * count) - 1) // ((1 << stride) - 1)


def deepest(boundaries: int) -> int:
    """The highest boundary of a non-empty set."""
    return boundaries.bit_length() - 1


def needed(boundary: int, lookback: int | None) -> int:
    """The pages that a pool must bring so that a sequence can resume at `boundary`."""
    return ones(boundary) if lookback is None else span(max(0, boundary - lookback), boundary)


def read_before(boundaries: int, lookback: int) -> int:
    """The pages that a pool must bring so that a sequence can resume at any of these boundaries."""
    pages, reach = boundaries >> 1, 1
    while reach < lookback:  # doubling, as in `legal`
        step = min(reach, lookback - reach)
        pages |= pages >> step
        reach += step
    return pages


def resume_at(present: Sequence[int], lookbacks: Sequence[int | None], limit: int, grid: int = 1) -> int:
    """Boundaries from which every pool may resume: `legal` for each, `shared` by all, on the grid. For any tier."""
    pools = [legal(pages, lookback, limit) for pages, lookback in zip(present, lookbacks, strict=True)]
    return shared(pools, limit) & multiples(grid, limit)
