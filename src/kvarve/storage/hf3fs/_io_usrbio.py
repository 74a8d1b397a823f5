"""Slots by USRBIO, the rings of 3FS: its FUSE daemon moves bytes between files and shared memory, past the kernel.

`hf3fs_fuse.io`, of the package `hf3fs_py_usrbio`, is known here alone. What it does, and what is done about it:

| it | here |
|---|---|
| results come in the order of completion; a wait that times out has only some | they are matched by `userdata` |
| a result may be short, or an error of one operation | it must equal the length |
| a hole reads as zeros unless forbidden, unwritten bytes of a chunk always do | forbidden; the header decides |
| a full ring refuses an operation (EAGAIN) | it is prepared again when all before it have ended |
| a ring may not be used by two threads | each thread has a ring of its own each way, for one slot at a time |
| what was prepared may be moved at any time, until the daemon ends | a call ends when all its results are in, or then |
| a descriptor has to be registered, and unregistered before it is closed | by `opened` and `closing` |
| memory must be shared by name | arenas of `Backend.allocate` are; other bytes go through the ring's own memory |
"""

import errno
import importlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Protocol

from kvarve.errors import ConfigError
from kvarve.storage.hf3fs._hf3fs_folder import File, Folder
from kvarve.storage.hf3fs._io_engine import Engine, Move
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES
from kvarve.system.background import WorkerPool
from kvarve.system.regions import HostRegion, address, shared_region

log = logging.getLogger(__name__)

FORBID_HOLES = 2  # HF3FS_IOR_FORBID_READ_HOLES
_ENTRIES = 128  # operations of a ring at once
_OWN_BYTES = 4 << 20  # a ring's own memory, for headers and for bytes that are not in shared memory
_LOOK_S = 1.0  # between two looks at whether the daemon still lives


class Library(Protocol):
    """`hf3fs_fuse.io`, as far as it is used."""

    def extract_mount_point(self, path: str) -> str | None: ...
    def register_fd(self, fd: int) -> object: ...
    def deregister_fd(self, fd: int) -> object: ...
    def force_fsync(self, fd: int) -> int: ...
    def make_iovec(self, shm: Any, mount: str, /, *, numa: int = -1) -> Any: ...
    def make_ioring(self, mount: str, entries: int, /, *, for_read: bool = True, flags: int = 0) -> Any: ...


def load() -> Library:
    """ConfigError: it is not installed."""
    try:
        library: Library = importlib.import_module("hf3fs_fuse.io")
    except ImportError as error:
        raise ConfigError(
            f"engine=usrbio needs the Python binding of 3FS, hf3fs_py_usrbio, which cannot be loaded ({error}): build "
            f"it in a checkout of 3FS (pip install .), or write engine=posix"
        ) from None
    return library


@dataclass(eq=False)
class _Part:
    """One operation. `shared`: the view as the daemon knows it; else it goes through the ring's `own` memory."""

    file: File  # which stays open until it has ended
    offset: int
    view: memoryview
    shared: Any  # a slice of an iovec
    own: memoryview | None = None


class _Ring:
    """One ring and its memory, of one thread."""

    def __init__(self, library: Library, mount: str, *, for_read: bool) -> None:
        self._mount, self._for_read = mount, for_read
        self._region = shared_region(_OWN_BYTES)
        self._iovec = _iovec(library, mount, self._region)
        flags = FORBID_HOLES if for_read else 0
        self._ring = library.make_ioring(mount, _ENTRIES, for_read=for_read, flags=flags)
        self._numbers = itertools.count()
        self._under_way: dict[int, _Part] = {}  # by userdata
        self._used_bytes = 0  # of its own memory
        self._trouble: OSError | None = None

    def move(self, parts: Iterable[_Part], is_gone: Callable[[], bool]) -> None:
        """OSError: some part was not moved whole. ConnectionAbortedError: the daemon has ended, and so has the ring."""
        for part in parts:
            while not self._prepared(part):
                self._finish(is_gone)
        self._finish(is_gone)
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _prepared(self, part: _Part) -> bool:
        """Whether the operation is now the daemon's, or refused; False: when all before it have ended it may be."""
        memory, place = part.shared, slice(self._used_bytes, self._used_bytes + part.view.nbytes)
        if memory is None:
            if place.stop > _OWN_BYTES:
                return False
            memory, part.own = self._iovec[place], self._region.memory[place]
            self._used_bytes = place.stop
            if not self._for_read:
                part.own[:] = part.view
        number = next(self._numbers)
        self._under_way[number] = part  # which keeps the number alive, as the library only borrows it
        try:
            self._ring.prepare(memory, self._for_read, part.file.fd, part.offset, number)
        except OSError as error:
            del self._under_way[number]
            if error.errno == errno.EAGAIN and self._under_way:
                return False
            self._trouble = error
        return True

    def _finish(self, is_gone: Callable[[], bool]) -> None:
        """Wait until all that was prepared has ended."""
        with suppress(OSError):  # the daemon finds by itself what was prepared
            self._ring.submit()
        while self._under_way:
            if not self._wait() and is_gone():
                raise ConnectionAbortedError(errno.ECONNABORTED, f"{self._mount}: the FUSE daemon of 3FS has ended")
        self._used_bytes = 0

    def _wait(self) -> bool:
        """Take what has ended, and wait a while for all; whether anything has."""
        try:
            least, most_s = len(self._under_way), timedelta(seconds=_LOOK_S)
            results = self._ring.wait(max_results=_ENTRIES, min_results=least, timeout=most_s)
        except OSError:  # nothing is known of the operations
            threading.Event().wait(_LOOK_S)
            return False
        for result in results:
            part = self._under_way.pop(result.userdata, None)
            if part is None:
                log.error("3FS: a ring answered for what was not asked of it")
            elif result.result < 0:
                words = f"{self._mount} at {part.offset}: {errno.errorcode.get(-result.result, -result.result)}"
                self._trouble = OSError(-result.result, words)
            elif result.result != part.view.nbytes:
                words = f"{self._mount}: {result.result} of {part.view.nbytes} bytes at {part.offset}"
                self._trouble = OSError(errno.ENODATA, words)
            elif self._for_read and part.own is not None:
                part.view[:] = part.own
        return bool(results)


class UsrbioEngine(Engine):
    direct = False

    def __init__(self, library: Library, mount: str, rings: int) -> None:
        super().__init__(rings)
        self._library, self._mount = library, mount
        self._here = threading.local()  # this thread's rings, by whether they read
        self._lock = threading.Lock()  # guards all below
        self._regions: list[HostRegion] = []
        self._iovecs: dict[int, Any] = {}  # by the region's address; None: it could not be lent

    def opened(self, fd: int) -> None:
        self._library.register_fd(fd)

    def closing(self, fd: int) -> None:
        self._library.deregister_fd(fd)

    def register(self, region: HostRegion) -> None:
        if region.name is not None:
            with self._lock:
                self._regions.append(region)

    def enter(self, folder: Folder) -> None:
        """Rings and iovecs live as long as their mount, and so do the threads that have the rings."""
        self._folder, before, self._pool = folder, self._pool, WorkerPool(self._threads, "kvarve 3fs")
        before.run(self._iovecs.clear)  # where it may hang, as links on the mount are removed
        before.shutdown()

    def close(self) -> None:
        self._pool.run(self._iovecs.clear)
        super().close()

    def _sync(self, fd: int) -> None:
        """What has a result is on the medium; this is so that others see the file's length."""
        if self._library.force_fsync(fd):
            raise OSError(errno.EIO, "force_fsync failed")

    def _move(self, move: Move, *, for_read: bool) -> None:
        rings: dict[bool, _Ring] = self._here.__dict__.setdefault("rings", {})
        header, folder = memoryview(bytearray(BLOCK_BYTES)), self._folder
        if not for_read:
            move.seal(header)
        try:
            if for_read not in rings:
                rings[for_read] = _Ring(self._library, self._mount, for_read=for_read)
            rings[for_read].move(self._parts(move, header), folder.is_gone)
        except ConnectionAbortedError:
            del rings[for_read]
            raise
        except ConfigError as error:  # there is no shared memory
            raise OSError(errno.ENOMEM, str(error)) from None
        if for_read:
            move.check(header)

    def _parts(self, move: Move, header: memoryview) -> Iterator[_Part]:
        at = move.offset
        for piece in (header, *move.pieces):
            shared = self._slice(piece)
            for start in range(0, piece.nbytes, piece.nbytes if shared is not None else _OWN_BYTES):
                view = piece if shared is not None else piece[start : start + _OWN_BYTES]
                yield _Part(move.file, at, view, shared)
                at += view.nbytes

    def _slice(self, piece: memoryview) -> Any:
        """The piece as the library wants it; None if it is not in shared memory."""
        start = address(piece) if piece.nbytes else 0
        with self._lock:
            for region in self._regions:
                first = region.address
                if first <= start and start + piece.nbytes <= first + region.size_bytes:
                    if first not in self._iovecs:
                        try:
                            self._iovecs[first] = _iovec(self._library, self._mount, region)
                        except OSError as error:
                            log.warning("3FS does not take shared memory, so its bytes are copied: %s", error)
                            self._iovecs[first] = None
                    iovec = self._iovecs[first]
                    return None if iovec is None else iovec[start - first : start - first + piece.nbytes]
        return None


def _iovec(library: Library, mount: str, region: HostRegion) -> Any:
    shared = SimpleNamespace(name=region.name, buf=region.memory)  # as the library wants it
    return library.make_iovec(shared, mount, numa=region.numa)
