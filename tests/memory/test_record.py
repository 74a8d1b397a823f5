"""A record identifies its page; a record that is damaged or another page's is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.memory.record import BLOCK_BYTES, HEADER, HEADER_BYTES, Stamp, record_bytes, title, whole

NAMESPACE, KEY = b"m" * 32, bytes(range(32))
payloads = st.binary(min_size=1, max_size=300)


def a_record(payload: bytes, stamp: Stamp | None = None, key: bytes = KEY) -> bytearray:
    record = bytearray(record_bytes(len(payload)))
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    (stamp or a_stamp(payload)).seal(memoryview(record), key)
    return record


def a_stamp(payload: bytes) -> Stamp:
    return Stamp(NAMESPACE, "attention", len(payload))


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (Stamp(NAMESPACE, "attention", 64), KEY[:-1] + b"\0"),
        (Stamp(NAMESPACE, "state", 64), KEY),
        (Stamp(NAMESPACE, "attention2", 64), KEY),
        (Stamp(NAMESPACE, "attentio", 64), KEY),
        (Stamp(b"n" + NAMESPACE[1:], "attention", 64), KEY),
        (Stamp(NAMESPACE, "attention", 64, rank=1, ranks=4), KEY),
        (Stamp(NAMESPACE, "attention", 64, rank=2, ranks=8), KEY),
        (Stamp(NAMESPACE, "attention", 128), KEY),
        (Stamp(NAMESPACE, "attention", 63), KEY),
    ],
    ids=["key", "pool", "longer-name", "shorter-name", "model", "rank", "ranks", "longer-payload", "shorter-payload"],
)
def test_a_good_record_of_something_else_is_refused(other: Stamp, key: bytes) -> None:
    ours = Stamp(NAMESPACE, "attention", 64, rank=2, ranks=4)
    record = memoryview(a_record(bytes(64), ours))
    assert ours.intact(record, KEY) and ours.names(record, KEY)
    assert not other.intact(record, key) and not other.names(record, key)


@given(st.integers(0, 1 << 30))
def test_a_record_is_whole_blocks_and_no_more_than_it_needs(payload_bytes: int) -> None:
    size = record_bytes(payload_bytes)
    assert size % BLOCK_BYTES == 0
    assert 0 <= size - HEADER_BYTES - payload_bytes < BLOCK_BYTES


@pytest.mark.parametrize("pool", ["attention", "a-b_c", "x" * 32])
def test_a_record_tells_which_page_it_is(pool: str) -> None:
    record = a_record(b"payload", Stamp(NAMESPACE, pool, 7, rank=5, ranks=8))
    assert title(memoryview(record)) == (NAMESPACE, KEY, pool, 5, 8)


def test_a_record_with_one_bit_changed_is_not_whole() -> None:
    record = a_record(bytes(range(40)))
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        assert not whole(memoryview(record)), f"bit {bit} was flipped"
        record[bit // 8] ^= 1 << bit % 8
    assert whole(memoryview(record))


def test_a_record_of_another_length_than_it_says_is_not_whole() -> None:
    record = a_record(b"payload")
    assert not whole(memoryview(record)[:-1])
    assert not whole(memoryview(record + bytes(BLOCK_BYTES)))
    assert not whole(memoryview(record)[: HEADER.size])
