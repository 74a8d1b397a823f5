"""`kvarve bench hash` as a user runs it, and against a server that compares nothing."""

import json
import os
import sys
from pathlib import Path

import forks


def test_every_copy_between_tiers_is_compared_and_alters_nothing(tmp_path: Path) -> None:
    words = ["--clients", "2", "--turns", "1", "--serve=--threads 1", "--out", str(tmp_path / "out"), "--json", "-"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVARVE_")}
    command = [sys.executable, "-W", "error", "-m", "kvarve", "bench", "hash", *words]
    done = forks.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    edges = json.loads(done.stdout)["edges"]
    assert [(row["source"], row["target"]) for row in edges] == [
        ("device", "host"),
        ("host", "storage"),
        ("storage", "host"),
        ("host", "device"),
    ]
    assert all(row["compared"] > 0 and row["altered"] == 0 for row in edges), edges
