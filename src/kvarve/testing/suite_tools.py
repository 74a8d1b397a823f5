"""What the suites of storages share: how a test makes one, and short forms of its calls."""

from typing import Protocol

from kvarve.storage.base import Storage

LABEL, OTHER_LABEL = b"\x01" * 32, b"\x02" * 32


class MakeStorage(Protocol):
    def __call__(
        self,
        *,
        label: bytes = LABEL,
        description: str = "model A",
        capacity_bytes: int = 64 << 20,
        place: str = "here",
    ) -> Storage: ...


def put(storage: Storage, **objects: bytes) -> list[bool]:
    """Store these in one call."""
    return storage.put(list(objects), [memoryview(data) for data in objects.values()])


def get(storage: Storage, name: str, buffer_bytes: int = 4 << 20) -> bytes | None:
    """The object, as far as the buffer goes."""
    buffer = bytearray(buffer_bytes)
    (size_bytes,) = storage.get([name], [memoryview(buffer)])
    return None if size_bytes is None else bytes(buffer[:size_bytes])


def there(storage: Storage, *names: str) -> str:
    """Which of the names are there, as "a c"."""
    return " ".join(name for name, found in zip(names, storage.exists(names), strict=True) if found)


def holds(storage: Storage, objects: int, size_bytes: int) -> bool:
    """Whether a storage says that it holds so much, or that it cannot tell."""
    usage = storage.usage()
    return usage.objects in (objects, None) and usage.bytes in (size_bytes, None)


def evicted(storage: Storage, objects: int) -> bool:
    """The same for what it has evicted."""
    return storage.usage().evicted in (objects, None)
