"""bench/connections.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_has_streams_alone_and_beside_idle_connections(quick: Callable[..., Any]) -> None:
    figures = quick("connections.py", folder=False).figures
    assert [row["streams"] for row in figures["rows"]] == ["alone", "beside idle ones"]
    assert all(row["answers"] > 0 and row["ttft_p50_ms"] > 0 for row in figures["rows"])
    assert {*figures["ratios"]} == {"ttft_p50_over_alone", "ttft_p99_over_alone", "rss_over_before"}
