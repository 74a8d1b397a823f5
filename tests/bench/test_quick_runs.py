"""Each benchmark completes a quick run and reports what it promises; no figure is asserted."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STORAGES = ["file", *(["mooncake"] if find_spec("mooncake") else [])]
EDGES = {"memcpy", "backup", "load", "load_unchecked", "raw_write", "store", "raw_read", "fetch", "restore"}
STEPS = ("open", "asked", "fetched", "claim", "loaded", "in sum")
# What the rows of a benchmark have under a name, in order; and its ratios.
ROWS: dict[str, tuple[str, list[Any]]] = {
    "answers": ("engine", ["kvarve serve"]),
    "connections": ("streams", ["alone", "beside idle ones"]),
    "hand_over": ("storage", STORAGES),
    "lanes": ("case", ["gather", "scattered", "checked"]),
    "mooncake": ("what", ["raw", "kvarve"]),
    "redis": ("what", ["raw", "kvarve", "kvarve, checked", "redis-py"]),
    "server": ("requests", ["engine", "http"]),
    "start": ("process", ["kvarve serve", "its libraries alone"]),
    "stall": ("storage", ["healthy", "stalled", "stalled, idle"]),
}
RATIOS = {
    "answers": "",
    "compress": "compressed_put_over_plain compressed_get_over_plain bytes_over_raw",
    "connections": "ttft_p50_over_alone ttft_p99_over_alone rss_over_before",
    "core": "match_10x_tree evict_10x_tree four_pools_over_one bytes_per_token",
    "engine": "warm_host_ttft warm_storage_ttft cold_ttft_on_over_off decode_on_over_off throughput_16_over_1"
    " ttft_p99_over_mean mixed_lengths sampling_share sampling_share_flat short_prompts_32_over_1 elastic_over_fixed"
    " layer_overlap layer_overlap_unslowed",
    "engines": "file_put_over_raw file_get_over_raw store_over_memcpy load_over_memcpy",
    "hand_over": " ".join(f"hand_over_{storage}{when}" for storage in STORAGES for when in ("", "_at_once")),
    "hf3fs": "put_over_raw get_over_raw lookup_128_ms store_1m_over_10k",
    "lanes": "gather_over_memcpy scattered_over_memcpy checked_over_memcpy both_over_memcpy beside_over_alone"
    " first_layer_over_share layerwise_over_longer",
    "mooncake": "put_over_raw get_over_raw holds_over_raw restore_over_raw",
    "redis": "put_over_raw get_over_raw holds_128_ms",
    "restore": "host_load_over_memcpy backup_over_memcpy store_over_raw_write fetch_over_raw_read",
    "server": "overhead_per_token_ms",
    "stall": "decode_stalled_over_healthy late_ms",
    "start": "start_s start_over_libraries busy_start_s",
    "storage": "durable_put_over_raw cold_get_over_raw durable_put_over_file_per_page put_small_over_lmdb"
    " holds_128_us holds_128_full_p999_us tenants_100k_mb recovery_1m_s restore_over_raw keyed_over_plain",
}
WITH_A_FOLDER = {"compress", "engine", "engines", "hand_over", "restore", "stall", "storage"}


@pytest.mark.long
@pytest.mark.parametrize("name", RATIOS)
def test_a_quick_run_reports_its_rows_and_ratios_and_leaves_nothing_behind(
    name: str, quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs(name, monkeypatch)
    monkeypatch.setenv("KVARVE_VLLM_PYTHON", str(tmp_path / "python"))  # there is none
    done = quick(f"{name}.py", *(("--pages", "256") if name == "core" else ()), folder=name in WITH_A_FOLDER)
    ratios = {each for each, value in done.figures["ratios"].items() if value > 0}
    assert ratios >= {*RATIOS[name].split()} and (RATIOS[name] or not ratios)
    key, expected = ROWS.get(name, ("", []))
    assert not key or [row[key] for row in done.figures["rows"]] == expected
    match name:
        case "core":
            steps = [(row["pools"], row["case"]) for row in done.figures["rows"] if row["bench"] == "restore"]
            assert steps == [(pools, case) for pools in (1, 4) for case in STEPS]
        case "engine":
            assert all(f"{each}: " in done.stdout for each in ratios)
        case "engines":
            assert {"tier put", "tier get", "store", "load"} <= {row["what"] for row in done.figures["rows"]}
            assert "Left out: what needs vLLM" in done.stdout
        case "hf3fs":
            rows = done.figures["rows"]
            pages = {(row["engine"], row["what"]) for row in rows["pages"]}
            assert pages >= {("posix", "kvarve"), ("usrbio", "kvarve")}
            assert {row["call"] for row in rows["embedded"]} == {row["call"] for row in rows["redis"]}
        case "restore":
            assert {row["what"] for row in done.figures["rows"]} == EDGES
            assert {len(rounds) for rounds in done.figures["ms_of_every_round"].values()} == {2}
            assert "round 3/3" in done.stderr, "long work says how far it is"


def test_the_script_for_a_gpu_names_files_that_are_there() -> None:
    named = re.findall(r"\b(?:tests|benchmarks)/[\w/]+[.]py\b", (ROOT / "benchmarks" / "card.sh").read_text())
    assert len(named) >= 7 and [name for name in named if not (ROOT / name).exists()] == []


def needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where a benchmark lacks its library or service."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "storage")
    match name:
        case "compress":
            pytest.importorskip("zstandard")
            pytest.importorskip("lz4")
        case "hf3fs":
            from hf3fs_mounts import require
            from redis_server import require_redis

            require("a mount of 3FS", "bindfs")
            require_redis()
        case "mooncake":
            from mooncake_cluster import require_mooncake

            require_mooncake()
        case "redis":
            from redis_server import require_redis

            require_redis()


@pytest.mark.long
def test_a_quick_run_of_batches_measures_each_family_alone_and_in_a_crowd(quick: Callable[..., Any]) -> None:
    rows = quick("batch.py", folder=False).figures["results"]
    assert [row["family"] for row in rows] == ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"]
    assert all(row["tokens/s of 1"] > 0 and row["of 16"] > 0 for row in rows)


@pytest.mark.long
def test_a_python_that_is_named_and_missing_is_an_error(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--vllm-python", str(tmp_path / "python")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode and "there is no" in done.stderr and "Traceback" not in done.stderr


def test_conversations_grow_turn_by_turn_and_none_is_asked_twice_at_once() -> None:
    from behind.vllm import TALKING, talks

    messages, batches = talks(50)
    assert (messages, batches) == talks(50), "every engine gets the same"
    turns = [0] * len(messages)
    for batch in batches:
        assert len({*batch}) == len(batch) <= TALKING
        for talk in batch:
            turns[talk] += 1
    assert turns == [len(each) for each in messages]
