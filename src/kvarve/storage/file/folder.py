"""The folder of a file store: its owner, the processes that have it open, its size. Knows no slab's contents.

kvarve.json                     the format; written before anything else. The tables' headers say it too
kvarve.lock                     the mutex of all processes that have the folder open
models/<16 hex of the label>/   one model's objects
    model.json                  the whole label, and what it means to people
    process-3                   locked by that process while it has the model open; has its capacity and host
    changes                     what changed in which slab, for the other processes; means nothing after a crash
    clock                       the age of the store
    slab-000007                 objects
    slab-000007.table           which object each slot holds

Entries with another name, or not ours by `disk.objection`, are left alone and not counted. A model is a folder of such
a name with a `model.json` whose label begins with it, and is that of its slabs. Any other one of such a name that has
slabs is a damaged model: it counts, and inspection and a warning say that it is there.
"""

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvarve.errors import ConfigError, StorageError
from kvarve.pages.sizes import format_size
from kvarve.storage.base import LABEL_MAX_BYTES, Damaged, check_owner, check_settings
from kvarve.storage.file._clock import CLOCK
from kvarve.storage.file._processes import (
    PROCESSES,
    Seen,
    is_locked,
    leave,
    process_name,
    process_number,
    processes,
    seen,
    take,
)
from kvarve.storage.file._table import ENTRY_BYTES, FORMAT, SLAB_BYTES, Header, owner_of, read_header
from kvarve.storage.file.disk import BROKEN_MEDIUM, UNREADABLE, Directory, Disk, NotOurs, move_all, objection
from kvarve.storage.file.marker import MARKER, MARKER_BYTES, problem_in, written

log = logging.getLogger(__name__)

MUTEX_S = 20.0  # how long a process waits for the mutex, which is held for milliseconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.005  # between two tries
_LOCK, _MODELS, _MODEL = "kvarve.lock", "models", "model.json"
CHANGES = "changes"
_UNFINISHED = "~"
TABLE = ".table"
_JSON_MAX_BYTES = MARKER_BYTES  # of one JSON file
_RESERVE_BYTES, _RESERVE_SHARE = 256 << 20, 100  # of the disk, left free for other programs
SLABS = (1 << 15) - 1  # numbers of slabs are below this
LINE_BYTES = 128  # per slab, in the file of changes
_SMALL_BYTES = (SLABS + 1) * LINE_BYTES

# Left by an opening that was cut short, or on every fresh ext4 disk: a folder with only these counts as empty.
_NOT_CONTENT = frozenset({_LOCK, MARKER + _UNFINISHED, "lost+found"})
_ROOT_FILES = frozenset({MARKER, MARKER + _UNFINISHED, _LOCK})
_MODEL_FILES = frozenset({_MODEL, _MODEL + _UNFINISHED, CHANGES, CLOCK})
_MODEL_NAME = re.compile("(?:[0-9a-f]{2}){1,8}")
_SLAB_NAME = re.compile(r"slab-([0-9]{6})(\.table)?")


@dataclass(frozen=True)
class Wanted:
    """A folder, and the model and settings with which it is to be opened. `capacity_bytes`: None if any is fine.
    `shared`: locks are known to reach all processes. `read_only`: to be read alone."""

    directory: Path
    capacity_bytes: int | None
    label: bytes
    description: str
    shared: bool = False
    read_only: bool = False

    def to_read(self) -> "Wanted":
        """The same, to be read alone: as any folder is whose file system takes no writes."""
        return replace(self, capacity_bytes=None, shared=True, read_only=True)


@dataclass(frozen=True)
class Known:
    """A model found in a store. `name`: of its folder."""

    name: str
    label: bytes
    description: str


class ReadOnly(StorageError):
    """The file system takes no writes, as it is mounted so, or became so after an error."""


class Medium:
    """Raises StorageError for any OSError in its context; cheaper than a generator, as lookups have microseconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotOurs):  # its text has the path
            raise StorageError(str(error)) from error
        if isinstance(error, OSError):
            kind = ReadOnly if error.errno == errno.EROFS else Damaged if error.errno in BROKEN_MEDIUM else StorageError
            raise kind(f"{self._directory}: {error}") from error


# --- names


def slab_name(number: int) -> str:
    return f"slab-{number:06}"


def slab_file(name: str) -> tuple[int, bool] | None:
    """The number in a name, and whether it is a table's; None if no slab's file can have it."""
    match = _SLAB_NAME.fullmatch(name)
    return (int(match[1]), match[2] is not None) if match and int(match[1]) < SLABS else None


def model_name(label: bytes) -> str:
    return label.hex()[:16]


def files_of_model(disk: Disk, folder: Directory) -> dict[str, os.stat_result]:
    """Our files in a model's folder. A file longer than any that we make is not ours."""
    found = {}
    for name, it in disk.files(folder).items():
        small = name in _MODEL_FILES or process_number(name) is not None
        if it.st_size <= (_SMALL_BYTES if small else SLAB_BYTES if slab_file(name) else -1):
            found[name] = it
    return found


def bytes_of_model(disk: Disk, folder: Directory) -> int:
    return sum(it.st_size for it in files_of_model(disk, folder).values())


def bytes_of_damaged(disk: Disk, models: Directory, names: Iterable[str]) -> int:
    """The size of models that cannot be identified, as far as their folders can be read."""
    total = 0
    for name in names:
        with suppress(OSError), disk.closing(disk.enter_below(models, name)) as folder:
            total += bytes_of_model(disk, folder)
    return total


def root_bytes(disk: Disk, root: Directory) -> int:
    """The total size of our files that belong to no model. A file longer than any that we make is not ours."""
    sizes = (found.st_size for name, found in disk.files(root).items() if name in _ROOT_FILES)
    return sum(size for size in sizes if size <= _JSON_MAX_BYTES)


def slab_numbers(disk: Disk, folder: Directory) -> dict[int, bool]:
    """The numbers of a model's slabs, and whether each has a table: slots without one were left by a crash."""
    found: dict[int, bool] = {}
    for name in disk.entries(folder):  # also those not ours: their numbers are taken
        file = slab_file(name)
        if file is not None:
            found[file[0]] = found.get(file[0], False) or file[1]
    return found


# --- checks


def check_folder(wanted: Wanted, disk: Disk | None = None) -> None:
    """Raise what opening would raise, and touch nothing.

    ConfigError: settings that cannot work anywhere. StorageError: the folder cannot be used, holds something else, or
    is open with another capacity.
    """
    disk, path = disk or Disk(), checked_path(wanted.directory)
    check_settings(1 if wanted.capacity_bytes is None else wanted.capacity_bytes, wanted.label)
    with Medium(path), ExitStack() as closing:
        nearest = nearest_place(path)
        root = closing.enter_context(disk.closing(disk.enter(path))) if nearest == path else None
        if wanted.read_only or disk.is_read_only(nearest) or (root is not None and _takes_no_writes(disk, root)):
            wanted = wanted.to_read()
        nearest_folder(path, read_only=wanted.read_only, hint=" (give read_only=yes to read alone what is there)")
        if root is not None:
            check_contents(disk, root, wanted)
        elif wanted.read_only:
            raise StorageError(f"{path}: no such folder, and none can be made to be read alone")


def nearest_place(path: Path) -> Path:
    """The path, or the folder nearest above it that is there. OSError: that cannot be told, as of a dead mount."""
    for place in (path, *path.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            place.lstat()
            if place != path and not place.is_dir():
                raise StorageError(f"{path}: {place} is not a folder")
            return place
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def nearest_folder(path: Path, *, read_only: bool = False, hint: str = "") -> Path:
    """The same, in which this process can open or make the folder. StorageError: it may not."""
    nearest = nearest_place(path)
    if not os.access(nearest, os.R_OK | os.X_OK | (0 if read_only else os.W_OK)):
        what = "read" if read_only else f"read and write{hint}"
        raise StorageError(f"{path}: no permission to {what} {nearest}")
    return nearest


def _takes_no_writes(disk: Disk, root: Directory) -> bool:
    """Whether the file system refuses writes to a store, also where it does not say that it is mounted so."""
    try:
        disk.close(disk.open(root, _LOCK))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def checked_path(directory: str | os.PathLike[str]) -> Path:
    """ConfigError: not an absolute path."""
    path = Path(directory)
    if not path.is_absolute() or "\0" in str(path):
        raise ConfigError(f"a storage folder must be an absolute path, as /var/kvarve, got {str(path)!r}")
    return path


def check_contents(disk: Disk, root: Directory, wanted: Wanted) -> None:
    """StorageError unless a folder is empty, or a store of this format in which this model can be opened."""
    there = disk.entries(root)
    if not there.keys() - _NOT_CONTENT:
        return
    problem_of_marker(disk, root)
    if _MODELS not in there:
        return
    with disk.closing(disk.enter_below(root, _MODELS)) as models:
        if (name := model_name(wanted.label)) in disk.entries(models):
            with (
                disk.closing(disk.enter_below(models, name)) as folder,
                suppress(FileNotFoundError, Damaged),  # then `Folder.enter` writes model.json anew
            ):
                check_owner(str(folder.path), _owner_of(disk, folder), (wanted.label, wanted.description))
        _check_processes(disk, models, wanted)


def problem_of_marker(disk: Disk, root: Directory) -> str:
    """What is wrong with the file that says the format of a folder that is not empty, if its tables say that it is of
    this format; "" if nothing is. StorageError: a folder of another format, or of something else. Damaged: neither the
    file nor any table can be read."""
    return problem_in(
        root.path,
        lambda: small_file(disk, root, MARKER),
        FORMAT,
        kind="kvarve storage folder",
        otherwise=lambda: _has_tables(disk, root),
    )


def _has_tables(disk: Disk, root: Directory) -> bool:
    """Whether a slab of any model has a table of this format."""
    with suppress(FileNotFoundError, NotOurs), disk.closing(disk.enter_below(root, _MODELS)) as models:
        for name in filter(_MODEL_NAME.fullmatch, disk.entries(models)):
            with suppress(OSError), disk.closing(disk.enter_below(models, name)) as folder:
                if next(owners_in(disk, folder), None) is not None:
                    return True
    return False


def headers(disk: Disk, table: int) -> Iterator[Header]:
    """Those of the two headers of a table that are intact."""
    places = (0, max(0, disk.size(table) - ENTRY_BYTES))
    return filter(None, (read_header(disk.peek(table, ENTRY_BYTES, at)) for at in places))


def owners_in(disk: Disk, folder: Directory) -> Iterator[int]:
    """The ids of models in the headers of tables, of each table that has an intact one."""
    for name in disk.files(folder):
        if name.endswith(TABLE) and slab_file(name):
            with suppress(OSError):
                with disk.reading(folder, name) as file:
                    found = next(headers(disk, file), None)
                if found is not None:
                    yield found.owner


def _check_processes(disk: Disk, models: Directory, wanted: Wanted) -> None:
    """StorageError if a process has another capacity: the smaller of two would evict what the other one stores; or if
    locks may not reach all processes."""
    capacity_bytes = wanted.capacity_bytes
    for folder, number, found in users(disk, models):
        theirs_bytes = found.capacity_bytes
        if found.locked and capacity_bytes and theirs_bytes and theirs_bytes != capacity_bytes:
            raise StorageError(
                f"{models.path.parent} is open with a capacity of {format_size(theirs_bytes)} "
                f"({theirs_bytes} bytes), not {format_size(capacity_bytes)} ({capacity_bytes} bytes): "
                f"give the same, or first end or detach the processes that have it open"
            )
        if not found.locked and not wanted.shared and found.is_elsewhere(disk) and not disk.is_local(folder):
            raise StorageError(
                f"{folder.path / process_name(number)}: a process on host {found.host!r} has this folder open, "
                f"or ended without closing it, and its lock is not seen here: if that host is down, remove "
                f"this file; if locks reach all hosts (NFS without nolock or local_lock), give shared=yes"
            )


def users(disk: Disk, models: Directory) -> Iterator[tuple[Directory, int, Seen]]:
    """The processes that have, or had, a model open: its folder, and the process's number in it."""
    for model in known_models(disk, models)[0]:
        with disk.closing(disk.enter_below(models, model.name)) as folder:
            for number in processes(disk, folder):
                if (found := seen(disk, folder, number)) is not None:
                    yield folder, number, found


def known_models(disk: Disk, models: Directory) -> tuple[list[Known], dict[str, str]]:
    """The models of a store; and the problem of each model's folder that cannot be identified, by name."""
    found, damaged = [], {}
    for name, it in sorted(disk.entries(models).items()):
        if not _MODEL_NAME.fullmatch(name):
            continue
        if why := objection(it, models.owner, folder=True):
            damaged[name] = f"{models.path / name} {why}"
            continue
        try:
            with disk.closing(disk.enter_below(models, name)) as folder:
                found.append(Known(name, *_owner_of(disk, folder)))
        except FileNotFoundError:  # a model that is being made or removed
            continue
        except (Damaged, NotOurs) as error:
            damaged[name] = str(error)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            damaged[name] = f"{models.path / name} cannot be read ({error.strerror}): repair or remove this folder"
    return found, damaged


def _owner_of(disk: Disk, folder: Directory) -> tuple[bytes, str]:
    """The label and the description of a model. FileNotFoundError: this folder has no model.json, and no slab."""
    path, what_to_do = folder.path / _MODEL, "the next process to open its model writes it anew; or remove its folder"
    try:
        raw = small_file(disk, folder, _MODEL)
        if len(raw) > _JSON_MAX_BYTES:
            raise ValueError(f"more than {_JSON_MAX_BYTES} bytes")
        content = json.loads(raw)
        written_label, description = (content[key] for key in ("label", "description"))
        for key, value in (("label", written_label), ("description", description)):
            if not isinstance(value, str):
                raise ValueError(f"{key} is no text")
        label = bytes.fromhex(written_label)
    except FileNotFoundError:
        if slab_numbers(disk, folder):
            raise Damaged(f"{path} is missing, and there are slabs: {what_to_do}") from None
        raise
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise Damaged(f"{path} cannot be read ({error.strerror}): {what_to_do}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}): {what_to_do}") from error
    if model_name(label) != folder.path.name or len(label) > LABEL_MAX_BYTES:
        raise Damaged(f"{path} is damaged (its label is that of another folder): {what_to_do}")
    owner, owners = owner_of(label), owners_in(disk, folder)
    if next(owners, owner) != owner and owner not in owners:
        raise Damaged(f"{path} is damaged (its label is not that of its slabs): {what_to_do}")
    return label, "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in description)


def small_file(disk: Disk, folder: Directory, name: str) -> bytes:
    """A small file; of a larger one, one byte more than the limit."""
    with disk.reading(folder, name) as file:
        return disk.peek(file, _JSON_MAX_BYTES + 1, 0)


def write_new(disk: Disk, folder: Directory, name: str, content: bytes) -> None:
    """Make a small file; its bytes are on the medium then, its name may not be. OSError, such as FileExistsError."""
    file = disk.open(folder, name, create=True)
    try:
        if move_all(disk.write, file, [memoryview(content)], 0) < len(content):
            raise OSError(errno.EIO, f"{folder.path / name} was not written whole")
        disk.sync(file)
    finally:
        disk.close(file)


def tries(directory: Path) -> Iterator[None]:
    """Try something again that another process keeps this one from. StorageError after `MUTEX_S`."""
    end, pause_s = time.monotonic() + MUTEX_S, FIRST_PAUSE_S
    yield
    while time.monotonic() <= end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        yield
    raise StorageError(f"{directory}: another process has held its lock for {MUTEX_S:g} s: is it stopped?")


@contextmanager
def opened_read_only(disk: Disk, path: Path) -> Iterator[tuple[Directory, Directory | None]]:
    """The folder of a store, and that of its models if there are any, for inspection: nothing in it is made, locked or
    changed, and it may be another user's. StorageError: it holds no store of this format."""
    with Medium(path), ExitStack() as closing:
        if not os.path.lexists(path):
            raise StorageError(f"{path}: no such folder")
        root = closing.enter_context(disk.closing(disk.enter(path, for_maintenance=True)))
        there = disk.entries(root).keys()
        if not there - _NOT_CONTENT:
            raise StorageError(f"{path}: there is no kvarve storage in it")
        problem_of_marker(disk, root)
        if _MODELS not in there:
            yield root, None
        else:
            yield root, closing.enter_context(disk.closing(disk.enter_below(root, _MODELS)))


def spare_bytes(disk: Disk, folder: Directory) -> int:
    """How much more of the disk may be used: a hundredth of it, at least 256 MiB, stays free for other programs.
    Negative: that reserve is already in use."""
    free_bytes, disk_bytes = disk.space(folder)
    return free_bytes - max(_RESERVE_BYTES, disk_bytes // _RESERVE_SHARE)


# --- removing


def remove_model(disk: Disk, models: Directory, name: str, why: str) -> None:
    """Remove our files of a model that no process has open, with the mutex held. model.json goes last: until then it is
    a model with fewer objects."""
    with disk.closing(disk.enter_below(models, name)) as folder:
        files = files_of_model(disk, folder)
        for each in sorted(files, key=lambda each: (each == _MODEL, not each.endswith(TABLE), each)):
            disk.unlink(folder, each)
    log.warning("%s: removed with all that is ours in it: %s", models.path / name, why)
    try:
        disk.remove_folder(models, name)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        log.warning("%s: the folder stays, as it holds files that are not of this store", models.path / name)
    disk.sync_folder(models)


# --- an open folder


class Folder:
    """An open folder with one open model. Changes that other processes can see are made with the `mutex` held.

    `make`: create the folder if it is missing. If it is `wanted.read_only`, nothing in it is made, locked or changed;
    `for_inspection`: and it may be another user's, and what cannot be opened counts as missing.
    """

    models: Directory
    model: Directory

    def __init__(self, disk: Disk, wanted: Wanted, *, make: bool = True, for_inspection: bool = False) -> None:
        self.disk, self.wanted, self._for_inspection = disk, wanted, for_inspection
        self.directory, self.read_only = wanted.directory, wanted.read_only
        self._files: list[int] = []
        self._warned: set[str] = set()  # names of damaged models, logged once
        self._place: tuple[str, tuple[int, int] | None]  # what shows that it is in its place, None: it is not there yet
        self.number = -1
        self._unchanged = False  # it is only read, and had no file of changes
        try:
            if make:
                disk.make_root(self.directory)
            self.root = disk.enter(self.directory, for_maintenance=for_inspection)
            self._files.append(self.root.file)
            if not self.read_only:
                self._mutex = self._opened(self.root, _LOCK)
        except BaseException:  # also on an interrupt
            self.abandon()
            raise

    def enter(self) -> None:
        """Open the model for this process; with the mutex held, after `check_contents`."""
        empty = not self.disk.entries(self.root).keys() - _NOT_CONTENT
        if empty or (problem := problem_of_marker(self.disk, self.root)):
            if not empty:
                log.warning("%s: it is written anew", problem)
            self._write(self.root, MARKER, written(FORMAT))
        self.models = self._entered(self.root, _MODELS)
        self.model = self._entered(self.models, model_name(self.wanted.label))
        try:
            _owner_of(self.disk, self.model)
        except (FileNotFoundError, Damaged) as error:
            if isinstance(error, Damaged):
                log.warning("%s; now it is", error)
            content = {"label": self.wanted.label.hex(), "description": self.wanted.description}
            self._write(self.model, _MODEL, (json.dumps(content, indent=1) + "\n").encode())
        self.number = next(filter(self._take, range(PROCESSES)), -1)
        if self.number < 0:
            raise StorageError(f"{self.model.path}: {PROCESSES} processes have it open, more cannot")

    def look_in(self) -> None:
        """Open the model to be read alone. It may not be there yet: then it has no slab."""
        place = self.root.path / _MODELS / model_name(self.wanted.label)
        self.model, self._place = self.root, (str(place), None)
        found = self.root
        with suppress(FileNotFoundError):
            for name in (_MODELS, place.name):
                found = self.disk.enter_below(found, name)
                self._files.append(found.file)
            self.model, self._place = found, (str(place), found.identity)

    def _entered(self, folder: Directory, name: str) -> Directory:
        """A folder in a folder, made when missing; `close` closes it."""
        try:
            found = self.disk.enter_below(folder, name)
        except FileNotFoundError:
            self.disk.make_folder(folder, name)
            self.disk.sync_folder(folder)
            found = self.disk.enter_below(folder, name)
        self._files.append(found.file)
        return found

    def is_in_place(self) -> bool:
        """Whether the path still leads to the open model and to this process's lock file in it. If the folder was moved
        away, or that file removed, the folder has to be entered anew."""
        path, identity = self._place
        if self._unchanged and os.path.lexists(self.model.path / CHANGES):
            return False
        return self.disk.is_there(path, identity) if identity is not None else not os.path.lexists(path)

    def _take(self, number: int) -> bool:
        try:
            file = self._opened(self.model, process_name(number))
        except NotOurs:  # a foreign file: try the next number
            return False
        if take(self.disk, file, self.wanted.capacity_bytes):
            self._place = str(self.model.path / process_name(number)), self.disk.identity(file)
            self._process_file = file
            return True
        self._files.remove(file)
        self.disk.close(file)
        return False

    def open(self, name: str) -> int:
        """A file of the model, made when missing; -1 if it is missing and nothing may be made."""
        if not self.read_only:
            return self._opened(self.model, name)
        try:
            file = self.disk.open(self.model, name, read_only=True)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and not self._for_inspection:
                raise
            self._unchanged |= name == CHANGES
            return -1
        self._files.append(file)
        return file

    def _opened(self, folder: Directory, name: str) -> int:
        try:
            file = self.disk.open(folder, name)
        except FileNotFoundError:
            try:
                file = self.disk.open(folder, name, create=True)
            except FileExistsError:
                file = self.disk.open(folder, name)
        self._files.append(file)
        return file

    def _write(self, folder: Directory, name: str, content: bytes) -> None:
        """Write atomically and durably: without these files a folder full of pages would be refused."""
        unfinished = name + _UNFINISHED
        with suppress(FileNotFoundError):
            self.disk.unlink(folder, unfinished)
        write_new(self.disk, folder, unfinished, content)
        self.disk.rename(folder, unfinished, name)
        self.disk.sync_folder(folder)

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Exclude all other processes, for as long as it takes to make or remove a slab.

        StorageError: another process has held it for `MUTEX_S`, so it may be stopped; or this process's lock file was
        removed, so the others take it for dead.
        """
        try:
            for _ in tries(self.directory):
                if self._locked():
                    break
            if self.number >= 0 and not self.is_in_place():
                raise StorageError(f"{self._place[0]} was removed or moved away while this process had the store open")
            yield
        finally:
            self.disk.unlock(self._mutex)

    def _locked(self) -> bool:
        """Whether the mutex is ours now. If its file was removed, the next file of that name is the mutex."""
        if not self.disk.lock(self._mutex, wait=False):
            return False
        with suppress(FileNotFoundError):
            if os.path.samestat(self.disk.look(self.root, _LOCK), self.disk.stat(self._mutex)):
                return True
        try:
            left, self._mutex = self._mutex, self._opened(self.root, _LOCK)
        except FileNotFoundError:
            raise StorageError(f"{self.directory} was removed while it was open") from None
        self._files.remove(left)
        self.disk.close(left)
        return False

    def alone(self) -> bool:
        """Whether no other process has the model open. With the mutex held."""
        others = (number for number in processes(self.disk, self.model) if number != self.number)
        return not any(is_locked(self.disk, self.model, number) for number in others)

    def bytes(self) -> int:
        """The size of all our files in the folder, of all models. A damaged model is logged once."""
        known, damaged = known_models(self.disk, self.models)
        for name in damaged.keys() - self._warned - {self.model.path.name}:
            log.warning("%s", damaged[name])
            self._warned.add(name)
        total = root_bytes(self.disk, self.root) + bytes_of_model(self.disk, self.model)
        for name in {each.name for each in known} - {self.model.path.name}:
            with self.disk.closing(self.disk.enter_below(self.models, name)) as folder:
                total += bytes_of_model(self.disk, folder)
        return total + bytes_of_damaged(self.disk, self.models, damaged.keys() - {self.model.path.name})

    def close(self) -> None:
        if self.number >= 0 and self._files:
            leave(self.disk, self._process_file)
        for file in self._files:
            with suppress(OSError):
                self.disk.unlock(file)
        self.abandon()

    def abandon(self) -> None:
        """Close the files without unlocking: after a fork the locks are the parent's."""
        while self._files:
            self.disk.close(self._files.pop())
