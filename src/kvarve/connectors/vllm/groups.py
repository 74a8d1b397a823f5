"""What kvarve's connector has to know of a vLLM engine: whether it can work with it, its cache groups, and all that
decides the bytes of a page."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as VLLM_VERSION
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvarve.connectors.checkpoint import began_s
from kvarve.connectors.vllm.block_plan import Group, lookback_of
from kvarve.connectors.vllm.vllm_identity import model_digest, weights_of
from kvarve.errors import ConfigError
from kvarve.pages.pools import LAYOUT_FORMAT, ModelIdentity, PoolSpec
from kvarve.reference.engine.identity import numerics, without_threads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HEADS = re.compile("(kv|key_value).*heads|num_attention_groups|n_heads_in_group")  # fields of configs


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
    for name in ("decode", "prefill"):
        if (size := getattr(parallel, f"{name}_context_parallel_size", 1)) > 1:
            raise ConfigError(
                f"{name}_context_parallel_size must be 1, as kvarve does not know blocks that are divided by tokens, "
                f"got {size}: give it to tensor parallelism"
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
    """All that decides the bytes of a page, as far as a connector can tell. Where all pools are stored by head, the
    number of ranks is none of it, nor is that of their threads.

    The grid is a page: vLLM computes a prompt in chunks that follow from its load, and its own prefix cache does not
    tell them apart either.
    """
    model, cache, ranks = config.model_config, config.cache_config, config.parallel_config.tensor_parallel_size
    by_head = all(pool.groups is not None for pool in pools)
    found = ModelIdentity(
        architecture=" ".join(model.architectures),
        weights=weights_of(config, weights, began_s()),
        dtype=str(model.dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        chunk_tokens=page_tokens,
        pools=tuple(pools),
        layout=f"{LAYOUT_FORMAT} of vllm: {'; '.join(kept)}",
        config=model_digest(config, any_tensor_parallel=by_head),
        ranks=ranks,
        quantisation=f"{model.quantization or ''} {cache.cache_dtype}".strip(),
        numerics=numerics([device], [f"vllm {VLLM_VERSION}", f"hashes {cache.prefix_caching_hash_algo}"]),
    )
    if not by_head:
        return found
    dummy = f" of {ranks} ranks" * (config.load_config.load_format == "dummy")  # each has numbers of its own
    return replace(found, weights=found.weights + dummy, numerics=f"{without_threads(found.numerics)}, hits rounded")


def layout_of(spec: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """How the bytes of a group's blocks lie, for the identity."""
    found = []
    for name, tensor in tensors.items():  # a pipeline stage may have others than that of another engine
        strides = tensor.stride()
        order = sorted(range(1, tensor.dim()), key=lambda axis: -strides[axis])
        found.append(f"{name} {tuple(tensor.shape[1:])} {tensor.dtype} {order}")
    return f"{spec.kv_cache_spec!r} {found}"


def device_of(tensors: list[Any]) -> torch.device:
    """That of an engine's layers, each of which has one tensor or several."""
    first = tensors[0]
    return first.device if isinstance(first, torch.Tensor) else device_of([*first])


def replicated(spec: Any, config: "VllmConfig") -> bool:
    """Whether there are several tensor-parallel ranks, and all hold the same bytes of a group."""
    return config.parallel_config.tensor_parallel_size > 1 and same_on_all_ranks(spec, config)


def same_on_all_ranks(spec: Any, config: "VllmConfig") -> bool:
    """Whether any number of ranks would hold the same bytes of a group. vLLM says so of MLA latents, index keys and
    some states, and not of a single KV head, of which each rank has a copy."""
    if layers := getattr(spec, "kv_cache_specs", None):  # whose blocks have other sizes
        return all(same_on_all_ranks(each, config) for each in layers.values())
    if getattr(spec, "max_tp_shards", None) == 1 or getattr(spec, "tp_replicated", False):
        return True
    if get_kv_cache_spec_kind(spec).value == "mamba" or spec.num_kv_heads != 1:
        return False
    return kv_heads(config) == 1


def kv_heads(config: "VllmConfig") -> int | None:
    """How many KV heads the model's layers have, and a draft model's; None if some may have another number. With as
    many ranks or more each rank has one head of any layer, which is another one if the layer has more."""
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    found = set[int]()
    for model in filter(None, (config.model_config, draft)):
        found |= {*_heads_in({"kv_heads": model.get_total_num_kv_heads()}), *_heads_in(model.hf_text_config.to_dict())}
    return found.pop() if len(found) == 1 else None


def _heads_in(value: Any, named: bool = False) -> Iterator[int]:
    """All numbers of KV heads that stand in a config, or by which it says them. `named`: the value is one."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _heads_in(each, bool(HEADS.search(str(name))))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _heads_in(each, named)
    elif named and isinstance(value, int) and value:
        yield value


def on_all_stages(good: bool) -> bool:
    """Whether something is so on all pipeline stages. Each has to ask."""
    return all(_of_stages(good))


def largest_of_stages(pools: list[PoolSpec]) -> list[PoolSpec]:
    """By pool, the one of the pipeline stage whose pages are largest: by it all workers divide their memory."""
    return [_largest(each) for each in zip(*_of_stages(pools), strict=True)]


def _of_stages(value: Any) -> list[Any]:
    """What each pipeline stage has told."""
    stages = get_pp_group()
    found = [value] * stages.world_size
    if stages.world_size > 1:
        torch.distributed.all_gather_object(found, value, group=stages.cpu_group)
    return found


def _largest(pools: Iterable[PoolSpec]) -> PoolSpec:
    return max(pools, key=lambda pool: pool.payload_bytes)


def identity_of_all(identities: Sequence[ModelIdentity], names: Sequence[str]) -> ModelIdentity:
    """The identity by which the scheduler names pages, of which each worker has a part; its pools have these names."""
    first, layouts = identities[0], sorted({each.layout for each in identities})
    largest = map(_largest, zip(*(it.pools for it in identities), strict=True))
    pools = tuple(replace(pool, name=name) for pool, name in zip(largest, names, strict=True))
    return replace(first, layout=" | ".join(layouts), pools=pools)
