"""A test that costs too much fails the run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import budget

TESTS = """
import pytest, costs
def test_cheap(): costs.seconds += 0.4
def test_dear(): costs.seconds += 0.5
def test_once(): costs.seconds += 0.7
def test_with_a_reason(): costs.seconds += 0.55
@pytest.mark.long
def test_long(): costs.seconds += 9
@pytest.fixture(scope="module")
def shared(): costs.seconds += 0.6
def test_shares(shared): costs.seconds += 0.1
"""


class Costs:
    """What the tests of a run say that they have cost."""

    seconds = 0.0


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pytest.RunResult]:
    """Runs `TESTS` with these marks."""
    costs = Costs()
    monkeypatch.setitem(sys.modules, "costs", costs)
    monkeypatch.setattr(budget, "spent", lambda: costs.seconds)
    monkeypatch.setattr(budget, "slower", lambda rounds: 1.0)
    seconds = {"test_it.py::test_once": 0.2, "test_it.py::test_dear": 0.5}
    monkeypatch.setattr(budget, "again", lambda root, tests: {name: seconds[name] for name in tests})
    monkeypatch.setattr(budget.Budget, "collects", lambda self, phase, about: None)
    monkeypatch.setattr(budget, "LIST", pytester.path / "dear.toml")
    (pytester.path / "dear.toml").write_text('"test_it.py::test_with_a_reason" = "without it no change may land"\n')
    pytester.makepyfile(test_it=TESTS)
    pytester.makeini("[pytest]\nmarkers = long: long\n")
    words = ("-p", "budget", "-p", "no:xdist", "-p", "no:cacheprovider", "-m")
    return lambda marks: pytester.runpytest_inprocess(*words, marks)


def test_what_costs_too_much_without_a_reason_fails_the_run(run: Callable[[str], pytest.RunResult]) -> None:
    ended = run("not long")
    assert ended.ret == pytest.ExitCode.TESTS_FAILED
    ended.assert_outcomes(passed=5, deselected=1)
    said = [line.partition(",")[0] for line in ended.outlines if line.startswith("budget: ")]
    shared, dear = "test_it.py::shared costs 0.60 CPU s", "test_it.py::test_dear costs 0.50 CPU s"
    assert said == [f"budget: {shared}", f"budget: {dear}"], "a fixture pays, and not who asks for it first"
    ended.stdout.re_match_lines(["=+ 2 CPU s; the dearest of 6 =+", " +0.60 test_it.py::shared"])


def test_a_run_with_long_tests_is_not_judged(run: Callable[[str], pytest.RunResult]) -> None:
    ended = run("")
    ended.assert_outcomes(passed=6)
    assert ended.ret == pytest.ExitCode.OK


def test_all_together_cost_too_much() -> None:
    costs = budget.Budget({})
    costs.costs.update({f"test_{number}": 0.25 for number in range(1401)})  # type: ignore[arg-type]
    assert costs.complaints() == ["all short tests cost 350 CPU s, more than 350"]


def test_a_process_counts_while_it_lives_and_when_it_has_ended() -> None:
    code = "import time\nwhile time.process_time() < 0.08: pass\nprint(flush=True)\ninput()"
    before = budget.spent()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        living = budget.spent()
        process.communicate("\n")
    assert living - before > 0.06
    assert budget.spent() - before > 0.06


def test_the_list_is_short_and_names_what_there_is() -> None:
    root = Path(__file__).parent.parent
    dear = budget.listed()
    assert len(dear) <= 40 and all(dear.values())
    suites = [each.read_text() for each in (root / "src" / "kvarve" / "testing").glob("suite*.py")]
    for name in dear:
        path, _, test = name.partition("::")
        place = root / path
        texts = [each.read_text() for each in ([place] if place.is_file() else [*place.glob("*.py")])]
        if "::" in test:  # what its class inherits
            texts += suites
        assert any(f"def {test.partition('[')[0].rpartition('::')[2]}(" in text for text in texts), name
