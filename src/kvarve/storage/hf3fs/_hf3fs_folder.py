"""The folder of a store on 3FS: whose it is, and its open files. Knows no slot's contents.

kvarve.json                                  the format; written before anything else. The slots' names say it too
store                                        the store's name, and where its map is
slots-<bytes>-<places>-<number>-<owner>      so many slots of so many bytes each, given by an owner's process alone
uses-<owner>                                 when its process used its slots last, as it ended

3FS has no locks between machines, so nothing here needs one: a file gets its name before any slot of it is used, grows
by being written to, and is removed by its owner. Entries with another name are left alone.
"""

import errno
import logging
import mmap
import os
import secrets
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import Damaged
from kvarve.storage.file.disk import BLOCK_BYTES, Directory, Disk
from kvarve.storage.file.folder import Medium, nearest_folder, small_file, write_new
from kvarve.storage.file.marker import MARKER, problem_in, written
from kvarve.storage.hf3fs._slot_layout import Extent, extent_of, file_name

log = logging.getLogger(__name__)

FORMAT = "kvarve-hf3fs/2"
# Left by an opening that was cut short, or there in every root of a file system: a folder with only these is empty.
_NOT_CONTENT = ("3fs-virt", "lost+found")
STORE_FILE, _FIRST = "store", "kvarve hf3fs 2"
_STORE_BYTES = 1000  # at most
_OPEN_FILES = 512
_scratch = memoryview(mmap.mmap(-1, BLOCK_BYTES))
_NOT_SERVED = (errno.ENOTCONN, errno.ECONNABORTED)  # of a file system in user space whose process has ended


class File:
    """An open extent. Its descriptor is closed with the last reference, as I/O may be under way when it is dropped."""

    def __init__(self, path: Path, fd: int, *, direct: bool, close: Callable[[int], object]) -> None:
        self.path, self.fd, self.direct = path, fd, direct
        self.failed = False  # a sync
        self._syncing = threading.Lock()  # guards that
        weakref.finalize(self, close, fd).atexit = False

    def sync(self, sync: Callable[[int], object]) -> None:
        """Return when all that was written to the file is on the medium. OSError. The kernel tells a failure to one of
        all who sync a descriptor, and maybe not to the one whose bytes are lost: so all others fail, too."""
        with self._syncing:
            if self.failed:
                raise OSError(errno.EIO, f"{self.path}: another sync of it has failed")
            try:
                sync(self.fd)
            except OSError:
                self.failed = True
                raise


class Descriptors:
    """Hears of each descriptor of a file, before its first use and before its end."""

    direct = True  # it wants files past the page cache, where the file system can

    def opened(self, fd: int) -> None: ...
    def closing(self, fd: int) -> None: ...


class Folder:
    """An open folder, made if it is missing and `make`. StorageError: it is not ours, or fails."""

    def __init__(self, disk: Disk, path: Path, hears: Descriptors, *, make: bool = True) -> None:
        self.disk, self.path, self._hears = disk, path, hears
        self._lock = threading.Lock()  # guards the files
        self._files: OrderedDict[Extent, File] = OrderedDict()  # the one used last comes last
        with Medium(path):
            if make:
                disk.make_root(path)
            self.root = disk.enter(path)
            try:
                if not _is_store(disk, self.root):
                    self._write(MARKER, written(FORMAT))
            except BaseException:  # also on an interrupt
                disk.close(self.root.file)
                raise
        self._closing_root = weakref.finalize(self, disk.close, self.root.file)
        self._closing_root.atexit = False

    def _write(self, name: str, data: bytes, *, once: bool = False) -> None:
        """Atomically, also where another machine does so now. `once`: what is there stays."""
        unfinished = f"{MARKER}~{secrets.token_hex(8)}"
        write_new(self.disk, self.root, unfinished, data)
        if once:
            with suppress(FileExistsError):
                os.link(unfinished, name, src_dir_fd=self.root.file, dst_dir_fd=self.root.file, follow_symlinks=False)
            os.unlink(unfinished, dir_fd=self.root.file)
        else:
            self.disk.rename(self.root, unfinished, name)
        self.disk.sync_folder(self.root)

    def identity(self, keeper: str) -> str:
        """The random name of the store, which gets one if it is new. Damaged: what its file says cannot be read.
        StorageError: its map is not `keeper`'s but elsewhere, so each would give the other's room again."""
        file = self.path / STORE_FILE
        try:
            if not os.path.lexists(file):
                self._write(STORE_FILE, f"{_FIRST}\n{secrets.token_hex(16)}\n{keeper}\n".encode(), once=True)
            # Another process may be making it, so that it has two names for a moment.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            opened = os.open(STORE_FILE, flags, dir_fd=self.root.file)
            try:
                lines = self.disk.peek(opened, _STORE_BYTES, 0).decode("utf-8").splitlines()
            finally:
                self.disk.close(opened)
        except (OSError, UnicodeDecodeError) as error:
            raise Damaged(f"{file}: {error}") from error
        if len(lines) != 3 or lines[0] != _FIRST:
            raise Damaged(f"{file} is damaged, or not written by kvarve: give an empty folder")
        if lines[2] != keeper:
            raise StorageError(
                f"{self.path} is used by {lines[2]}, and not by {keeper}: servers that share a store need one map, "
                f"metadata=redis://...; if it is not used so any more, write how into the last line of {file}"
            )
        return lines[1]

    def save_uses(self, owner: int, uses: Mapping[int, int]) -> None:
        """When each slot was used last, for those who take over this owner's files."""
        self._write(f"uses-{owner:016x}", array("Q", chain.from_iterable(uses.items())).tobytes())

    def uses(self, owner: int) -> dict[int, int]:
        """What was saved last, which may not be true any more."""
        raw = b""
        with suppress(OSError), self.disk.reading(self.root, f"uses-{owner:016x}") as file:
            raw = self.disk.peek(file, min(self.disk.size(file), 1 << 28), 0)
        saved = array("Q", raw[: len(raw) // 16 * 16])
        return dict(zip(saved[::2], saved[1::2], strict=True))

    def close(self) -> None:
        """After the last call; files whose I/O hangs are closed when that returns."""
        with self._lock:
            self._files.clear()
        self._closing_root()

    def is_in_place(self) -> bool:
        """Whether its path still leads to it: else it was removed, or the file system mounted anew."""
        with Medium(self.path):
            return self.disk.is_there(str(self.path), self.root.identity)

    def is_gone(self) -> bool:
        """Whether the process that served the file system has ended, so that nobody does what it was asked to."""
        try:
            self.disk.space(self.root)
        except OSError as error:
            return error.errno in _NOT_SERVED
        return False

    def file(self, extent: Extent, *, create: bool = False) -> File:
        """The extent's file. FileNotFoundError: there is none. Other OSErrors."""
        with self._lock:
            file = self._files.pop(extent, None)
            if file is None or file.failed:
                file = self._open(file_name(extent), create)
            self._files[extent] = file
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def _open(self, name: str, create: bool) -> File:
        disk, root, hears = self.disk, self.root, self._hears
        if create:
            with suppress(FileExistsError):
                disk.close(disk.open(root, name, create=True))
                disk.sync_folder(root)
        fd = disk.open(root, name)
        direct = False
        if hears.direct:
            with suppress(OSError):  # tmpfs and others have no direct I/O
                past = disk.open(root, name, direct=True)
                try:
                    disk.read(past, [_scratch], 0)  # some take the flag and refuse the I/O
                except OSError:
                    disk.close(past)
                    raise
                disk.close(fd)
                fd, direct = past, True
        try:
            hears.opened(fd)
        except BaseException:
            disk.close(fd)
            raise

        def close(fd: int) -> None:  # which knows nothing of the folder
            hears.closing(fd)
            disk.close(fd)

        return File(self.path / name, fd, direct=direct, close=close)

    def remove(self, extent: Extent) -> None:
        with self._lock:
            self._files.pop(extent, None)
        with suppress(FileNotFoundError):
            self.disk.unlink(self.root, file_name(extent))

    def extents(self) -> dict[Extent, int]:
        """All extents that have a file, and the file's bytes. Others that were open have been removed, and are closed:
        a file has its room until the last process closes it."""
        with self._lock:
            open_before = [*self._files]  # one made after the list was read is not in it
        there = _extents(self.disk, self.root)
        with self._lock:
            for extent in {*open_before} - there.keys():
                self._files.pop(extent, None)
        return there


def check_path(disk: Disk, path: Path) -> None:
    """Raise what opening would raise, and touch nothing."""
    with Medium(path):
        if nearest_folder(path) == path:
            with disk.closing(disk.enter(path)) as root:
                _is_store(disk, root)


def _is_store(disk: Disk, root: Directory) -> bool:
    """Whether the folder is a store of this format whose file says so; not an empty one, nor one of which only the
    slots' names say it. StorageError: it is another. Damaged: neither can be read."""
    names = disk.entries(root).keys()
    if not [name for name in names if name not in _NOT_CONTENT and not name.startswith(f"{MARKER}~")]:
        return False
    marker, slots = partial(small_file, disk, root, MARKER), partial(_extents, disk, root)
    problem = problem_in(root.path, marker, FORMAT, kind="kvarve store on 3FS", otherwise=lambda: bool(slots()))
    if problem:
        log.warning("%s", problem)
    return not problem


def _extents(disk: Disk, root: Directory) -> dict[Extent, int]:
    files = disk.files(root).items()
    return {extent: it.st_size for name, it in files if (extent := extent_of(name)) is not None}
