"""bench/lanes.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

from kvarve.memory.layouts import LAYOUTS


def test_a_quick_run_measures_every_layout_both_ways(quick: Callable[..., Any]) -> None:
    done = quick("lanes.py", folder=False)
    assert {*done.figures["ratios"]} == {"gather_over_memcpy", "scattered_over_memcpy", "checked_over_memcpy"}
    assert all(ratio > 0 for ratio in done.figures["ratios"].values())
    assert [row["layout"] for row in done.figures["rows"]] == 3 * [*LAYOUTS]
    assert all(row["GB_per_s_down"] > 0 and row["GB_per_s_up"] > 0 for row in done.figures["rows"])
