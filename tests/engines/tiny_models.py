"""Tiny checkpoints with random weights, of families whose layers keep different things. Needs transformers."""

import sys
from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 512,
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
# vLLM's kernels for CPUs want linear heads of 128.
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", dict(LINEAR, num_hidden_layers=8)),
    "qwen3_next": ("qwen3_next", dict(LINEAR, **EXPERTS, num_experts_per_tok=2, num_hidden_layers=4)),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": 128}),
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
    ),
}


def make(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, own = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **own})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
