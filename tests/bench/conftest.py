"""Benchmarks run as a person would run them; they have to complete; no figure is asserted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # behind the packages: one of the scripts has the name of one


@dataclass(frozen=True)
class Quick:
    figures: dict[str, Any]
    stdout: str
    stderr: str


@pytest.fixture
def quick(tmp_path: Path) -> Callable[..., Quick]:
    """Runs `benchmarks/NAME --quick`, where warnings are errors, and checks that it leaves no file in its folder."""

    def run(name: str, *more: str, folder: bool = True) -> Quick:
        out, work = tmp_path / "figures.json", tmp_path / "work"
        work.mkdir()
        words = [f"benchmarks/{name}", "--quick", "--json", str(out), *more, *(("--dir", str(work)) if folder else ())]
        done = subprocess.run(
            [sys.executable, "-W", "error", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [*work.iterdir()] == []
        return Quick(json.loads(out.read_text()), done.stdout, done.stderr)

    return run
