"""Several processes, and several threads, have one file store open."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from file_disks import MIB, ONE, SMALL_FILES, WithoutSync, changing, total

import forks
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file.processes import is_in_use
from kvarve.storage.file.slabs import RowSpan
from kvarve.testing.suite import LABEL, get, put, there


def test_what_one_puts_is_anothers_hit(opened):
    one, other = opened(), opened()
    put(one, a=b"1")
    assert there(other, "a") == "a"
    assert get(other, "a") == b"1"
    put(other, b=b"2", a=b"not this")
    assert (get(one, "a"), get(one, "b")) == (b"1", b"2")
    one.delete(["a"])
    assert there(other, *"ab") == "b"
    assert one.usage().objects == other.usage().objects == 1


def test_one_store_evicts_by_what_all_have_used(opened):
    capacity = SMALL_FILES + 3 * ONE
    one, other = opened(capacity), opened(capacity)
    for name in "abc":
        put(one, **{name: b"1"})
    get(other, "a")
    put(one, d=b"1")
    assert there(one, *"abcd") == there(other, *"abcd") == "a c d"
    assert total(one._directory) <= capacity


def test_an_object_that_another_process_evicts_while_it_is_read_is_a_miss(opened):
    capacity = SMALL_FILES + 2 * ONE
    other = opened(capacity)

    class EvictsMeanwhile(WithoutSync):
        armed = False

        def read(self, file: int, into: Any, at: int) -> int:
            if self.armed:
                self.armed = False
                put(other, c=b"3", d=b"4")
            return super().read(file, into, at)

    disk = EvictsMeanwhile()
    storage = opened(capacity, disk=disk)
    put(storage, a=b"1", b=b"2")
    disk.armed = True
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
    one = opened()

    class ChangesMeanwhile(WithoutSync):
        armed = False

        def peek(self, file: int, size_bytes: int, at: int) -> bytes:
            found = super().peek(file, size_bytes, at)
            if self.armed and size_bytes > MIB:  # all that has changed
                self.armed = False
                put(one, b=b"2")
            return found

    put(one, z=b"26")
    disk = ChangesMeanwhile()
    other = opened(disk=disk)
    put(one, a=b"1")
    disk.armed = True
    assert there(other, "a", "b") == "a"
    assert not disk.armed
    assert there(other, "a", "b") == "a b"


def test_a_row_that_a_process_is_filling_is_used_by_no_other(opened):
    """A process that opens the folder meanwhile looks for rows that dead processes have left."""
    others = []

    class OpensMeanwhile(WithoutSync):
        armed = False

        def write(self, file: int, data: Any, at: int) -> int:
            count = super().write(file, data, at)
            if self.armed and count >= 4096:  # an object; entries are smaller
                self.armed = False
                others.append(opened())
                put(others[0], b=b"2" * 4096)
            return count

    disk = OpensMeanwhile()
    storage = opened(disk=disk)
    put(storage, z=b"26")
    disk.armed = True
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
    with changing(storage) as index:
        one, row = index.place("page-00")
        other = next(slab for slab in index.slabs.values() if slab is not one)
        (double,) = other.take_free(1)
        for column in ("state", "length", "stored", "names"):
            getattr(other, column)[double] = getattr(one, column)[row]
        other.write([RowSpan(0, other, double, memoryview(b"1"))])
        other.save([double])
    storage.close()
    storage = opened()
    assert put(storage, new=b"2") == [True]
    with storage._looking() as index:
        tables = [found for slab in index.slabs.values() for _, found in slab.load(0, slab.shape.slots)]
    on_disk = [name for table in tables for name in table.names]
    assert sorted(on_disk) == sorted([*names, "new"])
    assert storage.usage().objects == 21
    assert get(storage, "page-00") == b"1"
    assert storage.usage().lost == 0


def test_a_process_that_only_reads_finds_an_object_that_has_moved(opened):
    one, other = opened(), opened()
    names = [f"page-{i:02}" for i in range(20)]
    assert all(one.put(names, [memoryview(b"1")] * 20))
    assert all(other.exists(names))
    one.delete([names[0], names[19]])
    assert one.put([names[19]], [memoryview(b"1")]) == [True]
    assert other.exists([names[0], names[19]]) == [False, True]
    assert get(other, names[19]) == b"1"
    assert (other.usage().objects, other.usage().bytes) == (19, 19)


OPEN_AND_WAIT = """
import sys
from kvarve.storage import FileStorage
storage = FileStorage(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]), "model A")
storage.put(["from-child"], [memoryview(b"1")])
print("open", flush=True)
sys.stdin.read()
"""

# The parent of this pair ends at once; its child lives on, with every descriptor that a fork copies.
OPEN_FORK_AND_LEAVE_A_CHILD = """
import os, sys
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
storage = FileStorage(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]), "model A")
storage.put(["from-parent"], [memoryview(b"1")])
storage._lock.acquire()  # as a thread in the middle of a call would
storage._folder.disk.lock(storage._folder._mutex)
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
    command = [sys.executable, "-c", script, str(folder), LABEL.hex()]
    return forks.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_have_one_folder_and_one_may_die(opened, folder):
    with python(OPEN_AND_WAIT, folder) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        storage = opened()
        assert get(storage, "from-child") == b"1"
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert put(storage, a=b"1") == [True]
        assert there(storage, "from-child", "a") == "from-child a"


def test_a_process_can_end_while_a_disk_hangs(folder):
    with python(LEAVE_WHILE_A_READ_HANGS, folder) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "hangs\n"
        try:
            assert other.wait(60) == 0
        finally:
            other.kill()


def test_a_process_that_checks_whether_a_folder_is_in_use_counts_as_no_user_of_it(opened, folder):
    """Else a process that opens it at that moment would trust announcements from before a power cut."""
    storage = opened()
    put(storage, a=b"1")
    storage.close()
    (model,) = folder.glob("models/*")
    found = []

    class Interrupted(WithoutSync):
        """Another process opens the folder during the check."""

        def unlock(self, file: int) -> None:
            (model / "changes").write_bytes(b"")
            found.append(there(opened(), "a"))
            super().unlock(file)

    disk = Interrupted()
    with disk.closing(disk.enter(model)) as place:
        assert is_in_use(disk, place) is False
    assert found == ["a"]


def test_a_forked_child_cannot_use_the_folder_and_does_not_keep_it_from_others(opened, folder):
    with python(OPEN_FORK_AND_LEAVE_A_CHILD, folder) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert "before a fork" in other.stdout.readline()
        other.wait()
        storage = opened()
        assert get(storage, "from-parent") == b"1"
        assert storage._folder.alone()
        other.stdin.close()  # the orphan ends here, not before


def test_closing_while_others_read_and_write_ends_them_with_an_answer(opened):
    storage = opened(8 * MIB, threads=2)
    start, stored = threading.Barrier(4, timeout=60), threading.Semaphore(0)
    ended: list[BaseException] = []

    def work(worker: int) -> None:
        start.wait()
        try:
            for turn in itertools.count():
                name = f"page-{worker}-{turn % 50}"
                storage.put([name, f"{name}-too"], [memoryview(bytes(9000))] * 2)
                stored.release()
                storage.get([name, f"{name}-too"], [memoryview(bytearray(9000)) for _ in "12"])
        except BaseException as error:  # noqa: BLE001  whatever it is, it has to be the right one
            ended.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    for _ in range(15):
        assert stored.acquire(timeout=60), ended
    storage.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in ended] == [StorageError] * 3, ended
    assert all("closed" in str(error) for error in ended)


def test_a_process_that_stops_with_the_lock_in_its_hands_costs_the_others_no_more_than_a_wait(opened, monkeypatch):
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.05)
    storage, stopped = opened(), opened()
    put(storage, a=b"1")
    stopped._folder.disk.lock(stopped._folder._mutex)
    for call in (lambda: put(storage, large=bytes(9000)), opened):
        with pytest.raises(StorageError, match="is it stopped"):
            call()
    assert get(storage, "a") == b"1"
    assert put(storage, b=b"2") == [True], "only making and removing slabs needs it"
    stopped._folder.disk.unlock(stopped._folder._mutex)
    assert put(storage, large=bytes(9000)) == [True]


def test_a_process_that_stops_while_it_evicts_an_object_costs_a_delete_of_it_no_more_than_a_wait(opened, monkeypatch):
    monkeypatch.setattr("kvarve.storage.file.folder.MUTEX_S", 0.05)
    storage, stopped = opened(), opened()
    put(storage, a=b"1", b=b"2")
    assert there(stopped, "a") == "a"
    with changing(stopped) as index:
        assert index.seize(*index.place("a"))
        with pytest.raises(StorageError, match="is it stopped"):
            storage.delete(["b", "a"])
        assert there(storage, "a", "b") == "a"
        index.release([index.place("a")])
    assert storage.delete(["a", "b", "a"]) == [True, False, False]
