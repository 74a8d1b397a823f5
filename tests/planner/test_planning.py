"""What the command plans with: sizes of a checkpoint, all eviction orders at many sizes; one error for each mistake."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from traces import RECORD_BYTES, branching, command, line, settings, trace

from kvarve.cli.main import app
from kvarve.core.policies import Policies
from kvarve.errors import KvarveError
from kvarve.pages.pools import Tier
from kvarve.pages.sizes import format_size
from kvarve.planner import SimulationConfig, read_trace, replayed
from kvarve.planner.plan import plan
from kvarve.planner.sweep import COMPARED, sized, sweep, swept
from kvarve.reference.engine.families import describe_model
from kvarve.settings.options import call

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
    assert [*points[0]["hit"]] == [*COMPARED]
    assert all(hit <= point["bound"] for point in points for hit in point["hit"].values())
    bounds = [point["bound"] for point in points]
    assert bounds == sorted(bounds)
    last = points[-1]
    assert len({round(hit, 9) for hit in last["hit"].values()} | {round(last["bound"], 9)}) == 1, "all fits"
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "Belady's bound" in told and f"{points[0]['hit']['lru']:.1%}" in told


def test_a_point_of_a_sweep_is_a_replay_with_that_memory(tmp_path: Path) -> None:
    requests = [*read_trace(trace(tmp_path, *branching(10)), 512)]
    base = settings(0, state_bytes=3000)
    for point in sweep(requests, base):
        for order, hit in point.hit.items():
            again = replace(base, device_memory=point.memory, policies=Policies(eviction=order))
            assert hit == replayed(requests, again).hit_rate


@pytest.mark.parametrize(("host", "tier"), [(0, Tier.HOST), (6, Tier.STORAGE)])
def test_a_sweep_sizes_the_first_tier_that_has_no_size(tmp_path: Path, host: int, tier: Tier) -> None:
    requests = [*read_trace(trace(tmp_path, *branching(20)), 512)]
    base = settings(8, host=host)
    points = [*sweep(requests, base)]
    assert swept(base) is tier
    for point in points[-2:]:
        hit = replayed(requests, sized(base, tier, point.memory)).hit_rate
        assert point.hit["lru"] == hit <= point.bound
    with pytest.raises(KvarveError, match="leave out"):
        swept(settings(8, host=8, storage=8))


def test_a_plan_says_the_least_host_memory_and_storage_that_reach_a_target(tmp_path: Path) -> None:
    requests = [*read_trace(trace(tmp_path, *branching(10)), 512)]
    base = settings(10)
    made = plan(requests, base, 0.8)
    assert made.device < made.needed == 0.8 * made.reachable <= made.infinite
    assert replayed(requests, sized(base, Tier.HOST, made.host)).hit_rate >= made.needed
    smaller = [hit for size, hit, _ in made.by_host if size < made.host]
    assert smaller and max(smaller) < made.needed, "none that was tried and is smaller would do"
    with_storage = sized(sized(base, Tier.HOST, made.beside), Tier.STORAGE, made.storage)
    assert replayed(requests, with_storage).hit_rate >= made.needed
    assert format_size(made.host) in made.sentence and f"{made.needed:.1%}" in made.sentence
    enough = plan(requests, settings(400), 0.8)
    assert enough.device >= enough.needed and "The device alone" in enough.sentence


def test_a_plan_of_a_trace_that_is_smaller_than_the_smallest_host_of_the_model(tmp_path: Path) -> None:
    requests = [*read_trace(trace(tmp_path, line([1, 2]), line([1, 2, 3])), 512)]
    assert plan(requests, settings(12, state_bytes=1 << 20), 0.5).device > 0


@pytest.mark.long  # imports matplotlib
def test_a_plan_is_a_sentence_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, picture = trace(tmp_path, *branching(12)), tmp_path / "plan.json", tmp_path / "plan.svg"
    words = ("plan", path, "--kv-bytes-per-token", "1KiB", "--device-memory", "6MiB", "--target", "70%")
    assert call(app, [*map(str, (*words, "--picture", picture, "--json", out))]) == 0
    report = json.loads(out.read_text())
    assert capsys.readouterr().out.startswith(report["sentence"])
    drawn = picture.read_text()
    assert "<svg" in drawn and all(label in drawn for label in ("host alone", "infinite cache", "Belady"))
    for target in ("0%", "120%", "much"):
        with pytest.raises(KvarveError, match="--target must be"):
            call(app, [*map(str, (*words[:-1], target))])


def test_a_storage_too_small_for_a_page_does_not_stop_the_replay(tmp_path: Path) -> None:
    """No time passes in it, so what backs off would do so for ever."""
    config = replace(settings(8, host=8), storage_memory=RECORD_BYTES // 2)
    report = replayed([*read_trace(trace(tmp_path, *branching(30)), 512)], config)
    assert report.requests == 30 and not report.hit_tokens["storage"]


def test_what_a_trace_has_not_had_before_was_never_seen(tmp_path: Path) -> None:
    """Also where the core has forgotten so much that it cannot tell."""
    requests = [*read_trace(trace(tmp_path, *branching(600)), 512)]
    report = replayed(requests, settings(40))
    reasons = report.reasons
    assert not reasons["unknown"] and sum(reasons.values()) == report.prompt_tokens
    known = report.infinite_hit_tokens
    full = sum((each.input_length - 1) // 512 * 512 for each in requests)  # one token of each prompt is computed
    assert reasons["never_seen"] == full - known


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "simulate needs --device-memory, or --sweep"),
        (
            ("--sweep", "a.png", "--device-memory", "1GiB", "--host-memory", "1GiB", "--storage-memory", "1GiB"),
            "leave out --storage-memory",
        ),
        (("--sweep", "curve.png", "--eviction", "lfu"), "--sweep cannot go with --eviction"),
        (("--sweep", "curve.png", "--prefill-tokens-per-s", "9"), "--sweep cannot go with --prefill-tokens-per-s"),
        (("--sweep", "curve.bmp"), "must end in one of .svg, .png, .pdf"),
        (("--sweep", "nowhere/curve.png"), "--sweep: nowhere/curve.png cannot be written as a file"),
        (("--device-memory", "1GiB", "--model", "nowhere"), "nowhere"),
        (("--device-memory", "1GiB", "--dtype", "bfloat16"), "dtype needs a model"),
        (("--device-memory", "1GiB", "--eviction", "belady"), "--eviction must be one of lru, lfu"),
        (("--device-memory", "1GiB", "--replicas", "two"), "--replicas: 'two' is not a whole number"),
        (("--device-memory", "1GiB", "--limit", "0"), "--limit"),
        (("--device-memory", "plenty"), "'plenty' cannot be read as a size"),
        (("--device-memory", "1GiB", "--json", "nowhere/report.json"), "cannot be written as a file"),
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
