"""Damage by other programs or by the disk costs a file store the objects that it hits, and is reported."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from file_disks import MIB, ONE, SMALL_FILES, Failing, WithoutSync, table_path, total

from kvarve.errors import StorageError
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.table import ENTRY_BYTES, Shape
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


@pytest.mark.parametrize("harm", ["no table", "no slots", "headers", "nothing", "half a table"])
def test_a_slab_that_is_gone_or_broken_is_lost_alone(opened, folder, harm):
    storage = opened()
    put(storage, small=b"1", large=bytes(9000))
    storage.close()
    slab = slabs(folder)[0]
    table = table_path(slab)
    if harm == "no table":
        table.unlink()
    elif harm == "no slots":
        slab.unlink()
    elif harm == "headers":
        data = bytearray(table.read_bytes())
        data[10] ^= 1
        data[-ENTRY_BYTES + 10] ^= 1
        table.write_bytes(data)
    else:
        os.truncate(table, 0 if harm == "nothing" else 300)
    storage = opened()
    assert there(storage, "small", "large") == "large"
    assert put(storage, small=b"2") == [True]
    assert (get(storage, "small"), get(storage, "large")) == (b"2", bytes(9000))
    assert total(folder) <= MIB


def entry_of(folder: Path, name: str) -> tuple[Path, int]:
    """The file in which an object's entry stands, and where it begins: 32 bytes before the name."""
    (found,) = [(path, at) for path in folder.rglob("slab-*") if (at := path.read_bytes().find(name.encode())) >= 0]
    return found[0], found[1] - 32


@pytest.mark.parametrize("elsewhere", ["in another row", "in another slab"])
def test_an_entry_that_the_disk_has_written_elsewhere_is_no_entry(opened, folder, elsewhere):
    storage = opened()
    pages = {f"page-{i:02}": b"%d" % i for i in range(20)}
    assert all(put(storage, **pages))
    slab, row = storage._index.place("page-01")
    next_row = [storage._index.place(name) == (slab, row + 1) for name in pages]
    next_slab = [it is not slab and at == row for it, at in map(storage._index.place, pages)]
    (other,) = itertools.compress(pages, next_row if "row" in elsewhere else next_slab)
    storage.close()
    places = [entry_of(folder, name) for name in ("page-01", other)]
    entries = [path.read_bytes()[at : at + ENTRY_BYTES] for path, at in places]
    for (path, at), entry in zip(places, reversed(entries), strict=True):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(entry)
    storage = opened()
    strays = ("page-01", other)
    assert {name: get(storage, name) for name in pages} == pages | dict.fromkeys(strays)
    assert put(storage, **dict.fromkeys(strays, b"anew")) == [True, True]
    assert [get(storage, name) for name in strays] == [b"anew"] * 2


def test_a_folder_that_is_gone_takes_nothing_more_and_is_not_made_anew(opened, folder):
    storage = opened(SMALL_FILES + ONE)
    put(storage, a=b"1")
    folder.rename(folder.with_name("moved"))
    for call in (lambda: put(storage, b=bytes(9000)), lambda: put(storage, a=b"1"), lambda: there(storage, "a")):
        with pytest.raises(StorageError, match="was removed or moved away while it was open"):
            call()
    assert not folder.exists()


class SmallDisk(WithoutSync):
    """A disk with fewer free bytes than the store's capacity."""

    def __init__(self, folder: Path, room_bytes: int) -> None:
        self.folder, self.room_bytes = folder, room_bytes

    def allocate(self, file: int, size_bytes: int) -> None:
        if total(self.folder) + size_bytes > self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(file, size_bytes)


def test_a_full_disk_makes_the_store_smaller_and_is_no_trouble(opened, folder):
    storage = opened(disk=SmallDisk(folder, 100_000))
    for i in range(40):
        assert put(storage, **{f"page-{i}": b"1"}) == [True]
    assert total(folder) <= 100_000
    assert there(storage, "page-39") == "page-39"
    assert put(storage, large=bytes(9000), huge=bytes(200_000)) == [True, False]
    assert get(storage, "large") == bytes(9000)


def test_a_disk_that_is_full_when_it_is_written_uses_the_places_it_has(opened):
    class NoRoomBehind(WithoutSync):
        full = False

        def write(self, file: int, data: Any, at: int) -> int:
            if self.full and at >= Shape(4096, 14).slot_at(3):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(file, data, at)

    disk = NoRoomBehind()
    storage = opened(disk=disk)
    put(storage, a=b"1", b=b"2", c=b"3")
    disk.full = True
    assert put(storage, d=b"4") == [True]
    assert get(storage, "d") == b"4"
    assert len(there(storage, *"abc").split()) == 2


def test_a_read_only_disk_takes_nothing_and_gives_what_it_has(opened):
    disk = Failing()
    storage = opened(SMALL_FILES + 2 * ONE, disk=disk)
    put(storage, a=b"1", b=b"2")
    disk.fails = {"write": errno.EROFS, "allocate": errno.EROFS}
    assert put(storage, c=b"3") == [False]
    assert there(storage, *"abc") == "a b"
    assert (get(storage, "a"), get(storage, "b")) == (b"1", b"2")
    assert storage.delete(["a"]) == [True]
    assert there(storage, *"abc") == "b"
    disk.fails = {}
    assert put(storage, c=b"3") == [True]
    assert get(storage, "c") == b"3"
    assert get(storage, "a") == b"1", "it could not be removed"


def test_a_disk_that_becomes_read_only_in_the_middle_of_a_put_loses_nothing_else(opened):
    disk = Failing()
    storage = opened(SMALL_FILES + 15 * ONE, disk=disk)
    put(storage, a=b"1", b=b"2")
    for after in range(20):
        disk.fails, disk.after, disk.seen = {"write": errno.EROFS}, after, 0
        stored = put(storage, **{f"c{after}": b"3"})
        disk.fails = {}
        assert set(there(storage, "a", "b").split()) == {"a", "b"}
        assert put(storage, **{f"d{after}": b"4"}) == [True]
        if stored == [True]:
            break
    else:
        pytest.fail("it never got through")
    assert after > 3
    disk.fails = {}
    assert put(storage, d=b"4") == [True]


def test_a_sync_that_fails_is_trouble_and_nothing_is_stored(opened):
    disk = Failing()
    storage = opened(disk=disk)
    disk.fails["sync"] = errno.EIO
    disk.after = 1  # the slab's own sync, when it is made
    with pytest.raises(StorageError, match=r"stored 0 of 2 objects: .*Input/output error"):
        put(storage, a=b"1", b=b"2")
    disk.fails.clear()
    assert there(storage, "a", "b") == ""


def test_a_put_of_an_object_that_another_put_stores_waits_for_the_sync(opened):
    class Counting(WithoutSync):
        syncs = 0

        def sync(self, file: int) -> None:
            self.syncs += 1

    counting = Counting()
    other = opened(disk=counting, threads=1)
    told = []

    class Interrupted(WithoutSync):
        def sync(self, file: int) -> None:
            if file == slab.table:
                counting.syncs = 0
                told.append((put(other, a=b"1"), counting.syncs))

    one = opened(threads=1)
    put(one, z=b"26")
    slab = one._index.slabs[0]
    slab.disk = Interrupted()
    assert put(one, a=b"1") == [True]
    assert told == [([True], 1)]  # the table: the bytes were synced before


class BadSector(WithoutSync):
    """A disk with one bad sector. It has direct I/O wherever the test runs."""

    bad = range(0)
    of: tuple[int, ...] = ()  # descriptors of the file
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
        if self.all_bad or (file in self.of and at < self.bad.stop and at + size > self.bad.start):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, into, at)


def test_an_object_on_a_bad_sector_is_missing_alone_and_its_place_is_not_used_again(opened):
    disk = BadSector()
    storage = opened(disk=disk, threads=1)
    names = list("abcde")
    data = [bytes([i]) * 4096 for i in range(5)]
    storage.put(names, [memoryview(each) for each in data])
    slab, row = storage._index.place("b")
    place = slab.shape.slot_at(row)
    disk.bad, disk.of = range(place + 512, place + 1024), (slab.file, slab.direct)
    buffers = [bytearray(4096) for _ in names]
    found = [storage.get([name], [memoryview(buffer)]) for name, buffer in zip(names, buffers, strict=True)]
    assert found == [[4096], [None], [4096], [4096], [4096]]
    assert storage.usage().damaged == 1
    for i in range(30):
        assert put(storage, **{f"more-{i}": b"1"}) == [True]
        assert get(storage, f"more-{i}") == b"1"
    storage.close()
    assert there(opened(disk=disk), "b") == ""


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


class Stingy(WithoutSync):
    """It reads and writes a few bytes at a time, as a disk may."""

    def open(self, folder: Directory, name: str, **how: bool) -> int:
        if how.get("direct"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(folder, name, **how)

    def read(self, file: int, into: Any, at: int) -> int:
        return super().read(file, [into[0][:200]], at)

    def write(self, file: int, data: Any, at: int) -> int:
        return super().write(file, [memoryview(data[0])[:300]], at)


def test_a_disk_that_takes_and_gives_a_few_bytes_at_a_time_stores_whole_objects(opened):
    storage = opened(disk=Stingy())
    data = bytes(range(256)) * 20
    put(storage, a=data, b=b"short")
    storage.close()
    storage = opened(disk=Stingy())
    assert (get(storage, "a"), get(storage, "b")) == (data, b"short")


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
