"""The main job as a user runs it, in its short form: a real server in a process of its own, twice."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_demo_is_warm_from_every_tier_with_the_cold_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvarve", "demo", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["outputs_equal"] is True
    assert [row["name"] for row in report["rounds"]] == ["cold", "device", "host", "storage"]
    cold, *warm = report["rounds"]
    assert cold["cached_tokens"] == 0
    assert len({row["accuracy"] for row in report["rounds"]}) == 1 and cold["accuracy"] > 0.5
    for row in warm:
        assert row["cached_by_tier"][row["name"]] == row["cached_tokens"] >= 0.9 * row["prompt_tokens"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json", "demo.png", "demo-server.log"}, "no litter"
