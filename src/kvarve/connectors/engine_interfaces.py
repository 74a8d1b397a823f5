"""What kvarve uses of an engine, compared with what it was tested with: read from its files, nothing is imported.

`engine_interfaces.json` has by engine the versions that were looked at, whether they were run, and of each hook the
signatures that it had there. tools/engine_interfaces.py writes it.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Engine:
    """`runs`: the first numbers of the versions in which kvarve is tested; `reads`: others whose hooks are the same.
    `hooks`: by "FILE NAME" the signatures that are known."""

    name: str
    runs: tuple[str, ...]
    reads: tuple[str, ...]
    hooks: Mapping[str, tuple[str, ...]]

    def problems(self, root: Path) -> list[str]:
        """Hooks of the engine's package in this folder that are missing, or have signatures that are not known."""
        found = signatures(root, self.hooks)
        changed = []
        for hook, known in self.hooks.items():
            if hook not in found:
                changed.append(f"{hook} is missing")
            elif found[hook] not in known:
                changed.append(f"{hook} is {found[hook]}, and was {known[-1]}")
        return changed


def engines() -> dict[str, Engine]:
    """The engines by the name of their package."""
    told: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: Engine(
            name,
            tuple(each["runs"]),
            tuple(each["reads"]),
            {hook: tuple(known) for hook, known in each["hooks"].items()},
        )
        for name, each in told.items()
    }


def signatures(root: Path, hooks: Iterable[str]) -> dict[str, str]:
    """Of the hooks that are there: the names of a function's arguments, with "=" behind those that have a default; of a
    class or a field what it is."""
    files: dict[str, dict[str, str]] = {}
    found: dict[str, str] = {}
    for hook in hooks:
        file, name = hook.split()
        if file not in files:
            files[file] = _names(root / file)
        if name in files[file]:
            found[hook] = files[file][name]
    return found


def _names(file: Path) -> dict[str, str]:
    try:
        return dict(_named(ast.parse(file.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError):
        return {}


def _named(tree: ast.AST, within: str = "") -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield within + node.name, _signature(node.args)
        elif isinstance(node, ast.ClassDef):
            yield within + node.name, "class"
            yield from _named(node, f"{within}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield within + node.target.id, "field"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield within + node.targets[0].id, "field"
        elif isinstance(node, ast.If | ast.Try):
            yield from _named(node, within)


def _signature(args: ast.arguments) -> str:
    plain = [*args.posonlyargs, *args.args]
    optional = len(plain) - len(args.defaults)
    words = [each.arg + "=" * (at >= optional) for at, each in enumerate(plain)]
    words += [f"*{args.vararg.arg}"] if args.vararg else ["*"] if args.kwonlyargs else []
    words += [
        each.arg + "=" * (default is not None) for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return f"({', '.join([*words, *([f'**{args.kwarg.arg}'] if args.kwarg else [])])})"
