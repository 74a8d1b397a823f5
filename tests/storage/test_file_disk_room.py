"""A hundredth of the disk, 256 MiB at least, stays free for other files: the store evicts instead, and a full disk
costs it no more objects than necessary."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import inspect_files
import pytest
from file_disks import MIB, WithoutSync, total, trouble

from kvarve.storage.file.disk import Directory, Disk
from kvarve.testing.suite import OTHER_LABEL, get, put, there

GIB = 1 << 30
LEAST = 256 * MIB


class Limited(WithoutSync):
    """A disk of some size, partly used by other files. `sparse`: it cannot preallocate, so a store takes only the
    bytes that it has written."""

    def __init__(self, folder: Path, disk_bytes: int, free_bytes: int, *, sparse: bool = False) -> None:
        self.folder, self.disk_bytes, self.sparse = folder, disk_bytes, sparse
        self.others: Callable[[], int] = lambda: disk_bytes - free_bytes
        self.written: set[tuple[int, int]] = set()  # inodes and blocks

    def fill(self) -> None:
        """Other files take all free bytes."""
        others_bytes = self.disk_bytes - self.taken()
        self.others = lambda: others_bytes

    def taken(self) -> int:
        if not self.sparse:
            return total(self.folder) if self.folder.exists() else 0
        there = {path.stat().st_ino for path in self.folder.rglob("*")}
        self.written = {each for each in self.written if each[0] in there}
        return 4096 * len(self.written)

    def free(self) -> int:
        return self.disk_bytes - self.others() - self.taken()

    def space(self, folder: Directory) -> tuple[int, int]:
        return max(0, self.free()), self.disk_bytes

    def allocate(self, file: int, size_bytes: int) -> None:
        if not self.sparse and size_bytes - self.size(file) > self.free():
            raise trouble(errno.ENOSPC)
        os.ftruncate(file, max(size_bytes, self.size(file)))

    def write(self, file: int, data, at: int) -> int:
        count = super().write(file, data, at)
        inode = self.stat(file).st_ino
        self.written |= {(inode, block) for block in range(at // 4096, (at + count + 4095) // 4096)}
        return count

    def stat(self, file: int) -> os.stat_result:
        found = super().stat(file)
        if self.sparse or not hasattr(found, "st_blocks"):
            return found
        return Solid(found)


class Solid:
    """A file with all of its blocks allocated."""

    def __init__(self, found: os.stat_result) -> None:
        self.found = found
        self.st_blocks = -(-found.st_size // 512)

    def __getattr__(self, name: str) -> int:
        return getattr(self.found, name)


@pytest.mark.parametrize(("disk_bytes", "left_bytes"), [(GIB, LEAST), (1 << 40, (1 << 40) // 100)])
def test_a_store_evicts_instead_of_taking_the_last_of_a_disk(opened, folder, disk_bytes, left_bytes):
    disk = Limited(folder, disk_bytes, left_bytes + 200_000)
    storage, those = opened(8 * MIB, disk=disk), [f"page-{i}" for i in range(80)]
    for i, name in enumerate(those):
        assert put(storage, **{name: bytes([i]) * 4096}) == [True]
        assert disk.free() >= left_bytes - 8192, "except the process's own file"
    assert storage.usage().evicted > 20
    assert get(storage, "page-79") == bytes([79]) * 4096
    before, held = total(folder), sum(storage.exists(those))
    disk.fill()
    for i in range(20):
        assert put(storage, **{f"more-{i}": b"1"}) == [True]
    assert total(folder) == before
    storage.close()
    storage = opened(8 * MIB, disk=disk)
    assert get(storage, "more-19") == b"1", "and opening it again evicts nothing"
    assert sum(storage.exists([*those, *(f"more-{i}" for i in range(20))])) == held


def test_what_cannot_be_stored_without_more_room_is_refused_and_costs_nothing(opened, folder, caplog):
    disk = Limited(folder, 10 * GIB, LEAST - 1)
    storage = opened(8 * MIB, disk=disk)
    for i in range(5):
        assert put(storage, **{f"page-{i}": b"1"}) == [False]
    assert storage.usage().objects == 0
    assert [*folder.rglob("slab-*")] == []
    assert caplog.text.count("nothing of 4096 bytes can be stored") == 1 and "or the disk is full" in caplog.text
    disk.others = lambda: 9 * GIB
    inspect_files.retry(storage)
    assert put(storage, page=b"1") == [True]


def test_a_class_that_has_no_slab_yet_takes_the_room_of_another_on_a_disk_that_is_full(opened, folder):
    disk = Limited(folder, 10 * GIB, 2 * GIB)
    storage = opened(2 * MIB, disk=disk)
    small = [f"small-{i}" for i in range(200)]
    assert all(storage.put(small, [memoryview(bytes(4096))] * 200))
    before = total(folder)
    disk.others = lambda: 10 * GIB - LEAST
    assert put(storage, large=bytes(60_000)) == [True]
    assert get(storage, "large") == bytes(60_000)
    assert total(folder) <= before, "only the bytes that were removed may be taken again"
    assert sum(storage.exists(small)) >= 150


def test_an_idle_model_makes_room_on_a_disk_that_is_full(opened, folder):
    disk = Limited(folder, 10 * GIB, 2 * GIB)
    storage = opened(2 * MIB, disk=disk)
    those = [f"page-{i}" for i in range(200)]
    assert all(storage.put(those, [memoryview(bytes(4096))] * 200))
    storage.close()
    before = total(folder)
    disk.fill()
    other = opened(2 * MIB, OTHER_LABEL, "model B", disk=disk)
    for i in range(20):
        assert put(other, **{f"page-{i}": b"1"}) == [True]
    assert total(folder) <= before + 8192
    other.close()
    storage = opened(2 * MIB, disk=disk)
    assert sum(storage.exists(those)) >= 120


def test_where_nothing_can_be_preallocated_free_rows_are_left_alone_while_the_disk_is_full(opened, folder):
    """Such a slab takes blocks when it is filled: to fill it further would fill the disk."""
    disk = Limited(folder, 10 * GIB, 2 * GIB, sparse=True)
    storage = opened(2 * MIB, disk=disk)
    those = [f"page-{i}" for i in range(10)]
    assert all(storage.put(those, [memoryview(bytes([7]) * 4096)] * 10))
    assert inspect_files.rows(storage)["free"] > 10
    before = disk.taken()
    disk.others = lambda: 10 * GIB - LEAST
    for i in range(40):
        assert put(storage, **{f"more-{i}": bytes([i + 1]) * 4096}) == [True]
        assert disk.taken() == before, "each takes the place of an old one"
    assert len(there(storage, *those, *(f"more-{i}" for i in range(40))).split()) == 10
    assert get(storage, "more-39") == bytes([40]) * 4096
    disk.others = lambda: 9 * GIB
    assert put(storage, a=b"1", b=b"2") == [True, True]
    assert disk.taken() > before


def test_a_file_system_that_does_not_say_how_large_it_is_has_room(opened, folder, monkeypatch):
    """Some file systems in user space report zeros; the store kept nothing on them."""

    class Unsized(WithoutSync):
        space = Disk.space

    zeros = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda file: zeros)
    storage = opened(disk=Unsized())
    assert put(storage, **{f"page-{i}": bytes(4096) for i in range(40)}) == [True] * 40


def test_where_files_have_a_largest_size_slabs_are_as_small(opened, folder):
    class Small(WithoutSync):
        """As with a limit of the process (ulimit -f), or of the file system."""

        def allocate(self, file: int, size_bytes: int) -> None:
            if size_bytes > 40_000:
                raise trouble(errno.EFBIG)
            super().allocate(file, size_bytes)

    storage = opened(disk=Small())
    assert put(storage, **{f"page-{i}": bytes(4096) for i in range(40)}) == [True] * 40
    assert len([*folder.rglob("slab-??????")]) > 4
