"""Does the test suite notice when the code is wrong? Each mutant is one realistic mistake, which a test has to kill.

The mistakes are data: each entry of mutants.toml has a description, a file, a text and its replacement, and the tests
that are likely to fail, for a quick kill. If these pass, the whole suite of the core and its transfers runs; a mutant
that it does not kill has survived: a test is missing. A mutant whose text does not occur exactly once in its file is a
failure too, since the code has changed and the mutant's test may no longer cover it.

    python tools/mutants.py                            # all of them; exit code 1 unless every one is killed
    python tools/mutants.py --list                     # only check that they match the code
    python tools/mutants.py --only salt-ignored --json out/mutants.json

Every mutant lives in a copy of sources and tests, so nothing is written into the checkout. The runs are repeatable (see
mutant_plugin.py): the same examples from Hypothesis, the same hashes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "tools", "bench", "docs", "pyproject.toml")
TEST_S, QUICK_S, SUITE_S = 60, 300, 1800  # time limits of a test, a mutant's own tests and the whole suite


class Trouble(Exception):
    """The run has no result: the list is wrong, or the suite fails without any mutant."""


@dataclass(frozen=True)
class Mutant:
    name: str
    wrong: str  # one sentence
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: tuple[str, ...]  # which to run first: paths or node ids


@dataclass(frozen=True)
class Run:
    """The result of one run of pytest."""

    failed: str = ""  # the first test that failed, or that hung
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    name: str
    wrong: str
    file: str
    verdict: str  # killed, survived, or why it is unknown
    by: str = ""
    why: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.verdict == "killed"


def load(path: Path) -> tuple[list[Mutant], list[str]]:
    """The mutants, and the tests that have to pass before one counts as surviving."""
    data = tomllib.loads(path.read_text())
    mutants = [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in data["mutant"]]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Trouble(f"{path.name}: two mutants are called {', '.join(sorted(twice))}")
    return mutants, data["suite"]


def misfit(mutant: Mutant) -> str:
    """Why a mutant does not match the code; empty if it does."""
    if not (ROOT / mutant.file).is_file():
        return f"there is no {mutant.file}"
    text = (ROOT / mutant.file).read_text()
    if (times := text.count(mutant.old)) != 1:
        return f"its text occurs {times} times in {mutant.file}, not once"
    try:
        # Not ast.parse, which CPython 3.11 cannot do in several threads at once ("recursion depth mismatch").
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec", dont_inherit=True)
    except SyntaxError as e:
        return f"it is not Python: {e}"
    for test in mutant.tests:
        path, *inside = test.split("::")
        if not (ROOT / path).exists():
            return f"there is no {path}"
        if inside and f"{inside[-1].split('[')[0]}" not in (ROOT / path).read_text():
            return f"there is no {inside[-1]} in {path}"
    return "" if mutant.tests else "it names no tests"


@contextmanager
def copied(mutant: Mutant | None) -> Iterator[Path]:
    """A copy of sources and tests, with the mistake in it."""
    with TemporaryDirectory(prefix="kvarve-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        if mutant is not None:
            file = copy / mutant.file
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        yield copy


def run(copy: Path, tests: Sequence[str], limit_s: float) -> Run:
    """Run tests until the first failure. Trouble if the run has no meaningful result."""
    handle, name = mkstemp(dir=copy, suffix=".report")
    os.close(handle)
    report = Path(name)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy / "tools")]),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "KVARVE_MUTANT": str(copy / "src"),
        "KVARVE_MUTANT_REPORT": str(report),
    }
    words = ["-x", "-q", "-p", "mutant_plugin", "-p", "no:cacheprovider", "--import-mode=importlib"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words, f"--timeout={TEST_S}", *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, hung = process.communicate(timeout=limit_s)[0], False
    except subprocess.TimeoutExpired:
        said, hung = "", True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with all processes that its tests have started
            process.wait()
    found = json.loads(report.read_text() or "{}")
    if "astray" in found:
        raise Trouble(f"{found.get('running', 'before any test')} tested another kvarve: {found['astray']}")
    if "unreadable" in found:
        raise Trouble(f"it does not even load: {found['unreadable']}")
    if hung:
        return Run(found.get("running", "before any test"), f"hung for {limit_s:.0f} s")
    if process.returncode == 1 and "failed" in found:
        return Run(found["failed"], found["why"])
    if process.returncode == 3 and "running" in found:  # INTERNALERROR, of a frame without a line that was interrupted
        return Run(found["running"], "it failed in a way that pytest could not report")
    if process.returncode < 0 and "running" in found:
        return Run(found["running"], f"the process died of signal {-process.returncode}")
    if process.returncode != 0:
        raise Trouble(f"pytest ended with {process.returncode}: {said.strip().splitlines()[-1:]}")
    return Run()


def judge(mutant: Mutant, suite: Sequence[str]) -> Outcome:
    """Run the tests against a mutant until one fails."""
    start = time.monotonic()

    def outcome(verdict: str, found: Run | None = None) -> Outcome:
        by, why = (found.failed, found.why) if found else ("", "")
        return Outcome(mutant.name, mutant.wrong, mutant.file, verdict, by, why, time.monotonic() - start)

    if problem := misfit(mutant):
        return outcome(f"does not fit: {problem}")
    try:
        with copied(mutant) as copy:
            found = run(copy, mutant.tests, QUICK_S)
            if found.failed:
                return outcome("killed", found)
            found = run(copy, suite, SUITE_S)
        if not found.failed:
            return outcome("survived")
        with copied(None) as copy:  # that test has not passed without a mutant yet
            if run(copy, [found.failed], QUICK_S).failed:
                raise Trouble(f"{found.failed} fails without any mutant")
        return outcome("killed", found)
    except Trouble as e:
        return outcome(f"unknown: {e}")


def check(mutants: Sequence[Mutant], jobs: int) -> None:
    """Trouble unless the tests of these mutants pass on unchanged code."""
    files: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests if not misfit(mutant)):
        files.setdefault(test.split("::")[0], set()).add(test)
    with copied(None) as copy, ThreadPoolExecutor(jobs) as pool:
        whole = [[file] if file in tests else sorted(tests) for file, tests in files.items()]
        for found in pool.map(lambda tests: run(copy, tests, SUITE_S), whole):
            if found.failed:
                raise Trouble(f"{found.failed} fails without any mutant: {found.why}")


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table("mutant", "what is wrong", "file", "killed by", "s", pad_edge=False)
    shown.columns[-1].justify = "right"
    for each in outcomes:
        by = Text(each.by.removeprefix("tests/")) if each.killed else Text(each.verdict, style="bold red")
        shown.add_row(
            Text(each.name),
            Text(each.wrong),
            Text(each.file.removeprefix("src/kvarve/")),
            by,
            f"{each.seconds:.1f}",
        )
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only say what there is, and whether it fits the code")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutant first")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    start = time.monotonic()
    try:
        mutants, suite = load(LIST)
        if unknown := set(args.only or ()) - {mutant.name for mutant in mutants}:
            raise Trouble(f"no mutant is called {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if not args.only or mutant.name in args.only]
        if args.sample is not None:
            mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
        if args.list:
            for mutant in mutants:
                problem = misfit(mutant)
                console.print(Text.assemble(f"{mutant.name}: {mutant.wrong} ", (problem, "bold red")))
            return 1 if any(map(misfit, mutants)) else 0
        if not args.trust:
            print("the tests without any mutant ...", file=sys.stderr)
            check(mutants, args.jobs)
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for outcome in pool.map(lambda mutant: judge(mutant, suite), mutants):
                outcomes.append(outcome)
                print(f"{len(outcomes)}/{len(mutants)} {outcome.name}: {outcome.verdict}", file=sys.stderr)
    except Trouble as e:
        print(f"mutants: {e}", file=sys.stderr)
        return 1
    console.print(table(outcomes))
    killed = sum(outcome.killed for outcome in outcomes)
    console.print(f"{killed} of {len(outcomes)} killed in {time.monotonic() - start:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
