"""Does the test suite notice when the code is wrong? Each mutant is one realistic mistake, which a test has to kill.

The mistakes are data: each entry of mutants.toml has a function, a pattern in its syntax tree and a replacement (see
mutant_patterns.py), and the tests that are likely to fail, for a quick kill. If these pass, the whole suite of the core
and its transfers runs; a mutant that it does not kill has survived: a test is missing. A mutant whose pattern is not
exactly once in its function is a failure too: the code has changed, and the mutant's test may no longer cover it.

    python tools/mutants.py                            # all of them; exit code 1 unless every one is killed
    python tools/mutants.py --list                     # only check that they match the code
    python tools/mutants.py --only salt-ignored --json out/mutants.json
    python tools/mutants.py --random 40 --seed 1 --in core storage    # made by chance, printed as entries of the list

Every mutant lives in a copy of sources and tests, so nothing is written into the checkout. The runs are repeatable (see
mutant_plugin.py): the same examples from Hypothesis, the same hashes. A test that fails without a mutant kills none.
"""

import argparse
import difflib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mutant_patterns import Misfit, Source
from mutant_random import drawn

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "tools", "bench", "docs", "pyproject.toml")
TEST_S, QUICK_S, SUITE_S = 60, 300, 3600  # time limits of a test, a mutant's own tests and the whole suite
SLOW_IMPORTS = ("torch", "transformers.models.qwen3_5.modeling_qwen3_5")
# They test what is installed, other mutants, or engines that have a Python of their own.
NOT_OF_A_COPY = ("test_mutants.py", "test_wheel.py", "engines", "storage/test_write_a_backend.py")
FOLDERS = ("core", "storage", "transfer", "memory")  # of src/kvarve, for mutants made by chance


class Trouble(Exception):
    """The run has no result: the list is wrong, or pytest cannot run."""


@dataclass(frozen=True)
class Mutant:
    name: str
    address: str
    old: str
    new: str
    nth: int | None
    stages: tuple[tuple[str, ...], ...]  # which tests to run: paths or node ids; the next ones if none of these fails

    def __str__(self) -> str:
        """As it stands in mutants.toml."""
        lines = [f'["{self.address}".{self.name}]', f"old = {quoted(self.old)}"]
        lines += [f"new = {quoted(self.new)}"] if self.new != "pass" else []
        lines += [f"nth = {self.nth}"] if self.nth else []
        return "\n".join([*lines, f'tests = "{" ".join(test.removeprefix("tests/") for test in self.stages[0])}"'])


@dataclass(frozen=True)
class Run:
    """The result of one run of pytest."""

    failed: str = ""  # the first test that failed, or that hung
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    name: str
    address: str
    verdict: str  # killed, survived, or why it is unknown
    by: str = ""
    why: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.verdict == "killed"


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
        words = ["-x", "-q", "-p", "mutant_plugin", "-p", "no:cacheprovider", "--import-mode=importlib"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--timeout={TEST_S}", *tests]
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


def quoted(text: str) -> str:
    quote = "'''" if "\n" in text or "'" in text else "'"
    return quote + ("\n" if "\n" in text else "") + text + quote


def load(path: Path) -> list[Mutant]:
    data = tomllib.loads(path.read_text())
    suite = tests_of(data.pop("suite"))
    mutants = [
        Mutant(name, address, each["old"], each.get("new", "pass"), each.get("nth"), (tests_of(each["tests"]), suite))
        for address, entries in data.items()
        for name, each in entries.items()
    ]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Trouble(f"{path.name}: two mutants are called {', '.join(sorted(twice))}")
    return mutants


def tests_of(words: str) -> tuple[str, ...]:
    return tuple(f"tests/{word}" for word in words.split())


def made(source: Source, count: int, seed: int, where: Sequence[str]) -> list[Mutant]:
    """Mutants by chance. Tests of the same name run first, then those of the same folder, then the whole short form."""
    mutants = []
    whole = ("tests", *(f"--ignore=tests/{path}" for path in NOT_OF_A_COPY))
    for at, (path, change) in enumerate(drawn(source, ROOT / "src" / "kvarve", count, seed, where)):
        parts = path.relative_to(ROOT / "src" / "kvarve").with_suffix("").parts
        folder = Path("tests", *parts[:-1][:1])
        near = (sorted(ROOT.glob(f"{folder}/test_*{part}*.py")) for part in reversed(parts[1:] or parts))
        first = next((files for files in near if files), [])
        beside = [(str(folder), *whole[1:])] if len(parts) > 1 else []
        stages = (tuple(str(file.relative_to(ROOT)) for file in first), *beside, whole)
        mutants.append(Mutant(f"random-{seed}-{at}", *change, tuple(stage for stage in stages if stage)))
    return mutants


def misfit(source: Source, mutant: Mutant) -> str:
    """Why a mutant does not match the code; empty if it does."""
    try:
        source.place(mutant.address, mutant.old, mutant.new, mutant.nth)
    except Misfit as e:
        return str(e)
    for test in (test for stage in mutant.stages[:1] for test in stage):
        path, *inside = test.split("::")
        if not (ROOT / path).exists():
            return f"there is no {path}"
        if inside and inside[-1].split("[")[0] not in (ROOT / path).read_text():
            return f"there is no {inside[-1]} in {path}"
    return "" if any(mutant.stages[0]) else "it names no tests"


def judge(mutant: Mutant, changed: tuple[Path, str] | str, copies: "queue.Queue[Copy]", source: Source) -> Outcome:
    """Run the tests against a mutant until one fails. `changed` is a file with its text, or why there is none."""
    start = time.monotonic()

    def outcome(verdict: str, found: Run | None = None) -> Outcome:
        by, why = (found.failed, found.why) if found else ("", "")
        return Outcome(mutant.name, mutant.address, verdict, by, why, time.monotonic() - start)

    if isinstance(changed, str):
        return outcome(f"does not fit: {changed}")
    path, text = changed
    copy = copies.get()
    try:
        copy.write(path.relative_to(ROOT), text)
        for at, tests in enumerate(mutant.stages):
            found = copy.run(tests, SUITE_S if at else QUICK_S)
            if found.failed:
                return outcome("killed", found)
        return outcome("survived")
    except Trouble as e:
        return outcome(f"unknown: {e}")
    finally:
        copy.write(path.relative_to(ROOT), source.texts[path])
        copies.put(copy)


def check(outcomes: Sequence[Outcome], copy: Copy) -> list[Outcome]:
    """The outcomes, where those count as unknown whose test fails without any mutant as well."""
    tests = dict.fromkeys(outcome.by for outcome in outcomes if "::" in outcome.by)
    broken: dict[str, str] = {}
    while left := [test for test in tests if test not in broken]:
        found = copy.run(left, SUITE_S)
        if not found.failed:
            break
        if found.failed not in left:
            raise Trouble(f"{found.failed} fails without any mutant: {found.why}")
        broken[found.failed] = f"unknown: {found.failed} fails without any mutant: {found.why}"
    return [Outcome(**asdict(each) | {"verdict": broken.get(each.by, each.verdict)}) for each in outcomes]


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table("mutant", "in", "killed by", "s", pad_edge=False)
    shown.columns[-1].justify = "right"
    for each in outcomes:
        by = Text(each.by.removeprefix("tests/")) if each.killed else Text(each.verdict, style="bold red")
        shown.add_row(Text(each.name), Text(each.address), by, f"{each.seconds:.1f}")
    return shown


def run(mutants: Sequence[Mutant], source: Source, jobs: int) -> list[Outcome]:
    """The outcome of each; survivors are shown."""
    changed: list[tuple[Path, str] | str] = []
    for mutant in mutants:  # CPython 3.11 cannot parse in several threads at once ("recursion depth mismatch")
        problem = misfit(source, mutant)
        try:
            changed.append(problem or source.change(mutant.address, mutant.old, mutant.new, mutant.nth))
        except Misfit as e:
            changed.append(str(e))
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        copies: queue.Queue[Copy] = queue.Queue()
        modules = SLOW_IMPORTS if len(mutants) > jobs else ()
        for _ in range(min(jobs, sum(not isinstance(each, str) for each in changed))):
            copies.put(Copy(Path(stack.enter_context(TemporaryDirectory(prefix="kvarve-mutant-"))), modules))
            stack.callback(copies.queue[-1].close)
        with ThreadPoolExecutor(jobs) as pool:
            judged = pool.map(lambda each, change: judge(each, change, copies, source), mutants, changed)
            for outcome, mutant, change in zip(judged, mutants, changed, strict=True):
                outcomes.append(outcome)
                print(f"{len(outcomes)}/{len(mutants)} {outcome.name}: {outcome.verdict}", file=sys.stderr, flush=True)
                if outcome.verdict == "survived" and not isinstance(change, str):
                    name = str(change[0].relative_to(ROOT))
                    texts = source.texts[change[0]].splitlines(keepends=True), change[1].splitlines(keepends=True)
                    print(mutant, "".join(difflib.unified_diff(*texts, name, name)), sep="\n", flush=True)
        return check(outcomes, copies.queue[0]) if copies.queue else outcomes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only say what there is, and whether it fits the code")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by --seed")
    parser.add_argument("--random", type=int, metavar="N", help="so many that are not in the list, made by --seed")
    parser.add_argument("--in", dest="where", nargs="+", default=FOLDERS, metavar="NAME", help="folders for --random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    start = time.monotonic()
    source = Source(ROOT / "src")
    try:
        mutants = load(LIST) if args.random is None else made(source, args.random, args.seed, args.where)
        if unknown := set(args.only or ()) - {mutant.name for mutant in mutants}:
            raise Trouble(f"no mutant is called {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if not args.only or mutant.name in args.only]
        if args.sample is not None:
            mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
        if args.random is not None:
            print(*mutants, sep="\n\n", flush=True)
        if args.list:
            problems = [misfit(source, mutant) for mutant in mutants]
            for mutant, problem in zip(mutants, problems, strict=True):
                console.print(Text.assemble(f"{mutant.address} {mutant.name} ", (problem, "bold red")))
            return 1 if any(problems) else 0
        outcomes = run(mutants, source, args.jobs)
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
