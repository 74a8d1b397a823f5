"""What kvarve's plug-in does around an engine's configuration, and that engines without kvarve are left alone."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    from kvarve.connectors.vllm import plugin
    from kvarve.connectors.vllm.groups import replicated

import torch


def config(connector: str | None = plugin.NAME, caching: bool = True, parallel: int = 1) -> Any:
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_load_failure_policy="recompute")
    images = SimpleNamespace(allow_missing_mm_embeddings=True, enable_mm_embeds=True)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(is_hybrid=True, multimodal_config=images),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, prefix_cache_retention_interval=0),
        parallel_config=SimpleNamespace(decode_context_parallel_size=parallel, tensor_parallel_size=2),
    )


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARVE", "1")


@pytest.mark.parametrize("other", [{"caching": False}, {"parallel": 2}], ids=str)
def test_with_one_word_an_engine_that_kvarve_cannot_serve_starts_without_it(other: dict[str, Any]) -> None:
    """vLLM itself turns prefix caching off, for an encoder and for some models."""
    found = config(**other)
    plugin._made(SimpleNamespace(enable_mm_embeds=False, has_kvarve_unasked=True), found)
    assert found.kv_transfer_config is None and found.cache_config.prefix_cache_retention_interval == 0


@pytest.mark.parametrize("enabled", [False, True])
def test_a_cache_does_not_make_vllm_accept_embeddings_instead_of_images(enabled: bool) -> None:
    found, images = config(), config(connector="ExampleConnector")
    for each in (found, images):
        plugin._made(SimpleNamespace(enable_mm_embeds=enabled), each)
    assert vars(found.model_config.multimodal_config) == {
        "allow_missing_mm_embeddings": False,
        "enable_mm_embeds": enabled,
    }
    assert images.model_config.multimodal_config.allow_missing_mm_embeddings


def test_an_engine_without_kvarve_is_not_asked_what_an_older_vllm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin._unit(SimpleNamespace(vllm_config=config(connector="ExampleConnector")), [])
    monkeypatch.delenv("KVARVE")
    plugin._unit(SimpleNamespace(vllm_config=config()), [])


def test_a_connector_that_a_program_names_by_a_dictionary_has_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVARVE")
    given = {"kv_connector": plugin.NAME, "kv_role": "kv_both", "kv_connector_extra_config": {}}
    args = SimpleNamespace(kv_transfer_config=given, data_parallel_size_local=None, data_parallel_size=1)
    plugin._settings(args)
    assert args.kv_transfer_config.kv_connector_extra_config["host_memory"] > 0


def test_layers_of_other_sizes_are_replicated_if_each_of_them_is() -> None:
    """As MLA latents and the keys of an indexer in one group."""
    layers = {
        str(size): FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=size, dtype=torch.uint8, max_tp_shards=1)
        for size in (64, 128)
    }
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    assert replicated(both, config())
