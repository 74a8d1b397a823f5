"""Every system call of the file store, so that a test can put a disk that fails in its place.

Files are reached through the descriptor of the folder in which they lie, never through a link, and only if they are
ours: regular files with one name, which belong to us and which nobody else may write to.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# What users' prompts left behind is not for everyone on the machine to read.
_FILE_MODE, _FOLDER_MODE, _PARENT_MODE = 0o600, 0o700, 0o755
_OTHERS_MAY_WRITE = 0o022
# What a file system says that cannot preallocate.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# What the kernel says of a link, a folder, a pipe or a device where a file should be.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)

# What is said of a file or a folder that nobody will be able to read the next time either: the medium is damaged there,
# or the file system, or somebody has changed its mode.
UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EACCES)

_UNKNOWN_BYTES = 1 << 60

BLOCK_BYTES = 4096  # direct I/O moves whole blocks between block-aligned places


class NotOurs(OSError):
    """A file or a folder that this store has not made: it is not followed, read, changed or removed."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, f"{path} {why}")

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class Directory:
    """An open folder. What lies in it is reached through `file`, its descriptor: a link that is put in the folder's
    place afterwards leads nobody astray. `owner`: the uid to whom all that is ours in it belongs."""

    path: Path
    file: int
    owner: int
    identity: tuple[int, int]  # of the device and on it


class Disk:
    """The file system as it is. A file is known by its descriptor; trouble is an OSError."""

    # --- folders

    def uid(self) -> int:
        """Who we are: what a store makes belongs to this user."""
        return os.geteuid()

    def enter(self, path: Path, *, for_maintenance: bool = False) -> Directory:
        """Open a folder. NotOurs: it is a link, or another user's, or others may write to it.

        `for_maintenance`: it may be another user's, as nothing is written.
        """
        owner = path.lstat().st_uid if for_maintenance else self.uid()
        _require_folder(path, path.lstat(), owner)  # says more than the error of the next line
        return self._entered(path, os.open(path, _FOLDER_FLAGS), owner)

    def enter_below(self, folder: Directory, name: str) -> Directory:
        """The same for a folder in a folder."""
        path = folder.path / name
        _require_folder(path, self.look(folder, name), folder.owner)
        return self._entered(path, os.open(name, _FOLDER_FLAGS, dir_fd=folder.file), folder.owner)

    def _entered(self, path: Path, file: int, owner: int) -> Directory:
        try:
            found = self.stat(file)
            _require_folder(path, found, owner)
        except BaseException:  # whatever it is, it goes on to the caller
            self.close(file)
            raise
        return Directory(path, file, owner, (found.st_dev, found.st_ino))

    @contextmanager
    def closing(self, folder: Directory) -> Iterator[Directory]:
        """A folder that is closed in the end."""
        try:
            yield folder
        finally:
            self.close(folder.file)

    def identity(self, file: int) -> tuple[int, int]:
        """What no other file has as long as this one is open."""
        found = self.stat(file)
        return found.st_dev, found.st_ino

    def is_there(self, path: str, identity: tuple[int, int]) -> bool:
        """Whether a path still leads to an open file or folder: it may have been removed, or moved away. How many names
        it has says less, as another one may be anywhere."""
        try:
            now = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (now.st_dev, now.st_ino) == identity

    def make_root(self, path: Path) -> None:
        """Make a folder for ourselves where there is none, and those above it."""
        for place in (*reversed(path.parents), path):
            with suppress(FileExistsError):
                if not place.is_dir():
                    place.mkdir(_FOLDER_MODE if place == path else _PARENT_MODE)

    def make_folder(self, folder: Directory, name: str) -> None:
        """Make a folder in a folder, where there is none."""
        with suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=folder.file)

    def remove_folder(self, folder: Directory, name: str) -> None:
        os.rmdir(name, dir_fd=folder.file)

    def entries(self, folder: Directory) -> dict[str, os.stat_result]:
        """All that lies in a folder. Links are told as links. OSError: it cannot be listed."""
        found = {}
        file = os.open(".", _FOLDER_FLAGS, dir_fd=folder.file)  # so that two threads may list it at once
        try:
            with os.scandir(file) as listed:
                for each in listed:
                    with suppress(FileNotFoundError):  # somebody removes it while we look
                        found[each.name] = each.stat(follow_symlinks=False)
        finally:
            os.close(file)
        return found

    def look(self, folder: Directory, name: str) -> os.stat_result:
        """What has a name in a folder. A link is told as a link."""
        return os.stat(name, dir_fd=folder.file, follow_symlinks=False)

    def files(self, folder: Directory) -> dict[str, os.stat_result]:
        """The files in a folder that may be ours."""
        found = self.entries(folder).items()
        return {name: it for name, it in found if not objection(it, folder.owner, folder=False)}

    def rename(self, folder: Directory, old: str, new: str) -> None:
        """What has the new name is replaced. NotOurs: it is no file of ours."""
        with suppress(FileNotFoundError):
            self._require_ours(folder, new)
        os.rename(old, new, src_dir_fd=folder.file, dst_dir_fd=folder.file)

    def unlink(self, folder: Directory, name: str) -> None:
        self._require_ours(folder, name)
        os.unlink(name, dir_fd=folder.file)

    def truncate(self, folder: Directory, name: str) -> None:
        """Nothing is left in a file, and its room is free, whoever has it open."""
        file = self.open(folder, name)
        try:
            os.ftruncate(file, 0)
        finally:
            self.close(file)

    def sync_folder(self, folder: Directory) -> None:
        """Return when the names in a folder have reached the medium."""
        os.fsync(folder.file)

    def room(self, folder: Directory) -> tuple[int, int]:
        """How many bytes are free on the disk for who is not root, of how many. What does not say how large it is has
        room until it says that it is full."""
        found = os.fstatvfs(folder.file)
        if not found.f_blocks:
            return _UNKNOWN_BYTES, _UNKNOWN_BYTES
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

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

        NotOurs: what has this name is no file of ours. A pipe or a device keeps nobody waiting.
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
            _require_file(folder, name, self.stat(file))
            os.set_blocking(file, True)
        except BaseException:  # whatever it is, it goes on to the caller
            self.close(file)
            raise
        return file

    def _require_ours(self, folder: Directory, name: str) -> None:
        _require_file(folder, name, self.look(folder, name))

    def close(self, file: int) -> None:
        with suppress(OSError):
            os.close(file)

    def stat(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def peek(self, file: int, size_bytes: int, at: int) -> bytes:
        """A few bytes; fewer at the end of the file."""
        return os.pread(file, size_bytes, at)

    def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
        """How many bytes were read; fewer than asked for at the end of the file, or as the disk likes."""
        return os.preadv(file, into, at)

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        """How many bytes were written."""
        return os.pwritev(file, data, at)

    def sync(self, file: int) -> None:
        """Return when all that was written to the file has reached the medium."""
        os.fdatasync(file)

    def size(self, file: int) -> int:
        return self.stat(file).st_size

    def allocate(self, file: int, size_bytes: int) -> None:
        """Make the file at least this long and, where the file system can, take its room on the disk."""
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
            os.ftruncate(file, max(size_bytes, self.size(file)))

    def cut(self, file: int, size_bytes: int) -> None:
        """Take away what is behind so many bytes."""
        os.ftruncate(file, min(size_bytes, self.size(file)))

    # --- locks: the kernel lets go of them when the process ends, however it ends

    def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
        """Whether the file is now ours alone; `shared`: ours, and perhaps of others who share."""
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def unlock(self, file: int) -> None:
        """Also for a copy of the descriptor that a fork may hold."""
        fcntl.flock(file, fcntl.LOCK_UN)

    # --- clocks

    def wall_ns(self) -> int:
        """What people call the time; somebody may set it."""
        return time.time_ns()

    def since_boot_ns(self) -> int:
        """Nobody can set it; it is the same for all processes, until the machine starts anew."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic_ns()

    def boot(self) -> bytes:
        """Which start of which machine this is, in 16 bytes."""
        try:
            return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        except (OSError, ValueError):
            return os.urandom(16)  # then every opening asks the wall clock how long it was closed


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def objection(found: os.stat_result, owner: int, *, folder: bool) -> str:
    """Why a file (a folder) is none that this store has made, and what to do; empty if it may be."""
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


def _require_folder(path: Path, found: os.stat_result, owner: int) -> None:
    why = objection(found, owner, folder=True)
    if why:
        raise NotOurs(path, why)


def _require_file(folder: Directory, name: str, found: os.stat_result) -> None:
    why = objection(found, folder.owner, folder=False)
    if why:
        raise NotOurs(folder.path / name, why)


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O may use this memory as it is."""
    if view.nbytes == 0 or view.nbytes % BLOCK_BYTES:
        return False
    return address(view) % BLOCK_BYTES == 0


def address(view: memoryview) -> int:
    """Where memory begins that is not empty."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
