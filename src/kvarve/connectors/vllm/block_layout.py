"""Where in a block of vLLM's are the bytes of some of its tokens? Found by having the layer's own kernel write them.

Shapes do not tell: attention on a CPU keeps keys by dimension, other kernels pack them as they like.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch

from kvarve.memory.engine_arena import Strips, strips_of

log = logging.getLogger("vllm.kvarve")

NUMBER = 1.1  # none of its bytes is zero in any type


def divided(
    config: Any, tensors: Mapping[str, torch.Tensor], blocks: int, block_tokens: int, cells: int
) -> Strips | None:
    """How each of these layers' `blocks` is divided into so many cells, all alike; None: that cannot be told."""
    layers = config.compilation_config.static_forward_context
    found = {_of(layers.get(name), tensor, blocks, block_tokens, cells) for name, tensor in tensors.items()}
    if None in found or len(found) > 1:
        log.warning("prompts hit by whole blocks of %d tokens: the layers' layout cannot be divided", block_tokens)
        return None
    return found.pop()


def _of(layer: Any, tensor: torch.Tensor, blocks: int, block_tokens: int, cells: int) -> Strips | None:
    mine = tensor[: tensor.shape[0] // blocks]  # kernels may see each block as several smaller ones
    stride = len(mine) * tensor.stride(0) * tensor.element_size()
    part = block_tokens // cells
    if layer is None:  # a byte of each token stands for another stage's layers
        return strips_of([[(cell * part, cell * part + part)] for cell in range(cells)], stride)
    try:
        used = [_written(layer, mine, range(cell * part, cell * part + part)) for cell in range(cells)]
    except Exception:  # of any kernel: without it, whole blocks are kept
        log.debug("a kernel does not write as asked", exc_info=True)
        return None
    if sum(end - first for ranges in used for first, end in ranges) != math.prod(mine.shape) * mine.element_size():
        return None  # what a page would leave out could be read: scales, a head whose numbers have become zero
    return strips_of(used, stride)


def _written(layer: Any, mine: torch.Tensor, tokens: range) -> Sequence[tuple[int, int]]:
    """The bytes of a block that the layer writes for these tokens: first, and behind the last."""
    block = torch.zeros_like(mine)
    key, value = (
        torch.full((len(tokens), layer.num_kv_heads, width), NUMBER, dtype=layer.dtype, device=block.device)
        for width in (layer.head_size, layer.head_size_v)
    )
    kernel = copy(layer.impl)  # some remember the first cache that they see
    kernel.do_kv_cache_update(layer, key, value, block, torch.tensor(tokens, device=block.device))
    size = block.element_size()
    flat = torch.as_strided(block, (block.untyped_storage().nbytes() // size,), (1,), 0).view(torch.uint8)
    changed = flat.nonzero().flatten().cpu()
    if not len(changed):
        return []
    ends = (changed.diff() != 1).nonzero().flatten()
    firsts = torch.cat([changed[:1], changed[ends + 1]]).tolist()
    lasts = torch.cat([changed[ends], changed[-1:]]).tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
