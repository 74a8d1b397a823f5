"""What every storage backend promises. Names and bytes only: nothing here knows what a page, tensor or model is."""

import itertools
import operator
import re
import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, Self

from kvarve.errors import ConfigError, StorageError
from kvarve.system.regions import HostRegion

# "." and ".." are names of folders, so they cannot be names of objects.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,200}")
LEGAL = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
_NAME_MAX = 200
LABEL_MAX_BYTES = 64

# The name to ask for in order to see whether a storage answers at all.
ANY_NAME = "kvarve-is-it-up"


@dataclass(frozen=True)
class StorageUsage:
    """What a storage holds now, and what has become of objects since it was opened. None: the backend cannot tell.

    `lost`: objects that are gone though nothing evicted them, since what says where they are is damaged or was removed;
    `damaged`: objects whose bytes could not be read. `room_bytes`: how much more the medium takes. `read_only`: whether
    nothing that is put is stored, as the medium takes no writes or the operator wants that.
    """

    objects: int | None = None
    bytes: int | None = None
    capacity_bytes: int | None = None
    evicted: int | None = None
    lost: int | None = field(default=None, kw_only=True)
    damaged: int | None = field(default=None, kw_only=True)
    room_bytes: int | None = field(default=None, kw_only=True)
    read_only: bool | None = field(default=None, kw_only=True)


class Damaged(StorageError):
    """What says whose a storage is, or in which format, is damaged or cannot be read. Nothing has been touched."""


_end: ContextVar[float] = ContextVar("when the caller of a storage gives up", default=inf)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within the block, the caller of a storage waits for at most `seconds`, or less if it has said so before.

    A backend that has timeouts of its own sets them to `left_s()`, and raises StorageError when they have passed. All
    others may ignore it: a caller gives up by itself, and loses the thread and the memory that a call holds.
    """
    token = _end.set(min(time.monotonic() + seconds, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


def left_s() -> float:
    """For how long the caller of a storage still waits for its answer: `inf` if it has not said, never below zero."""
    return max(0.0, _end.get() - time.monotonic())


class Storage(Protocol):
    """A place for named objects, used by several threads at once.

    Names are ASCII letters, digits, ".", "_" and "-", 1 to 200 of them, except "." and "..". Buffers are contiguous
    one-dimensional views of bytes. Every method takes a batch, raises ConfigError for a name that cannot be (before
    anything is done), and StorageError when the medium fails or the storage is closed. Missing, too short and no
    space are answers, not errors. The caller checks whether the bytes are right; with `deadline` it says how long it
    waits.

    A storage that evicts takes the least recently used object first; putting and getting are uses, asking is not.
    Within one call the first name counts as the most recently used, so a caller that names objects in the order of
    need keeps the first ones when space runs out. The part of a name before its first "-", if any, is its group, by
    which quotas count.
    """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each object is there, as far as the backend knows without reading it; `get` has the last word."""
        ...

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        """Read each object into its writable buffer; answer its whole stored size in bytes, None where it is missing.

        Of an object larger than its buffer only the buffer's length is read, and the size answered says so; one that is
        shorter leaves the rest of the buffer as it was. After StorageError the buffers' contents mean nothing.
        """
        ...

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        """Store each buffer under its name: True is stored and visible, False is no space even after evicting.

        Nothing is replaced: names are names of content, so an object that is there already stays and answers True (that
        is a use). A damaged object has to be deleted first. Of one name twice in a call the first stays. A call does
        not evict objects that it has answered for. StorageError says how many of how many are done.
        """
        ...

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        """`put` of objects whose bytes lie in a few pieces of memory, such as a header and a page of someone else's.

        A backend that can gather them moves them in place; here an object of several is copied into one buffer first.
        """
        return self.put(names, [pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)) for pieces in data])

    def touch(self, names: Sequence[str]) -> None:
        """Count these objects as used, the first as most recently: their caller uses copies that it has in memory.

        A backend that has no say in what is evicted does nothing.
        """
        check_names(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Remove each object; True where there was one."""
        ...

    def drop(self, group: str | None = None) -> int:
        """Remove all objects of one group, or all that this storage's label has; returns how many there were.

        An object that a put stores meanwhile may stay.
        """
        ...

    def usage(self) -> StorageUsage: ...

    def register(self, region: HostRegion) -> None:
        """Most buffers of later calls will lie in `region`, which stays where it is until the storage is closed.

        For a backend with its own transport (RDMA), which has to register memory first. Returns at once: slow work is
        done by the next call. All other backends do nothing.
        """
        return

    def close(self) -> None:
        """Release all resources. May be called twice; any other call afterwards raises StorageError."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Around(Storage):
    """`inner`, of which a subclass changes some calls. Pieces become one buffer for `put`, unless it changes both."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self.inner.exists(names)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        return self.inner.get(names, into)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        return self.inner.put(names, data)

    def touch(self, names: Sequence[str]) -> None:
        self.inner.touch(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        return self.inner.delete(names)

    def drop(self, group: str | None = None) -> int:
        return self.inner.drop(group)

    def usage(self) -> StorageUsage:
        return self.inner.usage()

    def register(self, region: HostRegion) -> None:
        self.inner.register(region)

    def close(self) -> None:
        self.inner.close()


def in_group(name: str, group: str | None) -> bool:
    """Whether a name belongs to the group; all do if that is None."""
    return group is None or name.startswith(f"{group}-")


def group_of(name: str) -> str:
    """The part of a name before the first "-": the group shares a quota."""
    group, dash, _ = name.partition("-")
    return group if dash else ""


def firsts(names: Sequence[str]) -> dict[str, int]:
    """Where each of the names stands first in a call."""
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        found.setdefault(name, number)
    return found


def is_name(name: str) -> bool:
    """Whether an object can have this name."""
    return _NAME.fullmatch(name) is not None


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError unless every name can be an object's."""
    lengths = {*map(len, names)} or {_NAME_MAX}
    usual = len("..") < min(lengths) and max(lengths) <= _NAME_MAX
    # All at once: one by one would take a third as long as a server's answer.
    if usual and not "".join(names).encode("ascii", "replace").translate(None, LEGAL):
        return
    for name in names:
        if not is_name(name):
            raise ConfigError(f"{name!r} cannot name an object: 1 to 200 of A-Z a-z 0-9 . _ - and not '.' or '..'")


def check_batch(names: Sequence[str], buffers: Sequence[memoryview]) -> None:
    """Raise ConfigError unless every name can be an object's; one buffer per name is the caller's duty."""
    assert len(names) == len(buffers), f"{len(names)} names, {len(buffers)} buffers"
    assert all(view.itemsize == view.ndim == 1 and view.contiguous for view in buffers), "buffers must be plain bytes"
    check_names(names)


def check_pieces(names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> None:
    """The same for objects in pieces, of which each has at least one."""
    assert len(names) == len(data) and all(data), "every object has at least one piece"
    plain = all(view.itemsize == view.ndim == 1 and view.contiguous for pieces in data for view in pieces)
    assert plain, "pieces must be plain bytes"
    check_names(names)


def check_settings(capacity_bytes: int, label: bytes) -> None:
    """Raise ConfigError unless a storage can be opened with these, wherever it lies."""
    if capacity_bytes <= 0:
        raise ConfigError(f"a storage needs a capacity above zero, such as 10GiB, got {capacity_bytes} bytes")
    if not isinstance(label, bytes):
        raise ConfigError(f"a storage label must be bytes, got {label!r}")
    if not 1 <= len(label) <= LABEL_MAX_BYTES:
        raise ConfigError(f"a storage label must have 1 to {LABEL_MAX_BYTES} bytes, got {len(label)}")


def check_owner(where: str, found: tuple[bytes, str], wanted: tuple[bytes, str]) -> None:
    """Raise StorageError unless both (label, description) carry the same label."""
    if found[0] != wanted[0]:
        alike = sum(itertools.takewhile(bool, map(operator.eq, found[0], wanted[0])))
        shown = max(12, 2 * alike + 4)  # where they differ, too
        theirs, ours = (f"{description!r} (label {label.hex()[:shown]})" for label, description in (found, wanted))
        raise StorageError(
            f"{where} was written by another model or format: it holds {theirs}, this is {ours}; "
            f"give another one or empty this one"
        )


class LruIndex:
    """The sizes of objects, in LRU order. It only decides and counts: its owner moves bytes and locks."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.entries: OrderedDict[str, int] = OrderedDict()  # sizes; the next to be evicted comes first
        self.used_bytes = 0
        self.evicted = 0

    def victims(self, size_bytes: int, keep: Container[str] = ()) -> list[str] | None:
        """The objects to evict for a new one of `size_bytes`; None if one of `keep` would have to go."""
        excess = self.used_bytes + size_bytes - self.capacity_bytes
        found: list[str] = []
        if excess <= 0:
            return found
        for other, size in self.entries.items():
            if other not in keep:
                found.append(other)
                excess -= size
                if excess <= 0:
                    return found
        return None

    def add(self, name: str, size_bytes: int) -> None:
        assert name not in self.entries, f"{name} is there already"
        self.entries[name] = size_bytes
        self.used_bytes += size_bytes

    def drop(self, name: str) -> bool:
        """Forget `name`; False when it was not known."""
        size_bytes = self.entries.pop(name, None)
        self.used_bytes -= size_bytes or 0
        return size_bytes is not None

    def touch(self, names: Sequence[str]) -> None:
        """Mark these as used: the first is evicted last."""
        for name in reversed(names):
            if name in self.entries:
                self.entries.move_to_end(name)

    def usage(self) -> StorageUsage:
        return StorageUsage(len(self.entries), self.used_bytes, self.capacity_bytes, self.evicted)
