"""bench/engines.py: its figures are promised by no test, that it measures is."""

from collections.abc import Callable
from typing import Any


def test_a_quick_run_measures_the_tier_and_its_limit(quick: Callable[..., Any]) -> None:
    done = quick("engines.py")
    assert {*done.figures["ratios"]} >= {"file_put_over_raw", "file_get_over_raw"}
    assert all(ratio > 0 for ratio in done.figures["ratios"].values())
    assert {"tier put", "tier get"} <= {row["what"] for row in done.figures["rows"]}
