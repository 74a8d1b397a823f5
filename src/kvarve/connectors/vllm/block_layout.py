"""Where in a block of vLLM's are the bytes of some of its tokens, or of a head? The layer's own kernel writes them.

Shapes do not tell: attention on a CPU keeps keys by dimension, other kernels pack them as they like.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch

from kvarve.memory.engine_arena import Strips, strips_of

log = logging.getLogger("vllm.kvarve")

NUMBER = 1.1  # none of its bytes is zero in any type
NUMBERS = 251  # as many others, by which the places of numbers are told apart

Some = tuple[range, slice]  # tokens of a block, and heads


def divided(
    config: Any, tensors: Mapping[str, torch.Tensor], blocks: int, block_tokens: int, cells: int
) -> Strips | None:
    """How each of these layers' `blocks` is divided into so many cells, all alike; None: that cannot be told."""
    layers = config.compilation_config.static_forward_context
    part = block_tokens // cells
    parts = [(range(cell * part, cell * part + part), slice(None)) for cell in range(cells)]
    found = {_of(layers.get(name), tensor, blocks, parts) for name, tensor in tensors.items()}
    if None in found or len(found) > 1:
        log.warning("prompts hit by whole blocks of %d tokens: the layers' layout cannot be divided", block_tokens)
        return None
    return found.pop()


def head_layout(
    layers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], blocks: int, tokens: int
) -> tuple[int, str] | None:
    """How many KV heads these layers have, all alike, and a digest of their names and of where a head's numbers are
    among its bytes. A block has `tokens` tokens. None if a head's bytes are not one piece of it."""
    counts, digest = set[int](), hashlib.sha256()
    for name, tensor in tensors.items():
        layer, mine = layers[name], _block(tensor, blocks)
        heads = getattr(layer, "num_kv_heads", 0)
        strips = _of(layer, tensor, blocks, [(range(tokens), slice(head, head + 1)) for head in range(heads)])
        if strips is None or len(strips.strips) != 1:
            return None
        counts.add(heads)
        numbers = torch.arange(tokens * (layer.head_size + layer.head_size_v)) % NUMBERS + 1
        given = numbers.to(mine.device, layer.dtype).view(tokens, 1, -1).repeat(1, heads, 1)
        key, value = torch.split(given, [layer.head_size, layer.head_size_v], -1)
        ((first, length),) = strips.strips
        written = _filled(layer, mine, range(tokens), key.contiguous(), value.contiguous())
        digest.update(name.encode() + written[first : first + length].cpu().numpy().tobytes())
    return (counts.pop(), digest.hexdigest()[:16]) if len(counts) == 1 else None


def _of(layer: Any, tensor: torch.Tensor, blocks: int, parts: Sequence[Some]) -> Strips | None:
    mine = _block(tensor, blocks)
    stride = len(mine) * tensor.stride(0) * tensor.element_size()
    if layer is None:  # a byte of each token stands for another stage's layers
        return strips_of([[(tokens.start, tokens.stop)] for tokens, _ in parts], stride)
    try:
        used = [_written(layer, mine, *some) for some in parts]
    except Exception:  # of any kernel: without it, whole blocks are kept
        log.debug("a kernel does not write as asked", exc_info=True)
        return None
    if sum(end - first for ranges in used for first, end in ranges) != math.prod(mine.shape) * mine.element_size():
        return None  # what a page would leave out could be read: scales, a head whose numbers have become zero
    return strips_of(used, stride)


def _block(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    return tensor[: tensor.shape[0] // blocks]  # kernels may see each block as several smaller ones


def _written(layer: Any, mine: torch.Tensor, tokens: range, heads: slice) -> Sequence[tuple[int, int]]:
    """The bytes of a block that the layer writes for these tokens and heads: first, and behind the last."""
    given = []
    for width in (layer.head_size, layer.head_size_v):
        given.append(torch.zeros((len(tokens), layer.num_kv_heads, width), dtype=layer.dtype, device=mine.device))
        given[-1][:, heads] = NUMBER
    changed = _filled(layer, mine, tokens, *given).nonzero().flatten().cpu()
    if not len(changed):
        return []
    ends = (changed.diff() != 1).nonzero().flatten()
    firsts = torch.cat([changed[:1], changed[ends + 1]]).tolist()
    lasts = torch.cat([changed[ends], changed[-1:]]).tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _filled(layer: Any, mine: torch.Tensor, tokens: range, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The bytes of a block, of zeros before, into which the layer has written keys and values of these tokens."""
    block = torch.zeros_like(mine)
    kernel = copy(layer.impl)  # some remember the first cache that they see
    kernel.do_kv_cache_update(layer, key, value, block, torch.tensor(tokens, device=block.device))
    size = block.element_size()
    return torch.as_strided(block, (block.untyped_storage().nbytes() // size,), (1,), 0).view(torch.uint8)
