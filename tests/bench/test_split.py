"""The search for a spacing of windows and states draws the same shapes every time, and its figures can be believed."""

import json
import sys
from pathlib import Path

import pytest

import split
from split import CHUNK, SPACINGS, TRAFFIC, Lost, drawn, fills, measured, requests, rules, table

SEED = 3


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_a_prompt_s_ids_stand_for_all_that_comes_before_them(traffic: str) -> None:
    after: dict[int, int | None] = {}
    for request in requests(traffic, SEED):
        for last, each in zip([None, *request.ids], request.ids, strict=False):
            assert after.setdefault(each, last) == last


@pytest.mark.long
def test_rules_are_measured_against_the_best_fixed_spacing_of_the_shape() -> None:
    shape = next(shape for shape in map(drawn, range(100)) if shape.traffic == "asked_again" and shape.share > 4)
    asked = requests(shape.traffic, shape.seed)
    assert fills(shape, asked) > 0
    found = {lost.rule: lost for lost in measured(shape, asked)}
    assert found.keys() == rules().keys()
    fixed = [lost.hit_rate for lost in found.values() if lost.rule.startswith("every ")]
    assert max(fixed) == next(iter(found.values())).best > 0 and len(fixed) == len(SPACINGS)
    assert found["by the model"] == Lost("by the model", *_rest(found["between even and 8,192"]))


def _rest(lost: Lost) -> tuple[int, float, float]:
    return lost.tokens_per_snapshot, lost.hit_rate, lost.best


def test_the_table_says_mean_and_worst_of_each_rule() -> None:
    lost = [Lost("a", CHUNK, hit, 0.8) for hit in (0.8, 0.4, 0.0)] + [Lost("b", CHUNK, 0.9, 0.8) for _ in range(3)]
    a, b = table(lost)
    assert (a["rule"], round(float(str(a["lost, mean %"])), 6), a["worst %"]) == ("a", 50.0, 100.0)
    assert (b["rule"], b["lost, mean %"], b["worst %"], b["half or more lost %"]) == ("b", 0.0, 0.0, 0.0)


@pytest.mark.long
def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, trace = tmp_path / "split.json", tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}
    trace.write_text(2 * (json.dumps(row) + "\n"))
    monkeypatch.setattr(split, "SPACINGS", SPACINGS[:2])
    monkeypatch.setattr(split, "MODELS", split.MODELS[:1])
    monkeypatch.setattr(sys, "argv", ["split.py", "--shapes", "1", "--json", str(out), "--trace", str(trace)])
    assert split.main() == 0
    figures = json.loads(out.read_text())
    assert figures["rows"] and figures["ratios"]["shared_hits_over_best"] > 0
    assert len(figures["shapes"]) == 1 and figures["trace.jsonl"][0]["rule"] == "every 256"
