"""What moves bytes between memory and slots, some at once on threads of its own: what both engines have in common."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvarve.storage.base import left_s
from kvarve.storage.hf3fs._hf3fs_folder import File, Folder
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES, HEADER_BYTES, Title, digest, header
from kvarve.system.background import WorkerPool
from kvarve.system.regions import HostRegion

T = TypeVar("T")
_PATIENCE_S = 60.0  # of a caller that has not said how long it waits


@dataclass(eq=False)
class Move:
    """One slot to write or to read: its header, in a block of its own, and the object's bytes behind that.

    `title`: the object, but for the digest of its bytes; None: whatever a read finds, of which only the header is kept;
    a write leaves no object there.
    `intact`: what was read is that object. `trouble`: why it was not moved whole.
    """

    file: File
    offset: int
    pieces: Sequence[memoryview]
    title: Title | None
    header: bytes = b""
    intact: bool = False
    trouble: OSError | None = None
    failed_syncs: int = 0  # of the file, before the write

    @property
    def size_bytes(self) -> int:
        return BLOCK_BYTES + sum(piece.nbytes for piece in self.pieces)

    @property
    def rest_bytes(self) -> int:
        """Those of the object for which there is no piece."""
        return 0 if self.title is None else self.title.slot.size_bytes + BLOCK_BYTES - self.size_bytes

    def seal(self, block: memoryview) -> None:
        """Write the header of what is to be written."""
        block[:] = self._sealed().ljust(BLOCK_BYTES, b"\0")

    def check(self, block: memoryview) -> None:
        """The header and all bytes have come."""
        self.header = bytes(block[:HEADER_BYTES])
        self.intact = self.title is not None and self.header == self._sealed()

    def _sealed(self) -> bytes:
        return b"" if self.title is None else header(self.title._replace(digest=digest(self.pieces)))


class Short(OSError):
    """Fewer bytes came than a slot has: it lies beyond the end of its file, or in a hole."""


class Engine(ABC):
    """Calls come from several threads. What becomes of each move stands in it; no call raises for one of them.

    A read that has ended writes nothing more to its buffers, however it ended: where the file system hangs, it may not
    end. A write may end late. What an engine has no use for it need not hear of.
    """

    direct: bool  # wants files past the page cache

    def __init__(self, threads: int) -> None:
        self._threads, self._pool = threads, WorkerPool(threads, "kvarve 3fs")

    def opened(self, fd: int) -> None:
        """A file's descriptor, before the first move."""
        return

    def closing(self, fd: int) -> None:
        return

    def register(self, region: HostRegion) -> None:
        return

    def enter(self, folder: Folder) -> None:
        """All that follows is in this folder, whose file system may have been mounted anew."""
        return

    def read(self, moves: Sequence[Move]) -> None:
        self._move_all(moves, for_read=True)

    def write(self, moves: Sequence[Move]) -> None:
        """Those without trouble are on the medium."""
        for move in moves:
            move.failed_syncs = move.file.failed_syncs
        self._move_all(moves, for_read=False)
        written = {move.file: move.failed_syncs for move in reversed(moves) if move.trouble is None}
        troubles = self._each(written, lambda file: file.sync(self._sync, written[file]))
        for move in moves:
            move.trouble = move.trouble or troubles[move.file]

    def close(self) -> None:
        """After the last call, but for those that hang."""
        self._pool.shutdown()

    @abstractmethod
    def _move(self, move: Move, *, for_read: bool, end: float) -> None:
        """On a thread of the pool. OSError; a TimeoutError if it takes longer than until `end`."""

    @abstractmethod
    def _sync(self, fd: int) -> None:
        """Return when what was written is on the medium. OSError."""

    def _move_all(self, moves: Sequence[Move], *, for_read: bool) -> None:
        end = time.monotonic() + min(left_s(), _PATIENCE_S)
        for move, trouble in self._each(moves, partial(self._move, for_read=for_read, end=end)).items():
            move.trouble = trouble

    def _each(self, work: Iterable[T], do: Callable[[T], None]) -> dict[T, OSError | None]:
        """Do all work, some at once; each with its error."""
        troubles: dict[T, OSError | None] = {}
        left = deque(work)

        def share() -> None:  # a future for each thread, not for each piece: those cost as much as a checksum
            while left:
                try:
                    one = left.popleft()
                except IndexError:  # another thread has taken the last one
                    return
                try:
                    do(one)
                    troubles[one] = None
                except OSError as error:
                    troubles[one] = error.with_traceback(None)  # which would keep files open

        for future in [self._pool.run(share) for _ in range(min(self._threads, len(left)))]:
            future.result()
        return troubles


def cut(views: Iterable[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """The bytes of all views in order, in groups of `most_bytes`; the last group has the rest."""
    group: list[memoryview] = []
    space = most_bytes
    for view in views:
        at = 0
        while at < view.nbytes:
            piece = view[at : at + space]
            group.append(piece)
            at += piece.nbytes
            space -= piece.nbytes
            if not space:
                yield group
                group, space = [], most_bytes
    if group:
        yield group


def copy(views: Iterable[memoryview], memory: memoryview, *, into_views: bool) -> None:
    at = 0
    for view in views:
        here = memory[at : at + view.nbytes]
        if into_views:
            view[:] = here
        else:
            here[:] = view
        at += view.nbytes
