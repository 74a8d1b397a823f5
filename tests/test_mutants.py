"""The mistakes in tools/mutants.toml still fit the code, and some are still noticed; `make mutants` tries all."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_fits_the_code(mutants: ModuleType) -> None:
    listed, _ = mutants.load(mutants.LIST)
    assert len(listed) >= 20
    assert {mutant.name: problem for mutant in listed if (problem := mutants.misfit(mutant))} == {}


def test_some_mutants_are_killed(mutants: ModuleType, tmp_path: Path) -> None:
    names, out = ["minimum-over-pools", "checksum-of-the-header-only"], tmp_path / "outcomes.json"
    words = [word for name in names for word in ("--only", name)]
    assert mutants.main([*words, "--trust", "--jobs", "2", "--json", str(out)]) == 0
    outcomes = json.loads(out.read_text())
    assert [(each["name"], each["verdict"]) for each in outcomes] == [(name, "killed") for name in names]
    assert outcomes[1]["by"] == "tests/memory/test_record.py::test_every_single_bit_of_header_and_payload_counts"


LISTED = """
suite = ["tests/test_boundaries.py"]
[[mutant]]
name = "unnoticed"
wrong = "The salt does not count, which no test of boundaries can know."
file = "src/kvarve/keys.py"
old = '{old}'
new = 'namespace).digest()'
tests = ["tests/test_boundaries.py"]
"""


@pytest.mark.parametrize(
    ("old", "verdict"),
    [
        ("namespace + salt.encode()).digest()", "survived"),
        ("namespace + pepper.encode()).digest()", "its text occurs 0 times in src/kvarve/keys.py, not once"),
        ("digest()", "its text occurs 3 times in src/kvarve/keys.py, not once"),
    ],
    ids=["nothing-notices", "not-there", "twice"],
)
def test_a_mutant_that_survives_or_does_not_fit_fails(
    mutants: ModuleType,
    old: str,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(mutants, "LIST", tmp_path / "mutants.toml")
    mutants.LIST.write_text(LISTED.replace("{old}", old))
    assert mutants.main(["--trust"]) == 1
    assert verdict in capsys.readouterr().err


def test_tests_that_fail_without_a_mutant_kill_nothing(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Else a broken suite would look like a perfect one."""
    monkeypatch.setattr(mutants, "LIST", tmp_path / "mutants.toml")
    mutants.LIST.write_text(LISTED.replace("{old}", "namespace + salt.encode()).digest()"))
    monkeypatch.setattr(mutants, "run", lambda copy, tests, limit_s: mutants.Run(tests[0], "it always fails"))
    assert mutants.main([]) == 1
    assert "test_boundaries.py fails without any mutant: it always fails" in capsys.readouterr().err
