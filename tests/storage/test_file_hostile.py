"""Hostile content of a store's folder: no call hangs or crashes, no foreign file is harmed, no wrong page is read.

A file with a name of ours may be a pipe or a folder, as large as a disk, from the year 2262, or simply wrong.
"""

import os
import random
import shutil
import socket
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from file_disks import MIB, Clockwork, everything
from test_crashes import NAMESPACE, STAMPS, Page, Quick, intact, pages, store

from kvarve.cli import main
from kvarve.errors import StorageError
from kvarve.memory.record import record_bytes
from kvarve.storage import FileStorage
from kvarve.storage.file.folder import (
    model_name,
    slab_file,
)
from kvarve.storage.file.header import owner_of
from kvarve.storage.file.processes import process_number
from kvarve.storage.file.table import (
    ENTRY_BYTES,
    STORED,
    Columns,
    Shape,
    pack_header,
    read_entries,
    unpack_header,
    write_entries,
)
from kvarve.testing.suite import OTHER_LABEL, get, put, there

LABEL = NAMESPACE
CAPACITY = 400 << 10
HUGE = 64 << 30
BASE = pages("full", *range(14)) + pages("window", *range(6)) + pages("state", 0, 1)


def opened(folder: Path, label: bytes = LABEL, capacity: int = CAPACITY, **more) -> FileStorage:
    return FileStorage(folder, capacity, label, "model A", **({"threads": 1, "disk": Quick()} | more))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two closed models in one folder."""
    folder = tmp_path_factory.mktemp("source") / "store"
    for label in (OTHER_LABEL, LABEL):
        storage = opened(folder, label)
        assert all(store(storage, BASE))
        storage.close()
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "store"))


def fill(storage: FileStorage) -> None:
    """More than there is capacity for."""
    for first in range(100, 190, 10):
        assert all(store(storage, pages("full", *range(first, first + 10))))


def model(folder: Path) -> Path:
    return folder / "models" / model_name(LABEL)


# --- strict names


@pytest.mark.parametrize(
    "name",
    ["slab-٠٠٠٠٠٧", "slab-²²²²²²", "slab-00000７", "slab-000007\n", "\nslab-000007", "slab-7", "slab-0000007"]
    + [
        "slab-000007.table\n",
        "slab-000007.TABLE",
        "slab-000007.table.table",
        "slab-032767",
        "slab-999999",
        "slab--00001",
    ]
    + ["slab-000007.quarantined", "Slab-000007", "slab-000007 "],
)
def test_what_is_almost_named_as_a_slab_is_none(folder, name):
    assert slab_file(name) is None
    (model(folder) / name).write_bytes(b"mine")
    (model(folder) / f"{name}.table").write_bytes(b"mine") if slab_file(f"{name}.table") is None else None
    storage = opened(folder)
    assert all(store(storage, pages("full", *range(100, 180))))
    storage.close()
    assert (model(folder) / name).read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["process-٣", "process-²", "process-1\n", "process-01", "process-4096", "process--1"])
def test_what_is_almost_named_as_a_process_is_none(folder, name):
    assert process_number(name) is None
    (model(folder) / name).write_bytes(b"mine")
    storage = opened(folder)
    assert storage._folder.alone() and storage._folder.number == 0
    storage.close()
    assert (model(folder) / name).read_bytes() == b"mine"


def test_names_of_ours_are_told_from_their_numbers_and_back():
    for number in (0, 7, 32766):
        assert slab_file(f"slab-{number:06}") == (number, False)
        assert slab_file(f"slab-{number:06}.table") == (number, True)
    assert [process_number(f"process-{number}") for number in (0, 10, 4095)] == [0, 10, 4095]


# --- something else in the place of a file


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)


def folder_there(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "mine").write_text("precious")


def endpoint(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as it:
        here = Path.cwd()
        os.chdir(path.parent)  # their paths are short
        try:
            it.bind(path.name)
        finally:
            os.chdir(here)


def huge(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, HUGE)


FILES = ["slab-000000", "slab-000000.table", "changes", "clock", "process-0", "model.json", "slab-000009.table"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", [pipe, folder_there, endpoint, huge], ids=lambda what: what.__name__)
def test_nothing_waits_for_what_is_no_file_or_as_large_as_a_disk(folder, name, what):
    """Opening a pipe waited for its other end; a table of 64 GiB was read."""
    what(model(folder) / name)
    other = opened(folder, OTHER_LABEL)
    assert intact(other, BASE) == set(BASE), "another model is not affected"
    other.close()
    refused = ""
    try:
        storage = opened(folder)
        assert set(BASE) - intact(storage, BASE) <= set(pages("full", *range(14)))
        assert store(storage, pages("full", 100, 101)) == [True, True]
        assert intact(storage, pages("full", 100, 101)) == set(pages("full", 100, 101))
        storage.close()
    except StorageError as error:
        refused = str(error)
        assert "is no regular file" in refused and name in refused and "\n" not in refused
    assert bool(refused) == (what is not huge and name in ("changes", "clock", "model.json"))
    for does in ("stat", "ls", "verify"):
        assert main(["storage", does, str(folder)]) in (0, 1)


@pytest.mark.parametrize("name", ["kvarve.json", "kvarve.lock"])
@pytest.mark.parametrize("what", [pipe, folder_there, endpoint], ids=lambda what: what.__name__)
def test_a_folder_whose_own_files_are_no_files_is_refused_at_once(folder, name, what, capsys):
    what(folder / name)
    with pytest.raises(StorageError, match=f"{name} is no regular file"):
        opened(folder)
    for does in ("stat", "ls", "verify"):
        assert (main(["storage", does, str(folder)]) == 2) == (name == "kvarve.json")


def test_a_table_of_another_length_than_its_headers_say_is_left_alone_unread(folder):
    """Its header names as many slots as its length allows, or more than any slab has."""
    table = model(folder) / "slab-000000.table"
    for slots in (1 << 22, 1 << 28, (1 << 63) // 4096, 1):
        shape = Shape(4096, slots)
        for at in (0, HUGE - ENTRY_BYTES):
            with table.open("r+b") as file:
                file.seek(at)
                file.write(pack_header(shape, owner_of(LABEL), 77))
        os.truncate(table, HUGE)
        storage = opened(folder)
        assert 0 not in storage._index.slabs
        storage.close()
        assert table.stat().st_size == HUGE
    before = time.thread_time()
    opened(folder).close()
    assert time.thread_time() - before < 60, "64 GiB were read"


def test_a_slab_that_is_longer_than_its_header_says_is_cut_to_that(folder):
    slab = model(folder) / "slab-000000"
    size = slab.stat().st_size
    os.truncate(slab, HUGE)
    storage = opened(folder)
    assert slab.stat().st_size == size
    assert intact(storage, BASE) == set(BASE)
    assert storage._folder.bytes() <= CAPACITY
    storage.close()


# --- entries with a valid check and impossible values


def forge(folder: Path, row: int, **said) -> None:
    """Write an entry with a valid check."""
    table = model(folder) / "slab-000000.table"
    raw = table.read_bytes()
    found = unpack_header(raw[:ENTRY_BYTES], owner_of(LABEL))
    assert found is not None
    shape, identity = found
    at = shape.entry_at(row)
    now = read_entries(raw[at : at + ENTRY_BYTES], identity, row, shape.slot_bytes)
    name = said.pop("name", now.names[0] if now.names else "")
    for column, value in said.items():
        getattr(now, column)[0] = value
    columns = Columns(*(getattr(now, it) for it in Columns.__dataclass_fields__ if it != "names"), [name])
    with table.open("r+b") as file:
        file.seek(at)
        file.write(write_entries(columns, identity, np.array([row])))


YEAR_2262, LATEST = 9_214_646_400 * 10**9, (1 << 63) - 1


@pytest.mark.parametrize("at", [YEAR_2262, LATEST, -1, -(1 << 63), 0])
@pytest.mark.parametrize("ttl_s", [None, 3600.0])
def test_times_that_cannot_be_are_now_and_the_store_goes_on(folder, at, ttl_s):
    """In 2262 nanoseconds do not fit into 64 bits any more: every put raised OverflowError."""
    for row in range(3):
        forge(folder, row, stored=at, used=at, uses=at)
    storage = opened(folder, ttl_s=ttl_s)
    assert abs(storage._index.clock.now_ns() - time.time_ns()) < 10**14
    fill(storage)
    assert intact(storage, pages("full", 188, 189)) == set(pages("full", 188, 189))
    assert storage.usage().objects == len(storage._index.entries)
    used = np.concatenate([slab.used[slab.state == STORED] for slab in storage._index.slabs.values()])
    assert used.max() <= storage._index.clock.now_ns() + 10**9
    storage.close()


def test_what_comes_from_the_future_is_as_old_as_what_comes_now(folder):
    disk = Clockwork()
    forge(folder, 0, stored=YEAR_2262, used=YEAR_2262)
    storage = opened(folder, disk=disk, ttl_s=3600.0)
    name = storage._index.slabs[0].names[0]
    assert storage.exists([name]) == [True]
    disk.elapse(3601)
    assert storage.exists([name]) == [False], "nor is it kept for ever"
    storage.close()


@pytest.mark.parametrize("wall_ns", [YEAR_2262, 1 << 63, 1 << 70, -5])
def test_a_wall_clock_that_is_set_to_what_cannot_be_ends_nothing(folder, wall_ns):
    disk = Clockwork()
    disk.wall = wall_ns
    (model(folder) / "clock").unlink()
    storage = opened(folder, disk=disk)
    assert intact(storage, BASE) == set(BASE)
    fill(storage)
    storage.close()
    disk.wall = 1_700_000_000 * 10**9
    storage = opened(folder, disk=disk)
    assert intact(storage, pages("full", 189)) == set(pages("full", 189))
    storage.close()


@pytest.mark.parametrize("then", [YEAR_2262, LATEST, -1, -(1 << 63)])
@pytest.mark.parametrize("same_boot", [True, False])
def test_a_clock_that_says_what_cannot_be_ends_nothing(folder, then, same_boot):
    disk = Clockwork()
    pair = struct.Struct("<16sqqqI")
    for since_boot, wall in ((then, disk.wall), (disk.up, then), (-(1 << 63), LATEST)):
        plain = pair.pack(disk.machine if same_boot else bytes(16), since_boot, wall, then, 0)[:-4]
        (model(folder) / "clock").write_bytes(plain + zlib.crc32(plain).to_bytes(4, "little"))
        storage = opened(folder, disk=disk)
        fill(storage)
        assert intact(storage, pages("full", 189)) == set(pages("full", 189))
        storage.close()
        assert main(["storage", "stat", str(folder)]) == 0


@pytest.mark.parametrize("name", ["a\nb", "\n", "a\0b", "", "..", ".", "a b", "a" * 200])
def test_an_object_with_a_name_that_none_can_have_is_none_and_hides_no_other(folder, name):
    """Names were joined with newlines: a newline in one of them shifted all later names."""
    legal = name == "a" * 200
    forge(folder, 2, name=name)
    storage = opened(folder)
    assert len(intact(storage, BASE)) == len(BASE) - 1
    assert storage.usage().lost == (0 if legal else 1)
    assert storage.usage().objects == len(BASE) - (not legal)
    for place in storage._index.entries.values():
        slab, row = storage._index.slabs[place >> 32], place & 0xFFFFFFFF
        assert storage._index.entries[slab.names[row]] == place
    storage.close()


def test_an_entry_that_is_longer_than_its_slot_or_of_no_state_is_none(folder):
    forge(folder, 0, length=4097)
    forge(folder, 1, length=-1)
    forge(folder, 2, state=77)
    forge(folder, 3, generation=(1 << 32) - 1)
    storage = opened(folder)
    assert len(intact(storage, BASE)) == len(BASE) - 3
    fill(storage)
    storage.close()


def test_changes_of_slabs_that_cannot_be_do_not_grow_the_file_by_which_processes_hear_of_each_other(folder):
    shape = Shape(4096, 1)
    for number in (32766, 32767, 999_999):
        path = model(folder) / f"slab-{number:06}"
        path.write_bytes(bytes(shape.slots_bytes))
        table = bytearray(shape.table_bytes)
        for at in shape.headers_at:
            table[at : at + 56] = pack_header(shape, owner_of(LABEL), 77)
        path.with_name(path.name + ".table").write_bytes(table)
    huge(model(folder) / "changes")
    storage = opened(folder, capacity=16 * MIB)
    numbers = set(storage._index.slabs)
    assert 32766 in numbers and max(numbers) == 32766
    assert intact(storage, BASE) == set(BASE)
    assert (model(folder) / "changes").stat().st_size == 128 * 32768
    storage.close()


# --- the fuzzer


class Vandal:
    """Does random harm to a store; the foreign files that it makes have to survive."""

    def __init__(self, folder: Path, outside: Path, seed: int) -> None:
        self.rng, self.folder, self.outside = random.Random(seed), folder, outside
        self.precious: list[Path] = []
        self.did: list[str] = []
        outside.mkdir()

    def run(self) -> None:
        harms = [
            self.something_else,
            self.bytes,
            self.length,
            self.name,
            self.entry,
            self.header,
            self.clock,
            self.mode,
        ]
        for _ in range(self.rng.randint(1, 4)):
            harm: Callable[[], None] = self.rng.choice(harms)
            harm()

    def some_file(self) -> Path:
        found = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return self.rng.choice(sorted(found))

    def mine(self) -> Path:
        path = self.outside / f"precious-{len(self.precious)}"
        path.write_bytes(self.rng.randbytes(self.rng.choice([0, 10, 5000])))
        self.precious.append(path)
        return path

    def something_else(self) -> None:
        path = self.some_file()
        what = self.rng.choice(["pipe", "folder", "socket", "link", "hard link", "loop", "nowhere", "device"])
        self.did.append(f"{what} for {path.name}")
        if what == "folder":
            folder_there(path)
            self.precious.append(path / "mine")
        elif what == "pipe":
            pipe(path)
        elif what == "socket":
            endpoint(path)
        elif what == "hard link":
            path.unlink()
            path.hardlink_to(self.mine())
        else:
            path.unlink()
            to = {"link": self.mine(), "loop": path, "nowhere": path / "nowhere", "device": Path("/dev/zero")}
            path.symlink_to(to[what])

    def bytes(self) -> None:
        path = self.some_file()
        self.did.append(f"bytes of {path.name}")
        data = bytearray(path.read_bytes())
        for _ in range(self.rng.choice([1, 1, 20])):
            if data:
                data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        path.write_bytes(self.rng.choice([data, data, b"", self.rng.randbytes(300), b"\n" * 100_000]))

    def length(self) -> None:
        path = self.some_file()
        self.did.append(f"length of {path.name}")
        size = path.stat().st_size
        os.truncate(path, self.rng.choice([0, size // 2, size + 1, size + 4096, HUGE, max(0, size - 1)]))

    def name(self) -> None:
        digits = self.rng.choice(["٣", "²", "0", "9", "\n", "-"])
        names = [f"slab-{digits * 6}", f"slab-{digits * 6}.table", f"process-{digits}", "slab-000000"]
        name = self.rng.choice([*names, "slab-000001.table", "model.json~", "kvarve.json~", "0" * 16])
        place = self.rng.choice([self.folder, self.folder / "models", model(self.folder)])
        self.did.append(f"name {name!r} in {place.name}")
        if not os.path.lexists(place / name):
            self.rng.choice([folder_there, pipe, lambda path: path.symlink_to(self.mine())])(place / name)

    def entry(self) -> None:
        self.did.append("entry")
        numbers = [0, -1, 1, 255, LATEST, -(1 << 63), YEAR_2262, self.rng.randrange(1 << 62)]
        said = {it: self.rng.choice(numbers) for it in ("length", "stored", "used", "uses") if self.rng.random() < 0.5}
        if self.rng.random() < 0.5:
            said["state"] = self.rng.choice([0, 1, 2, 3, 4, 5, 255])
        if self.rng.random() < 0.5:
            said["name"] = self.rng.choice(["a\nb", "\0", "x/y", BASE[3].name, "n" * 200])
        try:
            forge(self.folder, self.rng.randrange(14), **said)
        except (OSError, AssertionError, ValueError):
            self.did.append("(in vain)")

    def header(self) -> None:
        self.did.append("header")
        shape = Shape(self.rng.choice([0, 4096, 5000, 1 << 34, 1 << 60]), self.rng.choice([0, 1, 15, 1 << 22, 1 << 40]))
        table = model(self.folder) / "slab-000001.table"
        for at in self.rng.choice([(0,), (0, 4096 - ENTRY_BYTES)]):
            if table.is_file() and not table.is_symlink():
                with table.open("r+b") as file:
                    file.seek(at)
                    file.write(pack_header(shape, owner_of(LABEL), self.rng.randrange(1 << 64)))

    def clock(self) -> None:
        self.did.append("clock")
        numbers = [self.rng.choice([0, -1, LATEST, -(1 << 63), YEAR_2262]) for _ in range(3)]
        plain = struct.pack("<16sqqq", self.rng.choice([Quick().boot(), bytes(16)]), *numbers)
        path = model(self.folder) / "clock"
        if path.is_file() and not path.is_symlink():
            path.write_bytes(plain + zlib.crc32(plain).to_bytes(4, "little"))

    def mode(self) -> None:
        path = self.rng.choice([self.some_file(), model(self.folder), self.folder])
        mode = self.rng.choice([0o666, 0o777, 0o640, 0o755])
        self.did.append(f"mode {mode:o} of {path.name}")
        path.chmod(mode | 0o100 if path.is_dir() else mode)


def live(folder: Path, seed: int) -> None:
    """All calls of a store; one that cannot succeed raises StorageError."""
    rng = random.Random(seed)
    for label in rng.sample([LABEL, OTHER_LABEL], 2):
        storage = None
        try:
            storage = opened(folder, label, ttl_s=rng.choice([None, 3600.0]), quota_bytes=rng.choice([None, CAPACITY]))
            for turn in range(3):
                some = pages("full", *range(100 * turn, 100 * turn + 12)) + pages("state", turn)
                stored = [page for page, done in zip(some, store(storage, some), strict=True) if done]
                assert len(stored) > 4
                assert {page.name for page in stored} >= {page.name for page in checked(storage, stored)}
                checked(storage, BASE)
                storage.exists([page.name for page in BASE])
                storage.delete([rng.choice(BASE).name])
            assert storage._folder.bytes() <= CAPACITY
        except StorageError as error:
            assert "\n" not in str(error)
        finally:
            if storage is not None:
                storage.close()
    for does in ("stat", "ls", "verify", "gc"):
        assert main(["storage", does, str(folder)]) in (0, 1, 2)


def checked(storage: FileStorage, some: list[Page]) -> list[Page]:
    """Pages that are read with a valid checksum are the right ones. Under a forged name any page may be read."""
    records = [memoryview(bytearray(record_bytes(20_000))) for _ in some]
    sizes = storage.get([page.name for page in some], records)
    found = []
    for page, record, size in zip(some, records, sizes, strict=True):
        if size is not None and size <= len(record) and STAMPS[page.pool].intact(record[:size], page.key):
            assert record[:size] == page.record()
            found.append(page)
    return found


SEEDS = 240
SHORT = 20


@pytest.mark.parametrize(
    ("first", "seeds"),
    [
        pytest.param(0, SHORT, id="known"),
        pytest.param(SHORT, SEEDS, id="more", marks=pytest.mark.long),
        pytest.param(time.time_ns() % 1_000_000, SEEDS, id="new", marks=pytest.mark.long),
    ],
)
def test_no_harm_to_a_store_hangs_it_or_kills_it_or_reaches_what_is_not_ours(source, tmp_path, first, seeds):
    for seed in range(first, first + seeds):
        work = tmp_path / str(seed)
        work.mkdir()
        folder = Path(shutil.copytree(source, work / "store"))
        vandal = Vandal(folder, work / "outside", seed)
        vandal.run()
        before = everything(work / "outside", *(path for path in vandal.precious if path.exists()))
        try:
            live(folder, seed)
            assert everything(work / "outside", *(path for path in vandal.precious if path.exists())) == before
        except BaseException:
            print(f"seed {seed}: {vandal.did}")
            raise
        shutil.rmtree(work)


@pytest.mark.parametrize("place", ["kvarve.lock", "models/{}/process-7", "models/{}/clock", "models/{}/changes"])
def test_a_small_file_as_long_as_a_disk_is_no_reason_to_remove_what_is_stored(folder, place):
    """It counted against the capacity: the next opening removed every model, and nothing could be stored."""
    with (folder / place.format(model_name(OTHER_LABEL))).open("ab") as file:
        file.truncate(HUGE)
    storage = opened(folder)
    assert intact(storage, BASE) == set(BASE)
    fill(storage)
    storage.close()


def test_names_of_two_objects_never_get_mixed_up_by_what_stands_between(folder):
    forge(folder, 5, name="x\ny\nz")
    storage = opened(folder, capacity=MIB)
    assert put(storage, a=b"1") == [True]
    assert (get(storage, "a"), there(storage, "y", "z")) == (b"1", "")
    storage.close()
