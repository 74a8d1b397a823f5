"""The file in a store's folder that says its format: a few bytes without which nothing else would be read. Pure."""

import json
import re

MARKER = "kvarve.json"
MARKER_BYTES = 1 << 16  # at most
_VERSION = re.compile(r"kvarve-[a-z0-9]{1,20}/[0-9]{1,9}")


def written(form: str) -> bytes:
    """The file's content."""
    return (json.dumps({"format": form}, indent=1) + "\n").encode()


def format_in(raw: bytes, ours: str) -> str:
    """The format that the file says. ValueError: it is damaged. A well-formed file of another version is believed,
    unless it is ours but for one flipped bit."""
    if len(raw) > MARKER_BYTES:
        raise ValueError(f"more than {MARKER_BYTES} bytes")
    try:
        found = json.loads(raw)["format"]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(repr(error)) from None
    if not isinstance(found, str) or _VERSION.fullmatch(found) is None:
        raise ValueError(f"format {str(found)[:40]!r}")
    for intact in (written(ours), json.dumps({"format": ours}).encode() + b"\n"):  # as stores on 3FS were marked
        differs = int.from_bytes(raw, "big") ^ int.from_bytes(intact, "big")
        if len(raw) == len(intact) and differs.bit_count() == 1:
            raise ValueError(f"format {found!r}, which is {ours!r} but for one bit")
    return found
