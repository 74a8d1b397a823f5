"""One file per object below one folder, at most so many bytes. Knows names and bytes only.

    kvarve.json          whose objects these are; written before the first of them
    kvarve.lock          held by the one process that has the folder open
    pages/3f/<name>      an object: it comes here by rename, so it is whole or absent
    pages/3f/<token>~    an object being written; what a crash left of these goes at the next opening

Nothing on the way of the data is synced to the disk. Whoever reads a page checks its checksum, so a page that a power
cut loses or tears is a miss that costs one recomputation, while a sync for every page would halve the speed of all.
"""

import fcntl
import itertools
import json
import os
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import LruIndex, Storage, Usage, check_batch, check_names, check_owner, check_settings, is_name

_FORMAT = "kvarve-files/1"
_MARKER, _LOCK, _PAGES = "kvarve.json", "kvarve.lock", "pages"
_UNFINISHED = "~"  # ends the name of a file being written; no object's name contains it
# What an opening that was cut short leaves, and what every fresh ext4 disk has: a folder with these only is empty.
_NOT_CONTENT = frozenset({_LOCK, _MARKER + _UNFINISHED, "lost+found"})
# What users' prompts left behind is not for everyone on the machine to read.
_FILE_MODE = 0o600


@contextmanager
def _medium(
    directory: Path, verb: str = "", done: Collection[object] = (), names: Sequence[str] = ()
) -> Iterator[None]:
    """Trouble of the disk is trouble of the storage; of a batch it says how far it came."""
    try:
        yield
    except OSError as error:
        progress = f"{verb} {len(done)} of {len(names)} objects: " if verb else ""
        raise StorageError(f"{directory}: {progress}{error}") from error


def check_folder(directory: str | os.PathLike[str], capacity_bytes: int, label: bytes, description: str) -> Path:
    """Raise what opening would raise, and touch nothing; answer the folder's path.

    ConfigError: settings that cannot work anywhere. StorageError: what the folder is or holds. Whether another process
    has it open is known only by opening it.
    """
    check_settings(capacity_bytes, label)
    path = Path(directory)
    if not path.is_absolute() or "\0" in str(path):
        raise ConfigError(
            f"{str(path)!r} is not an absolute path: a storage folder is named from the root, as /var/kvarve"
        )
    with _medium(path):
        nearest = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
        if not nearest.is_dir():
            raise StorageError(f"{path}: {nearest} is not a folder")
        if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise StorageError(f"{path}: no permission to read and write {nearest}")
        if nearest == path:
            _check_contents(path, label, description)
    return path


def _check_contents(directory: Path, label: bytes, description: str) -> None:
    marker = directory / _MARKER
    if not marker.exists():
        if any(child.name not in _NOT_CONTENT for child in directory.iterdir()):
            raise StorageError(
                f"{directory} is not empty and not a kvarve storage folder: give another or an empty one"
            )
        return
    try:
        content = json.loads(marker.read_bytes())
        version = content["format"]
        owner = (bytes.fromhex(content["label"]), str(content["description"])) if version == _FORMAT else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"{marker} is damaged ({error}): empty the folder or give another one") from error
    if owner is None:
        raise StorageError(
            f"{directory} is in format {version!r}, this version of kvarve reads {_FORMAT!r}: "
            f"give another folder or empty this one"
        )
    check_owner(str(directory), owner, (label, description))


def _write_marker(directory: Path, label: bytes, description: str) -> None:
    # The one thing here that is synced, once per folder: without its marker a folder full of pages would be refused.
    unfinished = directory / (_MARKER + _UNFINISHED)
    content = {"format": _FORMAT, "label": label.hex(), "description": description}
    with unfinished.open("w", encoding="ascii") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(directory / _MARKER)


def _take_lock(directory: Path) -> int:
    """The descriptor of the folder's lock; the kernel lets go of it when this process ends, however it ends."""
    with ExitStack() as undo:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, _FILE_MODE)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace")
            raise StorageError(
                f"{directory} is open already, in process {holder}: two cannot write to one folder, give another one"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)  # only for the message of whoever comes second
        undo.pop_all()
    return lock


def _read(path: Path, into: memoryview) -> int | None:
    """The file's size, and its beginning in `into`. None: no such file. (Python itself repeats interrupted calls.)"""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(file).st_size
        end, done = min(size, into.nbytes), 0
        while done < end:
            count = os.preadv(file, [into[done:end]], done)
            if count == 0:  # somebody cut it short meanwhile
                return done
            done += count
        return size
    finally:
        os.close(file)


def _write(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    try:
        done = 0
        while done < data.nbytes:
            count = os.pwritev(file, [data[done:]], done)
            if count == 0:
                raise OSError(f"{path}: the disk takes no more bytes")
            done += count
    finally:
        os.close(file)


class FileStorage(Storage):
    """At most `capacity_bytes` of file contents below `directory` (absolute; made when missing), for one process.

    What does not fit pushes out what was used longest ago. Objects being written take room beyond the capacity: one per
    thread that puts. The order of use survives a `close`; after a crash it is the order of writing.
    """

    def __init__(self, directory: str | os.PathLike[str], capacity_bytes: int, label: bytes, description: str) -> None:
        self._directory = check_folder(directory, capacity_bytes, label, description)
        self._shards = [self._directory / _PAGES / f"{shard:02x}" for shard in range(256)]
        # Nothing slow happens under this lock: objects are read and written outside, renamed and removed inside.
        self._lock = threading.Lock()
        self._index = LruIndex(capacity_bytes)
        self._token, self._serial = secrets.token_hex(4), itertools.count()
        with ExitStack() as undo, _medium(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock_file: int | None = _take_lock(self._directory)
            undo.callback(os.close, self._lock_file)
            check_folder(directory, capacity_bytes, label, description)  # it may have changed before the lock was ours
            if not (self._directory / _MARKER).exists():
                _write_marker(self._directory, label, description)
            self._load()
            undo.pop_all()
        _open_here.add(self)

    def _load(self) -> None:
        """Rebuild the index from the files that are there, oldest use first, and remove unfinished ones."""
        found = []
        for shard in self._shards:
            for file in list(os.scandir(shard)) if shard.is_dir() else ():
                if file.name.endswith(_UNFINISHED):
                    Path(file).unlink()
                elif is_name(file.name) and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, file.name, status.st_size))
        for _, name, size_bytes in sorted(found):
            self._index.add(name, size_bytes, used=False)
        self._evict(self._index.victims("", 0) or [])  # the capacity may be smaller than last time

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._lock:
            self._require_open()
            return [name in self._index.entries for name in names]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        with self._lock:
            self._require_open()
            entries = [self._index.entries.get(name) for name in names]
            self._index.touch(names)
        sizes: list[int | None] = []
        with _medium(self._directory, "read", sizes, names):
            for name, entry, view in zip(names, entries, into, strict=True):
                size_bytes = None if entry is None else _read(self._path(name), view)
                if entry is not None and size_bytes != entry.size_bytes:
                    with self._lock:
                        self._index.correct(name, entry, size_bytes)
                sizes.append(size_bytes)
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        mine: dict[str, None] = {}  # stored by this call, in order
        stored: list[bool] = []
        with _medium(self._directory, "stored", mine, names):
            for name, view in zip(names, data, strict=True):
                stored.append(self._put_one(name, view, mine))
                if stored[-1]:
                    mine[name] = None
        with self._lock:
            self._require_open()
            self._index.touch(list(mine))
        return stored

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        deleted: list[bool] = []
        with self._lock, _medium(self._directory, "deleted", deleted, names):
            self._require_open()
            for name in names:
                deleted.append(name in self._index.entries and self._remove(name))
        return deleted

    def usage(self) -> Usage:
        with self._lock:
            self._require_open()
            return self._index.usage()

    def close(self) -> None:
        with self._lock:
            if self._lock_file is not None:
                self._remember_order()
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # also for a copy that a fork in C code may hold
                os.close(self._lock_file)
                self._lock_file = None

    # Below: called with the lock held, except where it says otherwise.

    def _put_one(self, name: str, data: memoryview, keep: Container[str]) -> bool:
        """Takes the lock itself. Room is asked for before the bytes are written, and made when they are there."""
        with self._lock:
            self._require_open()
            if self._index.victims(name, data.nbytes, keep) is None:
                return False
        path = self._path(name)
        unfinished = path.with_name(f"{self._token}.{next(self._serial)}{_UNFINISHED}")
        with ExitStack() as undo:
            undo.callback(_forget, unfinished)
            try:
                _write(unfinished, data)
            except FileNotFoundError:  # the first object of its folder, or somebody has removed the folder
                for folder in (path.parent.parent, path.parent):
                    folder.mkdir(exist_ok=True)
                _write(unfinished, data)
            with self._lock:
                self._require_open()
                victims = self._index.victims(name, data.nbytes, keep)
                if victims is None:
                    return False
                self._evict(victims)
                unfinished.replace(path)
                self._index.add(name, data.nbytes)
            undo.pop_all()
        return True

    def _evict(self, victims: Sequence[str]) -> None:
        for victim in victims:
            self._remove(victim)
            self._index.evicted += 1

    def _remove(self, name: str) -> bool:
        """False: the file was gone already. An OSError leaves the index as it was."""
        there = True
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            there = False
        self._index.drop(name)
        return there

    def _remember_order(self) -> None:
        """Write the order of use into the files' times: those used since opening are newest, a microsecond apart."""
        now_ns = time.time_ns()
        for age, (name, entry) in enumerate(reversed(self._index.entries.items())):
            if not entry.used:
                break
            with suppress(OSError):  # a file that is gone has no order to keep
                os.utime(self._path(name), ns=(now_ns - 1000 * age, now_ns - 1000 * age))

    def _require_open(self) -> None:
        if self._lock_file is None:
            raise StorageError(f"{self._directory}: this storage is closed, or was opened before a fork")

    def _path(self, name: str) -> Path:
        return self._shards[zlib.crc32(name.encode()) & 0xFF] / name

    def _leave_to_parent(self) -> None:
        """In a child after fork: the folder stays the parent's, and its lock must not outlive the parent in us."""
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _forget(unfinished: Path) -> None:
    with suppress(OSError):  # the next opening removes what cannot be removed now
        unfinished.unlink()


# A program that forks its workers after opening a storage is a common one.
_open_here: "weakref.WeakSet[FileStorage]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for storage in list(_open_here):
        storage._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
