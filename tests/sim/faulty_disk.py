"""A disk that loses power. It works on a real file system, and keeps a log of all changes.

After a power cut a disk holds less than its user saw: a write that was not synced may be there, be missing or be torn
between two sectors; a file's creation, renaming or removal may be lost until its folder was synced (in order, as in
journaling file systems). `after(n, ...)` makes, in a fresh folder, the disk as it would be had the power failed just
before the n-th event. So one run of a workload gives every point at which it could have been cut, for any seed.

A process that is killed loses no write: `after(n, folder, "killed")`. To let one die while others go
on, set `dies_at`: from that event on every call raises `Died`, and its files are closed, so that its locks are free.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvarve.storage.file.disk import Directory, Disk

SECTOR_BYTES = 512

Kind = Literal[
    "create",
    "allocate",
    "write",
    "sync",
    "rename",
    "unlink",
    "truncate",
    "make_folder",
    "remove_folder",
    "sync_folder",
]
Fate = Literal["killed", "kept", "dropped", "torn"]


class Died(BaseException):
    """The process is dead; no error handler of it may run (hence a BaseException)."""


@dataclass(frozen=True)
class Event:
    """One change of the disk. `file` numbers files in the order of their creation, whatever their names."""

    kind: Kind
    file: int = -1
    path: str = ""
    other: str = ""
    at: int = 0
    data: bytes = b""


@dataclass
class _File:
    """A file's durable data, and the writes since its last sync."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)

    def flush(self) -> None:
        for event in self.pending:
            _apply(self.data, event)
        self.pending.clear()


class FaultyDisk(Disk):
    """Everything below `root`, which is empty when it begins. `events`: all changes, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self.dies_at: int | None = None
        self._numbers: dict[int, int] = {}  # of inodes
        self._made = 0
        self._open: set[int] = set()
        self._dead = False

    # --- for the test

    def after(self, count: int, folder: Path, fate: Fate, seed: int = 0) -> None:
        """Make in `folder` the disk as it is if the power fails (or the process dies) after `count` events."""
        rng = random.Random(f"{seed} {count}")
        files: dict[int, _File] = {}
        names: list[Event] = []  # all changes of folders
        settled = 0  # how many of them are durable
        for event in self.events[:count]:
            if event.kind in ("write", "allocate", "truncate"):
                files[event.file].pending.append(event)
            elif event.kind == "sync":
                files[event.file].flush()
            elif event.kind == "sync_folder":
                settled = len(names)
            else:
                names.append(event)
                if event.kind == "create":
                    files[event.file] = _File()
        for file in files.values():
            if fate != "dropped":
                for event in file.pending:
                    _apply(file.data, event, rng if fate == "torn" else None)
        done = {"killed": len(names), "kept": len(names), "dropped": settled, "torn": rng.randint(settled, len(names))}
        _make(folder, names[: done[fate]], files)

    # --- the disk

    def enter(self, path: Path, *, for_maintenance: bool = False) -> Directory:
        self._live()
        return self._opened(super().enter(path, for_maintenance=for_maintenance))

    def enter_below(self, folder: Directory, name: str) -> Directory:
        self._live()
        return self._opened(super().enter_below(folder, name))

    def _opened(self, folder: Directory) -> Directory:
        self._open.add(folder.file)
        return folder

    def open(
        self,
        folder: Directory,
        name: str,
        *,
        create: bool = False,
        direct: bool = False,
        read_only: bool = False,
    ) -> int:
        self._live()
        if create and not (folder.path / name).exists():
            self._happens("create", path=folder.path / name)
        file = super().open(folder, name, create=create, direct=direct, read_only=read_only)
        self._open.add(file)
        if create:
            self._numbers[os.fstat(file).st_ino] = self._made
            self._made += 1
        return file

    def close(self, file: int) -> None:
        if file in self._open:
            self._open.discard(file)
            super().close(file)

    def peek(self, file: int, size_bytes: int, at: int) -> bytes:
        self._live()
        return super().peek(file, size_bytes, at)

    def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
        self._live()
        return super().read(file, into, at)

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        whole = b"".join(bytes(piece) for piece in data)
        self._happens("write", file=file, at=at, data=whole)
        return super().write(file, data, at)

    def sync(self, file: int) -> None:
        self._happens("sync", file=file)

    def allocate(self, file: int, size_bytes: int) -> None:
        self._happens("allocate", file=file, at=size_bytes)
        os.ftruncate(file, max(size_bytes, self.size(file)))

    def resize(self, file: int, size_bytes: int) -> None:
        if size_bytes != self.size(file):
            self._happens("truncate", file=file, at=size_bytes)
        super().resize(file, size_bytes)

    def make_root(self, path: Path) -> None:
        self._live()
        for place in [*reversed(path.relative_to(self.root).parents), path.relative_to(self.root)]:
            if not (self.root / place).exists():
                self._happens("make_folder", path=self.root / place)
                (self.root / place).mkdir(0o700)

    def make_folder(self, folder: Directory, name: str) -> None:
        self._live()
        if not (folder.path / name).exists():
            self._happens("make_folder", path=folder.path / name)
        super().make_folder(folder, name)

    def remove_folder(self, folder: Directory, name: str) -> None:
        self._happens("remove_folder", path=folder.path / name)
        super().remove_folder(folder, name)

    def rename(self, folder: Directory, old: str, new: str) -> None:
        self._live()
        if (folder.path / old).exists():
            self._happens("rename", path=folder.path / old, other=folder.path / new)
        super().rename(folder, old, new)

    def unlink(self, folder: Directory, name: str) -> None:
        self._live()
        if (folder.path / name).exists():
            self._happens("unlink", path=folder.path / name)
        super().unlink(folder, name)

    def truncate(self, folder: Directory, name: str) -> None:
        self._live()
        self._happens("truncate", inode=(folder.path / name).stat().st_ino)
        super().truncate(folder, name)

    def sync_folder(self, folder: Directory) -> None:
        self._happens("sync_folder", path=folder.path)

    def space(self, folder: Directory) -> tuple[int, int]:
        """Plenty, on whatever disk the test runs."""
        return 1 << 50, 1 << 50

    def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
        self._live()
        return super().lock(file, wait=wait, shared=shared)

    def unlock(self, file: int) -> None:
        self._live()
        super().unlock(file)

    def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
        self._live()
        return super().lock_range(file, at, size_bytes)

    def locked_range(self, file: int, at: int, size_bytes: int) -> tuple[int, int] | None:
        self._live()
        return super().locked_range(file, at, size_bytes)

    def unlock_range(self, file: int, at: int, size_bytes: int) -> None:
        self._live()
        super().unlock_range(file, at, size_bytes)

    def _happens(
        self,
        kind: Kind,
        *,
        file: int = -1,
        path: Path | None = None,
        other: Path | None = None,
        at: int = 0,
        data: bytes = b"",
        inode: int | None = None,
    ) -> None:
        self._live()
        if self.dies_at is not None and len(self.events) >= self.dies_at:
            self._die()
        inode = os.fstat(file).st_ino if file >= 0 else inode
        number = self._numbers.get(inode, -1) if inode is not None else -1
        places = [str(place.relative_to(self.root)) if place is not None else "" for place in (path, other)]
        if kind == "create":
            number = self._made
        self.events.append(Event(kind, number, places[0], places[1], at, data))

    def _live(self) -> None:
        if self._dead:
            raise Died

    def _die(self) -> None:
        """The kernel closes what a dead process had open."""
        self._dead = True
        for file in [*self._open]:
            self.close(file)
        raise Died


def _apply(data: bytearray, event: Event, rng: random.Random | None = None) -> None:
    """Apply a write to a file; with `rng`, all of it, none of it, or some sectors by chance."""
    if event.kind == "allocate":
        data.extend(bytes(max(0, event.at - len(data))))
        return
    if event.kind == "truncate":
        del data[event.at :]
        data.extend(bytes(event.at - len(data)))
        return
    luck = "kept" if rng is None else rng.choice(["kept", "dropped", "torn", "torn"])
    if luck == "dropped":
        return
    data.extend(bytes(max(0, event.at + len(event.data) - len(data))))
    if luck == "kept":
        data[event.at : event.at + len(event.data)] = event.data
        return
    assert rng is not None
    end = event.at + len(event.data)
    at = event.at
    while at < end:
        stop = min(end, (at // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if rng.random() < 0.5:
            data[at:stop] = event.data[at - event.at : stop - event.at]
        at = stop


def _make(root: Path, names: Sequence[Event], files: dict[int, _File]) -> None:
    """Make the files under their last names."""
    root.mkdir(0o700, parents=True, exist_ok=True)
    tree: dict[str, int] = {}
    folders: dict[str, None] = {}
    for event in names:
        if event.kind == "create":
            tree[event.path] = event.file
        elif event.kind == "rename":
            tree[event.other] = tree.pop(event.path)
        elif event.kind == "unlink":
            tree.pop(event.path, None)
        elif event.kind == "make_folder":
            folders[event.path] = None
        elif event.kind == "remove_folder":
            folders.pop(event.path, None)
    for folder in folders:
        (root / folder).mkdir(0o700, parents=True, exist_ok=True)
    for path, number in tree.items():
        (root / path).write_bytes(files[number].data)
        (root / path).chmod(0o600)
