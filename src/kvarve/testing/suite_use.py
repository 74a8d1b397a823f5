"""Parts of the suite: how storages are used (several at a place, any buffer, large calls, ends at any time), and what
becomes of objects that are not what was put: one of them costs itself, and no other."""

import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Protocol

import pytest

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, deadline

LABEL, OTHER_LABEL = b"\x01" * 32, b"\x02" * 32
LONG_S = 60.0
OBJECT_BYTES = 20_000
WRITER = """
import itertools, sys
from kvarve.storage import open_storage
storage = open_storage(sys.argv[1], label=bytes.fromhex(sys.argv[2]), description="model A")
for turn in itertools.count():
    names = [f"page-{turn}-{i}" for i in range(8)]
    assert storage.put(names, [memoryview(bytes([turn % 251]) * int(sys.argv[3]))] * 8) == [True] * 8
    print(turn, flush=True)
"""
# What another program may have written in an object's place, where that is bytes.
OTHER_BYTES = {
    "another program's bytes": b"x" * OBJECT_BYTES,
    "fewer bytes": b"x" * (OBJECT_BYTES // 3),
    "more bytes": b"x" * (3 * OBJECT_BYTES),
    "no byte": b"",
}
Damage = Callable[[Storage, str], object]
UrlOf = Callable[[str], tuple[str, bytes]]
MakeAging = Callable[[float], tuple[Storage, Callable[[float], None]]]


class MakeStorage(Protocol):
    def __call__(
        self, *, label: bytes = LABEL, description: str = "model A", capacity_bytes: int = 64 << 20, place: str = "here"
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


class UseSuite:
    """A part of `StorageSuite`."""

    @pytest.fixture
    def url_of(self) -> UrlOf | None:
        """The URL and the label by which another process opens what `make_storage` opens at a place; None: none can."""
        return None

    def settle(self, storage: Storage) -> None:
        """Return when a storage has no work left to do, for one that works in the background."""

    def test_two_storages_of_one_place_see_the_same_objects(self, make_storage: MakeStorage) -> None:
        one, other = make_storage(), make_storage()
        assert put(one, a=b"1", b=b"22") == [True, True]
        self.settle(one)
        assert (there(other, "a", "b"), get(other, "b")) == ("a b", b"22")
        assert put(other, a=b"another", c=b"333") == [True, True]
        self.settle(other)
        assert (get(one, "a"), get(one, "c")) == (b"1", b"333")
        assert other.delete(["a"]) == [True]
        assert (there(one, "a", "b", "c"), get(one, "a")) == ("b c", None)
        assert one.delete(["a"]) == [False]
        assert holds(one, 2, 5) and holds(other, 2, 5)
        one.close()
        assert put(other, a=b"new") == [True]
        assert get(other, "a") == b"new"
        assert other.drop() == 3

    def test_a_process_that_is_killed_while_it_stores_leaves_only_whole_objects(
        self, make_storage: MakeStorage, url_of: UrlOf | None
    ) -> None:
        if url_of is None:
            pytest.skip("no other process can open it")
        url, label = url_of("here")
        make_storage()  # what it has to make is there
        words = [sys.executable, "-c", WRITER, url, label.hex(), str(OBJECT_BYTES)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            told = [line for line, _ in zip(writer.stdout, range(4), strict=False)]
            writer.kill()
            told += writer.stdout
        assert len(told) >= 4, "the other process stored something"
        storage = make_storage()
        turns = len(told) + 1
        buffers = [memoryview(bytearray(OBJECT_BYTES)) for _ in range(8)]
        for turn in range(turns):
            names = [f"page-{turn}-{i}" for i in range(8)]
            sizes = storage.get(names, buffers)
            for size, buffer in zip(sizes, buffers, strict=True):
                assert size == OBJECT_BYTES or (size is None and turn >= len(told)), f"turn {turn} of {len(told)}"
                assert size is None or bytes(buffer) == bytes([turn % 251]) * OBJECT_BYTES
        again = [f"page-{turns - 1}-{i}" for i in range(8)]
        assert storage.put(again, [memoryview(bytes(OBJECT_BYTES))] * 8) == [True] * 8

    @pytest.mark.parametrize("offset", [0, 1, 512])
    def test_buffers_may_lie_anywhere_and_those_of_a_put_be_read_only(
        self, make_storage: MakeStorage, offset: int
    ) -> None:
        storage = make_storage()
        memory = memoryview(mmap.mmap(-1, 1 << 20))
        places = {"a": (4096, 4096), "b": (64 << 10, 64 << 10), "c": (8192, 4097), "d": (0, 0)}  # start and size
        views = [memory[start + offset : start + offset + size] for start, size in places.values()]
        for number, view in enumerate(views, 1):
            view[:] = bytes([number]) * view.nbytes
        assert storage.put([*places], [view.toreadonly() for view in views]) == [True] * 4
        wanted = [bytes(view) for view in views]
        memory[:] = b"." * len(memory)
        assert storage.get([*places], views) == [view.nbytes for view in views]
        assert [bytes(view) for view in views] == wanted
        assert bytes(memory).count(b".") == len(memory) - sum(map(len, views)), "nothing beside them is written"

    def test_a_call_may_name_thousands_of_objects(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        names = [f"page-{i}" for i in range(1100)]
        data = [i.to_bytes(4, "little") * 3 for i in range(1100)]
        assert storage.put(names, [memoryview(each) for each in data]) == [True] * 1100
        assert storage.exists([*names, "page"]) == [True] * 1100 + [False]
        buffers = [bytearray(12) for _ in names]
        assert storage.get(names, [memoryview(buffer) for buffer in buffers]) == [12] * 1100
        assert buffers == data
        assert holds(storage, 1100, 13_200)
        assert storage.delete([*names[:1050], "page"]) == [True] * 1050 + [False]
        assert storage.drop("page") == 50

    def test_a_storage_with_space_left_evicts_nothing(self, make_storage: MakeStorage) -> None:
        storage = make_storage(capacity_bytes=1 << 30)
        sizes = [100 + 37 * i % 20_000 for i in range(1500)]
        block = memoryview(bytes(range(256)) * 80)
        for at in range(0, 1500, 100):
            some = range(at, at + 100)
            assert all(storage.put([f"page-{i}" for i in some], [block[: sizes[i]] for i in some]))
        assert storage.exists([f"page-{i}" for i in range(1500)]) == [True] * 1500
        assert holds(storage, 1500, sum(sizes)) and evicted(storage, 0)
        storage.drop()

    def test_a_storage_that_is_closed_under_calls_ends_them_and_loses_nothing(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, page=bytes([7]) * OBJECT_BYTES)
        rounds = threading.Semaphore(0)

        def use(call: Callable[[], object], answer: object) -> str:
            try:
                while True:
                    assert call() == answer
                    rounds.release()
            except StorageError as error:
                return str(error)

        buffers = [memoryview(bytearray(OBJECT_BYTES)) for _ in range(2)]
        fixed = memoryview(bytes([7]) * OBJECT_BYTES)
        calls: list[tuple[Callable[[], object], object]] = [
            (lambda: storage.get(["page"], [buffers[0]]), [OBJECT_BYTES]),
            (lambda: storage.get(["page"], [buffers[1]]), [OBJECT_BYTES]),
            (lambda: storage.put(["page", "other"], [fixed, fixed]), [True, True]),
            (lambda: storage.exists(["page", "none"]), [True, False]),
        ]
        with ThreadPoolExecutor(len(calls)) as pool:
            users = [pool.submit(use, *call) for call in calls]
            for _ in range(20):
                assert rounds.acquire(timeout=LONG_S)
            storage.close()
            assert all("closed" in user.result(LONG_S) for user in users)
        assert get(make_storage(), "page") == bytes(fixed)

    def test_a_call_whose_caller_gives_up_harms_no_later_call(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        names = [f"page-{i}" for i in range(8)]
        data = [memoryview(bytes([i]) * OBJECT_BYTES) for i in range(8)]
        buffers = [memoryview(bytearray(OBJECT_BYTES)) for _ in names]
        for seconds in (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, inf):
            calls: list[Callable[[], object]] = [
                lambda: storage.put(names, data),
                lambda: storage.get(names, buffers),
                lambda: storage.exists(names),
                lambda: storage.delete(["page-0"]),
            ]
            for call in calls:
                try:
                    with deadline(seconds):
                        call()
                except StorageError:
                    assert seconds < inf
            assert storage.put(names, data) == [True] * 8
            assert storage.get(names, buffers) == [OBJECT_BYTES] * 8
            assert buffers == data
            assert storage.exists([*names, "page"]) == [True] * 8 + [False]


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


class TtlSuite:
    """An object is missing once it was stored longer ago than its storage's `ttl`. For a backend that has one."""

    @pytest.fixture
    def make_aging(self) -> MakeAging:
        """Opens a storage with a ttl in seconds, and a call that lets seconds pass."""
        raise NotImplementedError

    def test_what_was_stored_too_long_ago_is_missing_however_often_it_was_read(self, make_aging: MakeAging) -> None:
        storage, wait = make_aging(1000.0)
        put(storage, a=b"1", b=b"22")
        wait(600.0)
        assert (there(storage, "a", "b"), get(storage, "a")) == ("a b", b"1")
        assert put(storage, a=b"1", c=b"333") == [True, True]
        wait(600.0)
        assert (there(storage, "a", "b", "c"), get(storage, "a"), get(storage, "c")) == ("c", None, b"333")
        assert storage.delete(["a"]) == [False]

    def test_it_can_be_stored_again(self, make_aging: MakeAging) -> None:
        storage, wait = make_aging(1000.0)
        put(storage, a=b"old")
        wait(1200.0)
        assert put(storage, a=b"new") == [True]
        wait(600.0)
        assert get(storage, "a") == b"new"


class QuotaSuite:
    """A group, which is one tenant's, has at most its quota. For a backend that has one."""

    @pytest.fixture
    def make_limited(self) -> Callable[[int], Storage]:
        """Opens a storage whose groups may have so many objects of 1 to 10 bytes."""
        raise NotImplementedError

    def test_a_group_over_its_quota_evicts_its_own_objects(self, make_limited: Callable[[int], Storage]) -> None:
        storage = make_limited(2)
        for name in ("b-0", "a-0", "a-1", "a-2"):
            assert put(storage, **{name: bytes(10)}) == [True]
        assert there(storage, "a-0", "a-1", "a-2", "b-0") == "a-1 a-2 b-0"

    def test_a_call_keeps_what_it_has_answered_for_within_the_quota(
        self, make_limited: Callable[[int], Storage]
    ) -> None:
        storage = make_limited(2)
        assert put(storage, **{f"a-{i}": bytes(10) for i in range(3)}, **{"b-0": b"1"}) == [True, True, False, True]
        assert there(storage, "a-0", "a-1", "a-2", "b-0") == "a-0 a-1 b-0"
