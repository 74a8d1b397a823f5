"""Behind vLLM's own CPU tier, kvarve's storages give back the bytes that were stored, or a miss, whatever happens.

Real engines with tiny random models, each in a process of its own; see `tier_scenes`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PROMPTS = ("longer", "shorter", "second other", "other")  # how a name of an answer begins; else it is of "prompt"
Played = dict[str, Any]


def python(*args: object) -> None:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    more = [str(SOURCE), str(HERE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, more))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Path:
    return model_folder(request.param)


@pytest.fixture(scope="module")
def play(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Played]:
    folder = tmp_path_factory.mktemp(model.name)

    def played(name: str, *scenes: str, tier: bool = True, **more: object) -> Played:
        path = folder / f"{name}.json"
        storage = {"storage": f"file://{folder / 'store'}?capacity=1GiB"} if tier else None
        path.write_text(json.dumps({"model": str(model), "tier": storage, "scenes": scenes} | more))
        python(HERE / "tier_scenes.py", path)
        found: Played = json.loads(path.with_suffix(".out").read_text())
        return found

    return played


@pytest.fixture(scope="module")
def without(play: Callable[..., Played]) -> Played:
    return play("without", "plain", "together", tier=False)


@pytest.fixture(scope="module")
def behind(play: Callable[..., Played]) -> Played:
    return play("behind", "hits", "corrupt", "missing", "failing", "hanging", "aborted", "together")


@pytest.fixture(scope="module")
def restarted(behind: Played, play: Callable[..., Played]) -> Played:
    return play("restarted", "again")


def same(one: Any, other: Any) -> bool:
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def difference(some: list[Any], others: list[Any]) -> float:
    """The largest difference of the logprobs of tokens that both have computed from the same ones."""
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        for at, (mine, theirs) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            worst = max(worst, abs(mine - theirs))
            if one["tokens"][at] != other["tokens"][at]:
                break
    return worst


def test_every_answer_has_the_bits_of_the_engine_without_kvarve(
    without: Played, behind: Played, restarted: Played
) -> None:
    plain = without["scenes"]["plain"]
    assert same(plain["prompt"], plain["device"]) and same(plain["longer"], plain["longer, device"])
    wrong = []
    for scenes in (behind["scenes"], restarted["scenes"]):
        for scene in scenes.keys() - {"together"}:
            for name, answer in scenes[scene].items():
                prompt = next((each for each in PROMPTS if name.startswith(each)), "prompt")
                wrong += [] if same(answer, plain[prompt]) else [f"{scene}: {name}"]
    assert not wrong


def test_every_restored_chunk_has_the_bytes_that_were_stored(behind: Played) -> None:
    assert behind["compared"] > 0 and behind["differ"] == []


def test_a_hit_is_as_deep_from_the_storage_as_on_the_device_and_after_a_restart(
    behind: Played, restarted: Played
) -> None:
    hits = behind["scenes"]["hits"]
    assert hits["cold"]["cached"] == 0 < hits["device"]["cached"]
    assert hits["external"]["cached"] == hits["device"]["cached"]
    assert restarted["scenes"]["again"]["restarted"]["cached"] == hits["device"]["cached"]
    assert hits["longer, external"]["cached"] >= hits["device"]["cached"]
    assert hits["external"]["counts"]["load: done"] > 0


@pytest.mark.parametrize("trouble", ["corrupt", "missing"])
def test_damaged_and_missing_chunks_are_misses_and_are_stored_anew(behind: Played, trouble: str) -> None:
    found, device = behind["scenes"][trouble], behind["scenes"]["hits"]["device"]["cached"]
    assert found[trouble]["counts"][f"load: {trouble}"] > 0 == found[trouble]["counts"].get("load: done", 0)
    assert found[trouble]["cached"] == 0
    assert found["stored anew"]["cached"] == device


def test_a_storage_that_fails_costs_its_hits_only_and_is_used_again(behind: Played) -> None:
    found = behind["scenes"]["failing"]
    assert found["get fails"]["counts"]["load: error"] > 0 == found["get fails"]["cached"]
    assert found["other, put fails"]["cached"] == found["other, works again"]["cached"] == 0
    assert found["other, external"]["cached"] > 0


def test_a_storage_that_hangs_costs_its_hits_only_and_is_used_again(behind: Played) -> None:
    found = behind["scenes"]["hanging"]
    assert found["get hangs"]["counts"]["load: late"] > 0 == found["get hangs"]["cached"]
    assert found["second other, down"]["cached"] == 0
    assert found["external"]["cached"] > 0


def test_a_request_that_is_aborted_while_its_chunks_are_loaded_hurts_no_other(behind: Played) -> None:
    assert behind["scenes"]["aborted"]["external"]["cached"] > 0


def test_requests_together_differ_no_more_than_with_the_engine_s_own_cache(without: Played, behind: Played) -> None:
    plain, found = without["scenes"]["together"], behind["scenes"]["together"]
    own = difference(plain["device"], plain["cold"])
    assert all(answer["cached"] > 0 for answer in found["external"])
    assert difference(found["external"], found["cold"]) <= own
    assert difference(found["cold"], plain["cold"]) <= own


def test_metrics_tell_what_became_of_chunks(behind: Played) -> None:
    told = {
        (each["labels"]["operation"], each["labels"]["result"]): each["value"]
        for each in behind["metrics"]
        if each["name"] == "vllm:kvarve_tier_chunks"
    }
    assert told["store", "done"] > 0 and told["load", "done"] > 0 and told["load", "corrupt"] > 0
    counts = {tuple(name.replace(": ", "/").replace(" ", "_").split("/")): it for name, it in behind["counts"].items()}
    assert all(value <= counts[name] for name, value in told.items())
    assert [each["value"] for each in behind["metrics"] if each["name"] == "vllm:kvarve_tier_up"] == [1]
