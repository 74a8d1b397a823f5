"""Rows of a table that cannot be read, of a put that was interrupted, and on a disk that is full."""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from file_disks import MIB, Rigged, WithoutSync, file_name, trouble
from test_crashes import Page, Quick, die, intact, intact_anew, names, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.put import Put
from kvarve.storage.file.slabs import STRIPES, RowSpan, runs
from kvarve.storage.file.table import FREE, STORED, Shape
from kvarve.testing.faulty_disk import Died
from kvarve.testing.suite import LABEL

# --- a table that cannot be read for a moment


class Blind(Quick):
    """While `blind`, no table can be read."""

    blind = False

    def read(self, file: int, into: Any, at: int) -> int:
        if self.blind and file_name(file).endswith(".table"):
            raise trouble()
        return super().read(file, into, at)


@pytest.mark.parametrize("blind", ["the process that fills it", "another"])
def test_a_row_that_is_being_filled_is_not_reused_though_its_entry_cannot_be_read(tmp_path: Path, blind: str) -> None:
    folder, disks, (mine, theirs) = tmp_path / "store", (Blind(), Blind()), pages("full", 20, 21)
    one, other = (opened(folder, disk, capacity=MIB) for disk in disks)
    assert all(store(other, pages("full", *range(3))))
    put = Put([mine.name], [[mine.record()]])
    one._reserve(put, [0])
    disk = disks[blind == "another"]
    disk.blind = True
    assert store(other, [theirs]) == [True]
    one.exists(names([theirs]))
    with one._changing():
        pass
    disk.blind = False
    one._write(put)
    one._commit(put)
    assert put.answers == {0: True}
    both = [mine, theirs, *pages("full", *range(3))]
    assert intact(one, both) == intact(other, both) == set(both)
    one.close()
    other.close()
    assert intact_anew(folder, both) == set(both)


def test_a_row_that_is_being_filled_is_not_reused_though_a_disk_has_torn_its_entry(tmp_path: Path) -> None:
    folder, (mine, theirs) = tmp_path / "store", pages("full", 20, 21)
    one, other = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(other, pages("full", *range(3))))
    put = Put([mine.name], [[mine.record()]])
    one._reserve(put, [0])
    ((slab, row),) = put.places.values()
    os.pwrite(slab.table, b"torn", slab.shape.entry_at(row))
    other._index._read(other._index.slabs[slab.number], 0, slab.shape.slots)
    assert store(other, [theirs]) == [True]
    assert other._index.place(theirs.name)[1] != row
    one._write(put)
    one._commit(put)
    assert put.answers == {0: True}
    assert one._index.held == {}
    assert intact(one, [mine, theirs]) == intact(other, [mine, theirs]) == {mine, theirs}
    one.close()
    other.close()


def test_rows_that_a_put_is_filling_stay_its_own_when_others_tell_of_their_stripe(tmp_path: Path) -> None:
    folder, (mine, theirs, more) = tmp_path / "store", pages("full", 20, 30, 40)
    one, other = opened(folder, capacity=64 * MIB), opened(folder, capacity=64 * MIB)
    put = Put([mine.name], [[mine.record()]])
    one._reserve(put, [0])
    assert store(other, [theirs]) == [True]
    ((slab, row),), (there, at) = put.places.values(), other._index.place(theirs.name)
    assert (there.number, there.stripe(at)) == (slab.number, slab.stripe(row))
    assert intact(one, [theirs]) == {theirs}, "it has read that part of the table"
    slab.free.clear()  # it looks for free rows anew
    assert store(one, [more]) == [True]
    assert one._index.place(more.name) not in put.places.values()
    one._write(put)
    one._commit(put)
    assert intact(one, [mine, theirs, more]) == intact(other, [mine, theirs, more]) == {mine, theirs, more}
    one.close()
    other.close()


def test_rows_that_a_put_seized_and_did_not_need_are_free(opened):
    """Rows are seized for all objects of a put at once; the quota admits three of these."""
    storage = opened(64 * MIB, quota_bytes=3 * 4096)
    assert storage.put([f"a-{i}" for i in range(8)], [memoryview(b"1")] * 8) == [True] * 3 + [False] * 5
    assert storage._index.held == {}
    assert "reserved" not in {state for state, count in storage._index.states().items() if count}
    rest = sum(slab.shape.slots for slab in storage._index.slabs.values()) - 3
    assert all(storage.put([f"{i}-x" for i in range(rest)], [memoryview(b"1")] * rest))
    assert storage.usage().evicted == 0, "all other rows were free"


def test_rows_that_a_process_was_filling_when_it_died_are_filled_by_the_others(tmp_path: Path) -> None:
    folder, some = tmp_path / "store", pages("full", *range(20, 31))
    one, dying = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(one, pages("full", *range(3))))
    names_, put = names(some), Put(names(some), [[page.record()] for page in some])
    dying._reserve(put, range(11))
    (slab,) = {place[0] for place in put.places.values()}
    assert store(one, [Page(50, "full")]) == [True]
    assert one._index.place(Page(50, "full").name)[0].number != slab.number, "the rest of the slab is being filled"
    die(dying)
    assert all(store(one, some))
    lies = [one._index.place(name)[0].number for name in names_]
    assert lies.count(slab.number) == 11, "without a sweep, and though nothing was told"
    assert intact(one, some) == set(some)
    one.close()


def test_a_put_that_fails_releases_no_row_that_another_put_has_seized_since(tmp_path: Path) -> None:
    """Its rows are free for the other threads of the process as soon as its changes were reverted."""
    disk, one = Rigged(), Page(1, "full")
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    failing = Put([one.name], [[one.record()]])
    storage._reserve(failing, [0])
    (place,) = failing.places.values()
    others = pages("full", *range(20, 20 + place[0].shape.slots))
    put = Put(names(others), [[page.record()] for page in others])
    storage._write(failing)
    disk.fail(trouble(), "write", ".table")
    with pytest.raises(OSError, match="Input/output"):
        storage._commit(failing)
    storage._reserve(put, range(len(others)))
    assert place in put.places.values()
    storage._release_rows(failing)
    storage._write(put)
    storage._commit(put)
    assert intact(storage, [one, *others]) == set(others)
    assert storage._index.held == {}
    storage.close()


def test_a_reader_that_was_not_told_of_a_deletion_gets_no_bytes_of_the_next_object(tmp_path: Path) -> None:
    """A process dies when it has freed a row in the table, and before it tells; the next one fills that row."""

    def dies(*told: object, **how: object) -> None:
        raise Died

    folder, (old, new) = tmp_path / "store", pages("full", 1, 2)
    reader, dying = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert store(reader, [old]) == [True]
    dying._index.changes.tell = dies  # type: ignore[method-assign]
    with pytest.raises(Died):
        dying.delete([old.name])
    die(dying)
    filling, put = opened(folder, capacity=MIB), Put([new.name], [[new.record()]])
    filling._reserve(put, [0])
    filling._write(put)
    place, (slab, row) = reader._index.place(old.name), put.places[0]
    assert (place[0].number, place[1]) == (slab.number, row)
    buffer = memoryview(bytearray(len(old.record())))
    assert reader.get([old.name], [buffer]) == [None]
    filling._commit(put)
    assert intact(reader, [old, new]) == {new}
    reader.close()
    filling.close()


def test_a_deletion_that_could_not_be_told_is_told_before_its_row_is_filled(tmp_path: Path) -> None:
    """The table has been written, and the process lives on."""
    folder, (old, new) = tmp_path / "store", pages("full", 1, 2)
    reader, writer = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert store(writer, [old]) == [True] and reader.exists([old.name]) == [True]
    tell = writer._index.changes.tell

    def fails(*told: object, **how: object) -> None:
        writer._index.changes.tell = tell  # type: ignore[method-assign]
        raise trouble()

    writer._index.changes.tell = fails  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        writer.delete([old.name])
    put = Put([new.name], [[new.record()]])
    writer._reserve(put, [0])
    writer._write(put)
    buffer = memoryview(bytearray(len(old.record())))
    assert reader.get([old.name], [buffer]) == [None]
    writer._commit(put)
    assert intact(reader, [old, new]) == {new}
    reader.close()
    writer.close()


def test_rows_stay_locked_by_no_call_that_failed_to_lock_others(tmp_path: Path) -> None:
    class Locks(Quick):
        left = -1  # calls until one fails

        def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
            self.left -= 1
            if not self.left:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            return super().lock_range(file, at, size_bytes)

    disk, some = Locks(), pages("full", *range(20))
    store_ = opened(tmp_path / "store", disk, capacity=8 * MIB)
    assert all(store(store_, some))
    store_.delete(names(some[::2]))
    disk.left = 3
    with pytest.raises((OSError, StorageError)):
        store(store_, pages("full", *range(20, 50)))
    assert store_._index.held == {}
    assert all(store(store_, pages("full", *range(20, 50))))
    store_.close()


def test_a_slab_is_not_removed_while_another_process_fills_a_row_of_it(tmp_path: Path) -> None:
    folder, page = tmp_path / "store", pages("full", 20)[0]
    one, other = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(other, pages("full", *range(3))))
    put = Put([page.name], [[page.record()]])
    one._reserve(put, [0])
    with other._changing():
        assert not other._allocator.remove(other._index.slabs[0], "a test")
    one._write(put)
    one._commit(put)
    assert intact(other, [page]) == {page} and put.answers == {0: True}
    with other._changing():
        assert other._allocator.remove(other._index.slabs[0], "a test")
    assert one.exists([page.name]) == [False]
    one.close()
    other.close()


def test_what_is_seized_in_a_slab_that_another_process_has_just_removed_is_not_confirmed(tmp_path: Path) -> None:
    class Late(Quick):
        """The slab goes between two calls of this process: it has not looked since."""

        removes: Callable[[], None] | None = None

        def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
            removes, self.removes = self.removes, None
            if removes is not None:
                removes()
            return super().lock_range(file, at, size_bytes)

    folder, disk, page = tmp_path / "store", Late(), pages("full", 20)[0]
    one, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(one, pages("full", *range(3))))
    other.exists(["x"])

    def removes() -> None:
        with other._changing():
            assert other._allocator.remove(other._index.slabs[0], "a test")

    disk.removes = removes
    assert store(one, [page]) == [True], "in a slab that is there"
    assert one._index.held == {}
    assert intact(other, [page]) == intact(one, [page]) == {page}
    one.close()
    other.close()


def test_what_cannot_be_read_of_a_table_is_not_written_over_and_is_there_again_when_it_can(tmp_path: Path) -> None:
    folder, disk, some = tmp_path / "store", Blind(), pages("full", *range(120))
    blind, other = opened(folder, disk, capacity=8 * MIB), opened(folder, capacity=8 * MIB)
    assert all(store(other, some))
    blind.exists(["x"])
    other.delete([some[5].name])
    disk.blind = True
    assert sum(blind.exists(names(some))) < 119
    assert store(blind, pages("window", 1)) == [True]
    disk.blind = False
    assert store(blind, pages("window", 2)) == [True]
    assert intact(blind, some) == intact(other, some) == {*some} - {some[5]}
    assert blind._index.states()["broken"] == 0
    blind.close()
    other.close()


# --- rows that are being filled


def test_rows_that_could_not_be_given_back_are_free_again_and_the_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is frozen while it tells what it has changed."""
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.01)
    folder, disk = tmp_path / "store", Rigged()
    storage, other = opened(folder, disk, capacity=MIB), opened(folder, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    changes, frozen = other._index.changes, other._folder.disk

    def freezes(call: str, name: str, at: int) -> None:
        if call == "write" and name == "slab-000000":
            assert frozen.lock(changes._file, wait=False)

    disk.happens = freezes
    with pytest.raises(StorageError, match="is it stopped"):
        store(storage, pages("full", 2))
    disk.happens = lambda call, name, at: None
    frozen.unlock(changes._file)
    assert store(storage, pages("full", 3)) == [True]
    assert storage._index.states()["reserved"] == 0
    storage.close()
    assert other._folder.alone()
    other.close()


def test_rows_of_a_put_that_was_interrupted_while_it_reserved_are_free_again(tmp_path: Path) -> None:
    folder, disk = tmp_path / "store", Rigged()
    storage = opened(folder, disk, capacity=MIB)
    assert store(storage, pages("full", 1)) == [True]
    disk.fail(KeyboardInterrupt(), "write", ".table")
    with pytest.raises(KeyboardInterrupt):
        store(storage, pages("full", 2, 3))
    assert store(storage, pages("full", 4)) == [True]
    assert storage._index.states()["reserved"] == 0
    storage.close()
    storage = opened(folder, capacity=MIB)
    assert storage._folder.alone()
    storage.close()


def test_rows_are_not_reused_while_threads_write_for_a_put_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(WithoutSync):
        gate: threading.Event | None = None
        waiting = threading.Semaphore(0)

        def write(self, file: int, data: Any, at: int) -> int:
            if self.gate is not None and file_name(file) == "slab-000000":
                self.waiting.release()
                assert self.gate.wait(60)
            return super().write(file, data, at)

        def open(self, folder: Directory, name: str, **how: bool) -> int:
            if how.pop("direct", False):
                raise trouble(errno.EINVAL)
            return super().open(folder, name, **how)

    disk = Slow()
    storage = FileStorage(tmp_path / "store", MIB, LABEL, "model A", threads=4, disk=disk)
    assert all(store(storage, pages("full", 1)))
    disk.gate = gate = threading.Event()

    def result(future: Future[Any]) -> None:
        for _ in range(2):
            assert disk.waiting.acquire(timeout=60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", result)
        store(storage, pages("full", 2, 3))
    disk.gate = None
    some = pages("full", *range(20, 34))
    for page in some:
        assert store(storage, [page]) == [True]
    gate.set()
    while storage._index.held:  # until the last of them has come back
        pass
    assert intact(storage, some) == set(some)
    assert store(storage, pages("full", 4)) == [True]
    assert storage._index.states()["reserved"] == 0
    storage.close()


# --- a disk that is smaller than the capacity


def test_a_removed_slab_frees_its_bytes_although_an_idle_process_has_it_open(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    idle, busy = opened(folder, capacity=MIB), opened(folder, capacity=MIB)
    assert all(store(idle, pages("full", *range(30))))
    busy.exists(["x"])
    slab = idle._index.slabs[0]
    with busy._changing():
        busy._allocator.remove(busy._index.slabs[0], "a test")
    assert os.fstat(slab.file).st_size == 0
    assert intact(idle, pages("full", *range(5))) == set()
    idle.close()
    busy.close()


def test_a_full_disk_costs_one_slab_at_most_when_what_is_removed_makes_no_room(tmp_path: Path) -> None:
    class Full(Quick):
        full = False

        def allocate(self, file: int, size_bytes: int) -> None:
            if self.full:
                raise trouble(errno.ENOSPC)
            super().allocate(file, size_bytes)

    disk, some = Full(), pages("full", *range(60))
    storage = opened(tmp_path / "store", disk, capacity=MIB)
    assert all(store(storage, some))
    before = len(storage._index.slabs)
    disk.full = True
    assert store(storage, pages("state", 1)) == [False]
    assert len(storage._index.slabs) == before - 1
    storage.close()


def test_a_process_that_finds_others_at_its_rows_fills_other_stripes(tmp_path: Path) -> None:
    """Each free row is still taken once."""
    with closing(opened(tmp_path / "store", Quick(), capacity=8 * MIB)) as one:
        assert all(store(one, pages("full", *range(3))))
        (slab,) = one._index.slabs.values()
        slots = slab.shape.slots
        begins = set()
        for _ in range(50):
            slab.move_on()
            taken = [slab.take_free(2)]
            begins.add(int(slab.stripe(np.array(taken[0]))[0]))
            while some := slab.take_free(2):
                taken.append(some)
            rows = [row for some in taken for row in some]
            assert sorted(rows) == [row for row in range(slots) if slab.state[row] == FREE]
        assert len(begins) > 3


def test_a_process_moves_on_when_another_has_all_rows_of_its_put(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store", Quick(), capacity=MIB)) as one:
        (first, *others), held = pages("full", *range(3)), pages("full", *range(10, 12))
        assert store(one, [first]) == [True]
        (slab,) = one._index.slabs.values()
        with closing(opened(tmp_path / "store", Quick(), capacity=MIB)) as other:
            put = Put(names(held), [[page.record()] for page in held])
            other._reserve(put, range(len(held)))
            assert not slab._shared and all(store(one, others)) and slab._shared
            other._release_rows(put)


class CountsLocks(Quick):
    """How often rows are locked; `tells` of the locks of others."""

    def __init__(self, tells: bool = True) -> None:
        self.tells, self.calls = tells, 0

    def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
        self.calls += 1
        return super().lock_range(file, at, size_bytes)

    def locked_range(self, file: int, at: int, size_bytes: int) -> tuple[int, int] | None:
        if not self.tells:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return super().locked_range(file, at, size_bytes)


def _prefer(storage: FileStorage, rows: range) -> None:
    """Have a store take these rows of its only slab next."""
    (slab,) = storage._index.slabs.values()
    slab.free, slab.searched = [*reversed(rows)], True


@pytest.mark.parametrize(("tells", "most"), [(True, 4), (False, 60)])
def test_rows_beside_those_of_another_process_are_locked_with_few_calls(tmp_path: Path, tells: bool, most: int) -> None:
    disk = CountsLocks(tells)
    with closing(opened(tmp_path / "store", disk, capacity=8 * MIB)) as one:
        assert all(store(one, pages("full", 1)))
        (slab,) = one._index.slabs.values()
        with closing(opened(tmp_path / "store", Quick(), capacity=8 * MIB)) as other:
            theirs, mine = pages("full", *range(10, 30)), pages("full", *range(40, 70))
            other.exists(["x"])
            _prefer(other, range(20, 40))
            put = Put(names(theirs), [[page.record()] for page in theirs])
            other._reserve(put, range(len(theirs)))
            _prefer(one, range(15, 45))
            disk.calls = 0
            places = one._index.reserve(Put(), slab.shape.slot_bytes, 30)
            assert [row for _, row in places] == [*range(15, 20), *range(40, 45)]
            assert disk.calls <= most
            one._index.release(places)
            assert all(store(one, mine))
            other._write(put)
            other._commit(put)
            assert intact(one, theirs + mine) == intact(other, theirs + mine) == {*theirs, *mine}


@pytest.mark.parametrize("full", [False, True], ids=["empty", "one row of some stripes is free"])
def test_a_process_fills_a_stripe_that_no_other_one_fills(tmp_path: Path, full: bool) -> None:
    with closing(opened(tmp_path / "store", Quick(), capacity=136 * MIB // 16)) as one:
        assert all(store(one, pages("full", 1)))
        (slab,) = one._index.slabs.values()
        sizes = [last - first for first, last in map(slab.rows_of, range(STRIPES))]
        small = sizes.index(min(sizes), 5)
        assert min(sizes) < max(sizes)
        last_rows = [slab.rows_of(stripe)[1] - 1 for stripe in range(STRIPES)]
        if full:
            slab.state[:] = STORED
            slab.state[last_rows[small - 1 : small + 2]] = FREE
        with closing(opened(tmp_path / "store", Quick(), capacity=136 * MIB // 16)) as other:
            other.exists(["x"])
            theirs = other._index.slabs[slab.number]
            for stripe in (small - 1, small + 1) if full else {*range(STRIPES)} - {small}:
                assert theirs.lock(last_rows[stripe], 1)
            for _ in range(20):
                slab.move_on()
                assert slab.stripe(np.array(slab.take_free(1))).tolist() == [small]
        slab.state[:] = FREE


@pytest.mark.parametrize("answer", [(1 << 40, 4096), (0, 4096), (1 << 20, -4096), (0, 0), (0, 1 << 40)])
def test_no_row_is_locked_that_was_not_asked_for_whatever_a_file_system_says_of_locks(
    tmp_path: Path, answer: tuple[int, int]
) -> None:
    class Odd(CountsLocks):
        def locked_range(self, file: int, at: int, size_bytes: int) -> tuple[int, int] | None:
            return answer

    with closing(opened(tmp_path / "store", Odd(), capacity=8 * MIB)) as one:
        assert all(store(one, pages("full", 1)))
        (slab,) = one._index.slabs.values()
        with closing(opened(tmp_path / "store", Quick(), capacity=8 * MIB)) as other:
            other.exists(["x"])
            assert other._index.slabs[slab.number].lock(30, 1)
            _prefer(one, range(25, 40))
            places = one._index.reserve(Put(), slab.shape.slot_bytes, 15)
            assert {row for _, row in places} <= {*range(25, 40)} - {30}
            one._index.release(places)
            assert one._index.held == {} and all(store(one, pages("full", *range(10, 40))))


def test_the_bytes_of_a_call_are_divided_among_all_threads(tmp_path: Path) -> None:
    memory = memoryview(mmap.mmap(-1, 16 * MIB))

    def lengths(count: int, size_bytes: int, threads: int) -> list[int]:
        slab: Any = SimpleNamespace(number=0, shape=Shape(size_bytes, 64))
        pieces = [RowSpan(i, slab, i, memory[i * size_bytes : (i + 1) * size_bytes]) for i in range(count)]
        return [len(run) for run in runs(pieces, threads)]

    assert lengths(16, MIB, 4) == [4] * 4
    assert lengths(16, MIB, 1) == [4] * 4, "a run has at most 4 MiB"
    assert lengths(16, MIB // 4, 4) == [4] * 4
    assert lengths(4, MIB // 4, 4) == [4], "and no less than 1 MiB"


def test_rows_of_stripes_with_unchanged_ones_between_them_are_all_read(tmp_path: Path) -> None:
    one, other = (opened(tmp_path / "store", capacity=64 * MIB) for _ in "12")
    first, *some = pages("full", 0, 1, 2)
    assert all(store(one, [first])) and intact(other, [first])
    slab, _ = one._index.place(first.name)
    slab.free, slab.searched = [slab.rows_of(9)[0] + 3, slab.rows_of(6)[0] + 3], True  # the next rows
    assert all(store(one, some))
    assert intact(other, some) == {*some}


@pytest.mark.parametrize("newer", [2, 3], ids=["the-newer-one-first", "the-older-one-first"])
def test_of_two_objects_of_one_name_all_processes_keep_the_newer_however_they_read_of_them(
    newer: int, tmp_path: Path
) -> None:
    one, other, third = (opened(tmp_path / "store", capacity=64 * MIB) for _ in "123")
    filler, page = pages("full", 50, 1)
    for storage in (one, other, third):
        assert all(store(storage, [filler])) and intact(storage, [filler])
    puts = [Put([page.name], [[page.record()]]) for _ in "12"]
    for storage, put, stripe in zip((one, other), puts, (5 - newer, newer), strict=True):
        slab, _ = storage._index.place(filler.name)
        slab.free, slab.searched = [slab.rows_of(stripe)[0] + 5], True
        storage._reserve(put, [0])
        storage._write(put)
    look, other._index.changes.look = other._index.changes.look, lambda: iter(())
    one._commit(puts[0])
    other._commit(puts[1])  # it had looked before the first one told
    other._index.changes.look = look
    kept = {storage._index.place(page.name)[1] for storage in (third, one, other) if intact(storage, [page])}
    assert len(kept) == 1
    for number, storage in enumerate((third, one, other)):
        assert all(store(storage, pages("full", 60 + number)))  # which frees the row of the other
    assert all(intact(storage, [page]) for storage in (one, other, third))
    for storage in (one, other, third):
        storage.close()
    assert intact_anew(tmp_path / "store", [page], capacity=64 * MIB) == {page}
