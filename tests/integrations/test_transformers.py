"""Transformers' own `generate`, cold and resumed from kvarve."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapt, adapted

from kvarve.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.engine.wrappers import CACHE
from kvarve.errors import Broken, ConfigError, ModelError
from kvarve.integrations.transformers import PrefixCachedModel
from kvarve.model import Tier
from kvarve.testing.models import tiny_model


def prefixes(family: str, folder: Path, model: Any = None) -> PrefixCachedModel:
    config = CacheConfig(device_memory=32 << 20, host_memory=32 << 20, storage=f"file://{folder}?capacity=64MiB")
    return PrefixCachedModel(model or tiny_model(family), config, page_tokens=16, chunk_tokens=64)


def generate(cached: PrefixCachedModel, prompt: torch.Tensor) -> list[int]:
    with cached.resume(prompt, max_new_tokens=8) as past:
        output = cached.model.generate(prompt, **{CACHE: past}, max_new_tokens=8, do_sample=False)
    return output[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss", "deepseek_v32"])
def test_generate_gives_the_same_tokens_resumed_from_any_tier(family: str, tmp_path: Path) -> None:
    prompt = torch.randint(0, 250, (1, 300), generator=torch.Generator().manual_seed(1))
    cached = prefixes(family, tmp_path)
    cold = generate(cached, prompt)
    assert cached.cached_tokens == 0 and len(cold) > 300
    for tiers in ([], [Tier.DEVICE], [Tier.DEVICE, Tier.HOST]):
        cached.cache.flush(tiers)
        assert generate(cached, prompt) == cold
        assert cached.cached_tokens == 256
    cached.close()
    again = prefixes(family, tmp_path)
    assert generate(again, prompt) == cold and again.cached_tokens == 256
    again.close()


def test_a_batch_is_refused(tmp_path: Path) -> None:
    cached = prefixes("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="one prompt"), cached.resume(torch.zeros(2, 8, dtype=torch.long)):
        pass
    cached.close()


def test_a_prompt_that_is_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    cached = prefixes("qwen3", tmp_path, tiny_model("qwen3", max_position_embeddings=299))
    with pytest.raises(ConfigError, match="300 tokens is longer than the 299 of this model"):
        generate(cached, PROMPT)
    assert not cached.cache.scheduler.core.leases
    cached.close()


PROMPT = torch.randint(0, 250, (1, 300), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen3", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ("qwen3", {"rms_norm_eps": 1e-3}),
        ("gpt_oss", {"sliding_window": 9}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
        ("gemma3", {"query_pre_attn_scalar": 64}),
    ],
    ids=["rope-theta", "norm-epsilon", "window", "layer-types", "attention-scale"],
)
def test_a_model_that_differs_in_its_config_alone_is_given_no_page_of_the_other(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    one, other = tiny_model(family), tiny_model(family, **changed)
    other.load_state_dict(one.state_dict())
    said = {}
    for name, model in (("one", one), ("other", other)):
        cached = prefixes(family, tmp_path, model)
        with torch.no_grad():
            alone = model.generate(PROMPT, max_new_tokens=8, do_sample=False)[0].tolist()
        said[name] = generate(cached, PROMPT)
        assert cached.cached_tokens == 0 and said[name] == alone
        cached.close()
    again = prefixes(family, tmp_path, one)
    assert generate(again, PROMPT) == said["one"] and again.cached_tokens == 256
    again.close()


def test_an_adapter_that_is_switched_later_is_refused_and_nothing_is_read_or_kept(tmp_path: Path) -> None:
    model = adapt(tiny_model("qwen3"), "poet", "lawyer")
    cached = prefixes("qwen3", tmp_path, model)
    poem = generate(cached, PROMPT)
    assert cached.cache.settle(30)
    for layer in adapted(model):
        layer.set_adapter("lawyer")
    before = cached.cache.stats()
    with pytest.raises(ModelError, match=r"its adapters are lawyer \(.*, and were poet \("):
        generate(cached, PROMPT)
    assert cached.cache.stats() == before, "nothing was opened, read or kept"
    cached.close()
    lawyers = prefixes("qwen3", tmp_path, model)
    brief = generate(lawyers, PROMPT)
    assert lawyers.cached_tokens == 0 and brief != poem
    lawyers.close()
    for layer in adapted(model):
        layer.set_adapter("poet")
    poets = prefixes("qwen3", tmp_path, model)
    assert generate(poets, PROMPT) == poem and poets.cached_tokens == 256
    poets.close()


def test_an_adapter_that_is_switched_while_a_prompt_is_computed_is_noticed_before_its_pages_are_kept(
    tmp_path: Path,
) -> None:
    model = adapt(tiny_model("qwen3"), "poet", "lawyer")
    cached = prefixes("qwen3", tmp_path, model)
    (first, *_), chunks = adapted(model), []

    def switch(*_: object) -> None:
        chunks.append(0)
        if len(chunks) == 2:
            first.set_adapter("lawyer")

    hook = model.model.norm.register_forward_hook(switch)
    with pytest.raises(ModelError, match="adapters"):
        generate(cached, PROMPT)
    hook.remove()
    first.set_adapter("poet")
    assert not cached.cache.scheduler.core.leases
    cold = generate(cached, PROMPT)
    assert cached.cached_tokens == 64, "the chunk before the switch"
    cached.close()
    with torch.no_grad():
        assert cold == model.generate(PROMPT, max_new_tokens=8, do_sample=False)[0].tolist()


def test_a_cache_that_has_failed_serves_no_prompt_any_more_and_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("two owners of a slot")

    config = CacheConfig(
        32 << 20, 32 << 20, f"file://{tmp_path}?capacity=64MiB", policies=Policies(write_policy="write_back")
    )
    cached = PrefixCachedModel(tiny_model("qwen3"), config, page_tokens=16, chunk_tokens=64)
    generate(cached, PROMPT)
    monkeypatch.setattr(cached.cache.scheduler.core, "claim", broken)
    with pytest.raises(Broken, match="two owners of a slot"):
        generate(cached, PROMPT + 1)
    monkeypatch.undo()
    with pytest.raises(Broken, match="the cache has failed: AssertionError: two owners of a slot"):
        generate(cached, PROMPT)
    cached.close()
    again = prefixes("qwen3", tmp_path)
    generate(again, PROMPT)
    assert again.cached_tokens == 0, "after a failed assertion no page in memory is stored"
    again.close()
