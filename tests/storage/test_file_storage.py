"""Files as a storage: ownership of a folder, how its capacity is shared, and its clock."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_disks import MIB, ONE, SMALL_FILES, Clockwork, Failing, Open, WithoutSync, total

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import FileStorage, Storage
from kvarve.storage.file.folder import check_folder
from kvarve.testing import CapacitySuite, MakeStorage, QuotaSuite, StorageSuite, TtlSuite
from kvarve.testing.suite import LABEL, OTHER_LABEL, Damage, MakeAging, UrlOf, get, put, there
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
                slab, row = storage._index.place(name)
                with slab.path.open("r+b") as file:
                    file.seek(slab.shape.slot_at(row) + 100)
                    file.write(data)

            return damage

        return {"a flipped bit": written(b"\xfe"), "zeros": written(bytes(OBJECT_BYTES - 100))}

    def capacity_for(self, objects: int) -> int:
        return SMALL_FILES + objects * ONE

    @pytest.fixture
    def make_storage(self, tmp_path: Path) -> Iterator[MakeStorage]:
        opened = []

        def make(
            *,
            label: bytes = LABEL,
            description: str = "model A",
            capacity_bytes: int = 64 << 20,
            place: str = "here",
        ) -> Storage:
            opened.append(FileStorage(tmp_path / place, capacity_bytes, label, description, disk=WithoutSync()))
            return opened[-1]

        yield make
        for storage in opened:
            storage.close()


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below the folder: names, times, contents."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def refusal_of(folder: Path, label: bytes = LABEL) -> str:
    """The message of opening, and of checking; both change nothing."""
    before = snapshot(folder.parent)
    with pytest.raises(StorageError) as checked:
        check_folder(folder, 1 << 20, label, "model B")
    with pytest.raises(StorageError) as opened:
        FileStorage(folder, 1 << 20, label, "model B")
    assert snapshot(folder.parent) == before
    assert str(checked.value) == str(opened.value)
    assert "\n" not in str(opened.value)
    return str(opened.value)


# --- ownership of a folder


def test_two_models_live_in_one_folder_and_see_their_own(opened):
    one, other = opened(), opened(label=OTHER_LABEL, description="model B")
    put(one, a=b"of A")
    assert there(other, "a") == ""
    put(other, a=b"of B")
    assert (get(one, "a"), get(other, "a")) == (b"of A", b"of B")


def test_a_model_whose_label_only_begins_alike_is_refused(opened, folder):
    opened(label=b"12345678 one").close()
    told = refusal_of(folder, b"12345678 two")
    for part in (str(folder), "another model or format", "model A", "model B", "give another one or empty this one"):
        assert part in told
    assert b"8 one".hex()[:-2] in told and b"8 two".hex()[:-2] in told, "what tells them apart"


def test_a_folder_with_other_peoples_files_is_refused(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    assert "not a kvarve storage folder" in refusal_of(folder)


@pytest.mark.parametrize("leftover", ["kvarve.lock", "kvarve.json~", "lost+found"])
def test_what_an_interrupted_opening_leaves_is_an_empty_folder(folder, opened, leftover):
    folder.mkdir()
    (folder / leftover).mkdir() if leftover == "lost+found" else (folder / leftover).write_text("half")
    assert put(opened(), a=b"1") == [True]


@pytest.mark.parametrize(
    "marker",
    [b"", b"{", b"[]", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b"{}", b'{"format": 7}'],
    ids=lambda marker: repr(marker[:40]),
)
def test_a_damaged_marker_is_refused(storage, folder, marker):
    storage.close()
    (folder / "kvarve.json").write_bytes(marker)
    assert "kvarve.json is damaged" in refusal_of(folder)


def test_a_folder_of_a_later_format_is_refused(storage, folder):
    storage.close()
    (folder / "kvarve.json").write_text(json.dumps({"format": "kvarve-slabs/5", "owner": "unheard of"}))
    told = refusal_of(folder)
    assert "kvarve-slabs/5" in told
    assert "kvarve-slabs/4" in told


def test_a_folder_whose_slabs_have_their_tables_inside_is_refused_and_nothing_of_it_is_removed(storage, folder):
    put(storage, a=b"1")
    storage.close()
    (folder / "kvarve.json").write_text(json.dumps({"format": "kvarve-slabs/1"}))
    for table in folder.rglob("*.table"):
        table.unlink()
    before = sorted(folder.rglob("*"))
    assert "another version of kvarve ('kvarve-slabs/1')" in refusal_of(folder)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_with_a_file_for_each_page_is_refused_and_told_what_to_do(folder):
    (folder / "pages" / "00").mkdir(parents=True)
    (folder / "kvarve.json").write_text(json.dumps({"format": "kvarve-files/1", "label": "00", "description": "old"}))
    told = refusal_of(folder)
    assert "another version" in told
    assert "empty this folder or give another one" in told


def test_a_regular_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    assert "is not a folder" in refusal_of(tmp_path / "file")
    with pytest.raises(StorageError, match="is not a folder"):
        check_folder(tmp_path / "file" / "below" / "it", 100, LABEL, "model A")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_link_to_nowhere_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="is a link"):
        FileStorage(tmp_path / "link", 100, LABEL, "model A")
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_may_not_be_written_is_refused(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "no permission" in refusal_of(folder)


@pytest.mark.parametrize("place", ["store", "./store", "../store", "", "~/store", "/nul\0l"])
def test_a_path_that_is_not_absolute_is_refused(place):
    with pytest.raises(ConfigError, match="absolute path"):
        FileStorage(place, 100, LABEL, "model A")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ttl_s": 0}, "ttl above zero"),
        ({"quota_bytes": 0}, "above zero"),
        ({"eviction": "random"}, "known: lru, lfu, s3fifo"),
        ({"threads": 0}, "at least 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_touched(folder, settings, said):
    with pytest.raises(ConfigError, match=said):
        FileStorage(folder, 100, LABEL, "model A", **settings)
    assert not folder.exists()


def test_checking_a_folder_that_is_not_there_makes_none(folder):
    assert check_folder(folder / "deep", 100, LABEL, "model A") == folder / "deep"
    assert not folder.exists()


def test_the_folder_says_its_format_and_whose_pages_these_are(storage, folder):
    assert json.loads((folder / "kvarve.json").read_text()) == {"format": "kvarve-slabs/4"}
    model = json.loads((folder / "models" / LABEL.hex()[:16] / "model.json").read_text())
    assert model == {"label": LABEL.hex(), "description": "model A"}


def test_objects_are_for_their_owner_alone(storage, folder):
    put(storage, a=b"1")
    assert [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077] == []


def test_a_file_system_without_locks_is_refused(opened):
    disk = Failing()
    disk.fails["lock"] = errno.ENOLCK
    with pytest.raises(StorageError, match="No locks available"):
        opened(disk=disk)


def test_a_file_system_that_cannot_lock_parts_of_files_is_refused(opened):
    disk = Failing()
    disk.fails["lock_range"] = errno.EINVAL
    with pytest.raises(StorageError, match="cannot lock parts of files"):
        opened(disk=disk)


# --- capacity


def test_the_whole_folder_stays_within_its_capacity_whatever_is_stored(opened, folder):
    capacity = 512 << 10
    storage = opened(capacity)
    for turn in range(60):
        size = (100, 5000, 20_000, 70_000)[turn % 4]
        assert put(storage, **{f"page-{turn}": bytes([turn]) * size}) == [True]
        assert total(folder) <= capacity
    assert get(storage, "page-59") == bytes([59]) * 70_000
    found = [get(storage, f"page-{turn}") for turn in range(60)]
    assert all(data is None or data == bytes([turn]) * len(data) for turn, data in enumerate(found))


def test_a_folder_stays_within_its_capacity_to_the_byte(tmp_path):
    for capacity in range(2 * ONE, 2 * ONE + 1024, 64):
        storage = FileStorage(tmp_path / str(capacity), capacity, LABEL, "model A", disk=WithoutSync())
        put(storage, a=b"1", b=b"2", c=b"3")
        storage.close()
        assert total(tmp_path / str(capacity)) <= capacity


def test_what_is_larger_than_the_whole_store_finds_no_room_and_evicts_nothing(opened):
    storage = opened(256 << 10)
    put(storage, a=b"1", b=bytes(20_000))
    assert put(storage, c=bytes(300_000), d=b"4") == [False, True]
    assert there(storage, *"abcd") == "a b d"


def test_objects_of_another_size_get_the_slots_of_idle_ones(opened):
    disk = Clockwork()
    storage = opened(256 << 10, disk=disk)
    small = [f"small-{i}" for i in range(70)]
    for name in small:
        put(storage, **{name: bytes(4096)})
        disk.elapse(1)
    for i in range(12):
        disk.elapse(1)
        assert put(storage, **{f"large-{i}": bytes([i]) * 60_000}) == [True]
    assert there(storage, "large-11", "large-10") == "large-11 large-10"
    assert sum(storage.exists(small)) < 50


def test_the_small_pages_of_the_newest_prompts_do_not_all_go_for_the_large_ones_of_the_next(opened):
    """A class of small objects keeps them for the longest, so its only slab is the coldest on average."""
    disk = Clockwork()
    storage = opened(8 * MIB, disk=disk)
    for turn in range(400):
        names = [*(f"{turn}-kv-{i}" for i in range(8)), f"{turn}-state"]
        assert all(storage.put(names, [*[memoryview(bytes(60_000))] * 8, memoryview(b"1")]))
        disk.elapse(1)
        recent = range(max(0, turn - 5), turn + 1)
        assert all(storage.exists([f"{each}-{kind}" for each in recent for kind in ("kv-7", "state")])), turn


def test_a_model_that_is_open_keeps_its_room(opened):
    capacity = 96 << 10
    one, other = opened(capacity), opened(capacity, OTHER_LABEL)
    kept = [f"page-{i}" for i in range(4)]
    put(one, **dict.fromkeys(kept, bytes(4096)))
    for i in range(30):
        assert put(other, **{f"page-{i}": bytes(4096)}) == [True]
    assert one.exists(kept) == [True] * 4


def test_a_folder_full_of_another_model_in_use_is_logged_once(opened, folder, caplog):
    capacity = 96 << 10
    one, other = opened(capacity), opened(capacity, OTHER_LABEL)
    for i in range(30):
        put(one, **{f"page-{i}": bytes(4096)})
    assert caplog.messages == [], "a model that can evict has space"
    for i in range(3):
        assert put(other, **{f"page-{i}": bytes(4096)}) == [False]
    (told,) = caplog.messages
    assert str(folder) in told and "nothing of 4096 bytes can be stored" in told
    assert "of 98304 bytes" in told and "give it more capacity" in told


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


def test_with_s3fifo_one_scan_does_not_push_out_what_is_used_again(opened):
    storage = opened(SMALL_FILES + 20 * ONE, eviction="s3fifo")
    used = [f"used-{i}" for i in range(10)]
    for name in used:
        put(storage, **{name: b"1"})
        get(storage, name)
    for i in range(100):
        put(storage, **{f"scan-{i}": b"1"})
    assert storage.exists(used) == [True] * 10


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
