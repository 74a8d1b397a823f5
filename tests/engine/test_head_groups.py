"""Pages that two ranks wrote are used by four, and the other way round, where hits may round; exact hits share none."""

from pathlib import Path

import pytest
from one_of_ranks import read_of_others

from kvarve.pages.pools import HeadGroups
from kvarve.reference.engine.rank_processes import started
from kvarve.reference.engine.shards import head_groups
from kvarve.reference.engine.workspace import StateLayout
from tests.sim.models import save_checkpoint, tiny_grid, tiny_model

# Four heads, of which two ranks hold two each, and states; latents that all ranks hold.
FAMILIES = {"qwen3_5": {"num_key_value_heads": 4, "linear_num_key_heads": 4}, "deepseek_v32": {}}
CASES = [("qwen3_5", "rounded"), ("deepseek_v32", "rounded"), ("qwen3_5", "exact"), ("deepseek_v32", "exact")]
CLOSE = 1e-4  # of the largest logit; a wrong head would be far beyond it


@pytest.mark.long
@pytest.mark.parametrize(("writing", "reading"), [(2, 4), (4, 2)])
def test_other_numbers_of_ranks_use_pages_only_where_hits_may_round(tmp_path: Path, writing: int, reading: int) -> None:
    for family, changed in FAMILIES.items():
        save_checkpoint(tiny_model(family, **changed), tmp_path / family)
    for ranks in (writing, reading):
        options = {"folder": str(tmp_path), "cases": CASES, "seeds": [1]}
        with started(read_of_others, options, ranks) as (place, listener):
            found = read_of_others(options, place, listener)
        for (family, hits), [(device, host, storage, distance)] in zip(CASES, found.values(), strict=True):
            assert distance < CLOSE, (ranks, family, hits)
            expected = ranks == reading and hits == "rounded"
            assert (device + host, storage > 0) == (0, expected), (ranks, family, hits)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_5", {"attention": 2, "state": 2}),
        ("qwen3_next", {"attention": 2, "state": 2}),
        ("gpt_oss", {"attention": 2, "window-24": 2}),
        ("deepseek_v32", {"attention": 1}),
        ("kimi_linear", {"attention": 1, "state": 1}),
    ],
)
def test_a_layout_says_into_how_many_groups_of_heads_its_pages_divide(family: str, expected: dict[str, int]) -> None:
    model = tiny_model(family)
    pools = StateLayout.of(model, *tiny_grid(family)).pools
    groups = head_groups(model, pools)
    assert {pool.name: each and each.count for pool, each in zip(pools, groups, strict=True)} == expected
    for pool, each in zip(pools, groups, strict=True):
        assert each is not None and each.shapes(pool.buffers, each.count) == pool.buffers


def test_a_convolution_is_cut_by_the_heads_of_its_queries_keys_and_values() -> None:
    model = tiny_model("qwen3_5")
    pools = StateLayout.of(model, *tiny_grid("qwen3_5")).pools
    by_name = dict(zip([pool.name for pool in pools], head_groups(model, pools), strict=True))
    # Two key heads of 8 and four value heads of 8: a group has one of the first and two of the second.
    assert by_name["state"] == HeadGroups(2, ((0, (8, 8, 16)), (0, (2,))) * 2)
