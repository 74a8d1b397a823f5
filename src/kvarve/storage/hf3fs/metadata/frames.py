"""How a call and its answer lie on a stream: a header, then names, then integers. Strict and bounded."""

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvarve.storage.hf3fs.metadata.calls import CALLS, BadCall
from kvarve.storage.hf3fs.metadata.service import MOST_NAMES

_HEADER = struct.Struct("<4sBxxxIII")
HEADER_BYTES = _HEADER.size
_MAGIC = b"kvm1"
OK, BAD = len(CALLS), len(CALLS) + 1  # kinds of answers, beside the calls
_MOST_TEXT = MOST_NAMES * 201
_MOST_NUMBERS = 4 * MOST_NAMES + 2


class Header(NamedTuple):
    kind: int
    tag: int  # of a call; its answer has the same
    text_bytes: int
    numbers: int

    @property
    def rest_bytes(self) -> int:
        return self.text_bytes + 8 * self.numbers


def pack(kind: int, tag: int, names: Sequence[str], numbers: Sequence[int] | bytes) -> bytes:
    """Bytes are numbers that are packed already. OverflowError: a number has more than 63 bits."""
    text = "\n".join(names).encode("ascii", "backslashreplace")[:_MOST_TEXT]
    if not isinstance(numbers, bytes):
        column = array("q", numbers)
        if sys.byteorder == "big":
            column.byteswap()
        numbers = column.tobytes()
    return _HEADER.pack(_MAGIC, kind, tag, len(text), len(numbers) // 8) + text + numbers


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """BadCall: it is none of ours, or too long."""
    magic, kind, tag, text_bytes, numbers = _HEADER.unpack_from(data)
    if magic != _MAGIC or kind > BAD:
        raise BadCall("these are no calls of a metadata service")
    if text_bytes > _MOST_TEXT or numbers > _MOST_NUMBERS:
        raise BadCall(f"a call has at most {MOST_NAMES} names")
    return Header(kind, tag, text_bytes, numbers)


def read_rest(header: Header, data: bytes | bytearray | memoryview) -> tuple[list[str], list[int]]:
    """The names and the numbers that follow a header."""
    try:
        text = str(data[: header.text_bytes], "ascii")
    except UnicodeDecodeError:
        raise BadCall("a name is not ASCII") from None
    column = array("q", bytes(data[header.text_bytes : header.rest_bytes]))
    if sys.byteorder == "big":
        column.byteswap()
    return text.split("\n") if text else [], column.tolist()
