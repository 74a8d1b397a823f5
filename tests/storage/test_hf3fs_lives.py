"""A process alone with its store: killed at any step, restarted, and never believed about what others have written."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
from hf3fs_stores import CAPACITY_BYTES, RESTING, SLOT_BYTES, STORED, Stores, check_slots, keep, stores_in
from processes import PATIENCE_S

import forks
from kvarve.errors import StorageError
from kvarve.storage import check_storage, open_storage
from kvarve.storage.base import Damaged
from kvarve.storage.file.disk import Directory, Disk
from kvarve.storage.hf3fs import _hf3fs_storage as storage_module
from kvarve.storage.hf3fs import _owner as owner_module
from kvarve.storage.hf3fs._hf3fs_folder import STORE_FILE
from kvarve.storage.hf3fs._owner import Owner
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES
from kvarve.storage.hf3fs._slot_table import REST_S
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

OBJECTS = 6


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with stores_in(tmp_path) as stores:
        yield stores


class Died(BaseException):
    """The process ends here, or the machine."""


class Dying(Disk):
    """Ends before, in the middle of and after its n-th change. `power`: what was not synced is lost then."""

    def __init__(self, left: int, *, power: bool) -> None:
        self.left, self.power, self.dead = left, power, False
        self.unsynced: list[tuple[Path, int, bytes]] = []  # what was there before each write

    def _step(self) -> None:
        if self.dead:
            raise Died
        self.left -= 1
        if self.left <= 0:
            self.dead = True
            if self.power:
                for path, at, before in reversed(self.unsynced):
                    with suppress(FileNotFoundError), path.open("r+b") as file:
                        file.seek(at)
                        file.write(before)
            raise Died

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        path = Path(f"/proc/self/fd/{file}").readlink()
        self._step()
        size = sum(map(len, data))
        self.unsynced.append((path, at, os.pread(file, size, at).ljust(size, b"\0")))
        whole = b"".join(data)
        half = memoryview(bytearray(whole[: len(whole) // 2]))
        super().write(file, [half], at)
        self._step()
        done = super().write(file, data, at)
        self._step()
        return done

    def sync(self, file: int) -> None:
        self._step()
        super().sync(file)
        path = Path(f"/proc/self/fd/{file}").readlink()
        self.unsynced = [each for each in self.unsynced if each[0] != path]
        self._step()

    def open(self, folder: Directory, name: str, **how: bool) -> int:
        if how.get("create"):
            self._step()
        how.pop("direct", None)
        file = super().open(folder, name, **how)
        if how.get("create"):
            self._step()
        return file

    def rename(self, folder: Directory, old: str, new: str) -> None:
        self._step()
        super().rename(folder, old, new)
        self._step()

    def unlink(self, folder: Directory, name: str) -> None:
        self._step()
        super().unlink(folder, name)
        self._step()


class Unreadable(Disk):
    """A file of slots is not read while `unreadable`."""

    unreadable = False

    def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
        if self.unreadable and "slots-" in Path(f"/proc/self/fd/{file}").readlink().name:
            raise OSError(5, "its chain of targets is offline")
        return super().read(file, into, at)


def fill(number: int) -> bytes:
    return bytes([number + 1]) * (3000 + number)


def a_life(stores: Stores, disk: Disk) -> tuple[set[int], set[int]]:
    """Stores, deletes and evicts; what it was told is stored, and what is deleted."""
    stored, deleted = set[int](), set[int]()
    storage = stores.open(disk=disk, capacity_bytes=OBJECTS * SLOT_BYTES)
    for number in range(4):
        if put(storage, **{f"page-{number}": fill(number)}) == [True]:
            stored.add(number)
    if storage.delete(["page-1"]) == [True]:
        deleted.add(1)
    names, data = [f"page-{i}" for i in (4, 5, 6)], [memoryview(fill(i)) for i in (4, 5, 6)]
    stored |= {number for number, done in zip((4, 5, 6), storage.put(names, data), strict=True) if done}
    put(storage, large=bytes(3 * SLOT_BYTES))  # for which files of others are removed
    storage.close()
    return stored, deleted


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.long) for first in range(2, 14))])
def test_a_process_that_dies_at_any_step_leaves_whole_objects_and_no_slot_is_lost(
    tmp_path: Path, first: int, power: bool
) -> None:
    died = 0
    for left in range(first, 10_000, 13):
        with stores_in(tmp_path / str(left)) as stores:
            disk, told = Dying(left, power=power), None
            try:
                told = a_life(stores, disk)
            except (Died, StorageError):
                died += 1
            stores.die()
            storage = stores.open(capacity_bytes=OBJECTS * SLOT_BYTES)
            for number in range(7):
                found = get(storage, f"page-{number}")
                assert found in (None, fill(number)), f"step {left}"
                assert found is None or number not in (told or ((), ()))[1]
            assert get(storage, "large") in (None, bytes(3 * SLOT_BYTES))
            stores.stop_the_clock()
            stores.clock.now += 10 * REST_S
            names, data = [f"new-{i}" for i in range(OBJECTS)], [memoryview(fill(i)) for i in range(OBJECTS)]
            assert storage.put(names, data) == [True] * OBJECTS, f"step {left}"
            assert [get(storage, name) for name in names] == data
            assert stores.slots() == {STORED: OBJECTS}
        if told is not None:
            break
    assert died > 2


def test_what_was_answered_for_is_there_after_a_kill_and_what_was_deleted_is_not(stores: Stores) -> None:
    storage, other = stores.open(), stores.open(label=OTHER_LABEL)
    names = [f"page-{i}" for i in range(100)]
    data = [memoryview(bytes([i]) * (100 + 150 * i)) for i in range(100)]
    assert all(storage.put(names, data))
    put(other, theirs=b"1"), put(storage, **{"tenant-1": b"1", "tenant-2": b"2", "torn": b"3"})
    assert storage.delete(names[:10]) == [True] * 10 and storage.drop("tenant") == 2
    stores.write("torn", 50, b"\xff" * 5)
    stores.die()
    again = stores.open()
    assert again.exists([*names, "tenant-1", "tenant-2", "torn"]) == [False] * 10 + [True] * 90 + [False] * 3
    buffers = [memoryview(bytearray(20_000)) for _ in names]
    assert again.get(names, buffers)[10:] == [view.nbytes for view in data[10:]]
    assert all(buffer[: view.nbytes] == view for buffer, view in zip(buffers[10:], data[10:], strict=True))
    assert get(stores.open(label=OTHER_LABEL), "theirs") == b"1", "the objects of all models are found"
    assert stores.slots()[RESTING] > 0, "a write of the killed process may still come"


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_evicted_and_then_dropped_is_not_found_again(stores: Stores, clean: bool) -> None:
    names, quota = [f"tenant-{i}" for i in range(6)], {"quota_bytes": 3 * SLOT_BYTES}
    storage = stores.open(**quota)
    for name in names:
        put(storage, **{name: b"1"})
    put(storage, other=b"2")
    assert there(storage, *names) == "tenant-3 tenant-4 tenant-5"
    assert storage.delete(["tenant-4"]) == [True] and storage.drop("tenant") == 2
    storage.close() if clean else stores.die()
    assert there(stores.open(**quota), *names, "other") == "other"


def test_the_order_of_use_is_that_of_the_last_clean_end_and_of_what_was_written_since(stores: Stores) -> None:
    disk, quota = Unreadable(), {"quota_bytes": 3 * SLOT_BYTES}
    storage = stores.open(**quota)
    put(storage, **{"g-a": b"1"}), put(storage, **{"g-b": b"2"}), put(storage, **{"g-c": b"3"})
    assert get(storage, "g-a") == b"1"
    storage.close()
    disk.unreadable = True
    again = stores.open(disk=disk, **quota)
    assert there(again, "g-a", "g-b", "g-c") == ""
    disk.unreadable = False
    keep(again)
    assert put(again, **{"g-d": b"4"}) == [True] and there(again, *(f"g-{i}" for i in "abcd")) == "g-a g-c g-d"
    stores.die()
    again = stores.open(**quota)
    assert put(again, **{"g-e": b"5", "g-f": b"6"}) == [True] * 2
    assert there(again, *(f"g-{i}" for i in "abcdef")) == "g-d g-e g-f"


def test_while_headers_are_read_the_store_has_no_more_room_than_its_files_leave(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity, reading, go_on, titles = 64 * SLOT_BYTES, Event(), Event(), owner_module._titles

    def slow(*file: Any) -> Any:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return titles(*file)

    def on_disk() -> int:
        return sum(path.stat().st_size for path in (stores.folder / "here").glob("slots-*"))

    storage, names = stores.open(capacity_bytes=capacity), [f"old-{i}" for i in range(60)]
    assert all(storage.put(names, [memoryview(bytes(4096))] * 60))
    storage.close()
    monkeypatch.setattr(storage_module, "_READY_S", 0.0)
    monkeypatch.setattr(owner_module, "_titles", slow)
    again, new = stores.open(capacity_bytes=capacity), [f"new-{i}" for i in range(60)]
    assert reading.wait(PATIENCE_S)
    try:
        assert sum(again.put(new, [memoryview(bytes(4096))] * 60)) == 4 and on_disk() == capacity
    finally:
        go_on.set()
    keep(again)
    assert all(again.exists(names)) and all(again.put(new, [memoryview(bytes(4096))] * 60)) and on_disk() == capacity
    assert stores.owner().table.own_bytes == stores.owner().table.limit_bytes == capacity


def test_a_store_that_is_opened_with_less_capacity_has_no_more_room_than_that(stores: Stores) -> None:
    names, data = [f"page-{i}" for i in range(60)], [memoryview(bytes(4096))] * 60
    storage = stores.open(capacity_bytes=64 * SLOT_BYTES)
    assert all(storage.put(names, data))
    storage.close()
    again = stores.open(capacity_bytes=16 * SLOT_BYTES)
    assert sum(again.exists(names)) == 16
    assert all(put(again, **{name: b"1"}) == [True] for name in names)
    assert stores.owner().table.own_bytes == 16 * SLOT_BYTES


def test_the_file_that_names_a_store_is_whole_after_a_power_cut_and_no_link_and_read_to_its_end_alone(
    stores: Stores,
) -> None:
    class Synced(Disk):
        synced: ClassVar[set[int]] = set()

        def sync(self, file: int) -> None:
            super().sync(file)
            self.synced.add(os.fstat(file).st_ino)

    stores.open(disk=Synced())
    stores.die()
    folder = stores.folder / "here"
    file = folder / STORE_FILE
    assert file.stat().st_ino in Synced.synced and {it.name for it in folder.iterdir()} == {STORE_FILE, "kvarve.json"}
    os.truncate(file, 1 << 40)
    with pytest.raises(StorageError, match="is damaged"):
        stores.open()
    os.truncate(file, 200)
    file.rename(stores.folder / "aside")
    file.symlink_to(stores.folder / "aside")
    with pytest.raises(Damaged, match="symbolic links"):
        stores.open()


def test_a_torn_object_that_is_asked_for_twice_at_once_is_missing_twice(stores: Stores) -> None:
    storage = stores.open()
    put(storage, a=b"1")
    stores.write("a", 0, bytes(100))
    assert storage.get(["a", "a"], [memoryview(bytearray(9)), memoryview(bytearray(9))]) == [None, None]


def test_a_housekeeper_goes_on_after_an_error_that_nobody_has_foreseen(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, kept = iter([KeyError("a mistake of ours")]), Event()

    def look(owner: Owner, *how: Any) -> None:
        for error in looks:
            raise error
        kept.set()

    monkeypatch.setattr(storage_module, "_KEEP_S", 0.01)
    monkeypatch.setattr(storage_module, "_READY_S", 0.0)
    monkeypatch.setattr(Owner, "keep", look)
    stores.open()
    assert kept.wait(PATIENCE_S) and "a mistake of ours" in caplog.text


def test_a_second_process_that_would_be_alone_is_refused(stores: Stores, tmp_path: Path) -> None:
    stores.open()
    url = f"hf3fs://{tmp_path}/here?capacity=1GiB&engine=posix"
    words = f"""from kvarve.storage import open_storage
open_storage({url!r}, label=b"1", description="")"""
    with forks.Popen([sys.executable, "-c", words], stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode and b"is used by another process: several share a store by a map" in errors


def test_a_store_of_another_machine_is_refused_until_its_file_says_otherwise(stores: Stores) -> None:
    put(stores.open(), page=b"1")
    stores.die()
    file = stores.folder / "here" / STORE_FILE
    whole = file.read_text()
    file.write_text("\n".join([*whole.splitlines()[:2], "one process of another machine", ""]))
    with pytest.raises(StorageError, match="used by one process of another machine, and not by one process of") as told:
        stores.open()
    assert "\n" not in str(told.value)
    for said in ("", "\xff", "kvarve hf3fs 1\n"):
        file.write_bytes(said.encode("latin-1"))
        with pytest.raises(StorageError, match=STORE_FILE):
            stores.open()
    file.write_text(whole)
    assert get(stores.open(), "page") == b"1"


def test_a_store_of_the_old_layout_is_refused_in_one_line_and_not_touched(stores: Stores) -> None:
    folder = stores.folder / "here"
    folder.mkdir()
    (folder / "kvarve.json").write_text('{\n "format": "kvarve-hf3fs/1"\n}\n')
    (folder / "store").write_text("kvarve hf3fs 1\n0123\nredis://somewhere/0\n")
    (folder / "slots-8192-7").write_bytes(b"kvarve3s" + bytes(9000))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    url = f"hf3fs://{folder}?capacity=1GiB&engine=posix"
    calls: list[Any] = [lambda: check_storage(url, label=LABEL, description=""), stores.open]
    for call in calls:
        with pytest.raises(StorageError, match=r"another version of kvarve \('kvarve-hf3fs/1'\).*empty this") as told:
            call()
        assert "\n" not in str(told.value)
    (folder / "kvarve.json").write_text("{")
    with pytest.raises(StorageError, match="is damaged"):
        open_storage(url, label=LABEL, description="")
    (folder / "kvarve.json").write_bytes(before[folder / "kvarve.json"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_files_that_are_cut_foreign_or_unreadable_cost_their_own_objects_alone(stores: Stores) -> None:
    class Bad(Disk):
        name = ""

        def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
            if Path(f"/proc/self/fd/{file}").readlink().name == self.name:
                raise OSError(5, "its chain of targets is offline")
            return super().read(file, into, at)

    storage, disk = stores.open(), Bad()
    names = [f"page-{i}" for i in range(8)]
    assert all(storage.put(names, [memoryview(bytes([i]) * 9000) for i in range(8)]))
    paths = {name: stores.path(name) for name in names}
    cut, foreign, disk.name = paths["page-0"], paths["page-1"], paths["page-2"].name
    assert len({cut, foreign, paths["page-2"]}) == 3
    stores.die()
    os.truncate(cut, 5000)
    foreign.write_bytes(b"somebody else's" * 5000)
    notes, link = (
        cut.with_name("slots-8192-1-notes"),
        cut.with_name(cut.name[:-1] + ("1" if cut.name[-1] != "1" else "2")),
    )
    notes.write_text("mine")
    link.symlink_to(notes)
    cost = {name for name, path in paths.items() if path in (cut, foreign) or path.name == disk.name}
    again = stores.open(disk=disk)
    for name in names:
        assert get(again, name) == (None if name in cost else bytes([int(name[-1])]) * 9000), name
    assert notes.read_text() == "mine" and link.is_symlink()
    disk.name = ""
    keep(again)
    assert get(again, "page-2") == bytes([2]) * 9000, "an error may pass"
    assert again.put(names, [memoryview(bytes([i]) * 9000) for i in range(8)]) == [True] * 8
    assert there(again, *names) == " ".join(names)


WRITER = """
import random, sys
from pathlib import Path
from kvarve.storage import open_storage
url, label, seed = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
dice, storage = random.Random(seed), open_storage(url, label=label, description="")
while True:
    number = dice.randrange(400)
    names = [f"page-{(number + at) % 400}" for at in range(dice.randrange(1, 9))]
    data = [memoryview(bytes([int(name[5:]) % 251]) * (2000 + 37 * int(name[5:]))) for name in names]
    done = storage.put(names, data)
    print(*(name for name, stored in zip(names, done) if stored), flush=True)
    if dice.random() < 0.1:
        print("-", *(name for name, gone in zip(names[:1], storage.delete(names[:1])) if gone), flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_process_killed_fifty_times_while_it_stores_loses_nothing_and_no_slot(stores: Stores, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice, url = random.Random(seed), f"hf3fs://{tmp_path}/here?capacity=1TiB&engine=posix"  # so that nothing is evicted
    there_now: set[str] = set()
    for _ in range(50):
        words = [sys.executable, "-c", WRITER, url, LABEL.hex(), str(dice.randrange(1 << 30))]
        with forks.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(dice.randrange(1, 60))]
            process.send_signal(signal.SIGKILL)
            *lines[len(lines) :], last = [*process.stdout.readlines(), ""]
        for line in [*lines, *([last] if last.endswith("\n") else [])]:
            gone, _, names = line.partition("- ") if line.startswith("-") else ("", "", "")
            there_now = there_now - {*names.split()} if gone or names else there_now | {*line.split()} - {"-"}
        storage, maybe = stores.open(threads=2, capacity_bytes=1 << 40), lines[-1].split()[:1]  # which it may delete
        for name in sorted(there_now):
            number = int(name[5:])
            found = get(storage, name, 1 << 15)
            assert found == bytes([number % 251]) * (2000 + 37 * number) or (found is None and [name] == maybe), name
        there_now -= {name for name in maybe if storage.exists([name]) == [False]}
        stores.die()
    storage = stores.open()
    stores.stop_the_clock()
    stores.clock.now += 10 * REST_S
    for at in range(4):
        names = [f"new-{at}-{i}" for i in range(400)]
        assert all(storage.put(names, [memoryview(bytes(2000 + 37 * i)) for i in range(400)]))
        stores.clock.now += 10 * REST_S
    check_slots(stores.owner().table)
    assert BLOCK_BYTES < stores.owner().table.own_bytes <= CAPACITY_BYTES
