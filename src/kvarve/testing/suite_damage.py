"""The part of the suite about objects that are not what was put: one of them costs itself, and no other."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from kvarve.storage.base import Storage
from kvarve.testing.suite_tools import MakeStorage, holds
from kvarve.testing.suite_use import OBJECT_BYTES, UseSuite

Damage = Callable[[Storage, str], object]
# What another program may have written in an object's place, where that is bytes.
OTHER_BYTES = {
    "another program's bytes": b"x" * OBJECT_BYTES,
    "fewer bytes": b"x" * (OBJECT_BYTES // 3),
    "more bytes": b"x" * (3 * OBJECT_BYTES),
    "no byte": b"",
}


def read(storage: Storage, names: Sequence[str]) -> list[bytes | None]:
    """Each object as a caller takes it: None if it is missing or of another size than it was put with."""
    buffers = [memoryview(bytearray(OBJECT_BYTES)) for _ in names]
    sizes = storage.get(names, buffers)
    return [bytes(view) if size == OBJECT_BYTES else None for size, view in zip(sizes, buffers, strict=True)]


class DamageSuite(UseSuite):
    """A part of `StorageSuite`."""

    @pytest.fixture
    def damages(self) -> Mapping[str, Damage]:
        """What may befall a stored object, by name: `damage(storage, name)` does it, past the storage that
        `make_storage` has opened: a flipped bit, bytes of another program, a value of another type, a lost file."""
        return {}

    def test_a_damaged_object_costs_itself_and_no_other(
        self, make_storage: MakeStorage, damages: Mapping[str, Damage]
    ) -> None:
        if not damages:
            pytest.skip("its tests know no way to damage an object")
        alone, *together = names = [f"page-{i}" for i in range(6)]
        whole = [bytes([i + 1]) * OBJECT_BYTES for i in range(6)]
        data, others = [memoryview(each) for each in whole], [0, 1, 3, 4]  # of those read together
        for number, (what, damage) in enumerate(damages.items()):
            storage = make_storage(place=f"damaged-{number}")
            assert storage.put(names, data) == [True] * 6
            self.settle(storage)
            damage(storage, alone)
            damage(storage, together[2])
            for _ in range(4):  # nothing else is asked for meanwhile
                assert read(storage, [alone]) != whole[:1], what
            (size,) = storage.get([alone], [memoryview(bytearray(OBJECT_BYTES))])
            assert size is not None or storage.exists([alone]) == [False], f"{what}: its caller would not delete it"
            found = read(storage, together)
            assert found[2] != whole[3], what
            assert [found[i] for i in others] == [whole[i + 1] for i in others], what
            storage.touch(names)
            assert [storage.exists(together)[i] for i in others] == [True] * 4, what
            assert [storage.put(together, data[1:])[i] for i in others] == [True] * 4, what
            damaged = [alone, together[2]]
            storage.delete(damaged)  # as a caller does whose check has failed
            assert storage.exists(damaged) == [False] * 2, what
            assert storage.put(names, data) == [True] * 6, what
            self.settle(storage)
            assert read(storage, names) == whole, what
            assert holds(storage, 6, 6 * OBJECT_BYTES), what
            storage.drop()


__all__ = ["OTHER_BYTES", "Damage", "DamageSuite"]
