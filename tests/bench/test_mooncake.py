"""bench/mooncake.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RATIOS = {"put_over_raw", "get_over_raw", "holds_over_raw", "restore_over_raw"}


@pytest.mark.long
def test_a_quick_run_measures_both_ways(quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "storage")
    from mooncake_cluster import require_mooncake

    require_mooncake()
    figures = quick("mooncake.py", folder=False).figures
    assert {name for name, ratio in figures["ratios"].items() if ratio > 0} == RATIOS
    assert [row["what"] for row in figures["rows"]] == ["raw", "kvarve"]
    assert all(seconds > 0 for seconds in figures["lost_s"].values())
