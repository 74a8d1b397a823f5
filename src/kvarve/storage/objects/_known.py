"""Which objects are there, as far as this process has seen? What it asked for, stored or listed needs no request."""

import threading
import weakref
from array import array
from collections.abc import Sequence

import numpy as np
import xxhash

_TOLD_MOST = 1 << 20  # names since the last listing; beyond them all are forgotten, and asked for again
LISTED_MOST = 1 << 22  # names of a listing, 8 bytes each


def hashed(name: str) -> int:
    """64 bits in place of a name. Two names with the same bits cost a request for an object that is missing."""
    return xxhash.xxh3_64_intdigest(name.encode())


class Known:
    """Names that were there when they were last seen; an object may have gone since, which a get then tells."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._listed = np.empty(0, np.uint64)  # sorted
        self._before: dict[int, bool] = {}  # seen between the last listing and the one under way: there or gone
        self._told: dict[int, bool] = {}  # since then; the later word counts

    def has(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            listed, before, told = self._listed, self._before, self._told
            hashes = [*map(hashed, names)]
            found = [told.get(each, before.get(each)) for each in hashes]
        if len(listed):
            wanted = np.array(hashes, np.uint64)
            at = np.minimum(np.searchsorted(listed, wanted), len(listed) - 1)
            known = (listed[at] == wanted).tolist()
        else:
            known = [False] * len(names)
        return [there if word is None else word for word, there in zip(found, known, strict=True)]

    def tell(self, name: str, there: bool) -> None:
        with self._lock:
            if len(self._told) >= _TOLD_MOST:
                self._told.clear()
            self._told[hashed(name)] = there

    def listing(self) -> None:
        """A listing begins: later words count more than its names."""
        with self._lock:
            self._before = (self._before | self._told) if len(self._before) < _TOLD_MOST else {}
            self._told = {}

    def listed(self, hashes: "array[int]") -> None:
        """It has ended, and found these: an array, since millions of Python's numbers would be a list of 200
        MiB, to look through which stops all other threads."""
        found = np.sort(np.frombuffer(hashes, np.uint64))
        with self._lock:
            self._listed, self._before = found, {}


_shared: "weakref.WeakValueDictionary[tuple[str, ...], Known]" = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def known_at(place: tuple[str, ...]) -> Known:
    """What is known of a place, which all storages of this process share: one deletes what another has stored."""
    with _shared_lock:
        return _shared.setdefault(place, Known())
