"""Prompts that leave memory idle when it is divided once are found again when pools share it."""

import random

from kvarve.core.extents import Cut
from kvarve.engine.engine import Engine
from kvarve.engine.model import keeping_answers, load_model
from kvarve.engine.requests import Request, Sampling
from kvarve.prefix_cache import PrefixCache
from kvarve.server.settings import Settings

PROMPTS, TOKENS = 120, 1030


def test_120_prompts_asked_twice_of_a_server_with_default_flags_are_95_percent_cached() -> None:
    settings = Settings()
    model = keeping_answers(
        load_model(settings.model, page_tokens=settings.page_tokens, chunk_tokens=settings.chunk_tokens)
    )
    cache = PrefixCache(model.identity, settings.cache)
    assert all(isinstance(each, Cut) for each in cache.worker.slots.values())
    engine = Engine(model, cache).start()
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
    finally:
        engine.shutdown()
