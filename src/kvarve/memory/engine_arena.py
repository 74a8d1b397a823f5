"""Pages in an engine's own tensors: bytes of its blocks, whatever they mean to the engine.

A page of a pool is the same blocks of each of the pool's layers, so that nothing here knows attention from a state. Its
handle (`blocks.py`) names the blocks. Block 0 stands for nothing: a copy leaves it out. Where an engine's prefixes end
inside of blocks, a page is a cell of a block: the block's number, times its cells, plus the place of the cell.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.pages.blocks import NULL_BLOCK, blocks_of
from kvarve.pages.pools import BufferSpec, PoolSpec


@dataclass(frozen=True)
class Strips:
    """How a block is divided where a page is a part of its tokens: each of `strips` (offset and length in bytes) lies
    behind that of the page before in the block, which has `cells` pages. `stride`: bytes from one block to the next."""

    cells: int
    stride: int
    strips: tuple[tuple[int, int], ...]

    def view(self, piece: Tensor, strip: int) -> Tensor:
        """That strip of all cells, [rows, bytes], in a layer's bytes by block."""
        offset, length = self.strips[strip]
        rows = (piece.shape[0] - 1) * (self.stride // length) + self.cells
        return piece.as_strided((rows, length), (length, 1), piece.storage_offset() + offset)

    def row(self, cell: int, strip: int) -> int:
        """Of a cell in that view."""
        block, part = divmod(cell, self.cells)
        return block * (self.stride // self.strips[strip][1]) + part


def strips_of(used: Sequence[Sequence[tuple[int, int]]], stride: int) -> Strips | None:
    """How a block is divided of which each cell uses these bytes (first, behind the last); None: not like that."""
    strips = tuple((first, end - first) for first, end in used[0])
    for cell, ranges in enumerate(used):
        shifted = [(first + cell * length, first + cell * length + length) for first, length in strips]
        if [*ranges] != shifted or any(stride % length for _, length in strips):
            return None
    return Strips(len(used), stride, strips)


class EngineArena:
    """One pool's pages in the tensors of an engine's layers: `tensors[layer]` has blocks as its first dimension."""

    def __init__(
        self,
        pool: PoolSpec,
        tensors: Mapping[str, Tensor],
        blocks: int,
        together: int = 1,
        strips: Strips | None = None,
    ) -> None:
        """`blocks`: of the engine. `together`: how many of them make up a page; or `strips`: pages are parts of blocks.
        ConfigError for tensors whose blocks are not each in one piece, or not what the pool says."""
        self.pool, self.columns, self._strips = pool, together if strips is None else len(strips.strips), strips
        layers = [block_bytes(name, tensor, blocks) for name, tensor in tensors.items()]
        self.device, columns = layers[0].device, range(self.columns)
        self._pieces = [strips.view(layer, at) if strips is not None else layer for layer in layers for at in columns]
        sizes = [piece.shape[1] for piece in self._pieces]
        if sizes != [buffer.nbytes for buffer in pool.buffers]:
            raise ConfigError(f"pool {pool.name}: the engine's blocks must be as large as it said")

    def pieces(self) -> list[Tensor]:
        """The bytes of each buffer by block or part of one, [rows, bytes]; buffer i holds the page's i % `columns`."""
        return self._pieces

    def rows(self, handles: Sequence[int], others: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """For each of a page's blocks, or strips: those of some pages, and the other ends of their copies."""
        if (strips := self._strips) is not None:
            ends = [(cell, other) for cell, other in zip(handles, others, strict=True) if cell != NULL_BLOCK]
            elsewhere = [other for _, other in ends]
            return [([strips.row(cell, at) for cell, _ in ends], elsewhere) for at in range(self.columns)]
        pages = [blocks_of(handle, self.columns) for handle in handles]
        found = []
        for column in range(self.columns):
            ends = [
                (page[column], other) for page, other in zip(pages, others, strict=True) if page[column] != NULL_BLOCK
            ]
            found.append(([block for block, _ in ends], [other for _, other in ends]))
        return found


def pool_of(
    name: str,
    sizes: Sequence[int],
    lookback: int | None,
    together: int = 1,
    strips: Strips | None = None,
    heads: int = 1,
) -> PoolSpec:
    """The pool of an engine's cache group: `sizes` are the bytes of a block in each of its layers, of which a page has
    `together`, or these strips. A block or strip holds `heads` KV heads of equal size, one behind the other."""
    buffers = tuple(
        BufferSpec(f"layers.{layer}.block{part}", (heads, length // heads), "uint8")
        for layer, size in enumerate(sizes)
        for part, length in enumerate([size] * together if strips is None else [each for _, each in strips.strips])
    )
    return PoolSpec(name, buffers, lookback)


def block_bytes(name: str, tensor: Tensor, blocks: int) -> Tensor:
    """A layer's tensor as bytes [blocks, bytes of a block], over the same memory; padding between blocks is left
    out. ConfigError if a block is not in one piece."""
    if tensor.shape[0] % blocks:
        raise ConfigError(f"{name}: its first dimension must be a multiple of {blocks} blocks, got {tensor.shape[0]}")
    if tensor.shape[0] != blocks:  # kernels see each block as several smaller ones
        tensor = tensor.view(blocks, -1, *tensor.shape[1:])
    expected = 1
    for side, stride in sorted(zip(tensor.shape[1:], tensor.stride()[1:], strict=True), key=lambda each: each[1]):
        if side != 1 and stride != expected:
            raise ConfigError(f"{name}: its blocks must be in one piece: choose another layout of the KV cache")
        expected *= side
    size, nbytes = tensor.element_size(), math.prod(tensor.shape[1:]) * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.as_strided((blocks, nbytes), (tensor.stride(0) * size, 1), tensor.storage_offset() * size)
