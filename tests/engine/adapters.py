"""Adapters as PEFT puts them into a model: linear layers that hold several, of which some are at work.

PEFT itself is not installed where these tests run. Layers have the names, attributes and behaviour of those in
`peft.tuners.lora` 0.21, as far as they affect the result.
"""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

RANK = 2


class LoraLinear(nn.Module):
    """A linear layer and low-rank adapters beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter: list[str] = []
        self._disable_adapters = False

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    def update_layer(self, name: str, seed: int) -> None:
        """Hold one more adapter, which is not at work yet."""
        rng = torch.Generator().manual_seed(seed)
        for parts, shape in (
            (self.lora_A, (RANK, self.base_layer.in_features)),
            (self.lora_B, (self.base_layer.out_features, RANK)),
        ):
            parts[name] = nn.Linear(shape[1], shape[0], bias=False)
            parts[name].weight.data = torch.randn(shape, generator=rng) * 0.3
        self.scaling[name] = 2.0

    def set_adapter(self, name: str) -> None:
        self._active_adapter = [name]

    def enable_adapters(self, enabled: bool) -> None:
        self._disable_adapters = not enabled

    def merge(self) -> None:
        for name in self._active_adapter:
            self.base_layer.weight.data += self.scaling[name] * (self.lora_B[name].weight @ self.lora_A[name].weight)
            self.merged_adapters.append(name)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        if self._disable_adapters or self.merged_adapters:
            return result
        for name in self._active_adapter:
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


class SavedModule(nn.Module):
    """A module and whole copies of it that were trained with adapters, as `peft.utils.other` wraps it."""

    merged_adapters: ClassVar[list[str]] = []  # none of its instances has one of its own

    def __init__(self, original: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({name: copy.deepcopy(original) for name in names})
        self._active_adapter = [*names[:1]]
        self._disable_adapters = False

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    def forward(self, *args: Any) -> Tensor:
        off = self._disable_adapters or not self._active_adapter
        result: Tensor = (self.original_module if off else self.modules_to_save[self._active_adapter[0]])(*args)
        return result


def adapt(model: Any, *names: str) -> Any:
    """Put adapters on the values of all attention layers, in place; the first is at work."""
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj)
    for module in adapted(model):
        for seed, name in enumerate(names):
            module.update_layer(name, seed)
        module.set_adapter(names[0])
    return model.eval()


def adapted(model: Any) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]
