"""A model that two processes compute together answers through the cache, bit for bit, as it does without."""

from pathlib import Path

import pytest
from one_of_ranks import compare

from kvarve.engine.ranks import started
from kvarve.testing.models import save_checkpoint, tiny_model

REPLICATED = {"qwen3_5": False, "gpt_oss": False, "deepseek_v32": True}  # attention KV, by family


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_answers_of_several_ranks_are_those_without_a_cache_from_every_tier(tmp_path: Path, ranks: int) -> None:
    for family in REPLICATED:
        save_checkpoint(tiny_model(family), tmp_path / family)
    options = {"folder": str(tmp_path), "families": [*REPLICATED]}
    with started(compare, options, ranks) as (place, listener):
        found = compare(options, place, listener)
    for family, told in found.items():
        hits = {name: counts[:-1] for name, counts in told["rounds"].items()}
        assert not any(counts[-1] for counts in told["rounds"].values()), f"{family}: {told['rounds']}"
        assert not any(hits["cold"]) and hits["device"][0] and hits["host"][1] and hits["storage"][2], hits
        assert any(told["replicated"].values()) == REPLICATED[family], told["replicated"]
