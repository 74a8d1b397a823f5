"""Modules that are wrong for several tokens or several rows at once, and get one at a time; all others do not change.

Mamba's scan in transformers (Jamba's layers) takes no initial state: a call of several tokens starts from nothing and
overwrites the state of those before, so a prompt computed in chunks would lose each chunk but the last. The same code
does continue from the state when it gets one token, so such a layer gets one token at a time after its first chunk.

A module that compresses several tokens into one entry completes it when it has all of them, which is at another step
for each row of a batch, and it has one count of entries for all of its input. So it takes the rows one after the other,
each with the cache of its own sequence.

Models are known by their behaviour: a state of NaNs that is not read, and the module that first stores the tokens of an
unfinished entry.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.cache_utils import Cache

from kvarve.reference.engine.layers import LayerPlan, compute, dry_run, new_cache, plan_layers


def layers_ignoring_state(model: Any, plans: Sequence[LayerPlan], cache_class: type) -> dict[int, Any]:
    """By layer, the modules that do not read their recurrent state when they get several tokens."""
    if not any(hasattr(plan.fresh, "recurrent_states") for plan in plans):
        return {}
    primed = new_cache(cache_class, [copy.deepcopy(plan.fresh) for plan in plans])
    wrote = writers(model, primed, "update_recurrent_state")
    found = {number: modules[-1] for number, modules in wrote.items() if _recurrent(primed, number)}
    firsts: dict[type, int] = {}
    for number in sorted(found):
        firsts.setdefault(type(found[number]), number)
    ignoring = {kind for kind, number in firsts.items() if not _reads_its_state(model, primed, number)}
    return {number: module for number, module in found.items() if type(module) in ignoring}


def make_resumable(model: Any) -> None:
    """Make the layers that ignore their state continue from it, one token at a time. Changes no other layer."""
    plans = plan_layers(model.config, type(model).__name__)
    for number, module in layers_ignoring_state(model, plans, dry_run(model, plans).cache_class).items():
        module.forward = _one_by_one(module.forward, number)


def _reads_its_state(model: Any, primed: Any, number: int) -> bool:
    """Whether NaNs in the state before two tokens are still there after them."""
    cache = copy.deepcopy(primed)
    for state in _recurrent(cache, number):
        state.fill_(torch.nan)
    _compute(model, cache, 4, 6)
    return any(bool(state.isnan().any()) for state in _recurrent(cache, number))


def _one_by_one(forward: Callable[..., Tensor], number: int) -> Callable[..., Tensor]:
    signature = inspect.signature(forward)

    def stepping(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        cache = next((value for value in given.values() if isinstance(value, Cache)), None)
        hidden = given["hidden_states"]
        if cache is None or hidden.shape[1] == 1 or not cache.has_previous_state(number):
            return forward(*args, **kwargs)
        assert given.get("attention_mask") is None, "a single sequence has no padding"
        steps = []
        for token in hidden.split(1, dim=1):
            bound = signature.bind(*args, **kwargs)
            bound.arguments["hidden_states"] = token
            steps.append(forward(*bound.args, **bound.kwargs))
        return torch.cat(steps, dim=1)

    return stepping


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


def writers(model: Any, cache: Any, method: str) -> dict[int, list[Any]]:
    """By layer, the modules that call this method of its cache in a forward of a few tokens, one after the other."""
    inside: list[Any] = []  # the modules whose forward is running, the innermost last
    found: dict[int, list[Any]] = {}

    def watched(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            found.setdefault(number, []).append(inside[-1])
            return call(*args, **kwargs)

        return spy

    def enter(module: Any, _: Any) -> None:
        inside.append(module)

    def leave(module: Any, *_: Any) -> None:
        inside.pop()

    watching = [(number, layer) for number, layer in enumerate(cache.layers) if hasattr(layer, method)]
    for number, layer in watching:
        setattr(layer, method, watched(number, getattr(layer, method)))
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        _compute(model, cache, 0, 4)
    finally:
        for hook in hooks:
            hook.remove()
        for _, layer in watching:
            delattr(layer, method)
    return found


def _compute(model: Any, cache: Any, start: int, stop: int) -> None:
    ids = torch.arange(start, stop, device=model.device)[None]
    compute(model, cache, input_ids=ids, position_ids=ids)


def _recurrent(cache: Any, number: int) -> list[Tensor]:
    """The recurrent states of a layer, without those that only hold the last few tokens' ids."""
    states = getattr(cache.layers[number], "recurrent_states", {})
    return [state for state in states.values() if state is not None and state.is_floating_point()]
