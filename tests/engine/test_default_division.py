"""A server with README's sizes finds the conversations that its memory has slots for, and so does the replayer."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarve.config import CacheConfig
from kvarve.engine.engine import Engine
from kvarve.engine.model import LoadedModel, keeping_answers, load_model
from kvarve.engine.requests import Request, Sampling
from kvarve.prefix_cache import PrefixCache
from kvarve.simulate import SimulationConfig, replay

MIB = 1 << 20
DEVICE, HOST = 256 * MIB, 1024 * MIB  # as README serves
CONVERSATIONS, TOKENS, WHOLE = 150, 600, 512
ENOUGH = 143


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return keeping_answers(load_model("builtin:tiny-hybrid"))


def conversations() -> Iterator[list[int]]:
    dice = random.Random(7)
    for _ in range(CONVERSATIONS):
        yield [dice.randrange(1900) for _ in range(TOKENS)]


@pytest.mark.parametrize("stored", [pytest.param(False, marks=pytest.mark.long), True], ids=["memory", "storage"])
def test_150_conversations_asked_twice_find_their_whole_chunks(
    model: LoadedModel, tmp_path: Path, stored: bool
) -> None:
    storage = f"file://{tmp_path}/pages?capacity=10GiB" if stored else None
    cache = PrefixCache(model.identity, CacheConfig(DEVICE, HOST, storage))
    engine = Engine(model, cache).start()
    try:
        found: list[list[int]] = []
        for _ in range(2):
            found.append([])
            for prompt in conversations():
                (_, _, last) = engine.submit(Request(prompt, Sampling(1))).result()
                assert last.usage is not None, last.error
                found[-1].append(last.usage.cached)
        cold, warm = found
        assert not any(cold)
        assert sum(tokens == WHOLE for tokens in warm) >= ENOUGH, warm
    finally:
        engine.shutdown()


def test_the_replayer_says_the_same_of_the_same_conversations(model: LoadedModel, tmp_path: Path) -> None:
    blocks, trace = WHOLE // 64, tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 0,
            "input_length": TOKENS,
            "output_length": 1,
            "hash_ids": [blocks * 2 * at + b for b in range(9)],
        }
        for at in [*range(CONVERSATIONS)] * 2
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pools = {pool.name: pool for pool in model.layout.pools}
    report = replay(
        trace,
        SimulationConfig(
            DEVICE,
            HOST,
            kv_bytes_per_token=pools["attention"].payload_bytes // 64,
            state_bytes=pools["state"].payload_bytes,
            block_tokens=64,
            page_tokens=64,
            chunk_tokens=256,
        ),
    )
    assert sum(report.hit_tokens.values()) == CONVERSATIONS * WHOLE
