"""Tiny checkpoints with random weights, of families that vLLM computes on a CPU: hybrids, and windows beside attention.

Written by transformers in the engine's venv. The GDN kernel of vLLM's CPU build wants bfloat16 and heads of 128.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 512
TOKENIZER = Path(__file__).parents[2] / "src" / "kvarve" / "reference" / "engine" / "builtin" / "tiny-hybrid"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,  # so that logits differ enough for a wrong page to show
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Model:
    kind: str  # transformers' model type
    fields: dict[str, Any]  # what differs from the common config
    dtype: str  # in which vLLM computes it
    block: (
        int  # tokens of a block of vLLM's. In such steps a prompt is computed in the same pieces wherever it resumes.
    )
    blocks: int = 0  # of an engine that holds a few prompts
    storage: tuple[str, ...] = ()  # capacity of one that holds a few more: of the connector's, and of the tier's


MODELS = {
    "qwen3_5": Model("qwen3_5_text", _LINEAR | {"num_hidden_layers": 4}, "bfloat16", 384, 14, ("6MiB", "3MiB")),
    "qwen3_next": Model(
        "qwen3_next",
        _LINEAR | _EXPERTS | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 64},
        "bfloat16",
        384,
        14,
        ("6MiB", "3MiB"),
    ),
    # With the tokenizer of kvarve's own.
    "gemma3_words": Model(
        "gemma3_text", {"num_hidden_layers": 6, "sliding_window": 128, "vocab_size": 2048}, "float32", 128, 70
    ),
    # For two ranks, which share key heads of states, and one of which KV heads cannot be shared.
    "qwen3_5_wide": Model(
        "qwen3_5_text",
        _LINEAR | {"num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        "bfloat16",
        1152,
        30,
    ),
    "qwen3_one_head": Model("qwen3", {"num_hidden_layers": 4, "num_key_value_heads": 1}, "float32", 128, 70),
    "qwen3_four_heads": Model("qwen3", {"num_hidden_layers": 4, "num_key_value_heads": 4}, "float32", 128, 70),
    "gemma3": Model(
        "gemma3_text", {"num_hidden_layers": 6, "sliding_window": 128}, "float32", 128, 70, ("16MiB", "8MiB")
    ),
    "llama": Model("llama", {"num_hidden_layers": 2}, "float32", 128, 70),
    "llama_eagle": Model("llama", {"num_hidden_layers": 1}, "float32", 128),  # a head that drafts for it
    "llava": Model("llava", {}, "float32", 128, 70),  # reads pictures
    "gpt_oss": Model(
        "gpt_oss",
        {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
        "bfloat16",
        128,
        24,
        ("6MiB", "4MiB"),
    ),
}


def made(name: str, folder: Path) -> Path:
    """The folder of a checkpoint, which is made if it is not there."""
    path = folder / name
    if name == "llava" and not (path / "made.json").exists():
        _write_llava(path)
    if not (path / "made.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        kind, fields = MODELS[name].kind, MODELS[name].fields
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(_COMMON | fields)), dtype=torch.float32)
        model.save_pretrained(path)
        if name.endswith("_eagle"):
            from safetensors.torch import save_file

            layer = {key.removeprefix("model."): each for key, each in model.state_dict().items() if ".layers." in key}
            layer.pop("layers.0.input_layernorm.weight")
            width = _COMMON["hidden_size"]
            save_file(layer | {"fc.weight": torch.randn(width, 2 * width) / 20}, path / "model.safetensors")
        if name.endswith("_words"):
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TOKENIZER / file, path)
        (path / "made.json").write_text(json.dumps(fields))
    return path


def _write_llava(path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    side, patch = 56, 14
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, extra_special_tokens={"image_token": "<image>"})
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": side, "patch_size": patch}
    text = _COMMON | {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 2048}
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=tokenizer.image_token_id)
    LlavaForConditionalGeneration(config).save_pretrained(path)
    weights = load_file(path / "model.safetensors")  # vLLM knows the names that older versions of transformers wrote
    named = {key.replace("vision_tower.", "vision_tower.vision_model."): each for key, each in weights.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    LlavaProcessor(images, tokenizer, patch, "default", num_additional_image_tokens=1).save_pretrained(path)
    (path / "made.json").write_text("{}")


if __name__ == "__main__":
    made(sys.argv[1], Path(sys.argv[2]))
