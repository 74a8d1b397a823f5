"""Hits inside of vLLM's blocks, which of a hybrid have hundreds of tokens: pages are parts of blocks.

Tokens and logprobs are those of a hit on the device of the engine without kvarve.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import VllmProcess, prompt
from test_vllm import same

pytestmark = pytest.mark.timeout(1200)

SHORT, LONG, TURN = prompt(300, 1), prompt(1000, 2), 150
Start = Callable[..., VllmProcess]
UNIT = {"num_gpu_blocks_override": 40, "max_model_len": 3072, "prefix_match_unit": 64}


def chat(engine: VllmProcess, forget: bool) -> list[int]:
    """Hit tokens of ten turns, each of which has 150 tokens more: the answer before, and what was said to it. `forget`:
    the device is emptied after each."""
    words, hits = prompt(TURN, 7), list[int]()
    for turn in range(10):
        found = engine.ask(words, tokens=20)
        hits.append(found["cached"])
        words = words + found["tokens"] + prompt(TURN - 20, 50 + turn)
        if forget:
            engine.call("reset")
    return hits


@pytest.fixture(scope="module")
def begin(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("storage")
    extra = {"host_memory": "64MiB", "storage": f"file://{folder}/pages?capacity=64MiB", "storage_wait": "all"}
    return lambda seam: start("qwen3_5", seam, chunk=768, more=UNIT, extra=extra)


@pytest.fixture(scope="module")
def alone(begin: Start) -> dict[str, Any]:
    engine = begin("plain")
    found: dict[str, Any] = {"cold": [engine.ask(each) for each in (SHORT, LONG)]}
    found["device"] = [engine.ask(each) for each in (SHORT, LONG)]
    engine.call("reset")
    found["chat"] = chat(engine, forget=False)
    engine.close()
    return found


@pytest.fixture(scope="module")
def engine(begin: Start, alone: dict[str, Any]) -> Iterator[VllmProcess]:
    engine = begin("connector")
    yield engine
    engine.close()


def test_short_prompts_hit_in_steps_of_the_unit_from_the_host_and_from_storage(
    engine: VllmProcess, begin: Start, alone: dict[str, Any]
) -> None:
    assert all(same(engine.ask(each), cold) for each, cold in zip((SHORT, LONG), alone["cold"], strict=True))
    for place in ("reset", "forget"):
        engine.call(place)
        found = [engine.ask(each) for each in (SHORT, LONG)]
        assert [each["cached"] for each in found] == [256, 960], place
        assert all(map(same, found, alone["device"])), place
    assert engine.about()["wrong"] == []


def test_ten_turns_of_a_chat_hit_from_the_host_what_they_hit_on_the_device(
    engine: VllmProcess, alone: dict[str, Any]
) -> None:
    engine.call("reset")
    hits = chat(engine, forget=True)
    assert sum(hits) >= 0.95 * sum(alone["chat"]) > 0, (hits, alone["chat"])
    assert engine.about()["wrong"] == []


@pytest.mark.long
def test_with_one_word_a_hybrid_hits_inside_of_blocks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps the states of long answers."""
    for name, value in {"KVARVE": "1", "KVARVE_STORAGE": "none", "KVARVE_HOST_MEMORY": "64MiB"}.items():
        monkeypatch.setitem(os.environ, name, value)
    engine = start("qwen3_5", chunk=768, more={"num_gpu_blocks_override": 40, "max_model_len": 3072})
    assert engine.ask(SHORT)["cached"] == 0
    answer = engine.ask(LONG, tokens=1300)["tokens"]
    engine.call("reset")
    assert engine.ask(SHORT)["cached"] == 256
    assert engine.ask(LONG + answer[:1260])["cached"] == 1920
    engine.close()


@pytest.mark.long
def test_two_ranks_hit_inside_of_blocks(start: Start, tmp_path: Path) -> None:
    """A block has 1,152 tokens there, of which each rank has some heads. The answers are those of the cold prompts:
    with workers of its own vLLM's hit on the device has other logprobs, also without kvarve."""
    more = UNIT | {"tensor_parallel_size": 2, "worker_extension_cls": "rank_worker.RankWorker"}
    extra = {"host_memory": "96MiB", "storage": f"file://{tmp_path}/pages?capacity=64MiB", "storage_wait": "all"}
    told = []
    for seam in ("plain", "connector"):
        engine = start("qwen3_5_wide", seam, program="vllm_ranks.py", chunk=1152, more=more, extra=extra)
        told.append([engine.ask(each) for each in (SHORT, LONG)])
        if seam == "connector":
            for place in ("reset", "forget"):
                engine.call(place)
                found = [engine.ask(each) for each in (SHORT, LONG)]
                assert [each["cached"] for each in found] == [256, 960], place
                assert all(map(same, found, told[0])), place
            assert engine.about()["wrong"] == []
        engine.close()
    assert all(map(same, *told))
