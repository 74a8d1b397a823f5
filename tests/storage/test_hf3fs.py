"""The suite of every storage against a store on 3FS by its POSIX engine and by USRBIO, alone and with a shared map."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hf3fs_stores import SLOT_BYTES, Stores, in_slots, stores_in
from light import light
from redis_server import RedisServer

from kvarve.storage import Storage
from kvarve.testing.suite import LABEL, CapacitySuite, Damage, MakeStorage, QuotaSuite, StorageSuite, UrlOf
from tests.sim.usrbio import Emulator


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with stores_in(tmp_path) as stores:
        yield stores


class Suites(StorageSuite, CapacitySuite, QuotaSuite):
    keeps_named = True

    def capacity_for(self, objects: int) -> int:
        return SLOT_BYTES * objects

    @pytest.fixture
    def make_storage(self, stores: Stores) -> MakeStorage:
        return stores.open

    @pytest.fixture
    def damages(self, stores: Stores) -> dict[str, Damage]:
        return in_slots(stores)

    @pytest.fixture
    def make_limited(self, stores: Stores) -> Callable[[int], Storage]:
        return lambda objects: stores.open(capacity_bytes=1 << 30, quota_bytes=objects * SLOT_BYTES)


@light
class TestPosixEngine(Suites):
    pass


@light
class TestUsrbioEngine(Suites):
    @pytest.fixture
    def stores(self, tmp_path: Path) -> Iterator[Stores]:
        daemon = Emulator(tmp_path)
        with stores_in(tmp_path, daemon) as stores:
            yield stores
        assert not daemon.misuse


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@light
class TestWithASharedMap(StorageSuite):
    """Each storage has files of its own, and finds what is in those of others; another process is one of them."""

    @pytest.fixture
    def make_storage(self, stores: Stores, server: RedisServer) -> MakeStorage:
        return partial(stores.open, metadata=server.url())

    @pytest.fixture
    def damages(self, stores: Stores) -> dict[str, Damage]:
        return in_slots(stores)

    @pytest.fixture
    def url_of(self, tmp_path: Path, server: RedisServer) -> UrlOf:
        return lambda place: (
            f"hf3fs://{tmp_path}/{place}?capacity=64MiB&engine=posix&metadata={server.url()}",
            LABEL,
        )
