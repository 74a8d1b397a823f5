"""How the processes that have one store open learn of each other's changes: a small file, read before each call.

One number for all, then a line for each slab: its identity (0: there is no such slab) and one number for each stripe
of its table, odd while somebody changes something in it. Who changes a table makes its stripes' numbers odd, changes
it, makes them even, and counts up the one for all. He may die or fail anywhere in between. So whoever is about to
change something himself looks at all lines closely: he reads again what is odd, too, and makes it even. Everybody else
sees that then, and until then nobody has put anything else where the old things lay.

The file means nothing once nobody has the store open; who comes first writes it anew. It is read by system calls and
not mapped: an I/O error in a mapping is a signal that ends the process, here it is an exception.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarve.storage.disk import Disk
from kvarve.storage.folder import LINE_BYTES, SLABS
from kvarve.storage.slabs import STRIPES, write_all

_WORDS = 1 + STRIPES
assert LINE_BYTES == 8 * _WORDS
_MOST_BYTES = LINE_BYTES * (SLABS + 1)
_MASK = (1 << 64) - 1
_ONE = np.uint64(1)
_BEGUN = b"changes2"  # behind the number for all
_IN_DOUBT = 2  # no slab's identity, as those are odd: the line is another one than was seen

Line = npt.NDArray[np.uint64]
Told = Mapping[int, tuple[int, Iterable[int]]]  # by the slab's number: its identity, and stripes


@dataclass(frozen=True)
class Changed:
    """A slab in which something has changed: in these stripes, or (None) the slab is another one or gone."""

    number: int
    identity: int
    stripes: list[int] | None
    unsettled: list[int]  # stripes of which nobody has said that they are done; only of a close look


class SequenceLock:
    def __init__(self, disk: Disk, file: int) -> None:
        self._disk, self._file = disk, file
        self._head: bytes | None = None
        self._seen = np.zeros((1, _WORDS), np.uint64)  # line 0 is for the one number for all

    def look(self, *, closely: bool = False) -> Iterator[Changed]:
        """What has changed since the last look; each is seen when the next one is asked for. `closely` also finds what
        is unfinished, or was not told to the end."""
        head = self._disk.peek(self._file, 8, 0)
        if head == self._head and not closely:
            return
        raw = self._disk.peek(self._file, _MOST_BYTES, 0)
        found = np.frombuffer(raw[: len(raw) // LINE_BYTES * LINE_BYTES], np.uint64).reshape(-1, _WORDS)
        self._grow(len(found) - 1)
        now = np.zeros_like(self._seen)
        now[: len(found)] = found
        odd = (now & _ONE).astype(bool)
        differs = self._seen != now
        if closely:
            differs[:, 1:] |= odd[:, 1:]
        differs[0] = False
        for line in np.flatnonzero(differs.any(axis=1)).tolist():
            stripes = None if differs[line, 0] else np.flatnonzero(differs[line, 1:]).tolist()
            unsettled = np.flatnonzero(odd[line, 1:]).tolist() if closely else []
            yield Changed(line - 1, int(now[line, 0]), stripes, unsettled)
            self._seen[line] = now[line]
        self._head = head  # read before the rest: what comes in between is seen the next time

    def doubt(self, numbers: Iterable[int]) -> None:
        """The next close look finds these slabs again."""
        for number in numbers:
            self._seen[number + 1, 0] = _IN_DOUBT

    def known(self) -> set[int]:
        """The numbers of all slabs that there were at the last look."""
        return set(np.flatnonzero(self._seen[1:, 0]).tolist())

    # --- with the mutex held, after a close look; OSError: nobody can rely on what was to be told

    def will(self, change: Told) -> None:
        """In these stripes something is going to be changed; nobody has to look yet."""
        self._seen_now(self._write(change, np.uint64(0)))

    def did(self, change: Told) -> None:
        """It has been, or there is another slab of that number, or (identity 0) none."""
        self._head = None
        lines = self._write(change, _ONE)
        before = int.from_bytes(self._disk.peek(self._file, 8, 0), "little")
        head = (before + 1 & _MASK).to_bytes(8, "little")
        write_all(self._disk, self._file, [head], 0)
        self._head = head
        self._seen_now(lines)

    def _write(self, change: Told, done: np.uint64) -> dict[int, Line]:
        """What stands in these lines now. Until it is seen they are in doubt."""
        lines = {}
        for number, (identity, stripes) in change.items():
            self._grow(number + 1)
            lines[number + 1] = line = self._seen[number + 1].copy()
            self._seen[number + 1, 0] = _IN_DOUBT
            at = np.fromiter(stripes, np.int64) + 1
            line[0], line[at] = identity, (line[at] | _ONE) + done
            self._seen[number + 1, 1:] = line[1:]  # they never go back, whatever of it is written
            write_all(self._disk, self._file, [line.tobytes()], (number + 1) * LINE_BYTES)
        return lines

    def _seen_now(self, lines: Mapping[int, Line]) -> None:
        for number, line in lines.items():
            self._seen[number] = line

    # --- who comes first, and who comes later

    def begin(self, slabs: Mapping[int, int]) -> None:
        """Nobody else has the store open, and these are the slabs (number: identity)."""
        lines = max([1, *(number + 2 for number in slabs)])
        self._disk.cut(self._file, lines * LINE_BYTES)
        fresh = np.zeros((lines, _WORDS), np.uint64)
        for number, identity in slabs.items():
            fresh[number + 1, 0] = identity
        write_all(self._disk, self._file, [bytes(8) + _BEGUN + fresh.tobytes()[16:]], 0)

    def is_begun(self) -> bool:
        """Whether this is the file that those who have the store open use, and not one that was made just now."""
        return self._disk.peek(self._file, len(_BEGUN), 8) == _BEGUN

    def _grow(self, last_line: int) -> None:
        missing = last_line + 1 - len(self._seen)
        if missing > 0:
            self._seen = np.concatenate([self._seen, np.zeros((missing, _WORDS), np.uint64)])
