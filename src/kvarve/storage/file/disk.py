"""Every system call of the file store, so that a test can put a disk that fails in its place.

Files are opened through the descriptor of their folder, never through a link, and only if they are ours: regular files
with one name, owned by us and not writable by others.
"""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvarve.system.mounts import mounts
from kvarve.system.regions import address

# Other users of the machine may not read pages of prompts.
_FILE_MODE, _FOLDER_MODE, _PARENT_MODE = 0o600, 0o700, 0o755
_OTHERS_MAY_WRITE = 0o022
# Errors of file systems that cannot preallocate.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# Errors of the kernel for a link, a folder, a pipe or a device in place of a file.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)

# Permanent errors of a file or a folder: the medium or the file system is damaged there; or its mode was changed.
BROKEN_MEDIUM = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
UNREADABLE = (*BROKEN_MEDIUM, errno.EACCES)

_UNKNOWN_BYTES = 1 << 60
_OF_ONE_HOST = ("tmpfs", "ramfs", "overlay", "zfs")  # as every file system on a block device
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, 0 for OFD

BLOCK_BYTES = 4096  # direct I/O moves whole blocks between block-aligned places


class NotOurs(OSError):
    """This store has not made that file or folder: it is not followed, read, changed or removed."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, f"{path} {why}")

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class Directory:
    """An open folder. Its files are opened through `file`, its descriptor, so a link that replaces the folder later is
    not followed. `owner`: the uid that owns our files in it."""

    path: Path
    file: int
    owner: int
    identity: tuple[int, int]  # device and inode


class Disk:
    """The real file system. A file is a descriptor; every error is an OSError."""

    # --- folders

    def uid(self) -> int:
        """The user that owns what a store makes."""
        return os.geteuid()

    def enter(self, path: Path, *, for_maintenance: bool = False) -> Directory:
        """Open a folder. NotOurs: it is a link, or another user's, or others may write to it.

        `for_maintenance`: it may be another user's, as nothing is written.
        """
        owner = path.lstat().st_uid if for_maintenance else self.uid()
        _require(path, path.lstat(), owner, folder=True)  # a clearer error than that of the next line
        return self._entered(path, os.open(path, _FOLDER_FLAGS), owner)

    def enter_below(self, folder: Directory, name: str) -> Directory:
        """The same for a folder in a folder."""
        path = folder.path / name
        _require(path, self.look(folder, name), folder.owner, folder=True)
        return self._entered(path, os.open(name, _FOLDER_FLAGS, dir_fd=folder.file), folder.owner)

    def _entered(self, path: Path, file: int, owner: int) -> Directory:
        try:
            found = self.stat(file)
            _require(path, found, owner, folder=True)
        except BaseException:  # also on an interrupt
            self.close(file)
            raise
        return Directory(path, file, owner, (found.st_dev, found.st_ino))

    @contextmanager
    def closing(self, folder: Directory) -> Iterator[Directory]:
        """Close the folder at the end of the block."""
        try:
            yield folder
        finally:
            self.close(folder.file)

    def identity(self, file: int) -> tuple[int, int]:
        """Device and inode, which no other file has while this one is open."""
        found = self.stat(file)
        return found.st_dev, found.st_ino

    def is_there(self, path: str, identity: tuple[int, int]) -> bool:
        """Whether a path still leads to an open file or folder, so it was not removed or moved. The link count would
        not tell, as another name may be anywhere."""
        try:
            now = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (now.st_dev, now.st_ino) == identity

    def make_root(self, path: Path) -> None:
        """Make a private folder if it is missing, and its parents."""
        for place in (*reversed(path.parents), path):
            with suppress(FileExistsError):
                if not place.is_dir():
                    place.mkdir(_FOLDER_MODE if place == path else _PARENT_MODE)

    def make_folder(self, folder: Directory, name: str) -> None:
        """Make a folder in a folder, if it is missing."""
        with suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=folder.file)

    def remove_folder(self, folder: Directory, name: str) -> None:
        os.rmdir(name, dir_fd=folder.file)

    def entries(self, folder: Directory) -> dict[str, os.stat_result]:
        """All entries of a folder; links are not followed. OSError: it cannot be listed."""
        found = {}
        file = os.open(".", _FOLDER_FLAGS, dir_fd=folder.file)  # of its own, so that two threads may list at once
        try:
            with os.scandir(file) as listed:
                for each in listed:
                    with suppress(FileNotFoundError):  # removed meanwhile
                        found[each.name] = each.stat(follow_symlinks=False)
        finally:
            os.close(file)
        return found

    def look(self, folder: Directory, name: str) -> os.stat_result:
        """Stat a name in a folder; a link is not followed."""
        return os.stat(name, dir_fd=folder.file, follow_symlinks=False)

    def files(self, folder: Directory) -> dict[str, os.stat_result]:
        """The files in a folder that may be ours."""
        found = self.entries(folder).items()
        return {name: it for name, it in found if not objection(it, folder.owner, folder=False)}

    def rename(self, folder: Directory, old: str, new: str) -> None:
        """Replaces a file with the new name. NotOurs: that is no file of kvarve."""
        with suppress(FileNotFoundError):
            self._require_ours(folder, new)
        os.rename(old, new, src_dir_fd=folder.file, dst_dir_fd=folder.file)

    def unlink(self, folder: Directory, name: str) -> None:
        self._require_ours(folder, name)
        os.unlink(name, dir_fd=folder.file)

    def truncate(self, folder: Directory, name: str) -> None:
        """Empty a file, which frees its blocks even if a process has it open."""
        file = self.open(folder, name)
        try:
            os.ftruncate(file, 0)
        finally:
            self.close(file)

    def sync_folder(self, folder: Directory) -> None:
        """Return when the names in a folder are on the medium."""
        os.fsync(folder.file)

    def space(self, folder: Directory) -> tuple[int, int]:
        """Free bytes of the disk for users other than root, and its size. A file system that does not tell its size
        counts as large until it reports that it is full."""
        found = os.fstatvfs(folder.file)
        if not found.f_blocks:
            return _UNKNOWN_BYTES, _UNKNOWN_BYTES
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def is_read_only(self, path: Path) -> bool:
        """Whether the file system of a folder is mounted read-only, or says that it has become so."""
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)

    # --- files

    def open(
        self,
        folder: Directory,
        name: str,
        *,
        create: bool = False,
        direct: bool = False,
        read_only: bool = False,
    ) -> int:
        """`create`: FileExistsError if it is there. `direct`: past the page cache; OSError where that cannot be.

        NotOurs: the name is no file of kvarve. A pipe or a device does not block the call.
        """
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        if direct:
            flags |= os.O_DIRECT
        if not create:
            self._require_ours(folder, name)
        try:
            file = os.open(name, flags, _FILE_MODE, dir_fd=folder.file)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NotOurs(folder.path / name, "is no regular file") from None
            raise
        try:
            _require(folder.path / name, self.stat(file), folder.owner, folder=False)
            os.set_blocking(file, True)
        except BaseException:  # also on an interrupt
            self.close(file)
            raise
        return file

    @contextmanager
    def reading(self, folder: Directory, name: str) -> Iterator[int]:
        """A file that is open for the block, to be read alone."""
        file = self.open(folder, name, read_only=True)
        try:
            yield file
        finally:
            self.close(file)

    def _require_ours(self, folder: Directory, name: str) -> None:
        _require(folder.path / name, self.look(folder, name), folder.owner, folder=False)

    def close(self, file: int) -> None:
        with suppress(OSError):
            os.close(file)

    def stat(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def peek(self, file: int, size_bytes: int, at: int) -> bytes:
        """A few bytes; fewer at the end of the file."""
        return os.pread(file, size_bytes, at)

    def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
        """How many bytes were read; fewer than asked for at the end of the file, or at the disk's choice."""
        return os.preadv(file, into, at)

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        """How many bytes were written."""
        return os.pwritev(file, data, at)

    def uncache(self, file: int, size_bytes: int, at: int) -> None:
        """Let the next read of these bytes ask the file system, and not this machine's page cache."""
        os.posix_fadvise(file, at, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, file: int) -> None:
        """Return when all writes to the file are on the medium."""
        os.fdatasync(file)

    def size(self, file: int) -> int:
        return self.stat(file).st_size

    def allocate(self, file: int, size_bytes: int) -> None:
        """Make the file at least this long and, where the file system can, allocate its blocks."""
        try:
            _fallocate(file, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
            os.ftruncate(file, max(size_bytes, self.size(file)))

    def resize(self, file: int, size_bytes: int) -> None:
        """Cut or extend the file to this size; new blocks are not allocated."""
        os.ftruncate(file, size_bytes)

    # --- locks: the kernel releases them when the process ends, however it ends

    def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
        """Whether this process now has the exclusive (or with `shared` a shared) lock of the file."""
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def unlock(self, file: int) -> None:
        """Unlock also for copies of the descriptor in forked processes."""
        fcntl.flock(file, fcntl.LOCK_UN)

    def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
        """Whether this open file now has the exclusive lock of a range of its bytes; it never waits.

        The lock belongs to the open file (OFD), not to the process: another descriptor of the file is refused, and the
        lock ends with the last copy of this one.
        """
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, size_bytes, 0))
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another one has
            return False
        return True

    def locked_range(self, file: int, at: int, size_bytes: int) -> tuple[int, int] | None:
        """One of the ranges that other open files have locked and that overlap this one: where it begins, and its bytes
        (0: up to the end of any file). None if there is none now."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, size_bytes, 0)
        kind, _, begin, found_bytes, _ = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else (begin, found_bytes)

    def unlock_range(self, file: int, at: int, size_bytes: int) -> None:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, size_bytes, 0))

    # --- clocks

    def wall_ns(self) -> int:
        """The wall clock, which can be set."""
        return time.time_ns()

    def since_boot_ns(self) -> int:
        """A clock that cannot be set, one for all processes until the machine reboots."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic_ns()

    def host(self) -> str:
        """The name of this host, or container."""
        return socket.gethostname()

    def machine(self) -> str:
        """A name that no other machine has, and that this one keeps."""
        with suppress(OSError):
            if name := Path("/etc/machine-id").read_text("ascii").strip():
                return f"machine {name} {self.host()}"
        return f"machine {self.host()}"

    def is_local(self, folder: Directory) -> bool:
        """Whether a folder is on a file system that only this host can have mounted. False: not, or unknown."""
        device = os.fstat(folder.file).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            here = next((mount for mount in mounts() if mount.device == number), None)
        except OSError:
            return False
        return here is not None and (here.source.startswith("/dev/") or here.kind in _OF_ONE_HOST)

    def boot(self) -> bytes:
        """The id of this boot of this machine, in 16 bytes."""
        try:
            return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip().replace("-", ""))
        except (OSError, ValueError):
            return os.urandom(16)  # then every opening uses the wall clock for the time it was closed


def _fallocate(file: int, size_bytes: int) -> None:
    """The system call. Where a file system cannot, glibc's `posix_fallocate` writes to every block instead, which takes
    minutes for a slab."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(file, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk is; EFBIG: for a file of this size
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def objection(found: os.stat_result, owner: int, *, folder: bool) -> str:
    """Why this store cannot have made a file (a folder), and what to do; empty if it may have."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link, and links are not followed: name what it leads to"
    if folder and not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if not folder and not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if found.st_uid != owner:
        return f"belongs to user {found.st_uid}, not to user {owner}, whose store this is: give another folder"
    if found.st_mode & _OTHERS_MAY_WRITE:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        return f"may be written to by others (mode {mode}): chmod go-w it, or give another folder"
    if not folder and found.st_nlink > 1:
        return f"has {found.st_nlink} names (hard links): remove the others"
    return ""


def _require(path: Path, found: os.stat_result, owner: int, *, folder: bool) -> None:
    if why := objection(found, owner, folder=folder):
        raise NotOurs(path, why)


def move_all(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, views: Sequence[memoryview], at: int
) -> int:
    """Read or write until all is moved, or the file or the disk ends; how many bytes were."""
    left, done = [*views], 0
    while left and (count := call(file, left, at + done)):
        done += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
    return done


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O may use this memory."""
    if view.nbytes == 0 or view.nbytes % BLOCK_BYTES:
        return False
    return address(view) % BLOCK_BYTES == 0
