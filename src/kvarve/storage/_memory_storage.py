"""Objects in this process's own memory. A named one outlives its close, as a folder would: for tests and trials."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import (
    LruIndex,
    Storage,
    StorageUsage,
    check_batch,
    check_names,
    check_owner,
    check_settings,
    in_group,
)
from kvarve.storage.urls import Backend, StorageUrl


class _Region(LruIndex):
    """The bytes themselves; any number of open storages may share one."""

    def __init__(self, label: bytes, description: str) -> None:
        super().__init__(0)
        self.owner = (label, description)
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}

    def drop(self, name: str) -> bool:
        self.objects.pop(name, None)
        return super().drop(name)

    def evict(self, victims: Sequence[str]) -> None:
        self.evicted += sum(map(self.drop, victims))


_named: dict[str, _Region] = {}
_named_lock = threading.Lock()


def check_memory(capacity_bytes: int, label: bytes, description: str, name: str | None = None) -> None:
    """Raise what opening would raise and create nothing: ConfigError for settings, StorageError for another label."""
    check_settings(capacity_bytes, label)
    if name is not None:
        check_names([name])
        region = _named.get(name)
        if region is not None:
            check_owner(f"memory://{name}", region.owner, (label, description))


def forget_memory(name: str) -> None:
    """Forget the objects of `memory://name`; storages open on it keep theirs until they are closed."""
    with _named_lock:
        _named.pop(name, None)


class MemoryStorage(Storage):
    """At most `capacity_bytes` of objects. With a `name`, the process's next storage of that name has them."""

    def __init__(self, capacity_bytes: int, label: bytes, description: str, name: str | None = None) -> None:
        with _named_lock:
            check_memory(capacity_bytes, label, description, name)
            fresh = _Region(label, description)
            region = fresh if name is None else _named.setdefault(name, fresh)
        with region.lock:
            region.capacity_bytes = capacity_bytes
            region.evict(region.victims(0) or [])
        self._region: _Region | None = region

    @contextmanager
    def _locked(self) -> Iterator[_Region]:
        region = self._region
        if region is None:
            raise StorageError("this memory storage is closed")
        with region.lock:
            yield region

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._locked() as region:
            return [name in region.objects for name in names]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        with self._locked() as region:
            found = [region.objects.get(name) for name in names]
            region.touch(names)
        for data, view in zip(found, into, strict=True):
            if data is not None:
                count = min(len(data), view.nbytes)
                view[:count] = memoryview(data)[:count]
        return [None if data is None else len(data) for data in found]

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        mine: dict[str, None] = {}  # objects that this call answers for, in order
        stored = []
        with self._locked() as region:
            for name, view in zip(names, data, strict=True):
                if name not in region.objects:
                    victims = region.victims(view.nbytes, mine)
                    if victims is None:
                        stored.append(False)
                        continue
                    region.evict(victims)
                    region.objects[name] = bytes(view)
                    region.add(name, view.nbytes)
                mine[name] = None
                stored.append(True)
            region.touch(list(mine))
        return stored

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        with self._locked() as region:
            region.touch(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._locked() as region:
            return [*map(region.drop, names)]

    def drop(self, group: str | None = None) -> int:
        check_names([] if group is None else [group])
        with self._locked() as region:
            return sum(map(region.drop, [name for name in region.objects if in_group(name, group)]))

    def usage(self) -> StorageUsage:
        with self._locked() as region:
            return region.usage()

    def close(self) -> None:
        self._region = None


class MemoryBackend(Backend):
    example = "memory://name?capacity=1GiB"
    parameters = frozenset({"capacity"})
    bounded = True

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        if not url.place or url.path not in ("", "/"):
            raise ConfigError(f"{url.text}: a memory URL needs one name and no path, as in {cls.example}")
        capacity_bytes = url.size_bytes("capacity")
        check_memory(capacity_bytes, label, description, url.place)
        return lambda: MemoryStorage(capacity_bytes, label, description, url.place)
