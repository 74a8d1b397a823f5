"""Copies between device and host by one kernel: each launch takes rows of many buffers, of all pools.

Where the buffers are is in a table on the device, made once: a save is one launch, a load one for each layer. A GPU's
kernel reaches pinned host memory itself. Triton compiles the kernel; with TRITON_INTERPRET=1 it runs on the CPU (in one
thread at a time), as tests have it.

A launch has few programs: each takes a processor's time from the model that computes beside it.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from kvarve.memory.page_copies import NEAR, Buffer, ByGather, Mover, Rows

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

log = logging.getLogger(__name__)

# No GPU has measured these yet (`benchmarks/lanes.py --device cuda:0`).
PROGRAMS = 12  # at most as many of a GPU's processors, of which an H100 has 132
WARPS = 8
CHUNK_BYTES = 8 << 10  # what a program copies at once: 32 bytes a thread
_ALIGNED = 16  # bytes: the widest load of a thread
_ENTRY, _SPAN = 7, 3  # words of a buffer in the table, and of a column in the rows of a copy

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _chunk(  # type: ignore[no-untyped-def]
        target, source, nbytes, part, word: tl.constexpr, words: tl.constexpr, aligned: tl.constexpr
    ):
        """Copy one chunk of a row: `words` of type `word`, or as many as are left of it."""
        size: tl.constexpr = word.primitive_bitwidth // 8
        at, end = part * words + tl.arange(0, words), tl.multiple_of(nbytes // size, aligned // size)
        target = tl.multiple_of(target.to(tl.pointer_type(word)), aligned)
        source = tl.multiple_of(source.to(tl.pointer_type(word)), aligned)
        some = at < end
        tl.store(target + at, tl.load(source + at, mask=some), mask=some)

    @triton.jit(do_not_specialize=["first", "last", "to"])  # type: ignore[untyped-decorator]
    def _copy(  # type: ignore[no-untyped-def]
        table, rows, first, last, to, chunk: tl.constexpr, entry: tl.constexpr, span: tl.constexpr
    ):
        """Copy towards end `to`. Programs take turns at the chunks of buffers `first` to `last`, counted through, so
        that each has as many as any other, give or take one."""
        programs = tl.num_programs(0)
        begin = tl.program_id(0).to(tl.int64)  # this program's first chunk of the next buffer
        for buffer in range(first, last):
            here = table + buffer * entry
            target, source = tl.load(here + to), tl.load(here + 1 - to)
            target_stride, source_stride = tl.load(here + 2 + to), tl.load(here + 3 - to)
            nbytes, aligned = tl.load(here + 4), tl.load(here + 5)
            column = rows + tl.load(here + 6) * span
            target_rows, source_rows = rows + tl.load(column + to), rows + tl.load(column + 1 - to)
            parts = (nbytes + chunk - 1) // chunk
            chunks = tl.load(column + 2) * parts
            for at in range(begin, chunks, programs):
                row, part = at // parts, at % parts
                target_row = target + tl.load(target_rows + row) * target_stride
                source_row = source + tl.load(source_rows + row) * source_stride
                if aligned:
                    _chunk(target_row, source_row, nbytes, part, tl.int64, chunk // 8, 16)
                else:
                    _chunk(target_row, source_row, nbytes, part, tl.uint8, chunk, 1)
            begin = (begin + programs - chunks % programs) % programs


class ByKernel:
    """All rows of all buffers in one launch."""

    part_bytes = 0

    def __init__(self, buffers: Sequence[Buffer], programs: int) -> None:
        self._programs, self._device = programs, buffers[0][2][NEAR].device
        self._columns = {column: number for number, column in enumerate({(*each[:2],): None for each in buffers})}
        entries = []
        for pool, column, ends in buffers:
            nbytes, places = ends[NEAR].shape[1], [*(end.data_ptr() for end in ends), *(end.stride(0) for end in ends)]
            aligned = all(each % _ALIGNED == 0 for each in (nbytes, *places))
            entries.append([*places, nbytes, aligned, self._columns[pool, column]])
        self._buffers = [ends for _, _, ends in buffers]  # their memory stays as long as the table
        self._table = torch.tensor(entries, dtype=torch.int64, device=self._device)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self.move(NEAR, slice(0), self.rows({}))  # the kernel is compiled before the first page waits for it

    def rows(self, rows: Rows) -> torch.Tensor:
        """For each column, where its rows begin near and far and how many they are; then all rows."""
        spans, found = list[int](), list[int]()
        for pool, column in self._columns:
            near, far = rows[pool][column] if pool in rows else ((), ())
            start = _SPAN * len(self._columns) + len(found)
            spans += [start, start + len(near), len(near)]
            found += [*near, *far]
        return torch.tensor(spans + found, dtype=torch.int64, device=self._device)

    def move(self, to: int, buffers: slice, rows: Any) -> None:
        first, last, _ = buffers.indices(len(self._table))
        _copy[(self._programs,)](self._table, rows, first, last, to, CHUNK_BYTES, _ENTRY, _SPAN, num_warps=WARPS)


def by_kernel(buffers: Sequence[Buffer], programs: int = PROGRAMS) -> Mover:
    """A mover for `DeviceCopies`: each launch runs `programs` programs. Without Triton, or a C compiler for it, it is
    `ByGather`."""
    if triton is None:
        return ByGather(buffers)
    try:
        return ByKernel(buffers, programs)
    except Exception as e:  # noqa: BLE001  of any compiler
        log.warning("pages are copied buffer by buffer, as Triton cannot compile one kernel for all: %s", e)
        return ByGather(buffers)
