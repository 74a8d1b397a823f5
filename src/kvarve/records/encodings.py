"""A record in fewer bytes, for storage: its payload by byte planes, of which those that shrink are compressed.

The exponents of floating-point numbers are alike and their mantissas are noise. Taken together they hardly shrink;
apart, the planes of the exponents do. Four planes serve numbers of 2 and of 4 bytes alike, so nothing has to be known
of a pool. An encoded record, little-endian:

      0 256  the header of the plain record, but for its encoding and its stored length (`record`)
    256  16  how long each plane is here: four numbers; one that is as long as a plane is not compressed
    272      planes 0 to 3: every fourth byte behind the plain record's header, from the first to the fourth
             zeros, up to whole steps

A step is a 32nd of the plain record, in whole 4 KiB. So records of a pool have few sizes, which a store of slots needs,
and none is expanded to more than 32 times its bytes. The check in the header is the plain record's.
"""

import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from kvarve.errors import ConfigError
from kvarve.records.record import BLOCK_BYTES, FORMAT, HEADER, HEADER_BYTES, MAGIC, NO_FLAGS, RAW, record_bytes

PLANES = 4
_LENGTHS = struct.Struct(f"<{PLANES}I")
_START = HEADER_BYTES + _LENGTHS.size
_ENCODING = struct.Struct("<H")
_ENCODING_AT, _STORED_AT, _STORED = 130, 144, struct.Struct("<Q")
_STEPS = 32  # of a record
_LEAST = 0.95  # of its length: a plane that shrinks less stays as it is
_SAMPLE_BYTES, _SAMPLE_SHARE = 4096, 16  # of a plane, compressed to see whether all of it is worth the time


class Broken(Exception):
    """A record whose header names an encoding, but which cannot be expanded."""


class Codec(Protocol):
    """Compresses bytes; used by several threads, which it lets run meanwhile."""

    number: int  # the encoding of records that it made

    def compress(self, data: Any) -> bytes: ...

    def expand(self, data: Any, size: int) -> bytes:
        """The `size` bytes that were compressed. Broken: the data is damaged or expands to another size; the codec
        allocates no more than `size` to find that out."""
        ...


class Zstd:
    """Zstandard as an entropy coder: with so small a table it looks for few matches, which exponents do not have."""

    number = 1

    def __init__(self) -> None:
        self._zstd = import_module("zstandard")
        self._parameters = self._zstd.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
        self._here = threading.local()  # each thread's: making one takes as long as a plane of 30 KiB

    def compress(self, data: Any) -> bytes:
        if not hasattr(self._here, "compressor"):
            self._here.compressor = self._zstd.ZstdCompressor(compression_params=self._parameters)
        packed: bytes = self._here.compressor.compress(data)
        return packed

    def expand(self, data: Any, size: int) -> bytes:
        try:
            if self._zstd.frame_content_size(data) != size:  # so much would be allocated
                raise Broken("a plane of another length")
            if not hasattr(self._here, "expander"):
                self._here.expander = self._zstd.ZstdDecompressor()
            found: bytes = self._here.expander.decompress(data, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise Broken(str(error)) from None
        if len(found) != size:
            raise Broken("a plane of another length")
        return found


class Lz4:
    number = 2

    def __init__(self) -> None:
        self._lz4 = import_module("lz4.block")

    def compress(self, data: Any) -> bytes:
        packed: bytes = self._lz4.compress(data, store_size=False)
        return packed

    def expand(self, data: Any, size: int) -> bytes:
        try:
            found: bytes = self._lz4.decompress(data, uncompressed_size=size)
        except self._lz4.LZ4BlockError as error:
            raise Broken(str(error)) from None
        if len(found) != size:
            raise Broken("a plane of another length")
        return found


CODECS: dict[str, type[Zstd] | type[Lz4]] = {"zstd": Zstd, "lz4": Lz4}
_NAMES = {made.number: name for name, made in CODECS.items()}


@lru_cache
def codec(name: str) -> Codec:
    """The codec of this name. ConfigError: its library is missing."""
    try:
        return CODECS[name]()
    except ImportError as error:
        raise ConfigError(f"{name} compression needs a library ({error}): install the extra 'compress'") from error


def pool_of(pieces: Sequence[memoryview]) -> str | None:
    """The pool of a plain record that lies in these pieces and can be encoded; None for anything else."""
    first, nbytes = pieces[0], sum(map(len, pieces))
    if first.nbytes < HEADER_BYTES or any(len(piece) % PLANES for piece in pieces):
        return None
    magic, form, length, *_, pool, _, encoding, flags, plain, stored = HEADER.unpack_from(first)
    known = (magic, form, length, encoding, flags, plain) == (MAGIC, FORMAT, HEADER_BYTES, RAW, NO_FLAGS, stored)
    if not known or nbytes != record_bytes(plain):
        return None
    return bytes(pool).rstrip(b"\0").decode("ascii", "replace")


def encode(
    pieces: Sequence[memoryview], using: Codec, into: memoryview, worth: Sequence[bool] = ()
) -> tuple[int | None, Sequence[bool]]:
    """Write a record (see `pool_of`) encoded to `into`, which has `BLOCK_BYTES` more than the record; returns the bytes
    that it takes there, or None if it would not save a step, and which of its planes were worth compressing. That need
    not be found out again, a third of the time, if it is given: a pool's records are alike."""
    nbytes = sum(map(len, pieces))
    payload = [pieces[0][HEADER_BYTES:], *pieces[1:]]
    each = [np.frombuffer(piece, np.uint8).reshape(-1, PLANES) for piece in payload if piece.nbytes]
    size, at = (nbytes - HEADER_BYTES) // PLANES, _START
    tried = []
    lengths, out = [], np.frombuffer(into, np.uint8)
    for number in range(PLANES):
        np.concatenate([rows[:, number] for rows in each], out=out[at : at + size])
        plane = into[at : at + size]
        tried.append(worth[number] if worth else _shrinks(plane, using))
        packed = using.compress(plane) if tried[-1] else plane
        if len(packed) < _LEAST * size:
            into[at : at + len(packed)] = packed
        lengths.append(len(packed) if len(packed) < _LEAST * size else size)
        at += lengths[-1]
    whole = _padded(at, nbytes)
    if whole >= nbytes:
        return None, tried
    into[:HEADER_BYTES] = pieces[0][:HEADER_BYTES]
    _ENCODING.pack_into(into, _ENCODING_AT, using.number)
    _STORED.pack_into(into, _STORED_AT, at - HEADER_BYTES)
    _LENGTHS.pack_into(into, HEADER_BYTES, *lengths)
    into[at:whole] = bytes(whole - at)
    return whole, tried


def plain_bytes(begins: memoryview, size: int) -> int | None:
    """The bytes of the plain record of an object of `size` that begins so, for at least a header unless it is shorter;
    None if it is no encoded record."""
    if begins.nbytes < HEADER_BYTES:
        return None
    magic, form, length, *_, encoding, flags, plain, stored = HEADER.unpack_from(begins)
    if (magic, form, length, flags) != (MAGIC, FORMAT, HEADER_BYTES, NO_FLAGS) or encoding not in _NAMES:
        return None
    record = record_bytes(plain)
    return record if stored >= _LENGTHS.size and size == _padded(HEADER_BYTES + stored, record) < record else None


def decode(data: memoryview | bytes, into: memoryview) -> None:
    """Write a plain record to `into`, which has the `plain_bytes` of all of `data`, and is other memory.

    Broken: it is damaged, and `into` has anything. ConfigError: its library is missing.
    """
    data = memoryview(data)
    using = codec(_NAMES[_ENCODING.unpack_from(data, _ENCODING_AT)[0]])
    lengths, size = _LENGTHS.unpack_from(data, HEADER_BYTES), (into.nbytes - HEADER_BYTES) // PLANES
    end = _START + sum(lengths)
    if max(lengths) > size or end != HEADER_BYTES + _STORED.unpack_from(data, _STORED_AT)[0] or any(data[end:]):
        raise Broken("its lengths contradict each other")
    rows, at = np.frombuffer(into[HEADER_BYTES:], np.uint8).reshape(-1, PLANES), _START
    for number, length in enumerate(lengths):
        plane = data[at : at + length]
        rows[:, number] = np.frombuffer(plane if length == size else using.expand(plane, size), np.uint8)
        at += length
    into[:HEADER_BYTES] = data[:HEADER_BYTES]
    _ENCODING.pack_into(into, _ENCODING_AT, RAW)
    into[_STORED_AT : _STORED_AT + _STORED.size] = into[_STORED_AT - _STORED.size : _STORED_AT]  # the plain length


def expanded(record: memoryview) -> memoryview:
    """The plain record of one that is encoded, or any other object itself. Broken, ConfigError as of `decode`."""
    size = plain_bytes(record, record.nbytes)
    if size is None:
        return record
    found = memoryview(bytearray(size))
    decode(record, found)
    return found


def _shrinks(plane: memoryview, using: Codec) -> bool:
    """Whether a part of a plane is worth compressing, as one of noise takes as long as any."""
    size = max(_SAMPLE_BYTES, plane.nbytes // _SAMPLE_SHARE)
    if plane.nbytes < 2 * size:
        return True
    middle = (plane.nbytes - size) // 2
    return len(using.compress(plane[middle : middle + size])) < _LEAST * size


def _padded(nbytes: int, record: int) -> int:
    """`nbytes` in whole steps of a plain record of so many bytes."""
    step = -(-record // (_STEPS * BLOCK_BYTES)) * BLOCK_BYTES
    return -(-nbytes // step) * step
