"""A model's pools as rows: which rows are refused, and that no two models that differ share a page."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.errors import ConfigError
from kvarve.pages.pools import BUFFER_ALIGNMENT, DTYPE_BYTES, BufferSpec, ModelIdentity, PoolSpec, window_lookback

BUFFER = BufferSpec("keys", (2, 64, 16), "float16")
KV = PoolSpec("kv", (BUFFER, BufferSpec("values", (2, 64, 16), "float16")), None)
STATE = PoolSpec("state", (BufferSpec("conv", (3, 5), "float32"),), 1, in_place=True)
MODEL = ModelIdentity("qwen3", "abc123", "bfloat16", 64, 256, (KV, STATE))


def test_a_buffer_counts_its_bytes() -> None:
    assert BUFFER.nbytes == 2 * 64 * 16 * 2
    assert {name: BufferSpec("x", (3,), name).nbytes for name in DTYPE_BYTES} == {
        name: 3 * size for name, size in DTYPE_BYTES.items()
    }


def test_a_pool_name_is_a_part_of_a_file_name() -> None:
    for name in ("kv", "sliding-4096", "a_b", "0", "x" * 32):
        assert PoolSpec(name, (BUFFER,), None).name == name
    for name in ("", "a b", "a/b", "a.b", "../x", "-", "_", "x" * 33, "a\n"):
        with pytest.raises(ConfigError, match="pool name"):
            PoolSpec(name, (BUFFER,), None)


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


def test_a_model_that_differs_in_one_field_is_another_namespace() -> None:
    assert CHANGES.keys() == {field.name for field in fields(ModelIdentity)}
    for name, value in CHANGES.items():
        assert replace(MODEL, **{name: value}).fingerprint() != MODEL.fingerprint(), name


def test_a_model_whose_rows_differ_anywhere_is_another_namespace() -> None:
    for kv in (
        *(replace(KV, name="kv2"), replace(KV, lookback=9), replace(KV, in_place=True), replace(KV, replicated=True)),
        *(replace(KV, buffers=buffers) for buffers in (KV.buffers[::-1], KV.buffers[:1])),
        replace(KV, buffers=(replace(BUFFER, name="k"), KV.buffers[1])),
        replace(KV, buffers=(replace(BUFFER, shape=(2, 16, 64)), KV.buffers[1])),
        replace(KV, buffers=(replace(BUFFER, dtype="bfloat16"), KV.buffers[1])),
    ):
        assert replace(MODEL, pools=(kv, STATE)).fingerprint() != MODEL.fingerprint(), kv
    assert replace(MODEL, pools=(STATE, KV)).fingerprint() != MODEL.fingerprint()
    assert replace(MODEL, pools=(replace(KV), replace(STATE))).fingerprint() == MODEL.fingerprint()


def test_a_fingerprint_does_not_depend_on_the_process_that_made_it() -> None:
    assert MODEL.fingerprint().hex() == "81e4b8717931645dcac978e7910266cf4ceda0633099314e5a81b850f391a96c"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((lambda shape=shape: BufferSpec("k", shape, "float16"), "each at least 1") for shape in ((), (0,), (4, -1))),
        *((lambda dtype=dtype: BufferSpec("keys", (4,), dtype), "bfloat16") for dtype in ("", "half", "Float32")),
        *((lambda lookback=lookback: PoolSpec("kv", (BUFFER,), lookback), "lookback") for lookback in (0, -1)),
        (lambda: PoolSpec("kv", (), None), "buffers must be at least one"),
        (lambda: replace(MODEL, page_tokens=0), "at least 1"),
        (lambda: replace(MODEL, chunk_tokens=0), "at least 1"),
        (lambda: replace(MODEL, chunk_tokens=100), "must divide 100"),
        (lambda: replace(MODEL, page_tokens=128, chunk_tokens=64), "must divide 64"),
        (lambda: replace(MODEL, pools=()), "name of its own"),
        (lambda: replace(MODEL, pools=(KV, STATE, replace(STATE, name="kv"))), "name of its own"),
        (lambda: replace(MODEL, ranks=0), "ranks must be at least 1, got 0"),
        # Wrong types, which would be errors far away.
        (lambda: BufferSpec("k", [4], "float16"), r"shape must be of type tuple\[int, ...\], got \[4\]"),
        (lambda: BufferSpec("k", (4.0,), "float16"), "shape must be of type"),
        (lambda: BufferSpec("k", (4,), b"int8"), "dtype must be of type str, got b'int8'"),
        (lambda: PoolSpec("kv", [BUFFER], None), "buffers must be of type"),
        (lambda: PoolSpec("kv", (BUFFER,), 1.0), r"lookback must be of type int \| None, got 1.0"),
        (lambda: replace(MODEL, page_tokens="64"), "page_tokens must be of type int, got '64'"),
        (lambda: replace(MODEL, pools=[KV]), "pools must be of type"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
