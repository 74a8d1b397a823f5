"""Transformers' own `generate`, cold and resumed from kvarve."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapt, adapted
from transformers import GenerationConfig

from kvarve.cache.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.errors import Broken, ConfigError, ModelError
from kvarve.pages.pools import Tier
from kvarve.transformers import PrefixCachedModel, Usage
from tests.sim.models import tiny_model

PROMPT = torch.randint(0, 250, (1, 84), generator=torch.Generator().manual_seed(1))
NEW, HIT = 3, 64

Make = Callable[..., PrefixCachedModel]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[PrefixCachedModel] = []

    def prefixes(model: Any, write_policy: str = "through") -> PrefixCachedModel:
        policies = Policies(write_policy=write_policy)
        config = CacheConfig(8 << 20, 8 << 20, f"file://{tmp_path}?capacity=16MiB", policies=policies)
        made.append(PrefixCachedModel(model, config, page_tokens=16, chunk_tokens=32))
        return made[-1]

    yield prefixes
    for each in made:
        each.close()


def generate(cached: PrefixCachedModel, prompt: torch.Tensor = PROMPT) -> list[int]:
    output = cached.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    return output[0].tolist()  # type: ignore[no-any-return]


def alone(model: Any) -> list[int]:
    with torch.no_grad():
        return model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)[0].tolist()  # type: ignore[no-any-return]


LONG = [pytest.param(family, marks=pytest.mark.long) for family in ("qwen3", "gpt_oss", "deepseek_v32")]


@pytest.mark.parametrize("family", ["qwen3_5", *LONG])
def test_generate_gives_the_same_tokens_resumed_from_any_tier(family: str, make: Make) -> None:
    model = tiny_model(family)
    cached = make(model)
    cold = generate(cached)
    assert cached.usage == Usage(84, 0, 0, 0) and cold == alone(model)
    for name, tiers in {"device": [], "host": [Tier.DEVICE], "storage": [Tier.DEVICE, Tier.HOST]}.items():
        cached.cache.flush(tiers)
        assert generate(cached) == cold and cached.usage.cached_tokens == HIT == getattr(cached.usage, name)


def test_a_batch_and_a_prompt_that_is_longer_than_the_model_are_refused(make: Make) -> None:
    cached = make(tiny_model("qwen3", max_position_embeddings=83))
    three = GenerationConfig(do_sample=True, num_return_sequences=3)
    for prompt, settings, told in (
        (PROMPT.expand(2, 84), {}, r"input_ids must be one prompt of shape \[1, n\], got \[2, 84\]: give each prompt"),
        (PROMPT[0], {}, r"must be one prompt of shape \[1, n\], got \[84\]"),
        (PROMPT, {"attention_mask": PROMPT > 9}, "attention_mask must be all ones"),
        (PROMPT, {"num_beams": 2}, "num_beams must be 1, got 2"),
        (PROMPT, {"generation_config": three}, "num_return_sequences must be 1, got 3"),
    ):
        with pytest.raises(ConfigError, match=told):
            cached.generate(prompt, **settings)
    with pytest.raises(ConfigError, match="at most 83 tokens for this model, got 84"):
        generate(cached)
    assert not cached.cache.scheduler.core.leases


def test_a_model_that_differs_in_its_config_alone_is_given_no_page_of_the_other(make: Make) -> None:
    one, other = tiny_model("qwen3"), tiny_model("qwen3", rms_norm_eps=1e-3)
    other.load_state_dict(one.state_dict())
    for model, hit in ((one, 0), (other, 0), (one, HIT)):
        cached = make(model)
        assert generate(cached) == alone(model) and cached.usage.cached_tokens == hit
        cached.close()


def test_an_adapter_that_is_switched_later_is_refused_and_nothing_is_read_or_kept(make: Make) -> None:
    model = adapt(tiny_model("qwen3"), "poet", "lawyer")
    cached = make(model)
    poem = generate(cached)
    assert cached.cache.settle(30)
    for layer in adapted(model):
        layer.set_adapter("lawyer")
    before = cached.cache.stats()
    with pytest.raises(ModelError, match=r"its adapters are lawyer \(.*, and were poet \("):
        generate(cached)
    assert cached.cache.stats() == before, "nothing was opened, read or kept"
    cached.close()
    lawyers = make(model)
    assert generate(lawyers) != poem and lawyers.usage.cached_tokens == 0


def test_an_adapter_that_is_switched_while_a_prompt_is_computed_is_noticed_before_its_pages_are_kept(
    make: Make,
) -> None:
    model = adapt(tiny_model("qwen3"), "poet", "lawyer")
    cached = make(model)
    (first, *_), chunks = adapted(model), []

    def switch(*_: object) -> None:
        chunks.append(0)
        if len(chunks) == 2:
            first.set_adapter("lawyer")

    hook = model.model.norm.register_forward_hook(switch)
    with pytest.raises(ModelError, match="adapters"):
        generate(cached)
    hook.remove()
    first.set_adapter("poet")
    assert not cached.cache.scheduler.core.leases
    assert generate(cached) == alone(model)
    assert cached.usage.cached_tokens == 32, "the chunk before the switch"


def test_a_cache_that_has_failed_serves_no_prompt_any_more_and_stores_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("two owners of a slot")

    model = tiny_model("qwen3")
    cached = make(model, write_policy="back")
    generate(cached)
    monkeypatch.setattr(cached.cache.scheduler.core, "claim", broken)
    with pytest.raises(Broken, match="two owners of a slot"):
        generate(cached, PROMPT + 1)
    monkeypatch.undo()
    with pytest.raises(Broken, match="the cache has failed: AssertionError: two owners of a slot"):
        generate(cached)
    cached.close()
    again = make(model)
    generate(again)
    assert again.usage.cached_tokens == 0, "after a failed assertion no page in memory is stored"
