"""How the processes that have one store open learn of each other's changes: a small file, read before each call.

One number for all, then for each slab its identity (0: there is no such slab) and one number for each stripe of its
table. Who has changed a table counts up its stripes' numbers, then the one for all. It may die in between, so whoever
is about to change something himself compares all of them: what he counts up has then been read by everybody who has
seen it. The file means nothing once nobody has the store open; who comes first writes it anew. It is read by system
calls and not mapped: an I/O error in a mapping is a signal that ends the process, here it is an exception.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvarve.storage.disk import Disk
from kvarve.storage.slabs import STRIPES

_WORDS = 1 + STRIPES
ROW_BYTES = 8 * _WORDS
_MOST_BYTES = 1 << 22
_MASK = (1 << 64) - 1
_BEGUN = b"changes1"  # behind the number for all
UNREADABLE = 2  # the identity of a slab whose files are there and cannot be read; others have odd ones


@dataclass(frozen=True)
class Changed:
    """A slab in which something has changed: in these stripes, or (None) the slab is another one or gone."""

    number: int
    identity: int
    stripes: list[int] | None


class Changes:
    def __init__(self, disk: Disk, file: int) -> None:
        self._disk, self._file = disk, file
        self._head: bytes | None = None
        self._seen = np.zeros((1, _WORDS), np.uint64)  # row 0 is for the one number for all

    def look(self, *, closely: bool = False) -> list[Changed]:
        """What has changed since the last look. `closely`: of those who died before they said so, too."""
        head = self._disk.peek(self._file, 8, 0)
        if head == self._head and not closely:
            return []
        raw = self._disk.peek(self._file, _MOST_BYTES, 0)
        self._head = head  # read before the rest: what comes in between is seen the next time
        now = np.frombuffer(raw[: len(raw) // ROW_BYTES * ROW_BYTES], np.uint64).reshape(-1, _WORDS)
        self._grow(len(now) - 1)
        differs = self._seen[: len(now)] != now
        differs[:1] = False
        found = []
        for row in np.flatnonzero(differs.any(axis=1)).tolist():
            stripes = None if differs[row, 0] else np.flatnonzero(differs[row, 1:]).tolist()
            found.append(Changed(row - 1, int(now[row, 0]), stripes))
        self._seen[: len(now)] = now
        return found

    def tell(self, changed: Mapping[int, tuple[int, Iterable[int]]]) -> None:
        """Of these slabs (number: identity, stripes) something is different now; with the mutex held, after a close
        look."""
        for number, (identity, stripes) in changed.items():
            self._grow(number + 1)
            row = self._seen[number + 1]
            row[0] = identity
            for stripe in stripes:
                row[1 + stripe] = (int(row[1 + stripe]) + 1) & _MASK
            self._disk.write(self._file, [row.tobytes()], (number + 1) * ROW_BYTES)
        head = (int.from_bytes((self._head or b"").ljust(8, b"\0"), "little") + 1) & _MASK
        self._head = head.to_bytes(8, "little")
        self._disk.write(self._file, [self._head], 0)

    def known(self) -> set[int]:
        """The numbers of all slabs that there were at the last look."""
        return set((np.flatnonzero(self._seen[1:, 0])).tolist())

    def is_begun(self) -> bool:
        """Whether this is the file that those who have the store open use, and not one that was made just now."""
        return self._disk.peek(self._file, len(_BEGUN), 8) == _BEGUN

    def begin(self, slabs: Mapping[int, int]) -> None:
        """Nobody else has the store open, and these are the slabs (number: identity)."""
        rows = max([self._disk.size(self._file) // ROW_BYTES, 1, *(number + 2 for number in slabs)])
        fresh = np.zeros((rows, _WORDS), np.uint64)
        for number, identity in slabs.items():
            fresh[number + 1, 0] = identity
        self._disk.write(self._file, [bytes(8) + _BEGUN + fresh.tobytes()[16:]], 0)

    def _grow(self, last_row: int) -> None:
        missing = last_row + 1 - len(self._seen)
        if missing > 0:
            self._seen = np.concatenate([self._seen, np.zeros((missing, _WORDS), np.uint64)])
