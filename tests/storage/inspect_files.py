"""What a file store knows of its files, as plain data, and steps of it that none of its calls makes alone.

The only module of the tests that looks inside a store: all others ask `Storage`, its disk, or this one. No tests here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvarve.storage import FileStorage
from kvarve.storage.file._index import Put
from kvarve.storage.file._slabs import RowAddress, RowSpan, Slab
from kvarve.storage.file._table import Shape


@dataclass(frozen=True)
class Place:
    """Where an object lies: the slab's number and its files, the row, and where its bytes and its entry begin."""

    slab: int
    row: int
    path: Path
    shape: Shape
    stripe: int
    facts: tuple[int, ...]  # when it was stored, its bytes, when and how often it was used

    @property
    def at(self) -> int:
        return self.shape.slot_at(self.row)

    @property
    def table(self) -> Path:
        return self.path.with_name(self.path.name + ".table")

    @property
    def entry_at(self) -> int:
        return self.shape.entry_at(self.row)


def _place(address: RowAddress) -> Place:
    slab, row = address
    facts = tuple(int(column[row]) for column in (slab.stored, slab.length, slab.used, slab.uses))
    return Place(slab.number, row, slab.path, slab.shape, int(slab.stripe(row)), facts)  # type: ignore[arg-type]


def place(storage: FileStorage, name: str) -> Place:
    return _place(storage._index.place(name))


def places(storage: FileStorage) -> dict[str, Place]:
    return {name: place(storage, name) for name in storage._index.entries}


def slabs(storage: FileStorage) -> dict[int, Shape]:
    return {number: slab.shape for number, slab in storage._index.slabs.items()}


def rows(storage: FileStorage) -> dict[str, int]:
    """How many rows are in which state."""
    return storage._index.states()


def seized(storage: FileStorage) -> int:
    """How many rows it keeps other processes from."""
    return sum(map(len, storage._index.held.values()))


def groups(storage: FileStorage) -> dict[str, int]:
    """The bytes of each group that it counts."""
    return dict(storage._index._of_group)


def orders(storage: FileStorage) -> int:
    """For how many groups and classes it keeps victims."""
    return len(storage._allocator._queues)


def failed(storage: FileStorage) -> int:
    """How many slabs wait to be removed as a sync of them has failed."""
    return len(storage._index.failed)


def is_asked(storage: FileStorage) -> bool:
    """Whether a reader waits for the lock."""
    return storage._asking.locked()


def now_ns(storage: FileStorage) -> int:
    return storage._index.clock.now_ns()


def limits(storage: FileStorage) -> Any:
    """What its URL says: for how long, how much, in what order."""
    return storage._index.limits


def process(storage: FileStorage) -> int:
    """Its number among the processes that have the store open."""
    return storage._folder.number


def is_alone(storage: FileStorage) -> bool:
    """Whether no other process has the store open."""
    with storage._changing():
        return storage._folder.alone()


def file_bytes(storage: FileStorage) -> int:
    """What counts against the capacity."""
    return storage._folder.bytes()


def names_on_disk(storage: FileStorage) -> list[str]:
    """The names in the tables, however often."""
    loaded = [found for slab in storage._index.slabs.values() for _, found in slab.load(0, slab.shape.slots)]
    return sorted(name for table in loaded for name in table.names)


def slab(storage: FileStorage, number: int = 0) -> Slab:
    return storage._index.slabs[number]


# --- steps


def die(storage: FileStorage) -> None:
    """The kernel closes all its files."""
    storage._folder.abandon()
    for each in storage._index.slabs.values():
        each.close()
    storage._open = False


def locked(storage: FileStorage) -> None:
    """A thread of it is in the middle of a call, and never goes on."""
    storage._lock.acquire()
    storage._folder.disk.lock(storage._folder._mutex)


def double(storage: FileStorage, name: str) -> None:
    """Write an object into another slab too, and its entry, as a process does that dies before it tells."""
    with storage._changing(), storage._lock:
        one, row = storage._index.place(name)
        other = next(each for each in storage._index.slabs.values() if each is not one)
        (at,) = other.take_free(1)
        for column in ("state", "length", "stored", "names"):
            getattr(other, column)[at] = getattr(one, column)[row]
        other.write([RowSpan(0, other, at, memoryview(b"1"))])
        other.save([at])


def remove(storage: FileStorage, *numbers: int) -> bool:
    """Whether it could remove these slabs; without numbers, all."""
    with storage._changing():
        some = [storage._index.slabs[number] for number in numbers or slabs(storage)]
        return all([storage._allocator.remove(each, "a test") for each in some])


def retry(storage: FileStorage) -> None:
    """Have it try at once what it tries again some seconds after a failure."""
    storage._allocator._full_until.clear()
    storage._allocator._swept_ns = 0


def look_at_all(storage: FileStorage) -> None:
    """Have it look at all that others have told, as after a change elsewhere."""
    storage._index.changes._head = None


def prefer(storage: FileStorage, rows: Sequence[int], number: int = 0) -> None:
    """Have it take these rows of a slab next."""
    it = slab(storage, number)
    it.free, it.searched = [*reversed(rows)], True


def reservable(storage: FileStorage, count: int) -> list[int]:
    """The rows of its first slab that it gets when it asks for so many once; they are free again."""
    found = storage._index.reserve(Put(), slab(storage).shape.slot_bytes, count)
    storage._index.release(found)
    return [row for _, row in found]


@contextmanager
def mutex(storage: FileStorage) -> Iterator[None]:
    """It stands still while it makes or removes a slab."""
    with storage._folder.mutex():
        yield


@contextmanager
def telling(storage: FileStorage) -> Iterator[None]:
    """It stands still while it tells what it has changed."""
    disk, file = storage._folder.disk, storage._index.changes._file
    assert disk.lock(file, wait=False)
    yield
    disk.unlock(file)


@contextmanager
def seizing(storage: FileStorage, name: str) -> Iterator[None]:
    """It stands still while it evicts an object."""
    with storage._changing(), storage._lock:
        assert storage._index.seize(*storage._index.place(name))
        yield
        storage._index.release([storage._index.place(name)])


def sees_the_same(one: FileStorage, other: FileStorage) -> None:
    """One has seen the numbers of changes that another has now, each of which is one at most."""
    seen = other._index.changes._seen
    assert (seen[1:, 1:] <= 1).all()
    one._index.changes._seen[1:] = seen[1:]


class _Turns:
    """A lock; before it is taken for the third time something else goes first."""

    def __init__(self, lock: Any, between: Callable[[], object]) -> None:
        self.lock, self.between, self.taken = lock, between, 0

    def __enter__(self) -> None:
        self.taken += 1
        if self.taken == 3:
            self.between()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@contextmanager
def turns(storage: FileStorage, between: Callable[[], object]) -> Iterator[None]:
    """What makes room lets others in between its steps: this, when it has made two."""
    with mock.patch.object(storage._allocator, "_lock", _Turns(storage._lock, between)):
        yield


@contextmanager
def before_removals(storage: FileStorage, do: Callable[[], object]) -> Iterator[None]:
    """Before it drops a slab, whose hot objects it has moved, this happens."""
    really = storage._index.remove
    with mock.patch.object(storage._index, "remove", lambda *how: (do(), really(*how))):
        yield


@contextmanager
def deaf(storage: FileStorage) -> Iterator[None]:
    """What other processes tell does not come, as over a network."""
    with mock.patch.object(storage._index.changes, "look", lambda: iter(())):
        yield


class Steps:
    """A put whose rows are reserved; its other steps follow one by one."""

    def __init__(self, storage: FileStorage, objects: Mapping[str, memoryview]) -> None:
        self._storage, self._put = storage, Put([*objects], [[view] for view in objects.values()])
        storage._reserve(self._put, range(len(objects)))
        self.places = [_place(address) for address in self._put.places.values()]

    def write(self) -> None:
        self._storage._write(self._put)

    def commit(self) -> list[bool]:
        self._storage._commit(self._put)
        return [*self._put.answers.values()]

    def release(self) -> None:
        self._storage._release_rows(self._put)
