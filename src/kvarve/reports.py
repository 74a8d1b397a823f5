"""What commands write: files, which are checked before the work, as that may take hours; plain tables; and in which
colours plots and the live page show where a prompt's tokens came from."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvarve.errors import ConfigError

# On a light and on a dark ground, of which each has a contrast of 3 at least.
COLORS = {
    "device": ("#2563c4", "#6ea3ff"),
    "host": ("#0d8a72", "#3bc9a8"),
    "storage": ("#b86a00", "#f0ac43"),
    "computed": ("#8a93a1", "#7b8697"),
}
_WIDE = 200  # columns if the output is no terminal, so that nothing is cut


def check_file(option: str, path: Path | None) -> None:
    """ConfigError if no file can be written there. Nothing is touched."""
    if path is not None and not is_stdout(path) and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{option}: {path} cannot be written as a file")


def is_stdout(json_to: Path | None) -> bool:
    """Whether --json says that standard output has the report, and nothing else."""
    return json_to == Path("-")


def write_json(path: Path | None, report: Any) -> None:
    """Write the report of --json, if that is given."""
    if is_stdout(path):
        print(json.dumps(report, indent=1))
    elif path is not None:
        try:
            path.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as e:
            raise ConfigError(f"--json: {path}: {e.strerror}") from None


class Printer:
    """A command's results, for people on standard output, and as JSON if requested."""

    def __init__(self, json_to: Path | None) -> None:
        self._json_to = json_to
        check_file("--json", json_to)
        width = None if sys.stdout.isatty() else _WIDE
        self._console = Console(quiet=is_stdout(json_to), width=width, markup=False, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def table(self, table: Table) -> None:
        self._console.print(table)

    def write(self, report: dict[str, Any], code: int = 0) -> int:
        """Write the JSON, if requested; returns the exit code."""
        write_json(self._json_to, report)
        return code


def aligned(lines: Sequence[tuple[str, str]], before: str = "") -> str:
    """Words and what is to be said of each, the latter below one another."""
    width = max(len(word) for word, _ in lines)
    return "\n".join(f"{before}{word:<{width}}  {text}" for word, text in lines)


def plain_table(*left: str, right: Sequence[str] = ()) -> Table:
    """A table without a frame. `right`: the headings of columns whose figures end below one another."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in (*left, *right):
        table.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    return table
