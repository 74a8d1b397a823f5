"""Transformers' own `generate`, cold and resumed from kvarve."""

from pathlib import Path

import pytest
import torch

from kvarve.config import CacheConfig
from kvarve.errors import ConfigError
from kvarve.integrations.transformers import PrefixCachedModel
from kvarve.model import Tier
from kvarve.testing.models import tiny_model


def prefixes(family: str, folder: Path) -> PrefixCachedModel:
    config = CacheConfig(device_memory=32 << 20, host_memory=32 << 20, storage=f"file://{folder}?capacity=64MiB")
    return PrefixCachedModel(tiny_model(family), "seed 0", config, page_tokens=16, chunk_tokens=64)


def generate(cached: PrefixCachedModel, prompt: torch.Tensor) -> list[int]:
    with cached.resume(prompt, max_new_tokens=8) as past:
        output = cached.model.generate(prompt, past_key_values=past, max_new_tokens=8, do_sample=False)
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


def test_a_batch_and_nameless_weights_are_refused(tmp_path: Path) -> None:
    cached = prefixes("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="one prompt"), cached.resume(torch.zeros(2, 8, dtype=torch.long)):
        pass
    cached.close()
    with pytest.raises(ConfigError, match="name"):
        PrefixCachedModel(cached.model, "", cached.cache.config)
