"""Objects that a put has confirmed are on the medium, whichever sync fails, and whichever caller sees the error."""

import threading

import inspect_files
import pytest
from file_disks import MIB, Calls, Clockwork, Rigged, file_name, quietly, trouble
from file_pages import Quick, intact, intact_anew, names, opened, pages, store
from processes import until

from kvarve.errors import StorageError
from tests.sim.faulty_disk import FaultyDisk


@pytest.mark.parametrize("which", [".table", "0"])
def test_of_two_puts_that_sync_one_slab_neither_is_confirmed_when_the_kernel_tells_one_that_it_failed(quick, which):
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
                    raise trouble()

    disk, calls, some = Once(), Calls(), pages("full", 1, 2, 3)
    storage = quick(disk)
    assert store(storage, some[:1]) == [True]
    slab, disk.both = inspect_files.slab(storage), threading.Event()
    calls.start("2", lambda: store(storage, some[1:2]))
    assert disk.told.wait(60)
    calls.start("3", lambda: store(storage, some[2:]))
    until(lambda: slab.syncing == 2 and (which != ".table" or some[2].name in inspect_files.places(storage)))
    disk.both.set()
    answers = calls.join()
    assert [type(answers[number]) for number in "23"] == [StorageError] * 2, answers
    assert not any(storage.exists(names(some)))
    disk.both = None
    assert store(storage, some[1:]) == [True, True]


def test_what_another_put_has_been_syncing_for_long_is_not_confirmed_by_its_age(quick):
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
    storage = quick(disk)
    store(storage, pages("full", 1))
    slab, disk.end = inspect_files.slab(storage), threading.Event()
    end = disk.end
    calls.start("first", lambda: store(storage, again))
    assert disk.first_began.wait(60)
    disk.elapse(1000)
    disk.synced.clear()
    calls.start("second", lambda: store(storage, again))
    until(lambda: slab.syncing == 2 or "second" in calls.answers)
    end.set()
    assert calls.join() == {"first": [True], "second": [True]}
    assert sorted(disk.synced) == ["first"] * 2 + ["second"] * 2
    disk.elapse(1000)
    disk.synced.clear()
    assert store(storage, again) == [True]
    assert disk.synced == [], "now it is known to be there"


def test_puts_that_wait_for_one_sync_share_the_next(quick):
    class Slow(Rigged):
        end: threading.Event | None = None
        began, count = threading.Event(), 0

        def sync(self, file: int) -> None:
            self.count += 1
            if self.end is not None:
                self.began.set()
                assert self.end.wait(60)

    disk, calls = Slow(), Calls()
    storage = quick(disk)
    store(storage, pages("full", 0))
    slab, disk.count, disk.end = inspect_files.slab(storage), 0, threading.Event()
    calls.start("0", lambda: store(storage, pages("full", 1)))
    assert disk.began.wait(60)
    for number in range(2, 6):
        calls.start(str(number), lambda number=number: store(storage, pages("full", number)))
    until(lambda: slab.syncing == 5)
    disk.end.set()
    assert set(map(tuple, calls.join().values())) == {(True,)}
    assert disk.count < 10, "two files, five puts"


@pytest.mark.parametrize("others", ["another process", "alone"])
def test_what_a_failed_sync_may_have_lost_is_written_again_even_if_its_slab_could_not_be_removed(quick, folder, others):
    disk, page = Rigged(), pages("full", 2)
    storage = quick(disk)
    assert store(storage, pages("full", 1)) == [True]
    bad, written = False, []

    def happens(call: str, name: str, at: int) -> None:
        nonlocal bad
        bad |= call == "sync" and name == "slab-000000"
        if bad and call in ("write", "sync", "unlink"):
            raise trouble()

    disk.happens = happens
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, page)

    def goes_on(call: str, name: str, at: int) -> None:
        if call == "unlink":
            raise trouble()
        if call == "write":
            written.append(name)

    disk.happens = goes_on
    for number in range(2, 30):  # slabs are made, and lost ones looked for
        assert store(storage, pages("full", number)) == [True]
    assert inspect_files.place(storage, page[0].name).slab != 0
    assert "slab-000001" in written and "slab-000000" not in written
    disk.happens = quietly
    if others == "alone":
        storage.close()
        assert intact_anew(folder, page) == {*page}
    else:
        assert store(storage, pages("full", 30)) == [True]
        there = {int(path.name[5:]) for path in folder.rglob("slab-??????")}
        assert there == {*inspect_files.slabs(storage)} and not inspect_files.failed(storage), "its space is free"
        assert intact(storage, page) == {*page}


@pytest.mark.parametrize("how", ["not told", "not told to all", "interrupted"])
def test_what_a_put_left_unsynced_is_not_confirmed_after_a_sync_that_failed(quick, how):
    disk, (page, other) = Rigged(), pages("full", 2, 3)
    storage = quick(disk)
    assert store(storage, pages("full", 1)) == [True]
    if how == "interrupted":
        disk.fail(KeyboardInterrupt(), "sync", "slab-000000.table")
    else:  # of the commit: a line, and the number for all
        disk.fail(trouble(), "write", "changes", skip=int(how == "not told to all"))
    with pytest.raises((StorageError, KeyboardInterrupt)):
        store(storage, [page])
    assert inspect_files.seized(storage) == 0
    disk.fail(trouble(), "sync", "slab-000000")
    with pytest.raises(StorageError, match="Input/output"):
        store(storage, [other])
    written = []
    disk.happens = lambda call, name, at: written.append(name) if call == "write" else None
    assert store(storage, [page, other]) == [True, True]
    assert "slab-000000" in written
    assert intact(storage, [page, other]) == {page, other}


def test_without_durable_nothing_is_synced_and_what_a_power_cut_leaves_is_a_hit_or_a_miss(quick, folder, tmp_path):
    folder.mkdir()
    disk = FaultyDisk(folder)
    storage = quick(disk, durable=False)
    before, some = len(disk.events), pages("full", *range(12)) + pages("window", 1, 2)
    assert all(store(storage, some))
    assert {event.kind for event in disk.events[before:]} == {"create", "allocate", "write"}
    storage.close()
    for seed in range(4):
        disk.after(len(disk.events), tmp_path / str(seed), "torn", seed)
        again = opened(tmp_path / str(seed), capacity=MIB)
        assert intact(again, some) <= set(some)
        assert all(store(again, some))
        assert intact(again, some) == set(some)
        again.close()


def test_a_durable_put_into_a_slab_that_a_process_without_syncs_has_made_survives_a_power_cut(quick, folder, tmp_path):
    folder.mkdir()
    disk, (theirs, mine) = FaultyDisk(folder), pages("full", 1, 2)
    careless, durable = quick(disk, durable=False), quick(disk)
    assert store(careless, [theirs]) == [True]
    assert store(durable, [mine]) == [True]
    assert {*inspect_files.slabs(durable)} == {0}
    disk.after(len(disk.events), tmp_path / "cut", "dropped")
    assert mine in intact_anew(tmp_path / "cut", [theirs, mine])


@pytest.mark.parametrize("both", [True, False], ids=["of two slabs", "of one"])
def test_a_put_of_which_syncs_fail_costs_those_slabs_for_all_processes_and_no_other(quick, folder, both):
    disk, full, window = Rigged(), pages("full", 0, 1), pages("window", 0, 1)
    storage, other = quick(disk), quick()
    assert store(storage, [full[0], window[0]]) == [True, True]
    assert intact(other, [full[0], window[0]])

    def fails(call: str, name: str, at: int) -> None:
        if call == "sync" and (both or name == "slab-000001"):
            raise trouble()

    disk.happens = fails
    with pytest.raises(StorageError, match=r"stored \d of 2 objects: .*Input/output error"):
        store(storage, [full[1], window[1]])
    disk.happens = quietly
    left = set() if both else {*full}
    assert intact(storage, full + window) == intact(other, full + window) == left, "slabs are dropped whole"
    assert len([*folder.rglob("slab-??????")]) == (not both) and storage.usage().lost == 1 + both
    assert all(store(other, full + window))
    assert intact(storage, full + window) == {*full, *window}


def test_a_put_of_what_another_process_has_just_stored_syncs_it(quick):
    disk, page = Rigged(), pages("full", 1)
    assert store(quick(), page) == [True]
    storage, synced = quick(disk), []
    disk.happens = lambda call, name, at: synced.append(name) if call == "sync" else None
    assert store(storage, page) == [True] and synced == ["slab-000000.table"], "the bytes were synced before"
