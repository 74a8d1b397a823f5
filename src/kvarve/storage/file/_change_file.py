"""A small file by which processes see what others have changed: each looks at it before a call.

The file has a head counter and an epoch, then a line for each slab: its identity (0: no such slab) and a counter for
each stripe of its table. A process that has changed tables increments the stripes' counters, then the head, with the
file locked.

It may die or fail before that. So nothing is decided by what others have told: before a process takes a row, or says
that an object is there, it reads the row's entry in the table (`Index.seize`, `Index.confirm`). What is not told costs
other processes hits, until the stripe changes again or they find the entry another one than they knew.

The file means nothing once no process has the store open; the first one to open it writes it anew, in another epoch.
Processes that only read see that: they do not count as having the store open. It is read by system calls and not
mapped: an I/O error in a mapping is a signal that ends the process, here it is an exception.
"""

import errno
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.file._slabs import STRIPES, write_all
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.folder import LINE_BYTES, SLABS, tries

_WORDS = 1 + STRIPES
assert LINE_BYTES == 8 * _WORDS
_MOST_BYTES = LINE_BYTES * (SLABS + 1)
_MASK = (1 << 64) - 1
_BEGUN = b"changes3"  # behind the head, with the epoch behind it
_EPOCH = slice(16, 24)
_STALE = 2  # no slab's identity, as those are odd: the line is read again

Told = Mapping[int, tuple[int, Iterable[int]]]  # by the slab's number: its identity, and stripes


@dataclass(frozen=True)
class Changed:
    """A changed slab: in these stripes, or (None) the slab was replaced or removed."""

    number: int
    identity: int
    stripes: list[int] | None


class Changes:
    def __init__(self, disk: Disk, file: int, directory: Path) -> None:
        """`file`: -1 if there is none, and none may be made."""
        self._disk, self._file, self._directory = disk, file, directory
        self._head: bytes | None = None
        self._epoch: bytes | None = None
        self._seen = np.zeros((1, _WORDS), np.uint64)  # line 0 has the head

    def look(self) -> Iterator[Changed]:
        """What has changed since the last look; a change is marked as seen when the next one is requested."""
        head = self._disk.peek(self._file, 8, 0) if self._file >= 0 else b""
        if head == self._head:
            return
        raw = self._disk.peek(self._file, _MOST_BYTES, 0) if self._file >= 0 else b""
        found = np.frombuffer(raw[: len(raw) // LINE_BYTES * LINE_BYTES], np.uint64).reshape(-1, _WORDS)
        self._grow(len(found) - 1)
        if self._epoch not in (None, raw[_EPOCH]):
            self._seen[:, 0] = _STALE
        self._epoch = raw[_EPOCH]
        now = np.zeros_like(self._seen)
        now[: len(found)] = found
        differs = self._seen != now
        differs[0] = False
        for line in np.flatnonzero(differs.any(axis=1)).tolist():
            stripes = None if differs[line, 0] else np.flatnonzero(differs[line, 1:]).tolist()
            yield Changed(line - 1, int(now[line, 0]), stripes)
            self._seen[line] = now[line]
        self._head = head  # read before the rest: the next look sees later changes

    def look_again(self, numbers: Iterable[int]) -> None:
        """Have the next look return these slabs again."""
        for number in numbers:
            self._grow(number + 1)
            self._seen[number + 1, 0], self._head = _STALE, None

    def tells(self, number: int, identity: int) -> bool:
        """Whether the file names this slab."""
        raw = self._disk.peek(self._file, 8, (number + 1) * LINE_BYTES)
        return int.from_bytes(raw, "little") == identity

    def pass_over(self, numbers: Iterable[int]) -> None:
        """Have the next look return what changes from now on: these slabs are known from their tables."""
        for _ in self.look():
            pass
        for number in numbers:
            self._grow(number + 1)

    def known(self) -> set[int]:
        """The numbers of all slabs at the last look."""
        return set(np.flatnonzero(self._seen[1:, 0]).tolist())

    def tell(self, changed: Told, lock: AbstractContextManager[object], *, new: bool = False) -> None:
        """Tell other processes what this one has changed: by the slab's number, its identity and stripes. OSError: they
        may not know. `new`: these slabs are added or (identity 0) removed. `lock`: the store's, taken for moments."""
        for _ in tries(self._directory):
            if self._disk.lock(self._file, wait=False):
                break
        try:
            with lock:
                self._tell(changed, new)
        finally:
            self._disk.unlock(self._file)

    def _tell(self, changed: Told, new: bool) -> None:
        head, seen = self._disk.peek(self._file, 8, 0), {}
        for number, (identity, stripes) in changed.items():
            self._grow(number + 1)
            at, line = (number + 1) * LINE_BYTES, np.zeros(_WORDS, np.uint64)
            raw = self._disk.peek(self._file, LINE_BYTES, at)
            line[: len(raw) // 8] = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint64)
            if not new and line[0] != identity:
                continue  # another process has removed it
            known = line == self._seen[number + 1]
            line[0] = identity
            line[np.fromiter(stripes, np.int64) + 1] += np.uint64(1)
            write_all(self._disk, self._file, [line.tobytes()], at)
            known[0] = True
            seen[number + 1] = np.where(known, line, self._seen[number + 1])  # else it is still to be read
        after = (int.from_bytes(head, "little") + 1 & _MASK).to_bytes(8, "little")
        write_all(self._disk, self._file, [after], 0)
        for number, words in seen.items():
            self._seen[number] = words
        if head == self._head:
            self._head = after

    # --- opening

    def require_locks(self) -> None:
        """StorageError: this file system cannot lock parts of files. A file that is only readable is no sign of it."""
        try:
            if self._disk.lock_range(self._file, _MOST_BYTES, 1):
                self._disk.unlock_range(self._file, _MOST_BYTES, 1)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise StorageError(
                    f"{self._directory}: its file system cannot lock parts of files ({error.strerror}): give another "
                    f"folder"
                ) from error

    def begin(self, slabs: Mapping[int, int]) -> None:
        """Write the file anew for these slabs (identity by number), as no other process has the store open."""
        lines = max([1, *(number + 2 for number in slabs)])
        self._disk.resize(self._file, lines * LINE_BYTES)
        fresh = np.zeros((lines, _WORDS), np.uint64)
        for number, identity in slabs.items():
            fresh[number + 1, 0] = identity
        head = secrets.token_bytes(8) + _BEGUN + secrets.token_bytes(8)
        write_all(self._disk, self._file, [head + fresh.tobytes()[len(head) :]], 0)

    def is_begun(self) -> bool:
        """Whether other processes use this file, rather than one that was made just now."""
        return self._disk.peek(self._file, len(_BEGUN), 8) == _BEGUN

    def _grow(self, last_line: int) -> None:
        missing = last_line + 1 - len(self._seen)
        if missing > 0:
            self._seen = np.concatenate([self._seen, np.zeros((missing, _WORDS), np.uint64)])
