"""Hostile content of a store's folder: no call hangs or crashes, no foreign file is harmed, no wrong page is read.

A file with a name of ours may be a pipe or a folder, as large as a disk, from the year 2262, or simply wrong.
"""

import os
import random
import re
import shutil
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import inspect_files
import numpy as np
import pytest
from file_disks import MIB, Clockwork, everything, model_of
from file_pages import NAMESPACE, Page, Quick, goes_on, intact, pages, store

from kvarve.cli.main import main
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file._table import (
    ENTRY_BYTES,
    Columns,
    Header,
    Shape,
    owner_of,
    read_entries,
    read_header,
    write_entries,
)
from kvarve.testing.suite import OTHER_LABEL, there

LABEL = NAMESPACE
CAPACITY = 400 << 10
HUGE = 64 << 30
NOW = time.time_ns() % 1_000_000
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
    for first in range(100, 150, 10):
        assert all(store(storage, pages("full", *range(first, first + 10))))


def model(folder: Path) -> Path:
    return model_of(folder, LABEL)


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


def link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(precious(path))


def hard_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.hardlink_to(precious(path))


def precious(path: Path) -> Path:
    """A file beside the store."""
    it = next(each for each in path.parents if each.name == "store").with_name("precious")
    it.write_bytes(bytes(range(256)) * 64)
    return it


def huge(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, HUGE)


FILES = ["slab-000000", "slab-000000.table", "changes", "clock", "process-0", "model.json", "slab-000009.table"]
KINDS = (pipe, folder_there, endpoint, huge, link, hard_link)
SHORT = {(name, KINDS[(number + step) % 6]) for number, name in enumerate(FILES) for step in (0, 4)}
REFUSED = re.compile(r"is no regular file|is a link|has 2 names")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(name, what, marks=() if (name, what) in SHORT else pytest.mark.long)
        for name in FILES
        for what in KINDS
    ],
)
def test_nothing_waits_for_or_changes_what_is_no_file_of_ours_or_as_large_as_a_disk(folder, name, what):
    """Opening a pipe waited for its other end; a table of 64 GiB was read."""
    what(model(folder) / name)
    mine = [*folder.parent.glob("precious"), *folder.rglob("mine")]
    before, refused = everything(*mine), ""
    other = opened(folder, OTHER_LABEL)
    assert intact(other, BASE) == set(BASE), "another model is not affected"
    other.close()
    try:
        storage = opened(folder)
        assert set(BASE) - intact(storage, BASE) <= set(pages("full", *range(14)))
        assert store(storage, pages("full", 100, 101)) == [True, True]
        assert intact(storage, pages("full", 100, 101)) == set(pages("full", 100, 101))
        storage.close()
    except StorageError as error:
        refused = str(error)
        assert REFUSED.search(refused) and name in refused and "\n" not in refused
    assert bool(refused) == (what is not huge and name in ("changes", "clock", "model.json"))
    for words in (["stat"], ["ls"], ["verify"], ["gc"], ["drop", "--all", "--yes"]):
        assert main(["storage", words[0], str(folder), *words[1:]]) in (0, 1, 2)
    assert everything(*mine) == before


@pytest.mark.parametrize(
    ("name", "what"),
    [("kvarve.json", pipe), ("kvarve.lock", link), ("kvarve.json", hard_link), ("kvarve.lock", folder_there)],
)
def test_a_folder_whose_own_files_are_no_files_is_refused_at_once(folder, name, what):
    what(folder / name)
    before = everything(*folder.parent.glob("precious"))
    with pytest.raises(StorageError, match=REFUSED) as refusal:
        opened(folder)
    assert name in str(refusal.value)
    for does in ("stat", "ls", "verify"):
        assert (main(["storage", does, str(folder)]) == 2) == (name == "kvarve.json")
    assert everything(*folder.parent.glob("precious")) == before


def test_a_table_of_another_length_than_its_headers_say_is_left_alone_unread(folder):
    """Its header names as many slots as its length allows, or more than any slab has."""
    table = model(folder) / "slab-000000.table"
    for slots in (1 << 22, 1 << 28, (1 << 63) // 4096, 1):
        shape = Shape(4096, slots)
        for at in (0, HUGE - ENTRY_BYTES):
            with table.open("r+b") as file:
                file.seek(at)
                file.write(Header(owner_of(LABEL), 77, shape).packed())
        os.truncate(table, HUGE)
        storage = opened(folder)  # in no time: 64 GiB are not read
        assert 0 not in inspect_files.slabs(storage)
        storage.close()
        assert table.stat().st_size == HUGE


def test_a_slab_that_is_longer_than_its_header_says_is_cut_to_that(folder):
    slab = model(folder) / "slab-000000"
    size = slab.stat().st_size
    os.truncate(slab, HUGE)
    storage = opened(folder)
    assert slab.stat().st_size == size
    assert intact(storage, BASE) == set(BASE)
    assert inspect_files.file_bytes(storage) <= CAPACITY
    storage.close()


# --- entries with a valid check and impossible values


def forge(folder: Path, row: int, **said) -> None:
    """Write an entry with a valid check."""
    table = model(folder) / "slab-000000.table"
    raw = table.read_bytes()
    found = read_header(raw[:ENTRY_BYTES])
    assert found is not None
    _, identity, shape = found
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


@pytest.mark.parametrize(("at", "ttl_s"), [(YEAR_2262, None), (LATEST, 3600.0), (-(1 << 63), None), (0, 3600.0)])
def test_times_that_cannot_be_are_now_and_the_store_goes_on(folder, at, ttl_s):
    """In 2262 nanoseconds do not fit into 64 bits any more: every put raised OverflowError."""
    for row in range(3):
        forge(folder, row, stored=at, used=at, uses=at)
    storage = opened(folder, ttl_s=ttl_s)
    assert abs(inspect_files.now_ns(storage) - time.time_ns()) < 10**14
    fill(storage)
    assert intact(storage, pages("full", 148, 149)) == set(pages("full", 148, 149))
    lies = inspect_files.places(storage)
    assert storage.usage().objects == len(lies)
    assert max(place.facts[2] for place in lies.values()) <= inspect_files.now_ns(storage) + 10**9
    storage.close()


def test_what_comes_from_the_future_is_as_old_as_what_comes_now(folder):
    disk = Clockwork()
    forge(folder, 0, stored=YEAR_2262, used=YEAR_2262)
    storage = opened(folder, disk=disk, ttl_s=3600.0)
    (name,) = (name for name, it in inspect_files.places(storage).items() if (it.slab, it.row) == (0, 0))
    assert storage.exists([name]) == [True]
    disk.elapse(3601)
    assert storage.exists([name]) == [False], "nor is it kept for ever"
    storage.close()


@pytest.mark.parametrize("wall_ns", [YEAR_2262, 1 << 70, -5])
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
    assert intact(storage, pages("full", 149)) == set(pages("full", 149))
    storage.close()


@pytest.mark.parametrize("same_boot", [True, False])
def test_a_clock_that_says_what_cannot_be_ends_nothing(folder, same_boot):
    disk, pair = Clockwork(), struct.Struct("<16sqqqI")
    for since_boot, wall, then in (
        (YEAR_2262, disk.wall, LATEST),
        (disk.up, -1, YEAR_2262),
        (-(1 << 63), LATEST, -(1 << 63)),
    ):
        plain = pair.pack(disk.machine if same_boot else bytes(16), since_boot, wall, then, 0)[:-4]
        (model(folder) / "clock").write_bytes(plain + zlib.crc32(plain).to_bytes(4, "little"))
        storage = opened(folder, disk=disk)
        fill(storage)
        assert intact(storage, pages("full", 149)) == set(pages("full", 149))
        storage.close()
    assert main(["storage", "stat", str(folder)]) == 0


UNLIKELY = [
    *({"name": name} for name in ("x\ny\nz", "a\0b", "", "..")),
    {"length": 4097},
    {"length": -1},
    {"state": 77},
]


@pytest.mark.parametrize("said", [*UNLIKELY, {"name": "a" * 200}])
def test_an_object_with_a_name_that_none_can_have_is_none_and_hides_no_other(folder, said):
    """Names were joined with newlines: a newline in one of them shifted all later names."""
    legal = said == {"name": "a" * 200}
    forge(folder, 2, **said)
    storage = opened(folder)
    assert len(intact(storage, BASE)) == len(BASE) - 1
    assert storage.usage().lost == (0 if legal else 1)
    assert storage.usage().objects == len(BASE) - (not legal)
    assert there(storage, "x", "y", "z") == ""
    storage.close()


def test_changes_of_slabs_that_cannot_be_do_not_grow_the_file_by_which_processes_hear_of_each_other(folder):
    shape = Shape(4096, 1)
    for number in (32766, 32767, 999_999):
        path = model(folder) / f"slab-{number:06}"
        path.write_bytes(bytes(shape.slots_bytes))
        table = bytearray(shape.table_bytes)
        for at in shape.headers_at:
            table[at : at + 56] = Header(owner_of(LABEL), 77, shape).packed()
        path.with_name(path.name + ".table").write_bytes(table)
    huge(model(folder) / "changes")
    storage = opened(folder, capacity=16 * MIB)
    numbers = {*inspect_files.slabs(storage)}
    assert 32766 in numbers and max(numbers) == 32766
    assert intact(storage, BASE) == set(BASE)
    assert (model(folder) / "changes").stat().st_size == 128 * 32768
    storage.close()


# --- random damage


@dataclass(frozen=True)
class Slot:
    """Where a page lies, in files below the folder."""

    page: Page
    place: inspect_files.Place
    path: Path
    table: Path


def slots_of(folder: Path, label: bytes = LABEL) -> list[Slot]:
    storage = opened(folder, label)
    lies = [(page, inspect_files.place(storage, page.name)) for page in BASE]
    storage.close()
    return [Slot(page, it, it.path.relative_to(folder), it.table.relative_to(folder)) for page, it in lies]


def hit_by(slots: Sequence[Slot], path: Path, at: int) -> set[Page]:
    """The pages that a change of this byte may harm: of a slot, an entry, or with a table's header a whole slab."""
    return {
        slot.page
        for slot in slots
        if (path == slot.path and 0 <= at - slot.place.at < slot.place.shape.slot_bytes)
        or (path == slot.table and (at < ENTRY_BYTES or 0 <= at - slot.place.entry_at < ENTRY_BYTES))
    }


def harm(folder: Path, slots: Sequence[Slot], rng: random.Random) -> set[Page]:
    """A random damage; returns the pages that it may have hit."""
    kind, one = rng.choice(["flip", "truncate", "zeros", "small files", "something else"]), rng.choice(slots)
    beside = {slot.page for slot in slots if slot.path == one.path}
    name = rng.choice([one.path, one.table])
    path = folder / name
    if kind == "small files":
        path.with_name(rng.choice(["changes", "clock"])).write_bytes(rng.randbytes(rng.randrange(300)))
        return set()
    if kind == "something else" or not path.is_file():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        rng.choice([pipe, folder_there, endpoint, link, hard_link])(path)
        return beside
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        return hit_by(slots, name, at)
    if kind == "truncate":
        os.truncate(path, at)
    else:
        path.write_bytes(data[:at] + bytes(len(data) - at))
    end = one.place.shape.slot_bytes
    return {it.page for it in slots if it.page in beside and (name == one.table or it.place.at + end > at)}


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(seed, seed + 1) for seed in range(4)),
        *(pytest.param(range(seed, seed + 74), id=f"{seed}", marks=pytest.mark.long) for seed in range(4, 300, 74)),
        *(pytest.param(range(NOW + n, NOW + n + 75), id=f"new-{n}", marks=pytest.mark.long) for n in range(0, 300, 75)),
    ],
)
def test_damage_costs_what_it_hits_and_hangs_nothing_and_reaches_nothing_that_is_not_ours(source, tmp_path, seeds):
    slots = slots_of(source)
    for seed in seeds:
        folder, rng = Path(shutil.copytree(source, tmp_path / str(seed) / "store")), random.Random(seed)
        hit = set().union(*(harm(folder, slots, rng) for _ in range(rng.randint(1, 2))))
        mine = [*folder.parent.glob("precious"), *folder.rglob("mine")]
        before, storage = everything(*mine), opened(folder)
        missing = set(BASE) - intact(storage, BASE) - hit
        assert not missing, f"seed {seed}: {missing} are gone, hit were {hit}"
        linked = sum(max(1, path.stat().st_nlink - 1) * path.stat().st_size for path in mine)
        goes_on(storage, folder, CAPACITY + linked)
        storage.close()
        for does in ("stat", "ls", "verify", "gc"):
            assert main(["storage", does, str(folder)]) in (0, 1)
        assert everything(*mine) == before
        shutil.rmtree(folder.parent)


def test_pages_that_another_model_left_under_the_same_names_are_not_accepted(source, tmp_path):
    slots = slots_of(source)
    opened(tmp_path / "b", OTHER_LABEL).close()
    for path in (slots[0].path, slots[0].table):
        shutil.copy(source / path, model_of(tmp_path / "b", OTHER_LABEL) / path.name)
    other = opened(tmp_path / "b", OTHER_LABEL)
    assert not any(other.exists([slot.page.name for slot in slots]))
    goes_on(other, tmp_path / "b", CAPACITY)
    other.close()


def test_a_small_file_as_long_as_a_disk_is_no_reason_to_remove_what_is_stored(folder):
    """It counted against the capacity: the next opening removed every model, and nothing could be stored."""
    for path in (
        folder / "kvarve.lock",
        *(model_of(folder, OTHER_LABEL) / name for name in ("process-7", "clock", "changes")),
    ):
        with path.open("ab") as file:
            file.truncate(HUGE)
    storage = opened(folder)
    assert intact(storage, BASE) == set(BASE)
    fill(storage)
    storage.close()
