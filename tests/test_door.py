"""The public names: all are there, all are told of, and a program needs no others."""

import ast
import pydoc
import runpy
import sys
from pathlib import Path

import pytest

import kvarve
from kvarve import errors
from kvarve.storage import open_storage

FOUND = {name: getattr(kvarve, name) for name in kvarve.__all__}  # which imports torch
TOY = Path(__file__).with_name("toy_engine.py")


def told(name: str, text: str) -> bool:
    return any(line.strip().startswith(f"{name} ") for line in text.splitlines())


def test_every_public_name_is_imported_for_checkers_as_for_programs_and_told_in_a_sentence() -> None:
    source = ast.parse(Path(kvarve.__file__).read_text())
    (block,) = (each for each in source.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    seen = {name.name: each.module for each in block.body if isinstance(each, ast.ImportFrom) for name in each.names}
    assert seen == kvarve._MODULES
    of_errors = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert kvarve.__all__ == sorted({*seen, *of_errors}) and {*kvarve.__all__} <= {*dir(kvarve)}
    for name, found in FOUND.items():
        assert found.__name__ == name
        assert name in of_errors or told(name, str(kvarve.__doc__)), name
    with pytest.raises(AttributeError, match="no attribute 'Foo'"):
        kvarve.Foo  # noqa: B018


def test_a_program_written_from_the_help_alone_hits_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, program = pydoc.render_doc(kvarve, renderer=pydoc.plaintext), ast.parse(TOY.read_text())
    names = {each.attr for each in ast.walk(program) if isinstance(each, ast.Attribute)}
    names |= {str(each.arg) for each in ast.walk(program) if isinstance(each, ast.keyword)}
    assert {name for name in names if name not in text} <= {"new_tensor", "argv", "append"}, "of others than kvarve"
    monkeypatch.setattr(sys, "argv", [str(TOY), str(tmp_path)])
    for pages in (0, 2):
        runpy.run_path(str(TOY))
        assert capsys.readouterr().out == f"{pages} pages\n"


def test_a_storage_is_closed_at_the_end_of_its_block(tmp_path: Path) -> None:
    with open_storage(f"file://{tmp_path}/store?capacity=64MiB", label=b"mine", description="for a test") as storage:
        assert storage.exists(["page"]) == [False]
    with pytest.raises(kvarve.StorageError, match="closed"):
        storage.exists(["page"])


@pytest.mark.parametrize("label", ["mine", b"", b"m" * 65])
def test_a_label_of_another_kind_or_length_is_refused(tmp_path: Path, label: bytes) -> None:
    with pytest.raises(kvarve.ConfigError, match="storage label must"):
        open_storage(f"file://{tmp_path}/store?capacity=64MiB", label=label, description="for a test")
    assert not [*tmp_path.iterdir()]
