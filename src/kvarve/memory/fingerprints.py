"""Whether a copy left a page as it was: fingerprints of sampled pages, from before and from after it.

A seal is made from the copy, so a copy that alters a value is sealed and passes every check from then on. Which pages
are sampled depends on their key alone, so that all ranks compare the same ones.
"""

import logging
import threading
from collections import Counter

from xxhash import xxh3_64_intdigest

from kvarve.records.seals import Piece

log = logging.getLogger(__name__)

Edge = tuple[str, str]  # of tiers: source and target
WHOLE = 1 << 32


def fingerprint(*pieces: Piece) -> int:
    """Of bytes, wherever they lie and however they are divided into the same pieces."""
    seed = 0
    for piece in pieces:
        seed = xxh3_64_intdigest(piece, seed)
    return seed


class Fingerprints:
    """Draws the sample, and counts what was compared and what differed by edge; from any thread."""

    def __init__(self, share: float) -> None:
        """`share` of all pages, 0 to 1."""
        self._below = round(share * WHOLE)
        self._lock = threading.Lock()
        self.compared: Counter[Edge] = Counter()
        self.altered: Counter[Edge] = Counter()

    def samples(self, key: bytes) -> bool:
        """Whether a page's copies are compared."""
        return int.from_bytes(key[:4], "big") < self._below

    def equal(self, edge: Edge, pool: str, key: bytes, before: int, after: int) -> bool:
        """Whether a copy left a page as it was; counts it, and logs one that was altered."""
        with self._lock:
            self.compared[edge] += 1
            self.altered[edge] += before != after
        if before != after:
            where = f"{edge[0]} to {edge[1]}"
            log.error("a copy from %s altered page %s of pool %s: it is dropped", where, key.hex()[:12], pool)
        return before == after
