"""An emulator of `hf3fs_fuse.io`, the Python binding of USRBIO (the rings of 3FS), over a folder of any file system.

Its threads are the FUSE daemon: they map shared memory by its name, and move bytes between it and files. What is
awkward about the real one is here as well; from its sources (`src/lib/api/UsrbIo.cc`, `src/fuse/IoRing.cc`, `PioV.cc`,
`src/lib/py/usrbio_binding.cc`):

- results come in any order, and `wait` returns what there is when its time is over; the rest comes in later waits
- what was prepared may be done before it is submitted, and is done some time, whether its caller still waits or not
- a ring of n entries takes n - 1 operations, results that were not taken included; then `prepare` raises EAGAIN
- one operation of many may fail, or be short; the bytes of a failed one may have been moved in part
- a hole in the middle of a read is zeros, or ENODATA where holes are forbidden; one at its end is a short count
- bytes of a chunk that were never written are zeros, and success
- a descriptor is registered once, and keeps its file even if it is closed without being unregistered
- a ring is not for two threads at once: that is noticed here (`misuse`), and corrupts the real one

`behave` says of each operation what becomes of it; `seed` decides all orders.
"""

import errno
import mmap
import os
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from kvarve.system.background import WorkerPool
from kvarve.system.regions import SHARED

FORBID_HOLES = 2
_VECTORS = 512  # of one system call


class Fate(Enum):
    """What becomes of an operation."""

    DONE = "done"
    EIO = "an error, after half of it was moved"
    SHORT = "a result that is too short, after half of it was moved"
    HOLE_MIDDLE = "a hole in its middle"
    HOLE_END = "a hole at its end"
    ZEROS = "success, but zeros are there"
    LATE = "done when `release` is called"
    LOST = "never done"


@dataclass(eq=False)
class Operation:
    """What was prepared."""

    ring: "Ring"
    iovec: "IoVec"
    read: bool
    file: "_File"
    offset: int
    userdata: Any
    fate: Fate = Fate.DONE

    @property
    def size(self) -> int:
        return self.iovec.size


class _File:
    """A registered descriptor: a copy of its own."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self.path = Path(f"/proc/self/fd/{fd}").readlink()
        self.mode = os.O_ACCMODE & _flags(fd)
        self.fd = self.direct = os.dup(fd)
        if direct:
            with suppress(OSError):
                self.direct = os.open(f"/proc/self/fd/{fd}", self.mode | os.O_DIRECT | os.O_CLOEXEC)
        weakref.finalize(self, _close, {self.fd, self.direct}).atexit = False


class IoVec:
    """Shared memory, mapped by its name as the daemon maps it; or a slice of it."""

    def __init__(self, memory: memoryview, start: int, size: int, base: "IoVec | None" = None) -> None:
        self.memory, self.base_off, self.size = memory, start, size
        self._base = base
        self.result = 0
        self.userdata: Any = None

    def __getitem__(self, part: slice) -> "IoVec":
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return IoVec(self.memory, self.base_off + start, max(0, stop - start), self._base or self)

    @property
    def bytes(self) -> memoryview:
        return self.memory[self.base_off : self.base_off + self.size]


class Ring:
    """Made by `Emulator.make_ioring`."""

    def __init__(self, daemon: "Emulator", entries: int, for_read: bool, flags: int) -> None:
        self.entries, self.for_read, self.flags = entries, for_read, flags
        self._daemon = daemon
        self._done: list[Operation] = []
        self._changed = threading.Condition()
        self._room = entries - 1
        self._prepared: list[Operation] = []
        self._wanted = 0
        self._preparing, self._waiting = threading.Lock(), threading.Lock()

    def prepare(self, iov: IoVec, read: bool, fd: int, off: int, userdata: Any = None) -> "Ring":
        self._begin(self._preparing)
        try:
            if read != self.for_read or iov.size <= 0:
                raise _error(errno.EINVAL)
            file = self._daemon.files.get(fd)
            if file is None:
                raise _error(errno.EBADF)
            if file.mode == (os.O_WRONLY if read else os.O_RDONLY):
                raise _error(errno.EACCES)
            with self._changed:
                if not self._room:
                    raise _error(errno.EAGAIN)
                self._room -= 1
            operation = Operation(self, iov, read, file, off, userdata)
            operation.fate = self._daemon.behave(operation)
            self._prepared.append(operation)
            if self._daemon.looks():
                self._hand_over()
        finally:
            self._preparing.release()
        return self

    def submit(self) -> "Ring":
        self._begin(self._preparing)
        self._hand_over()
        self._preparing.release()
        return self

    def _hand_over(self) -> None:
        prepared, self._prepared = self._prepared, []
        self._daemon.take(prepared)

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | float | None = None
    ) -> list[IoVec]:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._begin(self._waiting)
        try:
            with self._changed:
                self._wanted = min_results
                self._changed.wait_for(lambda: len(self._done) >= min_results, seconds)
                most = max(max_results, min_results, 1)
                taken, self._done = self._done[:most], self._done[most:]
                self._room += len(taken)
        finally:
            self._waiting.release()
        for operation in taken:
            operation.iovec.userdata = operation.userdata
        return [operation.iovec for operation in taken]

    def ended(self, run: "Sequence[Operation]", results: Sequence[int]) -> None:
        for operation, result in zip(run, results, strict=True):
            operation.iovec.result = result
        with self._changed:
            for operation in run:
                self._done.insert(self._daemon.place(len(self._done)), operation)
            if len(self._done) >= self._wanted:
                self._changed.notify_all()

    def _begin(self, alone: threading.Lock) -> None:
        if not alone.acquire(blocking=False):
            self._daemon.misuse.append("two threads use one ring at once")
            raise AssertionError(self._daemon.misuse[-1])


@dataclass(eq=False)
class Emulator:
    """`mount`: a folder below which all files count as those of 3FS. `direct`: its threads read and write past the page
    cache. `most_entries`: of any ring. `misuse`: what its user did that the real one forbids."""

    mount: Path
    threads: int = 4
    seed: int = 0
    direct: bool = False
    most_entries: int = 1 << 16
    behave: Callable[[Operation], Fate] = lambda _: Fate.DONE
    misuse: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mount = self.mount.resolve()
        self.alive = True
        self.syncs_fail = False
        self.lent = 0  # bytes of shared memory that the daemon has mapped now
        self.files: dict[int, _File] = {}
        self._lock = threading.Lock()  # guards the files, what is held, and the dice
        self._held: list[Operation] = []
        self._dice = random.Random(self.seed)
        self._pool = WorkerPool(self.threads, "3fs daemon")

    # --- the binding

    def extract_mount_point(self, path: str) -> str | None:
        return str(self.mount) if Path(path).resolve().is_relative_to(self.mount) else None

    def register_fd(self, fd: int) -> None:
        file = _File(fd, direct=self.direct)
        with self._lock:
            if not file.path.is_relative_to(self.mount):
                raise _error(errno.EBADF)
            if fd in self.files:
                self.misuse.append(
                    f"{file.path} is registered as {self.files[fd].path} was, which was not unregistered"
                )
                raise _error(errno.EINVAL)
            self.files[fd] = file

    def deregister_fd(self, fd: int) -> None:
        with self._lock:
            self.files.pop(fd, None)

    def force_fsync(self, fd: int) -> int:
        if self.syncs_fail:
            return -1
        os.fsync(fd)
        return 0

    def make_iovec(self, shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> IoVec:
        self._require_alive(hf3fs_mount_point)
        with (SHARED / shm.name).open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), shm.buf.nbytes))
        self.lent += memory.nbytes
        iovec = IoVec(memory, 0, memory.nbytes)
        weakref.finalize(iovec, self._back, memory.nbytes).atexit = False
        return iovec

    def make_ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,
        io_depth: int = 0,
        priority: int | None = None,
        timeout: int | None = None,
        numa: int = -1,
        flags: int = 0,
    ) -> Ring:
        self._require_alive(hf3fs_mount_point)
        return Ring(self, min(entries, self.most_entries), for_read, flags)

    # --- for the test

    def release(self) -> None:
        """Do what was held back."""
        with self._lock:
            held, self._held = self._held, []
        for operation in held:
            operation.fate = Fate.DONE
        self.take(held)

    @property
    def held(self) -> int:
        return len(self._held)

    def kill(self) -> None:
        """The daemon ends: nothing of what was asked of it is done any more."""
        self.alive = False

    # --- inside

    def _require_alive(self, mount: str) -> None:
        if not self.alive or Path(mount) != self.mount:
            raise _error(errno.ENOTCONN)

    def _back(self, size: int) -> None:
        self.lent -= size

    def looks(self) -> bool:
        """Whether the daemon finds by itself what was prepared."""
        return self._dice.random() < 0.05

    def place(self, count: int) -> int:
        """Where a result comes among so many others that nobody has taken yet: anywhere."""
        with self._lock:
            return self._dice.randrange(count + 1)

    def take(self, operations: Sequence[Operation]) -> None:
        """Do these, several at once; those that follow each other in a file together."""
        if not self.alive:
            return
        if held := [operation for operation in operations if operation.fate is Fate.LATE]:
            with self._lock:
                self._held += held
        run: list[Operation] = []
        for operation in operations:
            if operation.fate in (Fate.LATE, Fate.LOST):
                continue
            last = run[-1] if run else None
            if last and not (
                last.file is operation.file
                and last.ring is operation.ring
                and last.offset + last.size == operation.offset
                and last.fate is operation.fate is Fate.DONE
                and len(run) < _VECTORS
            ):
                self._start(run)
                run = []
            run.append(operation)
        if run:
            self._start(run)

    def _start(self, run: list[Operation]) -> None:
        self._pool.run(partial(self._do, run))

    def _do(self, run: Sequence[Operation]) -> None:
        if not self.alive:
            return
        run[0].ring.ended(run, self._results(run))

    def _results(self, run: Sequence[Operation]) -> list[int]:
        first = run[0]
        if first.fate is not Fate.DONE:
            return [self._misdone(first)]
        try:
            count = _move(first.file, first.read, [it.iovec.bytes for it in run], first.offset)
        except OSError as error:
            return [-(error.errno or errno.EIO)] * len(run)
        results = []
        for operation in run:
            here = min(count, operation.size)
            count -= here
            if operation.read and operation.ring.flags & FORBID_HOLES and here:
                here = _without_holes(operation, here)
            results.append(here)
        return results

    def _misdone(self, operation: Operation) -> int:
        memory, fate, half = operation.iovec.bytes, operation.fate, operation.size // 2
        hole = slice(operation.size // 3, 2 * operation.size // 3)
        if fate is Fate.ZEROS and operation.read:
            memory[:] = bytes(len(memory))
            return operation.size
        if fate is Fate.ZEROS:
            with suppress(OSError):
                os.pwrite(operation.file.fd, bytes(operation.size), operation.offset)
            return operation.size
        with suppress(OSError):
            _move(operation.file, operation.read, [memory[:half]], operation.offset)
        if fate is Fate.HOLE_MIDDLE and operation.read and not operation.ring.flags & FORBID_HOLES:
            _move(operation.file, True, [memory], operation.offset)
            memory[hole] = bytes(hole.stop - hole.start)
            return operation.size
        if fate is Fate.HOLE_MIDDLE or (fate is Fate.HOLE_END and not operation.read):
            return -errno.ENODATA
        return -errno.EIO if fate is Fate.EIO else half


def _move(file: _File, read: bool, memory: Sequence[memoryview], at: int) -> int:
    """All that there is."""
    aligned = all(not view.nbytes % mmap.PAGESIZE for view in memory) and not at % mmap.PAGESIZE
    fd, done, left = file.direct if aligned else file.fd, 0, [*memory]
    while left:
        count = os.preadv(fd, left, at + done) if read else os.pwritev(fd, left, at + done)
        if not count:
            break
        done += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
    return done


def _without_holes(operation: Operation, count: int) -> int:
    """The result of a read that forbids holes."""
    fd, start, end = operation.file.fd, operation.offset, operation.offset + count
    hole = os.lseek(fd, start, os.SEEK_HOLE)
    if hole >= end:
        return count
    with suppress(OSError):  # there is no data behind it
        if os.lseek(fd, hole, os.SEEK_DATA) < end:
            return -errno.ENODATA
    return hole - start


def _flags(fd: int) -> int:
    (line,) = [it for it in Path(f"/proc/self/fdinfo/{fd}").read_text("ascii").splitlines() if it.startswith("flags")]
    return int(line.split()[1], 8)


def _close(fds: set[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
