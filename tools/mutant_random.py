"""Mutants that nobody thought of: operators, constants, deleted statements, swapped arguments and negated conditions.

Each is told as an address and a pattern, so that it can be added to mutants.toml as it is printed.
"""

import ast
import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mutant_patterns import SCOPES, Misfit, Place, Source, enclosing, matches, pattern

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
LOGS = {"log", "logger", "logging", "warnings"}
UNSWAPPED = {"min", "max", "isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "TypeVar", "range"}


class Change(NamedTuple):
    """One mutant, as mutants.toml says it."""

    address: str
    old: str
    new: str
    nth: int | None = None


def candidates(tree: ast.AST) -> Iterator[tuple[Place, list[ast.AST]]]:
    """What can be wrong in a module: places, and what would stand there instead."""
    for place, node in judged(tree):
        for new in variants(node):
            yield place, [new]
        varied = ast.Compare | ast.BoolOp | ast.UnaryOp  # as conditions, themselves
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, varied):
            yield Place(node, "test", None, None), [ast.UnaryOp(ast.Not(), node.test)]
        if isinstance(node, ast.stmt) and deletable(node):
            yield place, [ast.Pass()]


def judged(node: ast.AST) -> Iterator[tuple[Place, ast.AST]]:
    """All nodes but those that decide nothing: annotations, error texts, messages, what is shown of an object."""
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "msg", "decorator_list", "bases", "type"}:
            continue
        if field == "exc" and isinstance(value, ast.Call):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or said(child):
                continue
            yield Place(node, field, at, None if at is None else at + 1), child
            yield from judged(child)


def said(node: ast.AST) -> bool:
    """Whether a node only speaks to people, or to the type checker."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.FunctionDef):
        return node.name in {"__repr__", "__str__"}
    if isinstance(node, ast.Expr):
        call = node.value
        while isinstance(call, ast.Call | ast.Attribute):
            call = call.func if isinstance(call, ast.Call) else call.value
        return isinstance(node.value, ast.Constant) or (isinstance(call, ast.Name) and call.id in LOGS)
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions and statements that differ from one in a single step."""
    changed = copy.copy(node)
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield with_fields(changed, ops=[*ops[:at], OPERATORS[type(op)](), *ops[at + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS and not in_words(
            node
        ):
            yield with_fields(changed, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=func, args=args) if ast.unparse(func).split(".")[-1] not in UNSWAPPED:
            for at, (one, other) in enumerate(itertools.pairwise(args)):
                stars = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
                if not stars and ast.dump(one) != ast.dump(other):
                    yield with_fields(changed, args=[*args[:at], other, one, *args[at + 2 :]])


def with_fields(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new


def in_words(node: ast.AST) -> bool:
    """Whether a sum is one of texts or of types, which no other operator fits."""
    names = {"str", "int", "float", "bytes", "None", "bool"}
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes | None))
        or (isinstance(each, ast.Name) and each.id in names)
        for each in ast.walk(node)
    )


def deletable(node: ast.stmt) -> bool:
    """Whether the code still runs without a statement; a name that is not bound would be noticed at once."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    )


def told(source: Source, path: Path, place: Place, new: Sequence[ast.AST]) -> Change:
    """A change by its address and the smallest pattern that is there once; by its number if none is."""
    tree = source.tree(path)
    memo = place.swap(new)
    way = enclosing(tree, place.owner)
    inside = [node for node in way if isinstance(node, SCOPES)]
    scope, name = (inside[-1], ".".join(node.name for node in inside)) if inside else (tree, "")
    address = source.address(path, name)
    steps: list[tuple[str, str]] = []
    if all(isinstance(node, ast.expr | ast.stmt) for node in place.row()):
        old = place.row()
        steps.append((written([short(each, None) for each in old]), written(new)))
    for node in reversed(way):
        if isinstance(node, ast.expr | ast.stmt):
            after = copy.deepcopy(node, dict(memo))
            steps.append((written([short(node, after)]), written([short(after, node)])))
        if node is scope:
            break
    numbered: list[Change] = []
    for right, wrong in steps:
        try:
            found = matches(pattern(right, wrong)[0], scope)
            first, *_ = [at for at, (each, _) in enumerate(found, 1) if covers(each, place)]
        except (Misfit, ValueError):
            continue
        if len(found) == 1:
            return Change(address, right, wrong)
        numbered.append(Change(address, right, wrong, first))
    return numbered[0]


def covers(found: Place, place: Place) -> bool:
    """Whether a match has a place in it."""
    wanted = place.row()[0]
    return any(node is wanted for each in found.row() for node in ast.walk(each))


def written(nodes: Sequence[ast.AST]) -> str:
    return "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in nodes)


def short(node: ast.AST, other: ast.AST | None) -> ast.AST:
    """A statement with `...` for the statements in it that do not differ from another's."""
    if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
        return node
    new = copy.copy(node)
    for field, value in ast.iter_fields(node):
        if not isinstance(value, list) or not value or not isinstance(value[0], ast.stmt | ast.ExceptHandler):
            continue
        against = getattr(other, field, value)
        if isinstance(value[0], ast.ExceptHandler) and len(against) == len(value):
            setattr(new, field, [short(one, two) for one, two in zip(value, against, strict=True)])
            continue
        same = [ast.dump(each) for each in value], [ast.dump(each) for each in against]
        before = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*same, strict=False)))
        most = min(len(value), len(against)) - before
        behind = zip(reversed(same[0]), reversed(same[1]), strict=False)
        after = min(most, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], behind)))
        if len(value) != len(against) and before + after == min(
            len(value), len(against)
        ):  # a statement more, which needs one beside it to be found by
            before, after = (before - 1, after) if before else (before, max(0, after - 1))
        mine, theirs = value[before : len(value) - after], against[before : len(against) - after]
        if len(mine) == len(theirs):
            mine = [short(one, two) for one, two in zip(mine, theirs, strict=True)]
        gap = [ast.Expr(ast.Constant(...))]
        setattr(new, field, [*(gap if before else []), *mine, *(gap if after else [])])
    return new


def drawn(source: Source, root: Path, count: int, seed: int, where: Sequence[str]) -> list[tuple[Path, Change]]:
    """So many changes by chance, each with its file, in the modules or folders of a folder that are named."""
    named = {root / name for name in where}
    paths = [path for path in source.texts if not named.isdisjoint((path, path.with_suffix(""), *path.parents))]
    all_ = [(path, place, new) for path in paths for place, new in candidates(source.tree(path))]
    chosen = random.Random(seed).sample(all_, min(count, len(all_)))
    return [(path, told(source, path, place, new)) for path, place, new in chosen]
