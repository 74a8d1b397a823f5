"""bench/batch.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_measures_each_family_alone_and_in_a_crowd(quick: Callable[..., Any]) -> None:
    rows = quick("batch.py", folder=False).figures["results"]
    assert [row["family"] for row in rows] == ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"]
    assert all(row["tokens/s of 1"] > 0 and row["of 16"] > 0 for row in rows)
