"""A cache says when its memory is divided badly, and divides it by how often states are kept."""

import logging

import pytest
from filling import CHUNK, PAGE, POOLS, Clock, a_config, an_identity, prompt, run

from kvarve.balance import LOOK_S, SAY_S
from kvarve.config import spacing
from kvarve.model import Tier
from kvarve.prefix_cache import PrefixCache
from kvarve.worker import check

SEED = 11


def serve(cache: PrefixCache, prompts: int, seed: int, pages: float = 2.5) -> None:
    for number in range(prompts):
        run(cache, prompt(pages, seed=1000 * seed + number))


def test_states_that_are_evicted_beside_idle_attention_are_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    cache = PrefixCache(an_identity(), a_config(host=0, tokens_per_snapshot=100_000), clock=clock)
    stats = cache.stats()
    states = int(stats["slots.device.state"])
    assert states * 10 < stats["slots.device.attention"] and stats["tokens_per_snapshot"] == 100_000
    caplog.set_level(logging.WARNING)
    for look in range(4):
        serve(cache, 2 * states, seed=SEED + look)
        clock.now += LOOK_S
        cache.step()
    (said,) = caplog.messages
    assert said.startswith("device: pool window evicted ")
    assert said.endswith("a --tokens-per-snapshot below 100,000 divides this memory better")
    assert cache.stats()["imbalance.device.state"] == 1 and cache.stats()["imbalance.device.attention"] == 0
    serve(cache, 2 * states, seed=SEED + 9)
    clock.now += SAY_S
    cache.step()
    assert len(caplog.messages) == 2
    cache.shutdown(5)


def test_a_memory_that_is_divided_by_the_model_is_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    cache = PrefixCache(an_identity(), a_config(device=30_000, host=0), clock=clock)
    caplog.set_level(logging.WARNING)
    for look in range(4):
        serve(cache, 10, seed=SEED + look, pages=18.5)
        clock.now += LOOK_S
        cache.step()
    assert cache.stats()["evicted.device.state"] > 0 and not caplog.messages
    cache.shutdown(5)


def test_states_that_are_kept_more_often_have_more_room() -> None:
    identity, every = an_identity(), 2 * CHUNK
    wide = a_config(tokens_per_snapshot=64 * CHUNK)
    rare, often = check(identity, wide), check(identity, a_config(tokens_per_snapshot=64 * CHUNK, snapshot_every=every))
    assert often == check(identity, a_config(tokens_per_snapshot=every))
    for tier in (Tier.DEVICE, Tier.HOST):
        (_, _, few), (pages, _, many) = rare[tier], often[tier]
        assert many > 15 * few and many * every >= 0.9 * pages * PAGE
    assert spacing(POOLS, PAGE, CHUNK, asked=CHUNK // 2, every=every) == CHUNK // 2, (
        "an explicit spacing is not widened"
    )
