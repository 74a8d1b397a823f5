"""What tests cost: CPU seconds of each with all processes below it, on an idle core of the reference machine.

Wall time depends on what else a machine does, so it is not looked at, and a loop says how much slower this core is than
the reference's, before the first test and every few seconds. A short test, and a fixture that several tests share, may
cost `EACH_S`, and as measured `NOISE` times that, unless `dear.toml` names it with the reason why no change may land
without it; all short tests together may cost `ALL_S`. A test that has cost more is run again at the end, alone. A run
with long tests is not judged.
What collects and imports is not counted, nor are full collections of garbage, for which whichever test runs would pay.
"""

import gc
import importlib
import json
import os
import resource
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

EACH_S, ALL_S, SHOWN, MANY = 0.3, 350.0, 10, 20
NOISE = 1.5  # between runs, most of all beside other work
ROUNDS, ROUNDS_S = 10_000_000, 0.92  # of the loop, and what an idle core of the reference machine needs for them
AGAIN_S = 10  # seconds after which a tenth of the loop runs once more
TRIES = 3  # of tests that seem too dear, since a busy machine makes some so
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
COSTS = "KVARVE_TEST_COSTS"  # the variable that names the file for what the tests of a second run have cost
SHORT = "not long"  # of the marks that a run asks for
LIST = Path(__file__).with_name("dear.toml")
# What is imported where it is first needed would be paid for by whichever test comes first.
LAZY = (
    "kvarve.reference.server.serve",
    "kvarve.reference.engine.engine",
    "transformers.models.qwen3_5.modeling_qwen3_5",
)


class Budget:
    def __init__(self, dear: dict[str, str], judges: bool = True) -> None:
        self.dear, self.judges = dear, judges
        self.costs = Counter[str]()  # seconds by test and by shared fixture
        self.running: Counter[str] = Counter()  # those of the test that runs
        self.tests = set[str]()
        self.marked = 0.0
        self.scale, self.scaled = 1.0, 0.0
        self.collected = 0.0  # by the garbage collector, in the oldest generation

    def collects(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] == 2:
            self.collected += time.process_time() * (1 if phase == "stop" else -1)

    def pytest_collection_finish(self) -> None:
        if "transformers" in sys.modules:
            for name in LAZY:
                importlib.import_module(name)
        if forks := sys.modules.get("forks"):
            forks.ready()
        if hypothesis := sys.modules.get("hypothesis"):  # which makes its tables of characters once
            once = hypothesis.settings(database=None, deadline=None, suppress_health_check=[*hypothesis.HealthCheck])
            hypothesis.find(hypothesis.strategies.text(min_size=1), bool, settings=once)
        gc.collect()
        gc.freeze()  # else each full collection looks at all tests and at all of torch
        gc.callbacks.append(self.collects)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        if not self.scaled:
            self.scale, self.scaled = slower(ROUNDS), time.monotonic()
        elif time.monotonic() > self.scaled + AGAIN_S:
            self.scale, self.scaled = slower(ROUNDS // 10), time.monotonic()
        self.marked = self.spent()
        return (yield)

    def spent(self) -> float:
        return spent() - self.collected

    def book(self, name: str) -> None:
        now = self.spent()
        self.running[name] += (now - self.marked) / self.scale  # type: ignore[assignment]
        self.marked = now

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        self.book(request._pyfuncitem.nodeid)
        try:
            return (yield)
        finally:
            self.book(shared(fixturedef))

    def pytest_fixture_post_finalizer(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> None:
        self.book(request._pyfuncitem.nodeid if fixturedef.scope == "function" else shared(fixturedef))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self.book(item.nodeid)
        if "long" not in item.keywords:
            report.cpu_s = dict(self.running)  # type: ignore[attr-defined]
        self.running.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.costs.update(getattr(report, "cpu_s", {}))
        self.tests.add(report.nodeid)

    def too_dear(self) -> dict[str, float]:
        return {
            name: cost for name, cost in self.costs.most_common() if cost > NOISE * EACH_S and name not in self.dear
        }

    def complaints(self) -> list[str]:
        said = [
            f"{name} costs {cost:.2f} CPU s, more than {EACH_S}: make it cheaper, or long, or tell {LIST.name} why"
            for name, cost in self.too_dear().items()
        ]
        total = self.costs.total()
        return said + [f"all short tests cost {total:.0f} CPU s, more than {ALL_S:.0f}"] * (total > ALL_S)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if COSTS in os.environ:
            Path(os.environ[COSTS]).write_text(json.dumps(self.costs))
        elif session.exitstatus == 0 and self.judges:
            for _ in range(TRIES):
                for name, cost in again(session.config.rootpath, self.tests & self.too_dear().keys()).items():
                    self.costs[name] = min(self.costs[name], cost)  # type: ignore[call-overload]
            if self.complaints():
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"{self.costs.total():.0f} CPU s; the dearest of {len(self.costs)}")
        for name, cost in self.costs.most_common(SHOWN):
            terminalreporter.line(f"{cost:7.2f} {name}")
        for complaint in self.complaints() if self.judges else ():
            terminalreporter.line(f"budget: {complaint}", red=True)


def again(root: Path, tests: Collection[str]) -> dict[str, float]:
    """What these tests cost where nothing else runs; nothing if they are many."""
    if not 0 < len(tests) <= MANY:
        return {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "costs"
        words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses", "0", *tests]
        subprocess.run(words, cwd=root, env=os.environ | {COSTS: str(file)}, capture_output=True, check=False)
        told = json.loads(file.read_text()) if file.exists() else {}
    return {name: told[name] for name in tests if name in told}


def shared(fixture: pytest.FixtureDef[object]) -> str:
    return f"{fixture.baseid}::{fixture.argname}"


def slower(rounds: int) -> float:
    """How many times the CPU seconds of the reference machine's idle core this one needs now."""
    begun, x = time.process_time(), 1
    for _ in range(rounds):
        x = (x * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return (time.process_time() - begun) / (ROUNDS_S * rounds / ROUNDS)


def spent() -> float:
    """CPU seconds of this process, of its children that have ended, and of all below it that live."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + living("self")


def living(pid: str) -> float:
    """CPU seconds of the living processes below one, each with its children that have ended."""
    seconds = 0.0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
                seconds += sum(map(int, times)) * TICK_S + living(child)
        except OSError:  # it has ended meanwhile
            continue
    return seconds


def listed() -> dict[str, str]:
    """The reason why each of these may be dear."""
    return tomllib.loads(LIST.read_text())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget(listed(), SHORT in config.option.markexpr), "costs of tests")
