"""The suite of every storage against a store on 3FS by its POSIX engine and by USRBIO."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hf3fs_server import end_servers
from hf3fs_stores import SLOT_BYTES, Stores, in_slots, stores_in
from light import light

from kvarve.storage import Storage
from kvarve.storage.hf3fs.metadata import MOST_NAMES
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


class WithAServerOfThisMachine:
    @pytest.fixture(autouse=True)
    def state(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="kv") as folder:  # a socket's path is short
            monkeypatch.setenv("XDG_STATE_HOME", folder)
            yield
            end_servers(Path(folder) / "kvarve" / "hf3fs")

    @pytest.fixture
    def make_storage(self, state: None, stores: Stores) -> MakeStorage:
        return partial(stores.open, metadata=None)

    @pytest.fixture
    def url_of(self, tmp_path: Path) -> UrlOf:
        return lambda place: (f"hf3fs://{tmp_path}/{place}?capacity=64MiB&engine=posix", LABEL)


@pytest.mark.long
class TestWithAServerOfThisMachine(WithAServerOfThisMachine, StorageSuite):
    """Other processes find the same objects, and one that is killed while it writes harms none."""


class TestCallsToAServer(WithAServerOfThisMachine):
    def test_calls_with_more_names_than_the_server_takes_at_once_are_answered(self, make_storage: MakeStorage) -> None:
        storage, names = make_storage(), [f"page-{i}" for i in range(MOST_NAMES + 2)]
        there = {0: b"first", MOST_NAMES - 1: b"last of a part", MOST_NAMES: b"next part", MOST_NAMES + 1: b"last"}
        assert all(storage.put([names[i] for i in there], [memoryview(data) for data in there.values()]))
        assert [i for i, found in enumerate(storage.exists(names)) if found] == [*there]
        buffers = [memoryview(bytearray(20)) for _ in names]
        sizes = storage.get(names, buffers)
        assert {i: bytes(buffers[i][:size]) for i, size in enumerate(sizes) if size is not None} == there
        storage.touch(names)
        assert sum(storage.delete(names)) == len(there)


@light
class TestUsrbioEngine(Suites):
    @pytest.fixture
    def stores(self, tmp_path: Path) -> Iterator[Stores]:
        daemon = Emulator(tmp_path)
        with stores_in(tmp_path, daemon) as stores:
            yield stores
        assert not daemon.misuse
