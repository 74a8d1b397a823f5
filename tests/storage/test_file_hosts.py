"""Locks that do not reach from host to host are noticed before two hosts write to one slot."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
from file_disks import MIB, WithoutSync
from inspect_files import die

from kvarve.cli.main import main
from kvarve.errors import StorageError
from kvarve.storage import FileStorage, open_storage
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.folder import Wanted, check_folder
from kvarve.system.mounts import mounts
from kvarve.testing.suite import LABEL, get, put, there


class OnHost(WithoutSync):
    """A host that has mounted the folder. `blind`: its mount sees no locks of other hosts (NFS with `nolock`)."""

    def __init__(self, name: str, boot: bytes, *, network: bool = True, blind: bool = True) -> None:
        self.name, self.machine, self.network, self.blind = name, boot * 16, network, blind

    def host(self) -> str:
        return self.name

    def boot(self) -> bytes:
        return self.machine

    def is_local(self, folder: object) -> bool:
        return not self.network

    def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
        return self.blind or super().lock(file, wait=wait, shared=shared)

    def unlock(self, file: int) -> None:
        if not self.blind:
            super().unlock(file)


def open_on(folder: Path, disk: Disk, **more: bool) -> FileStorage:
    return FileStorage(folder, MIB, LABEL, "model A", disk=disk, **more)


def test_a_folder_that_another_host_has_open_is_refused_where_its_lock_is_not_seen(folder):
    one, two = open_on(folder, OnHost("one", b"1")), OnHost("two", b"2")
    put(one, a=b"1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for call in (lambda: open_on(folder, two), lambda: check_folder(Wanted(folder, MIB, LABEL, "model A"), two)):
        with pytest.raises(StorageError, match=r"process-0: a process on host 'one'.*shared=yes"):
            call()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert get(one, "a") == b"1"
    one.close()
    with closing(open_on(folder, two)) as again:
        assert get(again, "a") == b"1", "it has been closed"


def test_where_locks_reach_all_hosts_several_of_them_share_a_folder(folder):
    """A process that lives is seen by its lock, so no word of an operator is needed; of one that has died it is."""
    one, two = (open_on(folder, OnHost(name, name.encode(), blind=False)) for name in "12")
    put(one, a=b"1")
    assert there(two, "a") == "a"
    die(one)
    third = OnHost("3", b"3", blind=False)
    with pytest.raises(StorageError, match="a process on host '1'"):
        open_on(folder, third)
    shared = open_on(folder, third, shared=True)
    assert get(shared, "a") == b"1"
    for each in (two, shared):
        each.close()


@pytest.mark.parametrize(
    "now",
    [
        OnHost("one", b"2"),  # it was started anew
        OnHost("container", b"1"),  # of the same kernel
        OnHost("two", b"2", network=False),  # the disk was moved
    ],
    ids=["rebooted", "another container", "a local disk"],
)
def test_what_a_process_of_this_host_left_when_it_died_is_no_obstacle(folder, now):
    before = open_on(folder, OnHost("one", b"1"))
    put(before, a=b"1")
    die(before)
    storage = open_on(folder, now)
    assert get(storage, "a") == b"1"
    storage.close()


def test_the_word_of_an_operator_is_a_parameter_of_the_url(folder, monkeypatch):
    monkeypatch.setattr(Disk, "is_local", lambda disk, folder: False)
    dead = open_on(folder, OnHost("one", b"1"))
    put(dead, a=b"1")
    die(dead)
    url = f"file://{folder}?capacity=1MiB"
    with pytest.raises(StorageError, match="shared=yes"):
        open_storage(url, label=LABEL, description="model A")
    assert main(["storage", "gc", url]) == 2
    assert main(["storage", "gc", url + "&shared=yes"]) == 0
    storage = open_storage(url + "&shared=yes", label=LABEL, description="model A")
    assert get(storage, "a") == b"1"
    storage.close()


def test_a_process_file_that_names_no_host_and_no_capacity_is_no_obstacle(folder):
    for said in (b"", b"\n" * 300, b"capacity -1\nhost \xff boot 00\n", "capacity ٣\nhost x boot y\n".encode()):
        before = open_on(folder, OnHost("one", b"1", blind=False))
        (path,) = folder.rglob("process-0")
        path.write_bytes(said)
        FileStorage(folder, 2 * MIB, LABEL, "model A", disk=OnHost("one", b"1", blind=False)).close()
        before.close()
        path.write_bytes(said)
        open_on(folder, OnHost("two", b"2")).close()


def test_a_mount_with_an_odd_name_is_no_obstacle(tmp_path, monkeypatch):
    disk = Disk()
    with disk.closing(disk.enter(tmp_path)) as place:
        device = os.fstat(place.file).st_dev
        monkeypatch.setattr("kvarve.system.mounts.MOUNTS", tmp_path / "mountinfo")
        for kind, local in ((b"ext4 /dev/sda", True), (b"nfs4 far:/away", False)):
            lines = [
                b"21 1 0:19 / /odd\xff\xc2\x85\x0c\\040name rw - tmpfs \xff rw",
                b"22 1 %d:%d / /here rw shared:1 - %s rw" % (os.major(device), os.minor(device), kind),
                b"truncated",
            ]
            (tmp_path / "mountinfo").write_bytes(b"\n".join(lines))
            assert disk.is_local(place) is local
    assert mounts()[0].place == os.fsdecode(b"/odd\xff\xc2\x85\x0c name")


def test_where_blocks_cannot_be_allocated_a_file_is_made_long_and_not_written(tmp_path, monkeypatch):
    """glibc's posix_fallocate writes to each block then."""
    disk, path = Disk(), tmp_path / "slots"
    path.touch(0o600)

    def refuses(file: int, size_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with path.open("r+b") as file:
        disk.allocate(file.fileno(), 1 << 20)
        assert path.stat().st_size == 1 << 20
        monkeypatch.setattr("kvarve.storage.file.disk._fallocate", refuses)
        before = path.stat().st_blocks
        disk.allocate(file.fileno(), 1 << 30)
        assert (path.stat().st_size, path.stat().st_blocks) == (1 << 30, before)
        disk.allocate(file.fileno(), 1 << 20)
        assert path.stat().st_size == 1 << 30
    with pytest.raises(OSError, match="Bad file descriptor"):
        monkeypatch.undo()
        disk.allocate(-1, 4096)
