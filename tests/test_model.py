"""A model's pools as rows: which rows are refused, and that no two models that differ share a page."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.errors import ConfigError
from kvarve.memory import record
from kvarve.model import (
    BUFFER_ALIGNMENT,
    DTYPE_BYTES,
    LAYOUT_FORMAT,
    MEMORY_TIERS,
    BufferSpec,
    ModelIdentity,
    PoolSpec,
    Tier,
    window_lookback,
)

BUFFER = BufferSpec("keys", (2, 64, 16), "float16")
KV = PoolSpec("kv", (BUFFER, BufferSpec("values", (2, 64, 16), "float16")), None)
STATE = PoolSpec("state", (BufferSpec("conv", (3, 5), "float32"),), 1, in_place=True)
MODEL = ModelIdentity("qwen3", "abc123", "bfloat16", 64, 256, (KV, STATE))


def test_a_buffer_counts_its_bytes() -> None:
    assert BUFFER.nbytes == 2 * 64 * 16 * 2
    assert {name: BufferSpec("x", (3,), name).nbytes for name in DTYPE_BYTES} == {
        name: 3 * size for name, size in DTYPE_BYTES.items()
    }


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (4, -1)])
def test_a_buffer_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="no elements"):
        BufferSpec("keys", shape, "float16")


@pytest.mark.parametrize("dtype", ["", "half", "torch.float16", "Float32"])
def test_an_unknown_dtype_is_refused_and_the_known_ones_are_named(dtype: str) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        BufferSpec("keys", (4,), dtype)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "../x", "-", "_", "x" * 33, "a\n"])
def test_a_pool_name_that_could_not_be_a_part_of_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="pool name"):
        PoolSpec(name, (BUFFER,), None)


@pytest.mark.parametrize("name", ["kv", "sliding-4096", "a_b", "0", "x" * 32])
def test_letters_digits_and_dashes_make_a_pool_name(name: str) -> None:
    assert PoolSpec(name, (BUFFER,), None).name == name


@pytest.mark.parametrize("lookback", [0, -1])
def test_a_pool_that_looks_back_at_nothing_is_refused(lookback: int) -> None:
    with pytest.raises(ConfigError, match="lookback"):
        PoolSpec("kv", (BUFFER,), lookback)


def test_a_pool_without_buffers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one buffer"):
        PoolSpec("kv", (), None)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([*DTYPE_BYTES])), min_size=1
    )
)
def test_buffers_stand_aligned_in_order_and_do_not_overlap(rows: list[tuple[list[int], str]]) -> None:
    pool = PoolSpec("p", tuple(BufferSpec(f"b{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(rows)), None)
    *starts, end = pool.offsets()
    assert starts[0] == 0 and end == pool.payload_bytes and len(starts) == len(rows)
    assert all(start % BUFFER_ALIGNMENT == 0 for start in (*starts, end))
    for buffer, start, after in zip(pool.buffers, starts, [*starts[1:], end], strict=True):
        assert 0 <= after - start - buffer.nbytes < BUFFER_ALIGNMENT


@pytest.mark.parametrize(
    ("window", "page", "lookback"),
    [
        (1, 64, 1),  # only the token itself; a boundary still wants one page
        (2, 64, 1),
        (65, 64, 1),  # 64 tokens back: exactly the page before
        (66, 64, 2),
        (128, 64, 2),
        (129, 64, 2),
        (130, 64, 3),
        (4096, 64, 64),
        (4097, 64, 64),
        (5, 1, 4),
    ],
)
def test_how_far_a_window_looks_back(window: int, page: int, lookback: int) -> None:
    assert window_lookback(window, page) == lookback


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 6))
def test_the_pages_of_a_window_are_those_that_the_next_token_reads(window: int, page: int, boundary: int) -> None:
    boundary += window // page + 2  # far enough from the start
    next_token = boundary * page
    read = {token // page for token in range(next_token - window + 1, next_token)}
    pages = {*range(boundary - window_lookback(window, page), boundary)}
    assert read <= pages and len(pages) <= max(1, len(read))


CHANGES: dict[str, Any] = {
    "architecture": "qwen3-next",
    "weights": "abc124",
    "dtype": "float32",
    "page_tokens": 32,
    "chunk_tokens": 512,
    "pools": (KV,),
    "layout": "kvarve-page/1",
    "config": "0f0f",
    "ranks": 2,
    "sharding": "columns",
    "adapters": "poet",
    "quantisation": "fp8",
    "numerics": "torch 2.11, sdpa",
}


def test_every_field_of_an_identity_is_tried_below() -> None:
    assert set(CHANGES) == {field.name for field in fields(ModelIdentity)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_differs_in_one_field_is_another_namespace(name: str) -> None:
    assert replace(MODEL, **{name: CHANGES[name]}).fingerprint() != MODEL.fingerprint()


@pytest.mark.parametrize(
    "pools",
    [
        (STATE, KV),
        (replace(KV, name="kv2"), STATE),
        (replace(KV, lookback=9), STATE),
        (replace(KV, in_place=True), STATE),
        (replace(KV, replicated=True), STATE),
        (replace(KV, buffers=KV.buffers[::-1]), STATE),
        (replace(KV, buffers=KV.buffers[:1]), STATE),
        (replace(KV, buffers=(replace(BUFFER, name="k"), KV.buffers[1])), STATE),
        (replace(KV, buffers=(replace(BUFFER, shape=(2, 16, 64)), KV.buffers[1])), STATE),
        (replace(KV, buffers=(replace(BUFFER, dtype="bfloat16"), KV.buffers[1])), STATE),
    ],
    ids=lambda pools: ",".join(pool.name for pool in pools),
)
def test_a_model_whose_rows_differ_anywhere_is_another_namespace(pools: tuple[PoolSpec, ...]) -> None:
    assert replace(MODEL, pools=pools).fingerprint() != MODEL.fingerprint()


def test_equal_models_are_one_namespace() -> None:
    twin = ModelIdentity("qwen3", "abc123", "bfloat16", 64, 256, (replace(KV), replace(STATE)))
    assert twin.fingerprint() == MODEL.fingerprint() and len(MODEL.fingerprint()) == 32


def test_a_fingerprint_does_not_depend_on_the_process_that_made_it() -> None:
    assert MODEL.fingerprint().hex() == "81e4b8717931645dcac978e7910266cf4ceda0633099314e5a81b850f391a96c"


@pytest.mark.parametrize("sizes", [(0, 256), (64, 0), (-64, 256)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        replace(MODEL, page_tokens=sizes[0], chunk_tokens=sizes[1])


@pytest.mark.parametrize(("page", "chunk"), [(64, 100), (128, 64), (3, 256)])
def test_a_page_that_does_not_fit_the_prefill_grid_is_refused(page: int, chunk: int) -> None:
    with pytest.raises(ConfigError, match=f"divides {chunk}"):
        replace(MODEL, page_tokens=page, chunk_tokens=chunk)


@pytest.mark.parametrize("pools", [(), (KV, KV), (KV, STATE, replace(STATE, name="kv"))])
def test_pools_need_names_of_their_own(pools: tuple[PoolSpec, ...]) -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        replace(MODEL, pools=pools)


def test_a_model_says_what_it_is_in_one_line() -> None:
    line = str(replace(MODEL, adapters="poet", quantisation="fp8", config="0f0f", ranks=8))
    assert line == (
        "qwen3 bfloat16, weights abc123, config 0f0f, pages of 64, grid 256, kvarve-page/2, adapters poet, "
        "quantisation fp8, ranks 8"
    )
    assert str(MODEL).endswith("kvarve-page/2") and "config unknown" in str(MODEL)


def test_the_layout_of_a_page_names_the_format_of_its_record() -> None:
    assert f"kvarve-page/{record.FORMAT}" == LAYOUT_FORMAT == MODEL.layout


@pytest.mark.parametrize("ranks", [0, -4])
def test_a_model_is_divided_among_one_rank_at_least(ranks: int) -> None:
    with pytest.raises(ConfigError, match="ranks"):
        replace(MODEL, ranks=ranks)


def test_tiers_are_ordered_by_distance() -> None:
    assert Tier.DEVICE < Tier.HOST < Tier.STORAGE and MEMORY_TIERS == (Tier.DEVICE, Tier.HOST)
