"""Host memory that a storage may want to know more of than its bytes: where it is, and by which name it is shared.

Most storages read and write any buffer. Some move bytes from memory that has to be registered (RDMA), or that another
process maps by name (the rings of 3FS): those are told of each region once, and may allocate it themselves.
"""

import ctypes
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvarve.errors import ConfigError
from kvarve.system.orphans import locked, sweep

SHARED = Path("/dev", "shm")  # POSIX shared memory of Linux
_PREFIX = "kvarve-"


@dataclass(frozen=True)
class HostRegion:
    """Writable memory that stays where it is. `name`: of its POSIX shared memory, without a slash; `numa`: the node
    that it is bound to, -1 for none."""

    memory: memoryview = field(repr=False)
    name: str | None = None
    numa: int = -1

    @property
    def address(self) -> int:
        return address(self.memory)

    @property
    def size_bytes(self) -> int:
        return self.memory.nbytes


def address(view: memoryview) -> int:
    """The address of memory that is not empty."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # a third of the time


def shared_region(size_bytes: int) -> HostRegion:
    """Memory of zeros that other processes of this user can map by its name, until the last view of it is gone.

    All of it is committed at once, since a system without memory would otherwise kill the process that writes it. The
    name of a process that was killed is removed by the next one. ConfigError: there is not so much shared memory.
    """
    sweep(SHARED.glob(f"{_PREFIX}*-????????????????"))
    path, file = _made()
    try:
        os.posix_fallocate(file, 0, size_bytes)
        memory = mmap.mmap(file, size_bytes)  # which keeps the file, and so the lock, open
    except (OSError, ValueError) as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"{SHARED} cannot hold {size_bytes} bytes more ({error}): enlarge it, or give less") from None
    finally:
        os.close(file)
    weakref.finalize(memory, _remove, path, os.getpid())
    return HostRegion(memoryview(memory), path.name)


def _made() -> tuple[Path, int]:
    """A new file, locked as long as it is in use."""
    while True:
        path = SHARED / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"no shared memory in {SHARED}: {error}") from None
        if locked(file):
            return path, file
        os.close(file)


def _remove(path: Path, maker: int) -> None:
    if os.getpid() == maker:  # not in a child after a fork
        path.unlink(missing_ok=True)
