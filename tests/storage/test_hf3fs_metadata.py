"""The metadata services of a store on 3FS do what a metadata service has to do: in this process, and in a server."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hf3fs_metadata_suite import LABEL, K, MetadataSuite, Open, number
from hf3fs_server import Local
from redis_server import RedisServer

from kvarve.errors import StorageError
from kvarve.storage.hf3fs.metadata import Metadata, open_metadata
from kvarve.storage.hf3fs.metadata.calls import RemoteMetadata
from kvarve.storage.hf3fs.metadata.memory import forget_table


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


@pytest.mark.parametrize(
    "told", [[], [4096, 1, 1, 0, 0], [8192, 1, 1, 4097], [8192, 1, 1, -1], [1 << 60, 1, 1, 1 << 50], [-8192, 1, 1, 0]]
)
def test_a_service_that_finds_what_cannot_be_is_trouble(told: list[int]) -> None:
    class Lying(RemoteMetadata):
        def _ask(self, call: str, names: Sequence[str], numbers: Sequence[int]) -> list[int]:
            return told

        def close(self) -> None: ...

    with pytest.raises(StorageError, match="no lookup finds"):
        Lying().lookup(["a"], 1, 1.0)
