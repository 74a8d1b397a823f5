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
import json
import os
import queue
import random
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mutant_copies import ROOT, Copy, Trouble
from mutant_patterns import Misfit, Source
from mutant_random import drawn

LIST = Path(__file__).with_name("mutants.toml")
QUICK_S, SUITE_S = 300, 3600  # time limits of a mutant's own tests and of the whole suite
SLOW_IMPORTS = ("torch", "transformers.models.qwen3_5.modeling_qwen3_5")
# They test what is installed, other mutants, or engines that have a Python of their own.
NOT_OF_A_COPY = ("test_mutants.py", "test_wheel.py", "engines", "storage/test_write_a_backend.py")
PARSES = threading.Lock()  # CPython 3.11 cannot parse in several threads at once ("recursion depth mismatch")
FOLDERS = ("core", "storage", "transfer", "memory")  # of src/kvarve, for mutants made by chance


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
        tests = (test.removeprefix("tests/") for test in self.stages[0] if not test.startswith("-"))
        return "\n".join([*lines, f'tests = "{" ".join(tests)}"'])


@dataclass(frozen=True)
class Outcome:
    name: str
    address: str
    verdict: str  # killed, survived, or why it is unknown
    by: str = ""
    why: str = ""
    diff: str = ""  # of a survivor
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.verdict == "killed"


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
    for test in (test for stage in mutant.stages[:1] for test in stage if not test.startswith("-")):
        path, *inside = test.split("::")
        if not (ROOT / path).exists():
            return f"there is no {path}"
        if inside and inside[-1].split("[")[0] not in (ROOT / path).read_text():
            return f"there is no {inside[-1]} in {path}"
    return "" if any(mutant.stages[0]) else "it names no tests"


def judge(mutant: Mutant, copies: "queue.Queue[Copy]", source: Source) -> Outcome:
    """Run the tests against a mutant until one fails."""
    start = time.monotonic()

    def outcome(verdict: str, by: str = "", why: str = "", diff: str = "") -> Outcome:
        return Outcome(mutant.name, mutant.address, verdict, by, why, diff, time.monotonic() - start)

    try:
        with PARSES:
            if problem := misfit(source, mutant):
                return outcome(f"does not fit: {problem}")
            path, text = source.change(mutant.address, mutant.old, mutant.new, mutant.nth)
    except Misfit as e:
        return outcome(f"does not fit: {e}")
    name, right, copy = path.relative_to(ROOT), source.texts[path], copies.get()
    try:
        copy.write(name, text)
        for at, tests in enumerate(mutant.stages):
            found = copy.run(tests, SUITE_S if at else QUICK_S)
            if found.failed:
                return outcome("killed", found.failed, found.why)
        lines = right.splitlines(keepends=True), text.splitlines(keepends=True)
        return outcome("survived", diff="".join(unified_diff(*lines, str(name), str(name))))
    except Trouble as e:
        return outcome(f"unknown: {e}")
    finally:
        copy.write(name, right)
        copies.put(copy)


def check(outcomes: Sequence[Outcome], copy: Copy) -> list[Outcome]:
    """The outcomes, where those count as unknown whose test fails without any mutant as well."""
    tests = dict.fromkeys(outcome.by for outcome in outcomes if "::" in outcome.by)
    broken: dict[str, str] = {}
    while left := [test for test in tests if test not in broken]:
        try:
            found = copy.run(left, SUITE_S)
        except Trouble as e:
            broken |= dict.fromkeys(left, f"unknown: without any mutant {e}")
            break
        if not found.failed:
            break
        why = f"unknown: {found.failed} fails without any mutant: {found.why}"
        broken |= dict.fromkeys([found.failed] if found.failed in left else left, why)
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
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        copies: queue.Queue[Copy] = queue.Queue()
        modules = SLOW_IMPORTS if len(mutants) > jobs else ()
        for _ in range(max(1, min(jobs, len(mutants)))):
            copies.put(Copy(Path(stack.enter_context(TemporaryDirectory(prefix="kvarve-mutant-"))), modules))
            stack.callback(copies.queue[-1].close)
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(lambda mutant: judge(mutant, copies, source), mutants):
                outcomes.append(outcome)
                print(f"{len(outcomes)}/{len(mutants)} {outcome.name}: {outcome.verdict}", file=sys.stderr, flush=True)
                if outcome.diff:
                    print(outcome.diff, flush=True)
        return check(outcomes, copies.get())


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
            problems = {mutant: misfit(source, mutant) for mutant in mutants}
            for mutant, problem in problems.items():
                console.print(Text.assemble(f"{mutant.address} {mutant.name} ", (problem, "bold red")))
            return int(any(problems.values()))
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
