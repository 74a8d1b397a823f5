"""A server's hits on a trace are those that `kvarve simulate` says beforehand, with eviction and all."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.planner import SimulationConfig, replay
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, load_model
from kvarve.reference.engine.requests import Request, Sampling
from tests.sim.conversations import conversations

MODEL, BLOCK = "builtin:tiny-hybrid", 50  # tokens of a block: pages end elsewhere
POINT = 0.01  # of the hit rate


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(MODEL)


def prompts(requests: int) -> list[list[int]]:
    """Conversations that grow and branch, as tokens of the tiny model."""
    dice, found = random.Random(7), []
    blocks: dict[int, list[int]] = {}
    for row in conversations(requests, seed=11):
        for each in row["hash_ids"]:
            blocks.setdefault(each, [dice.randrange(1900) for _ in range(BLOCK)])
        last = [dice.randrange(1900) for _ in range(dice.randrange(1, BLOCK))]
        found.append([token for each in row["hash_ids"] for token in blocks[each]] + last)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("requests", "device_mib", "host_mib"), [(500, 5, 0), (500, 5, 2)])
def test_a_server_hits_what_the_simulator_says(
    model: LoadedModel, tmp_path: Path, requests: int, device_mib: int, host_mib: int
) -> None:
    asked, trace = prompts(requests), tmp_path / "trace.jsonl"
    rows = ({"timestamp": 1000 * at, "tokens": tokens} for at, tokens in enumerate(asked))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    memory = device_mib << 20, host_mib << 20
    config = SimulationConfig(*memory, model=MODEL, page_tokens=64, chunk_tokens=256)
    simulated, unlimited = replay(trace, config), replay(trace, replace(config, device_memory=1 << 30))
    engine = Engine(model, PrefixCache(model.identity, CacheConfig(*memory, None))).start()
    try:
        cached = 0
        for prompt in asked:
            *_, last = engine.submit(Request(prompt, Sampling(1))).result()
            assert last.usage is not None, last.error
            cached += last.usage.cached
    finally:
        engine.shutdown()
    served = cached / sum(map(len, asked))
    assert 0.1 < simulated.hit_rate < unlimited.hit_rate - POINT, "memory is short"
    assert abs(served - simulated.hit_rate) < POINT, f"served {served:.1%}, simulated {simulated.hit_rate:.1%}"
