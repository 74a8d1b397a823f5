"""bench/server.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_measures_the_same_requests_with_and_without_http(quick: Callable[..., Any]) -> None:
    figures = quick("server.py", folder=False).figures
    assert [row["requests"] for row in figures["rows"]] == ["engine", "http"]
    assert all(row["ms_per_token"] > 0 for row in figures["rows"])
    assert {*figures["ratios"]} == {"overhead_per_token_ms"}
