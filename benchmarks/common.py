"""Shared by all benchmarks: arguments, table, JSON, and the description of the machine.

Figures are comparable within one run, not between machines: every benchmark measures its
own limits (a memcpy, a raw write) in the same run, between its own rounds, and reports the ratio.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvarve.cache import config

sys.path.append(str(Path(__file__).parents[1]))  # where the models of `tests.sim` are found

T = TypeVar("T")


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def machine() -> dict[str, Any]:
    """The machine and versions that the figures depend on, as far as they can be read."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),  # other work may run here
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "kvarve": version("kvarve"),
        "commit": _commit(),
        "day": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """Of the checkout that is measured; "" where git does not say, with a + if it was changed since."""
    ask = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@contextmanager
def divided(tokens: int) -> Iterator[None]:
    """Caches made in it have memory that is divided once, for a window or state every so many tokens, which nothing in
    kvarve asks for; 0: pools share it."""
    with ExitStack() as undo:
        if tokens:
            undo.enter_context(patch.object(config, "cut_memory", lambda *shape, **more: None))
            undo.enter_context(patch.object(config, "spacing", lambda *shape: tokens))
        yield


def watched(work: Iterable[T], title: str, total: int) -> Iterator[T]:
    """The pieces of `work`, with a bar on a terminal's stderr and a line each where there is none."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        for number, piece in enumerate(work, 1):
            yield piece
            progress.advance(task)
            if not console.is_terminal:
                print(f"{title} {number}/{total}", file=sys.stderr, flush=True)


def show(title: str, rows: Sequence[Mapping[str, object]], caption: str = "") -> None:
    """A table of rows with the same keys; numbers are aligned to the right."""
    table = Table(title=title, caption=caption or None)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def write_json(path: Path | None, figures: Mapping[str, object]) -> None:
    """Write the figures where --json asks for them, a row a line."""

    def lines(value: object) -> str:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)

    if path is not None:
        path.write_text("{\n" + ",\n".join(f'"{name}": {lines(value)}' for name, value in figures.items()) + "\n}\n")
