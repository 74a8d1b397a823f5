"""What moves bytes between memory and slots, some at once on threads of its own: by the calls of any file system, past
the page cache where it can be. `_io_usrbio` has another engine.
"""

import errno
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from kvarve.storage.file.disk import Disk, is_aligned, move_all
from kvarve.storage.hf3fs._hf3fs_folder import Descriptors, File, Folder
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES, HEADER_BYTES, Title, digest, header
from kvarve.system.background import WorkerPool
from kvarve.system.regions import HostRegion, address


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
        """Most bytes will be there."""

    def enter(self, folder: Folder) -> None:
        """All that follows is in this folder, whose file system may have been mounted anew."""

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
        file, two = move.file, memoryview(bytearray(2 * BLOCK_BYTES))  # of which one block is aligned
        header = two[-address(two) % BLOCK_BYTES :][:BLOCK_BYTES]
        views, call = [header, *move.pieces], self._disk.read if for_read else self._disk.write
        if not for_read:
            move.seal(header)
        elif not file.direct:
            self._disk.uncache(file.fd, move.size_bytes, move.offset)
        if not file.direct or all(map(is_aligned, views)):
            moved = move_all(call, file.fd, views, move.offset)
        else:
            memory = memoryview(mmap.mmap(-1, -(-move.size_bytes // BLOCK_BYTES) * BLOCK_BYTES))
            at = [0, *accumulate(view.nbytes for view in views)]
            if not for_read:
                memory[: at[-1]] = b"".join(views)
            moved = move_all(call, file.fd, [memory], move.offset)
            for view, start in zip(views if for_read else (), at, strict=False):
                view[:] = memory[start : start + view.nbytes]
        if moved < move.size_bytes:
            raise OSError(errno.ENODATA, f"{file.path}: {moved} of {move.size_bytes} bytes at {move.offset}")
        if for_read:
            move.check(header)
