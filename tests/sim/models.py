"""Tiny models with random weights, one for each way in which a family keeps state, and their checkpoints on disk.

Each is made so that its output depends on its own kind of state: windows smaller than the prompt, sparse attention over
few tokens, experts that a rounding error could switch.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvarve.reference.engine.layers import page_multiple, plan_layers
from kvarve.reference.engine.model import build_model
from kvarve.reference.engine.stepwise import make_resumable

VOCAB = 300
EOS, PAD = 256, 257  # behind the 256 bytes
INITIALIZER_RANGE = 0.15  # wide enough that a wrong state changes the output
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": INITIALIZER_RANGE,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "bos_token_id": None,
}
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 32}
MAMBA = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "initializer_range", "eos_token_id", "bos_token_id")}
MAMBA |= {"num_hidden_layers": 2, "pad_token_id": PAD}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERTS = EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
# Which of equal scores the indexer picks depends on how many there are. With few heads most tokens would score exactly
# 0, and for a token that pads, whose embedding is zero, all do.
INDEX = {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 24, "pad_token_id": None}


def _but(settings: dict[str, Any], *left_out: str, **changed: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in left_out} | changed


def _deepseek(**settings: Any) -> dict[str, Any]:
    return _but(COMMON, num_key_value_heads=4, head_dim=8) | LATENT | ROUTED_EXPERTS | settings


def _wrapping(text: dict[str, Any], **towers: Any) -> dict[str, Any]:
    """The config of a model that takes images, too; what computes images is as small as can be."""
    return {"text_config": text} | towers


EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
# Positions in time, height and width, which are one in a text.
THREE_POSITIONS = _but(
    COMMON,
    "head_dim",
    num_hidden_layers=2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
)

# By family: transformers' class of config, and what to give it.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", COMMON | {"num_hidden_layers": 2}),
    "llama": ("LlamaConfig", COMMON | {"num_hidden_layers": 2}),
    "qwen3_5": ("Qwen3_5TextConfig", COMMON | HYBRID | DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _but(COMMON, "intermediate_size") | HYBRID | DELTA_NET | SHARED_EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", COMMON | HYBRID | DELTA_NET | SHARED_EXPERTS),
    "gpt_oss": ("GptOssConfig", COMMON | ALTERNATING | LOCAL_EXPERTS | {"sliding_window": 24}),
    "gpt_oss_wide": ("GptOssConfig", COMMON | ALTERNATING | LOCAL_EXPERTS | {"sliding_window": 100}),
    "gemma3": ("Gemma3TextConfig", COMMON | ALTERNATING | {"sliding_window": 9, "query_pre_attn_scalar": 16}),
    # Some layers read the keys and values of earlier ones, and cache none.
    "gemma4": (
        "Gemma4TextConfig",
        _but(
            COMMON | ALTERNATING,
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            sliding_window=9,
            global_head_dim=8,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
        ),
    ),
    "deepseek_v3": ("DeepseekV3Config", _deepseek(num_hidden_layers=3)),
    "deepseek_v32": ("DeepseekV32Config", _deepseek(num_hidden_layers=3, **INDEX)),
    # Every other layer reuses the selection of the one before it, and caches no index keys.
    "glm_moe_dsa": ("GlmMoeDsaConfig", _deepseek(num_hidden_layers=4, index_topk_freq=2, **INDEX)),
    "deepseek_v4": (
        "DeepseekV4Config",
        _but(
            COMMON,
            "intermediate_size",
            num_hidden_layers=3,
            layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            mlp_layer_types=["hash_moe", "moe", "moe"],
            num_key_value_heads=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            q_lora_rank=24,
            o_groups=2,
            o_lora_rank=8,
            hc_mult=2,
            index_n_heads=24,
            index_head_dim=16,
            index_topk=48,
            sliding_window=24,
            partial_rotary_factor=0.5,
        ),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        _but(COMMON, "head_dim", "num_key_value_heads")
        | HYBRID
        | _but(LATENT, "q_lora_rank", linear_head_dim=8, linear_num_heads=2)
        | LOCAL_EXPERTS
        | {"moe_intermediate_size": 16},
    ),
    "jamba": (
        "JambaConfig",
        _but(COMMON, "head_dim", num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1)
        | EXPERTS
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "bamba": ("BambaConfig", _but(COMMON, "head_dim", num_hidden_layers=3, attn_layer_indices=[1]) | MAMBA2),
    "falcon_h1": (
        "FalconH1Config",
        COMMON | _but(MAMBA2, mamba_d_ssm=32, mamba_d_head=8, num_hidden_layers=2),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _but(
            COMMON,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            ssm_state_size=8,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=2,
            chunk_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _but(COMMON, "head_dim", shared_intermediate_size=16) | HYBRID | LOCAL_EXPERTS | MAMBA2,
    ),
    # Layers with attention and a state; they share the weights of their attention.
    "zamba2": (
        "Zamba2Config",
        _but(
            COMMON,
            "head_dim",
            num_hidden_layers=3,
            layers_block_type=["hybrid", "linear_attention", "hybrid"],
            num_key_value_heads=4,
            n_mamba_heads=4,
            mamba_d_state=8,
            chunk_size=32,
            adapter_rank=4,
            use_mem_rope=True,
        ),
    ),
    "lfm2": (
        "Lfm2Config",
        COMMON | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _but(
            COMMON,
            "head_dim",
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            moe_intermediate_size=16,
        )
        | EXPERTS,
    ),
    "olmo_hybrid": ("OlmoHybridConfig", _but(COMMON, "head_dim") | HYBRID | DELTA_NET),
    "minimax": ("MiniMaxConfig", COMMON | HYBRID | LOCAL_EXPERTS | {"block_size": 32}),
    # Three states in a layer, one of them of token ids, and positions cached beside the indexer's keys.
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        _but(COMMON, "intermediate_size")
        | DELTA_NET
        | SHARED_EXPERTS
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [2],
            "ple_embed_dim": 32,
            "ngram_vocab_size_base": 500,
            "heads_per_ngram": 2,
            "make_ngram_vocab_size_divisible_by": 4,
            "split_ngram_parts": 4,
            "hc_count": 2,
            "hc_lowrank": 8,
        },
    ),
    # Attention to two blocks of tokens, and an indexer that chooses them.
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        COMMON
        | LOCAL_EXPERTS
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "intermediate_size": 16,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    # Two attentions in a layer, and experts that compute nothing.
    "longcat_flash": (
        "LongcatFlashConfig",
        _but(COMMON, "intermediate_size", num_key_value_heads=4, head_dim=8)
        | LATENT
        | {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16}
        | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    ),
    # States alone.
    "mamba": ("MambaConfig", MAMBA | {"state_size": 8, "time_step_rank": 4}),
    "mamba2": (
        "Mamba2Config",
        MAMBA | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 32},
    ),
    "falcon_mamba": ("FalconMambaConfig", MAMBA | {"state_size": 8, "time_step_rank": 4}),
    # Language models inside of models that take images, too.
    "llama4": (
        "Llama4Config",
        _wrapping(
            COMMON
            | {"num_hidden_layers": 4, "attention_chunk_size": 20, "intermediate_size_mlp": 48}
            | _but(LOCAL_EXPERTS, num_experts_per_tok=1),
            vision_config=EYES
            | {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
            | {"projector_input_dim": 16, "projector_output_dim": 16},
        ),
    ),
    "mistral3": (
        "Mistral3Config",
        _wrapping(
            COMMON | {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None},
            vision_config=EYES | {"model_type": "pixtral", "head_dim": 8},
        ),
    ),
    "internvl": (
        "InternVLConfig",
        _wrapping(
            COMMON | {"model_type": "qwen2", "num_hidden_layers": 2},
            vision_config=EYES | {"image_size": [28, 28], "patch_size": [14, 14]},
        ),
    ),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", _wrapping(THREE_POSITIONS, vision_config=QWEN_EYES)),
    "qwen3_vl": (
        "Qwen3VLConfig",
        _wrapping(THREE_POSITIONS, vision_config=QWEN_EYES | {"deepstack_visual_indexes": [0]}),
    ),
    "glm4v": ("Glm4vConfig", _wrapping(THREE_POSITIONS, vision_config=QWEN_EYES)),
    # Keys without a rotated part, which the cache gets in place of values, and an indexer of pools of tokens.
    "glm5_next": (
        "Glm5NextConfig",
        _wrapping(
            _but(_deepseek(num_hidden_layers=4, **INDEX), "head_dim", "first_k_dense_replace", qk_rope_head_dim=0)
            | {
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "mlp_layer_types": ["dense"] + ["sparse"] * 3,
                "linear_head_dim": 8,
                "linear_num_heads": 2,
                "index_kpool": 4,
            },
            vision_config=QWEN_EYES,
        ),
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        _wrapping(_deepseek(num_hidden_layers=2, model_type="kimi_k2"), vision_config=EYES, projection_hidden_size=16),
    ),
}
FAMILIES = tuple(SETTINGS)
STATES_ALONE = ("mamba", "mamba2", "falcon_mamba")  # no page of a token: any prompt fits, and a resume reads one page


def tiny_config(family: str, **changed: Any) -> Any:
    """The config of one of FAMILIES, with some settings changed."""
    config_class, settings = SETTINGS[family]
    return getattr(transformers, config_class)(**(settings | changed))


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changed: Any) -> Any:
    """A model of one of FAMILIES with random weights, ready to compute; with some settings of its config changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(tiny_config(family, **changed), dtype)
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():  # initialized to zero, so it would have no effect
                torch.nn.init.normal_(weight, std=INITIALIZER_RANGE)
    make_resumable(model)
    return model


def tiny_grid(family: str) -> tuple[int, int]:
    """Tokens of a page and of a chunk for one of FAMILIES: 16 and 64, or what its compressed entries need."""
    page = max(16, page_multiple(plan_layers(tiny_config(family), family)))
    return page, max(64, page)


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}
{{- raise_exception('unknown role ' + message['role']) -}}
{%- endif -%}
{{- message['role'] + ': ' + message['content'] + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""


def byte_tokenizer(tokens: int = 0) -> Any:
    """A tokenizer whose ids 0 to 255 are bytes, so that a character of n bytes is n tokens, and 256 ends a text. Of
    more `tokens`, those from 258 on spell numbers, which no text is encoded to."""
    spelled = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "<end>",
        "<pad>",
        *(f"Ġ{each}" for each in range(258, tokens)),
    ]
    vocab = {text: number for number, text in enumerate(spelled)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<end>", "<pad>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_checkpoint(model: Any, folder: Path, tokens: int = 0) -> None:
    """Write what a model hub would hold: config.json, model.safetensors, tokenizer.json (of so many `tokens`, if they
    are more than bytes) and a chat template."""
    model.save_pretrained(folder)
    byte_tokenizer(tokens).save_pretrained(folder)
