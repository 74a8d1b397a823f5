"""Layers that begin anew whenever several tokens are computed at once, taught to go on from where they were.

Mamba's scan in transformers (Jamba's layers) takes no initial state: a call of several tokens starts from nothing and
overwrites the state of those before, so a prompt that is computed in chunks would be forgotten chunk by chunk. The same
code does go on when it gets one token, so that is how such a layer gets what follows its first chunk; the rest of the
model still computes whole chunks.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.cache_utils import Cache

from kvarve.engine.layers import LayerPlan, new_cache, plan_layers, probe


def begin_anew(model: Any, plans: Sequence[LayerPlan], cache_class: type) -> set[int]:
    """The layers whose recurrent state after several tokens does not depend on what it was before them."""
    if not any(hasattr(plan.fresh, "recurrent_states") for plan in plans):
        return set()
    with_past = new_cache(cache_class, [copy.deepcopy(plan.fresh) for plan in plans])
    _compute(model, with_past, 0, 4)
    without = copy.deepcopy(with_past)
    for state in _recurrent(without).values():
        state.zero_()
    for cache in (with_past, without):
        _compute(model, cache, 4, 6)
    others = _recurrent(without)
    same: dict[int, list[bool]] = {}
    for (number, name), state in _recurrent(with_past).items():
        same.setdefault(number, []).append(state.equal(others[number, name]))
    return {number for number, states in same.items() if all(states)}


def teach(model: Any) -> None:
    """Let the layers that begin anew go on instead, one token at a time. Does nothing to any other layer."""
    plans = plan_layers(model.config, type(model).__name__)
    cache_class, _ = probe(model, plans)
    if anew := begin_anew(model, plans, cache_class):
        writers = _writers(model, new_cache(cache_class, [copy.deepcopy(plan.fresh) for plan in plans]))
        for number in anew:
            writers[number].forward = _one_by_one(writers[number].forward, number)


def _one_by_one(forward: Callable[..., Tensor], number: int) -> Callable[..., Tensor]:
    signature = inspect.signature(forward)

    def stepping(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        cache = next((value for value in given.values() if isinstance(value, Cache)), None)
        hidden = given["hidden_states"]
        if cache is None or hidden.shape[1] == 1 or not cache.has_previous_state(number):
            return forward(*args, **kwargs)
        assert given.get("attention_mask") is None, "a sequence of its own has no padding"
        steps = []
        for token in hidden.split(1, dim=1):
            bound = signature.bind(*args, **kwargs)
            bound.arguments["hidden_states"] = token
            steps.append(forward(*bound.args, **bound.kwargs))
        return torch.cat(steps, dim=1)

    return stepping


def _writers(model: Any, cache: Any) -> dict[int, Any]:
    """By layer, the module that writes its recurrent state."""
    inside: list[Any] = []  # the modules that are being computed, the innermost last
    writers: dict[int, Any] = {}
    update = cache.update_recurrent_state

    def spy(state: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        writers[layer_idx] = inside[-1]
        written: Tensor = update(state, layer_idx, *args, **kwargs)
        return written

    cache.update_recurrent_state = spy
    hooks = [
        register_module_forward_pre_hook(lambda module, _: inside.append(module)),
        register_module_forward_hook(lambda *_: inside.pop() and None, always_call=True),
    ]
    try:
        _compute(model, cache, 0, 4)
    finally:
        for hook in hooks:
            hook.remove()
    return writers


def _compute(model: Any, cache: Any, start: int, stop: int) -> None:
    ids = torch.arange(start, stop, device=model.device)[None]
    with torch.no_grad():
        model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)


def _recurrent(cache: Any) -> dict[tuple[int, int], Tensor]:
    """States by layer and number, but not those that merely repeat the last few tokens' ids."""
    return {
        (number, name): state
        for number, layer in enumerate(cache.layers)
        for name, state in getattr(layer, "recurrent_states", {}).items()
        if state is not None and state.is_floating_point()
    }
