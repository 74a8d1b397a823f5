"""The metadata services of a store on 3FS do what a metadata service has to do: in this process, and in a server."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hf3fs_metadata_suite import LABEL, K, MetadataSuite, Open, number
from hf3fs_server import Local
from hf3fs_stores import stores_in
from redis_server import RedisServer

from kvarve.errors import StorageError
from kvarve.storage.hf3fs.metadata import Extent, Metadata, Slot, open_metadata
from kvarve.storage.hf3fs.metadata.calls import RemoteMetadata
from kvarve.storage.hf3fs.metadata.memory import forget_table
from kvarve.testing.suite import get, put


class TestInThisProcess(MetadataSuite):
    @pytest.fixture
    def open_(self, tmp_path: Path) -> Iterator[Open]:
        self.name = f"test-{number()}"
        opened = []

        def make(slots: int = 64, label: bytes = LABEL, quota: int | None = None) -> Metadata:
            opened.append(open_metadata(f"memory:{self.name}", tmp_path, label, slots * K, quota and quota * K))
            return opened[-1]

        yield make
        for metadata in opened:
            metadata.close()

    def lose(self) -> None:
        forget_table(self.name)


class TestInRedis(MetadataSuite):
    @pytest.fixture
    def open_(self, tmp_path: Path) -> Iterator[Open]:
        self.server = RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "no")
        opened = []
        (tmp_path / "store").mkdir()

        def make(slots: int = 64, label: bytes = LABEL, quota: int | None = None) -> Metadata:
            url = self.server.url()
            opened.append(open_metadata(url, tmp_path / "store", label, slots * K, quota and quota * K))
            return opened[-1]

        yield make
        for metadata in opened:
            metadata.close()
        self.server.close()

    def lose(self) -> None:
        self.server.ask("FLUSHALL")


class TestInAServerOfThisMachine(MetadataSuite):
    @pytest.fixture
    def open_(self, local: Local) -> Open:
        self.local = local
        return local.open

    def lose(self) -> None:
        self.local.kill()
        for path in self.local.folder.glob("slots.db*"):
            path.unlink()


class Lying(RemoteMetadata):
    """A service that answers every call alike."""

    def __init__(self, told: list[int]) -> None:
        self._answer = told

    def _ask(self, call: str, names: Sequence[str], numbers: Sequence[int]) -> list[int]:
        return self._answer

    def close(self) -> None: ...


CALLS: dict[str, Callable[[Metadata], object]] = {
    "exists": lambda metadata: metadata.exists(["a"]),
    "lookup": lambda metadata: metadata.lookup(["a"], 1, 1.0),
    "release": lambda metadata: metadata.release(1),
    "reserve": lambda metadata: metadata.reserve(1, ["a"], [2 * K], 1.0),
    "commit": lambda metadata: metadata.commit(1, ["a"], [Slot(K, 1, 1)], [1]),
    "abort": lambda metadata: metadata.abort(1, [Slot(K, 1, 1)]),
    "touch": lambda metadata: metadata.touch(["a"]),
    "delete": lambda metadata: metadata.delete(["a"]),
    "drop": lambda metadata: metadata.drop(),
    "usage": lambda metadata: metadata.usage(),
    "retired": lambda metadata: metadata.retired([Extent(K, 1)]),
    "removed": lambda metadata: metadata.removed([Extent(K, 1)]),
    "adopt": lambda metadata: metadata.adopt(LABEL, ["a"], [Slot(K, 1, 1)], [1]),
    "rebuilding": lambda metadata: metadata.rebuilding(1, 1.0),
    "rebuilt": lambda metadata: metadata.rebuilt(1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("told", [[1] * 5, [-1], [1, 1, -1, 1], [K, 1 << 63], [1 << 63], [2 * K, -5, 1]])
def test_a_service_whose_answer_cannot_be_is_trouble_in_one_line(call: str, told: list[int]) -> None:
    with pytest.raises(StorageError, match=f"answers a call of {call} with what cannot be") as error:
        CALLS[call](Lying(told))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("lookup", [2 * K, 1, 1, 2 * K + 1]),
        ("lookup", [1 << 60, 1, 1, 1 << 50]),
        ("lookup", [0, 1, 1, 1]),
        ("reserve", [K, 1, 1]),
        ("reserve", [1 << 40, 1, 1]),
        ("reserve", [2 * K, 1 << 62, 1]),
    ],
)
def test_a_service_that_tells_of_slots_that_cannot_be_is_trouble(call: str, told: list[int]) -> None:
    """Of more than one slot, of a size that was not asked for, or in a file that nothing finds again."""
    with pytest.raises(StorageError, match=f"answers a call of {call} with what cannot be"):
        CALLS[call](Lying(told))


def test_a_slot_beyond_its_file_and_a_file_that_is_not_there_are_misses(tmp_path: Path) -> None:
    with stores_in(tmp_path) as stores:
        storage = stores.open()
        put(storage, page=b"1")
        honest = storage._metadata
        (found,) = honest.lookup(["page"], 1, 1.0)
        assert found is not None
        slot_bytes, number, epoch = found.slot
        beyond, elsewhere = [slot_bytes, number | 4095, epoch, 1], [slot_bytes, 1, epoch, 1]
        for told in (beyond, elsewhere, [1 << 40, number, epoch, 1 << 39]):
            storage._metadata = Lying(told)
            assert get(storage, "page") is None
        storage._metadata = honest
        assert get(storage, "page") == b"1"
