"""A system call fails, or its caller is interrupted: confirmed objects stay, for all processes."""

import contextlib
import errno
import os
from collections.abc import Callable
from itertools import count
from typing import Any

import inspect_files
import pytest
from file_disks import MIB, Rigged, model_of, quietly, total, trouble
from file_pages import Quick, intact, intact_anew, names, pages, store

from kvarve.errors import StorageError
from kvarve.storage.file.disk import Directory, Disk
from kvarve.testing.suite import OTHER_LABEL
from tests.sim.faulty_disk import Died

BEHIND_THE_HEAD = range(1, MIB)
HEAD = range(1)


# --- at the opening


def a_listing_that_fails(nth: int) -> Callable[..., Any]:
    """os.scandir, of which the n-th call fails for lack of descriptors."""
    scan, calls = os.scandir, count(1)

    def scandir(*args: Any) -> Any:
        if next(calls) == nth:
            raise trouble(errno.EMFILE)
        return scan(*args)

    return scandir


@pytest.mark.parametrize("nth", [1, 3, 5, 7])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(quick, folder, nth, monkeypatch):
    some = pages("full", *range(20))
    storage = quick(capacity=240 << 10)
    assert all(store(storage, some))
    storage.close()
    with monkeypatch.context() as patch, contextlib.suppress(StorageError):
        patch.setattr(os, "scandir", a_listing_that_fails(nth))
        storage = quick(capacity=240 << 10)
        assert intact(storage, some) == set(some)
        store(storage, pages("window", 1))
    storage.close()
    assert intact_anew(folder, some) == set(some)


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_foreign_folder_that_cannot_be_listed_is_refused_and_left_alone(quick, folder, nth, monkeypatch):
    folder.mkdir(mode=0o700)
    (folder / "thesis.txt").write_text("42")
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(os, "scandir", a_listing_that_fails(nth))
        quick()
    assert [each.name for each in folder.iterdir()] == ["thesis.txt"]


def test_on_a_disk_that_takes_a_few_bytes_at_a_time_all_slabs_are_announced(quick, folder):
    class Stingy(Quick):
        def read(self, file: int, into: Any, at: int) -> int:
            return super().read(file, [into[0][:200]], at)

        def write(self, file: int, data: Any, at: int) -> int:
            return super().write(file, [memoryview(data[0])[:100]], at)

    some, more = pages("full", *range(30)), pages("window", 1)
    storage = quick()
    assert all(store(storage, some))
    storage.close()
    (model_of(folder) / "changes").write_bytes(b"")  # as after a power cut: it was never synced
    first, second = quick(Stingy()), quick(Stingy())
    assert intact(second, some) == set(some)
    assert store(first, more) == [True]
    assert intact(second, some + more) == {*some, *more}
    first.close()
    second.close()
    assert intact_anew(folder, some) == set(some)


def test_a_file_that_cannot_be_opened_for_a_moment_is_not_taken_for_read_only(quick):
    disk = Rigged()
    disk.refuse(errno.EMFILE, "open", name="changes")
    with pytest.raises(StorageError, match="Too many open files"):
        quick(disk)


def test_a_model_in_use_is_not_removed_though_its_folder_cannot_be_listed(quick, folder, monkeypatch):
    capacity, some = 400 << 10, pages("full", *range(20))
    live, other = quick(capacity=capacity), quick(capacity=capacity, label=OTHER_LABEL)
    assert all(store(live, some))
    listing = Disk.entries

    def entries(disk: Disk, place: Directory) -> Any:
        if place.path == model_of(folder):
            raise trouble(errno.EMFILE)
        return listing(disk, place)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Too many open files"):
        patch.setattr(Disk, "entries", entries)
        for number in range(40):
            store(other, pages("state", number))
    assert intact(live, some) == set(some)


def test_a_folder_that_only_root_may_look_into_is_none_of_ours(quick, folder, monkeypatch):
    """As a fresh ext4 disk has one, and the tests may run as root."""
    (folder / "lost+found").mkdir(parents=True)
    scan = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("lost+found"):
            raise trouble(errno.EACCES)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert store(quick(), pages("full", 1)) == [True]


def test_a_slab_that_could_not_be_opened_when_it_was_announced_is_opened_later(quick):
    disk, some = Rigged(), pages("full", 1)
    one, other = quick(), quick(disk)
    disk.refuse(errno.EMFILE, "open")
    assert store(one, some) == [True]
    assert other.exists(names(some)) == [False]
    disk.happens = quietly
    assert store(other, [*some, *pages("window", 1)]) == [True, True]
    assert one.usage().objects == other.usage().objects == 2
    assert {*inspect_files.slabs(one)} == {*inspect_files.slabs(other)} == {0, 1}, "none was made for what was there"


def test_slabs_that_were_cut_do_not_outgrow_the_capacity_when_they_are_found(quick, folder):
    capacity, disk = 240 << 10, Rigged()
    storage = quick(capacity=capacity)
    store(storage, pages("full", *range(60)))
    storage.close()
    for path in sorted(folder.rglob("slab-??????"))[:6]:
        os.truncate(path, 0)
    disk.refuse(errno.ENOSPC, "allocate")
    storage = quick(disk, capacity)
    disk.happens = quietly
    for number in range(100, 130):
        store(storage, pages("full", number))
        inspect_files.retry(storage)
        assert total(folder) <= capacity


@pytest.mark.parametrize(("at", "others"), [(HEAD, True), (BEHIND_THE_HEAD, True), (BEHIND_THE_HEAD, False)])
def test_a_slab_that_could_not_be_announced_is_found_by_later_calls(quick, folder, at, others):
    disk, some = Rigged(), pages("full", 1, 2, 3)
    one, other = quick(disk), quick()
    disk.fail(trouble(errno.ENOSPC), "write", "changes", at=at)
    with pytest.raises(StorageError, match="No space"):
        store(one, some)
    if others:
        assert all(store(other, pages("state", 1)))
    assert all(store(one, some))
    assert intact(one, some) == intact(other, some) == set(some)
    assert {*inspect_files.slabs(one)} == {int(path.name[5:]) for path in folder.rglob("slab-??????")}
    one.close()
    other.close()
    assert intact_anew(folder, some) == set(some)


# --- a change that cannot be announced, or only in part


@pytest.mark.parametrize(("at", "process"), [(HEAD, "another"), (BEHIND_THE_HEAD, "the same")])
def test_a_slab_whose_removal_could_not_be_announced_is_no_trap(quick, folder, at, process):
    disk, base = Rigged(), pages("full", *range(15))
    one, other = quick(disk), quick()
    assert all(store(one, base))
    disk.fail(trouble(), "write", "changes", at=at)
    with pytest.raises(OSError, match="Input/output"):
        inspect_files.remove(one, 0)
    assert store(other, pages("state", 1)) == [True]
    assert one.exists(names(base)) == other.exists(names(base)), "be they removed or not"
    user = other if process == "another" else one
    x, y = base[3], pages("full", 99)[0]
    user.delete([x.name])
    assert store(user, [y]) == [True]
    assert all(store(user, pages("window", *range(30))))
    for storage in (one, other):
        assert store(storage, [x, y, *base[8:]]) == [True] * 9
        assert intact(storage, [x, y, *base[8:]]) == {x, y, *base[8:]}
    assert one.exists(names(base)) == other.exists(names(base))
    one.close()
    other.close()
    assert intact_anew(folder, [x, y, *base[8:]]) == {x, y, *base[8:]}


@pytest.mark.parametrize(("how", "skip"), [("EIO", 0), ("killed", 0), ("killed", 1)])
def test_an_object_that_is_gone_from_the_tables_is_not_confirmed(quick, folder, how, skip):
    disk, base = Rigged(), pages("full", *range(15))
    lagging, one = quick(), quick(disk)
    assert all(store(lagging, base))
    one.exists(["x"])
    disk.fail(trouble() if how == "EIO" else Died(), "write", "changes", skip=skip)
    with pytest.raises((StorageError, Died)):
        one.delete([base[3].name])
    if how == "killed":
        inspect_files.die(one)
    assert store(lagging, [base[3]]) == [True]
    lagging.close()
    one.close()
    assert intact_anew(folder, base) == set(base)


def test_a_stripe_that_was_read_while_a_dying_process_changed_it_is_read_again(quick, folder):
    disk, base = Rigged(), pages("full", *range(15))
    lagging, third, dying = quick(), quick(), quick(disk)
    assert all(store(lagging, base))
    third.delete([base[14].name])  # so that there is something to be looked at
    dying.exists(["x"])

    def looks() -> None:
        assert lagging.exists([base[3].name]) == [True], "nothing is written yet"
        disk.fail(Died(), "write", "changes")

    disk.once(looks, "write", ".table")
    with pytest.raises(Died):
        dying.delete([base[3].name])
    inspect_files.die(dying)
    assert store(lagging, [base[3]]) == [True]
    lagging.close()
    third.close()
    assert intact_anew(folder, base[:14]) == set(base[:14])


def test_a_change_is_noticed_though_the_call_that_noticed_it_first_was_interrupted(quick, folder):
    disk, base = Rigged(), pages("full", *range(60))
    one, other = quick(), quick(disk)
    assert all(store(one, base))
    other.exists(["x"])
    first, *_, last = inspect_files.slabs(one)
    lies = {page: inspect_files.place(one, page.name).slab for page in base}
    page = next(page for page in base if lies[page] == first)
    there = [page, *(page for page in base if lies[page] == last)]
    assert one.delete([page.name]) == [True] and inspect_files.remove(one, last)
    disk.fail(KeyboardInterrupt(), "read", ".table")
    with pytest.raises(KeyboardInterrupt):
        other.exists(names(base))
    assert not any(other.exists(names(there)))
    assert all(store(other, there))
    one.close()
    other.close()
    assert intact_anew(folder, there) == set(there)


def test_a_stripes_number_never_goes_back(quick):
    """One process has seen the number that a dying one wrote, and the next one to write has not."""
    disk, base, window = Rigged(), pages("full", *range(40)), pages("window", 1)
    one, third, dying = (quick(each, 8 * MIB) for each in (Quick(), Quick(), disk))
    assert all(store(one, base + window))
    lies = [inspect_files.place(one, page.name) for page in base[3:5]]
    assert len({(place.slab, place.stripe) for place in lies}) == 1
    dying.exists(["x"])
    disk.fail(Died(), "write", "changes", at=HEAD)
    with pytest.raises(Died):
        dying.delete([base[3].name])
    inspect_files.die(dying)
    inspect_files.look_at_all(third)  # as after a change elsewhere
    assert third.exists(names(base[3:5])) == [False, True]
    assert one.delete([base[4].name]) == [True]
    assert third.exists(names(base[3:5])) == [False, False]


def test_a_change_that_comes_while_another_of_its_stripe_is_made_is_noticed(quick):
    disk, base = Rigged(), pages("full", *range(40))
    one, other = quick(disk, 8 * MIB), quick(capacity=8 * MIB)
    assert all(store(one, base))
    assert len({inspect_files.place(one, page.name).stripe for page in base[3:6]}) == 1
    told = []
    disk.once(lambda: told.extend(other.delete([base[4].name])), "write", ".table")
    assert one.delete([base[3].name]) == told == [True]
    assert one.exists(names(base[3:6])) == other.exists(names(base[3:6])) == [False, False, True]


@pytest.mark.parametrize("nth", [0, 1, 3, 5])
def test_a_process_that_is_interrupted_while_it_announces_a_change_knows_the_disk(quick, folder, nth):
    disk, base = Rigged(), pages("full", *range(15))
    some = [*pages("window", 1, 2), *pages("full", 20, 21)]
    storage = quick(disk)
    assert all(store(storage, base))
    disk.fail(KeyboardInterrupt(), "write", "changes", skip=nth)
    with contextlib.suppress(KeyboardInterrupt):
        store(storage, some)
    assert all(store(storage, some))
    assert inspect_files.seized(storage) == inspect_files.rows(storage)["reserved"] == 0
    assert intact(storage, base + some) == {*base, *some}
    storage.close()
    assert intact_anew(folder, base + some) == {*base, *some}


def test_an_interrupted_call_does_not_keep_the_mutex(quick, monkeypatch):
    class Interrupted(Quick):
        now = False

        def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
            locked = super().lock(file, wait=wait, shared=shared)
            if self.now and locked:
                self.now = False
                raise KeyboardInterrupt
            return locked

    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.01)
    disk = Interrupted()
    one, other = quick(disk), quick()
    disk.now = True
    with pytest.raises(KeyboardInterrupt):
        store(one, pages("full", 2))  # it has to make a slab
    assert store(other, pages("full", 1)) == [True]
