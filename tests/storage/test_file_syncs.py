"""Objects that a put has confirmed are on the medium, whichever sync fails, and whichever caller sees the error."""

import errno
import os
import threading
from pathlib import Path

import pytest
from file_disks import MIB, Calls, Clockwork, Failing, Rigged, file_name, trouble
from test_crashes import Quick, die, intact, names, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.testing.faulty_disk import Died
from kvarve.testing.suite import LABEL

HEAD = range(1)


def test_when_the_syncs_of_two_slabs_fail_nothing_of_the_put_is_there(tmp_path: Path) -> None:
    disk = Failing()
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    store(storage, pages("full", 0) + pages("window", 0))
    disk.fails["sync"] = errno.EIO
    with pytest.raises(StorageError, match="Input/output error"):
        store(storage, pages("full", 1) + pages("window", 1))
    disk.fails.clear()
    assert storage.exists(names(pages("full", 0, 1) + pages("window", 0, 1))) == [True, False, True, False]
    storage.close()


@pytest.mark.parametrize("which", [".table", "0"])
def test_of_two_puts_that_sync_one_slab_neither_is_confirmed_when_the_kernel_tells_one_that_it_failed(
    tmp_path: Path, which: str
) -> None:
    """Linux marks pages whose writeback failed as clean, and says so once for each descriptor."""

    class Once(Quick):
        def __init__(self) -> None:
            self.both: threading.Barrier | None = None
            self.one, self.said = threading.Lock(), False

        def sync(self, file: int) -> None:
            if self.both is not None and file_name(file).endswith(which):
                self.both.wait(60)
                with self.one:
                    said, self.said = self.said, True
                if not said:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk, calls = Once(), Calls()
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    disk.both = threading.Barrier(2)
    for number in (2, 3):
        calls.start(str(number), lambda number=number: store(storage, pages("full", number)))  # type: ignore[misc]
    answers = calls.join()
    assert [type(answers[number]) for number in "23"] == [StorageError] * 2, answers
    assert storage.exists(names(pages("full", 1, 2, 3))) == [True, False, False]
    disk.both = None
    assert store(storage, pages("full", 2, 3)) == [True, True]
    storage.close()


def test_what_another_put_has_been_syncing_for_long_is_not_confirmed_by_its_age(tmp_path: Path) -> None:
    class Slow(Clockwork):
        end: threading.Event | None = None
        first_began, second_ended, synced = threading.Event(), threading.Event(), list[str]()

        def sync(self, file: int) -> None:
            end, self.end = self.end, None
            if end is not None:
                self.first_began.set()
                assert end.wait(60)
            self.synced.append(threading.current_thread().name)
            if self.synced == ["second"] * 2:
                self.second_ended.set()

    disk, calls, again = Slow(), Calls(), pages("full", 2)
    storage = FileStorage(tmp_path / "store", MIB, LABEL, "model A", threads=1, disk=disk)
    store(storage, pages("full", 1))
    disk.end = end = threading.Event()
    calls.start("first", lambda: store(storage, again))
    assert disk.first_began.wait(60)
    disk.elapse(1000)
    disk.synced.clear()
    calls.start("second", lambda: store(storage, again))
    assert disk.second_ended.wait(60)
    end.set()
    assert calls.join() == {"first": [True], "second": [True]}
    assert disk.synced == ["second"] * 2 + ["first"] * 2
    disk.elapse(1000)
    disk.synced.clear()
    assert store(storage, again) == [True]
    assert disk.synced == [], "now it is known to be there"
    storage.close()


def test_what_a_failed_sync_leaves_in_doubt_is_written_again_even_if_it_could_not_be_taken_back(tmp_path: Path) -> None:
    disk, (page,) = Rigged(), pages("full", 2)
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    bad = False

    def happens(call: str, name: str, at: int) -> None:
        nonlocal bad
        bad |= call == "sync" and name == "slab-000000"
        if bad:
            raise trouble()

    disk.happens = happens
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [page])
    written = []
    disk.happens = lambda call, name, at: written.append(name) if call == "write" else None
    assert store(storage, [page]) == [True]
    assert "slab-000000" in written
    disk.happens = lambda call, name, at: None
    assert intact(storage, [page]) == {page}
    storage.close()


def test_what_a_dead_process_had_not_synced_is_written_again_when_its_sync_fails(tmp_path: Path) -> None:
    folder, disks, (page,) = tmp_path / "store", (Rigged(), Rigged()), pages("full", 2)
    dying, other = (opened(folder, disk, capacity=MIB) for disk in disks)
    mine, theirs = pages("full", 1, 3)
    assert store(other, [mine]) == store(dying, [theirs]) == [True]
    disks[0].fail(Died(), "sync", "slab-000000")
    with pytest.raises(Died):
        store(dying, [page])
    die(dying)
    disks[1].fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(other, [page])
    assert other.exists(names([page, mine])) == [False, True], "pages that this process has synced are there"
    assert store(other, [page]) == [True]
    assert intact(other, [page, mine]) == {page, mine}
    other.close()


@pytest.mark.parametrize("skip", [3, 4, 5])
def test_a_put_that_could_not_be_told_hinders_no_later_one(tmp_path: Path, skip: int) -> None:
    disk, (page, other) = Rigged(), pages("full", 2, 3)
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    disk.fail(trouble(), "write", "changes", skip=skip)  # of the commit: a line, again, and the number for all
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [page])
    assert storage._index.held == {}
    disk.fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [other])
    assert store(storage, [page, other]) == [True, True]
    assert intact(storage, [page, other]) == {page, other}
    assert storage._unsynced == {}
    storage.close()


@pytest.mark.parametrize("how", ["not told", "interrupted"])
def test_what_a_put_left_unsynced_is_not_confirmed_after_a_sync_that_failed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, (page, other) = Rigged(), pages("full", 2, 3)
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    if how == "not told":
        disk.fail(trouble(), "write", "changes", skip=1, at=HEAD)  # the commit's; the table is written
    else:
        disk.fail(KeyboardInterrupt(), "sync", "slab-000000")
    with pytest.raises((StorageError, KeyboardInterrupt)):
        store(storage, [page])
    assert storage.exists(names([page])) == [True]
    disk.fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [other])
    written = []
    disk.happens = lambda call, name, at: written.append(name) if call == "write" else None
    assert store(storage, [page]) == [True]
    assert "slab-000000" in written
    assert storage._unsynced == {}
    storage.close()


def test_what_others_have_synced_is_not_in_doubt_when_my_sync_fails(tmp_path: Path) -> None:
    folder, disk, theirs = tmp_path / "store", Rigged(), pages("full", *range(10))
    mine, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(other, theirs))
    disk.fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(mine, pages("full", 20))
    assert intact(mine, theirs) == intact(other, theirs) == set(theirs)
    mine.close()
    other.close()
