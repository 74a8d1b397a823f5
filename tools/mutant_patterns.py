"""Where a mutant is and what it changes: a function by name, and a pattern in its syntax tree with its replacement.

An address is `Class.method` if a single file of src/ has it, or else `module:Class.method`, where `module` may be the
last parts of a dotted name; `module:` is the whole of a module. A pattern is an expression, or some statements that
follow one another. Formatting and comments do not count. `...` stands for any expression, and in a row of statements,
arguments or operands for any number of them; it cannot be the first of some statements. The n-th `...` of the
replacement is what the n-th one of the pattern stands for.
"""

import ast
import copy
import gc
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINED = re.compile(r"^ *(?:async def|def|class) (\w+)", re.MULTILINE)
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields that have statements, or what has them
IGNORED = {"ctx", "kind", "type_comment"}  # fields of nodes that a pattern cannot say


class Misfit(Exception):
    """Why a mutant does not match the code."""


class Place(NamedTuple):
    """An expression, or the statements `start:stop` of a list."""

    owner: ast.AST  # has the field
    field: str
    start: int | None  # in the field, if that is a list
    stop: int | None

    def row(self) -> list[ast.AST]:
        found = getattr(self.owner, self.field)
        return found[self.start : self.stop] if self.start is not None else [found]

    def swap(self, new: Sequence[ast.AST]) -> dict[int, object]:
        """A memo for copy.deepcopy that puts other nodes here."""
        found = getattr(self.owner, self.field)
        if self.start is None:
            return {id(found): new[0]}
        return {id(found): [*found[: self.start], *new, *found[self.stop :]]}


class Source:
    """The modules of a folder, each parsed when it is needed."""

    def __init__(self, root: Path) -> None:
        self.texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
        self.modules = {path: module(path.relative_to(root)) for path in self.texts}
        self.defined = {path: set(DEFINED.findall(text)) for path, text in self.texts.items()}
        self.tree = cache(lambda path: parsed(self.texts[path]))
        self.scopes = cache(lambda path: list(scopes(self.tree(path))))

    def find(self, address: str) -> tuple[Path, list[ast.AST]]:
        """The file of a function, and its definitions there: a property may have two."""
        where, colon, name = address.rpartition(":")
        paths = list(self.modules)
        if colon:
            paths = [path for path in paths if f".{self.modules[path]}".endswith(f".{where}")]
        if name:
            paths = [path for path in paths if self.defined[path].issuperset(name.split("."))]
            found = {path: [node for named, node in self.scopes(path) if named == name] for path in paths}
        else:
            found = {path: [self.tree(path)] for path in paths}
        found = {path: nodes for path, nodes in found.items() if nodes}
        if not found:
            raise Misfit(f"there is no {address}")
        if len(found) > 1:
            raise Misfit(f"{address} is in {' and '.join(sorted(self.modules[path] for path in found))}: say which")
        return next(iter(found.items()))

    def address(self, path: Path, name: str) -> str:
        """The shortest one of a function."""
        parts = self.modules[path].split(".")
        short = [f"{'.'.join(parts[-n:])}:{name}" for n in range(1, len(parts) + 1)]
        for each in [name, *short] if name else short:
            try:
                self.find(each)
            except Misfit:
                continue
            return each
        return short[-1]

    def change(self, address: str, old: str, new: str, nth: int | None = None) -> tuple[Path, str]:
        """The file that a mutant changes, and its text then. Raises Misfit."""
        path, place, nodes = self.place(address, old, new, nth)
        return path, self.written(path, place, nodes)

    def place(self, address: str, old: str, new: str, nth: int | None = None) -> tuple[Path, Place, list[ast.AST]]:
        """What a mutant replaces, and by what."""
        path, nodes = self.find(address)
        before, after = pattern(old, new)
        places = [found for node in nodes for found in matches(before, node)]
        if nth is None and len(places) != 1:
            raise Misfit(f"its pattern is {len(places)} times in {address}, not once")
        if nth is not None and nth > len(places):
            raise Misfit(f"its pattern is {len(places)} times in {address}, not {nth}")
        place, kept = places[(nth or 1) - 1]
        new = filled(after, iter(kept))
        if hasattr(place.row()[0], "ctx") and hasattr(new[0], "ctx"):
            new[0].ctx = place.row()[0].ctx
        return path, place, new

    def written(self, path: Path, place: Place, new: Sequence[ast.AST]) -> str:
        """A module's text with other nodes in a place: the statement around it is written anew, all else stays."""
        tree, text = self.tree(path), self.texts[path]
        memo = place.swap(new)
        lines = text.splitlines(keepends=True)
        around: ast.AST = tree
        for node in enclosing(tree, place.owner):
            if isinstance(node, ast.stmt):
                line, at = lines[node.lineno - 1], node.col_offset
                around = around if line[:at].strip() or line.startswith("elif", at) else node
        wanted = copy.deepcopy(tree, dict(memo))
        if isinstance(around, ast.stmt):
            first = min([around.lineno, *(each.lineno for each in getattr(around, "decorator_list", []))])
            depth = around.col_offset // 4
            nested = copy.deepcopy(around, dict(memo))
            for _ in range(depth):  # so that unparse indents it, which leaves strings of several lines alone
                nested = ast.If(ast.Constant(True), [nested], [])
            block = ast.unparse(ast.fix_missing_locations(nested)).split("\n")[depth:]
            text = "".join([*lines[: first - 1], "\n".join(block).lstrip("\n"), "\n", *lines[around.end_lineno :]])
        else:
            text = ast.unparse(ast.fix_missing_locations(wanted))
        try:
            again = ast.parse(text)
        except SyntaxError as e:
            raise Misfit(f"it is not Python: {e}") from e
        if ast.dump(again) != ast.dump(wanted):
            raise Misfit("it cannot be written as Python")
        return text


def parsed(text: str) -> ast.Module:
    """A tree. The garbage collector would look at all its nodes again and again while there are ever more of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()


def module(path: Path) -> str:
    """A file's dotted name."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def scopes(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions and classes in a tree, by their dotted names."""
    for node in (node for block in BLOCKS for node in getattr(tree, block, ())):
        if isinstance(node, SCOPES):
            yield name + node.name, node
            yield from scopes(node, f"{name}{node.name}.")
        else:
            yield from scopes(node, name)


def enclosing(tree: ast.AST, node: ast.AST) -> list[ast.AST]:
    """A node and those around it, from the outside."""
    if tree is node:
        return [tree]
    for child in ast.iter_child_nodes(tree):
        if path := enclosing(child, node):
            return [tree, *path]
    return []


@cache
def pattern(old: str, new: str) -> tuple[list[ast.AST], list[ast.AST]]:
    """Both as one expression, or else both as statements."""
    try:
        before, after = ast.parse(old).body, ast.parse(new).body
    except SyntaxError as e:
        raise Misfit(f"it is not Python: {e}") from e
    if not before:
        raise Misfit("its pattern is empty")
    if all(len(row) == 1 and isinstance(row[0], ast.Expr) for row in (before, after)):
        return [before[0].value], [after[0].value]
    return before, after


def matches(wanted: Sequence[ast.AST], tree: ast.AST) -> list[tuple[Place, list[object]]]:
    """Where a pattern is, in the order of the text, and what each `...` stands for."""
    found = []
    first, behind = wanted[0], [*wanted, ast.Constant(...)]
    kind, rows = type(first), not isinstance(first, ast.expr)
    for owner in ast.walk(tree):
        for field in owner._fields:
            value = getattr(owner, field, None)
            for at, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if type(node) is not kind:
                    continue
                if not rows and (kept := captured(first, node)) is not None:
                    found.append((Place(owner, field, at, None if at is None else at + 1), kept))
                elif rows and (kept := captured(behind, value[at:])) is not None:
                    found.append((Place(owner, field, at, len(value) - len(kept[-1])), kept[:-1]))
    return sorted(found, key=lambda each: (each[0].row()[0].lineno, each[0].row()[0].col_offset))


def is_gap(node: object) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is ...


def captured(wanted: object, found: object) -> list | None:
    """What each `...` of a pattern stands for; None if it does not match."""
    if is_gap(wanted):
        return [found]
    if isinstance(wanted, list):
        if not isinstance(found, list):
            return None
        if not wanted:
            return None if found else []
        if is_gap(wanted[0]):
            for n in range(len(found) + 1):
                if (rest := captured(wanted[1:], found[n:])) is not None:
                    return [found[:n], *rest]
            return None
        if not found or (first := captured(wanted[0], found[0])) is None:
            return None
        rest = captured(wanted[1:], found[1:])
        return None if rest is None else [*first, *rest]
    if type(wanted) is not type(found):
        return None
    if not isinstance(wanted, ast.AST):
        return [] if wanted == found else None
    kept = []
    for (_, one), (_, other) in zip(parts(wanted), parts(found), strict=True):
        if (more := captured(one, other)) is None:
            return None
        kept += more
    return kept


def parts(node: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields of a node; the arguments of a call are one row."""
    for field in node._fields:
        if field in IGNORED or (isinstance(node, ast.Call) and field == "keywords"):
            continue
        value = getattr(node, field, None)
        yield field, [*value, *node.keywords] if isinstance(node, ast.Call) and field == "args" else value


def filled(node: object, kept: Iterator[object]) -> object:
    """A replacement with what the pattern's `...` stood for."""
    if is_gap(node):
        try:
            return next(kept)
        except StopIteration:
            raise Misfit("its replacement has more `...` than its pattern") from None
    if isinstance(node, list):
        rows = [(is_gap(each), filled(each, kept)) for each in node]
        return [item for gap, value in rows for item in (value if gap and isinstance(value, list) else [value])]
    if not isinstance(node, ast.AST):
        return node
    new = type(node)(**{field: getattr(node, field) for field in node._fields if hasattr(node, field)})
    for field, value in parts(node):
        setattr(new, field, filled(value, kept))
    if isinstance(new, ast.Call):
        row = new.args
        new.args = [each for each in row if not isinstance(each, ast.keyword)]
        new.keywords = [each for each in row if isinstance(each, ast.keyword)]
    return new
