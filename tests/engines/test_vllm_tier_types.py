"""The tier speaks vLLM's types: what it is given, what it answers, and what it refuses."""

import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvarve.connectors.vllm import tier
    from kvarve.connectors.vllm.tier import KvarveTier

from kvarve.errors import ConfigError

LONG_S = 20.0
ROWS, ROW_BYTES = 32, 8192
NAMED = {"identity": "a model of a test", "weights": "v1"}


def spec(written: dict[str, Any], **changes: Any) -> Any:
    """As far as a tier reads vLLM's."""
    config = {
        "model": SimpleNamespace(name="model", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "groups": (SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l.0",)),),
        "worker_kv_bytes_per_block": 8192,
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
    }
    return SimpleNamespace(
        config=SimpleNamespace(**config | changes),
        extra_config={"secondary_tiers": [{"type": "KvarveTier", **written}]},
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


Make = Callable[..., KvarveTier]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    tiers = []

    def made(added: dict[str, Any] | None = None, changes: dict[str, Any] | None = None, **written: Any) -> KvarveTier:
        written = {"storage": f"file://{tmp_path / 'store'}?capacity=64MiB", **written}
        view = memoryview(np.frombuffer(mmap.mmap(-1, ROWS * ROW_BYTES), np.int8).reshape(ROWS, ROW_BYTES))
        tiers.append(KvarveTier(spec(written, **(changes or {})), view, "KvarveTier", None, **written, **(added or {})))
        return tiers[-1]

    yield made
    for tier in tiers:
        tier.shutdown()


def rows(tier: KvarveTier) -> Any:
    return tier._primary_kv_view.obj


KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(1, 6)]
CONTEXT = ReqContext("r")


def job(number: int, keys: list[Any], chunks: list[int], *, load: bool = False) -> TransferJob:
    return TransferJob(number, keys, np.array(chunks, np.int32), load, CONTEXT)


def finished(tier: KvarveTier) -> list[Any]:
    while not (done := [*tier.get_finished_jobs()]):
        assert tier.chunks.wait(LONG_S)
    return done


def test_a_chunk_goes_to_the_storage_and_back_into_another_row(make: Make) -> None:
    tier = make(**NAMED)
    rows(tier)[3] = 7
    tier.submit_store(job(1, KEYS[:1], [3]))
    (stored,) = finished(tier)
    assert (stored.job_id, stored.success, stored.transfer_bytes) == (1, True, ROW_BYTES)
    assert tier.lookup(KEYS[0], CONTEXT) is LookupResult.HIT
    tier.submit_load(job(2, KEYS[:1], [9], load=True))
    (loaded,) = finished(tier)
    assert (loaded.success, loaded.successful_keys) == (True, None)
    assert (rows(tier)[9] == 7).all()
    tier.submit_load(job(3, KEYS[:3], [4, 5, 6], load=True))
    (loaded,) = finished(tier)
    assert (loaded.success, set(loaded.successful_keys)) == (False, {*KEYS[:1]}), "which keys are in place"
    assert tier.lookup(KEYS[2], CONTEXT) is LookupResult.MISS


def test_events_tell_what_was_stored_and_what_is_gone(make: Make) -> None:
    tier = make(**NAMED, enable_kv_events=True, locality="LOCAL")
    tier.submit_store(job(1, KEYS[:1], [0]))
    finished(tier)
    tier.submit_load(job(2, KEYS[1:2], [1], load=True))
    finished(tier)
    events = [(event.keys, event.medium.name, event.removed, event.locality.name) for event in tier.take_events()]
    assert events == [(KEYS[:1], "STORAGE", False, "LOCAL"), (KEYS[1:2], "STORAGE", True, "LOCAL")]
    assert [*tier.take_events()] == []


def test_stats_are_what_is_new_and_every_metric_is_defined(make: Make) -> None:
    tier = make(**NAMED)
    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    finished(tier)
    stats = tier.get_stats().reduce()
    assert stats["vllm:kvarve_tier_chunks:('store', 'done')"] == 2
    assert not any("chunks" in name for name in tier.get_stats().reduce())
    assert {name.split(":(")[0] for name in stats} <= {*KvarveTier.build_metric_definitions({})}


def test_a_shutdown_leaves_vllm_free_to_release_its_view(make: Make) -> None:
    tier = make(**NAMED)
    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    tier.shutdown()
    tier._primary_kv_view.release()


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"storge": "x"}, "unknown setting 'storge': did you mean storage"),
        ({"storage": "file:///x"}, "must say how much it may hold"),
        ({"identity": ""}, '"identity" of the tier must be'),
        ({"weights": ""}, '"identity" of the tier must be'),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(make: Make, written: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(**NAMED | written)
    assert make({"an_argument_of_a_later_vllm": object()}, **NAMED).settings.weights == "v1"


def test_adapters_of_which_vllm_tells_a_tier_nothing_are_refused_unless_they_are_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=1))
    monkeypatch.setattr(tier, "_configs", lambda: (vllm_config, None))
    monkeypatch.setattr(tier, "model_digest", lambda _: "")
    with pytest.raises(ConfigError, match=r'"identity".* whenever those of an adapter do'):
        make(weights="v1")
    assert make(weights="v1", identity="adapters of May")


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)},
        {"groups": (SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("l.0",)),)},
        {"kv_cache_layout": "LBNHC"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_chunks_of_another_layout_are_never_found(make: Make, changes: dict[str, Any]) -> None:
    one = make(**NAMED)
    one.submit_store(job(1, KEYS[:1], [0]))
    finished(one)
    other = make(None, changes, **NAMED)
    other.submit_load(job(1, KEYS[:1], [0], load=True))
    (loaded,) = finished(other)
    assert not loaded.success
