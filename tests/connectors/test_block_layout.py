"""Where in a block the bytes of some tokens are is found by a layer's own kernel, whatever blocks it computes with."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvarve.connectors.vllm.block_layout import divided, head_layout
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


def made(kernel_tokens: int, kernel: Kernel, by_head: bool, heads: int = HEADS) -> tuple[Any, torch.Tensor]:
    """A layer, and its blocks."""
    sides = (BLOCKS * TOKENS // kernel_tokens, heads, kernel_tokens, 2 * WIDTH)
    tensor = torch.zeros(sides) if by_head else torch.zeros(sides[0], sides[2], sides[1], sides[3]).transpose(1, 2)
    layer = SimpleNamespace(impl=kernel, num_kv_heads=heads, head_size=WIDTH, head_size_v=WIDTH, dtype=torch.float32)
    return layer, tensor


def found(kernel_tokens: int, kernel: Kernel, cells: int, by_head: bool = False) -> Strips | None:
    layer, tensor = made(kernel_tokens, kernel, by_head)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": layer}))
    return divided(config, {"layer": tensor}, BLOCKS, TOKENS, cells)


def heads_of(*layers: tuple[Any, torch.Tensor]) -> tuple[int, str] | None:
    named = {str(number): each for number, each in enumerate(layers)}
    tensors = {name: tensor for name, (_, tensor) in named.items()}
    return head_layout({name: layer for name, (layer, _) in named.items()}, tensors, BLOCKS, TOKENS)


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


class Values(Kernel):
    """Values before keys."""

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, *more: Any) -> None:
        super().do_kv_cache_update(layer, value, key, *more)


def test_how_a_heads_bytes_lie_is_told_whatever_other_heads_a_rank_has() -> None:
    two, one = (heads_of(*[made(48, Kernel(), True, heads)] * 2) for heads in (2, 1))
    assert two is not None and one is not None and (two[0], one[0]) == (2, 1)
    assert two[1] == one[1]
    other = heads_of(*[made(48, Values(), True)] * 2)
    assert other is not None and other[1] != two[1]


def test_the_same_layout_of_other_layers_is_another() -> None:
    """Settings choose which layers of a model are in which group, as a cache type that leaves some layers out."""
    layer, tensor = made(48, Kernel(), True)
    first, second = (head_layout({name: layer}, {name: tensor}, BLOCKS, TOKENS) for name in ("layers.1", "layers.2"))
    assert first is not None and second is not None and first != second


@pytest.mark.parametrize(
    "layers",
    [
        [made(48, Kernel(), False)],
        [made(16, Kernel(), True)],
        [made(48, Kernel(), True, 1), made(48, Kernel(), True, 2)],
        [(SimpleNamespace(impl=None), torch.zeros(BLOCKS, TOKENS))],
    ],
    ids=["a token's heads together", "smaller blocks", "other heads in other layers", "no heads"],
)
def test_heads_that_are_not_each_in_one_piece_of_a_block_are_not_told_apart(layers: Any) -> None:
    assert heads_of(*layers) is None


def test_a_block_with_a_head_of_which_a_byte_is_not_written_is_not_divided_by_heads() -> None:
    kernel = Kernel()
    kernel.zero = (1,)
    assert heads_of(made(48, kernel, True)) is None
