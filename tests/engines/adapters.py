"""Tiny adapters (LoRA) with random weights, for the tests' models."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8


def written(folder: Path, seed: int, layers: int = 6, hidden: int = 128, heads: int = 128, alpha: int = 16) -> Path:
    """An adapter of the query projections in a folder, over what is there."""
    folder.mkdir(exist_ok=True, parents=True)
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=dice)
        tensors[f"{name}.lora_B.weight"] = torch.randn(heads, RANK, generator=dice)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
