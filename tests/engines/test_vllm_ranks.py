"""kvarve in vLLM with several workers of one model: tensor-parallel ranks, pipeline stages.

Scenes of `test_vllm.py`, one request at a time, in steps of one block: tokens and logprobs are those of the same engine
without kvarve, and each restored page has the bytes that were saved, on every rank.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_process import VllmProcess, prompt
from test_vllm import same
from tiny_models import MODELS

pytestmark = pytest.mark.timeout(1200)

LAYOUTS = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2, "worker_cls": "rank_worker.Staged"},
}
LAYOUTS["tp-pp"] = LAYOUTS["tp"] | LAYOUTS["pp"]
SHORT = [("gemma3", "tp")]
PLACES = [
    pytest.param((model, layout), id=f"{model}-{layout}", marks=[] if (model, layout) in SHORT else pytest.mark.long)
    for layout in LAYOUTS
    for model in ("gemma3", "qwen3_5_wide", "gpt_oss", "qwen3_one_head")
    if (model, layout) != ("qwen3_one_head", "pp") and (layout != "tp-pp" or model == "gemma3")
]
LONG, TAIL = prompt(1300, 1), prompt(1200, 2)
ROUNDS, PROMPTS = 20, [prompt(1300, 11), prompt(1300, 12)]
Start = Callable[..., VllmProcess]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model, and how it is divided."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def begin(start: Start, place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start an engine without kvarve, or with it; these are on one storage."""
    model, layout = place
    folder = tmp_path_factory.mktemp("storage")
    extra = {
        "host_memory": "96MiB",
        "storage": f"file://{folder}/pages?capacity=64MiB",
        "storage_deadline_s": 5.0,
        "storage_wait": "all",
    }
    more = LAYOUTS[layout] | {
        "num_gpu_blocks_override": MODELS[model].blocks * 2,
        "max_model_len": 4096,
        "worker_extension_cls": "rank_worker.RankWorker",
    }

    def started(seam: str) -> VllmProcess:
        return start(model, seam, program="vllm_ranks.py", more=more, extra=extra)

    return started


@pytest.fixture(scope="module")
def alone(begin: Start, place: tuple[str, str]) -> dict[str, Any]:
    """What the engine answers without kvarve."""
    engine = begin("plain")
    found: dict[str, Any] = {"cold": engine.ask(LONG), "device": engine.ask(LONG)}
    found |= {"longer": engine.ask(LONG + TAIL)}
    engine.close()
    return found


@pytest.fixture(scope="module")
def engine(begin: Start, alone: dict[str, Any]) -> Iterator[VllmProcess]:
    engine = begin("connector")
    yield engine
    engine.close()


def sound(engine: VllmProcess) -> dict[str, Any]:
    about = engine.about()
    assert about["wrong"] == [], "a restored page has other bytes than the one that was saved"
    assert all(about["restored"]), "a rank has restored nothing"
    assert about["left"] == 0
    return about


def test_a_prompt_is_answered_as_without_kvarve_from_the_device_the_host_and_storage(
    engine: VllmProcess, alone: dict[str, Any]
) -> None:
    assert same(engine.ask(LONG), alone["cold"])
    assert same(engine.ask(LONG), alone["device"])
    for source in ("reset", "forget"):
        engine.call(source)
        found = engine.ask(LONG)
        assert found["cached"] == alone["device"]["cached"] > 0, source
        assert same(found, alone["device"]), source
    engine.call("forget")
    longer = engine.ask(LONG + TAIL)
    assert longer["cached"] == alone["device"]["cached"] and same(longer, alone["longer"])
    sound(engine)


def test_what_all_ranks_hold_is_stored_once_and_what_each_has_a_part_of_by_each(
    engine: VllmProcess, place: tuple[str, str]
) -> None:
    about = sound(engine)
    replicated = {replicated for _, replicated in about["pools"]}
    assert replicated == {place == ("qwen3_one_head", "tp")}
    stored, each = about["stats"]["stored"], 2 if "tp" in place[1] and replicated == {False} else 1
    assert {*about["objects"]} == {stored * each}, "a storage counts the objects of one stage"


@pytest.mark.parametrize("how", ["lost", "stall", pytest.param("dead", marks=pytest.mark.long)])
def test_trouble_of_one_ranks_storage_costs_hits_only(engine: VllmProcess, alone: dict[str, Any], how: str) -> None:
    engine.call("forget")
    engine.call("fault", rank=1, how=how)
    assert same(engine.ask(LONG), alone["cold"])
    engine.call("recover")
    engine.call("forget")
    found = engine.ask(LONG)
    assert found["cached"] == alone["device"]["cached"] and same(found, alone["device"])
    sound(engine)


@pytest.mark.long
def test_pages_survive_a_restart(begin: Start, engine: VllmProcess, alone: dict[str, Any]) -> None:
    engine.ask(LONG)
    engine.call("forget")
    other = begin("connector")
    found = other.ask(LONG)
    assert found["cached"] == alone["device"]["cached"] and same(found, alone["device"])
    sound(other)
    other.close()


@pytest.mark.long
@pytest.mark.parametrize("model", ["gemma3", "qwen3_5_wide"])
def test_the_tier_below_vllms_host_memory_keeps_the_bytes_of_both_ranks(
    start: Start, model: str, tmp_path: Path
) -> None:
    tier = {"type": "WatchedTier", "module_path": "tier_worker", "storage": f"file://{tmp_path}?capacity=64MiB"}
    extra = {"cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]}
    more = LAYOUTS["tp"] | {"num_gpu_blocks_override": MODELS[model].blocks * 2, "max_model_len": 4096}
    plain, *ours = (
        partial(start, model, seam, program="vllm_ranks.py", more=more, extra=extra)
        for seam in ("plain", "tiering", "tiering")
    )
    engine = plain()
    expected = [engine.ask(LONG), engine.ask(LONG)]
    engine.close()
    for number, begun in enumerate(ours):
        engine = begun()
        if not number:
            assert same(engine.ask(LONG), expected[0])
        for place in ("device", "reset", "forget"):
            if place != "device":
                engine.call(place)
            found = engine.ask(LONG)
            assert same(found, expected[1]) and found["cached"] == expected[1]["cached"] > 0, place
        about = engine.about()
        assert about["wrong"] == [] and about["restored"] and not about["left"]
        engine.close()


@pytest.mark.long
def test_a_loop_of_training_gets_each_answer_from_the_weights_of_its_round(begin: Start, engine: VllmProcess) -> None:
    other = begin("plain")
    alone = other.call("rollouts", rounds=ROUNDS, prompts=PROMPTS)
    other.close()
    for found, expected in zip(engine.call("rollouts", rounds=ROUNDS, prompts=PROMPTS), alone, strict=True):
        assert all(map(same, found, expected))
        assert all(each["cached"] > 0 for each in found[2:]) and not any(each["cached"] for each in found[:2])
    assert engine.about()["wrong"] == []
