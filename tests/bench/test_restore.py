"""The benchmark runs as a person would run it; what it measures is nobody's promise, that it measures is."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EDGES = {"memcpy", "backup", "load", "load_unchecked", "raw_write", "store", "raw_read", "fetch", "restore"}


def test_a_quick_run_measures_every_edge_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out, work = tmp_path / "figures.json", tmp_path / "work"
    work.mkdir()
    words = ["bench/restore.py", "--quick", "--json", str(out), "--dir", str(work)]
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert {row["what"] for row in figures["rows"]} == EDGES
    assert all(row["ms"] > 0 and row["GB_per_s"] > 0 for row in figures["rows"])
    assert {"host_load_over_memcpy", "backup_over_memcpy", "store_over_raw_write", "fetch_over_raw_read"} <= {
        name for name, ratio in figures["ratios"].items() if ratio > 0
    }
    assert figures["machine"]["cores"] >= 1
    assert {len(rounds) for rounds in figures["ms_of_every_round"].values()} == {2}
    assert "round 3/3" in done.stderr, "long work says how far it is"
    assert [*work.iterdir()] == []
