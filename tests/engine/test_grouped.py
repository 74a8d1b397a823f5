"""Attention of rows of other lengths, group by group."""

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvarve.reference.engine import grouped as grouped_module
from kvarve.reference.engine.grouped import GroupedRows, grouped

LENGTHS = [[3, 5], [40], [41, 41]]


def parts(seed: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(len(group), 2, max(group), 8, generator=dice) for group in LENGTHS]


def whole(found: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([pad(part, (0, 0, 41 - part.shape[2], 0)) for part in found])


def test_attention_of_groups_is_that_of_padded_rows_and_pads_nothing() -> None:
    mask = torch.stack([torch.arange(41) >= 41 - length for group in LENGTHS for length in group])[:, None, None]
    query, padded = torch.randn(5, 2, 1, 8, generator=torch.Generator().manual_seed(3)), list[int]()
    keys, values = (grouped(parts(seed), lambda: padded.append(1)) for seed in (1, 2))
    found = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    right = scaled_dot_product_attention(query, whole(parts(1)), whole(parts(2)), attn_mask=mask)
    assert keys.shape == (5, 2, 41, 8)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, right)
    assert not padded


def test_each_groups_part_of_a_mask_begins_where_a_kernel_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's for CUDA refuse a mask of numbers, as ALiBi's, that does not begin at a multiple of 16 bytes."""
    masks, keys = list[torch.Tensor](), grouped(parts(1), lambda: None)
    assert isinstance(keys, GroupedRows)

    def attention(query: torch.Tensor, keys: torch.Tensor, _: object, mask: torch.Tensor) -> torch.Tensor:
        masks.append(mask)
        return scaled_dot_product_attention(query, keys, keys, mask)

    monkeypatch.setattr(grouped_module, "scaled_dot_product_attention", attention)
    grouped_module._attention(torch.zeros(5, 2, 1, 8), keys, keys, torch.zeros(5, 1, 1, 41))
    assert [part.shape[-1] for part in masks] == [max(group) for group in LENGTHS]
    assert not any(part.data_ptr() % 16 for part in masks)


@pytest.mark.parametrize(
    "how",
    [
        lambda keys: keys @ keys.mT,
        lambda keys: keys[:, :1].repeat(1, 2, 1, 1),
        lambda keys: torch.cat([keys, keys], dim=2),
        lambda keys: scaled_dot_product_attention(whole(parts(1)), keys, whole(parts(2))),
    ],
    ids=["product", "repeat", "cat", "half of attention"],
)
def test_any_other_operation_has_the_padded_rows_and_says_so(how: object) -> None:
    assert callable(how)
    padded = list[int]()
    found = how(grouped(parts(1), lambda: padded.append(1)))
    assert type(found) is torch.Tensor
    assert torch.equal(found, how(whole(parts(1))))
    assert padded
