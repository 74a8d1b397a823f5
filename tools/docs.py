"""Writes the parts of docs/architecture.md that are the code's own words: python tools/docs.py [--check]

A part stands between `<!-- from the code: NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit
code says whether everything is up to date.
"""

import argparse
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import residency
from kvarve.core import copies
from kvarve.core.tree import Run
from kvarve.model import Tier

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PART = re.compile(r"(<!-- from the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def edges() -> str:
    """The four edges between tiers, by the names that the code gives them."""
    named = {
        edge: name.lower()
        for name, edge in vars(copies).items()
        if name.isupper() and isinstance(edge, tuple) and edge[0] is not edge[1]
    }
    tiers = [*Tier]
    assert set(named) == {pair for near, far in pairwise(tiers) for pair in ((near, far), (far, near))}
    down, up = tiers[0].name.lower(), " " * len(tiers[0].name)
    for near, far in pairwise(tiers):
        down += f"  ──{named[near, far]:─<7}──►  {far.name.lower()}"
        up += f"  ◄──{named[far, near]:─<7}──  {' ' * len(far.name)}"
    return f"```\n{down}\n{up.rstrip()}\n```\n"


def facts() -> str:
    """What a run knows of its positions."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in Run.__slots__.items()]
    return "\n".join(["| fact | meaning |", "|---|---|", *rows]) + "\n"


PARTS: dict[str, Callable[[], str]] = {"edges": edges, "facts": facts, "residency": residency.table}


def rendered(page: str) -> str:
    """The page with each part as the code says it now."""
    assert [name for _, name, _ in PART.findall(page)] == [*PARTS], "each part stands in the page once, in order"
    return PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what docs/architecture.md takes from the code.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    old = PAGE.read_text()
    new = rendered(old)
    if check and old != new:
        print(f"{PAGE.name} is not what the code says: run make docs", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
