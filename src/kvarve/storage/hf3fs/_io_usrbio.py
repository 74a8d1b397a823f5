"""Slots by USRBIO, the rings of 3FS: its FUSE daemon moves bytes between files and shared memory, past the kernel.

`hf3fs_fuse.io`, of the package `hf3fs_py_usrbio`, is known here alone. What it does, and what is done about it:

| it | here |
|---|---|
| results come in the order of completion; a wait that times out has only some | they are matched by `userdata` |
| a result may be short, or an error of one operation | it must equal the length |
| a hole reads as zeros unless forbidden, unwritten bytes of a chunk always do | forbidden; the header decides |
| a full ring refuses an operation (EAGAIN) | it is prepared again after a result |
| a ring may not be used by two threads | one call takes a ring for itself |
| what was prepared may be moved long after its caller gave up | the ring is kept aside until all results are in |
| a descriptor has to be registered, and unregistered before it is closed | by `opened` and `closing` |
| memory must be shared by name | arenas of `Backend.allocate` are; other bytes go through the ring's own memory |
"""

import errno
import importlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from kvarve.errors import ConfigError
from kvarve.storage.base import left_s
from kvarve.storage.hf3fs._hf3fs_folder import Folder
from kvarve.storage.hf3fs._io_engine import Engine, Move, Short, cut, sync
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES
from kvarve.system.background import Abandoned, BackgroundCall, WorkerPool
from kvarve.system.regions import HostRegion, address, shared_region

log = logging.getLogger(__name__)

FORBID_HOLES = 2  # HF3FS_IOR_FORBID_READ_HOLES
_ENTRIES = 128  # operations of a ring at once
_BOUNCE_BYTES, _BOUNCES = 1 << 20, 4  # a ring's own memory for bytes that are not in shared memory
LOST = 8  # rings, at most, that do not answer, before no new one is made
_SUBMITTED = 8  # operations, at least, that the daemon is woken for
_TOGETHER = 8  # results, at least, that a thread is woken for
_PATIENCE_S = 60.0  # of a caller that has not said how long it waits
_LOOK_S = 1.0  # between two looks at whether the daemon still lives


class Library(Protocol):
    """`hf3fs_fuse.io`, as far as it is used."""

    def extract_mount_point(self, path: str) -> str | None: ...
    def register_fd(self, fd: int) -> object: ...
    def deregister_fd(self, fd: int) -> object: ...
    def force_fsync(self, fd: int) -> int: ...
    def make_iovec(self, shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> Any: ...
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
    ) -> Any: ...


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


@dataclass(frozen=True)
class _Shared:
    """Shared memory as the library wants it."""

    name: str
    buf: memoryview


@dataclass(eq=False)
class _Asked:
    """A move in a ring: how many of its parts have not ended, and which of the ring's blocks has its header."""

    move: Move
    parts: int = 0
    block: int | None = None


@dataclass(eq=False)
class _Part:
    """One operation: the header of a move (without `views`), or bytes of it. `shared`: where they lie, if that is in
    memory that the daemon knows; `bounce`: the number of the ring's own memory that stands for them if not."""

    asked: _Asked
    size_bytes: int
    offset: int
    views: Sequence[memoryview] = ()
    shared: Any = None  # a slice of an iovec
    bounce: int | None = None


class _Ring:
    """One ring and its memory, for one thread at a time."""

    def __init__(self, library: Library, mount: str, *, for_read: bool) -> None:
        self.for_read = for_read
        self._region = shared_region(_ENTRIES * BLOCK_BYTES + _BOUNCES * _BOUNCE_BYTES)
        self._iovec = _iovec(library, mount, self._region)
        flags = FORBID_HOLES if for_read else 0
        self._ring = library.make_ioring(mount, _ENTRIES, for_read=for_read, flags=flags)
        self._numbers = itertools.count()
        self.under_way: dict[int, _Part] = {}  # by userdata
        self.begin()

    def begin(self) -> None:
        """All of its own memory is free."""
        assert not self.under_way, "a ring is used again when all results are in"
        self._blocks, self._bounces = [*range(_ENTRIES)], [*range(_BOUNCES)]

    def _block(self, number: int) -> slice:
        return slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)

    def _bounced(self, part: _Part) -> slice:
        assert part.bounce is not None
        start = _ENTRIES * BLOCK_BYTES + part.bounce * _BOUNCE_BYTES
        return slice(start, start + part.size_bytes)

    def prepare(self, part: _Part) -> bool:
        """Whether the operation is now the daemon's; False: after some result it may be. OSError: it is refused."""
        memory = part.shared or self._filled(part)
        if memory is None:
            return False
        number = next(self._numbers)
        self.under_way[number] = part  # which keeps the number alive, as the library only borrows it
        try:
            self._ring.prepare(memory, self.for_read, part.asked.move.file.fd, part.offset, number)
        except OSError as error:
            del self.under_way[number]
            self._free_bounce(part)
            if error.errno == errno.EAGAIN and self.under_way:
                return False
            raise
        return True

    def _filled(self, part: _Part) -> Any:
        """The ring's own memory for a part, with what is to be written; None: there is none free."""
        asked, memory = part.asked, self._region.memory
        if part.views:
            if not self._bounces:
                return None
            part.bounce = self._bounces.pop()
            place = self._bounced(part)
            if not self.for_read:
                _copy(part.views, memory[place], into_views=False)
            return self._iovec[place]
        if asked.block is None:
            if not self._blocks:
                return None
            asked.block = self._blocks.pop()
            if not self.for_read:
                asked.move.seal(memory[self._block(asked.block)])
        return self._iovec[self._block(asked.block)]

    def submit(self) -> None:
        with suppress(OSError):  # the daemon finds by itself what was prepared
            self._ring.submit()

    def wait(self, seconds: float, least: int) -> bool:
        """Take what has ended, and wait `seconds` for at least some; whether anything has."""
        try:
            results = self._ring.wait(
                max_results=_ENTRIES, min_results=least, timeout=timedelta(seconds=min(seconds, _LOOK_S))
            )
        except OSError:  # nothing is known of the operations
            threading.Event().wait(min(seconds, _LOOK_S))
            return False
        ended = False
        for result in results:
            part = self.under_way.pop(result.userdata, None)
            if part is None:
                log.error("3FS: a ring answered for what was not asked of it")
                continue
            ended = True
            self._end(part, result.result)
        return ended

    def _end(self, part: _Part, count: int) -> None:
        move = part.asked.move
        if count < 0:
            words = f"{move.file.path} at {part.offset}: {errno.errorcode.get(-count, -count)}"
            move.trouble = OSError(-count, words)
        elif count != part.size_bytes:
            words = f"{move.file.path}: {count} of {part.size_bytes} bytes at {part.offset}"
            move.trouble = Short(errno.ENODATA, words)
        elif self.for_read and part.bounce is not None and not move.late:
            _copy(part.views, self._region.memory[self._bounced(part)], into_views=True)
        self._free_bounce(part)
        self.ended(part)

    def ended(self, part: _Part) -> None:
        """The part is over. With the last one of a move, its header can be looked at."""
        asked = part.asked
        asked.parts -= 1
        if asked.parts or asked.block is None:
            return
        if self.for_read and asked.move.trouble is None and not asked.move.late:
            asked.move.check(self._region.memory[self._block(asked.block)])
        self._blocks.append(asked.block)

    def _free_bounce(self, part: _Part) -> None:
        if part.bounce is not None:
            self._bounces.append(part.bounce)
            part.bounce = None

    def writes_to_callers(self) -> bool:
        """Whether an operation under way writes to memory that is not the ring's own."""
        return self.for_read and any(part.shared is not None for part in self.under_way.values())


def _copy(views: Sequence[memoryview], memory: memoryview, *, into_views: bool) -> None:
    at = 0
    for view in views:
        here = memory[at : at + view.nbytes]
        if into_views:
            view[:] = here
        else:
            here[:] = view
        at += view.nbytes


class UsrbioEngine(Engine):
    """`rings` for each direction, made when they are needed. A call ends when its deadline has passed, except that one
    that reads straight into its caller's memory stays until nothing can be written there."""

    direct = False

    def __init__(self, library: Library, mount: str, rings: int) -> None:
        self._library, self._mount, self._most = library, mount, rings
        self._pool = WorkerPool(rings, "kvarve 3fs syncs")
        self._changed = threading.Condition()  # guards all below
        self._folder: Folder | None = None
        self._idle: dict[bool, list[_Ring]] = {True: [], False: []}  # by whether they read
        self._in_use: dict[bool, int] = {True: 0, False: 0}
        self._mounted = 0  # how often; a ring lives as long as its mount
        self._lost: list[tuple[_Ring, int]] = []  # whose last call ended before its operations; and the mount
        self._asking: BackgroundCall[bool] | None = None
        self._lending = threading.Lock()  # guards the next two
        self._regions: list[tuple[int, int, HostRegion]] = []  # first and last address
        self._iovecs: dict[int, Any] = {}  # by first address; None: it could not be lent

    def opened(self, fd: int) -> None:
        self._library.register_fd(fd)

    def closing(self, fd: int) -> None:
        self._library.deregister_fd(fd)

    def register(self, region: HostRegion) -> None:
        if region.name is not None:
            with self._lending:
                self._regions.append((region.address, region.address + region.size_bytes, region))

    def enter(self, folder: Folder) -> None:
        with self._changed:
            before, self._folder = self._folder, folder
            self._mounted += 1
            self._in_use = {True: 0, False: 0}
            self._changed.notify_all()
        self._drop(before is not None and self._is_gone(before))

    def close(self) -> None:
        with self._changed:
            self._mounted += 1  # rings that come back later are not kept
        self._pool.shutdown()
        BackgroundCall("kvarve 3fs closes", lambda: self._drop(lost=True)).ended(_LOOK_S)

    def _drop(self, lost: bool) -> None:
        """Give up rings and iovecs, whose links are removed on the mount then, which may hang."""
        with self._changed:
            dropped = [*self._idle[True], *self._idle[False], *(self._lost if lost else ())]
            self._idle = {True: [], False: []}
            self._lost = [] if lost else self._lost
        with self._lending:
            iovecs, self._iovecs = self._iovecs, {}
        del dropped, iovecs

    # --- calls

    def read(self, moves: Sequence[Move]) -> None:
        self._move(moves, for_read=True)

    def write(self, moves: Sequence[Move]) -> None:
        for move in moves:
            move.failed_syncs = move.file.failed_syncs
        self._move(moves, for_read=False)
        sync(self._pool, self._most, moves, self._sync)

    def _sync(self, fd: int) -> None:
        """What has a result is on the medium; this is so that others see the file's length."""
        if self._library.force_fsync(fd):
            raise OSError(errno.EIO, "force_fsync failed")

    def _move(self, moves: Sequence[Move], *, for_read: bool) -> None:
        end = time.monotonic() + min(left_s(), _PATIENCE_S)
        try:
            ring, mounted = self._taken(for_read, end)
        except OSError as error:
            for move in moves:
                move.trouble = error
            return
        try:
            ring.begin()
            todo = deque(part for move in moves for part in self._parts(move))
            late = self._until(ring, todo, end)
            if late is not None:
                for part in (*todo, *ring.under_way.values()):
                    part.asked.move.trouble = late
                # Nothing but the daemon's end or its answer makes the callers' memory theirs again.
                while ring.writes_to_callers() and not self._is_gone():
                    ring.wait(_LOOK_S, 1)
                for part in ring.under_way.values():
                    part.asked.move.late = True
        finally:
            self._give_back(ring, mounted)

    def _until(self, ring: _Ring, todo: "deque[_Part]", end: float) -> OSError | None:
        """Move all parts, those that are not prepared yet in `todo`; an error if that takes too long."""
        while todo or ring.under_way:
            before = submitted = len(todo)
            while todo:
                part = todo[0]
                if not part.views and submitted - len(todo) >= _SUBMITTED:
                    ring.submit()  # so that the daemon moves some objects while we check the next
                    submitted = len(todo)
                try:
                    if not ring.prepare(part):
                        break
                except OSError as error:
                    part.asked.move.trouble = error
                    ring.ended(part)
                todo.popleft()
            if len(todo) < before:
                ring.submit()
            left = end - time.monotonic()
            # A read checks what has come while the rest is moved; a write has nothing to do but to wait.
            least = min(len(ring.under_way), _TOGETHER if ring.for_read or todo else _ENTRIES)
            if ring.under_way and not ring.wait(max(0.0, left), least) and left <= 0:
                return TimeoutError(errno.ETIMEDOUT, f"{self._mount}: 3FS has not answered in time")
        return None

    def _parts(self, move: Move) -> Iterable[_Part]:
        asked, at = _Asked(move), move.offset + BLOCK_BYTES
        parts = [_Part(asked, BLOCK_BYTES, move.offset)]
        pieces = (piece for piece in move.pieces if piece.nbytes)
        for shared, some in itertools.groupby(pieces, self._slice):
            for group in [[*some]] if shared is not None else cut([*some], _BOUNCE_BYTES):
                parts.append(_Part(asked, sum(view.nbytes for view in group), at, group, shared))
                at += parts[-1].size_bytes
        asked.parts = len(parts)
        return parts

    def _slice(self, piece: memoryview) -> Any:
        """The piece as the library wants it; None if it is not in shared memory."""
        start = address(piece)
        with self._lending:
            for first, last, region in self._regions:
                if first <= start and start + piece.nbytes <= last:
                    if first not in self._iovecs:
                        try:
                            self._iovecs[first] = _iovec(self._library, self._mount, region)
                        except OSError as error:
                            log.warning("3FS does not take shared memory, so its bytes are copied: %s", error)
                            self._iovecs[first] = None
                    iovec = self._iovecs[first]
                    return None if iovec is None else iovec[start - first : start - first + piece.nbytes]
        return None

    # --- rings

    def _taken(self, for_read: bool, end: float) -> tuple[_Ring, int]:
        """A ring for this call alone. OSError: none answers, or none is free in time."""
        with self._changed:
            while True:
                self._look_after_lost()
                if self._idle[for_read]:
                    self._in_use[for_read] += 1
                    return self._idle[for_read].pop(), self._mounted
                if len(self._lost) >= LOST:
                    words = f"{self._mount}: {len(self._lost)} rings do not answer: is the FUSE daemon of 3FS alive?"
                    raise OSError(errno.ETIMEDOUT, words)
                if self._in_use[for_read] < self._most:
                    self._in_use[for_read] += 1
                    mounted = self._mounted
                    break
                if not self._changed.wait(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX))):
                    raise TimeoutError(errno.ETIMEDOUT, f"{self._mount}: all rings are in use")
        try:
            return _Ring(self._library, self._mount, for_read=for_read), mounted
        except (OSError, ConfigError) as error:
            self._ended(for_read, mounted)
            raise error if isinstance(error, OSError) else OSError(errno.ENOMEM, str(error)) from None

    def _give_back(self, ring: _Ring, mounted: int) -> None:
        with self._changed:
            if ring.under_way:
                log.warning("3FS: a ring of %s has not answered in time: it is kept aside", self._mount)
                self._lost.append((ring, mounted))
            elif mounted == self._mounted:
                self._idle[ring.for_read].append(ring)
        self._ended(ring.for_read, mounted)

    def _ended(self, for_read: bool, mounted: int) -> None:
        with self._changed:
            self._in_use[for_read] -= mounted == self._mounted
            self._changed.notify_all()

    def _look_after_lost(self) -> None:
        for ring, mounted in [*self._lost]:
            ring.wait(0.0, least=0)
            if not ring.under_way:
                self._lost.remove((ring, mounted))
                if mounted == self._mounted:
                    self._idle[ring.for_read].append(ring)

    def _is_gone(self, folder: Folder | None = None) -> bool:
        """Whether the daemon has ended. While it stands still, nothing answers that, and one thread waits."""
        with self._changed:
            asked = folder or self._folder
            if self._asking is None or self._asking.ended():
                assert asked is not None, "a folder is entered before anything is moved"
                self._asking = BackgroundCall("kvarve 3fs asks", asked.is_gone)
            asking = self._asking
        try:
            return asking.result(_LOOK_S)
        except Abandoned:
            return False


def _iovec(library: Library, mount: str, region: HostRegion) -> Any:
    assert region.name is not None
    return library.make_iovec(_Shared(region.name, region.memory), mount, numa=region.numa)
