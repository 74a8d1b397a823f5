"""A page as a storage has it: one record, or one of each of several head groups, which any number of ranks reads.

Only shapes and bytes are known here. A group's record is that of a page with the group's part of each buffer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvarve.memory.host_memory import zeros
from kvarve.pages.keys import page_name, record_name
from kvarve.pages.pools import DTYPE_BYTES, BufferSpec, PoolSpec
from kvarve.records.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.records.seals import CHECKSUM, Seal


class Parts:
    """The records of one pool's pages, on one rank of a model."""

    def __init__(self, pool: PoolSpec, namespace: bytes, rank: int = 0, ranks: int = 1, seal: Seal = CHECKSUM) -> None:
        self.pool = pool
        self._mine, self._of = pool.parts(rank, ranks)
        # How many ranks have the same parts: each writes some of the pages.
        self._held = ranks if pool.replicated else 1 if pool.groups is None else max(1, ranks // self._of)
        self._turn = rank % self._held
        self._ends = [record_name(pool.name, part, self._of) for part in self._mine]
        self.several = len(self._mine) > 1
        part = pool
        if self.several and pool.groups is not None:
            part = replace(pool, buffers=pool.groups.shapes(pool.buffers, 1))
        self._part = part
        self.nbytes = record_bytes(part.payload_bytes)
        self._stamps = [Stamp(namespace, pool.name, part.payload_bytes, n, self._of, seal) for n in self._mine]

    def writes(self, key: bytes) -> bool:
        """Whether this rank stores the page, of those that have the same parts of it."""
        return key[0] % self._held == self._turn

    def names(self, root: bytes, key: bytes) -> list[str]:
        """The names of a page's records."""
        page = page_name(root, key)
        return [page + end for end in self._ends]

    def blanks(self, record: memoryview) -> list[memoryview]:
        """Memory for the records of a page: its own record, where that is all of them."""
        if not self.several:
            return [record]
        memory = zeros(self.nbytes * len(self._mine))
        return [memory[at : at + self.nbytes] for at in range(0, memory.nbytes, self.nbytes)]

    def cut(self, record: memoryview, key: bytes) -> list[memoryview]:
        """The sealed records of a page, from its record in host memory."""
        records = self.blanks(record)
        if self.several:
            self._copy(record, records, joins=False)
            for stamp, part in zip(self._stamps, records, strict=True):
                stamp.seal(part, key)
        return records

    def intact(self, part: int, record: memoryview, key: bytes) -> bool:
        """Whether this is the page's record of that number among `names`, every bit of it."""
        return self._stamps[part].intact(record, key)

    def join(self, records: Sequence[memoryview], record: memoryview) -> None:
        """Put the payload of a page's record together from its parts; the header is the caller's to seal."""
        if self.several:
            self._copy(record, records, joins=True)

    def _copy(self, record: memoryview, records: Sequence[memoryview], *, joins: bool) -> None:
        assert self.pool.groups is not None
        whole = _arrays(self.pool, record)
        for number, part in enumerate(records):
            for all_of_it, mine, cut in zip(whole, _arrays(self._part, part), self.pool.groups.cuts, strict=True):
                axis, sections = cut
                there = here = 0
                for section in sections:
                    at = there + number * section
                    ends = _along(axis, all_of_it, at, section), _along(axis, mine, here, section)
                    np.copyto(*(ends if joins else ends[::-1]))
                    there += section * len(records)
                    here += section


def _arrays(pool: PoolSpec, record: memoryview) -> list[Any]:
    """The buffers of a record as arrays of bytes [*shape, bytes of an element]."""
    everything = np.frombuffer(record, np.uint8)[HEADER_BYTES:]
    return [
        everything[at : at + buffer.nbytes].reshape(*buffer.shape, _width(buffer))
        for buffer, at in zip(pool.buffers, pool.offsets(), strict=False)
    ]


def _width(buffer: BufferSpec) -> int:
    return DTYPE_BYTES[buffer.dtype]


def _along(axis: int, array: Any, at: int, length: int) -> Any:
    return array[(slice(None),) * axis + (slice(at, at + length),)]
