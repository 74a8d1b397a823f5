"""Damage by other programs or by the disk costs a file store the objects that it hits, and is reported."""

import errno
import os
from pathlib import Path
from typing import Any

import inspect_files
import pytest
from file_disks import MIB, Rigged, WithoutSync, file_name, total, trouble

from kvarve.errors import StorageError
from kvarve.storage.file._table import ENTRY_BYTES, Shape
from kvarve.storage.file.disk import Directory
from kvarve.testing.suite import get, put, there


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("models/*/slab-??????"))


def test_a_slab_cut_short_loses_what_was_cut_and_is_whole_again(opened, folder):
    storage = opened()
    names = [f"page-{i}" for i in range(12)]
    storage.put(names, [memoryview(bytes([i]) * 4096) for i in range(12)])
    (slab,) = slabs(folder)
    size = slab.stat().st_size
    os.truncate(slab, 4 * 4096)
    buffer = bytearray(4096)
    assert [storage.get([name], [memoryview(buffer)]) for name in names[3:5]] == [[4096], [None]]
    storage.close()
    storage = opened()
    assert slab.stat().st_size == size
    assert [get(storage, name) for name in names[:4]] == [bytes([i]) * 4096 for i in range(4)]
    assert put(storage, more=b"1") == [True]


@pytest.mark.parametrize("elsewhere", ["in another row", "in another slab"])
def test_an_entry_that_the_disk_has_written_elsewhere_is_no_entry(opened, folder, elsewhere):
    storage = opened()
    pages = {f"page-{i:02}": b"%d" % i for i in range(20)}
    assert all(put(storage, **pages))
    lies = inspect_files.places(storage)
    one = lies["page-01"]
    beside = (one.slab, one.row + 1) if "row" in elsewhere else (one.slab + 1, one.row)
    (other,) = (name for name, it in lies.items() if (it.slab, it.row) == beside)
    storage.close()
    strays = ("page-01", other)
    entries = [lies[name].table.read_bytes()[lies[name].entry_at :][:ENTRY_BYTES] for name in strays]
    for name, entry in zip(strays, reversed(entries), strict=True):
        with lies[name].table.open("r+b") as file:
            file.seek(lies[name].entry_at)
            file.write(entry)
    storage = opened()
    assert {name: get(storage, name) for name in pages} == pages | dict.fromkeys(strays)
    assert put(storage, **dict.fromkeys(strays, b"anew")) == [True, True]
    assert [get(storage, name) for name in strays] == [b"anew"] * 2


def test_a_disk_that_is_full_when_it_is_written_uses_the_places_it_has(opened):
    disk = Rigged()
    storage = opened(disk=disk)
    put(storage, a=b"1", b=b"2", c=b"3")
    disk.refuse(errno.ENOSPC, "write", at=range(Shape(4096, 14).slot_at(3), MIB))
    assert put(storage, d=b"4") == [True]
    assert get(storage, "d") == b"4"
    assert len(there(storage, *"abc").split()) == 2


class BadSector(WithoutSync):
    """A disk that cannot read some bytes of the first slab. It has direct I/O wherever the test runs."""

    bad = range(0)
    all_bad = False

    def open(self, folder: Directory, name: str, **how: bool) -> int:
        try:
            return super().open(folder, name, **how)
        except OSError as error:
            if not how.get("direct") or error.errno != errno.EINVAL:
                raise
            return super().open(folder, name)

    def read(self, file: int, into: Any, at: int) -> int:
        size = sum(view.nbytes for view in into)
        hit = at < self.bad.stop and at + size > self.bad.start and file_name(file) == "slab-000000"
        if self.all_bad or hit:
            raise trouble()
        return super().read(file, into, at)


@pytest.mark.parametrize("sector", [0, 4096 + 512], ids=["also that from which a lost disk is told", "another"])
def test_an_object_on_a_bad_sector_is_missing_alone_and_its_place_is_not_used_again(opened, sector, caplog):
    disk = BadSector()
    storage = opened(disk=disk, threads=1)
    names = list("abcde")
    storage.put(names, [memoryview(bytes([i]) * 4096) for i in range(5)])
    (lost,) = (name for name, place in inspect_files.places(storage).items() if place.at == sector // 4096 * 4096)
    disk.bad = range(sector, sector + 512)
    assert [name for name in names if get(storage, name) is None] == [lost]
    assert storage.usage().damaged == 1 and caplog.text.count("could not be read: it is lost") == 1
    for i in range(30):
        assert put(storage, **{f"more-{i}": b"1"}) == [True]
        assert get(storage, f"more-{i}") == b"1"
    storage.close()
    assert there(opened(disk=disk), lost) == ""


def test_a_disk_that_reads_nothing_at_all_is_trouble_and_not_a_miss(opened):
    disk = BadSector()
    storage = opened(disk=disk)
    put(storage, a=b"1", b=b"2")
    disk.all_bad = True
    with pytest.raises(StorageError, match=r"read 0 of 2 objects: .*Input/output error"):
        storage.get(["a", "b"], [memoryview(bytearray(1)) for _ in "ab"])
    with pytest.raises(StorageError):
        get(storage, "a")
    disk.all_bad = False
    assert there(storage, "a", "b") == "a b"
    assert get(storage, "a") == b"1"


def test_a_disk_that_takes_nothing_is_trouble_and_not_an_endless_loop(opened):
    class Deaf(WithoutSync):
        deaf = False

        def write(self, file: int, data: Any, at: int) -> int:
            return 0 if self.deaf else super().write(file, data, at)

    disk = Deaf()
    storage = opened(disk=disk)
    disk.deaf = True
    with pytest.raises(StorageError, match="takes no more bytes"):
        put(storage, a=b"1")


@pytest.mark.parametrize("when", ["while it is open", "before it is opened"])
def test_slots_without_a_table_give_up_their_room_and_are_no_loss(opened, folder, when):
    """A process died while it made a slab, or removed one."""
    storage = opened()
    put(storage, a=b"1")
    if when == "before it is opened":
        storage.close()
    left = slabs(folder)[0].with_name("slab-000007")
    left.write_bytes(bytes(MIB - total(folder) - 4096))
    storage = opened() if when == "before it is opened" else storage
    assert put(storage, large=bytes(9000)) == [True]
    assert not left.exists()
    assert there(storage, "a", "large") == "a large"
    assert storage.usage().lost == 0
