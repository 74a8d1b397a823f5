"""Prompts that leave memory idle when it is divided once are found again when pools share it."""

import random

import pytest

from kvarve.cache import worker
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.slots.extents import Cut
from kvarve.memory.device_memory import driver_of
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import load_model
from kvarve.reference.engine.requests import Request, Sampling
from kvarve.reference.server.serve_settings import PAGE_TOKENS, Settings
from pretend_gpu import PretendDriver

PROMPTS, TOKENS = 120, 1030


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "pretend", "cuda"])
def test_120_prompts_asked_twice_of_a_server_with_default_flags_are_95_percent_cached(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = PretendDriver(granule=1 << 21)
    if device == "pretend":
        monkeypatch.setattr(worker, "driver_of", lambda _: driver)
    where = "cuda" if device == "cuda" else "cpu"
    if where == "cuda" and driver_of(where) is None:
        pytest.skip("no GPU")
    settings = Settings()
    model = load_model(settings.model, device=where, page_tokens=PAGE_TOKENS, chunk_tokens=settings.chunk_tokens)
    cache = PrefixCache(model.identity, settings.cache, device=where)
    assert all(isinstance(each, Cut) for each in cache.worker.slots.values())
    engine = Engine(model, cache, exact=True).start()
    dice, cached = random.Random(7), [0, 0]
    prompts = [[dice.randrange(1900) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    try:
        for turn in range(2):
            for prompt in prompts:
                (_, _, last) = engine.submit(Request(prompt, Sampling(1))).result()
                assert last.usage is not None, last.error
                cached[turn] += last.usage.cached
        assert cached[0] == 0
        assert cached[1] >= 0.95 * PROMPTS * TOKENS, cached[1] / PROMPTS / TOKENS
        assert driver.moves > 20 or device != "pretend"
    finally:
        engine.shutdown()
