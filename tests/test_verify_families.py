"""`kvarve verify` proves every family in both types: all ways to an answer, and damage to all that is kept."""

import json
from functools import cache as cached
from pathlib import Path

import pytest

from kvarve.cli.main import main
from tests.sim.models import FAMILIES, STATES_ALONE, save_checkpoint, tiny_grid, tiny_model

DRIVEN = [
    *("transformers", "cold", "device", "salt", "host", "storage", "restart", "mixed", "partial", "branches"),
    *("conversation", "eviction", "abort", "interleaved", "together", "answers", "damage"),
]
# One proof in every run of the tests, and all of them in the long form.
SHORT = ("qwen3_5", "bfloat16")
ALL = [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")]
# transformers' own cache for it is of no use for prompts in chunks, see docs/families.md.
LOSES_COUNT = {"minimax"}

# Divided among ranks: attention, linear attention, experts, latents that all ranks have, and what does not divide.
DIVIDED = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "gpt_oss", "gemma3", "deepseek_v32", "deepseek_v4", "kimi_linear"),
    *("longcat_flash", "llama4", "minimax_m3", "qwen2_5_vl"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cached
def a_checkpoint(folder: Path, family: str) -> Path:
    save_checkpoint(tiny_model(family), folder / family)
    return folder / family


@pytest.mark.parametrize(
    ("family", "dtype"), [pytest.param(*each, marks=() if each == SHORT else pytest.mark.long) for each in ALL]
)
def test_every_family_is_proved_and_all_that_it_keeps_matters(
    family: str, dtype: str, folder: Path, tmp_path: Path
) -> None:
    page, chunk = tiny_grid(family)
    words = ("verify", "--model", a_checkpoint(folder, family), "--dtype", dtype, "--quick", "--json", tmp_path / "out")
    code = main([*map(str, (*words, "--page-tokens", page, "--chunk-tokens", chunk))])
    report = json.loads((tmp_path / "out").read_text())
    wrong = [row for row in (*report["paths"], *report["damages"]) if not row["ok"]]
    assert not wrong
    assert code == 0 and report["ok"] is True
    assert report["about"]["dtype"] == dtype

    rows = {row["name"]: row for row in report["paths"]}
    assert [*rows] == DRIVEN
    for name, row in rows.items():
        assert row["requests"] > 0, name
        assert row["compared"] > 0, name
        assert bool(row["notes"]) is (name == "transformers" and family in LOSES_COUNT), name
    for tier in ("device", "host", "storage"):
        found = rows[tier]["resumed"]
        assert found[tier] > 0
        # Of a hit, pages that a resume does not read come from no tier and count as the device's.
        assert family in STATES_ALONE or found[tier] == sum(found.values())
    assert report["rounding"] is None and rows["answers"]["resumed"]["device"] > 30, "answers are exact hits as well"

    assert report["uncovered"] == []
    pools = {pool["name"] for pool in report["about"]["pools"]}
    for where, expected in (
        *(("device", "noticed"), ("host", "noticed"), ("storage", "noticed")),
        *(("host", "caught"), ("storage", "caught")),
    ):
        hit = {row["pool"] for row in report["damages"] if (row["where"], row["expected"]) == (where, expected)}
        assert hit == pools, (where, expected)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3_5", "deepseek_v32", "deepseek_v4"])
def test_keys_and_values_in_fp8_are_proved_and_transformers_with_rounded_ones_computes_the_same(
    family: str, folder: Path, tmp_path: Path
) -> None:
    page, chunk = tiny_grid(family)
    words = ("verify", "--model", a_checkpoint(folder, family), "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3")
    words += ("--quick", "--json", tmp_path / "out", "--page-tokens", page, "--chunk-tokens", chunk)
    assert main([*map(str, words)]) == 0
    report = json.loads((tmp_path / "out").read_text())
    assert report["ok"] is True and report["about"]["kv_cache_dtype"] == "fp8_e4m3"
    assert [row["name"] for row in report["paths"]] == DRIVEN


@pytest.mark.parametrize("family", [pytest.param(each, marks=pytest.mark.long) for each in DIVIDED])
def test_a_model_that_two_processes_compute_is_proved_and_all_that_each_keeps_matters(
    family: str, folder: Path, tmp_path: Path
) -> None:
    page, chunk = tiny_grid(family)
    words = ("verify", "--model", a_checkpoint(folder, family), "--tp", 2, "--quick", "--json", tmp_path / "out")
    code = main([*map(str, (*words, "--page-tokens", page, "--chunk-tokens", chunk))])
    report = json.loads((tmp_path / "out").read_text())
    assert [row for row in (*report["paths"], *report["damages"]) if not row["ok"]] == []
    assert code == 0 and report["about"]["ranks"] == 2
    assert [row["name"] for row in report["paths"]] == DRIVEN
    assert 0 < report["sharding"]["share"] < 1e-4, "the whole model, but for rounding"
