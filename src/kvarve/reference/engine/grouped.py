"""Keys and values of rows of different lengths, for one attention. Rows of about the same length lie together, so that
a short row is not padded to the longest.

Nothing here knows a model. Its code gets a tensor of the padded shape that has no memory. Attention computes it group
by group. Any other operation reads the padded tensor, which costs what it costs without groups.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._pytree import tree_map


class GroupedRows(Tensor):
    """[rows, …, columns, width], of groups of rows that each have columns of their own, the last ones aligned."""

    parts: Sequence[Tensor]
    _padding: Callable[[], object]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], padding: Callable[[], object]) -> "GroupedRows":
        """`padding` is called when a model does what needs the padded tensor."""
        rows, columns = sum(map(len, parts)), max(part.shape[-2] for part in parts)
        shape = (rows, *parts[0].shape[1:-2], columns, parts[0].shape[-1])
        made: GroupedRows = Tensor._make_wrapper_subclass(cls, shape, dtype=parts[0].dtype, device=parts[0].device)
        made.parts, made._padding = parts, padding
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and all(isinstance(each, cls) for each in args[1:3]) and len(args) > 2:
            return _attention(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # shapes are known; what needs memory comes to the dispatch
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own signature lacks `cls, func`
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(_padded, args), **tree_map(_padded, kwargs or {}))


def grouped(parts: Sequence[Tensor], padding: Callable[[], object]) -> Tensor:
    """One tensor of all rows; `padding` is called if it has to be padded."""
    return parts[0] if len(parts) == 1 else GroupedRows(parts, padding)


def _attention(
    query: Tensor, key: GroupedRows, value: GroupedRows, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    found, row = [], 0
    for keys, values in zip(key.parts, value.parts, strict=True):
        rows, mask = slice(row, row + len(keys)), attn_mask
        if mask is not None:
            mask = mask[rows if mask.dim() > 2 and len(mask) > 1 else slice(None), ..., -keys.shape[-2] :]
            mask = mask.clone()  # as kernels need its first entry aligned
        found.append(scaled_dot_product_attention(query[rows], keys, values, mask, *args, **kwargs))
        row += len(keys)
    return torch.cat(found)


def _padded(value: Any) -> Any:
    if not isinstance(value, GroupedRows):
        return value
    value._padding()
    columns = value.shape[-2]
    return torch.cat([pad(part, (0, 0, columns - part.shape[-2], 0)) for part in value.parts])
