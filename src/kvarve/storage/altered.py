"""A storage around another one, whose objects can be hidden, lost on reading or overwritten. Names and bytes only."""

from collections.abc import Mapping, Sequence

from kvarve.errors import StorageError
from kvarve.storage.base import Around, Storage


class AlteredStorage(Around):
    """`inner`, except that `hidden` objects do not exist and `lost` ones exist but cannot be read.

    `broken`: the calls that fail altogether. `written`: every name that was ever put here.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.hidden: frozenset[str] = frozenset()
        self.lost: frozenset[str] = frozenset()
        self.broken: frozenset[str] = frozenset()
        self.written: set[str] = set()

    def restore(self) -> None:
        """Make all objects exist and readable again."""
        self.hidden = self.lost = self.broken = frozenset()

    def read(self, name: str) -> bytes | None:
        """An object as it is stored."""
        (size_bytes,) = self.inner.get([name], [memoryview(bytearray())])
        if size_bytes is None:
            return None
        data = bytearray(size_bytes)
        self.inner.get([name], [memoryview(data)])
        return bytes(data)

    def write(self, objects: Mapping[str, bytes | bytearray]) -> None:
        """Store objects in place of those there, all of which are deleted first, since a put replaces nothing."""
        self.inner.delete([*objects])
        if not all(self.inner.put([*objects], [memoryview(data) for data in objects.values()])):
            size_bytes = sum(map(len, objects.values()))
            raise StorageError(f"no space for {size_bytes} bytes in the storage: give it more capacity")

    # The calls of the cache.

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._fail("exists")
        found = zip(names, self.inner.exists(names), strict=True)
        return [there and name not in self.hidden for name, there in found]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        self._fail("get")
        gone = self.hidden | self.lost
        here = [i for i, name in enumerate(names) if name not in gone]
        sizes: list[int | None] = [None] * len(names)
        for i, size in zip(here, self.inner.get([names[i] for i in here], [into[i] for i in here]), strict=True):
            sizes[i] = size
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self._fail("put")
        self.written.update(names)
        return self.inner.put(names, data)

    def touch(self, names: Sequence[str]) -> None:
        self._fail("touch")
        self.inner.touch(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        self._fail("delete")
        return self.inner.delete(names)

    def drop(self, group: str | None = None) -> int:
        self._fail("drop")
        return self.inner.drop(group)

    def _fail(self, call: str) -> None:
        if call in self.broken:
            raise StorageError(f"injected: this {call} fails")
