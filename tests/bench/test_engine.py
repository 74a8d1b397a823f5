"""bench/engine.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from typing import Any

import pytest

RATIOS = {
    "warm_host_ttft",
    "warm_storage_ttft",
    "cold_ttft_on_over_off",
    "decode_on_over_off",
    "throughput_16_over_1",
    "ttft_p99_over_mean",
    "mixed_lengths",
    "sampling_share",
    "sampling_share_flat",
    "short_prompts_32_over_1",
    "elastic_over_fixed",
    "layer_overlap",
    "layer_overlap_unslowed",
}


@pytest.mark.long
def test_a_quick_run_prints_every_ratio_and_leaves_nothing_behind(quick: Callable[..., Any]) -> None:
    done = quick("engine.py")
    ratios = done.figures["ratios"]
    assert {*ratios} == RATIOS
    assert all(ratio > 0 for ratio in ratios.values())
    assert all(f"{name}: " in done.stdout for name in RATIOS)
