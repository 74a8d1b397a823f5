"""Slots by the calls of any file system: several threads, past the page cache where it can be, synced.

A call on a file system whose server stands still returns when that goes on, and not before: so a read never writes to a
buffer that its caller has back. The lanes above abandon such a call, and keep its memory.
"""

import errno
import mmap
import threading
from collections.abc import Callable, Sequence

from kvarve.storage.file.disk import Disk, is_aligned
from kvarve.storage.hf3fs._hf3fs_folder import File
from kvarve.storage.hf3fs._io_engine import Engine, Move, Short, copy, cut
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES

_BOUNCE_BYTES = 1 << 20
_here = threading.local()  # this thread's memory: for a header, and for what direct I/O cannot move where it lies


class PosixEngine(Engine):
    direct = True

    def __init__(self, disk: Disk, threads: int) -> None:
        super().__init__(threads)
        self._disk = disk

    def _sync(self, fd: int) -> None:
        self._disk.sync(fd)

    def _move(self, move: Move, *, for_read: bool, end: float) -> None:
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


def _whole(
    call: Callable[[int, Sequence[memoryview], int], int], file: File, views: Sequence[memoryview], at: int, needed: int
) -> None:
    """Move all bytes, or those that are needed. Short: the file has fewer. Other OSErrors."""
    left = list(views)
    while needed > 0:
        count = call(file.fd, left, at)
        if not count:
            raise Short(errno.ENODATA, f"{file.path}: {needed} bytes are missing at {at}")
        at, needed = at + count, needed - count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
