"""Copies of sources and tests, in which mutants.py puts one mutant after the other and runs tests."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "tools", "benchmarks", "docs", "examples", "contrib", "pyproject.toml", "requirements.lock")
COPIED += ("Makefile", "README.md", "CHANGELOG.md", "LICENSE")
TEST_S = 300  # time limit of a test; a fifth of the run's if that is less


class Trouble(Exception):
    """The run has no result: the list is wrong, or pytest cannot run."""


@dataclass(frozen=True)
class Run:
    """The result of one run of pytest."""

    failed: str = ""  # the first test that failed, or that hung
    why: str = ""


class Copy:
    """A copy of sources and tests for one mutant at a time; what Python compiles in it serves the next ones too."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self.folder, self._report, self._writes = folder, folder / "report.json", 0
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name)
            else:
                shutil.copy2(ROOT / name, folder / name)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder / "tools")]),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "KVARVE_MUTANT": str(folder / "src"),
            "KVARVE_MUTANT_REPORT": str(self._report),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "mutant_forks", *modules]
        pipe = subprocess.PIPE
        self._forks = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        self._forks.communicate()

    def write(self, path: Path, text: str) -> None:
        """Change a module. Each version has a time of its own, so that none is taken for another one."""
        file = self.folder / path
        file.write_text(text)
        self._writes += 1
        os.utime(file, (self._writes, self._writes))

    def run(self, tests: Sequence[str], limit_s: float) -> Run:
        """Run tests until the first failure. Trouble if the run has no meaningful result."""
        self._report.write_text("{}")
        words = [
            "-x",
            "-q",
            "-p",
            "mutant_plugin",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:budget",
            "--import-mode=importlib",
        ]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--timeout={min(TEST_S, limit_s / 5)}", *tests]
        assert self._forks.stdin is not None and self._forks.stdout is not None
        print(json.dumps([words, limit_s]), file=self._forks.stdin, flush=True)
        answer = self._forks.stdout.readline()
        if not answer:
            raise Trouble("no process to run tests in")
        code, found = json.loads(answer), json.loads(self._report.read_text() or "{}")
        if "astray" in found:
            raise Trouble(f"{found.get('running', 'before any test')} tested another kvarve: {found['astray']}")
        if "unreadable" in found:
            raise Trouble(f"it does not even load: {found['unreadable']}")
        if code is None:
            return Run(found.get("running", "before any test"), f"hung for {limit_s:.0f} s")
        if code == 1 and "failed" in found:
            return Run(found["failed"], found["why"])
        if code == 3 and "running" in found:  # INTERNALERROR, of a frame without a line that was interrupted
            return Run(found["running"], "it failed in a way that pytest could not report")
        if code < 0 and "running" in found:
            return Run(found["running"], f"the process died of signal {-code}")
        if code != 0:
            said = (self.folder / "said").read_text().strip().splitlines()
            raise Trouble(f"pytest ended with {code}: {said[-1:]}")
        return Run()
