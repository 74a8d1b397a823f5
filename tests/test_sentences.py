"""Sentences that people meet, held to docs/contributing.md's style by the syntax tree: docstrings, help and errors."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import kvarve

SOURCE = Path(kvarve.__file__).parent
BANNED = re.compile(
    r"\b(?:unless given|may be told|is told|says nothing|of any make|of ours|gets the)\b"
    r"|^Answers (?:a|the|what|whether)\b|; answers (?!are)"  # for returns
)
BEGINS_BADLY = re.compile(r"(?:of|that|what|whether)\b", re.IGNORECASE)
OF_OTHERS = re.compile(r"(?:: |=)\{\}$|^\{\}.*\(see \{\} --help\)$|^\W*$")
CONFIG_ERRORS = ("ConfigError", "HandOverError", "TooLong")
CONDITION = re.compile(r"\b(?:must|needs?|unknown|cannot|not supported)\b")


@cache
def sentences() -> list[tuple[str, str, str]]:
    """Where each stands, what it is (doc, help or error), and its text; what is put into it reads as {}."""
    return [*_sentences()]


def _sentences() -> Iterator[tuple[str, str, str]]:
    for path in SOURCE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        named = {
            node.targets[0].id: node.value
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in nodes:
            where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}"
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield where, "doc", node.value.value
            elif isinstance(node, ast.keyword) and node.arg == "help":
                yield where, "help", _text(node.value)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in CONFIG_ERRORS and node.args:
                yield where, "error", _put_together(node.args[0], named)
            else:
                yield from ((where, "help", text) for text in _shown(node))


def _shown(node: ast.AST) -> Iterator[str]:
    """What cyclopts shows besides `help=`: the docstring of a command, and those of a dataclass's fields."""
    if isinstance(node, ast.FunctionDef) and any(".command" in ast.unparse(each) for each in node.decorator_list):
        yield ast.get_docstring(node) or ""
    for field, text in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield _text(text.value)


def _put_together(node: ast.expr, named: dict[str, ast.expr]) -> str:
    """An error's text: of a name what its file gives that, of an expression all the literals in it."""
    node = named.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.JoinedStr | ast.Constant):
        return _text(node)
    return " ".join(_text(each) for each in ast.walk(node) if isinstance(each, ast.JoinedStr | ast.Constant))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def test_no_sentence_needs_a_second_reading() -> None:
    found = sentences()
    assert {kind for _, kind, _ in found} == {"doc", "help", "error"} and len(found) > 3000
    wrong = [f"{where}: {text}" for where, _, text in found if BANNED.search(" ".join(text.split()))]
    wrong += [f"{where}: {text}" for where, kind, text in found if kind == "help" and BEGINS_BADLY.match(text)]
    assert wrong == []


def test_an_error_of_a_setting_says_what_must_be() -> None:
    """NAME must be CONDITION, got VALUE; an error that ends in another's words says what could not be done in these."""
    own = [(where, text) for where, kind, text in sentences() if kind == "error" and not OF_OTHERS.search(text)]
    assert len(own) > 200
    assert [f"{where}: {text}" for where, text in own if not CONDITION.search(text)] == []
