"""Where in a block the bytes of some tokens are is found by a layer's own kernel, whatever blocks it computes with."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvarve.connectors.vllm.block_layout import divided
from kvarve.memory.engine_arena import Strips

BLOCKS, TOKENS, HEADS, WIDTH = 3, 48, 2, 4
BYTES = TOKENS * HEADS * WIDTH * 2 * 4


class Kernel:
    """Keys and values of a token behind each other. `first`: the cache that it saw first, as kernels with scales in
    their blocks remember it; `zero`: a head of which it keeps nothing but zeros."""

    first: torch.Tensor | None = None
    zero: Sequence[int] = ()

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.first = cache if self.first is None else self.first
        size = cache.shape[2]
        assert int(slots.max()) < cache.shape[0] * size, "on a GPU this would be another's memory"
        both = torch.cat([key, value], -1)
        both[:, [*self.zero]] = 0
        cache[slots // size, :, slots % size] = both


def found(kernel_tokens: int, kernel: Kernel, cells: int, by_head: bool = False) -> Strips | None:
    sides = (BLOCKS * TOKENS // kernel_tokens, HEADS, kernel_tokens, 2 * WIDTH)
    tensor = torch.zeros(sides) if by_head else torch.zeros(sides[0], sides[2], sides[1], sides[3]).transpose(1, 2)
    layer = SimpleNamespace(impl=kernel, num_kv_heads=HEADS, head_size=WIDTH, head_size_v=WIDTH, dtype=torch.float32)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": layer}))
    return divided(config, {"layer": tensor}, BLOCKS, TOKENS, cells)


@pytest.mark.parametrize("kernel_tokens", [48, 16, 8])
def test_a_block_that_a_kernel_sees_as_smaller_ones_is_divided_as_a_whole(kernel_tokens: int) -> None:
    assert found(kernel_tokens, Kernel(), 3) == Strips(3, BYTES, ((0, BYTES // 3),))


def test_pages_that_a_kernels_own_blocks_cannot_be_divided_into_are_whole_blocks() -> None:
    assert found(24, Kernel(), 6, by_head=True) is None


def test_a_kernel_that_remembers_its_cache_does_not_remember_the_one_of_the_trial() -> None:
    kernel = Kernel()
    assert found(48, kernel, 3) is not None and kernel.first is None


def test_a_layer_of_which_a_page_would_leave_bytes_out_is_not_divided() -> None:
    """Two strips, of which one is not written, would be found as one."""
    kernel = Kernel()
    assert found(48, kernel, 3, by_head=True) == Strips(3, BYTES, ((0, BYTES // 6), (BYTES // 2, BYTES // 6)))
    kernel.zero = (1,)
    assert found(48, kernel, 3, by_head=True) is None
