"""What the command plans with: sizes of a checkpoint, all eviction orders at many sizes; one error for each mistake."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from traces import branching, command, line, settings, trace

from kvarve.core.policies import Policies
from kvarve.errors import KvarveError
from kvarve.planner import SimulationConfig, read_trace, replayed
from kvarve.planner.sweep import COMPARED, sweep
from kvarve.reference.engine.families import describe_model

TINY = "builtin:tiny-hybrid"


@pytest.mark.long
def test_a_checkpoint_says_what_its_pages_and_states_take() -> None:
    config = SimulationConfig(1 << 30, model=TINY, page_tokens=64, chunk_tokens=256)
    facts = describe_model(TINY, "auto", 64, 256)
    told = [(pool.name, pool.lookback, pool.payload_bytes) for pool in config.pools]
    assert told == [(pool.name, pool.lookback, pool.page_bytes) for pool in facts.pools]
    assert {pool.lookback for pool in config.pools} == {None, 1}
    half = SimulationConfig(1 << 30, model=TINY, page_tokens=64, dtype="bfloat16")
    assert half.pools[0].payload_bytes * 2 == config.pools[0].payload_bytes


@pytest.mark.long
def test_a_sweep_tells_every_order_beside_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, picture = trace(tmp_path, *branching(120)), tmp_path / "curve.json", tmp_path / "curve.png"
    assert command(path, "--kv-bytes-per-token", "1KiB", "--sweep", picture, "--json", out) == 0
    points = json.loads(out.read_text())["points"]
    assert [*points[0]["missed"]] == [*COMPARED]
    assert all(missed >= point["bound"] for point in points for missed in point["missed"].values())
    bounds = [point["bound"] for point in points]
    assert bounds == sorted(bounds, reverse=True)
    last = points[-1]
    assert len({round(missed, 9) for missed in last["missed"].values()} | {round(last["bound"], 9)}) == 1, "all fits"
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "Belady's bound" in told and f"{points[0]['missed']['lru']:.1%}" in told


def test_a_point_of_a_sweep_is_a_replay_with_that_memory(tmp_path: Path) -> None:
    requests = [*read_trace(trace(tmp_path, *branching(10)), 512)]
    base = settings(0, state_bytes=3000)
    for point in sweep(requests, base):
        for order, missed in point.missed.items():
            policies = Policies(eviction=order)
            again = replayed(requests, replace(base, device_memory=point.device_memory, policies=policies))
            assert missed == 1 - again.hit_rate


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "--device-memory is required, or --sweep"),
        (("--sweep", "curve.png", "--device-memory", "1GiB"), "leave out --device-memory"),
        (("--sweep", "curve.png", "--eviction", "lfu"), "leave out --eviction"),
        (("--sweep", "curve.png", "--prefill-tokens-per-s", "9"), "leave out --prefill-tokens-per-s"),
        (("--sweep", "curve.bmp"), "ends in one of .png, .svg, .pdf"),
        (("--sweep", "nowhere/curve.png"), "--sweep: nowhere/curve.png: not a file that can be written"),
        (("--device-memory", "1GiB", "--model", "nowhere"), "nowhere"),
        (("--device-memory", "1GiB", "--dtype", "bfloat16"), "dtype is for a model"),
        (("--device-memory", "1GiB", "--eviction", "belady"), "eviction must be one of lru, lfu"),
        (("--device-memory", "1GiB", "--replicas", "two"), "--replicas: 'two' is not a whole number"),
        (("--device-memory", "1GiB", "--limit", "0"), "--limit"),
        (("--device-memory", "plenty"), "'plenty' is not a size"),
        (("--device-memory", "1GiB", "--json", "nowhere/report.json"), "not a file that can be written"),
    ],
    ids=str,
)
def test_a_mistake_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvarveError) as error:
        command(trace(tmp_path, line([1])), *flags)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
