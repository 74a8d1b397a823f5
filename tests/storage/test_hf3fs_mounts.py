"""A real mount of type fuse.hf3fs, whose daemon is killed, stopped and started again."""

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pytest
from hf3fs_mounts import Bindfs
from hf3fs_stores import Stores, stores_in
from processes import until

from kvarve.errors import StorageError
from kvarve.storage import Breaker, check_storage
from kvarve.storage.file.disk import Directory, Disk
from kvarve.storage.hf3fs import _hf3fs_backend as hf3fs_backend
from kvarve.storage.hf3fs import _hf3fs_storage as storage_module
from kvarve.testing.suite import LABEL, get, put, there
from tests.sim.usrbio import Emulator

LONG_S = 60.0
PAGE_BYTES = 1 << 20


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Bindfs]:
    mount = Bindfs(tmp_path / "3fs")
    yield mount
    mount.close()


@pytest.fixture
def stores(mount: Bindfs) -> Iterator[Stores]:
    with stores_in(mount.mount) as stores:
        yield stores


def aligned(pages: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, pages * PAGE_BYTES))
    views = [memory[at : at + PAGE_BYTES] for at in range(0, memory.nbytes, PAGE_BYTES)]
    for number, view in enumerate(views, 1):
        view[:] = bytes([number]) * PAGE_BYTES
    return views


def test_a_mount_of_3fs_is_no_warning_and_pages_go_past_the_page_cache(
    stores: Stores, mount: Bindfs, caplog: pytest.LogCaptureFixture
) -> None:
    class Noting(Disk):
        direct = 0

        def open(self, folder: Directory, name: str, **how: bool) -> int:
            self.direct += how.get("direct", False)
            return super().open(folder, name, **how)

    disk = Noting()
    storage, views = stores.open(disk=disk), aligned(8)
    names = [f"page-{i}" for i in range(8)]
    assert all(storage.put(names, views))
    assert disk.direct > 0
    wanted = [bytes(view) for view in views]
    for view in views:
        view[:] = bytes(PAGE_BYTES)
    assert storage.get(names[::-1], views) == [PAGE_BYTES] * 8
    assert [bytes(view) for view in views] == wanted[::-1]
    assert "not on 3FS" not in caplog.text
    with stores_in(mount.source) as others:
        others.open()
        assert "is not on 3FS" in caplog.text


def test_when_the_daemon_is_killed_calls_fail_and_a_new_mount_is_used(stores: Stores, mount: Bindfs) -> None:
    storage = stores.open()
    put(storage, page=b"kept")
    mount.kill()
    for call in (lambda: put(storage, other=b"1"), lambda: get(storage, "page")):
        with pytest.raises(StorageError, match=str(mount.mount)):
            call()
    assert there(storage, "page") == "page", "the table lives elsewhere"
    mount.again()
    assert get(storage, "page") == b"kept"
    assert put(storage, other=b"1") == [True]


def test_a_mount_whose_daemon_has_ended_is_refused_in_one_line_with_either_engine(
    mount: Bindfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Emulator(mount.mount)
    monkeypatch.setattr(hf3fs_backend, "load", lambda: daemon)
    mount.kill()
    for engine in ("posix", "usrbio", "auto"):
        url = f"hf3fs://{mount.mount}/here?capacity=1GiB&engine={engine}"
        with pytest.raises(StorageError, match=str(mount.mount)) as told:
            check_storage(url, label=LABEL, description="model A")
        assert "\n" not in str(told.value)


def test_a_mount_that_stands_still_hangs_no_more_than_the_calls_in_it(
    stores: Stores, mount: Bindfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(hf3fs_backend, "OPEN_S", 0.1)
    storage, view = stores.open(), memoryview(bytearray(4))
    put(storage, page=b"kept")
    breaker = Breaker(storage, deadline_s=0.1, close_s=0.1)
    url = f"hf3fs://{mount.mount}/here?capacity=1GiB&engine=posix"
    with ThreadPoolExecutor(2) as pool:
        with mount.stopped():
            reading = pool.submit(breaker.get, ["page"], [view])
            writing = pool.submit(breaker.put, ["other"], [memoryview(b"1")])
            until(lambda: not breaker.up, "a breaker that has noticed")
            assert breaker.get(["page"], [view]) == [None]
            assert bytes(view) == bytes(4)
            with pytest.raises(StorageError, match="has not answered"):
                check_storage(url, label=LABEL, description="model A")
            with pytest.raises(NotYet):
                reading.result(0.1)
            breaker.close()  # within its time
            storage.close()
        assert reading.result(LONG_S) == [4]
        assert bytes(view) == b"kept"
        assert writing.result(LONG_S) == [True]
    again = stores.open()
    assert (get(again, "page"), get(again, "other")) == (b"kept", b"1")
