"""Several processes, and several threads, have one file store open."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import inspect_files
import pytest
from file_disks import ONE, SMALL_FILES, Rigged, WithoutSync, model_of, total

import forks
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file._processes import is_in_use
from kvarve.testing.suite import LABEL, get, put, there


def test_one_store_evicts_by_what_all_have_used(opened, folder):
    capacity = SMALL_FILES + 3 * ONE
    one, other = opened(capacity), opened(capacity)
    for name in "abc":
        put(one, **{name: b"1"})
    get(other, "a")
    put(one, d=b"1")
    assert there(one, *"abcd") == there(other, *"abcd") == "a c d"
    assert total(folder) <= capacity


def test_an_object_that_another_process_evicts_while_it_is_read_is_a_miss(opened):
    capacity, disk = SMALL_FILES + 2 * ONE, Rigged()
    other, storage = opened(capacity), opened(capacity, disk=disk)
    put(storage, a=b"1", b=b"2")
    disk.once(lambda: put(other, c=b"3", d=b"4"), "read", "slab-000000")
    assert get(storage, "a") is None
    assert there(storage, *"abcd") == "c d"
    assert storage.usage().damaged == 0


def test_a_table_that_is_being_written_while_it_is_read_costs_a_miss_for_a_moment(opened):
    one = opened()

    class TearsTheTable(WithoutSync):
        """Another process reads when half of an entry is written."""

        other: FileStorage | None = None
        seen: list[bool]

        def write(self, file: int, data: Any, at: int) -> int:
            if self.other is not None and 256 <= at < 4096 and len(data[0]) == 256:
                super().write(file, [bytes(data[0])[:100]], at)
                self.seen += self.other.exists([name])
            return super().write(file, data, at)

    put(one, z=b"26")
    name = "a" * 150  # so the tear goes through it
    disk = TearsTheTable()
    disk.seen = []
    writer = opened(disk=disk)
    disk.other = opened()
    put(writer, **{name: b"1"})
    disk.other, other = None, disk.other
    assert disk.seen
    assert not any(disk.seen)
    assert there(other, name) == name
    assert get(other, name) == b"1"
    assert put(other, b=b"2") == [True]
    assert other.usage().lost == 0


def test_a_change_that_comes_while_another_is_taken_in_is_taken_in_by_the_next_call(opened):
    one, disk = opened(), Rigged()
    put(one, z=b"26")
    other = opened(disk=disk)
    put(one, a=b"1")
    disk.once(lambda: put(one, b=bytes(9000)), "read", ".table")  # all that has changed is known by then
    assert there(other, "a", "b") == "a"
    assert there(other, "a", "b") == "a b"


def test_a_row_that_a_process_is_filling_is_used_by_no_other(opened):
    """A process that opens the folder meanwhile looks for rows that dead processes have left."""
    disk, others = Rigged(), []
    storage = opened(disk=disk)
    put(storage, z=b"26")

    def opens() -> None:
        others.append(opened())
        put(others[0], b=b"2" * 4096)

    disk.once(opens, "write", "slab-000000")
    assert put(storage, a=b"1" * 4096) == [True]
    for each in (storage, *others):
        assert [get(each, name) for name in "abz"] == [b"1" * 4096, b"2" * 4096, b"26"]
    assert len(others) == 1


def test_what_lies_in_two_slabs_is_read_at_once(opened):
    class Meeting(WithoutSync):
        """A read returns once another one is in flight."""

        place: threading.Barrier | None = None

        def read(self, file: int, into: Any, at: int) -> int:
            if self.place is not None:
                self.place.wait()
            return super().read(file, into, at)

    disk = Meeting()
    storage = opened(disk=disk)
    put(storage, small=b"1", large=bytes(5000))
    disk.place = threading.Barrier(2, timeout=10)
    assert storage.get(["small", "large"], [memoryview(bytearray(5000)) for _ in "12"]) == [1, 5000]


def test_of_two_objects_of_one_name_one_goes_for_good(opened):
    """Two processes may have stored it at once, and one died before it announced its entry."""
    storage = opened()
    names = [f"page-{i:02}" for i in range(20)]
    assert all(storage.put(names, [memoryview(b"1")] * 20))
    inspect_files.double(storage, "page-00")
    storage.close()
    storage = opened()
    assert put(storage, new=b"2") == [True]
    assert inspect_files.names_on_disk(storage) == sorted([*names, "new"])
    assert storage.usage().objects == 21
    assert get(storage, "page-00") == b"1"
    assert storage.usage().lost == 0


# The parent of this pair ends at once; its child lives on, with every descriptor that a fork copies.
OPEN_FORK_AND_LEAVE_A_CHILD = """
import os, sys
sys.path[:0] = sys.argv[3].split(":")
from inspect_files import locked
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
storage = FileStorage(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]), "model A")
storage.put(["from-parent"], [memoryview(b"1")])
locked(storage)
if os.fork():
    os._exit(0)
try:
    storage.usage()
except StorageError as error:
    print(error, flush=True)
sys.stdin.read()
"""

LEAVE_WHILE_A_READ_HANGS = """
import sys, threading
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Disk
hangs, never = threading.Event(), threading.Event()
class Hanging(Disk):
    def read(self, file, into, at):
        if threading.current_thread() is not threading.main_thread():
            hangs.set()
            never.wait()
        return super().read(file, into, at)
storage = FileStorage(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]), "model A", disk=Hanging())
storage.put(["a", "b"], [memoryview(b"1")] * 2)
views = [memoryview(bytearray(1)) for _ in "12"]
threading.Thread(target=lambda: storage.get(["a", "b"], views), daemon=True).start()
hangs.wait()
print("hangs", flush=True)
"""


def python(script: str, folder: Path) -> "subprocess.Popen[str]":
    here = ":".join(str(Path(__file__).parents[up]) for up in (0, 1))
    command = [sys.executable, "-c", script, str(folder), LABEL.hex(), here]
    return forks.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_process_can_end_while_a_disk_hangs(folder):
    with python(LEAVE_WHILE_A_READ_HANGS, folder) as other:
        assert other.stdout is not None and other.stdout.readline() == "hangs\n"
        try:
            assert other.wait(60) == 0
        finally:
            other.kill()


def test_a_process_that_checks_whether_a_folder_is_in_use_counts_as_no_user_of_it(opened, folder):
    """Else a process that opens it at that moment would trust announcements from before a power cut."""
    storage = opened()
    put(storage, a=b"1")
    storage.close()
    found = []

    class Interrupted(WithoutSync):
        """Another process opens the folder during the check."""

        def unlock(self, file: int) -> None:
            (model_of(folder) / "changes").write_bytes(b"")
            found.append(there(opened(), "a"))
            super().unlock(file)

    disk = Interrupted()
    with disk.closing(disk.enter(model_of(folder))) as place:
        assert is_in_use(disk, place) is False
    assert found == ["a"]


def test_a_forked_child_cannot_use_the_folder_and_does_not_keep_it_from_others(opened, folder):
    with python(OPEN_FORK_AND_LEAVE_A_CHILD, folder) as other:
        assert other.stdout is not None and other.stdin is not None
        assert "before a fork" in other.stdout.readline()
        other.wait()
        storage = opened()
        assert get(storage, "from-parent") == b"1"
        assert inspect_files.is_alone(storage)
        other.stdin.close()  # the orphan ends here, not before


def test_a_process_that_stops_with_the_lock_in_its_hands_costs_the_others_no_more_than_a_wait(opened, monkeypatch):
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.05)
    storage, stopped = opened(), opened()
    put(storage, a=b"1")
    with inspect_files.mutex(stopped):
        for call in (lambda: put(storage, large=bytes(9000)), opened):
            with pytest.raises(StorageError, match="is it stopped"):
                call()
        assert get(storage, "a") == b"1"
        assert put(storage, b=b"2") == [True], "only making and removing slabs needs it"
    assert put(storage, large=bytes(9000)) == [True]


def test_a_process_that_stops_while_it_evicts_an_object_costs_a_delete_of_it_no_more_than_a_wait(opened, monkeypatch):
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.05)
    storage, stopped = opened(), opened()
    put(storage, a=b"1", b=b"2")
    assert there(stopped, "a") == "a"
    with inspect_files.seizing(stopped, "a"):
        with pytest.raises(StorageError, match="is it stopped"):
            storage.delete(["b", "a"])
        assert there(storage, "a", "b") == "a"
    assert storage.delete(["a", "b", "a"]) == [True, False, False]
