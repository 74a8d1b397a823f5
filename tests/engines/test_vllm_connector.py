"""What the connector takes of vLLM's configuration: what it refuses, and what keeps two engines' pages apart."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvarve.integrations.vllm import identity_of

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
            calculate_kv_scales=False,
            prefix_caching_hash_algo="sha256",
        ),
        parallel_config=Config(),
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
