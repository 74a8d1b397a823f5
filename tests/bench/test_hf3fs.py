"""bench/hf3fs.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_measures_both_engines_and_the_metadata(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "storage")
    from hf3fs_mounts import require
    from redis_server import require_redis

    require("a mount of 3FS", "bindfs")
    require_redis()
    figures = quick("hf3fs.py", folder=False).figures
    assert figures["ratios"].keys() >= {"put_over_raw", "get_over_raw", "lookup_128_ms", "release_1m_over_10k"}
    assert {(row["engine"], row["what"]) for row in figures["rows"]["pages"]} >= {
        ("posix", "kvarve"),
        ("usrbio", "kvarve"),
    }
    assert {row["call"] for row in figures["rows"]["embedded"]} == {row["call"] for row in figures["rows"]["redis"]}
