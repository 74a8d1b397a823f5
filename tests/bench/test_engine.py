"""The benchmark of the engine runs as a person would run it; what it measures is nobody's promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RATIOS = {
    "warm_host_ttft",
    "warm_storage_ttft",
    "cold_ttft_on_over_off",
    "decode_on_over_off",
    "throughput_16_over_1",
    "ttft_p99_over_mean",
}


def test_a_quick_run_prints_every_ratio_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out, work = tmp_path / "figures.json", tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "bench/engine.py", "--quick", "--json", str(out), "--dir", str(work)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(out.read_text())["ratios"]
    assert set(ratios) == RATIOS
    assert all(ratio > 0 for ratio in ratios.values())
    assert all(f"{name}: " in done.stdout for name in RATIOS)
    assert [*work.iterdir()] == []
