"""bench/engines.py: its figures are promised by no test, that it measures is."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Quick = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def test_a_quick_run_without_vllm_measures_the_tier_the_copies_and_their_limits(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVARVE_VLLM_PYTHON", str(tmp_path / "python"))
    done = quick("engines.py")
    assert {*done.figures["ratios"]} == {
        "file_put_over_raw",
        "file_get_over_raw",
        "store_over_memcpy",
        "load_over_memcpy",
    }
    assert all(ratio > 0 for ratio in done.figures["ratios"].values())
    assert {"tier put", "tier get", "store", "load"} <= {row["what"] for row in done.figures["rows"]}
    assert "Left out: what needs vLLM" in done.stdout


def test_a_python_that_is_named_and_missing_is_an_error(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench" / "engines.py"), "--vllm-python", str(tmp_path / "python")]
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
