"""Pages in an engine's own tensors: bytes of its blocks, whatever they mean to the engine.

A page of a pool is the same blocks of each of the pool's layers, so that nothing here knows attention from a state. Its
handle (`blocks.py`) names the blocks. Block 0 stands for nothing: a copy leaves it out.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.pages.blocks import NULL_BLOCK, blocks_of
from kvarve.pages.pools import BufferSpec, PoolSpec


class EngineArena:
    """One pool's pages in the tensors of an engine's layers: `tensors[layer]` has blocks as its first dimension."""

    def __init__(self, pool: PoolSpec, tensors: Mapping[str, Tensor], blocks: int, together: int = 1) -> None:
        """`blocks`: of the engine. `together`: how many of them make up a page. ConfigError for tensors whose blocks
        are not each in one piece, or not what the pool says."""
        self.pool, self.columns = pool, together
        self._bytes = [block_bytes(name, tensor, blocks) for name, tensor in tensors.items()]
        self.device = self._bytes[0].device
        sizes = [piece.shape[1] for piece in self._bytes for _ in range(together)]
        if sizes != [buffer.nbytes for buffer in pool.buffers]:
            raise ConfigError(f"pool {pool.name}: the engine's blocks must be as large as it said")

    def pieces(self) -> list[Tensor]:
        """The bytes of each buffer by block, [blocks, bytes]; buffer i holds the page's block i % `columns`."""
        return [piece for piece in self._bytes for _ in range(self.columns)]

    def rows(self, handles: Sequence[int], others: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """For each of a page's blocks: those blocks of some pages, and the other ends of their copies."""
        pages = [blocks_of(handle, self.columns) for handle in handles]
        found = []
        for column in range(self.columns):
            ends = [
                (page[column], other) for page, other in zip(pages, others, strict=True) if page[column] != NULL_BLOCK
            ]
            found.append(([block for block, _ in ends], [other for _, other in ends]))
        return found


def pool_of(name: str, sizes: Sequence[int], lookback: int | None, together: int = 1) -> PoolSpec:
    """The pool of an engine's cache group: `sizes` are the bytes of a block in each of its layers."""
    buffers = tuple(
        BufferSpec(f"layers.{layer}.block{part}", (1, size), "uint8")
        for layer, size in enumerate(sizes)
        for part in range(together)
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
