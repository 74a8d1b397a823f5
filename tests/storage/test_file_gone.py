"""Files that a store has open are removed: it never answers True for lost objects, and continues if it can."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from file_disks import MIB, Clockwork, Rigged, WithoutSync, changing, file_name, total
from test_crashes import Quick, intact, names, pages, store

from kvarve.errors import StorageError
from kvarve.storage import Breaker, FileStorage
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

SOME = pages("full", *range(12)) + pages("window", 1, 2)


def opened(folder: Path, disk: WithoutSync | Quick | None = None, **more) -> FileStorage:
    return FileStorage(folder, MIB, LABEL, "model A", **({"threads": 1, "disk": disk or Quick()} | more))


def filled(folder: Path) -> FileStorage:
    storage = opened(folder)
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


def calls(storage: FileStorage) -> dict[str, Callable[[], object]]:
    return {
        "exists": lambda: storage.exists(names(SOME)),
        "get": lambda: intact(storage, SOME),
        "put what is there": lambda: store(storage, SOME[:2]),
        "put": lambda: store(storage, pages("full", 900)),
        "delete": lambda: storage.delete(names(SOME[:1])),
        "usage": storage.usage,
    }


@pytest.mark.parametrize("how", ["removed", "moved away", "its parent is moved", "a file stands there"])
@pytest.mark.parametrize("call", ["exists", "get", "put what is there", "put", "delete", "usage"])
def test_of_a_folder_that_is_gone_nothing_is_said_to_be_there(tmp_path, how, call):
    """It went on answering True, from files that no process could open again."""
    folder = tmp_path / "above" / "store"
    storage = filled(folder)
    if how == "moved away":
        folder.rename(tmp_path / "moved")
    elif how == "its parent is moved":
        folder.parent.rename(tmp_path / "moved")
    else:
        shutil.rmtree(folder)
    if how == "a file stands there":
        folder.write_text("precious")
    for _ in range(2):
        with pytest.raises(StorageError, match=r"moved away while it was open, and cannot be opened anew"):
            calls(storage)[call]()
    assert folder.exists() == (how == "a file stands there"), "no folder is made: a disk may be unmounted"
    storage.close()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("call", ["exists", "get", "put what is there", "put", "delete", "usage"])
@pytest.mark.parametrize("what", ["all that lies in it", "its models", "its model", "the folder, and it is made anew"])
def test_a_folder_that_was_emptied_is_used_again(tmp_path, call, what):
    folder = tmp_path / "store"
    storage = filled(folder)
    gone = {"its models": folder / "models", "its model": storage._folder.model.path}.get(what, folder)
    shutil.rmtree(gone)
    if what == "all that lies in it" or gone is folder:
        folder.mkdir()
    calls(storage)[call]()
    assert sum(storage.exists(names(SOME))) == (2 if call == "put what is there" else 0)
    assert all(store(storage, SOME))
    assert intact(storage, SOME) == set(SOME)
    assert not any("deleted" in path for path in open_files(folder)), "removed files are closed"
    beside = opened(folder)
    assert intact(beside, SOME) == set(SOME), "other processes find it"
    beside.close()
    storage.close()
    storage = opened(folder)
    assert intact(storage, SOME) == set(SOME), "and it is there after a restart"
    storage.close()


def test_a_folder_that_comes_back_is_as_it_was(tmp_path):
    folder = tmp_path / "store"
    storage = filled(folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="moved away"):
        storage.exists(names(SOME))
    (tmp_path / "moved").rename(folder)
    assert intact(storage, SOME) == set(SOME)
    assert store(storage, pages("state", 1)) == [True]
    storage.close()


@pytest.mark.parametrize("what", ["a link", "another store", "foreign files"])
def test_what_stands_in_the_place_of_a_folder_is_looked_at_as_if_it_were_opened(tmp_path, what):
    folder = tmp_path / "store"
    storage = filled(folder)
    shutil.rmtree(folder)
    if what == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif what == "another store":
        other = FileStorage(folder, 2 * MIB, OTHER_LABEL, "model B", disk=Quick())
        put(other, b=b"1")
    else:
        folder.mkdir()
        (folder / "thesis.tex").write_text("precious")
    said = {"a link": "is a link", "another store": "is open with a capacity of 2 MiB", "foreign files": "not empty"}
    with pytest.raises(StorageError, match=said[what]):
        store(storage, SOME)
    if what == "another store":
        other.close()
        assert all(store(storage, SOME))
        other = FileStorage(folder, MIB, OTHER_LABEL, "model B", disk=Quick())
        assert there(other, "b") == "b"
        other.close()
    elif what == "a link":
        assert [*(tmp_path / "elsewhere").iterdir()] == []
    storage.close()


@pytest.mark.parametrize("how", ["removed", "moved away", "another name is kept"])
@pytest.mark.parametrize("which", ["both", "slots", "table"])
def test_slabs_removed_from_outside_are_lost_alone_and_nothing_is_confirmed_in_them(tmp_path, which, how, caplog):
    """A file that was renamed, or (on NFS) is renamed when it is removed while open, counts as removed."""
    folder = tmp_path / "store"
    storage = filled(folder)
    slab = storage._index.place(SOME[0].name)[0]
    held = [page for page in SOME if storage._index.place(page.name)[0] is slab]
    for path in (slab.path, slab.path.with_name(slab.path.name + ".table")):
        if which == "both" or path.name.endswith(".table") == (which == "table"):
            if how == "another name is kept":
                (tmp_path / path.name).hardlink_to(path)
            path.rename(tmp_path / path.name) if how == "moved away" else path.unlink()
    with pytest.raises(StorageError, match="was removed or cut from outside"):
        store(storage, held[:1])
    assert f"{slab.path}: its files were removed or cut from outside" in caplog.text
    assert storage.exists(names(held)) == [False] * len(held)
    assert intact(storage, SOME) == set(SOME) - set(held)
    assert all(store(storage, held))
    storage.close()
    storage = opened(folder)
    assert intact(storage, SOME) == set(SOME)
    assert total(folder) <= MIB
    storage.close()


def test_a_slab_whose_table_was_cut_is_lost_and_its_space_is_used_again(tmp_path):
    folder, disk, some = tmp_path / "store", Clockwork(), pages("full", *range(230))
    storage, beside = opened(folder, disk), opened(folder, disk)
    assert all(store(storage, some))
    slabs = [*storage._index.slabs.values()]
    for slab in slabs:
        os.truncate(f"{slab.path}.table", 256)
    disk.elapse(2)
    assert all(store(storage, some))
    assert intact(storage, some) == intact(beside, some) == set(some)
    assert storage._index.states()["broken"] == 0
    assert total(folder) <= MIB
    storage.close()
    beside.close()
    storage = opened(folder)
    assert intact(storage, some) == set(some)
    storage.close()


def test_a_reader_notices_that_a_slab_was_removed_and_other_processes_hear_of_it(tmp_path):
    folder = tmp_path / "store"
    storage, beside = filled(folder), opened(folder)
    slab = storage._index.place(SOME[0].name)[0]
    held = {page for page in SOME if storage._index.place(page.name)[0] is slab}
    assert intact(beside, SOME) == set(SOME)
    slab.path.unlink()
    assert intact(storage, SOME) == set(SOME) - held
    assert beside.exists(names(held)) == [False] * len(held)
    assert (storage.usage().damaged, storage.usage().lost) == (0, len(held))
    storage.close()
    beside.close()


@pytest.mark.parametrize("when", [("write", "slab-000000"), ("sync", "slab-000000"), ("sync", "slab-000000.table")])
@pytest.mark.parametrize("what", ["the folder", "the slab"])
def test_a_put_during_which_all_is_removed_is_not_confirmed(tmp_path, when, what):
    folder, disk = tmp_path / "store", Rigged()
    storage = opened(folder, disk)
    assert all(store(storage, SOME))
    new = pages("full", 100)

    def happens(call: str, name: str, at: int) -> None:
        if (call, name) == when:
            disk.happens = lambda call, name, at: None
            if what == "the folder":
                shutil.rmtree(folder)
            else:
                (storage._folder.model.path / "slab-000000").unlink()

    disk.happens = happens
    with pytest.raises(StorageError, match="removed"):
        store(storage, new)
    folder.mkdir(exist_ok=True)
    assert storage.exists(names(new)) == [False]
    assert store(storage, new) == [True]
    assert intact(storage, new) == set(new)
    storage.close()


def test_a_slab_that_another_process_evicts_is_no_loss(tmp_path, caplog):
    folder = tmp_path / "store"
    storage, other = filled(folder), opened(folder)
    intact(other, SOME)

    class Meanwhile(Quick):
        armed = False

        def read(self, file, into, at):
            if self.armed and file_name(file) == "slab-000000":
                self.armed = False
                with other._changing():
                    other._allocator.remove(other._index.slabs[0], "a test")
            return super().read(file, into, at)

    disk = Meanwhile()
    reader = opened(folder, disk)
    intact(reader, SOME)
    disk.armed = True
    assert not intact(reader, SOME[:1])
    assert "from outside" not in caplog.text
    assert (reader.usage().damaged, reader.usage().lost) == (0, 0)
    for each in (storage, other, reader):
        each.close()


def test_behind_a_breaker_a_store_that_is_gone_is_down_and_up_again_when_it_has_a_place(tmp_path):
    folder, asked = tmp_path / "store", []
    inner = filled(folder)

    def pause(event, seconds):
        asked.append(seconds)
        if len(asked) == 4:
            folder.mkdir()

    storage = Breaker(inner, deadline_s=30.0, pause=pause)
    assert all(storage.exists(names(SOME)))
    shutil.rmtree(folder)
    for _ in range(3):
        with pytest.raises(StorageError):
            storage.exists(names(SOME))
    prober = storage._prober
    assert prober is not None
    prober.join(60)
    assert storage.up and len(asked) >= 4
    assert storage.exists(names(SOME)) == [False] * len(SOME)
    assert storage.put([SOME[0].name], [SOME[0].record()]) == [True]
    assert storage.exists(names(SOME[:1])) == [True]
    storage.close()


def test_rows_that_were_being_filled_when_the_folder_was_removed_stay_out_of_the_new_one(tmp_path):
    folder, disk = tmp_path / "store", Rigged()
    storage = opened(folder, disk)
    assert all(store(storage, SOME))

    def happens(call: str, name: str, at: int) -> None:
        if call == "write" and name == "slab-000000":
            disk.happens = lambda call, name, at: None
            shutil.rmtree(folder)
            folder.mkdir()
            storage.exists(["x"])  # another thread notices first

    disk.happens = happens
    stored = [False]
    with suppress(StorageError):
        stored = store(storage, pages("full", 100))
    assert storage.exists(names(pages("full", 100))) == stored, "in the new one, if it says so"
    assert intact(storage, pages("full", 100)) == (set(pages("full", 100)) if stored == [True] else set())
    assert storage._index.held == {}
    assert all(store(storage, SOME))
    assert intact(storage, SOME) == set(SOME)
    assert storage._index.states()["reserved"] == 0
    storage.close()
    assert open_files(folder) == []


# --- files that a closed store keeps


def test_never_two_processes_make_slabs_though_the_file_of_their_mutex_was_removed(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    storage = filled(folder)
    (folder / "kvarve.lock").unlink()
    beside = opened(folder)
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.01)
    with storage._folder.mutex(), pytest.raises(StorageError, match="another process has held its lock"):
        store(beside, pages("state", 900))
    assert all(store(beside, pages("state", 900)))
    assert intact(storage, [*SOME, *pages("state", 900)]) == {*SOME, *pages("state", 900)}
    storage.close()
    beside.close()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_process_whose_number_was_removed_takes_another_one(tmp_path, others):
    folder = tmp_path / "store"
    storage = filled(folder)
    (path,) = folder.rglob("process-0")
    path.unlink()
    beside = [opened(folder) for _ in range(others)]
    assert all(store(storage, pages("full", 900)))
    stores = [*beside, storage]
    for each in stores:
        assert intact(each, [*SOME, *pages("full", 900)]) == {*SOME, *pages("full", 900)}
    assert len({each._folder.number for each in stores}) == len(stores)
    for each in stores:
        with changing(each) as index:
            assert index.folder.alone() is (len(stores) == 1)
    for each in stores:
        each.close()
    assert open_files(folder) == []


def test_a_put_whose_number_goes_meanwhile_is_not_confirmed_and_writes_over_nothing(tmp_path):
    """Another process takes the number, so it seems to be alone."""
    folder, disk = tmp_path / "store", Rigged()
    storage = opened(folder, disk)
    assert all(store(storage, SOME))
    new, others = pages("full", 100), pages("full", 200)
    beside: list[FileStorage] = []

    def happens(call: str, name: str, at: int) -> None:
        if (call, name) == ("write", "slab-000000"):
            disk.happens = lambda call, name, at: None
            (path,) = folder.rglob("process-0")
            path.unlink()
            with pytest.raises(StorageError, match="while a put was under way"):
                storage.exists(["a"])
            beside.append(opened(folder))

    disk.happens = happens
    with pytest.raises(StorageError, match="was removed or moved away"):
        store(storage, new)
    assert all(store(beside[0], others))
    assert all(store(storage, new))
    for each in (storage, *beside):
        assert intact(each, SOME + new + others) == {*SOME, *new, *others}
        each.close()


def test_a_store_that_is_closed_has_no_file_open(tmp_path):
    """The list of victims kept a slab open for as long as the closed store was referenced."""
    folder = tmp_path / "store"
    storage = FileStorage(folder, MIB, LABEL, "model A", disk=WithoutSync(), quota_bytes=MIB // 2)
    for i in range(400):
        assert put(storage, **{f"{i % 3:016x}-{i}": bytes(4096)}) == [True]
        get(storage, f"{i % 3:016x}-{i}")
    assert storage.usage().evicted > 100
    assert len(open_files(folder)) > 10
    storage.close()
    assert open_files(folder) == []
    with pytest.raises(StorageError, match="closed"):
        put(storage, a=b"1")
    assert open_files(folder) == []


@pytest.mark.parametrize("fails", ["the folder is another store's", "a lock", "a file"])
def test_a_store_that_could_not_be_opened_has_no_file_open(tmp_path, fails):
    folder = tmp_path / "store"
    filled(folder).close()

    class Failing(Quick):
        def lock(self, file, **how):
            if fails == "a lock" and file_name(file).startswith("process-"):
                raise OSError(5, "Input/output error")
            return super().lock(file, **how)

        def open(self, folder, name, **how):
            if fails == "a file" and name == "clock":
                raise OSError(5, "Input/output error")
            return super().open(folder, name, **how)

    label = LABEL[:8] + b"another" if fails == "the folder is another store's" else LABEL
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        with pytest.raises(StorageError):
            FileStorage(folder, MIB, label, "model A", disk=Failing())
    assert open_files(folder) == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
