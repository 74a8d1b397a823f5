"""bench/hand_over.py: two servers in two processes hand prompts over; the bench itself compares their answers."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_hands_over_through_every_storage_and_leaves_nothing_behind(quick: Callable[..., Any]) -> None:
    storages = ["file", *(["mooncake"] if find_spec("mooncake") else [])]
    figures = quick("hand_over.py").figures
    assert [row["storage"] for row in figures["rows"]] == storages
    assert all(row["hit"] > 0 for row in figures["rows"])
    names = {f"hand_over_{storage}{when}" for storage in storages for when in ("", "_at_once")}
    assert {name for name, ratio in figures["ratios"].items() if ratio > 0} == names
