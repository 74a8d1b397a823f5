"""The mistakes in tools/mutants.toml still fit the code, and some are still noticed; `make mutants` tries all."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PARTS = 14


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
        return importlib.import_module("mutants")


@pytest.fixture(scope="module")
def source(mutants: ModuleType) -> Any:
    return mutants.Source(ROOT / "src")


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mutant_fits_the_code(mutants: ModuleType, source: Any, part: int) -> None:
    listed = mutants.load(mutants.LIST)
    assert len(listed) >= 20
    size = -(-len(listed) // PARTS)
    mine = listed[part * size : (part + 1) * size]
    assert {mutant.name: problem for mutant in mine if (problem := mutants.misfit(source, mutant))} == {}


def test_a_mutant_is_killed_by_a_test_that_passes_without_it(mutants: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "outcomes.json"
    assert mutants.main(["--only", "minimum-over-pools", "--jobs", "1", "--json", str(out)]) == 0
    [outcome] = json.loads(out.read_text())
    assert (outcome["name"], outcome["verdict"]) == ("minimum-over-pools", "killed")
    assert outcome["by"].startswith("tests/test_boundaries.py::")


CODE = '''
"""A module."""

class Pool:
    def take(self, wanted: int) -> list[int]:
        """Not `wanted < 0`, which stands here too."""
        if (
            wanted < 0  # a comment
        ):
            raise ValueError(f"{wanted} < 0")
        self.note(wanted, "taken", by=self)
        self.note(wanted, "again")
        return self.free[: wanted + 1]

    @property
    def room(self) -> int:
        text = """of
several lines"""
        return len(self.free) if text else 0
'''


@pytest.fixture
def pool(mutants: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "pool.py").write_text(CODE)
    (tmp_path / "other.py").write_text("class Pool:\n    def room(self):\n        return 1\n")
    return mutants.Source(tmp_path)


@pytest.mark.parametrize(
    ("address", "old", "new", "then"),
    [
        ("Pool.take", "wanted<0", "wanted <= 0", "if wanted <= 0:"),
        ("Pool.take", "if wanted < 0: ...", "if wanted > 0: ...", "if wanted > 0:\n            raise ValueError(f'"),
        ("Pool.take", "raise ValueError(...)", "pass", "if wanted < 0:\n            pass\n        self.note"),
        ("Pool.take", "self.note(..., 'again')", "pass", "'taken', by=self)\n        pass\n        return"),
        ("Pool.take", "self.note(..., by=self)", "self.note(..., by=None)", "self.note(wanted, 'taken', by=None)"),
        ("Pool.take", "return self.free[...]", "return []", "return []"),
        ("core.pool:Pool.room", "len(self.free)", "0", 'several lines"""\n        return 0 if text else 0'),
        ("pool:", "class Pool: ...", "class Pool(list): ...", "def take(self, wanted: int)"),
    ],
)
def test_a_pattern_is_found_however_it_is_formatted(pool: Any, address: str, old: str, new: str, then: str) -> None:
    path, text = pool.change(address, old, new)
    assert path.name == "pool.py"
    assert then in text


@pytest.mark.parametrize(
    ("address", "old", "why"),
    [
        ("Pool.give", "wanted", "there is no Pool.give"),
        ("Pool.room", "1", "Pool.room is in core.pool and other: say which"),
        ("Pool.take", "wanted > 0", "its pattern is 0 times in Pool.take, not once"),
        ("Pool.take", "self.note(...)", "its pattern is 2 times in Pool.take, not once"),
        ("Pool.take", "wanted <", "it is not Python: .*"),
    ],
)
def test_a_mutant_that_does_not_fit_says_why(mutants: ModuleType, pool: Any, address: str, old: str, why: str) -> None:
    with pytest.raises(mutants.Misfit, match=f"^{why}"):
        pool.change(address, old, "False")


def test_a_mutant_made_by_chance_can_be_found_by_what_is_printed_of_it(mutants: ModuleType, pool: Any) -> None:
    [root] = {path.parent.parent for path in pool.texts if path.name == "pool.py"}
    changes = mutants.drawn(pool, root, 100, 1, ["core"])
    assert changes == mutants.drawn(pool, root, 100, 1, ["core"])
    texts = [pool.change(*change)[1] for _, change in changes]
    assert len({*texts, CODE}) == len(changes) + 1 >= 8
    assert all('"""Not `wanted < 0`' in text and "ValueError(f" in text for text in texts if "raise" in text)


LISTED = """
suite = "test_boundaries.py"
["{address}".unnoticed]
old = 'salt.encode()'
new = 'b""'
tests = "test_boundaries.py"
"""


class Copy:
    """A copy in which every run of tests has the same result."""

    found: Any = None

    def __init__(self, *args: Any) -> None: ...

    def write(self, path: Path, text: str) -> None: ...

    def run(self, tests: list[str], limit_s: float) -> Any:
        return self.found

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("address", "fails", "verdict"),
    [
        ("root_key", "", "survived"),
        ("root_keys", "", "does not fit: there is no root_keys"),
        ("root_key", "tests/test_boundaries.py::test_it", "test_it fails without any mutant: it always fails"),
    ],
    ids=["nothing-notices", "not-there", "fails-without-it"],
)
def test_a_mutant_that_is_not_killed_fails(
    mutants: ModuleType,
    address: str,
    fails: str,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(mutants, "LIST", tmp_path / "mutants.toml")
    monkeypatch.setattr(mutants, "Copy", Copy)
    monkeypatch.setattr(Copy, "found", SimpleNamespace(failed=fails, why="it always fails"))
    mutants.LIST.write_text(LISTED.replace("{address}", address))
    assert mutants.main(["--jobs", "1"]) == 1
    said = capsys.readouterr()
    assert verdict in said.out.replace("\n", "") + said.err
    assert ("-    return" in said.out and "+    return" in said.out) == (verdict == "survived")
