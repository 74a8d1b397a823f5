"""What commands write: files, which are checked before the work, as that may take hours; and plain tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvarve.errors import ConfigError


def check_file(option: str, path: Path | None) -> None:
    """ConfigError if no file can be written there. Nothing is touched."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{option}: {path}: not a file that can be written")


def write_json(path: Path | None, report: Any) -> None:
    """Write the report of --json, if that is given."""
    if path is not None:
        try:
            path.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as e:
            raise ConfigError(f"--json: {path}: {e.strerror}") from None


def plain_table(*left: str, right: Sequence[str] = ()) -> Table:
    """A table without a frame. `right`: the headings of columns whose figures end below one another."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in (*left, *right):
        table.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    return table
