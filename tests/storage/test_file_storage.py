"""Files as a storage: ownership of a folder, how its capacity is shared, and its clock."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inspect_files
import pytest
from file_disks import MIB, ONE, SMALL_FILES, Clockwork, Open, Rigged, WithoutSync, everything, total
from file_pages import Quick

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import FileStorage, Storage
from kvarve.storage.file.folder import Wanted, check_folder
from kvarve.testing import CapacitySuite, MakeStorage, QuotaSuite, StorageSuite, TtlSuite
from kvarve.testing.suite import LABEL, Damage, MakeAging, UrlOf, get, put, there
from kvarve.testing.suite_use import OBJECT_BYTES

DAY_S = 86400


class TestFileStorage(StorageSuite, CapacitySuite, TtlSuite, QuotaSuite):
    """A slot is of whole 4 KiB and a small store has one slot in a slab, so capacity is counted in slabs."""

    keeps_named = True

    @pytest.fixture
    def url_of(self, tmp_path: Path) -> UrlOf:
        return lambda place: (f"file://{tmp_path / place}?capacity=64MiB", LABEL)

    @pytest.fixture
    def make_aging(self, opened: Open) -> MakeAging:
        def make(ttl_s: float) -> tuple[Storage, Callable[[float], None]]:
            clock = Clockwork()
            return opened(disk=clock, ttl_s=ttl_s), clock.elapse

        return make

    @pytest.fixture
    def make_limited(self, opened: Open) -> Callable[[int], Storage]:
        return lambda objects: opened(quota_bytes=4096 * objects)

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        def written(data: bytes) -> Damage:
            def damage(storage: Storage, name: str) -> None:
                assert isinstance(storage, FileStorage)
                place = inspect_files.place(storage, name)
                with place.path.open("r+b") as file:
                    file.seek(place.at + 100)
                    file.write(data)

            return damage

        return {"a flipped bit": written(b"\xfe"), "zeros": written(bytes(OBJECT_BYTES - 100))}

    def capacity_for(self, objects: int) -> int:
        return SMALL_FILES + objects * ONE

    @pytest.fixture
    def make_storage(self, opened: Open) -> MakeStorage:
        def make(*, capacity_bytes: int = 64 << 20, place: str = "here", **more: Any) -> Storage:
            return opened(capacity_bytes, place=place, disk=Quick(), **more)

        return make


def refusal_of(folder: Path, label: bytes = LABEL) -> str:
    """The message of opening, and of checking; both change nothing."""
    before = everything(folder.parent)
    with pytest.raises(StorageError) as checked:
        check_folder(Wanted(folder, 1 << 20, label, "model B"))
    with pytest.raises(StorageError) as opened:
        FileStorage(folder, 1 << 20, label, "model B")
    assert everything(folder.parent) == before
    assert str(checked.value) == str(opened.value)
    assert "\n" not in str(opened.value)
    return str(opened.value)


# --- ownership of a folder


def test_a_model_whose_label_only_begins_alike_is_refused(opened, folder):
    opened(label=b"12345678 one").close()
    told = refusal_of(folder, b"12345678 two")
    for part in (str(folder), "another model or format", "model A", "model B", "give another one or empty this one"):
        assert part in told
    assert b"8 one".hex()[:-2] in told and b"8 two".hex()[:-2] in told, "what tells them apart"


@pytest.mark.parametrize("leftover", ["kvarve.lock", "kvarve.json~", "lost+found"])
def test_what_an_interrupted_opening_leaves_is_an_empty_folder(folder, opened, leftover):
    folder.mkdir()
    (folder / leftover).mkdir() if leftover == "lost+found" else (folder / leftover).write_text("half")
    assert put(opened(), a=b"1") == [True]


def test_a_regular_file_or_a_link_to_nowhere_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is not a folder" in refusal_of(tmp_path / "file")
    assert "is a link" in refusal_of(tmp_path / "link")
    with pytest.raises(StorageError, match="is not a folder"):
        check_folder(Wanted(tmp_path / "file" / "below" / "it", 100, LABEL, "model A"))
    assert (tmp_path / "file").read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_a_folder_that_may_not_be_written_is_refused(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "no permission" in refusal_of(folder)


@pytest.mark.parametrize("place", ["store", "../store", "", "~/store", "/nul\0l"])
def test_a_path_that_is_not_absolute_is_refused(place):
    with pytest.raises(ConfigError, match="absolute path"):
        FileStorage(place, 100, LABEL, "model A")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ttl_s": 0}, "ttl must be above zero"),
        ({"quota_bytes": 0}, "above zero"),
        ({"eviction": "random"}, "known: lru, lfu, s3fifo"),
        ({"threads": 0}, "at least 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_touched(folder, settings, said):
    with pytest.raises(ConfigError, match=said):
        FileStorage(folder, 100, LABEL, "model A", **settings)
    assert not folder.exists()


def test_the_folder_says_its_format_and_whose_pages_these_are(storage, folder):
    assert json.loads((folder / "kvarve.json").read_text()) == {"format": "kvarve-slabs/4"}
    model = json.loads((folder / "models" / LABEL.hex()[:16] / "model.json").read_text())
    assert model == {"label": LABEL.hex(), "description": "model A"}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [("lock", errno.ENOLCK, "No locks available"), ("lock_range", errno.EINVAL, "cannot lock parts of files")],
)
def test_a_file_system_without_locks_of_files_or_of_their_parts_is_refused(opened, call, error, said):
    disk = Rigged()
    disk.refuse(error, call)
    with pytest.raises(StorageError, match=said):
        opened(disk=disk)


# --- capacity


def test_the_whole_folder_stays_within_its_capacity_whatever_is_stored(opened, folder):
    capacity = 512 << 10
    storage = opened(capacity)
    for turn in range(28):
        size = (100, 5000, 20_000, 70_000)[turn % 4]
        assert put(storage, **{f"page-{turn}": bytes([turn]) * size}) == [True]
        assert total(folder) <= capacity
    assert get(storage, "page-27") == bytes([27]) * 70_000
    found = [get(storage, f"page-{turn}") for turn in range(28)]
    assert all(data is None or data == bytes([turn]) * len(data) for turn, data in enumerate(found))


def test_a_folder_stays_within_its_capacity_to_the_byte(tmp_path):
    for capacity in range(2 * ONE, 2 * ONE + 1024, 128):
        storage = FileStorage(tmp_path / str(capacity), capacity, LABEL, "model A", disk=WithoutSync())
        put(storage, a=b"1", b=b"2", c=b"3")
        storage.close()
        assert total(tmp_path / str(capacity)) <= capacity


def test_the_small_pages_of_the_newest_prompts_do_not_all_go_for_the_large_ones_of_the_next(opened):
    """A class of small objects keeps them for the longest, so its only slab is the coldest on average."""
    disk = Clockwork()
    storage = opened(MIB, disk=disk)
    for turn in range(40):
        names = [*(f"{turn}-kv-{i}" for i in range(4)), f"{turn}-state"]
        assert all(storage.put(names, [*[memoryview(bytes(20_000))] * 4, memoryview(b"1")]))
        disk.elapse(1)
        recent = range(max(0, turn - 5), turn + 1)
        assert all(storage.exists([f"{each}-{kind}" for each in recent for kind in ("kv-3", "state")])), turn
    assert storage.usage().evicted > 60


@pytest.mark.parametrize(
    ("eviction", "left"),
    # a is used three times and long ago, b is used once and lately, c and d are never used again, c is older
    [("lru", "d b"), ("lfu", "a b"), ("s3fifo", "a b")],
)
def test_the_order_of_eviction_is_chosen(opened, eviction, left):
    storage = opened(SMALL_FILES + 4 * ONE, eviction=eviction)
    for name in "acdb":
        put(storage, **{name: b"1"})
        for _ in range(3 if name == "a" else 0):
            get(storage, "a")
    get(storage, "b")
    put(storage, e=b"5", f=b"6")
    assert set(there(storage, *"abcd").split()) == set(left.split())


def test_a_group_over_its_quota_evicts_its_own_coldest(opened):
    storage = opened(quota_bytes=3 * 4096)
    for name in ("aaaa-1", "bbbb-1", "aaaa-2", "aaaa-3", "aaaa-4", "bbbb-2", "loner"):
        assert put(storage, **{name: b"1"}) == [True]
    assert there(storage, "aaaa-1", "aaaa-2", "aaaa-3", "aaaa-4") == "aaaa-2 aaaa-3 aaaa-4"
    assert there(storage, "bbbb-1", "bbbb-2", "loner") == "bbbb-1 bbbb-2 loner"


def test_a_quota_holds_after_opening_again_and_within_one_call(opened):
    storage = opened(quota_bytes=3 * 4096)
    put(storage, **{"aaaa-1": b"1", "aaaa-2": b"2"})
    storage.close()
    storage = opened(quota_bytes=3 * 4096)
    assert put(storage, **{f"aaaa-{i}": b"1" for i in range(3, 7)}) == [True, True, True, False]
    assert there(storage, *(f"aaaa-{i}" for i in range(7))) == "aaaa-3 aaaa-4 aaaa-5"
    assert put(storage, **{"aaaa-x": bytes(4 * 4096)}) == [False]


# --- time


def test_what_is_too_old_is_missing_and_makes_room(opened):
    disk = Clockwork()
    storage = opened(SMALL_FILES + 3 * ONE, ttl_s=DAY_S, disk=disk)
    put(storage, old=b"1")
    disk.elapse(DAY_S / 2)
    put(storage, young=b"2")
    disk.elapse(DAY_S / 2 + 1)
    assert there(storage, "old", "young") == "young"
    assert get(storage, "old") is None
    assert storage.usage().objects == 1
    put(storage, a=b"1", b=b"2")
    assert there(storage, "young", "a", "b") == "young a b"
    assert storage.usage().evicted == 0
    assert put(storage, old=b"anew") == [True]
    assert get(storage, "old") == b"anew"


@pytest.mark.parametrize("jump_s", [-20 * 365 * DAY_S, 20 * 365 * DAY_S])
def test_a_wall_clock_that_jumps_neither_expires_nor_immortalises_anything(opened, jump_s):
    disk = Clockwork()
    storage = opened(ttl_s=DAY_S, disk=disk)
    put(storage, a=b"1")
    disk.set_wall(jump_s)
    assert there(storage, "a") == "a"
    other = opened(ttl_s=DAY_S, disk=disk)  # a process that opens it after the jump agrees
    assert there(other, "a") == "a"
    other.close()
    storage.close()
    storage = opened(ttl_s=DAY_S, disk=disk)
    assert there(storage, "a") == "a"
    disk.elapse(DAY_S + 1)
    assert there(storage, "a") == ""


def test_the_time_while_a_store_is_closed_counts_also_over_a_reboot(opened):
    disk = Clockwork()
    storage = opened(ttl_s=DAY_S, disk=disk)
    put(storage, a=b"1")
    storage.close()
    disk.reboot(DAY_S / 2)
    storage = opened(ttl_s=DAY_S, disk=disk)
    assert there(storage, "a") == "a"
    storage.close()
    disk.reboot(-40 * DAY_S)  # its battery is empty
    storage = opened(ttl_s=DAY_S, disk=disk)
    assert there(storage, "a") == "a"
    storage.close()
    disk.reboot(DAY_S / 2 + 1)
    assert there(opened(ttl_s=DAY_S, disk=disk), "a") == ""
