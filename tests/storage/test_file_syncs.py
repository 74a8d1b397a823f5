"""Objects that a put has confirmed are on the medium, whichever sync fails, and whichever caller sees the error."""

import errno
import os
import threading
from pathlib import Path

import pytest
from file_disks import MIB, Calls, Clockwork, Failing, Rigged, file_name, trouble
from test_crashes import Quick, die, intact, intact_anew, names, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.testing.faulty_disk import Died, FaultyDisk
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
    assert not any(storage.exists(names(pages("full", 0, 1) + pages("window", 0, 1)))), "both slabs are dropped whole"
    assert [*(tmp_path / "store").rglob("slab-*")] == []
    assert all(store(storage, pages("full", 0, 1) + pages("window", 0, 1)))
    storage.close()


def test_a_failed_sync_costs_other_slabs_nothing(tmp_path: Path) -> None:
    disk = Rigged()
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1) + pages("window", 1)) == [True, True]
    disk.fail(trouble(), "sync", "slab-000001")
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, pages("full", 2) + pages("window", 2))
    assert intact(storage, pages("full", 1, 2) + pages("window", 1, 2)) == set(pages("full", 1, 2))
    storage.close()


def test_a_slab_of_which_a_sync_failed_is_gone_for_all_processes(tmp_path: Path) -> None:
    folder, disk, some = tmp_path / "store", Rigged(), pages("full", *range(10))
    mine, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(other, some))
    disk.fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(mine, pages("full", 20))
    assert not any(other.exists(names(some)))
    assert all(store(other, some))
    assert intact(mine, some) == set(some)
    mine.close()
    other.close()
    assert intact_anew(folder, some) == set(some)


@pytest.mark.parametrize("which", [".table", "0"])
def test_of_two_puts_that_sync_one_slab_neither_is_confirmed_when_the_kernel_tells_one_that_it_failed(
    tmp_path: Path, which: str
) -> None:
    """Linux marks pages whose writeback failed as clean, and says so once for each descriptor."""

    class Once(Quick):
        def __init__(self) -> None:
            self.both: threading.Event | None = None
            self.one, self.said, self.told = threading.Lock(), False, threading.Event()

        def sync(self, file: int) -> None:
            if self.both is not None and file_name(file).endswith(which):
                with self.one:
                    said, self.said = self.said, True
                if not said:
                    self.told.set()
                    assert self.both.wait(60)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk, calls = Once(), Calls()
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    slab, disk.both = storage._index.slabs[0], threading.Event()
    calls.start("2", lambda: store(storage, pages("full", 2)))
    assert disk.told.wait(60)
    calls.start("3", lambda: store(storage, pages("full", 3)))
    (third,) = names(pages("full", 3))
    while slab.syncing < 2 or (which == ".table" and third not in storage._index.entries):  # until it waits as well
        pass
    disk.both.set()
    answers = calls.join()
    assert [type(answers[number]) for number in "23"] == [StorageError] * 2, answers
    assert not any(storage.exists(names(pages("full", 1, 2, 3))))
    disk.both = None
    assert store(storage, pages("full", 2, 3)) == [True, True]
    storage.close()


def test_what_another_put_has_been_syncing_for_long_is_not_confirmed_by_its_age(tmp_path: Path) -> None:
    class Slow(Clockwork):
        end: threading.Event | None = None
        first_began, synced = threading.Event(), list[str]()

        def sync(self, file: int) -> None:
            end, self.end = self.end, None
            if end is not None:
                self.first_began.set()
                assert end.wait(60)
            self.synced.append(threading.current_thread().name)

    disk, calls, again = Slow(), Calls(), pages("full", 2)
    storage = FileStorage(tmp_path / "store", MIB, LABEL, "model A", threads=1, disk=disk)
    store(storage, pages("full", 1))
    slab, disk.end = storage._index.slabs[0], threading.Event()
    end = disk.end
    calls.start("first", lambda: store(storage, again))
    assert disk.first_began.wait(60)
    disk.elapse(1000)
    disk.synced.clear()
    calls.start("second", lambda: store(storage, again))
    while slab.syncing < 2 and "second" not in calls.answers:
        pass
    end.set()
    assert calls.join() == {"first": [True], "second": [True]}
    assert sorted(disk.synced) == ["first"] * 2 + ["second"] * 2
    disk.elapse(1000)
    disk.synced.clear()
    assert store(storage, again) == [True]
    assert disk.synced == [], "now it is known to be there"
    storage.close()


def test_puts_that_wait_for_one_sync_share_the_next(tmp_path: Path) -> None:
    class Slow(Rigged):
        end: threading.Event | None = None
        began, count = threading.Event(), 0

        def sync(self, file: int) -> None:
            self.count += 1
            if self.end is not None:
                self.began.set()
                assert self.end.wait(60)

    disk, calls = Slow(), Calls()
    storage = FileStorage(tmp_path / "store", MIB, LABEL, "model A", threads=1, disk=disk)
    store(storage, pages("full", 0))
    slab, disk.count, disk.end = storage._index.slabs[0], 0, threading.Event()
    calls.start("0", lambda: store(storage, pages("full", 1)))
    assert disk.began.wait(60)
    for number in range(2, 6):
        calls.start(str(number), lambda number=number: store(storage, pages("full", number)))  # type: ignore[misc]
    while slab.syncing < 5:
        pass
    disk.end.set()
    assert set(map(tuple, calls.join().values())) == {(True,)}
    assert disk.count < 10, "two files, five puts"
    storage.close()


@pytest.mark.parametrize("others", ["another process", "alone"])
def test_what_a_failed_sync_may_have_lost_is_written_again_even_if_its_slab_could_not_be_removed(
    tmp_path: Path, others: str
) -> None:
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

    def goes_on(call: str, name: str, at: int) -> None:
        if call == "unlink":
            raise trouble()
        written.append(name)

    disk.happens = goes_on
    for number in range(2, 30):  # slabs are made, and lost ones looked for
        assert store(storage, pages("full", number)) == [True]
    assert page.name not in [name for slab in storage._index.slabs.values() if not slab.number for name in slab.names]
    assert "slab-000001" in written and "slab-000000" not in written
    disk.happens = lambda call, name, at: None
    if others == "alone":
        storage.close()
        assert intact_anew(tmp_path / "store", [page]) == {page}
    else:
        assert store(storage, pages("full", 30)) == [True]
        there = {int(path.name[5:]) for path in (tmp_path / "store").rglob("slab-??????")}
        assert there == set(storage._index.slabs) and not storage._index.failed, "its space is free"
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
    assert other.exists(names([page, mine])) == [False, False]
    assert store(other, [page, mine]) == [True, True]
    assert intact(other, [page, mine]) == {page, mine}
    other.close()


@pytest.mark.parametrize("skip", [0, 1])
def test_a_put_that_could_not_be_told_hinders_no_later_one(tmp_path: Path, skip: int) -> None:
    disk, (page, other) = Rigged(), pages("full", 2, 3)
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    disk.fail(trouble(), "write", "changes", skip=skip)  # of the commit: a line, and the number for all
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [page])
    assert storage._index.held == {}
    disk.fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [other])
    assert store(storage, [page, other]) == [True, True]
    assert intact(storage, [page, other]) == {page, other}
    storage.close()


@pytest.mark.parametrize("how", ["not told", "interrupted"])
def test_what_a_put_left_unsynced_is_not_confirmed_after_a_sync_that_failed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, (page, other) = Rigged(), pages("full", 2, 3)
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    if how == "not told":
        disk.fail(trouble(), "write", "changes", at=HEAD)  # the table is written
    else:
        disk.fail(KeyboardInterrupt(), "sync", "slab-000000.table")
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
    storage.close()


def test_without_durable_nothing_is_synced_and_what_a_power_cut_leaves_is_a_hit_or_a_miss(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path / "store")
    disk.root.mkdir()
    storage = FileStorage(disk.root, MIB, LABEL, "model A", threads=1, disk=disk, durable=False)
    before, some = len(disk.events), pages("full", *range(12)) + pages("window", 1, 2)
    assert all(store(storage, some))
    assert {event.kind for event in disk.events[before:]} == {"create", "allocate", "write"}
    storage.close()
    for seed in range(10):
        disk.after(len(disk.events), tmp_path / str(seed), "torn", seed)
        again = opened(tmp_path / str(seed), capacity=MIB)
        assert intact(again, some) <= set(some)
        assert all(store(again, some))
        assert intact(again, some) == set(some)
        again.close()


def test_a_durable_put_into_a_slab_that_a_process_without_syncs_has_made_survives_a_power_cut(tmp_path: Path) -> None:
    disk, (theirs, mine) = FaultyDisk(tmp_path / "store"), pages("full", 1, 2)
    disk.root.mkdir()
    careless = FileStorage(disk.root, MIB, LABEL, "model A", threads=1, disk=disk, durable=False)
    durable = FileStorage(disk.root, MIB, LABEL, "model A", threads=1, disk=disk)
    assert store(careless, [theirs]) == [True]
    assert store(durable, [mine]) == [True]
    assert durable._index.place(mine.name)[0].number == careless._index.place(theirs.name)[0].number
    disk.after(len(disk.events), tmp_path / "cut", "dropped")
    again = opened(tmp_path / "cut", capacity=MIB)
    assert mine in intact(again, [theirs, mine])
    again.close()
    careless.close()
    durable.close()
