"""Rows of a table that cannot be read, of a put that was interrupted, and on a disk that is full."""

import errno
import mmap
import os
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import inspect_files
import numpy as np
import pytest
from file_disks import MIB, Rigged, quietly, trouble
from file_pages import Quick, filling, intact, intact_anew, names, pages, store
from processes import until

from kvarve.errors import StorageError
from kvarve.storage.file._slabs import STRIPES, RowSpan, runs
from kvarve.storage.file._table import FREE, STORED, Shape
from tests.sim.faulty_disk import Died

# --- a table that cannot be read for a moment


@pytest.mark.parametrize("which", [0, 1], ids=["the process that fills it", "another"])
def test_a_row_that_is_being_filled_is_not_reused_though_its_entry_cannot_be_read(quick, folder, which):
    disks, (mine, theirs) = (Rigged(), Rigged()), pages("full", 20, 21)
    one, other = (quick(disk) for disk in disks)
    assert all(store(other, pages("full", *range(3))))
    put = filling(one, [mine])
    disks[which].refuse(errno.EIO, "read", name=".table")
    assert store(other, [theirs]) == [True]
    one.exists(names([theirs]))
    one.delete(["none"])
    disks[which].happens = quietly
    put.write()
    assert put.commit() == [True]
    both = [mine, theirs, *pages("full", *range(3))]
    assert intact(one, both) == intact(other, both) == set(both)
    one.close()
    other.close()
    assert intact_anew(folder, both) == set(both)


def test_rows_that_a_put_is_filling_stay_its_own_when_others_tell_of_their_stripe(quick):
    mine, theirs, more = pages("full", 20, 30, 40)
    one, other = quick(capacity=64 * MIB), quick(capacity=64 * MIB)
    put = filling(one, [mine])
    assert store(other, [theirs]) == [True]
    (place,), there = put.places, inspect_files.place(other, theirs.name)
    assert (there.slab, there.stripe) == (place.slab, place.stripe)
    assert intact(one, [theirs]) == {theirs}, "it has read that part of the table"
    inspect_files.slab(one).free.clear()  # it looks for free rows anew
    assert store(one, [more]) == [True]
    assert inspect_files.place(one, more.name).row != place.row
    put.write()
    put.commit()
    assert intact(one, [mine, theirs, more]) == intact(other, [mine, theirs, more]) == {mine, theirs, more}


def test_rows_that_a_put_seized_and_did_not_need_are_free(opened):
    """Rows are seized for all objects of a put at once; the quota admits three of these."""
    storage = opened(2 * MIB, quota_bytes=3 * 4096)
    assert storage.put([f"a-{i}" for i in range(8)], [memoryview(b"1")] * 8) == [True] * 3 + [False] * 5
    assert inspect_files.seized(storage) == inspect_files.rows(storage)["reserved"] == 0
    rest = sum(shape.slots for shape in inspect_files.slabs(storage).values()) - 3
    assert all(storage.put([f"{i}-x" for i in range(rest)], [memoryview(b"1")] * rest))
    assert storage.usage().evicted == 0, "all other rows were free"


def test_rows_that_a_process_was_filling_when_it_died_are_filled_by_the_others(quick):
    some, (more,) = pages("full", *range(20, 31)), pages("full", 50)
    one, dying = quick(), quick()
    assert all(store(one, pages("full", *range(3))))
    (number,) = {place.slab for place in filling(dying, some).places}
    assert store(one, [more]) == [True]
    assert inspect_files.place(one, more.name).slab != number, "the rest of the slab is being filled"
    inspect_files.die(dying)
    assert all(store(one, some))
    lies = [inspect_files.place(one, name).slab for name in names(some)]
    assert lies.count(number) == 11, "without a sweep, and though nothing was told"
    assert intact(one, some) == set(some)


def test_a_put_that_fails_releases_no_row_that_another_put_has_seized_since(quick):
    """Its rows are free for the other threads of the process as soon as its changes were reverted."""
    disk, one = Rigged(), pages("full", 1)
    storage = quick(disk)
    failing = filling(storage, one)
    (place,) = failing.places
    others = pages("full", *range(20, 20 + place.shape.slots))
    failing.write()
    disk.fail(trouble(), "write", ".table")
    with pytest.raises(OSError, match="Input/output"):
        failing.commit()
    put = filling(storage, others)
    assert place.row in {each.row for each in put.places if each.slab == place.slab}
    failing.release()
    put.write()
    put.commit()
    assert intact(storage, [*one, *others]) == set(others)
    assert inspect_files.seized(storage) == 0


@pytest.mark.parametrize("dies", [True, False], ids=["the process dies", "it lives on"])
def test_a_reader_that_was_not_told_of_a_deletion_gets_no_bytes_of_the_next_object(quick, dies):
    """A process has freed a row in the table, and could not tell; the next put fills that row."""
    disk, (old, new) = Rigged(), pages("full", 1, 2)
    reader, writer = quick(), quick(disk)
    assert store(reader, [old]) == [True]
    disk.fail(Died() if dies else trouble(), "write", "changes")
    with pytest.raises((Died, StorageError)):
        writer.delete([old.name])
    if dies:
        inspect_files.die(writer)
        writer = quick()
    put = filling(writer, [new])
    put.write()
    assert reader.get([old.name], [memoryview(bytearray(len(old.record())))]) == [None]
    put.commit()
    assert intact(reader, [old, new]) == {new}


def test_a_slab_is_not_removed_while_another_process_fills_a_row_of_it(quick):
    page = pages("full", 20)
    one, other = quick(), quick()
    assert all(store(other, pages("full", *range(3))))
    put = filling(one, page)
    assert not inspect_files.remove(other, 0)
    put.write()
    assert put.commit() == [True] and intact(other, page) == {*page}
    assert inspect_files.remove(other, 0)
    assert one.exists(names(page)) == [False]


def test_what_is_seized_in_a_slab_that_another_process_has_just_removed_is_not_confirmed(quick):
    """The slab goes between two calls of the process: it has not looked since."""
    disk, page = Rigged(), pages("full", 20)
    one, other = quick(disk), quick()
    assert all(store(one, pages("full", *range(3))))
    other.exists(["x"])
    disk.once(lambda: inspect_files.remove(other, 0), "lock_range")
    assert store(one, page) == [True], "in a slab that is there"
    assert inspect_files.seized(one) == 0
    assert intact(other, page) == intact(one, page) == {*page}


def test_what_cannot_be_read_of_a_table_is_not_written_over_and_is_there_again_when_it_can(quick):
    disk, some = Rigged(), pages("full", *range(120))
    blind, other = quick(disk, 8 * MIB), quick(capacity=8 * MIB)
    assert all(store(other, some))
    blind.exists(["x"])
    other.delete([some[5].name])
    disk.refuse(errno.EIO, "read", name=".table")
    assert sum(blind.exists(names(some))) < 119
    assert store(blind, pages("window", 1)) == [True]
    disk.happens = quietly
    assert store(blind, pages("window", 2)) == [True]
    assert intact(blind, some) == intact(other, some) == {*some} - {some[5]}
    assert inspect_files.rows(blind)["broken"] == 0


# --- rows that are being filled


def test_rows_that_could_not_be_given_back_are_free_again_and_the_folder_is_left(quick, monkeypatch):
    """Another process is frozen while it tells what it has changed."""
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.01)
    disk, frozen = Rigged(), ExitStack()
    storage, other = quick(disk), quick()
    assert store(storage, pages("full", 1)) == [True]
    disk.once(lambda: frozen.enter_context(inspect_files.telling(other)), "write", "slab-000000")
    with pytest.raises(StorageError, match="is it stopped"):
        store(storage, pages("full", 2))
    frozen.close()
    assert store(storage, pages("full", 3)) == [True]
    assert inspect_files.rows(storage)["reserved"] == 0
    storage.close()
    assert inspect_files.is_alone(other)


def test_rows_are_not_reused_while_threads_write_for_a_put_that_was_interrupted(quick, monkeypatch):
    disk, waiting, goes_on = Rigged(), threading.Semaphore(0), threading.Event()
    storage = quick(disk, threads=4)
    assert all(store(storage, pages("full", 1)))

    def waits(call: str, name: str, at: int) -> None:
        if (call, name) == ("write", "slab-000000"):
            waiting.release()
            assert goes_on.wait(60)

    disk.happens = waits

    def result(future: Future[Any]) -> None:
        for _ in range(2):
            assert waiting.acquire(timeout=60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", result)
        store(storage, pages("full", 2, 3))
    disk.happens = quietly
    some = pages("full", *range(20, 34))
    for page in some:
        assert store(storage, [page]) == [True]
    goes_on.set()
    until(lambda: not inspect_files.seized(storage))  # the last of them has come back
    assert intact(storage, some) == set(some)
    assert store(storage, pages("full", 4)) == [True]
    assert inspect_files.rows(storage)["reserved"] == 0


# --- a disk that is smaller than the capacity


def test_rows_stay_locked_by_no_call_that_failed_to_lock_others(quick):
    disk, some, more = Rigged(), pages("full", *range(20)), pages("full", *range(20, 50))
    storage = quick(disk, 8 * MIB)
    assert all(store(storage, some))
    storage.delete(names(some[::2]))
    disk.fail(trouble(errno.ENOLCK), "lock_range", skip=2)
    with pytest.raises((OSError, StorageError)):
        store(storage, more)
    assert inspect_files.seized(storage) == 0
    assert all(store(storage, more))


def test_a_removed_slab_frees_its_bytes_although_an_idle_process_has_it_open(quick):
    idle, busy = quick(), quick()
    assert all(store(idle, pages("full", *range(30))))
    busy.exists(["x"])
    file = inspect_files.slab(idle).file
    inspect_files.remove(busy, 0)
    assert os.fstat(file).st_size == 0
    assert intact(idle, pages("full", *range(5))) == set()


def test_a_full_disk_costs_one_slab_at_most_when_what_is_removed_makes_no_room(quick):
    """As when another program takes all freed bytes at once."""

    class Stopped(Rigged):
        def since_boot_ns(self) -> int:  # a slow machine takes ten seconds for these puts
            return 10**12

    disk = Stopped()
    storage = quick(disk)
    assert all(store(storage, pages("full", *range(60))))
    before = len(inspect_files.slabs(storage))
    disk.refuse(errno.ENOSPC, "allocate")
    for number in range(5):
        assert store(storage, pages("state", number)) == [False]
    assert len(inspect_files.slabs(storage)) == before - 1


def test_a_process_moves_on_when_another_has_all_rows_of_its_put(quick):
    one, (first, *others), held = quick(), pages("full", *range(3)), pages("full", *range(10, 12))
    assert store(one, [first]) == [True]
    other, begins = quick(), set()
    put = filling(other, held)
    assert all(store(one, others))
    slab = inspect_files.slab(one)
    free = {row for row in range(slab.shape.slots) if slab.state[row] == FREE}
    for _ in range(50):
        slab.move_on()
        taken = [slab.take_free(2)]
        begins.add(taken[0][0])
        while some := slab.take_free(2):
            taken.append(some)
        assert {row for some in taken for row in some} == free, "each free row is still taken, once"
    assert len(begins) > 3, "in other stripes"
    put.release()


class CountsLocks(Quick):
    """How often rows are locked; `tells` of the locks of others."""

    def __init__(self, tells: bool = True) -> None:
        self.tells, self.calls = tells, 0

    def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
        self.calls += 1
        return super().lock_range(file, at, size_bytes)

    def locked_range(self, file: int, at: int, size_bytes: int) -> tuple[int, int] | None:
        if not self.tells:
            raise trouble(errno.ENOSYS)
        return super().locked_range(file, at, size_bytes)


@pytest.mark.parametrize(("tells", "most"), [(True, 4), (False, 60)])
def test_rows_beside_those_of_another_process_are_locked_with_few_calls(quick, tells, most):
    disk = CountsLocks(tells)
    one, theirs, mine = quick(disk, 8 * MIB), pages("full", *range(10, 30)), pages("full", *range(40, 70))
    assert all(store(one, pages("full", 1)))
    other = quick(capacity=8 * MIB)
    other.exists(["x"])
    inspect_files.prefer(other, range(20, 40))
    put = filling(other, theirs)
    inspect_files.prefer(one, range(15, 45))
    disk.calls = 0
    assert inspect_files.reservable(one, 30) == [*range(15, 20), *range(40, 45)]
    assert disk.calls <= most
    assert all(store(one, mine))
    put.write()
    put.commit()
    assert intact(one, theirs + mine) == intact(other, theirs + mine) == {*theirs, *mine}


@pytest.mark.parametrize("full", [False, True], ids=["empty", "one row of some stripes is free"])
def test_a_process_fills_a_stripe_that_no_other_one_fills(quick, full):
    one = quick(capacity=136 * MIB // 16)
    assert all(store(one, pages("full", 1)))
    slab = inspect_files.slab(one)
    sizes = [last - first for first, last in map(slab.rows_of, range(STRIPES))]
    small = sizes.index(min(sizes), 5)
    assert min(sizes) < max(sizes)
    last_rows = [slab.rows_of(stripe)[1] - 1 for stripe in range(STRIPES)]
    if full:
        slab.state[:] = STORED
        slab.state[last_rows[small - 1 : small + 2]] = FREE
    other = quick(capacity=136 * MIB // 16)
    other.exists(["x"])
    for stripe in (small - 1, small + 1) if full else {*range(STRIPES)} - {small}:
        assert inspect_files.slab(other).lock(last_rows[stripe], 1)
    for _ in range(20):
        slab.move_on()
        assert slab.stripe(np.array(slab.take_free(1))).tolist() == [small]
    slab.state[:] = FREE


@pytest.mark.parametrize("answer", [(1 << 40, 4096), (0, 4096), (1 << 20, -4096), (0, 0), (0, 1 << 40)])
def test_no_row_is_locked_that_was_not_asked_for_whatever_a_file_system_says_of_locks(quick, answer):
    class Odd(CountsLocks):
        def locked_range(self, file: int, at: int, size_bytes: int) -> tuple[int, int] | None:
            return answer

    one, some = quick(Odd(), 8 * MIB), pages("full", *range(10, 40))
    assert all(store(one, pages("full", 1)))
    other = quick(capacity=8 * MIB)
    other.exists(["x"])
    assert inspect_files.slab(other).lock(30, 1)
    inspect_files.prefer(one, range(25, 40))
    put = filling(one, some[:15])
    assert 30 not in {place.row for place in put.places}
    put.release()
    assert inspect_files.seized(one) == 0 and all(store(one, some))


def test_the_bytes_of_a_call_are_divided_among_all_threads(tmp_path):
    memory = memoryview(mmap.mmap(-1, 16 * MIB))

    def lengths(count: int, size_bytes: int, threads: int) -> list[int]:
        slab: Any = SimpleNamespace(number=0, shape=Shape(size_bytes, 64))
        pieces = [RowSpan(i, slab, i, memory[i * size_bytes : (i + 1) * size_bytes]) for i in range(count)]
        return [len(run) for run in runs(pieces, threads)]

    assert lengths(16, MIB, 4) == [4] * 4
    assert lengths(16, MIB, 1) == [4] * 4, "a run has at most 4 MiB"
    assert lengths(16, MIB // 4, 4) == [4] * 4
    assert lengths(4, MIB // 4, 4) == [4], "and no less than 1 MiB"


def test_rows_of_stripes_with_unchanged_ones_between_them_are_all_read(quick):
    one, other = (quick(capacity=64 * MIB) for _ in "12")
    first, *some = pages("full", 0, 1, 2)
    assert all(store(one, [first])) and intact(other, [first])
    begins = [inspect_files.slab(one).rows_of(stripe)[0] for stripe in (6, 9)]
    inspect_files.prefer(one, [begin + 3 for begin in begins])
    assert all(store(one, some))
    assert intact(other, some) == {*some}


@pytest.mark.parametrize("newer", [2, 3], ids=["the-newer-one-first", "the-older-one-first"])
def test_of_two_objects_of_one_name_all_processes_keep_the_newer_however_they_read_of_them(quick, folder, newer):
    one, other, third = stores = [quick(capacity=64 * MIB) for _ in "123"]
    filler, page = pages("full", 50, 1)
    for storage in stores:
        assert all(store(storage, [filler])) and intact(storage, [filler])
    puts = []
    for storage, stripe in zip((one, other), (5 - newer, newer), strict=True):
        inspect_files.prefer(storage, [inspect_files.slab(storage).rows_of(stripe)[0] + 5])
        puts.append(filling(storage, [page]))
        puts[-1].write()
    with inspect_files.deaf(other):
        puts[0].commit()
        puts[1].commit()  # it had looked before the first one told
    kept = {inspect_files.place(it, page.name).row for it in (third, one, other) if intact(it, [page])}
    assert len(kept) == 1
    for number, storage in enumerate((third, one, other)):
        assert all(store(storage, pages("full", 60 + number)))  # which frees the row of the other
    assert all(intact(storage, [page]) for storage in stores)
    for storage in stores:
        storage.close()
    assert intact_anew(folder, [page], capacity=64 * MIB) == {page}
