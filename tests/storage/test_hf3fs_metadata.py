"""The metadata services of a store on 3FS do what a metadata service has to do: in this process, and in a server."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from hf3fs_metadata_suite import CALLS, K, MetadataSuite, Open, number, opening
from hf3fs_server import Local
from hf3fs_stores import stores_in
from redis_server import KEPT, RedisServer

from kvarve.errors import StorageError
from kvarve.storage.hf3fs import hf3fs_backend
from kvarve.storage.hf3fs.metadata.calls import RemoteMetadata
from kvarve.storage.hf3fs.metadata.memory_metadata import forget_table
from kvarve.testing.suite import get, put


class TestInThisProcess(MetadataSuite):
    @pytest.fixture
    def open_(self, tmp_path: Path) -> Iterator[Open]:
        self.name = f"test-{number()}"
        with opening(f"memory:{self.name}", tmp_path) as opened:
            yield opened

    def lose(self) -> None:
        forget_table(self.name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), *KEPT)
    yield server
    server.close()


class TestInRedis(MetadataSuite):
    @pytest.fixture
    def open_(self, tmp_path: Path, server: RedisServer) -> Iterator[Open]:
        self.server = server
        with opening(server.url(), tmp_path) as opened:
            yield opened

    def lose(self) -> None:
        self.server.ask("FLUSHALL")

    @pytest.mark.long
    def test_a_call_with_no_name_or_as_many_as_there_may_be_is_answered(self, open_: Open) -> None:
        super().test_a_call_with_no_name_or_as_many_as_there_may_be_is_answered(open_)


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("call", "told"),
    [
        *product(CALLS, ([1] * 5, [-1], [K, 1 << 63], [2 * K, -5, 1])),
        # More than a slot has, a size that was not asked for, or a file that nothing finds again.
        ("lookup", [2 * K, 1, 1, 2 * K + 1]),
        ("lookup", [1 << 60, 1, 1, 1 << 50]),
        ("lookup", [0, 1, 1, 1]),
        ("reserve", [K, 1, 1]),
        ("reserve", [2 * K, 1 << 62, 1]),
    ],
)
def test_a_service_whose_answer_cannot_be_is_trouble_in_one_line(call: str, told: list[int]) -> None:
    with pytest.raises(StorageError, match=f"answers a call of {call} with what cannot be") as error:
        CALLS[call](Lying(told))
    assert "\n" not in str(error.value)


def test_a_slot_beyond_its_file_and_a_file_that_is_not_there_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores_in(tmp_path) as stores:
        put(stores.open(), page=b"1")
        (entry,) = stores.entries()
        slot_bytes, number, epoch = entry.slot
        beyond, elsewhere = [slot_bytes, number | 4095, epoch, 1], [slot_bytes, 1, epoch, 1]
        for told in (beyond, elsewhere, [1 << 40, number, epoch, 1 << 39]):
            with monkeypatch.context() as lied_to:
                lied_to.setattr(hf3fs_backend, "open_metadata", lambda *_, told=told: Lying(told))
                storage = stores.open()
            assert get(storage, "page") is None
        assert get(stores.open(), "page") == b"1"
