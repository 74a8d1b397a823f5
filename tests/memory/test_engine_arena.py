"""Pages in an engine's tensors: the bytes of its blocks, and of no other block."""

import pytest
import torch
from pages import MOVERS, NAMESPACE

from kvarve.errors import ConfigError
from kvarve.memory.arenas import HostArena
from kvarve.memory.engine_arena import EngineArena, block_bytes, pool_of, strips_of
from kvarve.memory.page_copies import DeviceCopies, Way
from kvarve.pages.blocks import blocks_of, handle_of

BLOCKS = 12
BY_ANY = pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS)


def tensors(*shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    return {f"layer {at}": torch.randn((BLOCKS, *shape), generator=rng) for at, shape in enumerate(shapes)}


def carry(layers: dict[str, torch.Tensor], together: int, source: list[int], target: list[int], mover: Way) -> None:
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in layers.values()]
    pool = pool_of("any", sizes, None, together)
    arena, host = EngineArena(pool, layers, BLOCKS, together), HostArena(pool, 3, NAMESPACE)
    copies, key = DeviceCopies([arena], [host], mover), bytes(32)
    copies.save({0: ([(handle_of(source), 1)], [key])}, copies.ready())
    assert host.intact(1, key)
    copies.load({0: [(1, handle_of(target))]}, copies.ready())


@BY_ANY
@pytest.mark.parametrize("together", [1, 3])
def test_a_page_is_its_blocks_of_all_layers(together: int, mover: Way) -> None:
    layers = tensors((4, 5), (7,))
    before = {name: tensor.clone() for name, tensor in layers.items()}
    source, target = [3, 8, 1][:together], [10, 2, 5][:together]
    carry(layers, together, source, target, mover)
    for name, tensor in layers.items():
        for block in range(BLOCKS):
            expected = source[target.index(block)] if block in target else block
            assert torch.equal(tensor[block], before[name][expected])


@BY_ANY
def test_the_block_that_stands_for_nothing_is_neither_read_nor_written(mover: Way) -> None:
    layers = tensors((6,))
    before = layers["layer 0"].clone()
    carry(layers, 2, [3, 4], [0, 9], mover)
    assert torch.equal(layers["layer 0"][0], before[0])
    assert torch.equal(layers["layer 0"][9], before[4])


@BY_ANY
def test_a_page_that_is_a_part_of_a_block_is_its_strips_of_all_layers(mover: Way) -> None:
    """As attention on a CPU has it: of a head the keys by dimension, then the values by token; two heads, four pages of
    two tokens, dimensions of three."""
    layers = {f"layer {at}": torch.randn(BLOCKS, 2, 8, 6) for at in range(2)}
    views = [tensor.view(BLOCKS, 2, 2, 24) for tensor in layers.values()]
    before = [view.clone() for view in views]
    head, keys = 8 * 6 * 4, 8 * 3 * 4
    one = [[*(32 * d + 8 * at for d in range(3)), keys + 24 * at] for at in range(4)]  # where a head's parts begin
    used = [
        [(h * head + first, h * head + first + (24 if first >= keys else 8)) for h in range(2) for first in firsts]
        for firsts in one
    ]
    strips = strips_of(used, 2 * head)
    assert strips is not None and len(strips.strips) == 8
    pool = pool_of("any", [2 * head] * 2, None, strips=strips)
    arena, host = EngineArena(pool, layers, BLOCKS, strips=strips), HostArena(pool, 3, NAMESPACE)
    copies = DeviceCopies([arena], [host], mover)
    copies.save({0: ([(3 * 4 + 1, 1), (0, 2)], [bytes(32)] * 2)}, copies.ready())  # 0: nothing, also not written
    copies.load({0: [(1, 7 * 4 + 1)]}, copies.ready())
    for view, was in zip(views, before, strict=True):
        expected = was.clone()
        for head_at in range(2):
            keys_of = [each[head_at, 0].view(3, 8) for each in (expected[7], was[3])]
            values_of = [each[head_at, 1].view(8, 3) for each in (expected[7], was[3])]
            keys_of[0][:, 2:4], values_of[0][2:4] = keys_of[1][:, 2:4], values_of[1][2:4]
        assert torch.equal(view, expected)


@pytest.mark.parametrize(
    ("used", "stride"),
    [
        ([[(0, 4)], [(8, 12)]], 16),  # the second does not follow
        ([[(0, 4), (8, 12)], [(4, 8)]], 16),  # one strip is missing
        ([[(0, 3)], [(3, 6)]], 16),  # blocks are no whole number of parts apart
    ],
)
def test_a_block_whose_pages_do_not_follow_one_another_is_not_divided(
    used: list[list[tuple[int, int]]], stride: int
) -> None:
    assert strips_of(used, stride) is None


def test_padding_between_blocks_is_left_out() -> None:
    memory = torch.arange(BLOCKS * 10, dtype=torch.int16)
    tensor = memory.as_strided((BLOCKS, 2, 3), (10, 3, 1), 2)
    found = block_bytes("layer", tensor, BLOCKS)
    assert found.shape == (BLOCKS, 12)
    assert torch.equal(found[4].view(torch.int16), torch.arange(42, 48, dtype=torch.int16))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, BLOCKS, 3).transpose(0, 1), torch.zeros(BLOCKS, 4, 4)[:, :, :3], torch.zeros(13, 2)]
)
def test_blocks_that_are_not_in_one_piece_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="layer"):
        block_bytes("layer", tensor, BLOCKS)


@pytest.mark.parametrize("blocks", [[0], [7], [3, 0, 2**32 - 1]])
def test_a_handle_names_its_blocks(blocks: list[int]) -> None:
    assert blocks_of(handle_of(blocks), len(blocks)) == tuple(blocks)
