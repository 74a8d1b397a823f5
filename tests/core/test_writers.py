"""One writer per fact: each attribute of a run or a lease is written by one file; and imports in the core have no
circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from kvarve.core.lease import Lease
from kvarve.core.tree.tree import Run
from tests.test_import_floor import modules

CORE = Path(__file__).parent.parent.parent / "src" / "kvarve" / "core"
# By file, the attributes that it writes once they have their first values. A run cuts all of its own when it is split.
RUN = {
    "tree/tree.py": "parent children first tokens named heads traced width here slots kids followed",
    "tree/prefix_tree.py": "used used_s uses priority",
    "slots/candidates.py": "inside queued",
    "slots/residency.py": "bad pins prefix_pins came_s",
    "copies/dirty.py": "stored passing backed_up_since_use failed_backups wanted",
    "copies/backups.py": "coming",
    "requests/paths.py": "ends",
}
LEASE = {
    "lease.py": "number root tokens heads named page_tokens length limit patience priority reads again expected phase",
    "core.py": "outside claimed",
    "copies/in_flight.py": "ops asked bad",
    "requests/paths.py": "run held prefix_pins tiers",
    "requests/prefetch.py": "promised deadline wait_s begun latest asked_s looked_s asked_again expected_until awaited "
    "ask_again ask_all probed told joined landed lent fetched retries",
    "requests/resume.py": "known found memory storage left loaded torn reloaded",
    "requests/engine_blocks.py": "offered arrived uncached",
    "requests/growth.py": "branch ends snapshots passing boundary done grown pages seen own resumed",
}
# What variables are called; whatever else has attributes of such names has a name here too.
RUNS, LEASES = {"run", "each", "front", "tail", "parent", "child", "at"}, {"lease", "other", "op.lease", "waiting[0]"}
OTHERS = {"op", "salt", "prefix", "counters", "self.counters", "self._counters", "self._context.counters"}
FOLDERS = ("tree", "slots", "copies", "requests", "observe")  # each imports from those before it only
# Changes of lists, dicts, sets and pins, which are writes of the attribute that has them. One by another name, such as
# `held = lease.own[0]; held.pop(3)`, is not seen.
CHANGES = {"sort", "reverse"}
CHANGES |= {"append", "extend", "insert", "pop", "remove", "clear", "add", "discard", "update", "setdefault", "popitem"}


def attribute(node: ast.expr) -> Iterator[tuple[str, str]]:
    """The attribute that a subscript of any depth belongs to, if one does: whose it is, and its name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        yield ast.unparse(node.value), node.attr


def written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every attribute that is assigned, deleted or changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from attribute(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield from attribute(node.func.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            yield ast.unparse(node.args[0]), "*"


@cache
def writes() -> set[tuple[str, str, str]]:
    """File, whose attribute it writes, and which: of itself only a lease after its first values."""
    found = set()
    for path in CORE.rglob("*.py"):
        tree, name = ast.parse(path.read_text()), path.relative_to(CORE).as_posix()
        found |= {(name, *each) for each in written(tree) if each[0] != "self"}
        for each in ast.walk(tree) if name == "lease.py" else ():
            if isinstance(each, ast.FunctionDef) and each.name != "__init__":
                found |= {(name, whose.replace("self", "lease"), which) for whose, which in written(each)}
    return found


def owners(table: dict[str, str]) -> dict[str, str]:
    return {attribute: file for file, attributes in table.items() for attribute in attributes.split()}


def test_each_attribute_of_a_run_and_a_lease_has_one_owner() -> None:
    for kind, table in ((Run, RUN), (Lease, LEASE)):
        assert sorted(" ".join(table.values()).split()) == sorted(kind.__slots__)


def test_no_file_writes_what_another_owns() -> None:
    runs, leases = owners(RUN), owners(LEASE)
    assert {file for file, _, which in writes() if which == "*"} == {"tree/tree.py"}
    for file, whose, which in sorted(writes()):
        if whose in RUNS and which in runs:
            assert file in {runs[which], "tree/tree.py"}, f"{file} writes {which} of a run"
        elif whose in LEASES and which in leases:
            assert file == leases[which], f"{file} writes {which} of a lease"
        elif whose not in RUNS | LEASES | OTHERS:
            unknown = which in runs | leases and not whose.startswith("self.") and whose != "self"
            assert not unknown, f"{file}: is {whose} a run, a lease, or another thing with {which}?"


def test_the_checker_sees_every_way_to_write() -> None:
    text = "a.b.c = 1\na.d[1][2] |= 3\na.e.append(4)\na.f += 5\ndel a.g[6]\na.h, x = 7, 8\na.i[0].add(9)\n"
    text += "setattr(a, x, 10)\nx = a.j\na.k()\n"
    assert {which for _, which in written(ast.parse(text))} == {*"cdefghi*"}


def test_the_core_has_no_circle_of_imports_and_its_folders_import_downwards() -> None:
    files = {f"kvarve.{name.removesuffix('.py').replace('/', '.')}": names for name, names in modules().items()}
    core = {name: names & files.keys() for name, names in files.items() if name.startswith("kvarve.core.")}
    assert [*TopologicalSorter(core).static_order()]

    def floor(name: str) -> int:
        return next((at for at, folder in enumerate(FOLDERS) if name.startswith(f"kvarve.core.{folder}.")), -1)

    assert not {(name, each) for name, names in core.items() for each in names if floor(each) > floor(name) > -1}
