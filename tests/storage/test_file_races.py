"""Two things go wrong at once, or somebody acts between two steps of a put: what was confirmed stays."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from file_disks import MIB, Clockwork, Failing, file_name, total
from test_crashes import Page, Quick, intact, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.books import Call
from kvarve.storage.slabs import table_path
from kvarve.testing.faulty_disk import Died, FaultyDisk
from kvarve.testing.suite import LABEL


class Gate(Quick):
    """Calls on files whose names end so wait at a gate, once it is there."""

    def __init__(self, call: str, *, ending: str) -> None:
        self.call, self.ending = call, ending
        self.gate: threading.Event | None = None
        self.reached = threading.Event()

    def _pass(self, call: str, file: int) -> None:
        if self.gate is not None and call == self.call and file_name(file).endswith(self.ending):
            self.reached.set()
            assert self.gate.wait(60)

    def write(self, file: int, data: Any, at: int) -> int:
        self._pass("write", file)
        return super().write(file, data, at)

    def sync(self, file: int) -> None:
        self._pass("sync", file)


class Calls:
    """Calls on threads of their own; what each answers, or raises."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, do: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.answers[name] = do()
            except StorageError as error:
                self.answers[name] = error

        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def join(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.answers


def names(some: Sequence[Page]) -> list[str]:
    return [page.name for page in some]


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


@pytest.mark.parametrize("order", [0, 1])
def test_of_two_objects_of_one_name_that_a_power_cut_leaves_the_confirmed_one_stays(tmp_path: Path, order: int) -> None:
    """The other is an old entry, whose slot another put was about to fill."""
    disk = FaultyDisk(tmp_path / "store")
    disk.root.mkdir()
    storage = opened(disk.root, disk, capacity=MIB)
    some = pages("full", *range(30))
    store(storage, some)
    slabs = sorted(storage._books.slabs.values(), key=lambda slab: slab.number)
    first, second = slabs[order], slabs[1 - order]
    lies = {page: storage._books.place(page.name)[0] for page in some}
    moved, other = (next(page for page in some if lies[page] is slab) for slab in (first, second))
    storage.delete([moved.name])
    new = pages("full", 777)[0]
    filling = storage._reserve(Call(), [0], [new.name], [new.record()], {})
    assert filling.places[0][0] is first
    storage._write(filling, [new.record()])
    storage.delete([other.name])
    assert store(storage, [moved]) == [True]
    assert storage._books.place(moved.name)[0] is second
    (slots,) = (event.file for event in disk.events if event.kind == "create" and event.path.endswith(first.path.name))
    disk.events.append(type(disk.events[0])("sync", slots))
    disk.after(len(disk.events), tmp_path / "cut", "dropped")
    again = opened(tmp_path / "cut", capacity=MIB)
    assert intact(again, [moved]) == {moved}
    again.close()
    storage.close()


def test_what_a_process_had_stored_before_it_died_is_not_taken_for_reserved(tmp_path: Path) -> None:
    class Cut(Quick):
        armed = False

        def write(self, file: int, data: Any, at: int) -> int:
            if self.armed and file_name(file) == "changes":
                raise Died
            return super().write(file, data, at)

    folder, page = tmp_path / "store", pages("full", 2)[0]
    lagging, cut = opened(folder, capacity=MIB), Cut()
    store(lagging, pages("full", 1))
    dying = opened(folder, cut, capacity=MIB)
    call, answers = Call(), dict[int, bool]()
    filling = dying._reserve(call, [0], [page.name], [page.record()], answers)
    dying._write(filling, [page.record()])
    lagging.exists([page.name])
    cut.armed = True
    with pytest.raises(Died):
        dying._commit(call, filling, [page.name], [page.record()], answers)
    later = opened(folder, capacity=MIB)
    dying._folder.abandon()
    dying._open = False
    assert store(later, [page]) == [True]
    lagging._books._swept_ns = 0
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
        with pytest.raises(StorageError, match="no threads"):
            store(storage, some)
    assert storage._books.states()["reserved"] == 0
    assert all(store(storage, some))
    storage.close()


def test_of_a_call_the_first_was_used_last_after_a_restart_too(tmp_path: Path) -> None:
    new, old = pages("full", 1, 2)
    storage = opened(tmp_path / "store")
    store(storage, [old])
    store(storage, [new, old])
    storage.close()
    storage = opened(tmp_path / "store")
    used = [int(slab.used[row]) for slab, row in map(storage._books.place, names([new, old]))]
    assert used[0] > used[1]
    storage.close()


def test_who_lags_hears_of_what_is_changed_where_a_process_died_before_it_had_told_all(tmp_path: Path) -> None:
    class Cut(Quick):
        armed = False

        def write(self, file: int, data: Any, at: int) -> int:
            if self.armed and file_name(file) == "changes" and at == 0:
                raise Died
            return super().write(file, data, at)

    folder, cut = tmp_path / "store", Cut()
    first = opened(folder, capacity=MIB)
    some = pages("full", *range(10))
    store(first, some)
    dying, lagging = opened(folder, cut, capacity=MIB), opened(folder, capacity=MIB)
    store(first, pages("window", 1))
    cut.armed = True
    with pytest.raises(Died):
        dying.delete([some[3].name])
    dying._folder.abandon()
    dying._open = False
    lagging.exists([some[0].name])
    (slab,) = {first._books.place(page.name)[0] for page in some}
    same = [page for page in some if slab.stripe(first._books.place(page.name)[1]) == slab.stripe(3)]
    for page in same:
        assert first.delete([page.name]) == [page != some[3]], "it has read what the dead one wrote"
        assert lagging.exists([page.name]) == [False], page
    assert intact(lagging, some) == intact(first, some) == set(some) - set(same) - {some[3]}
    first.close()
    lagging.close()


def test_what_a_process_leaves_that_dies_while_it_makes_or_removes_a_slab_is_room_for_the_others(
    tmp_path: Path,
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
            survivor._room._full_until.clear()  # it would ask again after some seconds
            survivor._books._swept_ns = 0
            fresh = pages("full", *range(100 + 9 * turn, 109 + 9 * turn))
            assert all(store(survivor, fresh))
            assert intact(survivor, fresh) == set(fresh)
        known = sum(slab.shape.bytes for slab in survivor._books.slabs.values())
        there = sum(path.stat().st_size for path in folder.rglob("slab-*"))
        assert known == there, f"dies at its event {count}"
        assert total(folder) <= capacity
        dying._open = False
        survivor.close()
        survivor = opened(folder, capacity=capacity)
        assert intact(survivor, fresh) == set(fresh)
        survivor.close()
        count += 1
    assert count > 60


def test_a_slab_that_cannot_be_opened_is_left_alone_and_found_again(tmp_path: Path) -> None:
    class Locked(Quick):
        refuses = ""

        def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
            if path.name == self.refuses:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path, create=create, direct=direct, read_only=read_only)

    folder, disk = tmp_path / "store", Locked()
    storage = opened(folder, capacity=MIB)
    some = pages("full", 1)
    store(storage, some)
    disk.refuses = table_path(storage._books.place(some[0].name)[0].path).name
    storage.close()
    storage = opened(folder, disk, capacity=MIB)
    assert all(store(storage, pages("window", 1) + pages("state", 1)))
    assert storage.exists(names(some)) == [False]
    disk.refuses = ""
    assert all(store(storage, pages("full", *range(2, 40))))
    assert intact(storage, some) == set(some)
    storage.close()


def test_a_store_in_use_whose_file_of_changes_somebody_removed_is_not_opened_and_loses_nothing(tmp_path: Path) -> None:
    folder, some = tmp_path / "store", pages("full", 1)
    storage = opened(folder, capacity=MIB)
    store(storage, some)
    (storage._folder.model / "changes").unlink()
    with pytest.raises(StorageError, match="end them first"):
        opened(folder, capacity=MIB)
    assert intact(storage, some) == set(some)
    storage.close()
    storage = opened(folder, capacity=MIB)
    assert intact(storage, some) == set(some)
    storage.close()


def test_a_write_that_ends_after_the_store_was_closed_lands_on_nobodys_page(tmp_path: Path) -> None:
    folder, disk, calls = tmp_path / "store", Gate("write", ending="slab-000000"), Calls()
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
    new._books._swept_ns = 0
    assert store(new, pages("full", 4)) == [True]
    assert new._books.states()["reserved"] == 0, "and its row is free when it has ended"
    assert new._folder.alone()
    new.close()


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
