"""The file in a store's folder that says its format: a few bytes without which nothing else would be read."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import Damaged
from kvarve.storage.file.disk import UNREADABLE

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


def problem_in(folder: Path, read: Callable[[], bytes], ours: str, *, kind: str, otherwise: Callable[[], bool]) -> str:
    """What is wrong with the file, which `read` reads, of a folder that is not empty, if what lies beside it says that
    it is in our format (`otherwise`); "" if nothing is. StorageError: it is in another format, or no folder of this
    kind. Damaged: neither the file nor what lies beside it can be read."""
    path, what_to_do = folder / MARKER, "empty its folder or give another one"
    refusal: StorageError
    try:
        found = format_in(read(), ours)
        if found == ours:
            return ""
        raise StorageError(
            f"{folder} holds pages of another version of kvarve ({found!r}), or of another kind of store, and not of "
            f"this one ({ours!r}): empty this folder or give another one"
        )
    except FileNotFoundError:
        refusal = StorageError(f"{folder} is not empty and not a {kind}: give another or an empty one")
    except ValueError as error:
        refusal = Damaged(f"{path} is damaged ({error}): {what_to_do}")
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        refusal = Damaged(f"{path} cannot be read ({error.strerror}): {what_to_do}")
    if not otherwise():
        raise refusal
    return f"{path} is damaged or missing, but its data are in this format ({ours})"
