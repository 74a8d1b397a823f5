"""What a process makes where all processes do (shared memory, temporary folders), and leaves there if it is killed.

Each file or folder is locked as long as it is in use, and a lock ends with its process. So what is not locked was left
behind, and the next process that makes one like it removes it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def locked(file: int) -> bool:
    """Lock a file or folder that this process has just made, until the descriptor is closed. False if another process
    has taken it for one that was left behind, and has removed it: make another one."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


def sweep(paths: Iterable[Path]) -> None:
    """Remove those that this user's processes have left behind."""
    for path in paths:
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_uid == os.geteuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(file)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for the block, where the system wants such folders. Those with this prefix that are not in use are
    removed."""
    sweep(Path(tempfile.gettempdir()).glob(f"{prefix}????????"))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process has swept it
            continue
        try:
            if locked(lock):
                yield folder
                return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
