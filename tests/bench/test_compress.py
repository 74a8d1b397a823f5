"""bench/compress.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_measures_both_models_and_leaves_nothing_behind(quick: Callable[..., Any]) -> None:
    pytest.importorskip("zstandard")
    pytest.importorskip("lz4")
    figures = quick("compress.py").figures
    names = {f"compressed_{what}_over_plain" for what in ("put", "get")} | {"bytes_over_raw"}
    assert figures["ratios"].keys() >= names and figures["by_model"].keys() == {"tiny-hybrid", "0.1B"}
    assert all(value > 0 for value in figures["ratios"].values())
