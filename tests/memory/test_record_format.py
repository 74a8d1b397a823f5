"""Format 2 of the record, field by field as its documentation gives them, and how a reader treats any other."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvarve.pages.pools import BUFFER_ALIGNMENT
from kvarve.records.record import BLOCK_BYTES, FORMAT, HEADER, HEADER_BYTES, Stamp, record_bytes, title, whole

NAMESPACE, KEY, PAYLOAD = b"m" * 32, bytes(range(32)), bytes(range(1, 101))
STAMP = Stamp(NAMESPACE, "attention", len(PAYLOAD), rank=2, ranks=8)
# Offset, bytes and value of each field of a record of this page: as the documentation says, not as the code does.
FIELDS = {
    "magic": (0, 8, b"kvarvepg"),
    "format": (8, 4, (2).to_bytes(4, "little")),
    "header": (12, 4, (256).to_bytes(4, "little")),
    "rank": (16, 4, (2).to_bytes(4, "little")),
    "ranks": (20, 4, (8).to_bytes(4, "little")),
    "first head": (24, 4, bytes(4)),
    "heads": (28, 4, bytes(4)),
    "namespace": (32, 32, NAMESPACE),
    "key": (64, 32, KEY),
    "pool": (96, 32, b"attention".ljust(32, b"\0")),
    "kind of check": (128, 2, (1).to_bytes(2, "little")),
    "encoding": (130, 2, bytes(2)),
    "flags": (132, 4, bytes(4)),
    "plain length": (136, 8, len(PAYLOAD).to_bytes(8, "little")),
    "stored length": (144, 8, len(PAYLOAD).to_bytes(8, "little")),
    "zeros": (152, 72, bytes(72)),
}


def sealed(record: bytearray) -> memoryview:
    """A record whose checksum fits its other bytes, whatever they are."""
    digest = xxhash.xxh3_64(bytes(record[:224]) + bytes(record[256:])).intdigest()
    record[224:256] = digest.to_bytes(8, "little") + bytes(24)
    return memoryview(record)


def a_record() -> bytearray:
    record = bytearray(BLOCK_BYTES)
    for start, size, value in FIELDS.values():
        assert len(value) == size
        record[start : start + size] = value
    record[256 : 256 + len(PAYLOAD)] = PAYLOAD
    return record


def refused(record: memoryview) -> bool:
    """Neither this page nor any other; the answer is a miss, not an exception."""
    return not STAMP.intact(record, KEY) and not whole(record)


def test_a_sealed_record_has_each_field_where_the_documentation_says() -> None:
    record = bytearray(record_bytes(len(PAYLOAD)))
    record[HEADER_BYTES : HEADER_BYTES + len(PAYLOAD)] = PAYLOAD
    STAMP.seal(memoryview(record), KEY)
    assert record == bytearray(sealed(a_record()))
    assert (FORMAT, HEADER_BYTES) == (2, 256) and HEADER_BYTES % BUFFER_ALIGNMENT == 0


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_says_something_else_is_another_page_or_none_even_under_a_right_check(name: str) -> None:
    start, size, _ = FIELDS[name]
    for byte, flip in ((start, 1), (start, 0x40), (start + size - 1, 0x80)):
        record = a_record()
        record[byte] ^= flip
        assert not STAMP.intact(sealed(record), KEY) and not STAMP.names(memoryview(record), KEY)
        if name not in ("rank", "ranks", "namespace", "key", "pool"):
            assert not whole(memoryview(record)), "this version does not know it"
        elif flip == 1:
            assert whole(memoryview(record)), "it is another page"


def test_a_record_with_one_bit_changed_or_of_another_length_is_no_page() -> None:
    record = bytearray(sealed(a_record()))
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        assert not whole(memoryview(record)), f"bit {bit} was flipped"
        assert bit >= 8 * (HEADER_BYTES + len(PAYLOAD)) or not STAMP.intact(memoryview(record), KEY)
        record[bit // 8] ^= 1 << bit % 8
    assert whole(memoryview(record)) and STAMP.intact(memoryview(record), KEY)
    assert title(memoryview(record)) == (NAMESPACE, KEY, "attention", 2, 8)
    assert refused(memoryview(record)[:-1]) and refused(memoryview(record + bytes(BLOCK_BYTES)))
    assert refused(memoryview(record)[: HEADER.size])


@given(st.integers(0, 1 << 30))
def test_a_record_is_whole_blocks_and_no_more_than_it_needs(payload_bytes: int) -> None:
    size = record_bytes(payload_bytes)
    assert size % BLOCK_BYTES == 0
    assert 0 <= size - HEADER_BYTES - payload_bytes < BLOCK_BYTES


@given(st.binary(max_size=300), st.data())
def test_no_bytes_at_all_make_a_reader_stumble(noise: bytes, data: st.DataObject) -> None:
    record = a_record()
    at = data.draw(st.integers(0, 255))
    record[at : at + len(noise)] = noise[: BLOCK_BYTES - at]
    for view in (memoryview(noise), memoryview(record), sealed(record)):
        assert STAMP.intact(view, KEY) in (True, False)
        if whole(view):
            title(view)
