"""Two faults at once, or another process between two steps of a put: confirmed objects stay."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from file_disks import MIB, Calls, Rigged, file_name, table_path, total
from test_crashes import Quick, die, intact, names, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.put import Put
from kvarve.testing.faulty_disk import Died, FaultyDisk
from kvarve.testing.suite import LABEL


class Gate(Quick):
    """Writes to the file of this name wait at a gate, once it is there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate: threading.Event | None = None
        self.reached = threading.Event()

    def write(self, file: int, data: Any, at: int) -> int:
        if self.gate is not None and file_name(file) == self.name:
            self.reached.set()
            assert self.gate.wait(60)
        return super().write(file, data, at)


@pytest.mark.parametrize("order", [0, 1])
def test_of_two_objects_of_one_name_that_a_power_cut_leaves_the_confirmed_one_stays(tmp_path: Path, order: int) -> None:
    """The other is an old entry; another put was about to fill its slot."""
    disk = FaultyDisk(tmp_path / "store")
    disk.root.mkdir()
    storage = opened(disk.root, disk, capacity=MIB)
    some = pages("full", *range(30))
    store(storage, some)
    slabs = sorted(storage._index.slabs.values(), key=lambda slab: slab.number)
    first, second = slabs[order], slabs[1 - order]
    lies = {page: storage._index.place(page.name)[0] for page in some}
    moved, other = (next(page for page in some if lies[page] is slab) for slab in (first, second))
    storage.delete([moved.name])
    new = pages("full", 777)[0]
    put = Put([new.name], [[new.record()]])
    storage._reserve(put, [0])
    assert put.places[0][0] is first
    storage._write(put)
    storage.delete([other.name])
    assert store(storage, [moved]) == [True]
    assert storage._index.place(moved.name)[0] is second
    (slots,) = (event.file for event in disk.events if event.kind == "create" and event.path.endswith(first.path.name))
    disk.events.append(type(disk.events[0])("sync", slots))
    disk.after(len(disk.events), tmp_path / "cut", "dropped")
    again = opened(tmp_path / "cut", capacity=MIB)
    assert intact(again, [moved]) == {moved}
    again.close()
    storage.close()


def test_what_a_process_had_stored_before_it_died_is_not_taken_for_reserved(tmp_path: Path) -> None:
    folder, page = tmp_path / "store", pages("full", 2)[0]
    lagging, disk = opened(folder, capacity=MIB), Rigged()
    store(lagging, pages("full", 1))
    dying = opened(folder, disk, capacity=MIB)
    put = Put([page.name], [[page.record()]])
    dying._reserve(put, [0])
    dying._write(put)
    lagging.exists([page.name])
    disk.fail(Died(), "write", "changes", skip=1)  # the table has been written
    with pytest.raises(Died):
        dying._commit(put)
    later = opened(folder, capacity=MIB)
    die(dying)
    assert store(later, [page]) == [True]
    lagging._allocator._swept_ns = 0
    store(lagging, pages("full", 7))
    assert later.exists([page.name]) == [True]
    later.close()
    lagging.close()


def test_a_put_for_which_no_threads_are_to_be_had_gives_its_rows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FileStorage(tmp_path / "store", MIB, LABEL, "model A", threads=4, disk=Quick())
    some = pages("full", *range(6)) + pages("window", *range(6))
    with monkeypatch.context() as patch:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(StorageError, match="starts no thread"):
            store(storage, some)
    assert storage._index.states()["reserved"] == 0
    assert all(store(storage, some))
    storage.close()


def test_of_a_call_the_first_was_used_last_after_a_restart_too(tmp_path: Path) -> None:
    new, old = pages("full", 1, 2)
    storage = opened(tmp_path / "store")
    store(storage, [old])
    store(storage, [new, old])
    storage.close()
    storage = opened(tmp_path / "store")
    used = [int(slab.used[row]) for slab, row in map(storage._index.place, names([new, old]))]
    assert used[0] > used[1]
    storage.close()


def test_a_lagging_process_sees_changes_where_another_died_before_it_announced_all(tmp_path: Path) -> None:
    folder, disk = tmp_path / "store", Rigged()
    first = opened(folder, capacity=MIB)
    some = pages("full", *range(10))
    store(first, some)
    dying, lagging = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    store(first, pages("window", 1))
    disk.fail(Died(), "write", "changes", at=range(1))
    with pytest.raises(Died):
        dying.delete([some[3].name])
    die(dying)
    lagging.exists([some[0].name])
    (slab,) = {first._index.place(page.name)[0] for page in some}
    same = [page for page in some if slab.stripe(first._index.place(page.name)[1]) == slab.stripe(3)]
    for page in same:
        assert first.delete([page.name]) == [page != some[3]], "it has read the dead process's change"
        assert lagging.exists([page.name]) == [False], page
    assert intact(lagging, some) == intact(first, some) == set(some) - set(same) - {some[3]}
    first.close()
    lagging.close()


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
def test_what_a_process_leaves_that_dies_while_it_makes_or_removes_a_slab_is_room_for_the_others(
    tmp_path: Path, step: int
) -> None:
    capacity, died, count = 240 << 10, True, 0
    while died:
        folder = tmp_path / f"store-{count}"
        survivor = opened(folder, capacity=capacity)
        store(survivor, pages("full", *range(30)))
        disk = FaultyDisk(folder)
        dying = opened(folder, disk, capacity=capacity)
        disk.dies_at = len(disk.events) + count
        died = False
        try:
            store(dying, pages("state", 1, 2, 3))
            store(dying, pages("window", 1, 2, 3, 4))
        except Died:
            died = True
        for turn in range(4):
            survivor._allocator._full_until.clear()  # it would check again after some seconds
            survivor._allocator._swept_ns = 0
            fresh = pages("full", *range(100 + 9 * turn, 109 + 9 * turn))
            assert all(store(survivor, fresh))
            assert intact(survivor, fresh) == set(fresh)
        known = sum(slab.shape.bytes for slab in survivor._index.slabs.values())
        there = sum(path.stat().st_size for path in folder.rglob("slab-*"))
        assert known == there, f"dies at its event {count}"
        assert total(folder) <= capacity
        dying._open = False
        survivor.close()
        survivor = opened(folder, capacity=capacity)
        assert intact(survivor, fresh) == set(fresh)
        survivor.close()
        count += step
    assert count > 60


def test_a_slab_that_cannot_be_opened_is_left_alone_and_found_again(tmp_path: Path) -> None:
    class Locked(Quick):
        refuses = ""

        def open(self, folder: Directory, name: str, **how: bool) -> int:
            if name == self.refuses:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(folder, name, **how)

    folder, disk = tmp_path / "store", Locked()
    storage = opened(folder, capacity=MIB)
    some = pages("full", 1)
    store(storage, some)
    disk.refuses = table_path(storage._index.place(some[0].name)[0].path).name
    storage.close()
    storage = opened(folder, disk, capacity=MIB)
    assert all(store(storage, pages("window", 1) + pages("state", 1)))
    assert storage.exists(names(some)) == [False]
    disk.refuses = ""
    assert all(store(storage, pages("full", *range(2, 40))))
    assert intact(storage, some) == set(some)
    storage.close()


def test_an_open_store_whose_file_of_changes_was_removed_is_not_opened_again_and_loses_nothing(tmp_path: Path) -> None:
    folder, some = tmp_path / "store", pages("full", 1)
    storage = opened(folder, capacity=MIB)
    store(storage, some)
    (storage._folder.model.path / "changes").unlink()
    with pytest.raises(StorageError, match="end them first"):
        opened(folder, capacity=MIB)
    assert intact(storage, some) == set(some)
    storage.close()
    storage = opened(folder, capacity=MIB)
    assert intact(storage, some) == set(some)
    storage.close()


def test_a_write_that_ends_after_the_store_was_closed_overwrites_no_page(tmp_path: Path) -> None:
    folder, disk, calls = tmp_path / "store", Gate("slab-000000"), Calls()
    storage = opened(folder, disk, capacity=MIB)
    store(storage, pages("full", 1))
    disk.gate = threading.Event()
    calls.start("late", lambda: store(storage, pages("full", 2)))
    assert disk.reached.wait(60)
    storage.close()
    new = opened(folder, capacity=MIB)
    assert store(new, pages("full", 3)) == [True]
    disk.gate.set()
    assert "is closed" in str(calls.join()["late"])
    assert intact(new, pages("full", 1, 3)) == set(pages("full", 1, 3))
    new._allocator._swept_ns = 0
    assert store(new, pages("full", 4)) == [True]
    assert new._index.states()["reserved"] == 0, "and its row is free when the put has ended"
    assert new._folder.alone()
    new.close()
