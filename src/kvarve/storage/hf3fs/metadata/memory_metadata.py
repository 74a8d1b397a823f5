"""The metadata of a store in this process: for tests and trials. `memory:NAME` is shared by all who open it here."""

import threading
import time
from collections.abc import Callable, Sequence

from kvarve.errors import StorageError
from kvarve.storage.base import StorageUsage
from kvarve.storage.hf3fs.metadata.service import Extent, Found, Metadata, Slot, first_numbers
from kvarve.storage.hf3fs.metadata.slot_table import SlotTable


class SharedTable:
    """A table under a lock and a clock."""

    def __init__(
        self, capacity_bytes: int, quota_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.table = SlotTable(capacity_bytes, quota_bytes, first_numbers(time.time()))
        self.lock, self.clock = threading.Lock(), clock


_named: dict[str, SharedTable] = {}
_named_lock = threading.Lock()


def named_table(name: str, capacity_bytes: int, quota_bytes: int | None) -> SharedTable:
    with _named_lock:
        shared = _named.setdefault(name, SharedTable(capacity_bytes, quota_bytes))
    with shared.lock:
        shared.table.configure(capacity_bytes, quota_bytes)
    return shared


def forget_table(name: str) -> None:
    """Forget what `memory:NAME` knew, as if its service had lost it."""
    with _named_lock:
        shared = _named.get(name)
    if shared is not None:
        with shared.lock:
            old = shared.table
            shared.table = SlotTable(old.capacity_bytes, old.quota_bytes, first_numbers(time.time()), empty=False)


class MemoryMetadata(Metadata):
    def __init__(self, shared: SharedTable, owner: bytes) -> None:
        self._shared, self._owner = shared, owner
        self._closed = False

    def _now(self) -> float:
        if self._closed:
            raise StorageError("this metadata is closed")
        return self._shared.clock()

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._shared.lock:
            self._now()
            return self._shared.table.exists(self._owner, names)

    def lookup(self, names: Sequence[str], reader: int, pin_s: float) -> list[Found | None]:
        with self._shared.lock:
            return self._shared.table.lookup(self._owner, names, reader, pin_s, self._now())

    def release(self, reader: int) -> None:
        with self._shared.lock:
            self._shared.table.release(reader, self._now())
            self._shared.table.tidy()

    def reserve(self, request: int, names: Sequence[str], slot_bytes: Sequence[int], for_s: float) -> list[Slot | bool]:
        with self._shared.lock:
            return self._shared.table.reserve(self._owner, request, names, slot_bytes, for_s, self._now())

    def commit(self, request: int, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        with self._shared.lock:
            return self._shared.table.commit(self._owner, request, names, slots, sizes, self._now())

    def abort(self, request: int, slots: Sequence[Slot]) -> None:
        with self._shared.lock:
            self._shared.table.abort(self._owner, request, slots, self._now())

    def touch(self, names: Sequence[str]) -> None:
        with self._shared.lock:
            self._shared.table.touch(self._owner, names, self._now())

    def delete(self, names: Sequence[str], slots: Sequence[Slot] | None = None) -> list[bool]:
        with self._shared.lock:
            return self._shared.table.delete(self._owner, names, slots, self._now())

    def drop(self, group: str | None = None) -> int:
        with self._shared.lock:
            return self._shared.table.drop(self._owner, group, self._now())

    def usage(self) -> StorageUsage:
        with self._shared.lock:
            self._now()
            return self._shared.table.usage(self._owner)

    def retired(self, listed: Sequence[Extent] = ()) -> list[Extent]:
        with self._shared.lock:
            self._now()
            return self._shared.table.retired(listed)

    def removed(self, extents: Sequence[Extent]) -> None:
        with self._shared.lock:
            self._now()
            self._shared.table.removed(extents)

    def adopt(self, owner: bytes, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        with self._shared.lock:
            return self._shared.table.adopt(owner, names, slots, sizes, self._now())

    def rebuilding(self, builder: int, for_s: float) -> bool:
        with self._shared.lock:
            return self._shared.table.rebuilding(builder, for_s, self._now())

    def rebuilt(self, builder: int) -> None:
        with self._shared.lock:
            self._now()
            self._shared.table.rebuilt(builder)

    def close(self) -> None:
        self._closed = True
