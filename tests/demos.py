"""Runs `kvarve demo` as a user does, and checks its report; models that several ranks divide. No test stands here."""

import json
import sys
from pathlib import Path
from typing import Any

import forks

# What four ranks divide, and room for a demo's prompts, which the tiny models' tokenizer cuts into bytes.
DIVIDED = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
DELTA_NET = {"linear_num_key_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_5": DIVIDED | DELTA_NET, "gpt_oss": DIVIDED, "deepseek_v32": DIVIDED}


def run_demo(folder: Path, *flags: str, timeout_s: float = 280) -> Any:
    """The report of a demo all of whose rounds gave the same answers, from each tier in turn."""
    command = [sys.executable, "-m", "kvarve", "demo", "--quick", "--out", str(folder), *flags]
    done = forks.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "demo.json").read_text())
    assert report["outputs_equal"] is True
    assert [row["round"] for row in report["rounds"]] == ["cold", "device", "host", "storage"]
    cold, *warm = report["rounds"]
    assert not any(cold["cached_tokens"].values())
    for row in warm:
        cached = row["cached_tokens"]
        assert cached[row["round"]] == sum(cached.values()) >= 0.9 * row["prompt_tokens"]
    return report
