"""Named memories behind the storages under test: a place that is opened again has its objects. No tests here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from kvarve.storage import MemoryStorage, Storage, Tiers
from kvarve.storage._memory_storage import forget_memory
from kvarve.testing import MakeStorage
from kvarve.testing.suite import LABEL, Damage
from kvarve.testing.suite_use import OTHER_BYTES


@contextmanager
def over_memories(build: Callable[[Callable[[int], MemoryStorage]], Storage]) -> Iterator[MakeStorage]:
    """Opens storages that `build` makes of numbered memories; closes and drops all of them in the end."""
    here, names, opened = uuid4().hex, set[str](), list[Storage]()

    def make(
        *,
        label: bytes = LABEL,
        description: str = "model A",
        capacity_bytes: int = 64 << 20,
        place: str = "here",
    ) -> Storage:
        def memory(number: int) -> MemoryStorage:
            name = f"{here}-{place}-{number}"
            names.add(name)
            return MemoryStorage(capacity_bytes, label, description, name)

        opened.append(build(memory))
        return opened[-1]

    yield make
    for storage in opened:
        storage.close()
    for name in names:
        forget_memory(name)


def in_memory() -> dict[str, Damage]:
    """What may befall an object in all the memories of which a storage is made."""

    def replaced(data: bytes) -> Damage:
        def damage(storage: Storage, name: str) -> None:
            having = [memory for memory in memories(storage) if memory.delete([name]) == [True]]
            assert having
            for memory in having:
                memory.put([name], [memoryview(data)])

        return damage

    return {what: replaced(data) for what, data in OTHER_BYTES.items()}


def memories(storage: Any) -> list[MemoryStorage]:
    if isinstance(storage, Tiers):
        return [memory for tier in storage.tiers for memory in memories(tier)]
    return [storage] if isinstance(storage, MemoryStorage) else memories(storage.inner)
