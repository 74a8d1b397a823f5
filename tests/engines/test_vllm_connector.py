"""What the connector takes of vLLM's configuration: what it refuses, and what keeps two engines' pages apart."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvarve.connectors.vllm.block_plan import Group
    from kvarve.connectors.vllm.connector import KvarveConnector, WorkerSide, check_engine, identity_of
    from kvarve.connectors.vllm.groups import kv_heads, replicated
    from kvarve.connectors.vllm.kv_heads import _heads
    from kvarve.connectors.vllm.vllm_metrics import KvarveStats

from kvarve.connectors.engine_interfaces import engines
from kvarve.errors import ConfigError
from kvarve.memory.engine_arena import pool_of
from kvarve.pages.pools import HeadGroups


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def config(**changes: Any) -> Any:
    """As far as the connector reads vLLM's, with some fields changed by their path, such as `model_config__dtype`."""
    model: dict[str, Any] = {"hf_config": Config(hidden_size=64), "architectures": ["M"], "dtype": "bfloat16"}
    found = Config(
        model_config=Config(**model, quantization=None, max_model_len=4096),
        cache_config=Config(cache_dtype="auto", enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
        parallel_config=Config(tensor_parallel_size=1, decode_context_parallel_size=1),
        kv_transfer_config=Config(kv_role="kv_both", kv_load_failure_policy="recompute"),
    )
    for path, value in changes.items():
        place, _, last = path.rpartition("__")
        setattr(getattr(found, place) if place else found, last, value)
    return found


def test_the_model_and_the_names_of_pages_are_in_the_identity() -> None:
    """What of a model counts: tests/connectors/test_tier_identity.py."""

    def identity(**changes: Any) -> Any:
        return identity_of(config(**changes), [pool_of("0-full", [64], None)], 16, [], "v1", torch.device("cpu"))

    assert identity() == identity()
    assert identity(cache_config__prefix_caching_hash_algo="sha256_cbor") != identity()
    assert identity(model_config__hf_config=Config(hidden_size=65)) != identity()


def test_pages_that_are_stored_by_head_are_those_of_any_number_of_ranks() -> None:
    def fingerprint(ranks: int, heads: int, load_format: str = "auto", by_head: bool = True) -> bytes:
        found = config(parallel_config__tensor_parallel_size=ranks, load_config=Config(load_format=load_format))
        pool = pool_of("0-full", [64 * heads], None, heads=heads)
        pool = replace(pool, groups=HeadGroups(4, ((0, (1,)),)) if by_head else None)
        return identity_of(found, [pool], 16, [], "v1", torch.device("cpu")).fingerprint()

    assert fingerprint(1, 4) == fingerprint(2, 2) == fingerprint(4, 1) == fingerprint(8, 1)
    assert fingerprint(2, 2) != fingerprint(2, 2, by_head=False) != fingerprint(4, 1, by_head=False)
    assert fingerprint(2, 2, "dummy") != fingerprint(4, 1, "dummy"), "their weights differ by rank"


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"cache_config__enable_prefix_caching": False}, "remove --no-enable-prefix-caching"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "must be 'kv_both'"),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "must be 'recompute'"),
        ({"parallel_config__decode_context_parallel_size": 2}, "give it to tensor parallelism"),
    ],
    ids=str,
)
def test_settings_with_which_the_connector_cannot_work_are_refused(change: dict[str, Any], remedy: str) -> None:
    check_engine(config())
    with pytest.raises(ConfigError, match=remedy):
        check_engine(config(**change))


def test_beside_other_connectors_its_statistics_have_the_name_that_vllm_knows() -> None:
    side = KvarveConnector.__new__(KvarveConnector, config(), KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]
    side.get_kv_connector_stats = lambda: KvarveStats(data={"pages": 1})
    beside: Any = object.__new__(MultiConnector)
    beside._connectors = [side]
    assert [*beside.get_kv_connector_stats().data] == [KvarveConnector.__name__]


def test_what_all_ranks_hold_is_told_by_the_group_and_by_every_number_of_heads() -> None:
    """vLLM's CPU build has no prefix caching for MLA, so its groups are tried here alone."""

    def spec(heads: int) -> Any:
        return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=32, dtype=torch.float32)

    def of(spec: Any, ranks: int = 2, **heads: int) -> bool:
        model = {"hf_text_config": Config(**heads), "get_total_num_kv_heads": lambda: heads["num_key_value_heads"]}
        found = config(parallel_config__tensor_parallel_size=ranks)
        found.model_config = Config(**model)
        return replicated(spec, found)

    assert of(SimpleNamespace(max_tp_shards=1)) and of(SimpleNamespace(tp_replicated=True))
    assert of(spec(1), num_key_value_heads=1) and not of(spec(1), ranks=1, num_key_value_heads=1)
    assert not of(spec(1), num_key_value_heads=2), "each rank has one of two"
    assert not of(spec(1), num_key_value_heads=1, num_global_key_value_heads=4), "other layers have several"


def text_model(total: int, **fields: Any) -> Any:
    return Config(hf_text_config=Config(**fields), get_total_num_kv_heads=lambda: total)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"num_key_value_heads": 4}, 4),
        ({"n_head_kv": 4}, 4),
        ({"num_key_value_heads": [4, 4, 4]}, 4),
        ({"num_key_value_heads": [4, 4, 8]}, None),
        ({"block_configs": [{"attention": {"n_heads_in_group": heads}} for heads in (4, 8)]}, None),
        ({"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 8}}, None),
        ({"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 4}}, 4),
        ({"num_key_value_heads": 4, "per_layer_config": {1: {"num_key_value_heads": 2}}}, None),
    ],
    ids=str,
)
def test_layers_with_other_numbers_of_heads_are_seen_wherever_a_config_has_them(
    fields: dict[str, Any], found: int | None
) -> None:
    assert kv_heads(config(model_config=text_model(4, **fields))) == found


def test_a_draft_with_other_numbers_of_heads_has_other_heads_on_each_rank() -> None:
    """With a head or two of the model's on each of four ranks, a rank has one of the draft's four."""

    def of(model: int, draft: int | None, **fields: Any) -> Any:
        found = None if draft is None else text_model(draft, **fields)
        return config(model_config=text_model(model), speculative_config=Config(draft_model_config=found))

    assert kv_heads(of(2, None)) == kv_heads(of(2, 2)) == kv_heads(of(2, 0)) == 2
    assert kv_heads(of(2, 4)) is kv_heads(of(2, 2, num_key_value_heads=4)) is None
    one = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    for draft in (1, 4):
        found = of(1, draft)
        found.parallel_config.tensor_parallel_size = 4
        assert replicated(one, found) is (draft == 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quant_config": Config(kv_cache_scheme={"strategy": "attn_head"})}, "scales of its own"),
        ({"cache_config__calculate_kv_scales": True}, "leave out --calculate-kv-scales"),
        ({}, "several numbers of KV heads"),
    ],
    ids=["scales of each head", "scales of each rank", "other heads in other layers"],
)
def test_heads_whose_bytes_differ_by_more_than_rounding_are_not_shared(changes: dict[str, Any], why: str) -> None:
    layers = {"a": SimpleNamespace(num_kv_heads=2), "b": SimpleNamespace(num_kv_heads=4)}
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    found = config(compilation_config=Config(static_forward_context=layers), **changes)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=2)
    group = Group(0, "0-full-attention", 16, None, False, "full_attention", None)
    told = _heads(found, cache, group, {name: torch.zeros(2, 2, 16, 64) for name in layers}, 16)
    assert isinstance(told, str) and why in told


def test_bytes_that_stand_for_another_stages_layers_are_on_the_device_of_this_stages() -> None:
    """A copy is of one device."""
    side: Any = object.__new__(WorkerSide)
    groups = [SimpleNamespace(layer_names=["there"])]
    side._kv_cache_config = SimpleNamespace(num_blocks=2, kv_cache_groups=groups)
    group = Group(0, "0-full-attention", 16, None, False, "full_attention", None)
    (bytes_of_each_token,) = side._layers(group, {"here": torch.empty(2, 64, device="meta")}).values()
    assert bytes_of_each_token.device == torch.device("meta") and bytes_of_each_token.shape == (2, 16)


def test_the_hooks_of_this_vllm_are_those_that_kvarve_knows() -> None:
    """`kvarve doctor` compares any other version with the same table."""
    assert not engines()["vllm"].problems(Path(vllm.__file__).parent)
