"""A store that can only be read is read: on a file system that takes no writes, or because its operator wants that."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import inspect_files
import pytest
from file_disks import (
    MIB,
    Open,
    Rigged,
    RiggedClockwork,
    Untouched,
    WithoutSync,
    everything,
    model_of,
    quietly,
    trouble,
)
from file_pages import intact, pages, store
from processes import until

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import FileStorage, check_storage, open_storage
from kvarve.storage.file.disk import Directory, Disk
from kvarve.storage.urls import only_read, parse_url
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

NAMES = [f"page-{i}" for i in range(40)]


class Refusing(Rigged):
    """From `refuses` on, and the `after`-th write from then, the file system takes no writes, and does not say so."""

    refuses = False
    after = 0

    def happens(self, call: str, name: str = "", at: int = 0) -> None:
        if self.refuses and call in ("write", "sync", "allocate", "resize", "make_folder", "rename", "unlink"):
            self.after -= 1
            if self.after < 0:
                raise trouble(errno.EROFS)

    def open(self, folder: Directory, name: str, *, create: bool = False, read_only: bool = False, **how: bool) -> int:
        if create or (not read_only and not self.after > 0):
            self.happens("write")
        return super().open(folder, name, create=create, read_only=read_only, **how)


def data(name: str) -> bytes:
    return name.encode() * 500


def fill(storage: FileStorage, names: list[str]) -> None:
    assert put(storage, **{name: data(name) for name in names}) == [True] * len(names)


def right(storage: FileStorage, names: list[str]) -> int:
    """How many objects are there; each has its bytes."""
    found = [name for name in names if storage.exists([name]) == [True]]
    assert all(get(storage, name) == data(name) for name in found)
    return len(found)


@pytest.fixture
def filled(opened: Open, folder: Path) -> Path:
    """A closed store."""
    storage = opened()
    fill(storage, NAMES)
    storage.close()
    return folder


# --- a file system that takes no writes


def test_a_store_on_a_file_system_that_takes_no_writes_gives_what_it_has(filled, opened, caplog) -> None:
    disk = Refusing()
    disk.refuses = True
    before = everything(filled)
    storage = opened(disk=disk)
    assert right(storage, NAMES) == len(NAMES)
    assert put(storage, **{"page-0": b"1", "more": b"2"}) == [True, False], "what is there is stored"
    storage.touch(NAMES)
    usage = storage.usage()
    assert (usage.read_only, usage.objects, usage.capacity_bytes) == (True, len(NAMES), None)
    with pytest.raises(ConfigError, match="can only be read"):
        storage.drop()
    assert right(storage, NAMES) == len(NAMES)
    assert storage.delete(["page-3", "page-3", "more"]) == [True, False, False], "a damaged page is not read again"
    assert storage.exists(["page-3", "page-4"]) == [False, True] and get(storage, "page-3") is None
    assert right(opened(disk=disk), NAMES) == len(NAMES), "it is missing for this process"
    assert caplog.text.count("nothing is stored, and what is there can be read") == 2 and str(filled) in caplog.text
    storage.close()
    with pytest.raises(StorageError, match="closed"):
        storage.exists(NAMES)
    assert everything(filled) == before


@pytest.mark.parametrize("after", [0, 3, 9, 18])
def test_a_file_system_that_takes_no_more_writes_costs_only_what_was_to_be_written(opened, after, caplog) -> None:
    """As ext4 after an error, while a server runs: its breaker opened, and the pages were lost with the writes."""
    disk = Refusing()
    storage = opened(disk=disk, threads=1)
    fill(storage, NAMES[:20])
    disk.refuses, disk.after = True, after
    told = [storage.put([name], [memoryview(data(name))]) for name in NAMES[20:]]
    assert [False] in told
    assert right(storage, NAMES[:20]) == 20
    assert caplog.text.count("has become read-only") == 1
    assert storage.usage().read_only and not storage.put(["large"], [memoryview(bytes(9000))])[0]
    assert storage.delete(["page-1"]) == [True]
    disk.refuses = False
    fill(storage, NAMES[20:])
    assert not storage.usage().read_only
    assert storage.exists(["page-1"]) == [True], "it could not be removed"
    assert right(storage, NAMES) == len(NAMES)
    assert storage.delete(["page-1"]) == [True]
    storage.close()
    assert right(opened(), NAMES) == len(NAMES) - 1


def test_where_nothing_can_be_written_and_nothing_is_there_opening_is_refused(folder, opened, monkeypatch) -> None:
    monkeypatch.setattr(Disk, "is_read_only", lambda disk, path: True)
    with pytest.raises(StorageError, match="no such folder, and none can be made"):
        opened()
    assert not folder.exists()


def test_without_permission_to_write_opening_is_refused_and_says_what_to_give(filled, opened, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(StorageError, match=r"no permission .*give read_only=yes"):
        opened()
    assert right(opened(read_only=True), NAMES) == len(NAMES)


# --- as the operator wants


def reader(opened: Open, **more: Any) -> FileStorage:
    return opened(0, disk=Untouched(), read_only=True, **more)


def test_a_reader_finds_all_that_others_have_stored_and_touches_nothing(filled, opened) -> None:
    before = everything(filled)
    one, other = reader(opened), reader(opened)
    assert right(one, NAMES) == right(other, NAMES) == len(NAMES)
    assert put(one, more=b"1") == [False]
    assert one.delete(["page-1"]) == [True] and other.exists(["page-1"]) == [True]
    one.touch(NAMES)
    one.close()
    assert everything(filled) == before
    writer = opened()
    assert inspect_files.is_alone(writer), "readers do not count as having the store open"


def test_a_reader_follows_a_process_that_writes(folder, opened) -> None:
    """That begins before or after it, ends, begins anew, evicts, and removes slabs; never are there other bytes."""
    folder.mkdir()
    early = reader(opened)
    assert right(early, NAMES) == 0 and early.usage().objects == 0 and put(early, a=b"1") == [False]
    writer = opened(128 << 10)
    fill(writer, NAMES[:10])
    readers = [early, reader(opened)]
    assert [right(each, NAMES) for each in readers] == [10, 10]
    names = [f"page-{i}" for i in range(80)]
    for first in range(40, 60, 10):
        fill(writer, names[first : first + 10])
        put(writer, **{f"large-{first}": bytes(20_000)})
        writer.delete([names[first]])
        if first % 20 == 0:
            writer.close()
            assert right(readers[1], names) > 0, "while no process has it open"
            writer = opened(128 << 10)
        assert [right(each, names) for each in readers] == [right(writer, names)] * 2
    assert right(writer, names) < 25, "most have been evicted"
    writer.delete(names)
    assert [right(each, names) for each in readers] == [0, 0]


def test_a_reader_that_looks_while_the_writer_makes_the_model_follows_it_from_then_on(folder, opened) -> None:
    folder.mkdir()
    early = reader(opened)

    class Seen(WithoutSync):
        def rename(self, folder: Directory, old: str, new: str) -> None:
            super().rename(folder, old, new)
            assert new != "model.json" or early.exists(["page-0"]) == [False], "it looks before there are changes"

    writer = opened(disk=Seen())
    fill(writer, NAMES[:3])
    assert right(early, NAMES) == 3
    writer.close()
    fill(opened(), NAMES[3:5])
    assert right(early, NAMES) == 5


def test_a_reader_of_a_model_whose_file_of_changes_is_gone_follows_the_one_that_is_made_anew(filled, opened) -> None:
    next(filled.rglob("changes")).unlink()
    it = reader(opened)
    assert right(it, NAMES) == len(NAMES)
    writer = opened()
    fill(writer, ["more"])
    assert writer.delete(["page-0"]) == [True]
    assert right(it, [*NAMES, "more"]) == len(NAMES) and it.exists(["page-0"]) == [False]


def test_what_a_reader_has_deleted_stays_so_whatever_else_changes(opened) -> None:
    writer = opened(64 * MIB)
    fill(writer, NAMES[:20])
    it = reader(opened)
    assert right(it, NAMES) == 20 and it.delete(["page-3"]) == [True]
    for name in NAMES[20:]:
        fill(writer, [name])
        assert it.exists(["page-3", name]) == [False, True]
    writer.delete(["page-3"])
    fill(writer, ["page-3"])
    assert it.exists(["page-3"]) == [True], "stored anew"


def test_a_reader_that_slept_while_the_writer_began_anew_takes_no_old_entry_for_a_new_one(opened) -> None:
    """The counters of stripes begin at 0 with each first process, and may be at the same numbers again."""
    writer = opened(160 << 10, threads=1)
    fill(writer, NAMES[:10])
    slept = reader(opened)
    assert right(slept, NAMES) == 10
    writer.close()
    writer = opened(160 << 10, threads=1)
    assert all(writer.delete(NAMES[:10])), "each stripe has changed once"
    inspect_files.sees_the_same(slept, writer)
    assert there(slept, *NAMES[:10]) == ""
    fill(writer, NAMES[20:30])
    assert right(slept, NAMES) == right(writer, NAMES) == 10


def test_a_reader_reads_no_slot_that_was_given_to_another_object_meanwhile(opened) -> None:
    """What the writer told has not come, as over a network."""
    writer = opened(160 << 10)
    fill(writer, NAMES[:5])
    it = reader(opened)
    with inspect_files.deaf(it):
        assert all(writer.delete(NAMES[:5]))
        fill(writer, NAMES[10:15])
        assert there(it, *NAMES[:5]) != ""
        assert [get(it, name) for name in NAMES[:5]] == [None] * 5
        assert there(it, *NAMES[:5]) == ""


def test_a_reader_of_a_folder_whose_marker_or_model_file_is_damaged_reads_it_all_the_same(filled, opened) -> None:
    (filled / "kvarve.json").write_bytes(b"{")
    next(filled.rglob("model.json")).write_bytes(b"{")
    before = everything(filled)
    assert right(reader(opened), NAMES) == len(NAMES)
    assert everything(filled) == before


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a thesis", "another version"])
def test_a_reader_of_what_is_no_store_is_refused_or_waits_for_one(folder, opened, there) -> None:
    if there != "nothing":
        folder.mkdir()
    if there == "a thesis":
        (folder / "thesis.tex").write_text("42")
    if there == "another version":
        (folder / "kvarve.json").write_text('{"format": "kvarve-slabs/9"}')
    if there == "an empty folder":
        assert reader(opened).exists(["a"]) == [False]
        return
    with pytest.raises(StorageError, match=r"no such folder|not a kvarve storage folder|another version"):
        reader(opened)


def test_a_readers_folder_is_read_anew_when_it_was_replaced_and_trouble_while_it_is_gone(
    filled, opened, tmp_path
) -> None:
    it = reader(opened)
    shutil.move(filled, tmp_path / "away")
    with pytest.raises(StorageError, match="no such folder"):
        it.exists(["page-1"])
    storage = opened()
    fill(storage, NAMES[:3])
    storage.close()
    assert right(it, NAMES) == 3


def test_what_another_model_evicts_of_a_model_that_is_only_read_is_no_loss(filled, opened) -> None:
    it = reader(opened)
    assert all(it.exists(NAMES))
    opened(160 << 10, OTHER_LABEL, "model B").close()
    left = {name for name in NAMES if get(it, name) is not None}
    assert 0 < len(left) == right(it, NAMES) < len(NAMES)
    assert it.usage().lost == 0
    for table in model_of(filled).glob("*.table"):
        table.with_suffix("").unlink()
    assert [get(it, name) for name in NAMES] == [None] * len(NAMES)
    assert it.usage().lost == len(left), "but what is taken from outside is"


def test_what_was_lost_stays_counted_once_when_the_file_system_becomes_read_only_and_back(filled, opened) -> None:
    tables = sorted(filled.rglob("*.table"))
    for table, places in zip(tables, ([10, -246], [256 * i + 40 for i in range(1, 6)]), strict=False):
        raw = bytearray(table.read_bytes())
        for at in places:
            raw[at] ^= 1
        table.write_bytes(raw)
    disk = Refusing()
    disk.refuses = True
    storage = opened(disk=disk)
    counted = storage.usage().lost
    assert counted == len(NAMES) - right(storage, NAMES) > 5
    for refuses in (False, True, False):
        disk.refuses = refuses
        put(storage, more=data("more"))
        usage = storage.usage()
        assert (usage.read_only, usage.lost) == (refuses, counted)


@pytest.mark.parametrize(
    ("when", "read_only"),
    [("at its opening", False), ("later", True), ("alone", True)],
)
def test_slabs_that_could_not_be_opened_are_tried_again_by_lookups(opened, when, read_only) -> None:
    """A process that has no file descriptors left for a moment."""

    def none_left(call: str, name: str, at: int) -> None:
        if call == "open" and name.startswith("slab"):
            raise trouble(errno.EMFILE)

    disk, storage = RiggedClockwork(), opened()
    if when == "later":
        it = opened(disk=disk, read_only=read_only)
    fill(storage, NAMES)
    disk.happens = none_left
    if when == "alone":
        storage.close()
    if when != "later":
        it = opened(disk=disk, read_only=read_only)
    assert it.exists(NAMES) == [False] * len(NAMES)
    disk.happens = quietly
    disk.elapse(2)
    assert right(it, NAMES) == len(NAMES)


def test_a_url_asks_for_a_store_that_is_only_read_and_need_not_say_how_much_it_holds(filled) -> None:
    url = f"file://{filled}?read_only=true"
    assert only_read(url) and only_read([url, f"file://{filled}/b?read_only=yes"])
    assert not only_read([url, "memory://a?capacity=1GiB"]) and not only_read(()) and not only_read(f"{url[:-4]}no")
    check_storage(url, label=LABEL, description="model A")
    storage = open_storage(url, label=LABEL, description="model A")
    assert storage.usage().read_only and storage.exists(["page-1"]) == [True]
    storage.close()
    with pytest.raises(ConfigError, match="read_only=perhaps must be yes or no"):
        check_storage(f"file://{filled}?read_only=perhaps", label=LABEL, description="model A")
    assert parse_url(f"file://{filled}?capacity=1GiB&durable=false").yes("durable", default=True) is False


# --- real mounts


@contextmanager
def mounted(image: Path, place: Path, *options: str) -> Iterator[None]:
    words = ["mount", "-o", ",".join(["loop", *options]), str(image), str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        gone = partial(subprocess.run, ["umount", str(place)], capture_output=True, check=False)
        until(lambda: gone().returncode == 0, "that nobody looks into the mount")


@pytest.mark.long
def test_a_store_on_ext4_is_read_after_an_error_and_on_a_mount_that_is_read_only(tmp_path, caplog) -> None:
    image, place = tmp_path / "image", tmp_path / "mount"
    place.mkdir()
    if shutil.which("mkfs.ext4") is None or os.geteuid():
        pytest.skip("no file system of ext4 can be made and mounted here")
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    some, folder = pages("full", *range(12)), place / "store"
    with mounted(image, place, "errors=remount-ro"):
        device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {place} " in line)
        storage = FileStorage(folder, MIB, LABEL, "model A", disk=Disk())
        assert all(store(storage, some))
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test")
        assert store(storage, pages("full", 12)) == [False] and storage.usage().read_only
        assert intact(storage, some) == set(some)
        storage.close()
        storage = FileStorage(folder, MIB, LABEL, "model A")
        assert intact(storage, some) == set(some) and storage.usage().read_only
        storage.close()
    subprocess.run(["fsck.ext4", "-fy", str(image)], capture_output=True, check=False)
    with mounted(image, place):
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        storage = FileStorage(folder, MIB, LABEL, "model A")
        assert intact(storage, some) == set(some) and store(storage, pages("full", 12)) == [False]
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        assert store(storage, pages("full", 12)) == [True] and not storage.usage().read_only
        storage.close()
    assert "has become read-only" in caplog.text and "it can be written again" in caplog.text
