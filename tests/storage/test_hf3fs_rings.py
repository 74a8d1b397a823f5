"""USRBIO's rings: full, late, lost, dead, and used by many threads; and calls that hang when a storage is closed."""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pytest
from hf3fs_stores import Stores, calling, descriptors, stores_in
from processes import until

from gates import Gate, threads
from kvarve.errors import StorageError
from kvarve.storage import Breaker
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs import _hf3fs_storage as storage_module
from kvarve.storage.hf3fs import _io_usrbio as usrbio_module
from kvarve.system.background import BackgroundCall
from kvarve.system.regions import HostRegion, shared_region
from kvarve.testing.suite import get, put
from tests.sim.usrbio import Emulator, Fate

SOON_S, LONG_S = 0.05, 60.0
PAGE_BYTES = 20_480


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Emulator]:
    daemon = Emulator(tmp_path, seed=3)
    yield daemon
    assert not daemon.misuse


@pytest.fixture
def stores(tmp_path: Path, daemon: Emulator) -> Iterator[Stores]:
    with stores_in(tmp_path, daemon) as stores:
        yield stores


def pages(region: HostRegion) -> list[memoryview]:
    return [region.memory[at : at + PAGE_BYTES] for at in range(0, region.size_bytes, PAGE_BYTES)]


def filled(views: list[memoryview]) -> list[bytes]:
    for number, view in enumerate(views):
        view[:] = bytes([number + 1]) * view.nbytes
    return [bytes(view) for view in views]


def test_a_ring_of_few_entries_moves_a_large_call(stores: Stores, daemon: Emulator) -> None:
    daemon.most_entries = 4  # of which three can be used
    storage = stores.open()
    names = [f"page-{i}" for i in range(40)]
    data = [memoryview(bytes([i]) * (1 << i % 18)) for i in range(40)]
    assert all(storage.put(names, data))
    buffers = [memoryview(bytearray(view.nbytes)) for view in data]
    assert storage.get(names, buffers) == [view.nbytes for view in data]
    assert buffers == data


def test_pages_in_shared_memory_are_moved_where_they_lie(stores: Stores, daemon: Emulator) -> None:
    storage, region = stores.open(), shared_region(8 * PAGE_BYTES)
    storage.register(region)
    views, names = pages(region), [f"page-{i}" for i in range(8)]
    wanted, moved = filled(views), list[int]()
    daemon.behave = lambda operation: moved.append(operation.size) or Fate.DONE  # type: ignore[func-returns-value]
    assert all(storage.put(names, views))
    lent = daemon.lent
    region.memory[:] = bytes(region.size_bytes)
    assert storage.get(names[::-1], views) == [PAGE_BYTES] * 8
    assert [bytes(view) for view in views] == wanted[::-1]
    assert sorted(moved) == [4096] * 16 + [PAGE_BYTES] * 16, "a header, and the page in one piece"
    assert daemon.lent - lent <= daemon.lent // 2, "another ring, and no second iovec of the region"
    storage.close()
    stores.opened.clear()
    del storage, views
    gc.collect()
    until(lambda: daemon.lent == 0, "the end of its threads")


def test_pieces_of_which_some_are_in_shared_memory_are_one_object(stores: Stores) -> None:
    storage, region = stores.open(), shared_region(4 * PAGE_BYTES)
    storage.register(region)
    views = pages(region)
    wanted = filled(views)
    pieces = [memoryview(b"header"), views[0], views[2], memoryview(b""), memoryview(b"between"), views[1]]
    assert storage.put_pieces(["page"], [pieces]) == [True]
    assert get(storage, "page") == b"header" + wanted[0] + wanted[2] + b"between" + wanted[1]


@pytest.mark.parametrize("shared", [True, False], ids=["in place", "copied"])
def test_a_call_does_not_end_while_something_may_be_moved_and_is_right_when_it_does(
    stores: Stores, daemon: Emulator, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usrbio_module, "_LOOK_S", 0.001)
    storage, region = stores.open(), shared_region(2 * PAGE_BYTES)
    if shared:
        storage.register(region)
    views = pages(region)
    wanted = filled(views)

    def late(call: Callable[[], object]) -> object:
        daemon.behave = lambda _: Fate.LATE
        asked = pool.submit(call)
        until(lambda: daemon.held >= 2 + 2 * shared, "two moves that were asked for")
        with pytest.raises(NotYet):
            asked.result(SOON_S)
        daemon.behave = lambda _: Fate.DONE
        daemon.release()
        return asked.result(LONG_S)

    with ThreadPoolExecutor(1) as pool:
        assert late(lambda: storage.put(["a", "b"], views)) == [True, True]
        region.memory[:] = b"." * region.size_bytes
        assert late(lambda: storage.get(["a", "b"], views)) == [PAGE_BYTES] * 2
    assert [bytes(view) for view in views] == wanted


def test_a_daemon_that_answers_nothing_opens_the_circuit_until_it_does(stores: Stores, daemon: Emulator) -> None:
    breaker, view = Breaker(stores.open(), deadline_s=SOON_S, close_s=SOON_S), memoryview(bytearray(1))
    put(breaker, page=b"1")
    daemon.behave = lambda _: Fate.LATE
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(breaker.get, ["page"], [view])
        until(lambda: not breaker.up, "a breaker that has noticed")
        assert breaker.get(["page"], [memoryview(bytearray(1))]) == [None] and bytes(view) == b"\0"
        daemon.behave = lambda _: Fate.DONE
        daemon.release()
        assert reading.result(LONG_S) == [1] and bytes(view) == b"1"
    until(lambda: get(breaker, "page") == b"1", "a breaker that is closed again")
    breaker.close()


class Mount(Disk):
    """Its daemon may have ended, and its folder has another identity after a mount."""

    mounts = 0
    gone = False

    def is_there(self, path: str, identity: tuple[int, int]) -> bool:
        return identity[0] == self.mounts

    def _entered(self, *args: object) -> object:
        found = super()._entered(*args)  # type: ignore[arg-type]
        return type(found)(found.path, found.file, found.owner, (self.mounts, found.identity[1]))

    def space(self, folder: object) -> tuple[int, int]:
        if self.gone:
            raise OSError(107, "Transport endpoint is not connected")
        return 1 << 40, 1 << 40


def test_a_call_ends_when_the_daemon_has_ended(
    tmp_path: Path, daemon: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usrbio_module, "_LOOK_S", SOON_S)
    disk = Mount()
    with stores_in(tmp_path, daemon) as stores:
        storage, region = stores.open(disk=disk), shared_region(PAGE_BYTES)
        storage.register(region)
        assert all(storage.put(["a"], pages(region)))
        daemon.behave = lambda _: Fate.LOST
        disk.gone = True
        with pytest.raises(StorageError, match="has ended"):
            storage.get(["a"], pages(region))
        with pytest.raises(StorageError, match="has ended"):
            storage.put(["b"], pages(region))


def test_a_daemon_that_has_ended_is_trouble_and_a_mount_that_is_back_is_used(
    tmp_path: Path, daemon: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usrbio_module, "_LOOK_S", SOON_S)
    disk = Mount()
    with stores_in(tmp_path, daemon) as stores:
        storage, region = stores.open(disk=disk, threads=1), shared_region(2 * PAGE_BYTES)
        storage.register(region)
        views = pages(region)
        wanted = filled(views)
        assert all(storage.put(["a", "b"], views))
        daemon.kill()
        disk.gone = True
        for _ in range(3):
            with pytest.raises(StorageError):
                put(storage, c=b"3")
        daemon.alive, disk.mounts, disk.gone = True, 1, False
        assert put(storage, c=b"3") == [True]
        region.memory[:] = bytes(region.size_bytes)
        assert storage.get(["a", "b"], views) == [PAGE_BYTES] * 2
        assert [bytes(view) for view in views] == wanted


class Held(Disk):
    """Its writes to slots wait for a gate, as on a mount that stands still."""

    def __init__(self) -> None:
        self.gate: Gate | None = None

    def write(self, file: int, data: object, at: int) -> int:
        if self.gate is not None:
            self.gate()
        return super().write(file, data, at)  # type: ignore[arg-type]


def test_a_close_under_a_call_that_hangs_ends_and_what_it_uses_is_closed_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "CLOSE_S", SOON_S)
    disk = Held()
    with stores_in(tmp_path) as stores:
        storage = stores.open(disk=disk)
        disk.gate = Gate()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(put, storage, page=b"1")
            assert disk.gate.begun.wait(LONG_S)
            storage.close()
            assert descriptors(tmp_path), "they are in use"
            with pytest.raises(StorageError, match="closed"):
                storage.exists(["page"])
            disk.gate.may_end.set()
            assert writing.result(LONG_S) == [True]
        disk.gate = None
        storage.close()
        gc.collect()
        assert not descriptors(tmp_path)
        until(lambda: not threads("kvarve 3fs"), "the end of its threads")
        assert get(stores.open(), "page") == b"1"


def test_a_child_that_was_forked_in_the_middle_of_a_call_is_told_so_and_does_not_wait_for_it(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, child = stores.open(), os.getpid() + 1
    with monkeypatch.context() as forked, calling(storage):
        forked.setattr(os, "getpid", lambda: child)
        asked = BackgroundCall("asks", lambda: storage.exists(["page"]))
        with pytest.raises(StorageError, match="before a fork"):
            asked.result(LONG_S)
