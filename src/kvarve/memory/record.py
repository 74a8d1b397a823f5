"""A page as it lies in host memory, in storage and on a wire: a header that says what it is, then its bytes.

Layout (little-endian): magic 8, format u32, rank u32, namespace 32, key 32, pool name 32, payload length u64, checksum
u64, payload. A record is padded to whole 4 KiB blocks, so that direct I/O can move it as it is; the checksum (XXH3, 64
bits) covers everything before and after itself, the padding too.
"""

import math
import struct
from typing import NamedTuple

import xxhash

HEADER = struct.Struct("<8sII32s32s32sQ")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = HEADER.size + CHECKSUM.size
MAGIC = b"kvarvepg"
FORMAT = 1
BLOCK_BYTES = 4096


def record_bytes(payload_bytes: int) -> int:
    """The size of a record: header, payload, padding."""
    return math.ceil((HEADER_BYTES + payload_bytes) / BLOCK_BYTES) * BLOCK_BYTES


class Stamp:
    """Seals and checks the records of one pool of one model on one rank."""

    def __init__(self, namespace: bytes, pool: str, payload_bytes: int, rank: int = 0) -> None:
        self._namespace, self._pool, self._rank = namespace, pool.encode(), rank
        self._length = record_bytes(payload_bytes)
        self._payload_bytes = payload_bytes

    def _header(self, key: bytes) -> bytes:
        return HEADER.pack(MAGIC, FORMAT, self._rank, self._namespace, key, self._pool, self._payload_bytes)

    def seal(self, record: memoryview, key: bytes) -> None:
        """Write the header of a record whose payload is complete."""
        header = self._header(key)
        record[:HEADER_BYTES] = header + CHECKSUM.pack(_checksum(header, record))

    def names(self, record: memoryview, key: bytes) -> bool:
        """Whether a record says that it is this page; its bytes are not looked at."""
        return record[: HEADER.size] == self._header(key)

    def intact(self, record: memoryview, key: bytes) -> bool:
        """Whether a record is this page of this pool and model, every bit of it."""
        header = self._header(key)
        if len(record) != self._length or record[: HEADER.size] != header:
            return False
        return _claimed(record) == _checksum(header, record)


def whole(record: memoryview) -> bool:
    """Whether a record is a page of some model as it was sealed, every bit of it. Which page is not asked."""
    if len(record) < HEADER_BYTES:
        return False
    header = bytes(record[: HEADER.size])
    magic, form, _, _, _, _, payload_bytes = HEADER.unpack(header)
    if (magic, form) != (MAGIC, FORMAT) or len(record) != record_bytes(payload_bytes):
        return False
    return _checksum(header, record) == _claimed(record)


class Title(NamedTuple):
    """Which page a record says that it is."""

    namespace: bytes
    key: bytes
    pool: str
    rank: int


def title(record: memoryview) -> Title:
    """What stands in the header of a record that is `whole`, which says nothing of where it was found."""
    _, _, rank, namespace, key, pool, _ = HEADER.unpack(record[: HEADER.size])
    return Title(namespace, key, pool.rstrip(b"\0").decode("ascii", "replace"), rank)


def _checksum(header: bytes, record: memoryview) -> int:
    """What the checksum of a record with this header has to be."""
    digest = xxhash.xxh3_64(header)
    digest.update(record[HEADER_BYTES:])
    return int(digest.intdigest())


def _claimed(record: memoryview) -> int:
    """What a record says that its checksum is."""
    return int(CHECKSUM.unpack(record[HEADER.size : HEADER_BYTES])[0])
