"""Two faults at once, or another process between two steps of a put: confirmed objects stay."""

import threading

import inspect_files
import pytest
from file_disks import Calls, Rigged, model_of
from file_pages import filling, intact, intact_anew, names, pages, store

from kvarve.errors import StorageError
from tests.sim.faulty_disk import Died, Event, FaultyDisk


@pytest.mark.parametrize("order", [0, 1])
def test_of_two_objects_of_one_name_that_a_power_cut_leaves_the_confirmed_one_stays(quick, folder, tmp_path, order):
    """The other is an old entry; another put was about to fill its slot."""
    folder.mkdir()
    disk, some, new = FaultyDisk(folder), pages("full", *range(30)), pages("full", 777)
    storage = quick(disk)
    store(storage, some)
    lies = {page: inspect_files.place(storage, page.name) for page in some}
    first, second = order, 1 - order
    moved, other = (next(page for page in some if lies[page].slab == number) for number in (first, second))
    storage.delete([moved.name])
    put = filling(storage, new)
    assert put.places[0].slab == first
    put.write()
    storage.delete([other.name])
    assert store(storage, [moved]) == [True]
    assert inspect_files.place(storage, moved.name).slab == second
    name = lies[moved].path.name
    (slots,) = (event.file for event in disk.events if event.kind == "create" and event.path.endswith(name))
    disk.events.append(Event("sync", slots))
    disk.after(len(disk.events), tmp_path / "cut", "dropped")
    assert intact_anew(tmp_path / "cut", [moved]) == {moved}


def test_what_a_process_had_stored_before_it_died_is_not_taken_for_reserved(quick):
    page, disk = pages("full", 2), Rigged()
    lagging = quick()
    store(lagging, pages("full", 1))
    dying = quick(disk)
    put = filling(dying, page)
    put.write()
    lagging.exists(names(page))
    disk.fail(Died(), "write", "changes", skip=1)  # the table has been written
    with pytest.raises(Died):
        put.commit()
    later = quick()
    inspect_files.die(dying)
    assert store(later, page) == [True]
    inspect_files.retry(lagging)
    store(lagging, pages("full", 7))
    assert later.exists(names(page)) == [True]


def test_a_put_for_which_no_threads_are_to_be_had_gives_its_rows_back(quick, monkeypatch):
    storage, some = quick(threads=4), pages("full", *range(6)) + pages("window", *range(6))
    with monkeypatch.context() as patch:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(StorageError, match="starts no thread"):
            store(storage, some)
    assert inspect_files.rows(storage)["reserved"] == 0
    assert all(store(storage, some))


def test_an_open_store_whose_file_of_changes_was_removed_is_not_opened_again_and_loses_nothing(quick, folder):
    some = pages("full", 1)
    storage = quick()
    store(storage, some)
    (model_of(folder) / "changes").unlink()
    with pytest.raises(StorageError, match="end them first"):
        quick()
    assert intact(storage, some) == set(some)
    storage.close()
    assert intact_anew(folder, some) == set(some)


def test_a_write_that_ends_after_the_store_was_closed_overwrites_no_page(quick):
    disk, calls, goes_on, reached = Rigged(), Calls(), threading.Event(), threading.Event()
    storage = quick(disk)
    store(storage, pages("full", 1))
    disk.once(lambda: (reached.set(), goes_on.wait(60)), "write", "slab-000000")
    calls.start("late", lambda: store(storage, pages("full", 2)))
    assert reached.wait(60)
    storage.close()
    new = quick()
    assert store(new, pages("full", 3)) == [True]
    goes_on.set()
    assert "is closed" in str(calls.join()["late"])
    assert intact(new, pages("full", 1, 3)) == set(pages("full", 1, 3))
    inspect_files.retry(new)
    assert store(new, pages("full", 4)) == [True]
    assert inspect_files.rows(new)["reserved"] == 0, "and its row is free when the put has ended"
    assert inspect_files.is_alone(new)
