"""bench/stall.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_has_spells_of_every_kind_and_leaves_nothing_behind(quick: Callable[..., Any]) -> None:
    figures = quick("stall.py").figures
    assert [row["storage"] for row in figures["rows"]] == ["healthy", "stalled", "stalled, idle"]
    assert all(row["waits"] > 0 for row in figures["rows"])
    assert {*figures["ratios"]} == {"decode_stalled_over_healthy", "late_ms"}
