"""Modules that compress several tokens into one entry, called row by row in a batch of sequences.

An entry is complete when it has all of its tokens, which is at another step for each row of a batch, and such a module
has one count of entries for all of its input. So only it gets the rows one after the other, each with the cache of its
own sequence; attention, experts and projections still compute the whole batch. Models are known by their behaviour: the
module that first stores the tokens of an unfinished entry in a layer's cache compresses for it.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from kvarve.reference.engine.layers import LayerPlan, new_cache
from kvarve.reference.engine.stepwise import writers


def make_batchable(model: Any, plans: Sequence[LayerPlan], cache_class: type) -> None:
    """Make the modules that compress take a batch whose cache has `caches`, one of each row. No other call changes."""
    if all(plan.rate == 1 for plan in plans):
        return
    cache = new_cache(cache_class, [copy.deepcopy(plan.fresh) for plan in plans])
    for number, (module, *_) in writers(model, cache, "store_compression_weights").items():
        if "forward" not in vars(module):
            module.forward = _row_by_row(module.forward, number)


def _row_by_row(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        cache = next((value for value in given.values() if isinstance(value, Cache)), None)
        caches = getattr(cache.layers[number], "caches", None) if cache is not None else None
        if caches is None:
            return forward(*args, **kwargs)
        found = []
        for row, own in enumerate(caches):
            for name, value in given.items():
                if value is cache:
                    bound.arguments[name] = own
                elif isinstance(value, Tensor):
                    bound.arguments[name] = value[row : row + 1]
            found.append(forward(*bound.args, **bound.kwargs))
        return _together(found)

    return stepping


def _together(found: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Entries [1, 1, n, width] and what is added to their scores [1, 1, 1, n], or None, of each row; as a batch.

    Rows with fewer entries are padded with entries that no token attends to.
    """
    most = max(entries.shape[2] for entries, _ in found)
    if all(bias is None and entries.shape[2] == most for entries, bias in found):
        return torch.cat([entries for entries, _ in found]), None
    rows, biases = [], []
    for entries, bias in found:
        missing = most - entries.shape[2]
        added = entries.new_zeros(1, 1, 1, entries.shape[2]) if bias is None else bias
        rows.append(pad(entries, (0, 0, 0, missing)))
        biases.append(pad(added, (0, missing), value=float("-inf")))
    return torch.cat(rows), torch.cat(biases)
