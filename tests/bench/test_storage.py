"""The benchmark runs as a person would run it; what it measures is nobody's promise, that it measures is."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RATIOS = {
    "durable_put_over_raw",
    "cold_get_over_raw",
    "durable_put_over_file_per_page",
    "holds_128_us",
    "recovery_1m_s",
    "checksum_share",
    "restore_over_raw",
}


def test_a_quick_run_measures_every_way_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out, work = tmp_path / "figures.json", tmp_path / "work"
    work.mkdir()
    words = ["bench/storage.py", "--quick", "--json", str(out), "--dir", str(work)]
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
    assert {*figures["ratios"]} == RATIOS
    assert all(ratio > 0 for name, ratio in figures["ratios"].items() if name != "checksum_share")
    assert len(figures["rows"]) == 15
    assert all(row[f"GB/s at {page} KiB"] > 0 for row in figures["rows"] for page in (64, 1024, 4096))
    assert figures["machine"]["cores"] >= 1
    assert [*work.iterdir()] == []
