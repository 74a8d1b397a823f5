"""Files that a store has open are removed: it never answers True for lost objects, and continues if it can."""

import errno
import itertools
import os
import queue
import shutil
from pathlib import Path

import inspect_files
import pytest
from file_disks import MIB, Clockwork, Rigged, model_of, total
from file_pages import intact, intact_anew, names, pages, store

from kvarve.errors import StorageError
from kvarve.storage._breaker import Breaker
from kvarve.testing.suite import LABEL, OTHER_LABEL, put

SOME = pages("full", *range(12)) + pages("window", 1, 2)
CALLS = {
    "exists": lambda storage: storage.exists(names(SOME)),
    "get": lambda storage: intact(storage, SOME),
    "put what is there": lambda storage: store(storage, SOME[:2]),
    "put": lambda storage: store(storage, pages("full", 900)),
    "delete": lambda storage: storage.delete(names(SOME[:1])),
    "usage": lambda storage: storage.usage(),
}


@pytest.fixture
def filled(quick):
    storage = quick()
    assert all(store(storage, SOME))
    return storage


def open_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open, also those without a name."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(each.readlink()))
        except OSError:
            continue
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize("how", ["removed", "moved away", "a file stands there"])
def test_of_a_folder_that_is_gone_nothing_is_said_to_be_there(filled, folder, tmp_path, how):
    """It went on answering True, from files that no process could open again."""
    folder.rename(tmp_path / "moved") if how == "moved away" else shutil.rmtree(folder)
    if how == "a file stands there":
        folder.write_text("precious")
    for call in (*CALLS.values(), *CALLS.values()):
        with pytest.raises(StorageError, match=r"moved away while it was open, and cannot be opened anew"):
            call(filled)
    assert folder.exists() == (how == "a file stands there"), "no folder is made: a disk may be unmounted"
    filled.close()
    assert open_files(tmp_path) == []


WHATS = ["all that lies in it", "its models", "its model"] * 2


@pytest.mark.parametrize(("call", "what"), [*zip(CALLS, WHATS, strict=True)])
def test_a_folder_that_was_emptied_is_used_again(filled, quick, folder, call, what):
    shutil.rmtree({"its models": folder / "models", "its model": model_of(folder)}.get(what, folder))
    folder.mkdir(exist_ok=True)
    CALLS[call](filled)
    assert sum(filled.exists(names(SOME))) == (2 if call == "put what is there" else 0)
    assert all(store(filled, SOME))
    assert intact(filled, SOME) == set(SOME)
    assert not any("deleted" in path for path in open_files(folder)), "removed files are closed"
    beside = quick()
    assert intact(beside, SOME) == set(SOME), "other processes find it"
    beside.close()
    filled.close()
    assert intact_anew(folder, SOME) == set(SOME), "and it is there after a restart"


def test_behind_a_breaker_a_store_that_is_gone_is_down_and_up_again_when_it_has_a_place(filled, folder, caplog):
    turns, probes = queue.Queue(), itertools.count(1)

    def pause(*_: object) -> None:
        if next(probes) == 4:
            folder.mkdir()

    storage = Breaker(filled, deadline_s=30.0, changed=lambda: turns.put(storage.up), pause=pause)
    assert all(storage.exists(names(SOME)))
    shutil.rmtree(folder)
    for _ in range(3):
        with pytest.raises(StorageError):
            storage.exists(names(SOME))
    assert [turns.get(timeout=60) for _ in range(2)] == [False, True] and next(probes) > 4
    assert caplog.text.count("its contents were removed") == 1, "and not by each probe"
    assert storage.exists(names(SOME)) == [False] * len(SOME)
    assert storage.put([SOME[0].name], [SOME[0].record()]) == [True]
    assert storage.exists(names(SOME[:1])) == [True]
    storage.close()


def test_a_folder_that_comes_back_is_as_it_was(filled, folder, tmp_path):
    folder.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="moved away"):
        filled.exists(names(SOME))
    (tmp_path / "moved").rename(folder)
    assert intact(filled, SOME) == set(SOME)
    assert store(filled, pages("state", 1)) == [True]


@pytest.mark.parametrize("what", ["a link", "another store", "foreign files"])
def test_what_stands_in_the_place_of_a_folder_is_looked_at_as_if_it_were_opened(filled, quick, folder, tmp_path, what):
    shutil.rmtree(folder)
    (tmp_path / "elsewhere").mkdir()
    if what == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    elif what == "another store":
        other = quick(capacity=2 * MIB, label=OTHER_LABEL)
    else:
        folder.mkdir()
        (folder / "thesis.tex").write_text("precious")
    said = {"a link": "is a link", "another store": "is open with a capacity of 2 MiB", "foreign files": "not empty"}
    with pytest.raises(StorageError, match=said[what]):
        store(filled, SOME)
    assert [*(tmp_path / "elsewhere").iterdir()] == []
    if what == "another store":
        other.close()
        assert all(store(filled, SOME))


@pytest.mark.parametrize(
    ("which", "how"),
    [("both", "removed"), ("slots", "moved away"), ("table", "removed"), ("slots", "another name is kept")],
)
def test_slabs_removed_from_outside_are_lost_alone_and_nothing_is_confirmed_in_them(
    filled, folder, tmp_path, which, how, caplog
):
    """A file that was renamed, or (on NFS) is renamed when it is removed while open, counts as removed."""
    lies = inspect_files.places(filled)
    slab = lies[SOME[0].name]
    held = [page for page in SOME if lies[page.name].slab == slab.slab]
    for path in [slab.path] * (which != "table") + [slab.table] * (which != "slots"):
        if how == "another name is kept":
            (tmp_path / path.name).hardlink_to(path)
        path.rename(tmp_path / path.name) if how == "moved away" else path.unlink()
    with pytest.raises(StorageError, match="was removed or cut from outside"):
        store(filled, held[:1])
    assert f"{slab.path}: its files were removed or cut from outside" in caplog.text
    assert filled.exists(names(held)) == [False] * len(held)
    assert intact(filled, SOME) == set(SOME) - set(held)
    assert all(store(filled, held))
    filled.close()
    assert intact_anew(folder, SOME) == set(SOME)
    assert total(folder) <= MIB


def test_a_slab_whose_table_was_cut_is_lost_and_its_space_is_used_again(quick, folder):
    disk, some = Clockwork(), pages("full", *range(230))
    storage, beside = quick(disk), quick(disk)
    assert all(store(storage, some))
    for table in folder.rglob("*.table"):
        os.truncate(table, 256)
    disk.elapse(2)
    assert all(store(storage, some))
    assert intact(storage, some) == intact(beside, some) == set(some)
    assert inspect_files.rows(storage)["broken"] == 0
    assert total(folder) <= MIB
    storage.close()
    beside.close()
    assert intact_anew(folder, some) == set(some)


def test_a_reader_notices_that_a_slab_was_removed_and_other_processes_hear_of_it(filled, quick):
    beside, lies = quick(), inspect_files.places(filled)
    held = {page for page in SOME if lies[page.name].slab == lies[SOME[0].name].slab}
    assert intact(beside, SOME) == set(SOME)
    lies[SOME[0].name].path.unlink()
    assert intact(filled, SOME) == set(SOME) - held
    assert beside.exists(names(held)) == [False] * len(held)
    assert (filled.usage().damaged, filled.usage().lost) == (0, len(held))


@pytest.mark.parametrize(
    ("call", "name", "what"),
    [("write", "slab-000000", "folder"), ("sync", "slab-000000", "slab"), ("sync", "slab-000000.table", "folder")],
)
def test_a_put_during_which_all_is_removed_is_not_confirmed(quick, folder, call, name, what):
    disk, new = Rigged(), pages("full", 100)
    storage = quick(disk)
    assert all(store(storage, SOME))
    slab = model_of(folder) / "slab-000000"
    disk.once(lambda: shutil.rmtree(folder) if what == "folder" else slab.unlink(), call, name)
    with pytest.raises(StorageError, match="removed"):
        store(storage, new)
    folder.mkdir(exist_ok=True)
    assert storage.exists(names(new)) == [False]
    assert store(storage, new) == [True]
    assert intact(storage, new) == set(new)


def test_a_slab_that_another_process_evicts_is_no_loss(filled, quick, caplog):
    disk, other = Rigged(), quick()
    reader = quick(disk)
    assert intact(other, SOME) == intact(reader, SOME) == set(SOME)
    disk.once(lambda: inspect_files.remove(other, 0), "read", "slab-000000")
    assert not intact(reader, SOME[:1])
    assert "from outside" not in caplog.text
    assert (reader.usage().damaged, reader.usage().lost) == (0, 0)


# --- files that a closed store keeps


def test_a_put_whose_number_goes_meanwhile_is_not_confirmed_and_writes_over_nothing(quick, folder):
    """Another process takes the number, so it seems to be alone."""
    disk, beside = Rigged(), []
    storage = quick(disk)
    assert all(store(storage, SOME))
    new, others = pages("full", 100), pages("full", 200)

    def goes() -> None:
        (path,) = folder.rglob("process-0")
        path.unlink()
        with pytest.raises(StorageError, match="while a put was under way"):
            storage.exists(["a"])
        beside.append(quick())

    disk.once(goes, "write", "slab-000000")
    with pytest.raises(StorageError, match="was removed or moved away"):
        store(storage, new)
    assert all(store(beside[0], others))
    assert all(store(storage, new))
    for each in (storage, *beside):
        assert intact(each, SOME + new + others) == {*SOME, *new, *others}


def test_a_store_that_is_closed_has_no_file_open(opened, folder):
    """The list of victims kept a slab open for as long as the closed store was referenced."""
    storage = opened(quota_bytes=MIB // 8)
    for i in range(120):
        assert put(storage, **{f"{i % 3:016x}-{i}": bytes(4096)}) == [True]
    assert storage.usage().evicted > 10
    assert len(open_files(folder)) > 10
    storage.close()
    assert open_files(folder) == []
    with pytest.raises(StorageError, match="closed"):
        put(storage, a=b"1")
    assert open_files(folder) == []


@pytest.mark.parametrize("fails", ["the folder is another store's", "a lock", "a file"])
def test_a_store_that_could_not_be_opened_has_no_file_open(filled, quick, folder, fails):
    filled.close()

    disk = Rigged()
    if fails == "a lock":
        disk.refuse(errno.EIO, "lock", name="process-0")
    elif fails == "a file":
        disk.refuse(errno.EIO, "open", name="clock")
    label = LABEL[:8] + b"another" if fails == "the folder is another store's" else LABEL
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(StorageError):
            quick(disk, label=label)
    assert len([*Path("/proc/self/fd").iterdir()]) == before and open_files(folder) == []


def test_never_two_processes_make_slabs_though_the_file_of_their_mutex_was_removed(filled, quick, folder, monkeypatch):
    (folder / "kvarve.lock").unlink()
    beside, new = quick(), pages("state", 900)
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.01)
    with inspect_files.mutex(filled), pytest.raises(StorageError, match="another process has held its lock"):
        store(beside, new)
    assert all(store(beside, new))
    assert intact(filled, SOME + new) == {*SOME, *new}


@pytest.mark.parametrize("others", [0, 2])
def test_a_process_whose_number_was_removed_takes_another_one(filled, quick, folder, others):
    (path,) = folder.rglob("process-0")
    path.unlink()
    stores, new = [*(quick() for _ in range(others)), filled], pages("full", 900)
    assert all(store(filled, new))
    for each in stores:
        assert intact(each, SOME + new) == {*SOME, *new}
    assert len({inspect_files.process(each) for each in stores}) == len(stores)
    assert [inspect_files.is_alone(each) for each in stores] == [not others] * len(stores)
    for each in stores:
        each.close()
    assert open_files(folder) == []
