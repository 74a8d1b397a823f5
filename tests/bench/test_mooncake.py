"""The benchmark runs as a person would run it; what it measures is nobody's promise, that it measures is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RATIOS = {"put_over_raw", "get_over_raw", "holds_over_raw", "restore_over_raw"}


def test_a_quick_run_measures_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "storage")
    from mooncake_cluster import require_mooncake

    require_mooncake()
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", "bench/mooncake.py", "--quick", "--json", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert {name for name, ratio in figures["ratios"].items() if ratio > 0} == RATIOS
    assert [row["what"] for row in figures["rows"]] == ["raw", "kvarve"]
    assert all(seconds > 0 for seconds in figures["lost_s"].values())
