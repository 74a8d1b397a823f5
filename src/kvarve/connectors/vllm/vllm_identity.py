"""What tells apart the bytes that two vLLM engines keep for the same tokens. Reads vLLM's configuration objects, and
imports nothing of vLLM.

vLLM's hashes of tokens (and of salt, images and names of adapters) say nothing of the model, so a store that several
engines share needs all of this in its namespace. A needless difference costs misses, a missing one wrong tokens.
"""

import json
import math
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvarve.connectors.checkpoint import Find, in_hub_cache, local_files, replaced_since, weights_fingerprint
from kvarve.connectors.engine_settings import READ_ALL
from kvarve.reference.engine.identity import config_digest

Fields = dict[str, object]


def model_digest(vllm_config: Any, *, any_tensor_parallel: bool = False) -> str:
    """A digest of the model as this engine computes it, without its weights. Both seams have it in their identity.
    `any_tensor_parallel`: it is that of all sizes of tensor parallelism."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = plain(model.hf_config.to_dict())
    speculative, lora = getattr(vllm_config, "speculative_config", None), getattr(vllm_config, "lora_config", None)
    fields: Fields = {
        "config": config,
        "architectures": model.architectures,
        "dtype": model.dtype,
        "quantization": [getattr(model, "quantization", None), getattr(model, "quantization_config", None)],
        "cache": [
            cache.cache_dtype,
            *(getattr(cache, f"mamba_{it}", None) for it in ("cache_dtype", "ssm_cache_dtype")),
        ],
        "kv_scales": getattr(cache, "calculate_kv_scales", None),
        "layout": getattr(cache, "kv_cache_layout", None),
        "attention": getattr(vllm_config, "attention_config", None),
        "eager": getattr(model, "enforce_eager", None),
        "v2_runner": getattr(vllm_config, "use_v2_model_runner", None),
        "ranks": [
            getattr(parallel, f"{it}_parallel_size", 1)
            for it in ("tensor", "pipeline", "prefill_context", "decode_context")[any_tensor_parallel:]
        ],
        "experts": getattr(parallel, "enable_expert_parallel", None),
        "draft": speculative and [speculative.method, speculative.model, speculative.num_speculative_tokens],
        "lora": lora and getattr(lora, "lora_dtype", None),
    }
    if "longrope" in json.dumps(config):  # its factors are chosen by the longest context
        fields["max_model_len"] = model.max_model_len
    return config_digest({name: plain(value) for name, value in fields.items()})


def groups_fields(kv_cache_config: Any) -> Fields:
    """What each KV cache group keeps."""
    groups = [[[*group.layer_names], repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups]
    return {"groups": groups}


def weights_of(vllm_config: Any, setting: str, began_s: float = math.inf, find: Find = in_hub_cache) -> str:
    """What tells the weights apart, a draft model's too: the operator's name for them, or a fingerprint of their files.
    If these are newer than the process, which `began_s`, the weights are like no others.

    ConfigError: the weights are not on this machine, and the operator has to name them.
    """
    if setting not in ("", READ_ALL):
        return f"named {setting}"
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    models = [model] if drafts is None or drafts.model == model.model else [model, drafts]
    folders = [local_files(each.model, each.revision, load.download_dir, find) for each in models]
    found = [weights_fingerprint(folder, whole=setting == READ_ALL) for folder in folders]
    if any(replaced_since(folder, began_s) for folder in folders):
        found.append(f"or others, {os.urandom(16).hex()}")
    return " ".join(found)


def plain(value: Any) -> object:
    """`value` as JSON has it: numbers, texts, lists and dictionaries; of other objects their type and text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(each), sort_keys=True) for each in value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    text = f"{type(value).__qualname__} {value}"
    return type(value).__qualname__ if " at 0x" in text else text  # an address differs in every process
