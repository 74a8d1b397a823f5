"""Really quantized checkpoints of tiny models, as their publishers write them: tensors, scales and config.

    python -m tests.sim.quantized_models fp8 FOLDER

FP8 has blocks of 128 by 128 as in DeepSeek-V3, the last of them short; MXFP4 has the experts of gpt-oss in groups of
32; int8, int4 and nvfp4 are formats of compressed-tensors. `tests.sim.packing` packs the numbers of the others.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.sim import packing
from tests.sim.models import save_checkpoint, tiny_model

BLOCK = 128  # rows, and columns, that share a scale in FP8
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # the numbers without a sign
GROUP = 32  # weights that share a scale in MXFP4

Weights = dict[str, Tensor]


def fp8_blocks(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and its scales [blocks of rows, blocks of columns], by which it is multiplied."""
    rows, columns = weight.shape
    whole = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    whole[:rows, :columns] = weight.float()
    blocks = whole.view(whole.shape[0] // block, block, whole.shape[1] // block, block)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    quantized = (blocks / scales[:, None, :, None]).reshape(whole.shape)[:rows, :columns]
    return quantized.to(torch.float8_e4m3fn).contiguous(), scales


def mxfp4_blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., n] as packed 4-bit numbers [..., n / 32, 16] and exponents [..., n / 32], both of bytes."""
    groups = weights.float().reshape(*weights.shape[:-1], -1, GROUP)
    exponents = (groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def _linear(name: str, weight: Tensor) -> bool:
    """Whether publishers quantize it: a projection, not an embedding, a router or a norm."""
    return weight.ndim == 2 and name.endswith(("proj.weight", "proj_with_mqa.weight"))


def _fp8(weights: Weights) -> Weights:
    found: Weights = {}
    for name, weight in weights.items():
        if _linear(name, weight):
            found[name], found[f"{name}_scale_inv"] = fp8_blocks(weight)
        else:
            found[name] = weight
    return found


def _mxfp4(weights: Weights) -> Weights:
    found: Weights = {}
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[f"{name}_blocks"], found[f"{name}_scales"] = mxfp4_blocks(weight.transpose(1, 2))
        else:
            found[name] = weight
    return found


def _int8(weights: Weights) -> Weights:
    """A scale for each row, as in W8A8."""
    found: Weights = {}
    for name, weight in weights.items():
        found[name] = weight
        if _linear(name, weight):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            found[name] = (weight.float() / scale).round().to(torch.int8)
            found[f"{name}_scale"] = scale.to(weight.dtype)
    return found


def _int4(weights: Weights) -> Weights:
    """A scale for each 32 weights of a row, eight numbers packed into one, as in W4A16."""
    found: Weights = {}
    for name, weight in weights.items():
        if not _linear(name, weight):
            found[name] = weight
            continue
        groups = weight.float().view(len(weight), -1, GROUP)
        scale = groups.abs().amax(2).clamp(min=1e-12) / 7
        codes = (groups / scale[..., None]).round().flatten(1).to(torch.int32) + 8
        words = sum(codes[:, at::8] << 4 * at for at in range(8))
        assert isinstance(words, Tensor)
        found[f"{name}_packed"] = words.to(torch.int32)
        found[f"{name}_scale"] = scale.to(weight.dtype)
        found[f"{name}_shape"] = torch.tensor(weight.shape)
    return found


def _each(parts_of: Callable[[Tensor], Weights]) -> Callable[[Weights], Weights]:
    """Replace each projection by its parts."""

    def quantize(weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if _linear(name, weight):
                found |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts_of(weight).items()}
            else:
                found[name] = weight
        return found

    return quantize


def _nvfp4(weight: Tensor) -> Weights:
    numbers, scales, factor = packing.nvfp4(weight)
    return {"weight_packed": numbers, "weight_scale": scales, "weight_global_scale": torch.tensor([1 / factor])}


def _modelopt(weight: Tensor) -> Weights:
    numbers, scales, factor = packing.nvfp4(weight)
    scalars = {"weight_scale_2": torch.tensor(factor), "input_scale": torch.tensor(0.01)}
    return {"weight": numbers, "weight_scale": scales, **scalars}


def _modelopt_fp8(weights: Weights) -> Weights:
    """One scale for a matrix, and those of calibrated keys and values beside the projections that make them."""
    found: Weights = {}
    for name, weight in weights.items():
        if not _linear(name, weight):
            found[name] = weight
            continue
        module, scale = name.removesuffix(".weight"), weight.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
        found[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        found[f"{module}.weight_scale"], found[f"{module}.input_scale"] = scale, torch.tensor(0.01)
        if module.endswith(("k_proj", "v_proj")):
            found[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5 if "layers.0" in name else 0.25)
    return found


def _gptq_config(bits: int, group: int, act_order: bool, kind: str) -> dict[str, Any]:
    named = {"quant_method": "gptq", "checkpoint_format": kind, "bits": bits, "group_size": group}
    return {**named, "desc_act": act_order, "sym": not act_order, "lm_head": False, "damp_percent": 0.1}


FP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}


def _scheme(bits: int, strategy: str, group: int | None, format_: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


WIDE = {"hidden_size": 160, "intermediate_size": 192}  # more than one block, the last of them short
HALVES = {"hidden_size": 64, "intermediate_size": 64}
# By format: the tiny family, its changed settings, how its weights are written, and what the config says of it.
FORMATS: dict[str, tuple[str, dict[str, Any], Callable[[Weights], Weights], dict[str, Any]]] = {
    "fp8": (
        "deepseek_v3",
        WIDE,
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    ),
    "mxfp4": (
        "gpt_oss",
        HALVES,
        _mxfp4,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    ),
    "int8": ("qwen3", HALVES, _int8, _scheme(8, "channel", None, "int-quantized")),
    "int4": ("qwen3", HALVES, _int4, _scheme(4, "group", GROUP, "pack-quantized")),
    "gptq": (
        "qwen3",
        HALVES,
        _each(lambda weight: packing.gptq(weight, 4, GROUP, act_order=True, v2=False)),
        _gptq_config(4, GROUP, True, "gptq"),
    ),
    "gptq_v2": (
        "qwen3",
        HALVES,
        _each(lambda weight: packing.gptq(weight, 8, -1, act_order=False, v2=True)),
        _gptq_config(8, -1, False, "gptq_v2"),
    ),
    "awq": (
        "qwen3",
        HALVES,
        _each(lambda weight: packing.awq(weight, GROUP)),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "nvfp4": (
        "qwen3",
        HALVES,
        _each(_nvfp4),
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4_WEIGHTS}},
            "ignore": ["lm_head"],
        },
    ),
    "modelopt": (
        "deepseek_v3",
        {"q_lora_rank": 32},
        _each(_modelopt),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4_WEIGHTS}},
            "ignore": ["lm_head", "model.layers.*.mlp.gate"],
            "producer": {"name": "modelopt"},
        },
    ),
    "modelopt_fp8": (
        "qwen3",
        {},
        _modelopt_fp8,
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.33.1"},
        },
    ),
}


def save_quantized(format_: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of one of FORMATS; the folder."""
    family, changed, quantize, about = FORMATS[format_]
    save_checkpoint(tiny_model(family, torch.bfloat16, seed, **changed), folder)
    save_file(quantize(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}, indent=1))
    return folder


if __name__ == "__main__":
    save_quantized(sys.argv[1], Path(sys.argv[2]))
