"""A handle names the blocks of one page in an engine's memory: one number, so that a copy treats it like a slot.

A page of one block has the block's own number as its handle.
"""

from collections.abc import Sequence

NULL_BLOCK = 0  # stands where the engine keeps nothing: skipped windows, old states
_BITS = 32


def handle_of(blocks: Sequence[int]) -> int:
    """The handle of a page that lies in these blocks, in this order."""
    handle = 0
    for block in reversed(blocks):
        assert 0 <= block < 1 << _BITS, "a block's number fits into 32 bits"
        handle = handle << _BITS | block
    return handle


def blocks_of(handle: int, count: int) -> tuple[int, ...]:
    """The blocks that a handle names; `count`: how many blocks a page of its pool has."""
    return tuple(handle >> at * _BITS & (1 << _BITS) - 1 for at in range(count))
