"""What identifies a model's pages for SGLang, and where a prompt may resume."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvarve.connectors.sglang.hicache import Asked, Identity, Ranks, checkpoint, page_key, resumable
from kvarve.errors import ConfigError

# --- identity


def test_any_part_of_an_identity_changes_the_label() -> None:
    usual = Identity("m", "w", "n", (1, 1, 1, False))
    others = [
        replace(usual, model="m2"),
        replace(usual, weights="w2"),
        replace(usual, numerics="n2"),
        *(replace(usual, ranks=ranks) for ranks in ((2, 1, 1, False), (1, 2, 1, False), (1, 1, 2, False))),
        replace(usual, ranks=(1, 1, 1, True)),
        replace(usual, format="another format"),
    ]
    assert len({each.fingerprint() for each in [usual, *others]}) == 9
    assert usual.fingerprint() == Identity("m", "w", "n", (1, 1, 1, False)).fingerprint()


def test_ranks_that_hold_different_bytes_have_different_numbers() -> None:
    sizes = [(tp, pp, cp) for tp in range(4) for pp in range(2) for cp in range(3)]

    def numbers(replicated: bool, sharded: bool) -> list[int]:
        return [Ranks(tp, 4, pp, 2, cp, 3, replicated).number(sharded=sharded) for tp, pp, cp in sizes]

    assert sorted(numbers(False, False)) == sorted(numbers(False, True)) == sorted(numbers(True, True)) == [*range(24)]
    replicated = numbers(True, False)
    assert len({*replicated}) == 6, "all tensor ranks of a stage name a page alike"
    assert max(replicated) < Ranks(0, 4, 0, 2, 0, 3).size


def test_a_page_key_is_sglangs_hash_and_any_other_name_is_hashed() -> None:
    assert page_key("ab" * 32) == bytes.fromhex("ab" * 32)
    assert len({page_key("zz" * 32), page_key("h1"), page_key("h2"), page_key("ab" * 31)}) == 4
    assert all(len(page_key(key)) == 32 for key in ("", "h1", "é" * 64))


# --- weights


def test_a_checkpoint_is_told_by_its_weights_and_its_config_or_has_to_be_named(
    tmp_path: Path,
) -> None:
    def write(seed: int, config: str = "{}") -> str:
        save_file({"a": np.random.default_rng(seed).standard_normal((64, 32))}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(config)
        return checkpoint(str(tmp_path))

    usual = write(0)
    assert write(0) == usual
    assert len({usual, write(1), write(0, '{"rope_theta": 5}')}) == 3
    with pytest.raises(ConfigError, match='set "weights" to a text that changes whenever they do'):
        checkpoint("no-such/model-here")


# --- where a prompt may resume


def pages(present: str) -> list[bool]:
    return [page == "x" for page in present]


@pytest.mark.parametrize(
    ("kv", "others", "legal"),
    [
        ("xxxxx", [], [1, 2, 3, 4, 5]),
        ("xx.xx", [], [1, 2]),
        (".xxxx", [], []),
        ("xxxxx", [("mamba", 1, "..x.x")], [3, 5]),
        ("xxxx.", [("mamba", 1, "..x.x")], [3]),
        ("xxxxx", [("swa", 2, "x.xx.")], [1, 4]),
        ("xxxxx", [("swa", 2, ".xxx."), ("mamba", 1, "..xxx")], [3, 4]),
        ("xxxxx", [("indexer", None, "xxx.x")], [1, 2, 3]),
        ("xxxxx", [("indexer", None, "xxx.x"), ("swa", 2, "..xxx")], []),
        ("xxxxx", [("swa", 9, "xxxxx")], [1, 2, 3, 4, 5]),
        ("xxxxx", [("swa", 9, "x.xxx")], [1]),
    ],
)
def test_a_prompt_may_resume_where_every_pool_has_what_it_reads(
    kv: str, others: list[tuple[str, int | None, str]], legal: list[int]
) -> None:
    asked = [Asked("kv", None), *(Asked(name, lookback) for name, lookback, _ in others)]
    found = resumable(asked, [pages(kv), *(pages(present) for _, _, present in others)])
    assert (found.legal, found.pages) == (legal, max(legal, default=0))


@settings(max_examples=30)
@given(
    st.integers(1, 9).flatmap(
        lambda count: st.lists(
            st.tuples(st.none() | st.integers(1, 4), st.lists(st.booleans(), min_size=count, max_size=count)),
            min_size=1,
            max_size=4,
        )
    )
)
def test_the_boundaries_are_those_of_the_words_read_page_by_page(pools: list[tuple[int | None, list[bool]]]) -> None:
    pools[0] = (None, pools[0][1])
    count = len(pools[0][1])
    expected = [
        stop
        for stop in range(1, count + 1)
        if all(all(there[0 if back is None else max(0, stop - back) : stop]) for back, there in pools)
    ]
    found = resumable([Asked(str(i), back) for i, (back, _) in enumerate(pools)], [there for _, there in pools])
    assert found.legal == expected, json.dumps(pools)
