"""A test that costs too much fails the run."""

from pathlib import Path

import pytest

import budget

BURN = "import time\ndef burn(s):\n    end = time.process_time() + s\n    while time.process_time() < end: pass\n"
DEAR = """
import pytest, subprocess, sys
{burn}
def test_cheap(): pass
def test_dear(): burn(0.03)
def test_dear_child():
    subprocess.run([sys.executable, "-S", "-c", {child!r}], check=True)
@pytest.mark.long
def test_long(): burn(0.03)
@pytest.fixture(scope="module")
def shared(): burn(0.03)
def test_shares(shared): pass
"""


@pytest.fixture
def ended(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> "pytest.RunResult":
    """A run with one reason in the list; a core's speed does not count."""
    monkeypatch.setattr(budget, "EACH_S", 0.02)
    monkeypatch.setattr(budget, "LAZY", ())
    monkeypatch.setattr(budget, "slower", lambda rounds: 1.0)
    monkeypatch.setattr(budget, "LIST", pytester.path / "dear.toml")
    (pytester.path / "dear.toml").write_text('"test_it.py::test_dear_child" = "a process counts with its test"\n')
    pytester.makepyfile(test_it=DEAR.format(burn=BURN, child=f"{BURN}burn(0.03)"))
    pytester.makeini("[pytest]\nmarkers = long: long\n")
    return pytester.runpytest_inprocess("-p", "budget", "-p", "no:xdist", "-p", "no:cacheprovider")


def test_what_costs_too_much_without_a_reason_fails_the_run(ended: "pytest.RunResult") -> None:
    assert ended.ret == pytest.ExitCode.TESTS_FAILED
    ended.assert_outcomes(passed=5)
    complaints = [line for line in ended.outlines if line.startswith("budget: ")]
    assert len(complaints) == 2, complaints
    assert any("test_it.py::test_dear costs 0.0" in line for line in complaints)
    assert any("test_it.py::shared costs 0.0" in line for line in complaints), (
        "a fixture, and not who asks for it first"
    )
    ended.stdout.re_match_lines([r".* CPU s; the dearest of .*", r" +0\.\d+ test_it.py::test_dear_child"])


def test_all_together_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = budget.Budget({})
    costs.costs.update({f"test_{number}": 0.25 for number in range(1401)})  # type: ignore[arg-type]
    assert costs.complaints() == ["all short tests cost 350 CPU s, more than 350"]


def test_the_list_is_short_and_names_what_there_is() -> None:
    root = Path(__file__).parent.parent
    dear = budget.listed()
    assert len(dear) <= 40 and all(dear.values())
    for name in dear:
        path, _, test = name.partition("::")
        place = root / path
        texts = [place.read_text()] if place.is_file() else [each.read_text() for each in place.glob("conftest.py")]
        assert any(f"def {test.partition('[')[0].rpartition('::')[2]}(" in text for text in texts), name
