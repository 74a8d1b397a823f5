"""All tests, part by part: what `make test` leaves out as well, long lives of the World, mutants, and the engines.

    python tools/test_all.py                          # every part that has not passed on this commit yet
    python tools/test_all.py --part engines --part tests-core    # a part, or all whose names begin so

The summary is in out/test-all.json: the commit, the seed of what is drawn, and for each part how many tests passed,
failed and were skipped and the seconds that it took. It is written after each part, so that a run which was cut off
goes on where it was. Another commit, or a file that is not committed, begins anew.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "test-all.json"
WORLD = [sys.executable, "-m", "tests.sim.world", "--all", "--out", "out/lives", f"--jobs={os.cpu_count() or 1}"]
STEPS, RANKS_STEPS = 1_000_000, 120_000  # of the World; those of several ranks are dear
MUTANTS = 60
UNCOMMITTED = " with changes"


def parts(seed: int) -> dict[str, list[str]]:
    """The commands by name."""
    folders = sorted({path.parent for path in (ROOT / "tests").glob("*/test_*.py")} - {ROOT / "tests" / "engines"})
    pytest = [sys.executable, "-m", "pytest", "-m", "", "--numprocesses", "3", "--dist", "loadfile"]
    tests = {f"tests-{folder.name}": [*pytest, str(folder.relative_to(ROOT))] for folder in folders}
    top = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    return {
        **tests,
        "tests-top": [*pytest, *top],
        "world": [*WORLD, "--seed", str(seed), "--steps", str(STEPS)],
        "world-engine": [*WORLD, "--engine", "--seed", str(seed), "--steps", str(STEPS)],
        "world-ranks": [*WORLD, "--ranks", "--seed", str(seed), "--steps", str(RANKS_STEPS)],
        "mutants": [sys.executable, "tools/mutants.py", "--sample", str(MUTANTS), "--seed", str(seed)],
        "newest": ["make", "test-newest"],
        "engines-vllm": ["make", "test-engine-vllm", "ENGINE_ARGS=-m ''"],
        "engines-sglang": ["make", "test-engine-sglang", "ENGINE_ARGS=-m ''"],
    }


def run(command: Sequence[str]) -> dict[str, object]:
    begun = time.monotonic()
    with TemporaryDirectory() as folder:
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": f"--junitxml={folder}/report.xml"}, check=False
        )
        suites = [suite for report in Path(folder).iterdir() for suite in ElementTree.parse(report).iter("testsuite")]
    said = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = said["failures"] + said["errors"]
    return {
        "ok": ended.returncode == 0,
        "passed": said["tests"] - failed - said["skipped"],
        "failed": failed,
        "skipped": said["skipped"],
        "seconds": round(time.monotonic() - begun, 1),
    }


def commit() -> str:
    """What is tested."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + (UNCOMMITTED if git("status", "--porcelain") else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", metavar="NAME", help="this one, or all whose names begin so")
    parser.add_argument("--seed", type=int, help="of the World and of the sample of mutants (default: the time)")
    parser.add_argument("--list", action="store_true", help="only say what the parts are")
    args = parser.parse_args(argv)
    summary = {"commit": commit(), "seed": args.seed or int(time.time()), "parts": {}}
    with suppress(OSError, ValueError):
        before = json.loads(OUT.read_text())
        if (
            before["commit"] == summary["commit"]
            and args.seed in (None, before["seed"])
            and UNCOMMITTED not in before["commit"]
        ):
            summary = before
    done = summary["parts"]
    chosen = {
        name: command
        for name, command in parts(summary["seed"]).items()
        if not args.part or any(name == part or name.startswith(f"{part}-") for part in args.part)
    }
    if args.list or not chosen:
        print("\n".join(f"{name}: {' '.join(command)}" for name, command in (chosen or parts(0)).items()))
        return 0 if chosen else 2
    (OUT.parent / "lives").mkdir(parents=True, exist_ok=True)
    for number, (name, command) in enumerate(chosen.items(), 1):
        if done.get(name, {}).get("ok"):
            continue
        print(f"--- {number}/{len(chosen)} {name}", flush=True)
        done[name] = run(command)
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(summary, indent=1) + "\n")
    for name in chosen:
        print(name, *(f"{key} {value}" for key, value in done[name].items()))
    return 0 if all(done[name]["ok"] for name in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
