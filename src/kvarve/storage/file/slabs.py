"""A slab: a file of equal slots, a file with the table of their contents, and I/O on both.

There are two files because a buffered write waits for all direct I/O in its file, and tables are written one at a time.
"""

import errno
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvarve.storage.file.disk import BLOCK_BYTES, Directory, Disk, is_aligned
from kvarve.storage.file.folder import QUARANTINED, TABLE, slab_name, spare_bytes
from kvarve.storage.file.table import (
    BROKEN,
    ENTRY_BYTES,
    FREE,
    RESERVED,
    STAMP,
    STATE_AT,
    STATES,
    STORED,
    USED_AT,
    Columns,
    Rows,
    Shape,
    pack_header,
    read_entries,
    state_word,
    unpack_header,
    write_entries,
)

log = logging.getLogger(__name__)

# Parts of a slab's table, each read again by itself when another process has changed it.
STRIPES = 15
_RUN_BYTES = 4 << 20  # of adjacent slots moved by one system call, at most
_BOUNCE_BYTES = 1 << 20
_READ_TABLE_BYTES = 16 << 20

_here = threading.local()


class Broken(Exception):
    """Our files cannot be used as a slab; the text says why."""


class Slab:
    """One open slab. Its columns are guarded by its index; the bytes of slots by the states of their rows."""

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
        with suppress(OSError):  # tmpfs and others have no direct I/O
            self.direct = disk.open(folder, slab_name(number), direct=True, read_only=read_only)
            self._try_direct()
        # A read may still be in flight when the slab is dropped: the last reference closes the files.
        self._closing = weakref.finalize(self, _close, disk, table, file, self.direct)
        self._closing.atexit = False
        slots = shape.slots
        self.state = np.zeros(slots, np.uint8)
        self.generation = np.zeros(slots, np.uint32)
        self.length = np.zeros(slots, np.int64)
        self.stored = np.zeros(slots, np.int64)
        self.used = np.zeros(slots, np.int64)
        self.uses = np.zeros(slots, np.int64)
        self.group = np.zeros(slots, np.int32)
        self.names: list[str] = [""] * slots
        self.free: list[int] = []  # rows that may be free, the next one last; checked again when taken
        self.searched = False  # whether `free` has been filled since rows became free
        self._syncing = {each: threading.Lock() for each in self.files}
        self._syncs_begun = dict.fromkeys(self.files, 0)
        self.syncing = 0  # puts that have entered objects here and have not synced them yet
        self.failed = 0  # errno of a sync that failed: any object may be missing on the medium, so the slab has to go

    @staticmethod
    def create(
        disk: Disk, folder: Directory, number: int, shape: Shape, owner: int, identity: int, *, durable: bool
    ) -> "Slab":
        """Make an empty slab. OSError, such as ENOSPC: no file is left."""
        name = slab_name(number)
        files = [disk.open(folder, name, create=True)]
        try:
            disk.allocate(files[0], shape.slots_bytes)
            # The table is made last and removed first: slots without one belong to no slab.
            files.append(disk.open(folder, name + TABLE, create=True))
            disk.allocate(files[1], shape.table_bytes)
            for at in shape.headers_at:
                write_all(disk, files[1], [pack_header(shape, owner, identity)], at)
            if durable:
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
        space_bytes: int = 0,
        read_only: bool = False,
    ) -> "Slab":
        """Open an existing slab. `Broken`: neither header is intact, the table has another length than they say, or a
        file is missing. NotOurs, or another OSError: unknown, as it cannot be read.

        `alone`: no other process has the store open, so the slab may be repaired; if it was cut, it is extended by up
        to `space_bytes`, unless the disk is full. `read_only`: for inspection.
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
                if 0 < missing_bytes > space_bytes:
                    raise Broken(f"{missing_bytes} bytes of its slots are cut off, and there is no space for them")
                if 0 < missing_bytes <= spare_bytes(disk, folder):  # lost objects fail their own checksums
                    disk.allocate(slots, shape.slots_bytes)
        except FileNotFoundError:
            _close(disk, *files)
            raise Broken("one of its two files is missing") from None
        except BaseException:  # also on an interrupt no file stays open
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
        """The stripe of each row."""
        return rows * STRIPES // self.shape.slots

    def rows_of(self, stripe: int) -> tuple[int, int]:
        """The rows of a stripe, the last one excluded."""
        slots = self.shape.slots
        return -(-stripe * slots // STRIPES), -(-(stripe + 1) * slots // STRIPES)

    def load(self, first: int, last: int, *, named: bool = True) -> Iterator[tuple[int, Columns]]:
        """Read these rows of the table from disk, in pieces of (first row, columns); without names unless `named`."""
        step = _READ_TABLE_BYTES // ENTRY_BYTES
        for at in range(first, last, step):
            raw = bytearray((min(last, at + step) - at) * ENTRY_BYTES)
            unreadable: list[int] = []
            try:
                done = _read_some(self.disk, self.table, memoryview(raw), self.shape.entry_at(at))
                raw[done:] = b"\xff" * (len(raw) - done)  # the table was cut: missing entries fail their check
            except OSError:
                unreadable = self._entry_by_entry(memoryview(raw), at)
            yield at, read_entries(raw, self.identity, at, self.shape.slot_bytes, unreadable, named=named)

    def _entry_by_entry(self, view: memoryview, first: int) -> list[int]:
        """After an I/O error: read entry by entry; returns which entries cannot be read."""
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
        """Write the entries of these rows from the columns. Not durable before `sync`."""
        at = np.array(sorted(set(rows)), np.int64)
        if not len(at):
            return
        state = self.state[at]
        columns = Columns(
            np.where(state == RESERVED, np.uint8(FREE), state),
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

    def is_as_known(self, row: int) -> bool:
        """Whether the table holds the entry that the columns have. An entry that fails its check is as a free one."""
        raw = self.disk.peek(self.table, ENTRY_BYTES, self.shape.entry_at(row))
        if raw[STATE_AT : STATE_AT + 8] == state_word(int(self.state[row]), int(self.generation[row])):
            return True
        known = self.state[row] in (FREE, BROKEN) and len(raw) == ENTRY_BYTES
        return known and read_entries(raw, self.identity, row, self.shape.slot_bytes).state[0] == BROKEN

    # --- locks: another process that fills or changes a row has locked its slot; the kernel unlocks it if it dies

    def lock(self, row: int) -> bool:
        return self.disk.lock_range(self.file, self.shape.slot_at(row), self.shape.slot_bytes)

    def unlock(self, row: int) -> None:
        self.disk.unlock_range(self.file, self.shape.slot_at(row), self.shape.slot_bytes)

    def lock_all(self) -> bool:
        return self.disk.lock_range(self.file, 0, 0)

    def unlock_all(self) -> None:
        self.disk.unlock_range(self.file, 0, 0)

    def close(self) -> None:
        """Close its files, and with them its locks."""
        self._closing()

    def stamp(self, row: int, used: int, uses: int) -> None:
        """Write an object's time and number of uses; never synced."""
        self.disk.write(self.table, [STAMP.pack(used, uses)], self.shape.entry_at(row) + USED_AT)

    def stamped(self, row: int) -> tuple[int, int]:
        """When and how often the object in a row was used, by any process."""
        raw = self.disk.peek(self.table, STAMP.size, self.shape.entry_at(row) + USED_AT)
        return STAMP.unpack(raw) if len(raw) == STAMP.size else (0, 0)

    def take_free(self) -> int | None:
        """The first free row, if any; the caller sets its state at once."""
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
        """Whether one of its files was removed or moved away, so that writes to it are lost."""
        return not all(self.disk.is_there(*place) for place in self._places)

    def is_solid(self) -> bool:
        """Whether the disk has blocks allocated for all its slots, also those never filled."""
        return self.disk.stat(self.file).st_blocks * 512 >= self.shape.slots_bytes

    @property
    def files(self) -> tuple[int, int]:
        """The files to sync for a durable object: its bytes and its entry."""
        return self.file, self.table

    def sync(self, file: int) -> None:
        """Return when all that was written to one of its files so far is on the medium. OSError: that is unknown since
        this sync, or an earlier one, has failed.

        The kernel reports a failure to one caller only of all that sync a descriptor, and takes the data for written
        from then on. So they sync one after the other, and after a failure none succeeds. A caller that had to wait
        for a whole sync needs none of its own.
        """
        needed = self._syncs_begun[file] + 1
        with self._syncing[file]:
            if self._syncs_begun[file] < needed and not self.failed:
                self._syncs_begun[file] += 1
                try:
                    self.disk.sync(file)
                except BaseException as error:  # also on an interrupt
                    self.failed = getattr(error, "errno", None) or errno.EIO
                    raise
            if self.failed:
                raise OSError(self.failed, os.strerror(self.failed))

    def answers(self) -> bool:
        """Whether its files can be read at all: else the disk failed, and not one object."""
        try:
            return len(self.disk.peek(self.table, ENTRY_BYTES, 0)) == ENTRY_BYTES and self._reads_direct()
        except OSError:
            return False

    def _reads_direct(self) -> bool:
        """With direct I/O, as the page cache would answer for a disk that is gone."""
        return self.direct < 0 or self.disk.read(self.direct, [_bounce()[:BLOCK_BYTES]], 0) == BLOCK_BYTES

    def can_be_filled(self, row: int) -> bool:
        """Whether an empty slot can be written and read back."""
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
        """Read adjacent slots into their views; returns the bytes read."""
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
        """Write adjacent slots, each but the last in full. OSError: not all is written."""
        at, views = self.shape.slot_at(run[0].row), [view for piece in run for view in piece.views]
        if self.direct < 0:
            write_all(self.disk, self.file, views, at)
        elif all(piece.aligned for piece in run):
            count = self.disk.write(self.direct, views, at)
            if count < sum(view.nbytes for view in views):
                write_all(self.disk, self.file, views, at)
        else:
            for view, place in _places([piece.joined() for piece in run], at):
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
    """One object to read or write: the `number`-th of a call, a row of a slab, and the caller's memory: `view`, and in
    a write the pieces that follow it."""

    number: int
    slab: Slab
    row: int
    view: memoryview
    more: Sequence[memoryview] = ()

    def __post_init__(self) -> None:
        self.views = (self.view, *self.more)
        self.size_bytes = sum(view.nbytes for view in self.views)
        self.aligned = all(map(is_aligned, self.views))  # cached, as it is read three times

    def joined(self) -> memoryview:
        return memoryview(b"".join(self.views)) if self.more else self.view


def runs(pieces: Iterable[RowSpan]) -> list[list[RowSpan]]:
    """Group adjacent pieces where each but the last fills its slot and direct I/O may use its memory."""
    found: list[list[RowSpan]] = []
    moved = 0
    for piece in sorted(pieces, key=lambda piece: (piece.slab.number, piece.row)):
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.slab is piece.slab
            and last.row + 1 == piece.row
            and last.size_bytes == piece.slab.shape.slot_bytes
            and moved + piece.size_bytes <= _RUN_BYTES
            and last.aligned
            and piece.aligned
        ):
            found[-1].append(piece)
            moved += piece.size_bytes
        else:
            found.append([piece])
            moved = piece.size_bytes
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
    """The bytes of each read, up to the first short one."""
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
    """Write all of it, or raise OSError."""
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
    """Remove a slab's files, as far as they exist; the table first, as slots without one belong to no slab. The slots
    are truncated, to free their blocks even while another process still has them open."""
    name = slab_name(number)
    with suppress(FileNotFoundError):
        disk.unlink(folder, name + TABLE)
    with suppress(FileNotFoundError):
        disk.truncate(folder, name)
        disk.unlink(folder, name)
    log.info("%s: removed: %s", folder.path / name, why)


def quarantine(disk: Disk, folder: Directory, number: int, why: str) -> None:
    """Rename the files of a damaged slab so that no process opens them, until their space is needed."""
    name = slab_name(number)
    for each in (name + TABLE, name):
        with suppress(FileNotFoundError):
            disk.rename(folder, each, each + QUARANTINED)
    log.warning("%s: damaged, as %s: it is renamed to %s%s", folder.path / name, why, name, QUARANTINED)


def _opened(disk: Disk, folder: Directory, name: str, *, read_only: bool) -> tuple[int, bool]:
    """An open file, and whether it is writable."""
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
