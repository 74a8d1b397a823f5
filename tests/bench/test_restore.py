"""bench/restore.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

EDGES = {"memcpy", "backup", "load", "load_unchecked", "raw_write", "store", "raw_read", "fetch", "restore"}


def test_a_quick_run_measures_every_edge_and_leaves_nothing_behind(quick: Callable[..., Any]) -> None:
    done = quick("restore.py")
    figures = done.figures
    assert {row["what"] for row in figures["rows"]} == EDGES
    assert all(row["ms"] > 0 and row["GB_per_s"] > 0 for row in figures["rows"])
    assert {"host_load_over_memcpy", "backup_over_memcpy", "store_over_raw_write", "fetch_over_raw_read"} <= {
        name for name, ratio in figures["ratios"].items() if ratio > 0
    }
    assert figures["machine"]["cores"] >= 1
    assert {len(rounds) for rounds in figures["ms_of_every_round"].values()} == {2}
    assert "round 3/3" in done.stderr, "long work says how far it is"
