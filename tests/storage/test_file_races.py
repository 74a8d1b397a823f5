"""Two things go wrong at once, or somebody acts between two steps of a put: what was confirmed stays."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from file_disks import MIB, Failing
from test_crashes import Page, Quick, intact, opened, pages, store

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.books import Call
from kvarve.testing.faulty_disk import Died, FaultyDisk
from kvarve.testing.suite import LABEL


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
            if self.armed and Path(f"/proc/self/fd/{file}").readlink().name == "changes":
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
