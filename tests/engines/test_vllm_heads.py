"""With rounded hits engines of other numbers of tensor-parallel ranks share pages, which are stored by KV head.

Gemma 3 has two KV heads, so that each is on two of four ranks; the other model has four.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_process import VllmProcess, prompt
from tiny_models import MODELS

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]

PROMPTS = [prompt(1300, 1), prompt(1200, 2)]
Begin = Callable[..., VllmProcess]


@pytest.fixture
def begin(start: Begin, tmp_path: Path) -> Begin:
    """Start an engine of so many ranks, all on one storage, or without kvarve."""

    def started(model: str, ranks: int, hits: str = "rounded", seam: str = "connector", stages: int = 1) -> VllmProcess:
        extra = {"host_memory": "96MiB", "storage": f"file://{tmp_path}/pages?capacity=64MiB", "storage_wait": "all"}
        more = {"num_gpu_blocks_override": MODELS[model].blocks * 2, "max_model_len": 4096}
        more |= {"tensor_parallel_size": ranks, "worker_extension_cls": "rank_worker.RankWorker"}
        if stages > 1:
            more |= {"pipeline_parallel_size": stages, "worker_cls": "rank_worker.Staged"}
        return start(model, seam, program="vllm_ranks.py", more=more, extra=extra | {"hits": hits})

    return started


def ended(engine: VllmProcess) -> dict[str, Any]:
    about = engine.about()
    assert about["wrong"] == [] and about["left"] == 0
    engine.close()
    return about


@pytest.mark.parametrize(("model", "heads"), [("qwen3_four_heads", 4), ("gemma3", 2)])
def test_what_two_ranks_have_stored_four_and_one_hit_and_two_what_four_have(
    begin: Begin, model: str, heads: int
) -> None:
    engine = begin(model, 1, seam="plain")
    cold = [engine.ask(each) for each in PROMPTS]
    again = [engine.ask(each) for each in PROMPTS]
    engine.close()
    objects = 0
    for ranks, stores, hits in ((2, [0], []), (4, [1], [0]), (2, [], [0, 1]), (1, [], [0, 1])):
        engine = begin(model, ranks)
        for number in hits:
            found = engine.ask(PROMPTS[number])
            assert found["tokens"] == again[number]["tokens"], (ranks, number)
            assert found["cached"] == again[number]["cached"] > 0, (ranks, number)
        assert {*engine.about()["objects"]} == {objects} or not hits, "what is there has been stored again"
        for number in stores:
            found = engine.ask(PROMPTS[number])
            assert found["tokens"] == cold[number]["tokens"] and not found["cached"], (ranks, number)
        about = ended(engine)
        assert {*about["heads"]} == {heads} and all(about["restored"]) == bool(hits)
        objects += about["stats"]["stored"] * heads
        assert {*about["objects"]} == {objects}, "a head's record is there once"


def test_engines_of_two_pipeline_stages_share_by_head_as_well(begin: Begin) -> None:
    for ranks, hits in ((2, False), (1, True)):
        engine = begin("gemma3", ranks, stages=2)
        assert (engine.ask(PROMPTS[0])["cached"] > 0) is hits, ranks
        assert {*ended(engine)["heads"]} == {2}


def test_exact_hits_share_nothing_with_other_numbers_of_ranks(begin: Begin) -> None:
    for ranks, hits in ((2, "rounded"), (2, "exact"), (4, "exact")):
        engine = begin("qwen3_four_heads", ranks, hits)
        assert not engine.ask(PROMPTS[0])["cached"]
        assert {*ended(engine)["heads"]} == {4 if hits == "rounded" else None}


def test_a_model_with_states_says_once_why_nothing_is_shared(begin: Begin) -> None:
    engine = begin("qwen3_5_wide", 2)
    (line,) = [line for line in engine.errors.read_text().splitlines() if "hits rounded" in line]
    assert "states are kept as each rank has them" in line
    assert {*ended(engine)["heads"]} == {None}
