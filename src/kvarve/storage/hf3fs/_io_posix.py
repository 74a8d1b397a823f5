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
from kvarve.storage.hf3fs._io_engine import Engine, Move, Short, cut, each, sync
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES
from kvarve.system.background import WorkerPool

_BOUNCE_BYTES = 1 << 20
_here = threading.local()


class PosixEngine(Engine):
    direct = True

    def __init__(self, disk: Disk, threads: int) -> None:
        self._disk, self._threads = disk, threads
        self._pool = WorkerPool(threads, "kvarve 3fs")

    def close(self) -> None:
        self._pool.shutdown()

    def read(self, moves: Sequence[Move]) -> None:
        for move, trouble in each(self._pool, self._threads, moves, self._read).items():
            move.trouble = trouble

    def write(self, moves: Sequence[Move]) -> None:
        for move in moves:
            move.failed_syncs = move.file.failed_syncs
        for move, trouble in each(self._pool, self._threads, moves, self._write).items():
            move.trouble = trouble
        sync(self._pool, self._threads, moves, self._disk.sync)

    # --- one slot, on a thread of the pool

    def _write(self, move: Move) -> None:
        header, bounce = _memory()
        move.seal(header)
        views = [header, *move.pieces]
        if not move.file.direct or all(map(is_aligned, views)):
            self._whole(self._disk.write, move.file, views, move.offset)
            return
        at = move.offset
        for group in cut(views, _BOUNCE_BYTES):
            end = 0
            for view in group:
                bounce[end : end + view.nbytes] = view
                end += view.nbytes
            blocks = -(-end // BLOCK_BYTES) * BLOCK_BYTES
            bounce[end:blocks] = bytes(blocks - end)
            self._whole(self._disk.write, move.file, [bounce[:blocks]], at)
            at += blocks

    def _read(self, move: Move) -> None:
        header, bounce = _memory()
        views = [header, *move.pieces]
        if not move.file.direct:
            self._disk.uncache(move.file.fd, move.size_bytes, move.offset)
        if not move.file.direct or all(map(is_aligned, views)):
            self._whole(self._disk.read, move.file, views, move.offset)
        else:
            at = move.offset
            for group in cut(views, _BOUNCE_BYTES):
                size = sum(view.nbytes for view in group)
                blocks = -(-size // BLOCK_BYTES) * BLOCK_BYTES
                self._whole(self._disk.read, move.file, [bounce[:blocks]], at, size)
                end = 0
                for view in group:
                    view[:] = bounce[end : end + view.nbytes]
                    end += view.nbytes
                at += blocks
        move.check(header)

    def _whole(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        file: File,
        views: Sequence[memoryview],
        at: int,
        needed: int | None = None,
    ) -> None:
        """Move all bytes, or those that are needed. Short: the file has fewer. Other OSErrors."""
        left = list(views)
        needed = sum(view.nbytes for view in views) if needed is None else needed
        while needed > 0:
            count = call(file.fd, left, at)
            if not count:
                raise Short(errno.ENODATA, f"{file.path}: {needed} bytes are missing at {at}")
            at, needed = at + count, needed - count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if left:
                left[0] = left[0][count:]


def _memory() -> tuple[memoryview, memoryview]:
    """This thread's own block for a header, and its memory for bytes that direct I/O cannot move where they lie."""
    memory: memoryview | None = getattr(_here, "memory", None)
    if memory is None:
        memory = _here.memory = memoryview(mmap.mmap(-1, BLOCK_BYTES + _BOUNCE_BYTES))
    return memory[:BLOCK_BYTES], memory[BLOCK_BYTES:]
