"""A sequence lock in a small file: each process reads it before a call, to see what other processes have changed.

The file has a head counter, then a line for each slab: its identity (0: no such slab) and a counter for each stripe of
its table, odd during a write. A writer makes the stripes' counters odd, writes the table, makes them even, and
increments the head. It may die or fail at any step. So a process that is about to write looks `closely`: it also reads
stripes with odd counters again and makes them even, which the other processes then see. Until then no row of these
stripes is reused.

The file means nothing once no process has the store open; the first one to open it writes it anew. It is read by system
calls and not mapped: an I/O error in a mapping is a signal that ends the process, here it is an exception.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarve.storage.file.disk import Disk
from kvarve.storage.file.folder import LINE_BYTES, SLABS
from kvarve.storage.file.slabs import STRIPES, write_all

_WORDS = 1 + STRIPES
assert LINE_BYTES == 8 * _WORDS
_MOST_BYTES = LINE_BYTES * (SLABS + 1)
_MASK = (1 << 64) - 1
_ONE = np.uint64(1)
_BEGUN = b"changes2"  # behind the head
_STALE = 2  # no slab's identity, as those are odd: the line is read again

Line = npt.NDArray[np.uint64]
Changes = Mapping[int, tuple[int, Iterable[int]]]  # by the slab's number: its identity, and stripes


@dataclass(frozen=True)
class Changed:
    """A changed slab: in these stripes, or (None) the slab was replaced or removed."""

    number: int
    identity: int
    stripes: list[int] | None
    unfinished: list[int]  # stripes with an odd counter; of a close look only


class SequenceLock:
    def __init__(self, disk: Disk, file: int) -> None:
        self._disk, self._file = disk, file
        self._head: bytes | None = None
        self._seen = np.zeros((1, _WORDS), np.uint64)  # line 0 has the head

    def look(self, *, closely: bool = False) -> Iterator[Changed]:
        """What has changed since the last look; a change is marked as seen when the next one is requested. `closely`
        also finds unfinished writes, and those whose writer did not reach the head."""
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
            unfinished = np.flatnonzero(odd[line, 1:]).tolist() if closely else []
            yield Changed(line - 1, int(now[line, 0]), stripes, unfinished)
            self._seen[line] = now[line]
        self._head = head  # read before the rest: the next look sees later changes

    def mark_stale(self, numbers: Iterable[int]) -> None:
        """Have the next close look return these slabs again."""
        for number in numbers:
            self._seen[number + 1, 0] = _STALE

    def known(self) -> set[int]:
        """The numbers of all slabs at the last look."""
        return set(np.flatnonzero(self._seen[1:, 0]).tolist())

    # --- with the mutex held, after a close look; OSError: other processes may not see the change

    def begin_write(self, change: Changes) -> None:
        """Make the counters of these stripes odd; the head stays."""
        self._mark_seen(self._write(change, np.uint64(0)))

    def end_write(self, change: Changes) -> None:
        """Make the counters even, with the slab's new identity (0: removed), and increment the head."""
        self._head = None
        lines = self._write(change, _ONE)
        before = int.from_bytes(self._disk.peek(self._file, 8, 0), "little")
        head = (before + 1 & _MASK).to_bytes(8, "little")
        write_all(self._disk, self._file, [head], 0)
        self._head = head
        self._mark_seen(lines)

    def _write(self, change: Changes, done: np.uint64) -> dict[int, Line]:
        """Write these lines; returns them. They are stale until `_mark_seen`."""
        lines = {}
        for number, (identity, stripes) in change.items():
            self._grow(number + 1)
            lines[number + 1] = line = self._seen[number + 1].copy()
            self._seen[number + 1, 0] = _STALE
            at = np.fromiter(stripes, np.int64) + 1
            line[0], line[at] = identity, (line[at] | _ONE) + done
            self._seen[number + 1, 1:] = line[1:]  # counters never go back, even if the write fails
            write_all(self._disk, self._file, [line.tobytes()], (number + 1) * LINE_BYTES)
        return lines

    def _mark_seen(self, lines: Mapping[int, Line]) -> None:
        for number, line in lines.items():
            self._seen[number] = line

    # --- opening

    def begin(self, slabs: Mapping[int, int]) -> None:
        """Write the file anew for these slabs (identity by number), as no other process has the store open."""
        lines = max([1, *(number + 2 for number in slabs)])
        self._disk.cut(self._file, lines * LINE_BYTES)
        fresh = np.zeros((lines, _WORDS), np.uint64)
        for number, identity in slabs.items():
            fresh[number + 1, 0] = identity
        write_all(self._disk, self._file, [bytes(8) + _BEGUN + fresh.tobytes()[16:]], 0)

    def is_begun(self) -> bool:
        """Whether other processes use this file, rather than one that was made just now."""
        return self._disk.peek(self._file, len(_BEGUN), 8) == _BEGUN

    def _grow(self, last_line: int) -> None:
        missing = last_line + 1 - len(self._seen)
        if missing > 0:
            self._seen = np.concatenate([self._seen, np.zeros((missing, _WORDS), np.uint64)])
