"""The processes that have a model open: each has a number, and a file of that number which it locks, with its capacity.

The file also names the host and its boot while the process has the model open. If another host left its name and its
lock is not seen here, either the process has died, or locks do not reach from host to host (NFS mounted `nolock`), and
two processes would write to one slot.
"""

import re
from contextlib import suppress
from dataclasses import dataclass

from kvarve.storage.file.disk import Directory, Disk, NotOurs

PROCESSES = 1 << 12
_PROCESS = "process-"
_NAME = re.compile("process-(0|[1-9][0-9]{0,3})")
_HOST_BYTES = 64
# Always of one length, so that the next process can write it on a full disk.
_CONTENT_BYTES = 28 + 1 + len("host ") + _HOST_BYTES + len(" boot ") + 32 + 1
_CAPACITY = re.compile(rb"capacity ([1-9][0-9]{0,18}) *\n.*", re.DOTALL)
_HOST = re.compile(rb"[^\n]*\nhost ([!-~]{1,64}) boot ([0-9a-f]{32}) *\n")


@dataclass(frozen=True)
class Seen:
    """A process's file. `capacity_bytes`: None if it has none; `host`: empty if the process has closed the store."""

    locked: bool
    capacity_bytes: int | None
    host: str
    boot: str

    def is_elsewhere(self, disk: Disk) -> bool:
        """Whether another host has written it. A host that was started anew has its name and another boot; containers
        have names of their own and the boot of their host, whose locks they share."""
        return bool(self.host) and self.host != host(disk) and self.boot != disk.boot().hex()


def host(disk: Disk) -> str:
    """The name of this host, as it is written."""
    return re.sub("[^!-~]", "?", disk.host())[:_HOST_BYTES] or "?"


def process_name(number: int) -> str:
    return f"{_PROCESS}{number}"


def process_number(name: str) -> int | None:
    """The number in a name; None if no process's file can have it."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and int(match[1]) < PROCESSES else None


def processes(disk: Disk, folder: Directory) -> list[int]:
    """The numbers of all processes that have, or had, a model open. OSError: unknown."""
    found = (process_number(name) for name in disk.files(folder))
    return [number for number in found if number is not None]


def is_in_use(disk: Disk, folder: Directory) -> bool:
    """Whether some process has a model open."""
    return any(is_locked(disk, folder, number) for number in processes(disk, folder))


def is_locked(disk: Disk, folder: Directory, number: int) -> bool:
    """Whether the process of this number has a model open."""
    found = seen(disk, folder, number)
    return found is not None and found.locked


def seen(disk: Disk, folder: Directory, number: int) -> Seen | None:
    """What there is of a process of this number; None if there is no such file of kvarve."""
    try:
        with disk.reading(folder, process_name(number)) as file:
            free = disk.lock(file, wait=False, shared=True)  # else two inspections would take each other for users
            if free:
                disk.unlock(file)
            raw = disk.peek(file, _CONTENT_BYTES + 1, 0)
    except (FileNotFoundError, NotOurs):
        return None
    capacity, where = _CAPACITY.fullmatch(raw), _HOST.fullmatch(raw)
    return Seen(
        not free,
        int(capacity[1]) if capacity else None,
        where[1].decode() if where else "",
        where[2].decode() if where else "",
    )


def take(disk: Disk, file: int, capacity_bytes: int | None) -> bool:
    """Whether a process's file is ours now: then it has our capacity and host."""
    if not disk.lock(file, wait=False):
        return False
    capacity = b"visiting" if capacity_bytes is None else b"capacity %d" % capacity_bytes
    where = f"host {host(disk)} boot {disk.boot().hex()}".encode()
    content = capacity.ljust(28) + b"\n" + where
    try:
        disk.write(file, [content.ljust(_CONTENT_BYTES - 1) + b"\n"], 0)
        disk.resize(file, _CONTENT_BYTES)
    except OSError:
        if capacity_bytes is not None:  # another capacity might be there
            raise
    return True


def leave(disk: Disk, file: int) -> None:
    """The process ends or closes the store: nothing is left of it on any host."""
    with suppress(OSError):  # then a person has to tell another host that this process has ended
        disk.write(file, [b"\n".rjust(_CONTENT_BYTES - 28)], 28)
