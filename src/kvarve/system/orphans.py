"""What a process makes where all processes do (shared memory, temporary folders), and leaves there if it is killed.

Each file or folder is locked as long as it is in use, and a lock ends with its process. So what is not locked was left
behind, and the next process that makes one like it removes it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = ".made-by-kvarve"  # in each temporary folder of ours: a name alone may be anyone's


def locked(file: int) -> bool:
    """Lock a file that this process has just made, until the descriptor is closed. False if another process has taken
    it for one that was left behind, and has removed it: make another one."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


def sweep(paths: Iterable[Path]) -> None:
    """Remove the files that this user's processes have left behind, and nothing that is no file."""
    for path in paths:
        _remove_unused(path, stat.S_ISREG, Path.unlink)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for the block, where the system wants such folders. Those that were left behind are removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}????????"):
        _remove_unused(path, stat.S_ISDIR, _remove_marked)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # where folders cannot be locked, they have no mark
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / MARK).touch()
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(path: Path, kind: Callable[[int], bool], remove: Callable[[Path], object]) -> None:
    """Remove what is of this kind and this user's, and of no process."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            if kind(found.st_mode) and found.st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
        finally:
            os.close(file)


def _remove_marked(folder: Path) -> None:
    if (folder / MARK).is_file():
        shutil.rmtree(folder)
