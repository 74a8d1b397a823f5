"""Hazards of Mooncake, each reproduced with a real master and real owners of memory."""

import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mooncake_cluster import (
    LABEL,
    MASTER,
    METRICS,
    MIB,
    Cluster,
    kill,
    own_network,
    require_mooncake,
    stopped,
)
from processes import until

from kvarve.errors import StorageError
from kvarve.storage.mooncake._client import Client, Settings, library
from kvarve.storage.mooncake._mooncake_storage import MooncakeStorage
from kvarve.system.regions import HostRegion, address
from kvarve.testing.suite import get, put, there

pytestmark = pytest.mark.long  # the suite of every storage, and a library that imitates this one, are in the short form
PAGE = MIB // 4
FLAGS = ("--default_kv_lease_ttl=400", "--client_ttl=2", "--put_start_discard_timeout_sec=1")


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    require_mooncake()
    with own_network():
        cluster = Cluster(tmp_path, *FLAGS, *getattr(request, "param", ()))
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture
def opened(cluster: Cluster) -> Iterator[Callable[..., MooncakeStorage]]:
    """Opens storages, which go with the test."""
    storages: list[MooncakeStorage] = []

    def open_one(label: bytes = LABEL, watched: "Watched | None" = None, **more: object) -> MooncakeStorage:
        settings = Settings(**({"master": MASTER, "metrics": METRICS} | more))  # type: ignore[arg-type]
        make = {} if watched is None else {"make": lambda: watched}
        storages.append(MooncakeStorage(settings, label, "model A", lambda it: Client(it, **make)))
        return storages[-1]

    yield open_one
    with ThreadPoolExecutor(4) as pool:
        for closed in [pool.submit(storage.close) for storage in storages]:
            closed.result()


class Pages:
    """Host memory that the storage knows, as the arenas are."""

    def __init__(self, storage: MooncakeStorage, count: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, count * PAGE))
        self.names = [f"page-{i}" for i in range(count)]
        self.views = [self.memory[at : at + PAGE] for at in range(0, count * PAGE, PAGE)]
        storage.register(HostRegion(self.memory))

    def fill(self, first: int) -> None:
        for number, view in enumerate(self.views):
            view[:] = bytes([first + number]) * PAGE

    def holds(self, first: int) -> bool:
        return all(view == bytes([first + number]) * PAGE for number, view in enumerate(self.views))

    def blank(self) -> None:
        self.memory[:] = bytes(len(self.memory))

    def is_blank(self) -> bool:
        return self.memory == bytes(len(self.memory))


def works(storage: MooncakeStorage, name: str = "some") -> bool:
    """Whether an object can be stored and read now; False during an outage."""
    try:
        return put(storage, **{name: b"x" * 100}) == [True] and get(storage, name) == b"x" * 100
    except StorageError:
        return False


def reads(storage: MooncakeStorage, name: str) -> bool:
    try:
        return get(storage, name) is not None
    except StorageError:
        return False


class Watched:
    """The real library, with RDMA's rule: every byte that it touches has to be registered."""

    def __init__(self) -> None:
        self.real = library()
        self.known: list[tuple[int, int]] = []
        self.moved: list[int] = []
        self.asked: list[str] = []  # keys, by the last call
        self.reading = threading.Event()  # a get has begun
        self.batch_remove = self.real.batch_remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def register_buffer(self, address: int, size: int) -> int:
        self.known.append((address, address + size))
        return int(self.real.register_buffer(address, size))

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked = keys
        return list(self.real.batch_is_exist(keys))

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._check(addresses, sizes)
        return list(self.real.batch_put_from(keys, addresses, sizes))

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.reading.set()
        self._check(addresses, sizes)
        return list(self.real.batch_get_into(keys, addresses, sizes))

    def _check(self, addresses: list[int], sizes: list[int]) -> None:
        for at, size in zip(addresses, sizes, strict=True):
            assert any(start <= at and at + size <= end for start, end in self.known), "not registered"
        self.moved += addresses


def test_a_get_that_failed_writes_nothing_after_it_has_returned(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    owner, storage = cluster.owner(), opened()
    pages = Pages(storage, 12)
    pages.fill(1)
    assert all(storage.put(pages.names, pages.views))
    with stopped(owner):
        with pytest.raises(StorageError, match="read 0 of 12 objects"):
            storage.get(pages.names, pages.views)
        pages.blank()
    until(lambda: works(storage), "an owner that goes on")
    assert pages.is_blank()


def test_an_owner_that_is_killed_takes_its_pages_alone(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    first, storage = cluster.owner(), opened()
    pages = Pages(storage, 8)
    pages.fill(1)
    cluster.owner()
    more = [f"{name}-{n}" for n in range(4) for name in pages.names]  # by chance on one or the other
    assert all(storage.put(more, pages.views * 4))
    kill(first)
    pages.blank()
    for name, view in zip(more, pages.views * 4, strict=True):
        with suppress(StorageError):
            assert storage.get([name], [view]) == [None] or view[:1] == bytes([1 + int(name.split("-")[1])])
    sizes = storage.get(more, [memoryview(bytearray(PAGE)) for _ in more])
    assert {None, PAGE} == {*sizes}, "some of the others' answer all the same"
    until(lambda: storage.exists(more) == [size is not None for size in sizes], "a master that noticed")
    until(lambda: works(storage), "space at the other owner")


def test_an_outage_is_no_miss_and_ends_by_itself(cluster: Cluster, opened: Callable[..., MooncakeStorage]) -> None:
    cluster.owner()
    storage, one = opened(), memoryview(bytearray(b"."))
    assert works(storage)
    calls: list[Callable[[], object]] = [
        lambda: storage.exists(["some"]),
        lambda: storage.get(["some"], [one]),
        lambda: storage.put(["other"], [one]),
        lambda: storage.delete(["some"]),
        lambda: storage.drop("some"),
    ]
    kill(cluster.master)
    for call in calls:
        with pytest.raises(StorageError, match="master"):
            call()
    assert one == b"."
    assert storage.usage().capacity_bytes is None, "no master answers"
    cluster.start_master()
    until(lambda: works(storage, "again"), "an owner that has found the new master")
    assert storage.exists(["some"]) == [False], "the new master knows nothing of before"


@pytest.mark.parametrize("cluster", [("--default_kv_lease_ttl=5000",)], indirect=True)
def test_a_full_segment_takes_no_more_until_leases_end(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner(16 * MIB)
    storage = opened()
    pages = Pages(storage, 32)
    pages.fill(1)
    first = storage.put(pages.names, pages.views)
    more = [[f"more-{n}-{name}" for name in pages.names] for n in range(2)]
    second = storage.put([*more[0], *more[1]], pages.views * 2)
    assert first == [True] * 32
    assert True in second
    assert False in second, "an object that was looked up is under a lease, so it is not evicted for this"
    evicted = storage.counts["not there after a put"]  # an object is under no lease until it has been looked up
    assert storage.counts["no space"] + evicted == second.count(False)
    assert storage.usage().capacity_bytes == 16 * MIB
    until(lambda: all(storage.put(["later"], pages.views[:1])), "an eviction")
    pages.blank()
    sizes = storage.get(pages.names, pages.views)  # the master decides which objects leave
    for number, (size, view) in enumerate(zip(sizes, pages.views, strict=True)):
        assert view == (bytes([1 + number]) if size else b"\0") * PAGE


def test_an_object_is_removed_at_once_also_while_this_process_reads_it(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    owner, watched = cluster.owner(), Watched()
    storage = opened(watched=watched)
    pages = Pages(storage, 1)
    pages.fill(1)
    assert storage.put(pages.names, pages.views) == [True]
    with stopped(owner), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(storage.get, pages.names, pages.views)
        assert watched.reading.wait(60)
        assert storage.delete(pages.names) == [True]
        assert watched.real.batch_is_exist(watched.asked) == [0]
        with pytest.raises(StorageError):
            reading.result()
    assert storage.exists(pages.names) == [False]


def test_every_byte_that_mooncake_moves_is_registered_and_pages_are_moved_where_they_lie(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner()
    watched = Watched()
    storage = opened(watched=watched)
    pages = Pages(storage, 40)
    pages.fill(1)
    assert all(storage.put(pages.names, pages.views))
    pages.blank()
    assert storage.get(pages.names, pages.views) == [PAGE] * 40
    assert pages.holds(1)
    assert watched.moved == [address(view) for view in pages.views] * 2
    # Other buffers go through the bounce buffer: read-only, small, large, and larger than the bounce buffer.
    objects = {"small": b"1", "none": b"", "large": bytes(9 * MIB), "other": b"o" * MIB}
    assert all(put(storage, **objects))
    assert {name: get(storage, name, 10 * MIB) for name in objects} == objects
    buffer = bytearray(5)
    assert storage.get(["large"], [memoryview(buffer)]) == [9 * MIB]


# --- what owners keep, and who shares it


def test_without_an_owner_nothing_is_there_and_nothing_is_taken_until_there_is_one(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    storage = opened()
    assert put(storage, page=b"x" * 100) == [False]
    owner = cluster.owner()
    assert put(storage, page=b"x" * 100) == [True]
    kill(owner)
    until(lambda: storage.exists(["page"]) == [False], "a master that noticed")
    assert put(storage, page=b"x" * 100) == [False]
    assert get(storage, "page") is None
    cluster.owner()
    assert put(storage, page=b"y" * 100) == [True]
    assert get(storage, "page") == b"y" * 100


def test_what_an_owner_that_stands_still_does_not_take_is_not_there(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    owner, storage = cluster.owner(), opened()
    pages = Pages(storage, 4)
    pages.fill(1)
    assert works(storage), "or the first contact with a frozen owner would cost a minute for each object"
    with stopped(owner), pytest.raises(StorageError, match="stored 0 of 4 objects"):
        storage.put(pages.names, pages.views)

    def taken() -> bool:
        with suppress(StorageError):  # for a while no owner takes them
            return all(storage.put(pages.names, pages.views))
        return False

    until(taken, "an owner that goes on")
    pages.blank()
    assert storage.get(pages.names, pages.views) == [PAGE] * 4
    assert pages.holds(1)


def test_a_master_that_stands_still_costs_a_second_and_nothing_else(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner()
    storage = opened()
    assert works(storage)
    with stopped(cluster.master):
        with pytest.raises(StorageError, match="does not answer"):
            storage.exists(["some"])
        with pytest.raises(StorageError, match="does not answer"):
            get(storage, "some")
    assert storage.exists(["some"]) == [True]
    assert get(storage, "some") == b"x" * 100


def test_a_client_that_is_an_owner_too_lends_its_memory_to_the_next_master(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    storage = opened(segment_bytes=32 * MIB)
    assert works(storage)
    kill(cluster.master)
    cluster.start_master()
    until(lambda: works(storage, "again"), "the client's own segment")


UNFINISHED = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
print(store.batch_put_session_start([sys.argv[2]], [100]), flush=True)
sys.stdin.read()
"""


def test_a_put_of_what_a_dead_writer_began_is_not_taken_for_done(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner()
    storage = opened()
    key = storage._prefix + "page"
    writer = subprocess.Popen(
        [sys.executable, "-c", UNFINISHED, MASTER, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "[0]"
        kill(writer)
    with storage._client._entered() as raw:
        data = bytearray(b"x" * 100)
        assert raw.store.batch_put_from([key], [address(memoryview(data))], [100]) == [0], "it says that it is done"
    assert put(storage, page=b"x" * 100) == [False]
    assert get(storage, "page") is None
    assert storage.counts["not there after a put"] == 1
    until(lambda: put(storage, page=b"x" * 100) == [True], "a master that has given the writer up")
    assert get(storage, "page") == b"x" * 100


def test_what_is_deleted_under_a_lease_is_gone_at_once(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner()
    storage = opened()
    assert put(storage, page=b"damaged" * 9) == [True]
    assert storage.exists(["page"]) == [True], "which takes a lease"
    assert storage.delete(["page"]) == [True]
    assert storage.exists(["page"]) == [False]
    assert put(storage, page=b"good" * 9) == [True]
    assert get(storage, "page") == b"good" * 9


def test_models_share_a_master_and_each_drops_its_own(cluster: Cluster, opened: Callable[..., MooncakeStorage]) -> None:
    cluster.owner()
    ours, theirs = opened(), opened(b"\x02" * 32)
    names = {"aa-1.kv.0": b"1", "aa-2.kv.0": b"2", "ab-1.kv.0": b"3", "plain": b"4"}
    for storage in (ours, theirs):
        assert all(put(storage, **names))
    assert ours.drop("aa") == 2
    assert there(ours, *names) == "ab-1.kv.0 plain"
    assert ours.drop() == 2
    assert there(ours, *names) == ""
    assert there(theirs, *names) == " ".join(names)


WRITER = """
import os, sys
from kvarve.storage import open_storage
storage = open_storage(sys.argv[1], label=bytes([1]) * 32, description="model A")
assert storage.put(["page"], [memoryview(bytes(range(256)) * 400)]) == [True]
os.kill(os.getpid(), 9)
"""


def test_a_client_that_was_killed_leaves_its_pages_with_their_owner(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner()
    ended = subprocess.run([sys.executable, "-c", WRITER, f"mooncake://{MASTER}"], check=False, timeout=60)
    assert ended.returncode == -9
    assert get(opened(), "page") == bytes(range(256)) * 400


def test_replicas_and_pins_are_passed_to_the_library(cluster: Cluster, opened: Callable[..., MooncakeStorage]) -> None:
    owners = [cluster.owner(), cluster.owner()]
    storage = opened(replicas=2, soft_pin=True, hard_pin=True)
    assert works(storage)
    kill(owners[0])
    until(lambda: reads(storage, "some"), "a master that noticed")
    assert storage.usage().objects == 1, "no call stored it again"
