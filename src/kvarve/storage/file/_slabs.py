"""A slab: a file of equal slots, a file with the table of their contents, and I/O on both, by several threads.

There are two files because a buffered write waits for all direct I/O in its file, and tables are written one at a time.
"""

import errno
import itertools
import logging
import mmap
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from kvarve.storage.file._table import (
    BROKEN,
    DUPLICATE,
    ENTRY_BYTES,
    FREE,
    NUMBERS,
    STAMP,
    STATES,
    STORED,
    USED_AT,
    Columns,
    Header,
    Rows,
    Shape,
    are_states,
    count_of_stored,
    read_entries,
    write_entries,
)
from kvarve.storage.file.disk import BLOCK_BYTES, Directory, Disk, is_aligned, move_all
from kvarve.storage.file.folder import TABLE, headers, slab_name, slab_numbers
from kvarve.system.background import WorkerPool

log = logging.getLogger(__name__)

# Parts of a slab's table, each read again by itself when another process has changed it.
STRIPES = 15
# Bytes of adjacent slots that one system call moves at most: a call's share for each thread, within these limits.
_RUN_BYTES = 1 << 20, 4 << 20
_READ_TABLE_BYTES = 16 << 20
_LOOK_BYTES = 1 << 16  # of slots without a table
_MOVE, _SYNC = 0, 1  # two pools of threads: else a sync would queue behind the writes of other puts
_Work = TypeVar("_Work")


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
        named: bool = False,
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
        self.told = np.zeros(slots, np.bool_)  # rows whose present entry this process has told to the others
        self.names: list[str] = [""] * slots
        self.free: list[int] = []  # rows that may be free, the next one last; checked again when taken
        self.searched = False  # whether `free` has been filled since rows became free
        self._shared = False  # whether another process has been found to fill it
        self._syncing = {each: threading.Lock() for each in (file, table)}
        self._syncs_begun = dict.fromkeys((file, table), 0)
        self.syncing = 0  # puts that have entered objects here and have not synced them yet
        self._named = named  # its names are on the medium; of one that another process made that is unknown
        self.unreadable: set[int] = set()  # rows whose entries the medium does not give, counted once
        self.bad = False  # whether it has been said that an object in it cannot be read
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
                write_all(disk, files[1], [Header(owner, identity, shape).packed()], at)
            if durable:
                disk.sync(files[1])
                disk.sync_folder(folder)
        except OSError:
            _close(disk, *files)
            with suppress(OSError):
                unlink(disk, folder, number, "it could not be made whole")
            raise
        return Slab(disk, folder, number, shape, identity, files[1], files[0], named=durable)

    @staticmethod
    def open(
        disk: Disk,
        folder: Directory,
        number: int,
        owner: int,
        *,
        alone: bool = False,
        read_only: bool = False,
    ) -> "Slab":
        """Open an existing slab. `Broken`: neither header is intact, a file has another length than they say, or is
        missing. NotOurs, or another OSError: unknown, as it cannot be read. `read_only`: for inspection. `alone`: no
        other process has the store open, so slots that were cut are made whole."""
        name, files = slab_name(number), list[int]()
        try:
            for each in (name + TABLE, name):
                files.append(disk.open(folder, each, read_only=read_only))
            table, slots = files
            size_bytes = disk.size(table)
            found = (it for it in headers(disk, table) if (it.owner, it.shape.table_bytes) == (owner, size_bytes))
            if (header := next(found, None)) is None:
                raise Broken(f"neither header of its table, which has {size_bytes} bytes, is as it was written")
            shape = header.shape
            if alone and disk.size(slots) != shape.slots_bytes:
                with suppress(OSError):
                    disk.resize(slots, shape.slots_bytes)  # lost objects fail their own checksums
            if disk.size(slots) != shape.slots_bytes:
                raise Broken(f"its slots have {disk.size(slots)} bytes, and not {shape.slots_bytes}")
        except FileNotFoundError:
            _close(disk, *files)
            raise Broken("one of its two files is missing") from None
        except BaseException:  # also on an interrupt no file stays open
            _close(disk, *files)
            raise
        return Slab(disk, folder, number, shape, header.identity, table, slots, read_only=read_only)

    @staticmethod
    def count_of_stored(disk: Disk, folder: Directory, number: int) -> int:
        """How many objects a slab has by its table, though neither of its headers may be intact; of a table that is
        longer than usual, those at its beginning."""
        with disk.reading(folder, slab_name(number) + TABLE) as file:
            return count_of_stored(disk.peek(file, _READ_TABLE_BYTES, ENTRY_BYTES))

    def _try_direct(self) -> None:
        """Some file systems take the flag and refuse the I/O."""
        try:
            self.disk.read(self.direct, [blocks(BLOCK_BYTES)], 0)
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
            try:
                done = move_all(self.disk.read, self.table, [memoryview(raw)], self.shape.entry_at(at))
                raw[done:] = b"\xff" * (len(raw) - done)  # the table was cut: missing entries fail their check
            except OSError:
                self._entry_by_entry(memoryview(raw), at)
            yield at, read_entries(raw, self.identity, at, self.shape.slot_bytes, named=named)

    def _entry_by_entry(self, view: memoryview, first: int) -> None:
        """After an I/O error: read entry by entry. One that cannot be read fails its check."""
        for i in range(view.nbytes // ENTRY_BYTES):
            entry = view[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES]
            entry[:] = b"\xff" * ENTRY_BYTES
            with suppress(OSError):
                move_all(self.disk.read, self.table, [entry], self.shape.entry_at(first + i))

    def is_unreadable(self, row: int) -> bool:
        """Whether the medium does not give an entry."""
        try:
            return len(self.disk.peek(self.table, ENTRY_BYTES, self.shape.entry_at(row))) < ENTRY_BYTES
        except OSError:
            return True

    def save(self, rows: Sequence[int]) -> None:
        """Write the entries of these rows from the columns. Not durable before `sync`."""
        at = np.array(sorted(set(rows)), np.int64)
        if not len(at):
            return
        names = [self.names[row] if self.state[row] == STORED else "" for row in at]
        columns = Columns(names=names, **{column: getattr(self, column)[at] for column in NUMBERS})
        columns.state = np.where(columns.state == STORED, np.uint8(STORED), np.uint8(FREE))
        raw = memoryview(write_entries(columns, self.identity, at))
        begins = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
        for begin, end in itertools.pairwise(begins):
            piece = raw[begin * ENTRY_BYTES : end * ENTRY_BYTES]
            write_all(self.disk, self.table, [piece], self.shape.entry_at(int(at[begin])))

    def are_as_known(self, first: int, count: int) -> list[bool]:
        """Whether the table holds the entries that the columns have, for adjacent rows."""
        raw = self.disk.peek(self.table, count * ENTRY_BYTES, self.shape.entry_at(first))
        rows = slice(first, first + count)
        state = np.where(self.state[rows] == DUPLICATE, np.uint8(STORED), self.state[rows])
        known = np.zeros(count, np.bool_)
        whole = len(raw) // ENTRY_BYTES
        known[:whole] = are_states(raw, state[:whole], self.generation[rows][:whole])
        return [same or self._is_broken(first + i, raw[i * ENTRY_BYTES :]) for i, same in enumerate(known.tolist())]

    def _is_broken(self, row: int, raw: bytes) -> bool:
        """Whether a row that is known as free, or as broken, has an entry that fails its check."""
        if self.state[row] not in (FREE, BROKEN) or len(raw) < ENTRY_BYTES:
            return False
        return bool(read_entries(raw[:ENTRY_BYTES], self.identity, row, self.shape.slot_bytes).state[0] == BROKEN)

    # --- locks: another process that fills or changes a row has locked its slot; the kernel unlocks it if it dies

    def lock(self, first: int, count: int) -> bool:
        """Lock the slots of adjacent rows. False: another process has some of them."""
        return self.disk.lock_range(self.file, self.shape.slot_at(first), count * self.shape.slot_bytes)

    def locked(self, first: int, count: int) -> tuple[int, int] | None:
        """A range of these rows that another process has locked, its end excluded. None if there is none now, or the
        file system does not tell."""
        slot_bytes, end = self.shape.slot_bytes, first + count
        found = None
        with suppress(OSError):
            found = self.disk.locked_range(self.file, self.shape.slot_at(first), count * slot_bytes)
        if found is None:
            return None
        at, size_bytes = found
        begin = max(first, at // slot_bytes)
        last = min(end, -(-(at + size_bytes) // slot_bytes)) if size_bytes else end
        return (begin, last) if begin < last else None  # a file system may name a lock outside of the asked bytes

    def unlock(self, first: int, count: int) -> None:
        self.disk.unlock_range(self.file, self.shape.slot_at(first), count * self.shape.slot_bytes)

    def lock_all(self) -> bool:
        """Lock the whole file. False: another process has a slot of it."""
        return self.disk.lock_range(self.file, 0, 0)

    def unlock_all(self) -> None:
        self.disk.unlock_range(self.file, 0, 0)

    def close(self) -> None:
        """Close its files, and with them its locks."""
        self._closing()

    def stored_at(self, row: int) -> tuple[int, int, int]:
        """When an object was stored: the larger one of two is the newer object, for all processes."""
        return int(self.stored[row]), self.number, row

    def stamp(self, row: int, used: int, uses: int) -> None:
        """Write an object's time and number of uses; never synced."""
        self.disk.write(self.table, [STAMP.pack(used, uses)], self.shape.entry_at(row) + USED_AT)

    def stamped(self, row: int) -> tuple[int, int]:
        """When and how often the object in a row was used, by any process."""
        raw = self.disk.peek(self.table, STAMP.size, self.shape.entry_at(row) + USED_AT)
        return STAMP.unpack(raw) if len(raw) == STAMP.size else (0, 0)

    def take_free(self, count: int) -> list[int]:
        """Free rows, `count` at most, the first ones unless other processes take those too; the caller sets their state
        at once."""
        found = list[int]()
        while True:
            while self.free and len(found) < count:
                row = self.free.pop()
                if self.state[row] == FREE:
                    found.append(row)
            if found or self.searched:
                return sorted(set(found))
            free = np.flatnonzero(self.state == FREE)
            first = 0
            if self._shared and len(free):
                first = int(np.searchsorted(free, self._begin_in(free)))
            self.free = np.roll(free[::-1], first).tolist()
            self.searched = True  # from now on rows that become free are added

    def _begin_in(self, free: Rows) -> int:
        """The first row of one of the stripes with most free rows, if possible of one that no other process fills."""
        of_stripe = np.bincount(self.stripe(free))
        most = np.flatnonzero(of_stripe >= max(1, of_stripe.max() - 1)).tolist()  # some have one row less than others
        random.shuffle(most)
        rows = [self.rows_of(stripe) for stripe in most]
        return next((first for first, last in rows if self.locked(first, last - first) is None), rows[0][0])

    def move_on(self) -> None:
        """Another process takes the same rows: take others from now on."""
        self._shared, self.free, self.searched = True, [], False

    def is_gone(self) -> bool:
        """Whether one of its files was removed or moved away, so that writes to it are lost; or its table was cut, and
        with that the header by which it could be opened again."""
        there = all(self.disk.is_there(*place) for place in self._places)
        return not there or self.disk.size(self.table) < self.shape.table_bytes

    def is_removed(self) -> bool:
        """Whether its table has no name any more, as that of a slab which a process has removed."""
        return not self.disk.is_there(*self._places[1])

    def is_solid(self) -> bool:
        """Whether the disk has blocks allocated for all its slots, also those never filled."""
        return self.disk.stat(self.file).st_blocks * 512 >= self.shape.slots_bytes

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
                    if not self._named:  # a process that does not sync may have made it
                        self.disk.sync_folder(self.folder)
                        self._named = True
                    self.disk.sync(file)
                except BaseException as error:  # also on an interrupt
                    number = getattr(error, "errno", None) or errno.EIO
                    if number == errno.EROFS:  # what lies on the medium can still be read
                        self._syncs_begun[file] -= 1
                    else:
                        self.failed = number
                    raise
            if self.failed:
                raise OSError(self.failed, os.strerror(self.failed))

    def answers(self) -> bool:
        """Whether its files can be read at all: else the disk failed, and not one object."""
        try:
            if len(self.disk.peek(self.table, ENTRY_BYTES, 0)) < ENTRY_BYTES:
                return False
        except OSError:
            return False
        return self.direct < 0 or any(map(self._gives, {0, self.shape.slots_bytes - BLOCK_BYTES}))

    def _gives(self, at: int) -> bool:
        """Whether a block can be read, with direct I/O: the page cache would answer for a disk that is gone."""
        try:
            return self.disk.read(self.direct, [blocks(BLOCK_BYTES)], at) == BLOCK_BYTES
        except OSError:
            return False

    # --- the slots

    def read(self, run: Sequence["RowSpan"]) -> int:
        """Read adjacent slots into their views; returns the bytes read."""
        at, views = self.shape.slot_at(run[0].row), [piece.view for piece in run]
        total = sum(view.nbytes for view in views)
        if self.direct >= 0:
            into = views if run[0].aligned else [blocks(total)]
            count = self.disk.read(self.direct, into, at)
            if count in (0, sum(view.nbytes for view in into)):
                if not run[0].aligned:
                    views[0][:] = into[0][:total]
                return min(count, total)
        done = 0
        for view in views:
            count = move_all(self.disk.read, self.file, [view], at + done)
            done += count
            if count < view.nbytes:
                break
        return done

    def write(self, run: Sequence["RowSpan"]) -> None:
        """Write adjacent slots, each but the last in full. OSError: not all is written."""
        at, views = self.shape.slot_at(run[0].row), [view for piece in run for view in piece.views]
        if self.direct >= 0:
            if not run[0].aligned:
                joined = b"".join(views)
                views = [blocks(len(joined))]
                views[0][: len(joined)] = joined
            if self.disk.write(self.direct, views, at) == sum(view.nbytes for view in views):
                return
        write_all(self.disk, self.file, views, at)


RowAddress = tuple[Slab, int]


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
        self.size_bytes, self.aligned = self.view.nbytes, is_aligned(self.view)
        for view in self.more:
            self.size_bytes += view.nbytes
            self.aligned = self.aligned and is_aligned(view)


def runs(pieces: Sequence[RowSpan], threads: int) -> list[list[RowSpan]]:
    """Group adjacent pieces where each but the last fills its slot and direct I/O may use its memory, into runs for
    this many threads."""
    least, most = _RUN_BYTES
    most = min(most, max(least, sum(piece.size_bytes for piece in pieces) // threads))
    found: list[list[RowSpan]] = []
    moved = 0
    for piece in sorted(pieces, key=lambda piece: (piece.slab.number, piece.row)):
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.slab is piece.slab
            and last.row + 1 == piece.row
            and last.size_bytes == piece.slab.shape.slot_bytes
            and moved + piece.size_bytes <= most
            and last.aligned
            and piece.aligned
        ):
            found[-1].append(piece)
            moved += piece.size_bytes
        else:
            found.append([piece])
            moved = piece.size_bytes
    return found


class Mover:
    """Moves the bytes of objects between memory and slabs, several runs of slots at once, and syncs.

    `lock` and `require_open` are the store's: after it was closed no thread is started.
    """

    def __init__(self, threads: int, lock: threading.Lock, require_open: Callable[[], None]) -> None:
        self._threads, self._lock, self._require_open = threads, lock, require_open
        self._pools: list[WorkerPool] = []

    def read(self, pieces: Sequence[RowSpan]) -> tuple[dict[int, int], dict[int, OSError]]:
        """The bytes read of each piece, and the errors, by number."""
        counts: dict[int, int] = {}

        def read(run: list[RowSpan]) -> None:
            count = run[0].slab.read(run)
            for piece in run:
                counts[piece.number] = max(0, min(count, piece.view.nbytes))
                count -= piece.view.nbytes

        return counts, self._move(pieces, read)

    def write(self, pieces: Sequence[RowSpan], moving: list[Future[OSError | None]]) -> dict[int, OSError]:
        """The errors, by number. Writes that go on if this is interrupted are in `moving`."""
        return self._move(pieces, lambda run: run[0].slab.write(run), moving)

    def _move(
        self,
        pieces: Sequence[RowSpan],
        do: Callable[[list[RowSpan]], None],
        moving: list[Future[OSError | None]] | None = None,
    ) -> dict[int, OSError]:
        """Move runs of pieces, and each piece of a run that fails by itself; the errors of those, by number."""
        troubles: dict[int, OSError] = {}
        for run, error in self._each(runs(pieces, self._threads), do, moving=moving):
            for piece in run if error is not None else ():
                try:
                    do([piece])
                except OSError as its_own:
                    troubles[piece.number] = its_own
        return troubles

    def sync(self, files: Sequence[tuple[Slab, int]]) -> list[tuple[tuple[Slab, int], OSError | None]]:
        """Sync files of slabs; returns each with its error."""
        return list(self._each(files, lambda one: one[0].sync(one[1]), _SYNC))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """In a child after fork: the threads are the parent's."""
        self._pools = []

    def _each(
        self,
        work: Sequence[_Work],
        do: Callable[[_Work], None],
        pool: int = _MOVE,
        moving: "list[Future[OSError | None]] | None" = None,
    ) -> Iterator[tuple[_Work, OSError | None]]:
        """Do all work, several at once; yields each with its error. The futures are added to `moving`."""

        def tried(one: _Work) -> OSError | None:
            try:
                do(one)
            except OSError as error:
                return error
            return None

        if len(work) < 2 or self._threads == 1:
            yield from [(one, tried(one)) for one in work]
            return
        with self._lock:
            self._require_open()
            if not self._pools:
                self._pools = [WorkerPool(self._threads, f"kvarve files {what}") for what in ("move", "sync")]
            futures: list[Future[OSError | None]] = [Future() for _ in work]
            if moving is not None:
                moving += futures
            for one, future in zip(work, futures, strict=True):
                self._pools[pool].run(partial(tried, one), future)
        yield from [(one, future.result()) for one, future in zip(work, futures, strict=True)]


def states_of(slabs: Iterable[Slab]) -> dict[str, int]:
    """How many rows of slabs are in which state."""
    counts = sum((np.bincount(slab.state, minlength=len(STATES)) for slab in slabs), np.zeros(len(STATES), np.int64))
    return dict(zip(STATES, counts.tolist(), strict=True))


def blocks(size_bytes: int) -> memoryview:
    """Block-aligned memory of whole blocks, for direct I/O."""
    return memoryview(mmap.mmap(-1, max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES))


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


def without_tables(disk: Disk, folder: Directory) -> str:
    """What to say of slots without a table, with no process in the model; "" if a process that died while it made a
    slab may have left them: then it is one file, of zeros in its first blocks."""
    files = disk.files(folder)
    alone = [slab_name(number) for number, whole in sorted(slab_numbers(disk, folder).items()) if not whole]
    alone = [name for name in alone if name in files and files[name].st_size]
    if not alone or (len(alone) == 1 and not _begins_with_data(disk, folder, alone[0])):
        return ""
    names = alone[0] if len(alone) == 1 else f"{alone[0]} to {alone[-1]}, {len(alone)} in all"
    return f"{folder.path}: slots have no table ({names}): what was in them cannot be found any more"


def _begins_with_data(disk: Disk, folder: Directory, name: str) -> bool:
    with suppress(OSError), disk.reading(folder, name) as file:
        return any(disk.peek(file, _LOOK_BYTES, 0))
    return False


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


def _close(disk: Disk, *files: int) -> None:
    for file in files:
        if file >= 0:
            disk.close(file)
