"""A slot as it lies in a file: its header, then the object's bytes. Whether it holds the object that is wanted is seen
from the slot alone. Pure: no file is read or written here.

The header is little-endian, at the beginning of a block of 4 KiB (direct I/O moves whole blocks):

      0   8  magic, b"kvarve3s"
      8   4  format, 1
     12   4  length of a name, which begins at 128
     16  32  SHA-256 of the label whose object it is
     48   8  epoch of the reservation under which it was written
     56   8  number of the slot
     64   8  bytes of the slot, this block included
     72   8  bytes of the object
     80  16  xxh3 (128 bits) of the object
     96   8  xxh3 (64 bits) of all other bytes of the header
    104  24  zeros
    128 200  name, padded with zeros
"""

import hashlib
import re
import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from kvarve.storage.base import is_name
from kvarve.storage.hf3fs.metadata.service import MOST_EXTENTS, MOST_PLACES, SLOT_ALIGNMENT, Extent, Slot

BLOCK_BYTES = SLOT_ALIGNMENT
_MAGIC, _FORMAT = b"kvarve3s", 1
_BEFORE = struct.Struct("<8s2I32s4Q16s")
_CHECK = struct.Struct("<Q24x")
_NAME_BYTES = 200
HEADER_BYTES = _BEFORE.size + _CHECK.size + _NAME_BYTES
_FILE = re.compile("slots-([1-9][0-9]{0,15})-(0|[1-9][0-9]{0,15})")
_STEPS = 32  # of slot sizes between a power of two and the next one


class Title(NamedTuple):
    """The object that a header names."""

    owner: bytes
    name: str
    slot: Slot
    size_bytes: int
    digest: bytes = b""  # of its bytes


def owner_of(label: bytes) -> bytes:
    return hashlib.sha256(label).digest()


def slot_bytes_for(size_bytes: int) -> int:
    """The size of the slot for an object, at most a 32nd larger than needed: objects of about one size share slots,
    such as pages that were compressed."""
    needed = BLOCK_BYTES + size_bytes
    step = max(BLOCK_BYTES, (1 << (needed - 1).bit_length() - 1) // _STEPS)
    return -(-needed // step) * step


def file_name(extent: Extent) -> str:
    return f"slots-{extent.slot_bytes}-{extent.number}"


def extent_of(name: str) -> Extent | None:
    """The extent that a file's name tells; None if no extent's file can have it."""
    match = _FILE.fullmatch(name)
    if match is None or int(match[1]) % BLOCK_BYTES or int(match[2]) >= MOST_EXTENTS:
        return None
    return Extent(int(match[1]), int(match[2]))


def offset(slot: Slot) -> int:
    """Where the slot begins in its extent's file."""
    return slot.place * slot.slot_bytes


def digest(pieces: Iterable[memoryview]) -> bytes:
    """The check of an object's bytes."""
    hashed = xxhash.xxh3_128()
    for piece in pieces:
        hashed.update(piece)
    return hashed.digest()


def header(title: Title) -> bytes:
    name, slot = title.name.encode(), title.slot
    place = (slot.epoch, slot.number, slot.slot_bytes, title.size_bytes)
    before = _BEFORE.pack(_MAGIC, _FORMAT, len(name), title.owner, *place, title.digest)
    padded = name.ljust(_NAME_BYTES, b"\0")
    return before + _CHECK.pack(xxhash.xxh3_64_intdigest(before + padded)) + padded


def read_header(raw: bytes) -> Title | None:
    """The title of a header of this format, every bit of it as it was written; None for anything else."""
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        return None
    _, _, name_bytes, owner, epoch, number, slot_bytes, size_bytes, checked = _BEFORE.unpack_from(raw)
    at = _BEFORE.size + _CHECK.size
    name = raw[at : at + min(name_bytes, _NAME_BYTES)].decode("ascii", "replace")
    title = Title(owner, name, Slot(slot_bytes, number, epoch), size_bytes, checked)
    if not is_name(name) or header(title) != raw[:HEADER_BYTES]:
        return None
    return title if slot_bytes >= BLOCK_BYTES + size_bytes else None


def slots_of(extent: Extent, file_bytes: int) -> Iterable[Slot]:
    """All slots of an extent whose file has so many bytes; nobody has given them an epoch here."""
    count = min(MOST_PLACES, -(-file_bytes // extent.slot_bytes))
    first = extent.number * MOST_PLACES
    return (Slot(extent.slot_bytes, number, 0) for number in range(first, first + count))
