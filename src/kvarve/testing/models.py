"""Tiny models with random weights, one for each way in which a family keeps state, and their checkpoints on disk.

Each is made so that its own kind of state decides what it says: windows smaller than the prompt, sparse attention
that picks few tokens, experts that a rounding error could switch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
)

VOCAB = 300
EOS, PAD = 256, 257  # behind the 256 bytes
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "bos_token_id": None,
}
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def _qwen3() -> Any:
    return Qwen3Config(**COMMON, num_hidden_layers=2)


def _qwen3_5() -> Any:
    return Qwen3_5TextConfig(**COMMON, **LINEAR)


def _qwen3_next() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3NextConfig(**COMMON, **LINEAR, **experts, moe_intermediate_size=16, shared_expert_intermediate_size=16)


def _gpt_oss(window: int = 24) -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**COMMON, **ALTERNATING, **experts, sliding_window=window)


def _gpt_oss_wide() -> Any:
    return _gpt_oss(window=100)


def _gemma3(window: int = 9) -> Any:
    return Gemma3TextConfig(**COMMON, **ALTERNATING, sliding_window=window, query_pre_attn_scalar=16)


def _falcon_h1() -> Any:
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 32}
    return FalconH1Config(**COMMON, **mamba, num_hidden_layers=2)


def _lfm2() -> Any:
    layer_types = ["conv", "full_attention", "conv"]
    return Lfm2Config(**COMMON, num_hidden_layers=3, layer_types=layer_types, block_multiple_of=16)


def _deepseek_v32() -> Any:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    index = {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 2}
    shape = COMMON | {"head_dim": 8, "num_key_value_heads": 4}
    return DeepseekV32Config(
        **shape, **latent, **experts, **index, num_hidden_layers=3, first_k_dense_replace=1, moe_intermediate_size=16
    )


def _qwen4_exp() -> Any:
    """Three states in a layer, one of them of token ids, and positions kept beside the keys of the indexer."""
    index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
    ngrams = {"ple_layer_ids": [2], "ple_embed_dim": 32, "ngram_vocab_size_base": 500, "heads_per_ngram": 2}
    rest = {"make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 4, "hc_count": 2, "hc_lowrank": 8}
    shape = {key: value for key, value in (COMMON | LINEAR | EXPERTS).items() if key != "intermediate_size"}
    shape |= {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}
    return Qwen4ExpTextConfig(**shape, **index, **ngrams, **rest, indexer_compress_ratio=4)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "gpt_oss_wide": _gpt_oss_wide,
    "gemma3": _gemma3,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "deepseek_v32": _deepseek_v32,
    "qwen4_exp": _qwen4_exp,
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of one of FAMILIES with random weights, ready to compute."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}
{{- raise_exception('unknown role ' + message['role']) -}}
{%- endif -%}
{{- message['role'] + ': ' + message['content'] + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""


def byte_tokenizer() -> Any:
    """A tokenizer whose ids 0 to 255 are bytes, so that a character of n bytes is n tokens, and 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<end>", "<pad>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_checkpoint(model: Any, folder: Path) -> None:
    """Write what a model hub would hold: config.json, model.safetensors, tokenizer.json and a chat template."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
