"""Maintenance of a file store, beside the processes that use it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import inspect_files
import pytest
from file_disks import MIB, file_name, trouble

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.testing.suite import LABEL, get, put, there


@pytest.fixture
def storage(folder: Path) -> Iterator[FileStorage]:
    storage = FileStorage(folder, MIB, LABEL, "model A")
    yield storage
    storage.close()


def test_a_folder_that_is_no_store_has_no_models_to_tell_of(folder):
    with pytest.raises(StorageError, match="no such folder"):
        FolderUpkeep(folder).contents()
    folder.mkdir()
    with pytest.raises(StorageError, match="there is no kvarve storage in it"):
        FolderUpkeep(folder).contents()
    assert [*folder.iterdir()] == []
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(StorageError, match="not a kvarve storage folder"):
        FolderUpkeep(folder).contents()


def test_what_lies_in_a_store_is_listed_by_its_last_use(storage, folder):
    put(storage, **{"aaaa-1": b"first", "bbbb-1": bytes(5000), "loner": b""})
    get(storage, "bbbb-1")
    (model,) = FolderUpkeep(folder).contents().models
    with FolderUpkeep(folder).inspect(model) as inspection:
        listed = inspection.objects()
    assert [(each.name, each.group, each.slot_bytes, each.size_bytes, each.uses) for each in listed] == [
        ("bbbb-1", "bbbb", 8192, 5000, 1),
        ("aaaa-1", "aaaa", 4096, 5, 0),
        ("loner", "", 4096, 0, 0),
    ]
    assert all(0 <= each.used_s_ago <= each.stored_s_ago < 60 for each in listed)


def test_verify_reads_everything_and_tells_what_is_damaged_or_cannot_be_read(storage, folder):
    put(storage, **{f"page-{i}": bytes([i]) * 5000 for i in range(40)})
    place, bad = (inspect_files.place(storage, name) for name in ("page-7", "page-9"))
    with place.path.open("r+b") as file:
        file.seek(place.at + 100)
        file.write(b"\xff")

    class OneBadPlace(Disk):
        def read(self, file, into, at):
            hit = at <= bad.at < at + sum(view.nbytes for view in into)
            if hit and file_name(file) == bad.path.name:
                raise trouble()
            return super().read(file, into, at)

    heard, (model,) = [], FolderUpkeep(folder).contents().models
    with FolderUpkeep(folder, disk=OneBadPlace()).inspect(model) as inspection:
        read, damaged = inspection.verify(
            lambda name, data: data == bytes([int(name[5:])]) * 5000, lambda *far: heard.append(far)
        )
    assert (read, sorted(damaged)) == (39, ["page-7", "page-9"])
    assert heard == [(0, 40), (16, 40), (32, 40), (40, 40)]
    assert storage.exists(["page-6", "page-7"]) == [True, True]


def test_a_model_that_was_removed_meanwhile_is_no_model_without_objects(folder):
    FileStorage(folder, MIB, LABEL, "model A").close()
    upkeep = FolderUpkeep(folder)
    (model,) = upkeep.contents().models
    assert upkeep.drop_model(model, "a test")
    for removed in (folder / "models", folder):
        with pytest.raises(StorageError, match="gone"), upkeep.inspect(model):
            pass
        shutil.rmtree(removed)


def test_gc_frees_damaged_slabs_and_nothing_else(folder, storage):
    put(storage, a=b"1", b=bytes(5000))
    damaged = inspect_files.place(storage, "a")
    storage.close()
    damaged.table.write_bytes(bytes(damaged.table.stat().st_size))
    (model,) = FolderUpkeep(folder).contents().models
    with FolderUpkeep(folder).opened(model) as beside:
        assert damaged.path.exists() and beside.usage().lost == 1
        assert beside.collect() == {"expired": 0, "damaged_bytes": damaged.shape.bytes}
        assert not damaged.path.exists() and not damaged.table.exists()
        assert there(beside, "a", "b") == "b"
        assert beside.collect() == {"expired": 0, "damaged_bytes": 0}
