"""The folder of a file store: whose it is, who has it open, how much lies in it. Nothing here knows what is in a slab.

kvarve.json                     the format; written before anything else
kvarve.lock                     the mutex of all processes that have the folder open
models/<16 hex of the label>/   one model's objects
    model.json                  the whole label, and what it means to people
    process-3                   locked by the process of that number for as long as it has the model open
    changes                     what changed in which slab, for the other processes; means nothing after a crash
    clock                       the age of the store
    slab-000007                 objects
    slab-000007.table           what lies where in it
"""

import errno
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import check_owner, check_settings
from kvarve.storage.disk import NOT_OURS, Disk

FORMAT = "kvarve-slabs/2"
MUTEX_S = 20.0  # how long a process waits for another one that changes a table, which takes that one milliseconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.005  # between two looks at whether it has
_OLD_FORMATS = ("kvarve-files/1", "kvarve-slabs/1")  # a file for each page; a table inside of each slab
_MARKER, _LOCK, _MODELS, _MODEL = "kvarve.json", "kvarve.lock", "models", "model.json"
_UNFINISHED = "~"
_NOT_FOR_US_TO_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)
_SLAB, _PROCESS = "slab-", "process-"
TABLE = ".table"
# What an opening that was cut short leaves, and what every fresh ext4 disk has: a folder with these only is empty.
_NOT_CONTENT = frozenset({_LOCK, _MARKER + _UNFINISHED, NOT_OURS})
PROCESSES = 1 << 12


@contextmanager
def medium(directory: Path) -> Iterator[None]:
    """Trouble of the disk is trouble of the storage."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{directory}: {error}") from error


def check_folder(directory: str | os.PathLike[str], capacity_bytes: int, label: bytes, description: str) -> Path:
    """Raise what opening would raise, and touch nothing; answer the folder's path.

    ConfigError: settings that cannot work anywhere. StorageError: what the folder is or holds.
    """
    check_settings(capacity_bytes, label)
    path = Path(directory)
    if not path.is_absolute() or "\0" in str(path):
        raise ConfigError(
            f"{str(path)!r} is not an absolute path: a storage folder is named from the root, as /var/kvarve"
        )
    with medium(path):
        nearest = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
        if not nearest.is_dir():
            raise StorageError(f"{path}: {nearest} is not a folder")
        if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise StorageError(f"{path}: no permission to read and write {nearest}")
        if nearest == path:
            _check_contents(path)
            check_model(model_folder(path, label), label, description)
    return path


def _check_contents(directory: Path) -> None:
    marker = directory / _MARKER
    if not marker.exists():
        if any(child.name not in _NOT_CONTENT for child in directory.iterdir()):
            raise StorageError(
                f"{directory} is not empty and not a kvarve storage folder: give another or an empty one"
            )
        return
    version = _read_json(marker, "format")["format"]
    if version in _OLD_FORMATS:
        raise StorageError(
            f"{directory} holds pages of an earlier version of kvarve ({version!r}), which this one "
            f"({FORMAT!r}) does not read: empty this folder or give another one"
        )
    if version != FORMAT:
        raise StorageError(
            f"{directory} is in format {version!r}, this version of kvarve reads {FORMAT!r}: "
            f"give another folder or empty this one"
        )


def is_store(directory: Path) -> bool:
    """Whether a folder has been opened as a store before."""
    return (directory / _MARKER).exists()


def check_model(folder: Path, label: bytes, description: str) -> None:
    """Raise StorageError if the folder of this model belongs to another one, whose label begins alike."""
    if (folder / _MODEL).exists():
        check_owner(str(folder), owner_of_model(folder), (label, description))


def owner_of_model(folder: Path) -> tuple[bytes, str]:
    """The label and the description of a model's folder; StorageError if it does not tell."""
    content = _read_json(folder / _MODEL, "label", "description")
    return bytes.fromhex(content["label"]), content["description"]


def _read_json(path: Path, *keys: str) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
        found = {key: content[key] for key in keys}
        for key, value in found.items():
            if not isinstance(value, str):
                raise ValueError(f"{key} is no text")
        bytes.fromhex(found.get("label", ""))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}): empty its folder or give another one") from error
    return found


def model_folder(directory: Path, label: bytes) -> Path:
    return directory / _MODELS / label.hex()[:16]


def model_folders(directory: Path) -> list[Path]:
    """The folders of all models that have left their name."""
    models = directory / _MODELS
    return sorted(path for path in models.iterdir() if (path / _MODEL).exists()) if models.is_dir() else []


def slab_path(folder: Path, number: int) -> Path:
    return folder / f"{_SLAB}{number:06}"


def slab_numbers(disk: Disk, folder: Path) -> dict[int, bool]:
    """The numbers of a model's slabs, and whether each has a table: slots without one are what a crash left."""
    found: dict[int, bool] = {}
    for path in disk.sizes(folder):
        number = path.name.removeprefix(_SLAB).removesuffix(TABLE)
        if path.parent == folder and path.name.startswith(_SLAB) and number.isdigit():
            found[int(number)] = found.get(int(number), False) or path.name.endswith(TABLE)
    return found


class Folder:
    """An open folder with one open model. Whoever changes what others may see holds the `mutex` meanwhile."""

    def __init__(self, disk: Disk, directory: Path, label: bytes, description: str) -> None:
        self.disk, self.directory = disk, directory
        self.model = model_folder(directory, label)
        self._label, self._description = label, description
        self._files: list[int] = []
        disk.make_folder(directory)
        self._mutex = self._opened(directory / _LOCK)
        self.number = -1

    def enter(self) -> None:
        """Become one of the processes that have the model open; with the mutex held."""
        marker = self.directory / _MARKER
        if not marker.exists():
            self._write_json(marker, {"format": FORMAT})
        if not (self.model / _MODEL).exists():
            self.disk.make_folder(self.model)
            self.disk.sync_folder(self.model.parent)
            self.disk.sync_folder(self.directory)
            self._write_json(self.model / _MODEL, {"label": self._label.hex(), "description": self._description})
        self.number = next(number for number in range(PROCESSES) if self._take(number))

    def _take(self, number: int) -> bool:
        file = self._opened(self.model / f"{_PROCESS}{number}")
        if self.disk.lock(file, wait=False):
            return True
        self._files.remove(file)
        self.disk.close(file)
        return False

    def open(self, name: str) -> int:
        """A file of the model's own, made when missing."""
        return self._opened(self.model / name)

    def _opened(self, path: Path) -> int:
        try:
            file = self.disk.open(path)
        except FileNotFoundError:
            try:
                file = self.disk.open(path, create=True)
            except FileExistsError:
                file = self.disk.open(path)
        except OSError as error:
            if error.errno not in _NOT_FOR_US_TO_WRITE:
                raise
            file = self.disk.open(path, read_only=True)
        self._files.append(file)
        return file

    def _write_json(self, path: Path, content: dict[str, str]) -> None:
        """Whole or not at all, and for good: without these a folder full of pages would be refused."""
        unfinished = path.with_name(path.name + _UNFINISHED)
        with suppress(FileNotFoundError):
            self.disk.unlink(unfinished)
        file = self.disk.open(unfinished, create=True)
        try:
            self.disk.write(file, [(json.dumps(content, indent=1) + "\n").encode()], 0)
            self.disk.sync(file)
        finally:
            self.disk.close(file)
        self.disk.rename(unfinished, path)
        self.disk.sync_folder(path.parent)

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Alone among all processes, for as long as it takes to change a table.

        StorageError when another one does not let go of it: it may have been stopped in the middle.
        """
        end, pause_s = time.monotonic() + MUTEX_S, FIRST_PAUSE_S
        try:
            while not self.disk.lock(self._mutex, wait=False):
                if time.monotonic() > end:
                    raise StorageError(
                        f"{self.directory}: another process has held its lock for {MUTEX_S:g} s: is it stopped?"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            yield
        finally:
            self.disk.unlock(self._mutex)

    def is_alive(self, number: int) -> bool:
        """Whether a process of this number has the model open. With the mutex held."""
        return number == self.number or _is_locked(self.disk, self.model / f"{_PROCESS}{number}")

    def alone(self) -> bool:
        """Whether no other process has the model open. With the mutex held."""
        return not any(self.is_alive(number) for number in processes(self.model) if number != self.number)

    # --- room

    def bytes(self) -> int:
        """How much lies in the folder, of all models."""
        return sum(self.disk.sizes(self.directory).values())

    def remove_remains(self) -> int:
        """Remove what is left of models whose removal was cut short; of how many. With the mutex held."""
        models, count = self.directory / _MODELS, 0
        for folder in models.iterdir() if models.is_dir() else ():
            if folder.is_dir() and not (folder / _MODEL).exists() and not is_in_use(self.disk, folder):
                remove_model(self.disk, folder)
                count += 1
        return count

    def remove_unused(self) -> bool:
        """Remove what another model keeps here that nobody has open, the longest unused first; False if there is none.

        With the mutex held.
        """
        models = self.directory / _MODELS
        unused = [
            folder
            for folder in models.iterdir()
            if folder.is_dir() and folder != self.model and not is_in_use(self.disk, folder)
        ]
        for folder in sorted(unused, key=last_open):
            remove_model(self.disk, folder)
            return True
        return False

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):
                self.disk.unlock(file)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the files alone: the locks are those of the process that this one was forked from."""
        while self._files:
            self.disk.close(self._files.pop())


def processes(folder: Path) -> list[int]:
    """The numbers of all that have, or had, a model open. OSError, which `Path.glob` may hide: nobody can say."""
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = [path.name.removeprefix(_PROCESS) for path in folder.iterdir() if path.name.startswith(_PROCESS)]
    return [int(name) for name in names if name.isdigit()]


def is_in_use(disk: Disk, folder: Path) -> bool:
    """Whether some process has a model open."""
    return any(_is_locked(disk, folder / f"{_PROCESS}{number}") for number in processes(folder))


def _is_locked(disk: Disk, path: Path) -> bool:
    try:
        file = disk.open(path, read_only=True)
    except FileNotFoundError:
        return False
    try:
        free = disk.lock(file, wait=False, shared=True)  # who looks at the same time is nobody who has it open
        if free:
            disk.unlock(file)
        return not free
    finally:
        disk.close(file)


def last_open(folder: Path) -> int:
    """When the clock of a model was last written, which is while it is open; what a removal left is older than all."""
    if not (folder / _MODEL).exists():
        return -1
    try:
        return (folder / "clock").stat().st_mtime_ns
    except OSError:
        return 0


def remove_model(disk: Disk, folder: Path) -> None:
    """Remove a model that nobody has open; its name goes first, so that what a crash leaves is nobody's."""
    files = disk.sizes(folder)
    for path in sorted(files, key=lambda path: path.name != _MODEL):
        disk.unlink(path)
    disk.remove_folder(folder)
    disk.sync_folder(folder.parent)


_PAIR = struct.Struct("<16sqqqI")


@dataclass
class Clock:
    """The age of a store, in ns. It goes on evenly while the store is open, whatever somebody sets the wall clock to.

    What was (boot, time since boot, wall time, store time) together is kept with the store. Within one boot of the
    machine the time since boot alone counts, so all processes agree; after another one the wall clock says for how long
    the store was closed, and if that has gone back, no time has passed. It never goes back.
    """

    disk: Disk
    file: int
    _boot: bytes = b""
    _behind_ns: int = 0  # store time at boot

    def __post_init__(self) -> None:
        self._boot = self.disk.boot()
        since_boot, wall = self.disk.since_boot_ns(), self.disk.wall_ns()
        raw = self.disk.peek(self.file, _PAIR.size, 0)
        now = wall
        if len(raw) == _PAIR.size and zlib.crc32(raw[:-4]) == int.from_bytes(raw[-4:], "little"):
            boot, then_since_boot, then_wall, then, _ = _PAIR.unpack(raw)
            same = boot == self._boot and since_boot >= then_since_boot
            now = then + (since_boot - then_since_boot if same else max(0, wall - then_wall))
        self._behind_ns = now - since_boot

    def now_ns(self) -> int:
        return self._behind_ns + self.disk.since_boot_ns()

    def at_least(self, time_ns: int) -> None:
        """Something in the store is from then: the pair was lost, or is older."""
        self._behind_ns += max(0, time_ns - self.now_ns())

    def save(self) -> None:
        since_boot = self.disk.since_boot_ns()
        plain = _PAIR.pack(self._boot, since_boot, self.disk.wall_ns(), self._behind_ns + since_boot, 0)[:-4]
        self.disk.write(self.file, [plain + zlib.crc32(plain).to_bytes(4, "little")], 0)
