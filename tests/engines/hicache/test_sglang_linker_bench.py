"""benchmarks/linker.py: it has to complete, and kvarve finds what HiCache finds."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kvarve_finds_what_hicache_finds_of_sessions_that_go_on_in_turns(tmp_path: Path) -> None:
    dice, ids, sessions = random.Random(7), iter(range(1 << 20)), [[] for _ in range(12)]
    lines = []
    for at in range(60):
        session = dice.choice(sessions)
        session += [next(ids) for _ in range(dice.randrange(1, 300))]
        lines.append({"timestamp": at, "input_length": 512 * len(session), "output_length": 1, "hash_ids": [*session]})
        if len(session) > 1200:
            session.clear()
    trace, out = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["benchmarks/linker.py", "--quick", "--trace", str(trace), "--json", str(out), "--sglang-python"]
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", *words, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    figures = json.loads(out.read_text())
    assert figures["ratios"]["hit_tokens_over_hicache"] >= 1
    assert {"lookup_100k_ms", "hand_over_64_pages_ms"} < {*figures["ratios"]}
    assert all(row["storage"] for row in figures["rows"] if row.get("tree") == "FULL")
