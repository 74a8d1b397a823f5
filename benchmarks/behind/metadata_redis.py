"""A Redis whose scripts are the metadata of a store, kept as its page in the docs says."""

from pathlib import Path

from redis_server import RedisServer

from behind.metadata import resident_bytes
from kvarve.storage.hf3fs.metadata import Metadata, open_metadata


class Redis:
    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder / "server", "--appendonly", "yes", "--appendfsync", "everysec")
        self._store = folder / "store"
        self._store.mkdir()

    def open(self, capacity_bytes: int) -> Metadata:
        return open_metadata(self._server.url(), self._store, b"bench", capacity_bytes, None)

    def memory_bytes(self) -> int:
        return resident_bytes(self._server.process.pid)

    def restart(self) -> None:
        self._server.kill()
        self._server.start()

    def close(self) -> None:
        self._server.close()
