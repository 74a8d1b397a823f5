"""`kvarve demo --engine vllm` with the real engine, in its short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

REQUESTS = 2  # of a quick round


def test_the_demo_finds_in_every_tier_what_vllm_computed_and_its_tokens_are_those_of_vllm_alone(tmp_path: Path) -> None:
    words = ["demo", "--engine", "vllm", "--engine-python", sys.executable, "--quick", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "kvarve", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "demo-vllm.json").read_text())
    assert report["outputs_equal"] is True
    alone, cold, *warm = report["rounds"]
    assert not any((*alone["cached_tokens"].values(), *cold["cached_tokens"].values()))
    pages = report["pages"]
    for row in warm:
        # All whole pages. How large vLLM makes one depends on the type that it keeps states in.
        cached = sum(row["cached_tokens"].values())
        left = row["prompt_tokens"] - cached
        assert row["cached_tokens"][row["round"]] == cached > 0
        assert left <= REQUESTS * report["page_tokens"]
    assert pages["backed_up"] == pages["stored"] > 0 and pages["fetched"] > 0
    assert pages["bad_host"] == pages["bad_storage"] == 0
    assert {path.name for path in tmp_path.iterdir()} - {"demo-vllm.png"} == {"demo-vllm.json", "demo-vllm.log"}
