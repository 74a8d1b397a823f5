"""A slot as it lies in a file: its header, then the object's bytes. Whether it holds the object that is wanted is seen
from the slot alone. Pure: no file is read or written here.

The header is little-endian, at the beginning of a block of 4 KiB (direct I/O moves whole blocks):

      0   8  magic, b"kvarve3s"
      8   4  format, 2
     12   4  length of a name, which begins at 128
     16  32  SHA-256 of the label whose object it is
     48   8  generation: one of this write alone
     56   8  number of the slot: of its file, times 4,096, and its place there
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

BLOCK_BYTES = 4096
_PLACE_BITS = 12
MOST_PLACES = 1 << _PLACE_BITS  # slots of a file
NUMBER_BITS = 48  # of a file
_MAGIC, _FORMAT = b"kvarve3s", 2
_BEFORE = struct.Struct("<8s2I32s4Q16s")
_CHECK = struct.Struct("<Q24x")
_NAME_BYTES = 200
HEADER_BYTES = _BEFORE.size + _CHECK.size + _NAME_BYTES
_FILE = re.compile("slots-([1-9][0-9]{0,12})-([1-9][0-9]{0,3})-([0-9a-f]{12})-([0-9a-f]{16})")
_STEPS = 32  # of slot sizes between a power of two and the next one


class Extent(NamedTuple):
    """One file: so many slots of one size. `number` is random, and no file's again. `owner`: who gives its slots."""

    slot_bytes: int
    places: int
    number: int
    owner: int

    @property
    def bytes(self) -> int:
        return self.slot_bytes * self.places


class Slot(NamedTuple):
    """An object's room: it begins `place * slot_bytes` into its file. `generation`: 63 bits, of one write alone."""

    extent: Extent
    place: int
    generation: int
    size_bytes: int  # of the object

    @property
    def number(self) -> int:
        return self.extent.number << _PLACE_BITS | self.place

    @property
    def offset(self) -> int:
        return self.place * self.extent.slot_bytes


class Title(NamedTuple):
    """The object in a slot, as its header names it."""

    label: bytes  # a hash of it
    name: str
    slot: Slot
    digest: bytes = b""  # of its bytes


def hash_of(label: bytes) -> bytes:
    return hashlib.sha256(label).digest()


def slot_bytes_for(size_bytes: int) -> int:
    """The size of the slot for an object, at most a 32nd larger than needed: objects of about one size share slots,
    such as pages that were compressed."""
    needed = BLOCK_BYTES + size_bytes
    step = max(BLOCK_BYTES, (1 << (needed - 1).bit_length() - 1) // _STEPS)
    return -(-needed // step) * step


def file_name(extent: Extent) -> str:
    return f"slots-{extent.slot_bytes}-{extent.places}-{extent.number:012x}-{extent.owner:016x}"


def extent_of(name: str) -> Extent | None:
    """The extent that a file's name tells; None if no extent's file can have it."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    extent = Extent(int(match[1]), int(match[2]), int(match[3], 16), int(match[4], 16))
    return extent if can_be(extent) else None


def can_be(extent: Extent) -> bool:
    size_fits = 0 < extent.slot_bytes < 1 << 40 and not extent.slot_bytes % BLOCK_BYTES
    return size_fits and 0 < extent.places <= MOST_PLACES and extent.number < 1 << NUMBER_BITS


def digest(pieces: Iterable[memoryview]) -> bytes:
    """The check of an object's bytes."""
    hashed = xxhash.xxh3_128()
    for piece in pieces:
        hashed.update(piece)
    return hashed.digest()


def header(title: Title) -> bytes:
    name, slot = title.name.encode(), title.slot
    place = (slot.generation, slot.number, slot.extent.slot_bytes, slot.size_bytes)
    before = _BEFORE.pack(_MAGIC, _FORMAT, len(name), title.label, *place, title.digest)
    padded = name.ljust(_NAME_BYTES, b"\0")
    return before + _CHECK.pack(xxhash.xxh3_64_intdigest(before + padded)) + padded


def read_header(raw: bytes, extent: Extent) -> Title | None:
    """The title of a header of this format in a file, every bit of it as it was written; None for anything else."""
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        return None
    _, _, name_bytes, label, generation, number, _, size_bytes, checked = _BEFORE.unpack_from(raw)
    at = _BEFORE.size + _CHECK.size
    name = raw[at : at + min(name_bytes, _NAME_BYTES)].decode("ascii", "replace")
    slot = Slot(extent, number & (MOST_PLACES - 1), generation, size_bytes)
    title = Title(label, name, slot, checked)
    if not is_name(name) or header(title) != raw[:HEADER_BYTES] or not fits(slot):
        return None
    return title


def fits(slot: Slot) -> bool:
    """Whether such a slot can be: its file has its place, and the slot room for the object."""
    inside = slot.place < slot.extent.places and slot.generation < 1 << 63
    return inside and BLOCK_BYTES + slot.size_bytes <= slot.extent.slot_bytes
