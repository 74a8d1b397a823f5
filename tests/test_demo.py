"""The main job as a user runs it, in its short form: a real server in a process of its own, twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvarve.testing.models import save_checkpoint, tiny_model

# What four ranks divide, and room for a demo's prompts, which the tiny models' tokenizer cuts into bytes.
DIVIDED = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
DELTA_NET = {"linear_num_key_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_5": DIVIDED | DELTA_NET, "gpt_oss": DIVIDED, "deepseek_v32": DIVIDED}


def demo(folder: Path, *flags: str, timeout_s: float = 280) -> Any:
    """The report of a demo all of whose rounds gave the same answers, from each tier in turn."""
    command = [sys.executable, "-m", "kvarve", "demo", "--quick", "--out", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "demo.json").read_text())
    assert report["outputs_equal"] is True
    assert [row["name"] for row in report["rounds"]] == ["cold", "device", "host", "storage"]
    cold, *warm = report["rounds"]
    assert cold["cached_tokens"] == 0
    for row in warm:
        assert row["cached_by_tier"][row["name"]] == row["cached_tokens"] >= 0.9 * row["prompt_tokens"]
    return report


def test_the_demo_is_warm_from_every_tier_with_the_cold_answers(tmp_path: Path) -> None:
    report = demo(tmp_path)
    accuracies = {row["accuracy"] for row in report["rounds"]}
    assert len(accuracies) == 1 and accuracies.pop() > 0.5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json", "demo.png", "demo-server.log"}, "no litter"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_demo_of_several_ranks_is_warm_from_every_tier_with_their_cold_answers(
    tmp_path: Path, family: str, ranks: int
) -> None:
    save_checkpoint(tiny_model(family, **FAMILIES[family]), tmp_path / "model")
    model = ("--model", str(tmp_path / "model"), "--tp", str(ranks), "--context-tokens", "600")
    demo(tmp_path / "out", *model, timeout_s=1700)
