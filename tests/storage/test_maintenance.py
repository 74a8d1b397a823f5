"""Maintenance of a file store, beside the processes that use it."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file import maintenance
from kvarve.storage.file.disk import Disk
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

MIB = 1 << 20


@pytest.fixture
def storage(folder: Path) -> Iterator[FileStorage]:
    storage = FileStorage(folder, MIB, LABEL, "model A")
    yield storage
    storage.close()


def test_the_models_of_a_folder_are_listed_and_whether_they_are_open(storage, folder):
    put(storage, a=b"1")
    FileStorage(folder, MIB, OTHER_LABEL, "model B").close()
    found = {model.description: model for model in maintenance.models(folder)}
    assert {name: (model.label, model.in_use) for name, model in found.items()} == {
        "model A": (LABEL, True),
        "model B": (OTHER_LABEL, False),
    }
    assert found["model A"].file_bytes > 8192


def test_maintenance_refuses_a_foreign_folder(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(StorageError, match="not a kvarve storage folder"):
        maintenance.models(folder)


def test_what_lies_in_a_store_is_listed_by_its_last_use(storage, folder):
    put(storage, **{"aaaa-1": b"first", "bbbb-1": bytes(5000), "loner": b""})
    get(storage, "bbbb-1")
    (model,) = maintenance.models(folder)
    with maintenance.inspect(folder, model) as inspection:
        listed = inspection.objects()
    assert [(each.name, each.group, each.slot_bytes, each.size_bytes, each.uses) for each in listed] == [
        ("bbbb-1", "bbbb", 8192, 5000, 1),
        ("aaaa-1", "aaaa", 4096, 5, 0),
        ("loner", "", 4096, 0, 0),
    ]
    assert all(0 <= each.used_s_ago <= each.stored_s_ago < 60 for each in listed)


def test_verify_reads_everything_and_tells_what_is_damaged(storage, folder):
    put(storage, **{f"page-{i}": bytes([i]) * 5000 for i in range(40)})
    (slab, row), (model,) = storage._index.place("page-7"), maintenance.models(folder)
    with slab.path.open("r+b") as file:
        file.seek(slab.shape.slot_at(row) + 100)
        file.write(b"\xff")
    with maintenance.inspect(folder, model) as inspection:
        assert inspection.verify(lambda name, data: data == bytes([int(name[5:])]) * 5000) == (40, ["page-7"])
    assert storage.exists(["page-6", "page-7"]) == [True, True]


class OneBadPlace(Disk):
    """Cannot read one slot."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
        hit = at <= self.at < at + sum(view.nbytes for view in into)
        if hit and os.path.samestat(os.fstat(file), self.path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, into, at)


def test_verify_tells_what_cannot_be_read(storage, folder):
    put(storage, **{f"page-{i}": bytes([i]) * 5000 for i in range(40)})
    slab, row = storage._index.place("page-7")
    disk = OneBadPlace(slab.path, slab.shape.slot_at(row))
    heard = []
    (model,) = maintenance.models(folder)
    with maintenance.inspect(folder, model, disk) as inspection:
        assert inspection.verify(lambda name, data: True, lambda *far: heard.append(far)) == (39, ["page-7"])
    assert heard == [(0, 40), (16, 40), (32, 40), (40, 40)]


def test_maintenance_counts_as_no_use(storage, folder):
    put(storage, a=b"1", b=b"2")
    get(storage, "a")
    (model,) = maintenance.models(folder)
    for _ in range(3):
        with maintenance.opened(folder, model) as beside:
            get(beside, "b")
        with maintenance.inspect(folder, model) as inspection:
            assert inspection.verify(lambda name, data: True) == (2, [])
            assert [(each.name, each.uses) for each in inspection.objects()] == [("a", 1), ("b", 0)]


def test_a_folder_that_is_no_store_yet_has_no_models_to_tell_of(folder):
    with pytest.raises(StorageError, match="no such folder"):
        maintenance.models(folder)
    folder.mkdir()
    with pytest.raises(StorageError, match="there is no kvarve storage in it"):
        maintenance.models(folder)
    assert [*folder.iterdir()] == []


def test_gc_frees_damaged_slabs_and_nothing_else(folder, storage):
    put(storage, a=b"1", b=bytes(5000))
    damaged, _ = storage._index.place("a")
    storage.close()
    table = damaged.path.with_name(damaged.path.name + ".table")
    table.write_bytes(bytes(table.stat().st_size))
    (model,) = maintenance.models(folder)
    with maintenance.opened(folder, model) as beside:
        assert damaged.path.exists() and beside.usage().lost == 1
        assert beside.collect() == {"expired": 0, "damaged_bytes": damaged.shape.bytes}
        assert not damaged.path.exists() and not table.exists()
        assert there(beside, "a", "b") == "b"
        assert beside.collect() == {"expired": 0, "damaged_bytes": 0}


def test_objects_are_dropped_alone_and_a_model_only_while_no_process_uses_it(storage, folder):
    put(storage, **{"aaaa-1": b"1", "aaaa-2": b"2", "bbbb-1": b"3"})
    (model,) = maintenance.models(folder)
    with maintenance.opened(folder, model) as beside:
        assert beside.drop("aaaa") == 2
    assert there(storage, "aaaa-1", "aaaa-2", "bbbb-1") == "bbbb-1"
    assert not maintenance.drop_model(folder, model, "a test")
    assert there(storage, "bbbb-1") == "bbbb-1"
    storage.close()
    assert maintenance.drop_model(folder, model, "a test")
    assert maintenance.models(folder) == []
