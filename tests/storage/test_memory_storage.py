"""Memory as a storage."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from memories import in_memory, over_memories

from kvarve.errors import StorageError
from kvarve.storage import MemoryStorage
from kvarve.storage._memory_storage import forget_memory
from kvarve.testing import ByteCapacitySuite, MakeStorage, StorageSuite
from kvarve.testing.suite import LABEL, Damage, get, put


class TestMemoryStorage(StorageSuite, ByteCapacitySuite):
    @pytest.fixture
    def make_storage(self) -> Iterator[MakeStorage]:
        with over_memories(lambda memory: memory(0)) as make:
            yield make

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        return in_memory()


def test_memory_without_a_name_is_gone_when_it_is_closed():
    one, two = MemoryStorage(100, LABEL, "model A"), MemoryStorage(100, LABEL, "model A")
    put(one, a=b"1")
    assert get(two, "a") is None
    one.close()
    assert get(MemoryStorage(100, LABEL, "model A"), "a") is None


def test_two_storages_of_one_name_share_its_objects_and_close_alone():
    name = uuid4().hex
    one, two = MemoryStorage(100, LABEL, "model A", name), MemoryStorage(100, LABEL, "model A", name)
    put(one, a=b"1")
    one.close()
    assert get(two, "a") == b"1"
    with pytest.raises(StorageError, match="closed"):
        one.usage()
    forget_memory(name)
    assert get(MemoryStorage(100, LABEL, "model A", name), "a") is None
    forget_memory(name)
