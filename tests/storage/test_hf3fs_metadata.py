"""The metadata services of a store on 3FS do what a metadata service has to do: in this process, and in a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hf3fs_metadata_suite import LABEL, K, MetadataSuite, Open, number
from hf3fs_server import Local
from redis_server import RedisServer

from kvarve.storage.hf3fs.metadata import Metadata, open_metadata
from kvarve.storage.hf3fs.metadata.memory import forget_table


class TestInThisProcess(MetadataSuite):
    @pytest.fixture
    def open_(self, tmp_path: Path) -> Iterator[Open]:
        self.name = f"test-{number()}"
        opened = []

        def make(slots: int = 64, label: bytes = LABEL, quota: int | None = None) -> Metadata:
            opened.append(open_metadata(f"memory:{self.name}", tmp_path, label, "A", slots * K, quota and quota * K))
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
            opened.append(open_metadata(url, tmp_path / "store", label, "A", slots * K, quota and quota * K))
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
