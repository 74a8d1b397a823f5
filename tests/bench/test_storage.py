"""bench/storage.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest

RATIOS = {
    "durable_put_over_raw",
    "cold_get_over_raw",
    "durable_put_over_file_per_page",
    "put_small_over_lmdb",
    "holds_128_us",
    "holds_128_full_p999_us",
    "tenants_100k_mb",
    "recovery_1m_s",
    "checksum_share",
    "restore_over_raw",
    "keyed_over_plain",
}


@pytest.mark.long
def test_a_quick_run_measures_every_way_and_leaves_nothing_behind(quick: Callable[..., Any]) -> None:
    figures = quick("storage.py").figures
    assert {*figures["ratios"]} == RATIOS
    assert all(ratio > 0 for name, ratio in figures["ratios"].items() if name != "checksum_share")
    assert len(figures["rows"]) == 14
    assert all(row[f"GB/s at {page} KiB"] > 0 for row in figures["rows"] for page in (64, 1024, 4096))
    assert figures["machine"]["cores"] >= 1
