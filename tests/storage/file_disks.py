"""For tests of the file store: disks that fail or move their clock when told, and concurrent calls. No tests here."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disks import WithoutSync
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file._table import Shape
from kvarve.storage.file.disk import Directory
from kvarve.testing.suite import LABEL

MIB = 1 << 20
# A folder's small files are below this; a slab of one slot of 4 KiB is two blocks.
SMALL_FILES = 8192
ONE = Shape(4096, 1).bytes

Open = Callable[..., FileStorage]


class Clockwork(WithoutSync):
    """Clocks that a test moves: `elapse` moves all of them, `set_wall` sets the wall clock only."""

    def __init__(self) -> None:
        self.wall, self.up, self.machine = 1_700_000_000_000_000_000, 10**12, b"first boot......"

    def elapse(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)
        self.up += int(seconds * 1e9)

    def set_wall(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)

    def reboot(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)
        self.up, self.machine = 10**9, os.urandom(16)

    def wall_ns(self) -> int:
        return self.wall

    def since_boot_ns(self) -> int:
        self.up += 1
        return self.up

    def boot(self) -> bytes:
        return self.machine


def quietly(call: str, name: str, at: int) -> None:
    """Nothing happens."""


class Rigged(WithoutSync):
    """Before each of the calls below it asks `happens(call, the file's name, where)`, which may raise."""

    happens: Callable[[str, str, int], object] = staticmethod(quietly)

    def once(
        self, do: Callable[[], object], call: str, name: str = "", *, skip: int = 0, at: range | None = None
    ) -> None:
        """At the next such call but `skip`, of a file whose name ends so, at one of these places: do this first."""
        left = skip

        def happens(this: str, that: str, where: int) -> None:
            nonlocal left
            if this == call and that.endswith(name) and (at is None or where in at):
                left -= 1
                if left < 0:
                    self.happens = quietly
                    do()

        self.happens = happens

    def fail(self, error: BaseException, call: str, name: str = "", *, skip: int = 0, at: range | None = None) -> None:
        """The same: it raises this."""
        self.once(lambda: throw(error), call, name, skip=skip, at=at)

    def refuse(self, number: int, *calls: str, name: str = "", at: range | None = None) -> None:
        """Until `happens` is set again, all such calls of such files fail with this errno."""

        def happens(call: str, that: str, where: int) -> None:
            if call in calls and that.endswith(name) and (at is None or where in at):
                raise trouble(number)

        self.happens = happens


def _rigged(call: str, at: int) -> Callable[..., Any]:
    """A call of a file; `at`: which of its arguments says where."""

    def rigged(disk: Rigged, *args: Any, **how: Any) -> Any:
        name = file_name(args[0]) if isinstance(args[0], int) else args[1]
        disk.happens(call, name, args[at] if len(args) > at else 0)
        return getattr(WithoutSync, call)(disk, *args, **how)

    return rigged


# Which of their arguments says where, if one does.
CALLS = {"peek": 2, "read": 2, "write": 2, "allocate": 1, "resize": 1, "lock_range": 1}
CALLS |= dict.fromkeys(("open", "sync", "unlink", "lock", "rename", "make_folder"), 9)
for _call, _at in CALLS.items():
    setattr(Rigged, _call, _rigged(_call, _at))


class RiggedClockwork(Clockwork, Rigged):
    """Both."""


class Untouched(WithoutSync):
    """Nothing is written, made, locked or removed through it, nor opened to be written."""

    def open(self, folder: Directory, name: str, **how: bool) -> int:
        assert how.get("read_only"), f"{name} is opened to be written"
        return super().open(folder, name, **how)

    def write(self, *_: Any) -> int:
        raise AssertionError("a write")

    sync = allocate = resize = make_root = make_folder = rename = unlink = truncate = lock_range = write  # type: ignore[assignment]

    def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
        assert shared, "a lock against others"
        return super().lock(file, wait=wait, shared=shared)


def throw(error: BaseException) -> None:
    raise error


def trouble(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


class Calls:
    """Calls on threads of their own; the answer or exception of each."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, do: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.answers[name] = do()
            except StorageError as error:
                self.answers[name] = error

        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def join(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.answers


def model_of(folder: Path, label: bytes = LABEL) -> Path:
    return folder / "models" / label.hex()[:16]


def table_path(slab: Path) -> Path:
    return slab.with_name(slab.name + ".table")


def file_name(file: int) -> str:
    return Path(f"/proc/self/fd/{file}").readlink().name


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def everything(*places: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """All files and folders below some paths: kind, time of change, number of names, content."""
    found = {}
    for place in places:
        below = [Path(at, name) for at, folders, files in os.walk(place) for name in folders + files]
        for path in (place, *below):
            it = path.lstat()
            holds = bytes(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            found[str(path)] = (it.st_mode, it.st_mtime_ns, it.st_nlink if path.is_file() else 0, holds)
    return found
