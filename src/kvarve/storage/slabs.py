"""A slab: a file of equal slots, one of the table of what is in them, and the way of bytes into and out of both.

Two files, for a write through the page cache waits until no direct I/O is under way in the same file, and whoever
writes a table has a mutex meanwhile.
"""

import errno
import itertools
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvarve.storage.disk import BLOCK_BYTES, Directory, Disk, is_aligned
from kvarve.storage.folder import QUARANTINED, TABLE, slab_name, spare_bytes
from kvarve.storage.table import (
    ENTRY_BYTES,
    FREE,
    STAMP,
    STATES,
    STORED,
    USED_AT,
    Columns,
    Rows,
    Shape,
    pack_header,
    read_entries,
    unpack_header,
    write_entries,
)

log = logging.getLogger(__name__)

# Of a slab's table each stripe is read anew by itself when another process has changed something in it.
STRIPES = 15
_RUN_BYTES = 4 << 20  # neighbours are moved together, up to so much
_BOUNCE_BYTES = 1 << 20
_READ_TABLE_BYTES = 16 << 20

_here = threading.local()


class Broken(Exception):
    """Files of ours that cannot be used as a slab; it says why."""


class Slab:
    """One open slab. Its columns are guarded by whoever owns it; the bytes of slots by the states of their rows."""

    def __init__(
        self,
        disk: Disk,
        folder: Directory,
        number: int,
        shape: Shape,
        identity: int,
        table: int,
        file: int,
        *,
        read_only: bool = False,
    ) -> None:
        self.disk, self.folder, self.number, self.path = disk, folder, number, folder.path / slab_name(number)
        self.shape, self.identity = shape, identity
        self.table, self.file, self.direct = table, file, -1
        names = ((slab_name(number), file), (slab_name(number) + TABLE, table))
        self._places = [(str(folder.path / name), disk.identity(each)) for name, each in names]
        with suppress(OSError):  # tmpfs, and others that know no such thing
            self.direct = disk.open(folder, slab_name(number), direct=True, read_only=read_only)
            self._try_direct()
        # A read may still be under way when the slab is given up: the last who holds it closes it.
        self._closing = weakref.finalize(self, _close, disk, table, file, self.direct)
        self._closing.atexit = False
        slots = shape.slots
        self.state = np.zeros(slots, np.uint8)
        self.holder = np.zeros(slots, np.uint16)
        self.generation = np.zeros(slots, np.uint32)
        self.length = np.zeros(slots, np.int64)
        self.stored = np.zeros(slots, np.int64)
        self.used = np.zeros(slots, np.int64)
        self.uses = np.zeros(slots, np.int64)
        self.group = np.zeros(slots, np.int32)
        self.names: list[str] = [""] * slots
        self.free: list[int] = []  # rows that may be free, the next one last; asked again when one is taken
        self.searched = False  # whether `free` has been filled since rows became free
        self._syncs = threading.Condition()
        self._syncing: set[object] = set()
        self._failed_syncs = 0

    @staticmethod
    def create(disk: Disk, folder: Directory, number: int, shape: Shape, owner: int, identity: int) -> "Slab":
        """A new slab, empty, on the disk for good when this returns. OSError, ENOSPC among them: nothing is left."""
        name = slab_name(number)
        files = [disk.open(folder, name, create=True)]
        try:
            disk.allocate(files[0], shape.slots_bytes)
            # The table comes last and goes first: slots without one are nobody's.
            files.append(disk.open(folder, name + TABLE, create=True))
            disk.allocate(files[1], shape.table_bytes)
            for at in shape.headers_at:
                write_all(disk, files[1], [pack_header(shape, owner, identity)], at)
            disk.sync(files[1])
            disk.sync_folder(folder)
        except OSError:
            _close(disk, *files)
            with suppress(OSError):
                unlink(disk, folder, number, "it could not be made whole")
            raise
        return Slab(disk, folder, number, shape, identity, files[1], files[0])

    @staticmethod
    def open(
        disk: Disk,
        folder: Directory,
        number: int,
        owner: int,
        *,
        alone: bool = False,
        room_bytes: int = 0,
        read_only: bool = False,
    ) -> "Slab":
        """A slab that is there. `Broken`: neither of its headers is as it should be, its table has another length than
        they say, or one of its files is missing. NotOurs, or another OSError: nobody can say what it is.

        `alone`: nobody else has the store open, so it may be mended; if it was cut it may take `room_bytes` more, which
        it gets unless the disk is full. `read_only`: only to look at it.
        """
        name, files = slab_name(number), list[int]()
        try:
            for each in (name + TABLE, name):
                file, writable = _opened(disk, folder, each, read_only=read_only)
                files.append(file)
            table, slots = files
            size_bytes = disk.size(table)
            headers = [
                unpack_header(disk.peek(table, ENTRY_BYTES, at), owner) if at >= 0 else None
                for at in (0, size_bytes - ENTRY_BYTES)
            ]
            fitting = [header for header in headers if header and header[0].table_bytes == size_bytes]
            if not fitting:
                raise Broken(f"neither header of its table, which has {size_bytes} bytes, is as it was written")
            found = shape, identity = fitting[0]
            if alone and writable:
                for at, header in zip(shape.headers_at, headers, strict=True):
                    if header != found:
                        log.warning("%s: one of its two headers was damaged, and is written anew", folder.path / name)
                        write_all(disk, table, [pack_header(shape, owner, identity)], at)
                disk.cut(slots, shape.slots_bytes)
                missing_bytes = shape.slots_bytes - disk.size(slots)
                if 0 < missing_bytes > room_bytes:
                    raise Broken(f"{missing_bytes} bytes of its slots are cut off, and for those there is no room")
                if 0 < missing_bytes <= spare_bytes(disk, folder):  # what is gone fails its checks
                    disk.allocate(slots, shape.slots_bytes)
        except FileNotFoundError:
            _close(disk, *files)
            raise Broken("one of its two files is missing") from None
        except BaseException:  # whatever it is, it goes on to the caller, and no file stays open
            _close(disk, *files)
            raise
        return Slab(disk, folder, number, shape, identity, table, slots, read_only=read_only)

    def _try_direct(self) -> None:
        """Some file systems take the flag and refuse the I/O."""
        try:
            self.disk.read(self.direct, [_bounce()[:BLOCK_BYTES]], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self.disk.close(self.direct)
                self.direct = -1

    # --- the table

    def stripe(self, rows: Rows) -> Rows:
        """In which stripe each row is."""
        return rows * STRIPES // self.shape.slots

    def rows_of(self, stripe: int) -> tuple[int, int]:
        """The rows of a stripe, the last one excluded."""
        slots = self.shape.slots
        return -(-stripe * slots // STRIPES), -(-(stripe + 1) * slots // STRIPES)

    def load(self, first: int, last: int, *, named: bool = True) -> Iterator[tuple[int, Columns]]:
        """What the table on the disk says of these rows, in pieces, each with its first row; without names if those are
        not asked for."""
        step = _READ_TABLE_BYTES // ENTRY_BYTES
        for at in range(first, last, step):
            raw = bytearray((min(last, at + step) - at) * ENTRY_BYTES)
            unreadable: list[int] = []
            try:
                done = _read_some(self.disk, self.table, memoryview(raw), self.shape.entry_at(at))
                raw[done:] = b"\xff" * (len(raw) - done)  # the table was cut: what is gone fails its check
            except OSError:
                unreadable = self._entry_by_entry(memoryview(raw), at)
            yield at, read_entries(raw, self.identity, at, self.shape.slot_bytes, unreadable, named=named)

    def _entry_by_entry(self, view: memoryview, first: int) -> list[int]:
        """After an I/O error: whatever of the table can be had; which entries cannot."""
        unreadable = []
        for i in range(view.nbytes // ENTRY_BYTES):
            entry = view[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES]
            entry[:] = b"\xff" * ENTRY_BYTES
            try:
                _read_some(self.disk, self.table, entry, self.shape.entry_at(first + i))
            except OSError:
                unreadable.append(i)
        return unreadable

    def save(self, rows: Sequence[int]) -> None:
        """Write the entries of these rows as the columns have them. Not on the medium before `sync`."""
        at = np.array(sorted(set(rows)), np.int64)
        if not len(at):
            return
        columns = Columns(
            self.state[at],
            self.holder[at],
            self.generation[at],
            self.length[at],
            self.stored[at],
            self.used[at],
            self.uses[at],
            [self.names[row] if self.state[row] == STORED else "" for row in at],
        )
        raw = memoryview(write_entries(columns, self.identity, at))
        begins = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
        for begin, end in itertools.pairwise(begins):
            piece = raw[begin * ENTRY_BYTES : end * ENTRY_BYTES]
            write_all(self.disk, self.table, [piece], self.shape.entry_at(int(at[begin])))

    def stamp(self, row: int, used: int, uses: int) -> None:
        """Write down that an object was used. Nobody waits for it to reach the medium."""
        self.disk.write(self.table, [STAMP.pack(used, uses)], self.shape.entry_at(row) + USED_AT)

    def stamped(self, row: int) -> tuple[int, int]:
        """When and how often the object in a row was used, by whichever process."""
        raw = self.disk.peek(self.table, STAMP.size, self.shape.entry_at(row) + USED_AT)
        return STAMP.unpack(raw) if len(raw) == STAMP.size else (0, 0)

    def take_free(self) -> int | None:
        """The first free row, if there is one; the caller gives it a state at once."""
        while True:
            while self.free:
                row = self.free.pop()
                if self.state[row] == FREE:
                    return row
            if self.searched:
                return None
            self.free = np.flatnonzero(self.state == FREE)[::-1].tolist()
            self.searched = True

    def is_gone(self) -> bool:
        """Whether somebody has removed or moved away one of its files: what is written to it is there for nobody."""
        return not all(self.disk.is_there(*place) for place in self._places)

    def is_solid(self) -> bool:
        """Whether all its slots have their room on the disk, also those that were never filled."""
        return self.disk.stat(self.file).st_blocks * 512 >= self.shape.slots_bytes

    @property
    def files(self) -> tuple[int, int]:
        """What has to be synced for an object to stay: its bytes and its entry."""
        return self.file, self.table

    def sync(self, file: int) -> None:
        """Return when all that was written to one of its files has reached the medium. OSError: something has not.

        It need not be the caller's. Nor has the caller's, if this returns: the kernel says so to one only of all who
        sync through one descriptor. So who writes has to ask `failed_syncs` before, and once more after it.
        """
        this, failed = object(), True
        try:
            with self._syncs:
                self._syncing.add(this)
            self.disk.sync(file)
            failed = False
        finally:
            with self._syncs:
                self._failed_syncs += failed
                self._syncing.discard(this)
                self._syncs.notify_all()

    def failed_syncs(self, *, wait: bool = False) -> int:
        """How many have failed; `wait`: of those, too, that are under way."""
        with self._syncs:
            under_way = set(self._syncing) if wait else set()
            self._syncs.wait_for(lambda: not under_way & self._syncing)
            return self._failed_syncs

    def answers(self) -> bool:
        """Whether its files can be read at all: else it is not one object that is damaged."""
        try:
            return len(self.disk.peek(self.table, ENTRY_BYTES, 0)) == ENTRY_BYTES and self._reads_direct()
        except OSError:
            return False

    def _reads_direct(self) -> bool:
        """Past the page cache, which would answer for a disk that is gone."""
        return self.direct < 0 or self.disk.read(self.direct, [_bounce()[:BLOCK_BYTES]], 0) == BLOCK_BYTES

    def can_be_filled(self, row: int) -> bool:
        """Whether a slot that holds nothing takes bytes and gives them back."""
        pattern, back = _bounce()[:BLOCK_BYTES].tobytes(), bytearray(BLOCK_BYTES)
        try:
            for at in range(0, self.shape.slot_bytes, BLOCK_BYTES):
                write_all(self.disk, self.file, [pattern], self.shape.slot_at(row) + at)
            self.sync(self.file)
            return all(
                self._read_bounced(memoryview(back), self.shape.slot_at(row) + at) == BLOCK_BYTES and back == pattern
                if self.direct >= 0
                else _read_some(self.disk, self.file, memoryview(back), self.shape.slot_at(row) + at) == BLOCK_BYTES
                for at in range(0, self.shape.slot_bytes, BLOCK_BYTES)
            )
        except OSError:
            return False

    # --- the slots

    def read(self, run: Sequence["RowSpan"]) -> int:
        """Fill the views of neighbours; how many bytes there were. OSError: the disk cannot."""
        at, views = self.shape.slot_at(run[0].row), [piece.view for piece in run]
        if self.direct >= 0 and all(piece.aligned for piece in run):
            total = sum(view.nbytes for view in views)
            count = self.disk.read(self.direct, views, at)
            if count in (0, total):
                return count
        elif self.direct >= 0:
            return sum(_each(self._read_bounced, views, at))
        return sum(_each(lambda view, place: _read_some(self.disk, self.file, view, place), views, at))

    def _read_bounced(self, view: memoryview, at: int) -> int:
        done = 0
        while done < view.nbytes:
            count = min(_BOUNCE_BYTES, view.nbytes - done)
            bounce = _bounce()[: -(-count // BLOCK_BYTES) * BLOCK_BYTES]
            if self.disk.read(self.direct, [bounce], at + done) < bounce.nbytes:
                return done + _read_some(self.disk, self.file, view[done:], at + done)
            view[done : done + count] = bounce[:count]
            done += count
        return done

    def write(self, run: Sequence["RowSpan"]) -> None:
        """Write neighbours, of whole slots but for the last. OSError: it is not all written."""
        at, views = self.shape.slot_at(run[0].row), [piece.view for piece in run]
        if self.direct < 0:
            write_all(self.disk, self.file, views, at)
        elif all(piece.aligned for piece in run):
            count = self.disk.write(self.direct, views, at)
            if count < sum(view.nbytes for view in views):
                write_all(self.disk, self.file, views, at)
        else:
            for view, place in _places(views, at):
                self._write_bounced(view, place)

    def _write_bounced(self, view: memoryview, at: int) -> None:
        for done in range(0, view.nbytes, _BOUNCE_BYTES):
            count = min(_BOUNCE_BYTES, view.nbytes - done)
            bounce = _bounce()[: -(-count // BLOCK_BYTES) * BLOCK_BYTES]
            bounce[:count] = view[done : done + count]
            bounce[count:] = bytes(bounce.nbytes - count)
            if self.disk.write(self.direct, [bounce], at + done) < bounce.nbytes:
                write_all(self.disk, self.file, [view[done : done + count]], at + done)


@dataclass(eq=False)
class RowSpan:
    """One object on its way: the `number`-th of a call, a row of a slab, and the caller's memory."""

    number: int
    slab: Slab
    row: int
    view: memoryview

    def __post_init__(self) -> None:
        self.aligned = is_aligned(self.view)  # asked three times


def runs(pieces: Iterable[RowSpan]) -> list[list[RowSpan]]:
    """The pieces, neighbours together where each but the last fills its slot and direct I/O may use its memory."""
    found: list[list[RowSpan]] = []
    moved = 0
    for piece in sorted(pieces, key=lambda piece: (piece.slab.number, piece.row)):
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.slab is piece.slab
            and last.row + 1 == piece.row
            and last.view.nbytes == piece.slab.shape.slot_bytes
            and moved + piece.view.nbytes <= _RUN_BYTES
            and last.aligned
            and piece.aligned
        ):
            found[-1].append(piece)
            moved += piece.view.nbytes
        else:
            found.append([piece])
            moved = piece.view.nbytes
    return found


def states_of(slabs: Iterable[Slab]) -> dict[str, int]:
    """How many rows of slabs are in which state."""
    counts = sum((np.bincount(slab.state, minlength=len(STATES)) for slab in slabs), np.zeros(len(STATES), np.int64))
    return dict(zip(STATES, counts.tolist(), strict=True))


def _bounce() -> memoryview:
    """This thread's own block-aligned memory."""
    memory: memoryview | None = getattr(_here, "bounce", None)
    if memory is None:
        memory = _here.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
    return memory


def _places(views: Sequence[memoryview], at: int) -> Iterator[tuple[memoryview, int]]:
    for view in views:
        yield view, at
        at += view.nbytes


def _each(read: Callable[[memoryview, int], int], views: Sequence[memoryview], at: int) -> Iterator[int]:
    """What each read answers, up to the first that comes back short."""
    for view, place in _places(views, at):
        count = read(view, place)
        yield count
        if count < view.nbytes:
            return


def _read_some(disk: Disk, file: int, view: memoryview, at: int) -> int:
    """Read until the view is full or the file ends."""
    done = 0
    while done < view.nbytes:
        count = disk.read(file, [view[done:]], at + done)
        if count == 0:
            break
        done += count
    return done


def write_all(disk: Disk, file: int, data: Sequence[memoryview | bytes], at: int) -> None:
    """Write until all is written. OSError: it is not."""
    for piece in data:
        view = memoryview(piece)
        done = 0
        while done < view.nbytes:
            count = disk.write(file, [view[done:]], at + done)
            if count == 0:
                raise OSError(errno.EIO, "the disk takes no more bytes")
            done += count
        at += view.nbytes


def unlink(disk: Disk, folder: Directory, number: int, why: str) -> None:
    """Remove a slab's files, or what there is of them. Its table goes first, as slots without one are nobody's. The
    slots give up their room even if another process, which has yet to hear of it, has them open."""
    name = slab_name(number)
    with suppress(FileNotFoundError):
        disk.unlink(folder, name + TABLE)
    with suppress(FileNotFoundError):
        disk.truncate(folder, name)
        disk.unlink(folder, name)
    log.info("%s: removed: %s", folder.path / name, why)


def quarantine(disk: Disk, folder: Directory, number: int, why: str) -> None:
    """Give the files of a damaged slab names by which nobody opens them, until their room is needed."""
    name = slab_name(number)
    for each in (name + TABLE, name):
        with suppress(FileNotFoundError):
            disk.rename(folder, each, each + QUARANTINED)
    log.warning("%s: damaged, as %s: it is renamed to %s%s", folder.path / name, why, name, QUARANTINED)


def _opened(disk: Disk, folder: Directory, name: str, *, read_only: bool) -> tuple[int, bool]:
    """A file, and whether it can be written to."""
    if not read_only:
        try:
            return disk.open(folder, name), True
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
    return disk.open(folder, name, read_only=True), False


def _close(disk: Disk, *files: int) -> None:
    for file in files:
        if file >= 0:
            disk.close(file)
