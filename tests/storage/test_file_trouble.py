"""A system call fails, or its caller is interrupted: confirmed objects stay, for all processes."""

import contextlib
import errno
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from file_disks import MIB, Rigged, total, trouble
from test_crashes import Quick, die, intact, intact_anew, names, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage.file.disk import Directory, Disk
from kvarve.testing.faulty_disk import Died
from kvarve.testing.suite import OTHER_LABEL

ANYWHERE_BUT_THE_HEAD = range(1, MIB)
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


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, some = tmp_path / "store", pages("full", *range(60))
    storage = opened(folder, capacity=MIB)
    assert all(store(storage, some))
    storage.close()
    monkeypatch.setattr(os, "scandir", a_listing_that_fails(nth))
    try:
        storage = opened(folder, capacity=MIB)
        assert intact(storage, some) == set(some)
        store(storage, pages("window", 1))
        storage.close()
    except StorageError as error:
        assert "Too many open files" in str(error)
    monkeypatch.undo()
    assert intact_anew(folder, some) == set(some)


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_foreign_folder_that_cannot_be_listed_is_refused_and_left_alone(
    tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    (folder / "thesis.txt").write_text("42")
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(os, "scandir", a_listing_that_fails(nth))
        opened(folder, capacity=MIB)
    assert [each.name for each in folder.iterdir()] == ["thesis.txt"]


def test_on_a_disk_that_takes_a_few_bytes_at_a_time_all_slabs_are_announced(tmp_path: Path) -> None:
    class Stingy(Quick):
        def write(self, file: int, data: Any, at: int) -> int:
            return super().write(file, [memoryview(data[0])[:30]], at)

    folder, some = tmp_path / "store", pages("full", *range(60))
    storage = opened(folder, capacity=MIB)
    assert all(store(storage, some))
    storage.close()
    (storage._folder.model.path / "changes").write_bytes(b"")  # as after a power cut: it was never synced
    first, second = opened(folder, Stingy(), capacity=MIB), opened(folder, Stingy(), capacity=MIB)
    assert intact(second, some) == set(some)
    assert store(first, pages("window", 1)) == [True]
    assert intact(second, [*some, *pages("window", 1)]) == {*some, *pages("window", 1)}
    first.close()
    second.close()
    assert intact_anew(folder, some) == set(some)


def test_a_file_that_cannot_be_opened_for_a_moment_is_not_taken_for_read_only(tmp_path: Path) -> None:
    class Once(Quick):
        def open(self, folder: Directory, name: str, **how: bool) -> int:
            if name == "changes" and not how.get("read_only"):
                raise trouble(errno.EMFILE)
            return super().open(folder, name, **how)

    with pytest.raises(StorageError, match="Too many open files"):
        opened(tmp_path / "store", Once())


def test_a_model_in_use_is_not_removed_though_its_folder_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, capacity, some = tmp_path / "store", 400 << 10, pages("full", *range(20))
    live = opened(folder, capacity=capacity)
    other = opened(folder, label=OTHER_LABEL, capacity=capacity)
    assert all(store(live, some))
    listing, identity = Disk.entries, live._folder.model.identity

    def entries(disk: Disk, folder: Directory) -> Any:
        if folder.identity == identity:
            raise trouble(errno.EMFILE)
        return listing(disk, folder)

    monkeypatch.setattr(Disk, "entries", entries)
    with pytest.raises(StorageError, match="Too many open files"):
        for number in range(40):
            store(other, pages("state", number))
    monkeypatch.undo()
    assert intact(live, some) == set(some)
    live.close()
    other.close()
    assert intact_anew(folder, some, capacity) == set(some)


def test_a_folder_that_only_root_may_look_into_is_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fresh ext4 disk has one, and the tests may run as root."""
    (tmp_path / "store" / "lost+found").mkdir(parents=True)
    scan = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("lost+found"):
            raise trouble(errno.EACCES)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    storage = opened(tmp_path / "store", capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    storage.close()


def test_a_slab_that_could_not_be_opened_when_it_was_announced_is_opened_later(tmp_path: Path) -> None:
    class Short(Quick):
        short = False

        def open(self, folder: Directory, name: str, **how: bool) -> int:
            if self.short:
                raise trouble(errno.EMFILE)
            return super().open(folder, name, **how)

    folder, disk, some = tmp_path / "store", Short(), pages("full", 1)
    one, other = opened(folder, capacity=MIB), opened(folder, disk, capacity=MIB)
    disk.short = True
    assert store(one, some) == [True]
    assert other.exists(names(some)) == [False]
    disk.short = False
    assert store(other, [*some, *pages("window", 1)]) == [True, True]
    assert one.usage().objects == other.usage().objects == 2
    assert set(one._index.slabs) == set(other._index.slabs) == {0, 1}, (
        "and no slab was made for objects that were there"
    )
    one.close()
    other.close()


def test_slabs_that_were_cut_do_not_outgrow_the_capacity_when_they_are_found(tmp_path: Path) -> None:
    class Full(Quick):
        full = True

        def allocate(self, file: int, size_bytes: int) -> None:
            if self.full:
                raise trouble(errno.ENOSPC)
            super().allocate(file, size_bytes)

    folder, capacity, disk = tmp_path / "store", 240 << 10, Full()
    storage = opened(folder, capacity=capacity)
    store(storage, pages("full", *range(60)))
    storage.close()
    for path in sorted(folder.rglob("slab-??????"))[:6]:
        os.truncate(path, 0)
    storage = opened(folder, disk, capacity=capacity)
    disk.full = False
    for number in range(100, 300):
        store(storage, pages("full", number))
        storage._allocator._full_until.clear()
        assert total(folder) <= capacity
    storage.close()


# --- a change that cannot be announced, or only in part


@pytest.mark.parametrize("at", [HEAD, ANYWHERE_BUT_THE_HEAD])
@pytest.mark.parametrize("others", ["others", "no other process"])
def test_a_slab_that_could_not_be_announced_is_found_by_later_calls(tmp_path: Path, at: range, others: str) -> None:
    folder, disk = tmp_path / "store", Rigged()
    one, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    some = pages("full", 1, 2, 3)
    disk.fail(trouble(errno.ENOSPC), "write", "changes", at=at)
    with pytest.raises(StorageError, match="No space"):
        store(one, some)
    if others == "others":
        assert all(store(other, pages("state", 1)))
    assert all(store(one, some))
    assert intact(one, some) == intact(other, some) == set(some)
    known = {slab.number for slab in one._index.slabs.values()}
    assert known == {int(path.name[5:]) for path in folder.rglob("slab-??????")}
    one.close()
    other.close()
    assert intact_anew(folder, some) == set(some)


@pytest.mark.parametrize("at", [HEAD, ANYWHERE_BUT_THE_HEAD])
@pytest.mark.parametrize("process", ["another", "the same"])
def test_a_slab_whose_removal_could_not_be_announced_is_no_trap(tmp_path: Path, at: range, process: str) -> None:
    folder, disk = tmp_path / "store", Rigged()
    one, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    base = pages("full", *range(15))
    assert all(store(one, base))
    disk.fail(trouble(), "write", "changes", at=at)
    with pytest.raises(OSError, match="Input/output"), one._changing():
        one._allocator.remove(one._index.slabs[0], "a test")
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


@pytest.mark.parametrize("how", ["EIO", "killed"])
@pytest.mark.parametrize("skip", [0, 1])
def test_an_object_that_is_gone_from_the_tables_is_not_confirmed(tmp_path: Path, how: str, skip: int) -> None:
    folder, disk = tmp_path / "store", Rigged()
    lagging, one = opened(folder, capacity=MIB), opened(folder, disk, capacity=MIB)
    base = pages("full", *range(15))
    assert all(store(lagging, base))
    one.exists(["x"])
    disk.fail(trouble() if how == "EIO" else Died(), "write", "changes", skip=skip)
    with pytest.raises((StorageError, Died)):
        one.delete([base[3].name])
    if how == "killed":
        die(one)
    assert store(lagging, [base[3]]) == [True]
    lagging.close()
    one.close()
    assert intact_anew(folder, base) == set(base)


def test_a_stripe_that_was_read_while_a_dying_process_changed_it_is_read_again(tmp_path: Path) -> None:
    folder, disk = tmp_path / "store", Rigged()
    lagging, third, dying = (
        opened(folder, capacity=MIB),
        opened(folder, capacity=MIB),
        opened(folder, disk, capacity=MIB),
    )
    base = pages("full", *range(15))
    assert all(store(lagging, base))
    third.delete([base[14].name])  # so that there is something to be looked at
    dying.exists(["x"])

    def happens(call: str, name: str, at: int) -> None:
        if name.endswith(".table"):
            assert lagging.exists([base[3].name]) == [True], "nothing is written yet"
            disk.fail(Died(), "write", "changes")

    disk.happens = happens
    with pytest.raises(Died):
        dying.delete([base[3].name])
    die(dying)
    assert store(lagging, [base[3]]) == [True]
    lagging.close()
    third.close()
    assert intact_anew(folder, base[:14]) == set(base[:14])


def test_a_change_is_noticed_though_the_call_that_noticed_it_first_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, base = tmp_path / "store", pages("full", *range(60))
    one, other = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(one, base))
    other.exists(["x"])
    first, last = (one._index.slabs[number] for number in (min(one._index.slabs), max(one._index.slabs)))
    there = [page for page in base if one._index.place(page.name)[0] in (first, last)]
    with one._changing():
        one._allocator.remove(first, "a test")
        one._allocator.remove(last, "a test")

    def forget(slab: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(other._index, "forget", forget)
        other.exists(names(base))
    assert not any(other.exists(names(there)))
    assert all(store(other, there))
    one.close()
    other.close()
    assert intact_anew(folder, there) == set(there)


def test_a_stripes_number_never_goes_back(tmp_path: Path) -> None:
    """One process has seen the number that a dying one wrote, and the next one to write has not."""
    folder, disk, base = tmp_path / "store", Rigged(), pages("full", *range(40))
    one, third, dying = (opened(folder, each, capacity=8 * MIB) for each in (Quick(), Quick(), disk))
    assert all(store(one, base))
    (slab, row), (other, at) = one._index.place(base[3].name), one._index.place(base[4].name)
    assert slab is other and slab.stripe(row) == slab.stripe(at)
    dying.exists(["x"])
    disk.fail(Died(), "write", "changes", at=HEAD)
    with pytest.raises(Died):
        dying.delete([base[3].name])
    die(dying)
    third._index.changes._head = None  # as after a change elsewhere
    assert third.exists(names(base[3:5])) == [False, True]
    assert one.delete([base[4].name]) == [True]
    assert third.exists(names(base[3:5])) == [False, False]
    one.close()
    third.close()


def test_a_change_that_comes_while_another_of_its_stripe_is_made_is_noticed(tmp_path: Path) -> None:
    folder, disk, base = tmp_path / "store", Rigged(), pages("full", *range(40))
    one, other = opened(folder, disk, capacity=8 * MIB), opened(folder, capacity=8 * MIB)
    assert all(store(one, base))
    places = [one._index.place(page.name) for page in base[3:6]]
    assert len({int(slab.stripe(row)) for slab, row in places}) == 1

    def happens(call: str, name: str, at: int) -> None:
        if call == "write" and name.endswith(".table"):
            disk.happens = lambda call, name, at: None
            assert other.delete([base[4].name]) == [True]

    disk.happens = happens
    assert one.delete([base[3].name]) == [True]
    assert one.exists(names(base[3:6])) == other.exists(names(base[3:6])) == [False, False, True]
    one.close()
    other.close()


@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_interrupted_while_it_announces_a_change_knows_the_disk(
    tmp_path: Path, when: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, base, some = tmp_path / "store", pages("full", *range(15)), [*pages("window", 1, 2), *pages("full", 20, 21)]
    storage = opened(folder, capacity=MIB)
    assert all(store(storage, base))
    tell, calls = storage._index.changes.tell, 0

    def interrupted(*change: Any, **how: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == nth + 1 and when == "before":
            raise KeyboardInterrupt
        tell(*change, **how)
        if calls == nth + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(storage._index.changes, "tell", interrupted)
        store(storage, some)
    assert all(store(storage, some))
    assert storage._index.held == {}
    assert intact(storage, base + some) == {*base, *some}
    storage.close()
    assert storage._folder._files == []
    assert intact_anew(folder, base + some) == {*base, *some}


def test_an_interrupted_call_does_not_keep_the_mutex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Quick):
        now = False

        def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
            locked = super().lock(file, wait=wait, shared=shared)
            if self.now and locked:
                self.now = False
                raise KeyboardInterrupt
            return locked

    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.01)
    folder, disk = tmp_path / "store", Interrupted()
    one, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    disk.now = True
    with pytest.raises(KeyboardInterrupt):
        store(one, pages("full", 2))  # it has to make a slab
    assert store(other, pages("full", 1)) == [True]
    one.close()
    other.close()
