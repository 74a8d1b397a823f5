"""A networked file system whose server is killed: writes go on to succeed there, and only a sync fails."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf3fs_mounts import Gluster
from hf3fs_stores import stores_in
from processes import until

from kvarve.errors import StorageError
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs.storage import Hf3fsStorage
from kvarve.testing.suite import get, put

PAGE_BYTES = 64 << 10


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Gluster]:
    volume = Gluster(tmp_path / "g")
    yield volume
    volume.close()


class Killing(Disk):
    """The brick is killed just before a write, which succeeds all the same."""

    def __init__(self, volume: Gluster) -> None:
        self.volume, self.killed, self.written = volume, True, 0

    def write(self, file: int, data: object, at: int) -> int:
        if not self.killed:
            self.killed = True
            self.volume.kill_brick()
            self.written = super().write(file, data, at)  # type: ignore[arg-type]
            return self.written
        return super().write(file, data, at)  # type: ignore[arg-type]


def answers(storage: Hf3fsStorage) -> bool:
    try:
        return get(storage, "kept") == b"kept"
    except StorageError:
        return False


@pytest.mark.long
def test_a_page_is_stored_when_its_sync_has_succeeded_and_not_when_its_write_has(volume: Gluster) -> None:
    with stores_in(volume.mount) as stores:
        disk = Killing(volume)
        storage = stores.open(disk=disk)
        assert put(storage, kept=b"kept") == [True]
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        disk.killed = False
        with pytest.raises(StorageError, match="stored 0 of 1"):
            storage.put(["lost"], [page])
        assert disk.written in (0, 4096 + PAGE_BYTES), "the write succeeds, unless the client has noticed"
        assert storage.exists(["lost"]) == [False]
        with pytest.raises(StorageError):
            get(storage, "kept")
        volume.brick_again()
        until(lambda: answers(storage), "a page that was stored before")
        assert storage.put(["lost"], [page]) == [True]
        assert get(storage, "lost") == bytes(page)
