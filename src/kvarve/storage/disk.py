"""Every system call of the file store, so that a test can put a disk that fails in its place."""

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

# What users' prompts left behind is not for everyone on the machine to read.
_FILE_MODE = 0o600
# What a file system says that cannot preallocate.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

NOT_OURS = "lost+found"  # every fresh ext4 disk has it, and nobody may look into it
BLOCK_BYTES = 4096  # direct I/O moves whole blocks between block-aligned places


class Disk:
    """The file system as it is. A file is known by its descriptor; trouble is an OSError."""

    # --- files

    def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
        """`create`: FileExistsError if it is there. `direct`: past the page cache; OSError where that cannot be."""
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        if direct:
            flags |= os.O_DIRECT
        return os.open(path, flags, _FILE_MODE)

    def close(self, file: int) -> None:
        with suppress(OSError):
            os.close(file)

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
        return os.fstat(file).st_size

    def allocate(self, file: int, size_bytes: int) -> None:
        """Give the file this size and, where the file system can, its room on the disk."""
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
            os.ftruncate(file, size_bytes)

    # --- folders

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def truncate(self, path: Path) -> None:
        """Nothing is left in a file, and its room is free, whoever has it open."""
        os.truncate(path, 0)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder have reached the medium."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def sizes(self, folder: Path) -> dict[Path, int]:
        """Every file below a folder, and how long it is. OSError: some of it cannot be looked at."""
        found = {}
        for parent, folders, files in os.walk(folder, onerror=_unless_gone):
            folders[:] = [each for each in folders if each != NOT_OURS]
            for name in files:
                with suppress(FileNotFoundError):  # somebody removes it while we look
                    path = Path(parent, name)
                    found[path] = path.lstat().st_size
        return found

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


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O may use this memory as it is."""
    if view.nbytes == 0 or view.nbytes % BLOCK_BYTES:
        return False
    return address(view) % BLOCK_BYTES == 0


def address(view: memoryview) -> int:
    """Where memory begins that is not empty."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
