"""How the pages of a pool lie in host memory: which of the axes page, layer and token comes first.

| layout (SGLang's names) | axes | a page |
|---|---|---|
| `page_first_direct` | page, layer, token | is its record: storage reads and writes it in place |
| `page_first` | page, token, layer | is in one piece, and a token's layers lie side by side |
| `layer_first` | layer, page, token | is in as many pieces as it has buffers |

Plain arithmetic on bytes; nothing here knows a tensor. A layer's keys and values are two buffers, as the device has
them.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from kvarve.errors import ConfigError
from kvarve.memory.record import HEADER_BYTES, record_bytes
from kvarve.pages.pools import BUFFER_ALIGNMENT, DTYPE_BYTES, BufferSpec, PoolSpec

WIDEST_BYTES = max(DTYPE_BYTES.values())
PAGE_FIRST_DIRECT = "page_first_direct"


class Span(NamedTuple):
    """Where a buffer lies: entry e of page p begins at byte `start + p * page + e * entry`."""

    start: int
    page: int
    entry: int


def spans(layout: str, pool: PoolSpec, slots: int) -> tuple[int, list[Span]]:
    """The bytes that `slots` pages take in this layout, and where each of the pool's buffers lies."""
    return LAYOUTS[layout](pool, slots)


def check_layout(layout: str) -> None:
    """ConfigError for a layout that does not exist."""
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown host layout {layout!r}; known: {', '.join(LAYOUTS)}")


def entry_bytes(buffer: BufferSpec) -> int:
    """The bytes of one entry: of a token, or of the first axis of a state."""
    return buffer.nbytes // buffer.shape[0]


def _page_first_direct(pool: PoolSpec, slots: int) -> tuple[int, list[Span]]:
    page = record_bytes(pool.payload_bytes)
    found = [
        Span(HEADER_BYTES + offset, page, entry_bytes(buffer))
        for buffer, offset in zip(pool.buffers, pool.offsets(), strict=False)
    ]
    return slots * page, found


def _page_first(pool: PoolSpec, slots: int) -> tuple[int, list[Span]]:
    # Buffers with equally many entries alternate; the widest elements come first, so that all are aligned.
    order = sorted(pool.buffers, key=lambda buffer: (buffer.shape[0], -DTYPE_BYTES[buffer.dtype]))
    places: dict[str, tuple[int, int]] = {}
    page = 0
    for entries, alike in groupby(order, key=lambda buffer: buffer.shape[0]):
        starts, entry = {}, 0
        for buffer in alike:
            starts[buffer.name] = page + entry
            entry += entry_bytes(buffer)
        entry = _aligned(entry, WIDEST_BYTES)
        places |= {name: (start, entry) for name, start in starts.items()}
        page = _aligned(page + entries * entry, BUFFER_ALIGNMENT)
    return slots * page, [Span(start, page, entry) for start, entry in (places[b.name] for b in pool.buffers)]


def _layer_first(pool: PoolSpec, slots: int) -> tuple[int, list[Span]]:
    found, start = [], 0
    for buffer in pool.buffers:
        found.append(Span(start, _aligned(buffer.nbytes, BUFFER_ALIGNMENT), entry_bytes(buffer)))
        start += slots * found[-1].page
    return start, found


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


LAYOUTS: dict[str, Callable[[PoolSpec, int], tuple[int, list[Span]]]] = {
    PAGE_FIRST_DIRECT: _page_first_direct,
    "page_first": _page_first,
    "layer_first": _layer_first,
}
