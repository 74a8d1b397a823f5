"""bench/redis.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_measures_all_ways(quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "storage")
    from redis_server import require_redis

    require_redis()
    figures = quick("redis.py", folder=False).figures
    assert figures["ratios"].keys() >= {"put_over_raw", "get_over_raw", "holds_128_ms"}
    assert [row["what"] for row in figures["rows"]] == ["raw", "kvarve", "kvarve, checked", "redis-py"]
    assert all(seconds > 0 for seconds in figures["lost_s"].values())
