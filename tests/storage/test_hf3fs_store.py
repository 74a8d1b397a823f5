"""What a store on 3FS leaves in its folder: slots that say what they hold, and nothing that is not its own."""

import errno
import os
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hf3fs_stores import RESERVED, Stores, descriptors, stores_in
from processes import until

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import check_storage, open_storage
from kvarve.storage.file.disk import Directory, Disk
from kvarve.storage.hf3fs import _hf3fs_storage as storage_module
from kvarve.storage.hf3fs._hf3fs_folder import Descriptors, Folder
from kvarve.storage.hf3fs._hf3fs_storage import Hf3fsStorage
from kvarve.storage.hf3fs._slot_layout import (
    BLOCK_BYTES,
    HEADER_BYTES,
    Extent,
    Slot,
    Title,
    digest,
    hash_of,
    header,
    read_header,
    slot_bytes_for,
)
from kvarve.storage.hf3fs._slot_table import SPREAD
from kvarve.storage.urls import allocate
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there
from tests.sim.usrbio import Emulator

EXTENT = Extent(16384, 64, 7, 9)
TITLE = Title(hash_of(LABEL), "tenant-page.kv", Slot(EXTENT, 5, 99, 9000), digest([memoryview(b"1")]))


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with stores_in(tmp_path) as stores:
        yield stores


def slots_file(stores: Stores, place: str = "here") -> Path:
    """The one file of slots there is."""
    (path,) = (stores.folder / place).glob("slots-*")
    return path


def test_a_header_is_read_as_it_was_written_and_no_other_bit_pattern_is_one() -> None:
    raw = header(TITLE)
    assert len(raw) == HEADER_BYTES <= BLOCK_BYTES
    assert read_header(raw, EXTENT) == TITLE
    for at in range(HEADER_BYTES):
        for bit in range(8):
            bad = bytearray(raw)
            bad[at] ^= 1 << bit
            assert read_header(bytes(bad), EXTENT) is None, f"bit {bit} of byte {at}"
    dice = random.Random(5)
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, BLOCK_BYTES):
        assert read_header(raw[: min(length, HEADER_BYTES - 1)], EXTENT) is None
        assert read_header(dice.randbytes(length), EXTENT) is None
        assert read_header(bytes(length), EXTENT) is None
    assert read_header(raw + dice.randbytes(100), EXTENT) == TITLE
    fits = TITLE._replace(slot=TITLE.slot._replace(size_bytes=16384 - BLOCK_BYTES))
    assert read_header(header(fits), EXTENT) == fits
    more, beyond = (TITLE.slot._replace(**each) for each in ({"size_bytes": 16385 - BLOCK_BYTES}, {"place": 64}))
    for claims in (TITLE._replace(slot=more), TITLE._replace(slot=beyond), TITLE._replace(name="../up")):
        assert read_header(header(claims), EXTENT) is None
    for other in (EXTENT._replace(number=8), EXTENT._replace(slot_bytes=8192), EXTENT._replace(places=5)):
        assert read_header(raw, other) is None, "a header of another file"


def test_a_slot_is_whole_blocks_and_at_most_a_32nd_larger_than_needed() -> None:
    assert [slot_bytes_for(size) for size in (0, 1, 4096, 4097, 1 << 20)] == [4096, 8192, 8192, 12288, (33 << 15)]
    dice = random.Random(5)
    for _ in range(2000):
        size = dice.randrange(1 << dice.randrange(1, 36))
        slot = slot_bytes_for(size)
        needed = size + BLOCK_BYTES
        assert needed <= slot < needed + max(BLOCK_BYTES, needed / 32 + 1) and not slot % BLOCK_BYTES
    pages = {slot_bytes_for(size) for size in range(700_000, 760_000, 100)}
    assert len(pages) <= 5, "pages that were compressed to about one size share slots"


def test_a_slot_of_another_object_label_or_time_is_a_miss_and_forgotten(stores: Stores) -> None:
    storage, other = stores.open(), stores.open(label=OTHER_LABEL)
    for change in ("another object", "another label", "an earlier time", "bytes"):
        assert put(storage, a=bytes(100), b=b"1" * 100) == [True, True]
        assert put(other, a=bytes(100)) == [True]
        slot = stores.where("a")
        title = Title(hash_of(LABEL), "a", slot, digest([memoryview(bytes(100))]))
        written = {
            "another object": header(title._replace(name="b")),
            "another label": header(title._replace(label=hash_of(OTHER_LABEL))),
            "an earlier time": header(title._replace(slot=slot._replace(generation=slot.generation - 1))),
            "bytes": header(title).ljust(BLOCK_BYTES, b"\0") + b"x",
        }[change]
        stores.write("a", 0, written)
        assert get(storage, "a") is None, change
        assert there(storage, "a", "b") == "b"
        assert get(other, "a") == bytes(100)
        assert put(storage, a=b"anew") == [True]
        assert get(storage, "a") == b"anew"
        assert storage.delete(["a", "b"]) == [True, True]
    assert storage.counts["torn"] == 4


def test_an_object_that_is_stored_anew_while_its_torn_slot_is_read_stays(stores: Stores) -> None:
    other = stores.open()

    class Torn(Disk):
        torn = False

        def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
            count = super().read(file, into, at)
            if self.torn and count > 0:
                self.torn = False
                into[0][:8] = bytes(8)
                assert other.delete(["page"]) == [True]
                assert put(other, page=b"anew") == [True]
            return count

    disk = Torn()
    storage = stores.open(disk=disk)
    put(storage, page=b"first")
    assert get(storage, "page") == b"first"
    disk.torn = True
    assert get(storage, "page") is None
    assert storage.counts["torn"] == 1
    assert get(storage, "page") == b"anew"


def test_objects_larger_than_their_buffers_are_checked_one_after_the_other(stores: Stores) -> None:
    """The metadata says how large they are, and what it says may cost no more memory than a page has."""
    storage, page = stores.open(), 1 << 20
    names = [f"page-{i}" for i in range(16)]
    assert all(storage.put(names, [memoryview(bytes([i]) * page) for i in range(16)]))
    buffers = [memoryview(bytearray(10)) for _ in names]
    tracemalloc.start()
    try:
        assert storage.get(names, buffers) == [page] * 16
        assert tracemalloc.get_traced_memory()[1] < 4 * page
    finally:
        tracemalloc.stop()
    assert [bytes(view) for view in buffers] == [bytes([i]) * 10 for i in range(16)]


def test_a_file_that_cannot_be_opened_costs_its_own_objects_alone(stores: Stores) -> None:
    names, data = [f"page-{i}" for i in range(8)], [memoryview(bytes([i]) * 100) for i in range(8)]
    assert stores.open().put(names, data) == [True] * 8
    bad, *_ = (stores.folder / "here").glob("slots-*")
    bad.rename(stores.folder / "aside")
    bad.mkdir()
    storage = stores.open()  # which has none of them open
    buffers = [memoryview(bytearray(100)) for _ in names]
    sizes = storage.get(names, buffers)
    assert sorted(sizes, key=str) == [100] * 6 + [None] * 2
    assert all(size is None or view == page for size, view, page in zip(sizes, buffers, data, strict=True))
    with pytest.raises(StorageError, match=f"read 0 of 2 objects: .*{bad.name}"):
        storage.get([name for name, size in zip(names, sizes, strict=True) if size is None], buffers[:2])
    more = [f"more-{i}" for i in range(8)]
    assert sorted(storage.put(more, data)) == [False] * 2 + [True] * 6
    bad.rmdir()
    (stores.folder / "aside").rename(bad)
    assert storage.get(names, buffers) == [100] * 8


def test_room_moves_from_one_size_of_slots_to_another_and_their_files_go(stores: Stores) -> None:
    storage = stores.open(capacity_bytes=1 << 20)
    small = [f"small-{i}" for i in range(100)]
    assert all(storage.put(small, [memoryview(b"1")] * 100))
    files = {*(stores.folder / "here").glob("slots-8192-*")}
    assert len(files) > 1
    for turn in range(8):
        names = [f"large-{turn}-{i}" for i in range(7)]
        assert all(storage.put(names, [memoryview(bytes(100_000))] * 7))
    assert not any(storage.exists(small))
    assert {*(stores.folder / "here").glob("slots-8192-*")} < files
    total = sum(path.stat().st_size for path in (stores.folder / "here").glob("slots-*"))
    assert total <= 1 << 20, "the files hold no more than the capacity"


def test_a_file_that_another_process_has_removed_is_closed_so_that_its_room_is_free(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_KEEP_S", 0.01)
    storage = stores.open()
    put(storage, page=b"1")
    slots_file(stores).unlink()
    until(lambda: not [it for it in descriptors(stores.folder) if "slots-" in it.name], "a process that has let go")
    assert get(storage, "page") is None
    assert put(storage, page=b"2") == [True]
    assert get(stores.open(), "page") == b"2", "in a file that others see"


def test_where_no_more_files_can_be_made_those_that_are_there_are_filled(stores: Stores) -> None:
    class Full(Disk):
        full = wholly = False

        def open(self, folder: Directory, name: str, **how: bool) -> int:
            if self.full and how.get("create"):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return super().open(folder, name, **how)

        def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
            if self.full and self.wholly:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(file, data, at)

    disk = Full()
    storage = stores.open(disk=disk)
    put(storage, **{f"page-{i}": b"1" for i in range(SPREAD)})
    disk.full = True
    assert storage.put(["small", "large"], [memoryview(b"2"), memoryview(bytes(9000))]) == [True, False]
    assert storage.counts == {"no space": 1}
    assert stores.slots()[RESERVED] == 0
    assert get(storage, "small") == b"2"
    disk.wholly = True
    assert storage.put(["a", "b"], [memoryview(b"1")] * 2) == [False, False], "which is no trouble"
    assert storage.counts == {"no space": 3}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("notes.txt", "mine", "is not empty and not a kvarve store on 3FS"),
        ("kvarve.json", '{"format": "kvarve-slabs/3"}', "another version of kvarve .*kvarve-slabs/3.*empty this"),
        ("kvarve.json", "{", "is damaged"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_and_not_touched(
    stores: Stores, name: str, content: str, said: str
) -> None:
    folder = stores.folder / "here"
    folder.mkdir()
    (folder / name).write_text(content)
    url = f"hf3fs://{folder}?capacity=1GiB&engine=posix"
    for call in (stores.open, lambda: open_storage(url, label=LABEL, description="model A")):
        with pytest.raises(StorageError, match=said) as told:
            call()
        assert "\n" not in str(told.value)
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == content


def test_a_damaged_format_is_written_anew_as_the_slots_say_it_too(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    put(stores.open(), page=b"1")
    path = stores.folder / "here" / "kvarve.json"
    whole = path.read_bytes()
    path.write_bytes(b"{")
    assert get(stores.open(), "page") == b"1"
    assert path.read_bytes() == whole and "its data are in this format" in caplog.text


def test_what_was_left_by_an_opening_cut_short_is_an_empty_folder_unless_others_may_write_to_it(stores: Stores) -> None:
    folder = stores.folder / "here"
    (folder / "3fs-virt").mkdir(parents=True)
    (folder / "kvarve.json~0123456789abcdef").write_text("")
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="may be written to by others"):
        stores.open()
    folder.chmod(0o700)
    assert put(stores.open(), page=b"1") == [True]


def test_a_folder_that_is_removed_is_trouble_and_not_made_anew(stores: Stores) -> None:
    storage = stores.open()
    put(storage, page=b"1")
    (stores.folder / "here").rename(stores.folder / "away")
    with pytest.raises(StorageError):
        get(storage, "page")
    assert not (stores.folder / "here").exists()
    (stores.folder / "away").rename(stores.folder / "here")
    assert get(storage, "page") == b"1"


def test_without_the_binding_auto_means_posix_and_with_it_arenas_are_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    url = f"hf3fs://{tmp_path}/kvarve?capacity=1GiB"
    assert allocate(url, 4096) is None
    assert "the POSIX engine is used" in caplog.text
    daemon = Emulator(tmp_path)
    monkeypatch.setattr("kvarve.storage.hf3fs._hf3fs_backend.load", lambda: daemon)
    region = allocate(url, 4096)
    assert region is not None and region.name is not None
    storage = open_storage(url, label=LABEL, description="model A")
    assert isinstance(storage, Hf3fsStorage)
    assert put(storage, page=b"1") == [True]
    assert daemon.files
    storage.close()
    daemon.mount = tmp_path / "elsewhere"
    with pytest.raises(ConfigError, match="on no mount of 3FS"):
        check_storage(f"{url}&engine=usrbio", label=LABEL, description="model A")


def test_a_sync_that_failed_is_a_failure_of_all_who_had_written_before_it(tmp_path: Path) -> None:
    """The kernel has told the first of them, and tells the second that all is well."""
    store = Folder(Disk(), tmp_path / "store", Descriptors())
    file = store.file(EXTENT, create=True)

    def fails(fd: int) -> None:
        raise OSError(5, "the medium has failed")

    with pytest.raises(OSError, match="the medium"):
        file.sync(fails)
    with pytest.raises(OSError, match="another sync"):
        file.sync(lambda _: None)
    again = store.file(EXTENT)
    assert again is not file and store.file(EXTENT) is again
    again.sync(lambda _: None)
    store.close()
