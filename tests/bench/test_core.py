"""bench/core.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any


def test_a_quick_run_measures_every_step_with_one_pool_and_with_four(quick: Callable[..., Any]) -> None:
    done = quick("core.py", "--pages", "256", folder=False)
    assert {*done.figures["ratios"]} == {"match_10x_tree", "evict_10x_tree", "four_pools_over_one", "bytes_per_token"}
    assert all(ratio > 0 for ratio in done.figures["ratios"].values())
    steps = [(row["pools"], row["case"]) for row in done.figures["rows"] if row["bench"] == "restore"]
    assert steps == [(pools, case) for pools in (1, 4) for case in ("open", "asked", "fetched", "claim", "loaded")]
