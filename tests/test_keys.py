"""Names of pages: pages that depend on different tokens, salts or models have different names."""

import hashlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarve.pages.keys import (
    TOKEN_BYTES,
    bind_to_chunk,
    extend,
    group_name,
    object_name,
    pack,
    parse_object_name,
    root_key,
)

TOKEN = st.integers(0, 2**32 - 1)
TOKENS = st.lists(TOKEN, max_size=40)
PAGES = st.integers(1, 5)


def keys(tokens: list[int], page_tokens: int, namespace: bytes = b"model", salt: str = "") -> list[bytes]:
    return extend(root_key(namespace, salt), pack(tokens), page_tokens)


@given(TOKENS, PAGES)
def test_the_key_of_each_full_page_is_the_hash_of_its_parent_and_its_tokens(tokens: list[int], page: int) -> None:
    parent, got = root_key(b"model"), keys(tokens, page)
    assert len(got) == len(tokens) // page
    for number, key in enumerate(got):
        own = b"".join(token.to_bytes(4, "little") for token in tokens[number * page : (number + 1) * page])
        parent = hashlib.sha256(parent + own).digest()
        assert key == parent


@given(st.lists(TOKEN, min_size=1, max_size=40), PAGES, st.integers(0, 39), st.integers(1, 2**32 - 1))
def test_another_token_changes_its_own_key_and_every_later_one(
    tokens: list[int], page_tokens: int, at: int, by: int
) -> None:
    at, other = at % len(tokens), [*tokens]
    other[at] = (other[at] + by) % 2**32
    for page, (one, two) in enumerate(zip(keys(tokens, page_tokens), keys(other, page_tokens), strict=True)):
        assert (one == two) == (at >= (page + 1) * page_tokens)


@given(TOKENS, PAGES, st.integers(0, 40))
def test_keys_of_the_rest_continue_the_keys_of_the_beginning(tokens: list[int], page_tokens: int, at: int) -> None:
    whole = keys(tokens, page_tokens)
    cut = min(at, len(whole))
    parent = whole[cut - 1] if cut else root_key(b"model")
    assert extend(parent, pack(tokens)[cut * page_tokens * TOKEN_BYTES :], page_tokens) == whole[cut:]


SALTS = st.text("ab\u00e9", max_size=4)


@given(st.binary(max_size=4), SALTS, st.binary(max_size=4), SALTS)
def test_roots_are_equal_only_for_the_same_model_and_salt(one: bytes, salt: str, two: bytes, other: str) -> None:
    assert (root_key(one, salt) == root_key(two, other)) == ((one, salt) == (two, other))


@given(TOKENS)
@example([0, 2**32 - 1])
def test_packing_is_little_endian_and_32_bits_wide_whatever_the_width_of_the_callers_array(tokens: list[int]) -> None:
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert pack(tokens) == pack(np.array(tokens, dtype=np.int64)) == expected
    small = [token % 100 for token in tokens]
    assert all(pack(np.array(small, dtype=dtype)) == pack(small) for dtype in ("uint8", "int16", "int32", "uint32"))


def test_a_token_that_does_not_fit_is_refused() -> None:
    for tokens in ([-1], [2**32], [5, -7, 5], [2**40]):
        with pytest.raises(ValueError, match="between 0 and"):
            pack(tokens)
    for tokens in ([1.9] * 4, np.ones(3), [[1, 2], [3, 4]]):
        with pytest.raises(ValueError, match="one sequence of whole numbers"):
            pack(tokens)  # type: ignore[arg-type]


@given(
    st.binary(min_size=32, max_size=32),
    st.sampled_from(["kv", "a-b_c", "x" * 32]),
    st.integers(0, 5000),
    st.integers(1, 5000),
)
def test_the_name_of_an_object_says_all_that_it_was_made_of(key: bytes, pool: str, rank: int, more: int) -> None:
    root, ranks = root_key(b"model"), rank + more
    name = object_name(root, key, pool, rank, ranks)
    assert parse_object_name(name) == (group_name(root), key, pool, rank, ranks)
    assert name == f"{root.hex()[:16]}-{key.hex()}.{pool}.{rank}of{ranks}"


PAGE_NAME = f"{'0' * 16}-{'0' * 64}.kv."


def test_other_names_say_nothing() -> None:
    ends = (
        "",
        "0",
        "0of",
        "0of1 ",
        "0of1\n",
        "00of1",
        "0of01",
        "1of1",
        "8of4",
        "-1of2",
        "0of0",
        "0/1",
        "0OF1",
        "1of2of3",
    )
    wrong = [PAGE_NAME + end for end in (*ends, "\u0660of1", "0of1234567890")]
    for name in ("note", "aaaa-1", f"{'0' * 16}-{'0' * 63}.kv.0of1", *wrong):
        assert parse_object_name(name) is None, name


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(8, 9),
    st.integers(1, 3),
)
def test_sealed_prompts_share_whole_chunks_and_no_page_of_another(
    one: list[int], other: list[int], page: int, per_chunk: int
) -> None:
    chunk = page * per_chunk
    left, right = (bind_to_chunk(pack(tokens), page, chunk) for tokens in (one, other))
    assert len(left) == len(one) * TOKEN_BYTES
    whole = len(one) // chunk * chunk
    assert left[whole * TOKEN_BYTES :] == pack(one[whole:]), "tokens after the last whole chunk stay as they are"
    for at in range(0, min(whole, len(other) // chunk * chunk), page):
        same = one[at // chunk * chunk :][:chunk] == other[at // chunk * chunk :][:chunk]
        place = slice(at * TOKEN_BYTES, (at + page) * TOKEN_BYTES)
        assert (left[place] == right[place]) is same
