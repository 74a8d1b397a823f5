"""The benchmark runs as a person would run it; what it measures is nobody's promise, that it measures is."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_quick_run_has_spells_of_every_kind_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out, work = tmp_path / "figures.json", tmp_path / "work"
    work.mkdir()
    words = ["bench/stall.py", "--quick", "--json", str(out), "--dir", str(work)]
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert [row["storage"] for row in figures["rows"]] == ["healthy", "stalled", "stalled, idle"]
    assert all(row["waits"] > 0 for row in figures["rows"])
    assert {*figures["ratios"]} == {"decode_stalled_over_healthy", "late_ms"}
    assert [*work.iterdir()] == []
