"""What kvarve's connector has to know of a vLLM engine: whether it can work with it, its cache groups, and all that
decides the bytes of a page."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as VLLM_VERSION
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvarve.connectors.checkpoint import began_s
from kvarve.connectors.vllm.block_plan import Group, lookback_of
from kvarve.connectors.vllm.vllm_identity import model_digest, weights_of
from kvarve.errors import ConfigError
from kvarve.pages.pools import LAYOUT_FORMAT, ModelIdentity
from kvarve.reference.engine.identity import numerics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def check_engine(config: "VllmConfig") -> None:
    """ConfigError for settings of the engine with which kvarve cannot work."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "kvarve needs vLLM's prefix caching, whose hashes name its pages: remove --no-enable-prefix-caching, or "
            "remove the connector"
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role must be 'kv_both', as kvarve both saves and loads, got {transfer.kv_role!r}")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError("kv_load_failure_policy must be 'recompute': by 'fail' a bad page would fail its request")
    if parallel.world_size > 1 or parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            f"kvarve's connector cannot work with {parallel.world_size} workers of one model so far: use vLLM's "
            f"OffloadingConnector with kvarve as its secondary tier"
        )


def groups_of(config: "KVCacheConfig", page_tokens: int) -> tuple[Group, ...]:
    """The groups that may be cached; kvarve's pools. ConfigError for a kind that is not known."""
    found = []
    for number in config.prefix_cacheable_group_ids:
        spec = config.kv_cache_groups[number].kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        window = get_kv_cache_spec_sliding_window(spec) or getattr(spec, "attention_chunk_size", None)
        if window is not None:
            window += getattr(spec, "extra_retained_tokens", 0)
        name = f"{number}-{kind.replace('_', '-')}"[:32]
        lookback = lookback_of(kind, page_tokens, window)
        found.append(Group(number, name, spec.block_size, lookback, kind == "mamba", kind, window))
    if not found:
        raise ConfigError("kvarve cannot cache any cache group of this model: remove the connector")
    return tuple(found)


def identity_of(
    config: "VllmConfig", pools: list[Any], page_tokens: int, kept: list[str], weights: str, device: torch.device
) -> ModelIdentity:
    """All that decides the bytes of a page, as far as a connector can tell.

    The grid is a page: vLLM computes a prompt in chunks that follow from its load, and its own prefix cache does not
    tell them apart either.
    """
    model, cache = config.model_config, config.cache_config
    return ModelIdentity(
        architecture=" ".join(model.architectures),
        weights=weights_of(config, weights, began_s()),
        dtype=str(model.dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        chunk_tokens=page_tokens,
        pools=tuple(pools),
        layout=f"{LAYOUT_FORMAT} of vllm: {'; '.join(kept)}",
        config=model_digest(config),
        quantisation=f"{model.quantization or ''} {cache.cache_dtype}".strip(),
        numerics=numerics([device], [f"vllm {VLLM_VERSION}", f"hashes {cache.prefix_caching_hash_algo}"]),
    )


def layout_of(spec: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """How the bytes of a group's blocks lie, for the identity."""
    found = []
    for tensor in tensors.values():
        strides = tensor.stride()
        order = sorted(range(1, tensor.dim()), key=lambda axis: -strides[axis])
        found.append(f"{tuple(tensor.shape[1:])} {tensor.dtype} {order}")
    return f"{spec.kv_cache_spec!r} {found}"


def device_of(layers: list[dict[str, torch.Tensor]]) -> torch.device:
    return next(iter(layers[0].values())).device
