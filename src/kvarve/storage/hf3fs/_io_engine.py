"""What moves bytes between memory and slots, some at once on threads of its own: by the calls of any file system, past
the page cache where it can be. `_io_usrbio` has another engine.
"""

import errno
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvarve.storage.file.disk import Disk, is_aligned
from kvarve.storage.hf3fs._hf3fs_folder import Descriptors, File, Folder
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES, HEADER_BYTES, Title, digest, header
from kvarve.system.background import WorkerPool
from kvarve.system.regions import HostRegion

_BOUNCE_BYTES = 1 << 20
_here = threading.local()  # this thread's memory: for a header, and for what direct I/O cannot move where it lies


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


class Engine(Descriptors, ABC):
    """Calls come from several threads. What becomes of each move stands in it; no call raises for one of them.

    Where the file system hangs, a call does not end before that goes on: what has ended writes nothing more, neither to
    buffers nor to slots. The lanes and the breaker above abandon such a call, and keep its memory.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._pool = threads, WorkerPool(threads, "kvarve 3fs")

    def register(self, region: HostRegion) -> None:
        return

    def enter(self, folder: Folder) -> None:
        """All that follows is in this folder, whose file system may have been mounted anew."""
        return

    def read(self, moves: Sequence[Move]) -> None:
        self._move_all(moves, for_read=True)

    def write(self, moves: Sequence[Move]) -> None:
        """Those without trouble are on the medium."""
        self._move_all(moves, for_read=False)
        written = {move.file for move in moves if move.trouble is None}
        troubles = self._pool.each(written, lambda file: file.sync(self._sync))
        for move in moves:
            move.trouble = move.trouble or troubles[move.file]

    def close(self) -> None:
        """After the last call, but for those that hang."""
        self._pool.shutdown()

    @abstractmethod
    def _move(self, move: Move, *, for_read: bool) -> None:
        """On a thread of the pool. OSError."""

    @abstractmethod
    def _sync(self, fd: int) -> None:
        """Return when what was written is on the medium. OSError."""

    def _move_all(self, moves: Sequence[Move], *, for_read: bool) -> None:
        for move, trouble in self._pool.each(moves, partial(self._move, for_read=for_read)).items():
            move.trouble = trouble


class PosixEngine(Engine):
    def __init__(self, disk: Disk, threads: int) -> None:
        super().__init__(threads)
        self._disk = disk

    def _sync(self, fd: int) -> None:
        self._disk.sync(fd)

    def _move(self, move: Move, *, for_read: bool) -> None:
        if not hasattr(_here, "memory"):
            _here.memory = memoryview(mmap.mmap(-1, BLOCK_BYTES + _BOUNCE_BYTES))
        header, bounce = _here.memory[:BLOCK_BYTES], _here.memory[BLOCK_BYTES:]
        file, views, at = move.file, [header, *move.pieces], move.offset
        call = self._disk.read if for_read else self._disk.write
        if not for_read:
            move.seal(header)
        elif not file.direct:
            self._disk.uncache(file.fd, move.size_bytes, at)
        if not file.direct or all(map(is_aligned, views)):
            _whole(call, file, views, at, move.size_bytes)
        else:
            for group in cut(views, _BOUNCE_BYTES):
                size = sum(view.nbytes for view in group)
                blocks = -(-size // BLOCK_BYTES) * BLOCK_BYTES
                if not for_read:
                    copy(group, bounce, into_views=False)
                    bounce[size:blocks] = bytes(blocks - size)
                _whole(call, file, [bounce[:blocks]], at, size if for_read else blocks)
                if for_read:
                    copy(group, bounce, into_views=True)
                at += blocks
        if for_read:
            move.check(header)


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


def _whole(
    call: Callable[[int, Sequence[memoryview], int], int], file: File, views: Sequence[memoryview], at: int, needed: int
) -> None:
    """Move all bytes, or those that are needed. OSError: ENODATA, the file has fewer; others."""
    left = list(views)
    while needed > 0:
        count = call(file.fd, left, at)
        if not count:
            raise OSError(errno.ENODATA, f"{file.path}: {needed} bytes are missing at {at}")
        at, needed = at + count, needed - count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
