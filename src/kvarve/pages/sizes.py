"""Sizes as people write them: "10GiB" to bytes and back. KiB counts by 1024, KB by 1000."""

import re
from fractions import Fraction
from typing import TYPE_CHECKING

from kvarve.errors import ConfigError

if TYPE_CHECKING:
    Size = int
else:

    class Size(int):
        """A number of bytes. For the type checker it is an int; an option of this type is given as "10GiB"."""


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_BYTES_PER_UNIT = {
    unit.lower(): base**power for base, units in ((1000, _DECIMAL), (1024, _BINARY)) for power, unit in enumerate(units)
}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes meant by `text`: "1024", "512MB", "1.5 GiB", in any case; a part of a byte is dropped.

    ConfigError for anything else, a minus sign included, and for more than any machine can address. Zero is a size; the
    caller decides whether it will do.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() or "b" if match else ""
    if match is None or unit not in _BYTES_PER_UNIT:
        known = ", ".join(_BINARY + _DECIMAL[1:])
        raise ConfigError(f"{text!r} cannot be read as a size: write a number and one of {known}, such as 10GiB")
    if (size := int(Fraction(match[1]) * _BYTES_PER_UNIT[unit])) >> 63:
        raise ConfigError(f"{text!r} is too large: a size must be below {1 << 13} PiB")
    return size


def format_size(size_bytes: int) -> str:
    """`size_bytes` (not negative) for people, to one decimal: "0 B", "1.5 GiB"; `parse_size` reads it."""
    value, units = float(size_bytes), list(_BINARY)
    while round(value, 1) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f}".removesuffix(".0") + f" {units[0]}"
