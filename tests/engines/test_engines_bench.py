"""benchmarks/engines.py with vLLM: it has to complete; no figure is asserted but what is hit."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_quick_run_measures_the_connector_in_vllm(tmp_path: Path) -> None:
    out, work = tmp_path / "figures.json", tmp_path / "work"
    work.mkdir()
    words = ["benchmarks/engines.py", "--quick", "--json", str(out), "--dir", str(work)]
    words += ["--vllm-python", sys.executable]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert [*work.iterdir()] == []
    figures = json.loads(out.read_text())
    assert {"external_hit_ttft", "file_put_over_raw", "hit_tokens_over_tiering"} < {*figures["ratios"]}
    (ours,) = (row for row in figures["rows"] if row.get("kept by") == "kvarve's connector" and "300 shorter" in row)
    assert (ours["model"], ours["the same"], ours["300 shorter"]) == ("gemma3", 896, 640)
