"""The header of a slab's table, and the format of a folder, which it says as well as the folder's own file.

magic 8, format u32, 0 u32, owner u64 (of the label), identity u64, slot bytes u64, slots u64, check u64
"""

import hashlib
import struct
from typing import NamedTuple

# Whatever changes in a folder so that this version cannot read it changes this number.
_FORMAT = 3
FORMAT = f"kvarve-slabs/{_FORMAT + 1}"
HEADER_BYTES = 256  # as an entry
_HEADER = struct.Struct("<8sIIQQQQ")
_MAGIC = b"kvarveSL"
_CHECK_BYTES = 8


def owner_of(label: bytes) -> int:
    """The id of a model in the headers of its tables."""
    return int.from_bytes(hashlib.sha256(label).digest()[:8], "little")


class Header(NamedTuple):
    """`owner`: the id of a model; `identity`: of the slab."""

    owner: int
    identity: int
    slot_bytes: int
    slots: int

    def packed(self) -> bytes:
        plain = _HEADER.pack(_MAGIC, _FORMAT, 0, *self)
        return plain + hashlib.sha256(plain).digest()[:_CHECK_BYTES]


def read_header(raw: bytes) -> Header | None:
    """None: this is no header, or one of another format."""
    plain, check = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + _CHECK_BYTES]
    if len(check) < _CHECK_BYTES or hashlib.sha256(plain).digest()[:_CHECK_BYTES] != check:
        return None
    magic, format_, _, *rest = _HEADER.unpack(plain)
    return Header(*rest) if (magic, format_) == (_MAGIC, _FORMAT) else None
