"""Copies and computing that take time: the time to the first token can be worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
from traces import PAGE_BYTES, RECORD_BYTES, branching, line, settings, trace

from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.planner import SimulationConfig, SimulationReport, replay

SPEED = 1000  # tokens a second


def ttfts(folder: Path, config: SimulationConfig, *lines: dict[str, Any]) -> list[float]:
    return [round(seconds, 6) for seconds in replay(trace(folder, *lines), config).ttfts]


def patient() -> Policies:
    return Policies(storage_wait="all")


def test_pages_are_fetched_while_their_request_waits_for_its_turn(tmp_path: Path) -> None:
    config = settings(
        2, host=4, storage=99, prefill_tokens_per_s=SPEED, storage_bytes_per_s=RECORD_BYTES, policies=patient()
    )
    lines = [line([1, 2]), line([3, 4], at=10_000), line([5, 6], at=20_000), line([7, 8, 9, 10], at=60_000)]
    found = ttfts(tmp_path, config, *lines, line([1, 2], at=60_000))
    assert found[3:] == [2.049, 2.05], "its two seconds of reading have passed behind the other one"


@pytest.mark.parametrize(
    ("policies", "seconds"),
    [
        (Policies(storage_wait="none"), 1.025),
        (Policies(storage_wait="1.5s"), 1.5 + 1.025),  # both pages come in one copy
        (patient(), 2.001),
    ],
    ids=["none", "seconds", "all"],
)
def test_a_request_waits_for_storage_as_its_policy_says(tmp_path: Path, policies: Policies, seconds: float) -> None:
    config = settings(
        2, host=4, storage=99, prefill_tokens_per_s=SPEED, storage_bytes_per_s=RECORD_BYTES, policies=policies
    )
    lines = [line([1, 2]), line([3, 4], at=10_000), line([5, 6], at=20_000), line([1, 2], at=60_000)]
    report = replay(trace(tmp_path, *lines), config)
    assert report.ttfts[3] == pytest.approx(seconds)


@pytest.mark.parametrize("policy", ["through", "back"])
def test_every_request_ends_however_slow_storage_is(tmp_path: Path, policy: str) -> None:
    config = settings(
        12,
        host=16,
        storage=200,
        prefill_tokens_per_s=50_000,
        storage_bytes_per_s=RECORD_BYTES,
        host_bytes_per_s=9 * PAGE_BYTES,
        policies=Policies(write_policy=policy),
        replicas=2,
    )
    path = trace(tmp_path, *(each | {"timestamp": 200 * at} for at, each in enumerate(branching(50))))
    report = replay(path, config)
    assert len(report.ttfts) == report.requests == 50
    assert replay(path, config) == report, "a replay can be repeated"
    ttft = report.ttft_s
    assert 0 < ttft["p50"] <= ttft["p90"] <= ttft["p99"] and ttft["mean"] > 0


# --- replicas


def served(folder: Path, lines: list[dict[str, Any]], **more: Any) -> SimulationReport:
    return replay(trace(folder, *lines), settings(**more))


def talks(count: int, turns: int) -> list[dict[str, Any]]:
    """Conversations side by side, which all begin alike."""
    return [
        line([0, *range(100 * talk, 100 * talk + turn + 1)]) for turn in range(turns) for talk in range(1, count + 1)
    ]


def test_a_request_goes_where_its_pages_are(tmp_path: Path) -> None:
    aware, blind = (served(tmp_path, talks(40, 6), pages=90, replicas=4, routing=how) for how in ("prefix", "random"))
    assert aware.hit_rate > 0.9 * aware.infinite_hit_rate > 1.5 * blind.hit_rate
    assert max(aware.by_replica) < 2 * min(aware.by_replica), "although they all begin alike"


def test_replicas_find_in_storage_what_others_have_computed(tmp_path: Path) -> None:
    lines = talks(15, 5)
    alone, shared = (
        served(tmp_path, lines, pages=300, host=300, storage=storage, replicas=4, routing="random")
        for storage in (0, 1000)
    )
    assert shared.hit_rate == shared.infinite_hit_rate > alone.hit_rate
    assert shared.hit_tokens["storage"] > 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"storage_bytes_per_s": 1}, "a speed of storage needs storage"),
        ({"host_memory": 1 << 30, "host_bytes_per_s": 1}, "copies that take time need prefill tokens per s"),
        ({"storage_prices": "1,2,3"}, "prices of storage need storage"),
        ({"storage_prices": "1,-2,3"}, "storage prices must be three numbers"),
        ({"storage_prices": "cheap"}, "storage prices must be three numbers"),
        ({"replicas": 2, "routing": "nearest"}, "routing must be one of prefix, random, got 'nearest'"),
        ({"routing": "random"}, "routing needs several replicas"),
        ({"prefill_tokens_per_s": 1, "policies": Policies(storage_wait="1s")}, "give storage bytes per s"),
    ],
    ids=str,
)
def test_speeds_that_contradict_are_refused(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SimulationConfig(1 << 30, **flags)
