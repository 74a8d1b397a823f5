"""More hazards of Mooncake with a real master and real owners: of what these keep, and who shares it."""

import mmap
import subprocess
import sys
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
from kvarve.regions import HostRegion
from kvarve.storage.mooncake.client import address_of, library
from kvarve.storage.mooncake.settings import Settings
from kvarve.storage.mooncake.storage import MooncakeStorage
from kvarve.testing.suite import get, put, there

pytestmark = pytest.mark.long
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

    def open_one(label: bytes = LABEL, **more: object) -> MooncakeStorage:
        settings = Settings(**({"master": MASTER, "metrics": METRICS} | more))  # type: ignore[arg-type]
        storages.append(MooncakeStorage(settings, label, "model A"))
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
        assert raw.store.batch_put_from([key], [address_of(memoryview(data))], [100]) == [0], "it says that it is done"
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


def test_a_version_that_cannot_remove_under_a_lease_hides_the_object_until_it_can(
    cluster: Cluster, opened: Callable[..., MooncakeStorage]
) -> None:
    cluster.owner()
    storage, other = opened(), opened()
    with storage._client._entered() as raw:
        raw.can_force = False
    assert put(storage, page=b"damaged" * 9) == [True]
    assert storage.delete(["page"]) == [True]
    assert other.exists(["page"]) == [True], "it is under a lease"
    assert storage.exists(["page"]) == [False]
    assert get(storage, "page") is None
    assert storage.delete(["page"]) == [False]
    until(lambda: put(storage, page=b"good" * 9) == [True], "the end of the lease")
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


class Watched:
    """The real library, with RDMA's rule: every byte that it touches has to be registered."""

    def __init__(self) -> None:
        self.real = library()
        self.known: list[tuple[int, int]] = []
        self.moved: list[int] = []
        self.batch_remove = self.real.batch_remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def register_buffer(self, address: int, size: int) -> int:
        self.known.append((address, address + size))
        return int(self.real.register_buffer(address, size))

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._check(addresses, sizes)
        return list(self.real.batch_put_from(keys, addresses, sizes))

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._check(addresses, sizes)
        return list(self.real.batch_get_into(keys, addresses, sizes))

    def _check(self, addresses: list[int], sizes: list[int]) -> None:
        for address, size in zip(addresses, sizes, strict=True):
            assert any(start <= address and address + size <= end for start, end in self.known), "not registered"
        self.moved += addresses
