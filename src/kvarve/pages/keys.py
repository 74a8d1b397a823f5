"""Names of pages: a chained SHA-256 of the model, the salt and every token up to the page's end.

Two pages have the same key only if everything that a causal model could have read for them is equal, so a key names a
page in any tier, on any rank, after any restart.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
TOKEN_BYTES = 4
HEAD_BYTES = KEY_BYTES  # of a page's tokens, which `bind_to_chunk` changes
GROUP_BYTES = 8  # of a root key, in the names of all pages below it
_NUMBER = "(0|[1-9][0-9]{0,8})"
_OBJECT = re.compile(rf"([0-9a-f]{{16}})-([0-9a-f]{{64}})\.([A-Za-z0-9_-]{{1,32}})\.{_NUMBER}of{_NUMBER}", re.ASCII)


def pack(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as the tree and the keys read them: little-endian unsigned 32-bit. ValueError if one does not fit,
    and for what is no sequence of whole numbers."""
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.ndim != 1 or (ids.size and isinstance(tokens[0], float | np.floating)):
        raise ValueError("token ids must be one sequence of whole numbers")
    if ids.size and int(ids.view(np.uint64).max()) >= 2**32:  # a negative id is huge when read as unsigned
        raise ValueError("token ids must be between 0 and 2**32 - 1")
    return ids.astype("<u4").tobytes()


def unpack(packed: bytes) -> list[int]:
    """The inverse of `pack`."""
    return [int(token) for token in np.frombuffer(packed, "<u4")]


def bind_to_chunk(packed: bytes, page_tokens: int, chunk_tokens: int) -> bytes:
    """Packed tokens that name a page only within its whole chunk, on which the page's bytes depend.

    A model computes a chunk at once, and the last bits of a token's keys and values can depend on all tokens of it: an
    expert that gets more of them rounds otherwise. So the first 32 bytes of each page are mixed (by exclusive or) with
    the SHA-256 of its chunk, and prompts that differ inside a chunk share no page of it. Tokens after the last whole
    chunk stay as they are; no shared page is named by them.
    """
    stride, per_chunk = chunk_tokens * TOKEN_BYTES, chunk_tokens // page_tokens
    chunks = len(packed) // stride
    if per_chunk == 1 or not chunks:
        return packed
    marks = b"".join(hashlib.sha256(packed[at : at + stride]).digest() for at in range(0, chunks * stride, stride))
    pages = np.frombuffer(packed, np.uint8, chunks * stride).reshape(chunks, per_chunk, -1).copy()
    width = min(HEAD_BYTES, pages.shape[2])
    pages[:, :, :width] ^= np.frombuffer(marks, np.uint8).reshape(chunks, 1, KEY_BYTES)[:, :, :width]
    return pages.tobytes() + packed[chunks * stride :]


def heads(packed: bytes, page_tokens: int) -> bytes:
    """What `bind_to_chunk` changes: the first 32 bytes (or all) of each full page of packed tokens, concatenated."""
    width = page_tokens * TOKEN_BYTES
    pages = np.frombuffer(packed, np.uint8, len(packed) // width * width).reshape(-1, width)
    return pages[:, :HEAD_BYTES].tobytes()


def root_key(namespace: bytes, salt: str = "") -> bytes:
    """The key before the first token, from the model's fingerprint and the caller's salt: prompts with equal ones may
    share pages."""
    return hashlib.sha256(b"kvarve-root" + len(namespace).to_bytes(4, "little") + namespace + salt.encode()).digest()


def extend(parent: bytes, tokens: bytes, page_tokens: int) -> list[bytes]:
    """Keys of the full pages of packed `tokens`, each chained to the one before it, the first to `parent`."""
    keys, sha256, width = [], hashlib.sha256, page_tokens * TOKEN_BYTES
    for start in range(0, len(tokens) // width * width, width):
        parent = sha256(parent + tokens[start : start + width]).digest()
        keys.append(parent)
    return keys


def names(parent: bytes, named: bytes, tokens: bytes, page_tokens: int) -> bytes:
    """The keys of all full pages of packed `tokens`, concatenated; `named` has those of the first pages."""
    done = len(named) // KEY_BYTES * page_tokens * TOKEN_BYTES
    return named + b"".join(extend(named[-KEY_BYTES:] or parent, tokens[done:], page_tokens))


def group_name(root: bytes) -> str:
    """The prefix of the names of all pages below a root key: it tells tenants apart without naming them."""
    return root[:GROUP_BYTES].hex()


def object_name(root: bytes, key: bytes, pool: str, rank: int = 0, ranks: int = 1) -> str:
    """The name of one pool's page in a storage backend; its group stands before the first "-".

    The page is that of `rank` of `ranks`; a page of a replicated pool is rank 0's.
    """
    return page_name(root, key) + record_name(pool, rank, ranks)


def page_name(root: bytes, key: bytes) -> str:
    """What the names of all records of a page begin with."""
    return f"{group_name(root)}-{key.hex()}"


def record_name(pool: str, rank: int, ranks: int) -> str:
    """What the names of all pages of a pool on a rank end with."""
    return f".{pool}.{rank}of{ranks}"


class ObjectName(NamedTuple):
    """The parts of an object's name."""

    group: str
    key: bytes
    pool: str
    rank: int
    ranks: int


def parse_object_name(name: str) -> ObjectName | None:
    """The inverse of `object_name`; None for any other name."""
    match = _OBJECT.fullmatch(name)
    if match is None or int(match[4]) >= int(match[5]):
        return None
    return ObjectName(match[1], bytes.fromhex(match[2]), match[3], int(match[4]), int(match[5]))
