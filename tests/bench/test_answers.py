"""bench/answers.py: it has to complete; no figure is asserted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
def test_a_quick_run_without_vllm_measures_the_own_engine_alone(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVARVE_VLLM_PYTHON", str(tmp_path / "python"))
    done = quick("answers.py", folder=False)
    assert [row["engine"] for row in done.figures["rows"]] == ["kvarve serve"] and not done.figures["ratios"]
    assert done.figures["rows"][0]["tokens/s"] > 0
