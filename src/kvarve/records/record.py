"""A page as it lies in host memory, in storage and on a wire: a header that identifies it, then its bytes.

Format 2, little-endian. Fields for later versions are reserved, and zero until then:

      0   8  magic, b"kvarvepg"
      8   4  format, 2
     12   4  length of the header, 256
     16   4  rank whose page this is, 0 where all ranks hold the same bytes } or head group,
     20   4  ranks that the model is divided among                          } and how many
     24   4  first of the attention heads that the page holds   } both 0: the page is not
     28   4  how many heads it holds                            } divided by heads
     32  32  namespace: the fingerprint of the model's identity
     64  32  key: the chained hash of all tokens up to the page's end
     96  32  name of the pool, padded with zeros
    128   2  kind of the check: 1 a checksum, 2 a tag under a storage key (`seals`)
    130   2  encoding of the payload: 0 as it is; in storage also 1 zstd, 2 lz4 (`encodings`)
    132   4  flags, none yet
    136   8  plain length: bytes of the payload as the model has it
    144   8  stored length: bytes behind the header as they stand here; the plain length where it is not encoded
    152  72  zeros
    224  32  the check, of all bytes before and behind it; of the plain record if this one is encoded
    256      payload; a buffer that starts at a multiple of 64 bytes in a page does so in memory as well

A record is padded with zeros to whole 4 KiB blocks, for direct I/O. The reader is strict: it rejects an unknown format,
kind, encoding or flag, and anything but zeros where zeros belong.
"""

import struct
from typing import NamedTuple

from kvarve.records.seals import CHECK_BYTES, CHECKSUM, Seal

HEADER = struct.Struct("<8s2I2I2I32s32s32s2HI2Q72x")  # all before the check
HEADER_BYTES = HEADER.size + CHECK_BYTES
MAGIC = b"kvarvepg"
FORMAT = 2
RAW = 0
NO_FLAGS = 0
BLOCK_BYTES = 4096
KEY_BYTES = 32
_WHOLE = (0, 0)  # first head and heads of a page that is not divided by heads
_KEY, _UNUSED, _ZEROS = slice(64, 96), slice(152, 224), bytes(72)


def record_bytes(payload_bytes: int) -> int:
    """The size of a record with a payload of `payload_bytes`: header, payload, padding."""
    return -(-(HEADER_BYTES + payload_bytes) // BLOCK_BYTES) * BLOCK_BYTES


class Stamp:
    """Seals and checks the records of one pool of one model on one of its ranks. With a `seal` of a storage key, those
    that were sealed without it are not intact."""

    def __init__(
        self,
        namespace: bytes,
        pool: str,
        payload_bytes: int,
        rank: int = 0,
        ranks: int = 1,
        seal: Seal = CHECKSUM,
    ) -> None:
        page = (namespace, bytes(KEY_BYTES), pool.encode())
        lengths = (payload_bytes, payload_bytes)
        kinds = (seal.kind, RAW, NO_FLAGS)
        blank = HEADER.pack(MAGIC, FORMAT, HEADER_BYTES, rank, ranks, *_WHOLE, *page, *kinds, *lengths)
        self._before, self._behind = blank[: _KEY.start], blank[_KEY.stop :]
        self._length, self._seal = record_bytes(payload_bytes), seal

    def _header(self, key: bytes) -> bytes:
        return self._before + key + self._behind

    def seal(self, record: memoryview, key: bytes) -> None:
        """Write the header of a record whose payload is complete."""
        record[:HEADER_BYTES] = self.sealed(key, record[HEADER_BYTES:])

    def sealed(self, key: bytes, *payload: memoryview | bytes) -> bytes:
        """The header of a record whose payload, padding included, lies elsewhere in these pieces."""
        header = self._header(key)
        return header + self._seal.check(header, *payload)

    def names(self, record: memoryview, key: bytes) -> bool:
        """Whether a record's header names this page; its payload is not checked."""
        return bytes(record[: HEADER.size]) == self._header(key)

    def intact(self, record: memoryview, key: bytes) -> bool:
        """Whether a record is this page of this pool, model and rank, every bit of it."""
        header, found = self._header(key), bytes(record[:HEADER_BYTES])
        if len(record) != self._length or not found.startswith(header):
            return False
        return self._seal.holds(found[HEADER.size :], header, record[HEADER_BYTES:])


def is_keyed(record: memoryview) -> bool:
    """Whether a record says that it was sealed with a storage key."""
    return len(record) >= HEADER_BYTES and HEADER.unpack_from(record)[10] not in (0, CHECKSUM.kind)


def whole(record: memoryview, seal: Seal = CHECKSUM) -> bool:
    """Whether a record is a page of some model, every bit of it as it was sealed, whichever page it is."""
    found = bytes(record[:HEADER_BYTES])
    if len(found) < HEADER_BYTES:
        return False
    magic, form, length, _, _, first, heads, _, _, _, kind, encoding, flags, plain, stored = HEADER.unpack_from(found)
    known = (MAGIC, FORMAT, HEADER_BYTES, *_WHOLE, seal.kind, RAW, NO_FLAGS)
    if (magic, form, length, first, heads, kind, encoding, flags) != known or found[_UNUSED] != _ZEROS:
        return False
    if plain != stored or len(record) != record_bytes(stored):
        return False
    header = found[: HEADER.size]
    return seal.holds(found[HEADER.size :], header, record[HEADER_BYTES:])


class Title(NamedTuple):
    """The page that a record's header names."""

    namespace: bytes
    key: bytes
    pool: str
    rank: int
    ranks: int


def title(record: memoryview) -> Title:
    """The title of a record that is `whole`, which need not match where it was found."""
    _, _, _, rank, ranks, _, _, namespace, key, pool, *_ = HEADER.unpack_from(record)
    return Title(namespace, key, pool.rstrip(b"\0").decode("ascii", "replace"), rank, ranks)
