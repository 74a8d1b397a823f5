"""What the connector takes of vLLM's configuration: what it refuses, and what keeps two engines' pages apart."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvarve.integrations.vllm import check_engine, identity_of

from kvarve.errors import ConfigError
from kvarve.memory.engine_arena import pool_of


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def config(**changes: Any) -> Any:
    """As far as the connector reads vLLM's, with some fields changed by their path, such as `model_config__dtype`."""
    hf_config = Config(model_type="m", hidden_size=64, rope={"rope_type": "longrope"}, vision_config={"depth": 4})
    found = Config(
        model_config=Config(
            hf_config=hf_config,
            architectures=["MForCausalLM"],
            dtype="bfloat16",
            quantization=None,
            quantization_config=None,
            max_model_len=4096,
            enforce_eager=False,
        ),
        cache_config=Config(
            cache_dtype="auto",
            enable_prefix_caching=True,
            calculate_kv_scales=False,
            prefix_caching_hash_algo="sha256",
        ),
        parallel_config=Config(world_size=1, decode_context_parallel_size=1),
        kv_transfer_config=Config(kv_role="kv_both", kv_load_failure_policy="recompute"),
    )
    for path, value in changes.items():
        *places, last = path.split("__")
        it = found
        for place in places:
            it = getattr(it, place)
        setattr(it, last, value)
    return found


def identity(**changes: Any) -> Any:
    return identity_of(config(**changes), [pool_of("0-full", [64], None)], 16, [], "v1", torch.device("cpu"))


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__hf_config__vision_config": {"depth": 5}},
        {"model_config__max_model_len": 8192},
        {"model_config__quantization_config": {"bits": 4}},
        {"model_config__enforce_eager": True},
        {"cache_config__calculate_kv_scales": True},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"lora_config": Config(lora_dtype="float32")},
        {"speculative_config": Config(method="eagle", model="d", num_speculative_tokens=3)},
        {"use_v2_model_runner": True},
    ],
    ids=str,
)
def test_what_may_change_a_byte_changes_the_identity(change: dict[str, Any]) -> None:
    assert identity() == identity()
    assert identity(**change) != identity()


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"cache_config__enable_prefix_caching": False}, "remove --no-enable-prefix-caching"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "give 'kv_both'"),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "give 'recompute'"),
        ({"parallel_config__world_size": 2}, "OffloadingConnector"),
    ],
    ids=str,
)
def test_settings_with_which_the_connector_cannot_work_are_refused(change: dict[str, Any], remedy: str) -> None:
    check_engine(config())
    with pytest.raises(ConfigError, match=remedy):
        check_engine(config(**change))
