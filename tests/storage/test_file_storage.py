"""Files as a storage: whose a folder is, how its room is shared, and what other programs and processes do to it."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import FileStorage, Storage
from kvarve.storage.disk import Disk
from kvarve.storage.folder import check_folder, is_in_use
from kvarve.storage.table import Shape
from kvarve.testing import CapacitySuite, MakeStorage, StorageSuite
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

MIB = 1 << 20
DAY_S = 86400
# A folder's small files are below this; a slab of one slot of 4 KiB is two blocks.
SMALL_FILES = 8192
ONE = Shape(4096, 1).bytes

Open = Callable[..., FileStorage]


class TestFileStorage(StorageSuite, CapacitySuite):
    """A slot is of whole 4 KiB and a small store has one slot in a slab, so the suite's room is counted in slabs."""

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


class WithoutSync(Disk):
    """No power is cut here, and a test bed's syncs are slow."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class Clockwork(WithoutSync):
    """Time passes as a test says: `elapse` for everybody, `set_wall` as somebody who sets the wall clock."""

    def __init__(self) -> None:
        self.wall, self.up, self.machine = 1_700_000_000_000_000_000, 10**12, b"first boot......"

    def elapse(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)
        self.up += int(seconds * 1e9)

    def set_wall(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)

    def reboot(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)
        self.up, self.machine = 10**9, os.urandom(16)

    def wall_ns(self) -> int:
        return self.wall

    def since_boot_ns(self) -> int:
        self.up += 1
        return self.up

    def boot(self) -> bytes:
        return self.machine


class Failing(WithoutSync):
    """Every call of the kinds in `fails` raises what is said there, from `after` such calls on."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.after = 0
        self.seen = 0

    def _maybe(self, call: str) -> None:
        if call in self.fails:
            self.seen += 1
            if self.seen > self.after:
                raise OSError(self.fails[call], os.strerror(self.fails[call]))

    def read(self, file: int, into: Any, at: int) -> int:
        self._maybe("read")
        return super().read(file, into, at)

    def write(self, file: int, data: Any, at: int) -> int:
        self._maybe("write")
        return super().write(file, data, at)

    def sync(self, file: int) -> None:
        self._maybe("sync")

    def allocate(self, file: int, size_bytes: int) -> None:
        self._maybe("allocate")
        super().allocate(file, size_bytes)

    def lock(self, file: int, *, wait: bool = True, shared: bool = False) -> bool:
        self._maybe("lock")
        return super().lock(file, wait=wait, shared=shared)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    """Opens the folder; what is left open is closed in the end."""
    everything = []

    def make(capacity_bytes: int = MIB, label: bytes = LABEL, description: str = "model A", **more: Any) -> FileStorage:
        more.setdefault("disk", WithoutSync())
        everything.append(FileStorage(folder, capacity_bytes, label, description, **more))
        return everything[-1]

    yield make
    for storage in everything:
        storage.close()


@pytest.fixture
def storage(opened: Open) -> FileStorage:
    return opened()


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("models/*/slab-*"))


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below the folder: names, times, contents."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def refusal_of(folder: Path, label: bytes = LABEL) -> str:
    """What opening says, and checking too; both leave everything as it was."""
    before = snapshot(folder.parent)
    with pytest.raises(StorageError) as checked:
        check_folder(folder, 1 << 20, label, "model B")
    with pytest.raises(StorageError) as opened:
        FileStorage(folder, 1 << 20, label, "model B")
    assert snapshot(folder.parent) == before
    assert str(checked.value) == str(opened.value)
    assert "\n" not in str(opened.value)
    return str(opened.value)


# --- whose a folder is


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


@pytest.mark.parametrize("marker", [b"", b'{"label": "no hex", "description": ""}', b'{"label": "00"}'])
def test_a_model_that_does_not_say_whose_it_is_is_refused(storage, folder, marker):
    storage.close()
    (model,) = folder.glob("models/*/model.json")
    model.write_bytes(marker)
    assert "model.json is damaged" in refusal_of(folder)


def test_a_folder_of_a_later_format_is_refused(storage, folder):
    storage.close()
    (folder / "kvarve.json").write_text(json.dumps({"format": "kvarve-slabs/2", "owner": "unheard of"}))
    told = refusal_of(folder)
    assert "kvarve-slabs/2" in told
    assert "kvarve-slabs/1" in told


def test_a_folder_with_a_file_for_each_page_is_refused_and_told_what_to_do(folder):
    (folder / "pages" / "00").mkdir(parents=True)
    (folder / "kvarve.json").write_text(json.dumps({"format": "kvarve-files/1", "label": "00", "description": "old"}))
    told = refusal_of(folder)
    assert "earlier version" in told
    assert "empty this folder or give another one" in told


def test_a_regular_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    assert "is not a folder" in refusal_of(tmp_path / "file")
    with pytest.raises(StorageError, match="is not a folder"):
        check_folder(tmp_path / "file" / "below" / "it", 100, LABEL, "model A")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_link_to_nowhere_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="is not a folder"):
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
    assert json.loads((folder / "kvarve.json").read_text()) == {"format": "kvarve-slabs/1"}
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


# --- room


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


def test_objects_of_another_size_get_the_room_of_those_that_nobody_uses_any_more(opened):
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


def test_the_longest_unused_model_that_nobody_has_open_makes_room(opened, folder):
    capacity = 160 << 10
    for number, label in enumerate((b"first", b"second")):
        storage = opened(capacity, label)
        put(storage, **{f"page-{i}": bytes(4096) for i in range(6)})
        storage.close()
        clock = folder / "models" / label.hex()[:16] / "clock"
        os.utime(clock, (1000 + number, 1000 + number))
    storage = opened(capacity, b"third")
    i = 0
    while (folder / "models" / b"first".hex()[:16]).exists():
        put(storage, **{f"page-{i}": bytes(4096)})
        assert total(folder) <= capacity
        i += 1
    assert (folder / "models" / b"second".hex()[:16]).exists()
    assert storage.usage().evicted == 0


def test_a_model_that_is_open_keeps_its_room(opened):
    capacity = 96 << 10
    one, other = opened(capacity), opened(capacity, OTHER_LABEL)
    kept = [f"page-{i}" for i in range(4)]
    put(one, **dict.fromkeys(kept, bytes(4096)))
    for i in range(30):
        assert put(other, **{f"page-{i}": bytes(4096)}) == [True]
    assert one.exists(kept) == [True] * 4


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


def test_who_is_over_the_quota_gives_its_own_coldest(opened):
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
    other = opened(ttl_s=DAY_S, disk=disk)  # and nobody who opens it after the jump thinks so
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
    disk.reboot(DAY_S)
    assert there(opened(ttl_s=DAY_S, disk=disk), "a") == ""


# --- what else happens to a folder


def test_a_slab_cut_short_loses_what_was_cut_and_is_whole_again(opened, folder):
    storage = opened()
    names = [f"page-{i}" for i in range(12)]
    storage.put(names, [memoryview(bytes([i]) * 4096) for i in range(12)])
    (slab,) = slabs(folder)
    size = slab.stat().st_size
    os.truncate(slab, Shape(4096, (size - 4096) // 4352).head_bytes + 4 * 4096)
    buffer = bytearray(4096)
    assert [storage.get([name], [memoryview(buffer)]) for name in names[3:5]] == [[4096], [None]]
    storage.close()
    storage = opened()
    assert slab.stat().st_size == size
    assert [get(storage, name) for name in names[:4]] == [bytes([i]) * 4096 for i in range(4)]
    assert put(storage, more=b"1") == [True]


@pytest.mark.parametrize("harm", ["unlink", "header", "nothing", "half a table"])
def test_a_slab_that_is_gone_or_broken_is_lost_alone(opened, folder, harm):
    storage = opened()
    put(storage, small=b"1", large=bytes(9000))
    storage.close()
    slab = slabs(folder)[0]
    if harm == "unlink":
        slab.unlink()
    elif harm == "header":
        data = bytearray(slab.read_bytes())
        data[10] ^= 1
        slab.write_bytes(data)
    else:
        os.truncate(slab, 0 if harm == "nothing" else 300)
    storage = opened()
    assert there(storage, "small", "large") == "large"
    assert put(storage, small=b"2") == [True]
    assert (get(storage, "small"), get(storage, "large")) == (b"2", bytes(9000))
    assert total(folder) <= MIB


def test_a_folder_that_is_gone_takes_nothing_more_and_is_not_made_anew(opened, folder):
    storage = opened(SMALL_FILES + ONE)
    put(storage, a=b"1")
    folder.rename(folder.with_name("moved"))
    with pytest.raises(StorageError, match="stored 0 of 1 objects"):
        put(storage, b=bytes(9000))
    assert not folder.exists()


class SmallDisk(WithoutSync):
    """It has less room than the store may take."""

    def __init__(self, folder: Path, room_bytes: int) -> None:
        self.folder, self.room_bytes = folder, room_bytes

    def allocate(self, file: int, size_bytes: int) -> None:
        if total(self.folder) + size_bytes > self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(file, size_bytes)


def test_a_full_disk_makes_the_store_smaller_and_is_no_trouble(opened, folder):
    storage = opened(disk=SmallDisk(folder, 100_000))
    for i in range(40):
        assert put(storage, **{f"page-{i}": b"1"}) == [True]
    assert total(folder) <= 100_000
    assert there(storage, "page-39") == "page-39"
    assert put(storage, large=bytes(9000), huge=bytes(200_000)) == [True, False]
    assert get(storage, "large") == bytes(9000)


def test_a_disk_that_is_full_when_it_is_written_uses_the_places_it_has(opened):
    class NoRoomBehind(WithoutSync):
        full = False

        def write(self, file: int, data: Any, at: int) -> int:
            if self.full and at >= Shape(4096, 14).slot_at(3) and len(bytes(data[0])) >= 4096:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(file, data, at)

    disk = NoRoomBehind()
    storage = opened(disk=disk)
    put(storage, a=b"1", b=b"2", c=b"3")
    disk.full = True
    assert put(storage, d=b"4") == [True]
    assert get(storage, "d") == b"4"
    assert len(there(storage, *"abc").split()) == 2


def test_a_read_only_disk_takes_nothing_and_gives_what_it_has(opened):
    disk = Failing()
    storage = opened(SMALL_FILES + 2 * ONE, disk=disk)
    put(storage, a=b"1", b=b"2")
    disk.fails = {"write": errno.EROFS, "allocate": errno.EROFS}
    with pytest.raises(StorageError, match=r"stored 0 of 1 objects: .*Read-only"):
        put(storage, c=b"3")
    assert there(storage, *"abc") == "a b"
    assert (get(storage, "a"), get(storage, "b")) == (b"1", b"2")
    with pytest.raises(StorageError, match="Read-only"):
        storage.delete(["a"])
    assert get(storage, "a") == b"1"
    disk.fails = {}
    assert put(storage, c=b"3") == [True]
    assert get(storage, "c") == b"3"


def test_a_disk_that_becomes_read_only_in_the_middle_of_a_put_loses_nothing_else(opened):
    disk = Failing()
    storage = opened(SMALL_FILES + 15 * ONE, disk=disk)
    put(storage, a=b"1", b=b"2")
    for after in range(20):
        disk.fails, disk.after, disk.seen = {"write": errno.EROFS}, after, 0
        try:
            put(storage, **{f"c{after}": b"3"})
        except StorageError:
            disk.fails = {}
            assert set(there(storage, "a", "b").split()) == {"a", "b"}
        else:
            break
    else:
        pytest.fail("it never got through")
    assert after > 3
    disk.fails = {}
    assert put(storage, d=b"4") == [True]


def test_a_sync_that_fails_is_trouble_and_nothing_is_stored(opened):
    disk = Failing()
    storage = opened(disk=disk)
    disk.fails["sync"] = errno.EIO
    disk.after = 1  # the slab's own, when it is made
    with pytest.raises(StorageError, match=r"stored 0 of 2 objects: .*Input/output error"):
        put(storage, a=b"1", b=b"2")
    disk.fails.clear()
    assert there(storage, "a", "b") == ""


def test_what_somebody_else_is_about_to_sync_is_synced_before_it_is_said_to_be_stored(opened):
    class Counting(WithoutSync):
        syncs = 0

        def sync(self, file: int) -> None:
            self.syncs += 1

    counting = Counting()
    other = opened(disk=counting)
    told = []

    class Interrupted(WithoutSync):
        def sync(self, file: int) -> None:
            counting.syncs = 0
            told.append((put(other, a=b"1"), counting.syncs))

    one = opened()
    put(one, z=b"26")
    one._books.slabs[0].disk = Interrupted()
    assert put(one, a=b"1") == [True]
    assert told == [([True], 1)]


class BadSector(WithoutSync):
    """One place on the disk that cannot be read."""

    bad = range(0)
    of: tuple[int, ...] = ()  # descriptors of the file
    all_bad = False

    def read(self, file: int, into: Any, at: int) -> int:
        size = sum(view.nbytes for view in into)
        if self.all_bad or (file in self.of and at < self.bad.stop and at + size > self.bad.start):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, into, at)


def test_an_object_on_a_bad_sector_is_missing_alone_and_its_place_is_not_used_again(opened):
    disk = BadSector()
    storage = opened(disk=disk, threads=1)
    names = list("abcde")
    data = [bytes([i]) * 4096 for i in range(5)]
    storage.put(names, [memoryview(each) for each in data])
    slab, row = storage._books.place("b")
    place = slab.shape.slot_at(row)
    disk.bad, disk.of = range(place + 512, place + 1024), (slab.file, slab.direct)
    buffers = [bytearray(4096) for _ in names]
    found = [storage.get([name], [memoryview(buffer)]) for name, buffer in zip(names, buffers, strict=True)]
    assert found == [[4096], [None], [4096], [4096], [4096]]
    assert storage.trouble()["damaged"] == 1
    for i in range(30):
        assert put(storage, **{f"more-{i}": b"1"}) == [True]
        assert get(storage, f"more-{i}") == b"1"
    storage.close()
    assert there(opened(disk=disk), "b") == ""


def test_a_disk_that_reads_nothing_at_all_is_trouble_and_not_a_miss(opened):
    disk = BadSector()
    storage = opened(disk=disk)
    if storage._books.slabs and next(iter(storage._books.slabs.values())).direct < 0:
        pytest.skip("no direct I/O here")
    put(storage, a=b"1", b=b"2")
    disk.all_bad = True
    with pytest.raises(StorageError, match=r"read 0 of 2 objects: .*Input/output error"):
        storage.get(["a", "b"], [memoryview(bytearray(1)) for _ in "ab"])
    with pytest.raises(StorageError):
        get(storage, "a")
    disk.all_bad = False
    assert there(storage, "a", "b") == "a b"
    assert get(storage, "a") == b"1"


class Stingy(WithoutSync):
    """It takes and gives a few bytes at a time, as a disk may."""

    def open(self, path: Path, **how: Any) -> int:
        if how.get("direct"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, **how)

    def read(self, file: int, into: Any, at: int) -> int:
        return super().read(file, [into[0][:200]], at)

    def write(self, file: int, data: Any, at: int) -> int:
        return super().write(file, [memoryview(data[0])[:300]], at)


def test_a_disk_that_takes_and_gives_a_few_bytes_at_a_time_stores_whole_objects(opened):
    storage = opened(disk=Stingy())
    data = bytes(range(256)) * 20
    put(storage, a=data, b=b"short")
    storage.close()
    storage = opened(disk=Stingy())
    assert (get(storage, "a"), get(storage, "b")) == (data, b"short")


def test_a_disk_that_takes_nothing_is_trouble_and_not_an_endless_loop(opened):
    class Deaf(WithoutSync):
        deaf = False

        def write(self, file: int, data: Any, at: int) -> int:
            return 0 if self.deaf else super().write(file, data, at)

    disk = Deaf()
    storage = opened(disk=disk)
    disk.deaf = True
    with pytest.raises(StorageError, match="takes no more bytes"):
        put(storage, a=b"1")


# --- several processes


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
    assert storage.trouble()["damaged"] == 0


def test_a_table_that_is_being_written_while_it_is_read_costs_a_miss_for_a_moment(opened):
    one = opened()

    class TearsTheTable(WithoutSync):
        """Another process looks when half of an entry is written."""

        other: FileStorage | None = None
        seen: list[bool]

        def write(self, file: int, data: Any, at: int) -> int:
            if self.other is not None and 256 <= at < 4096 and len(data[0]) == 256:
                super().write(file, [bytes(data[0])[:100]], at)
                self.seen += self.other.exists(["a"])
            return super().write(file, data, at)

    put(one, z=b"26")
    disk = TearsTheTable()
    disk.seen = []
    writer = opened(disk=disk)
    disk.other = opened()
    put(writer, a=b"1")
    disk.other, other = None, disk.other
    assert there(other, "a") == "a"
    assert get(other, "a") == b"1"
    assert put(other, b=b"2") == [True]
    assert other.trouble()["lost"] == 0


def test_of_two_objects_of_one_name_one_goes_for_good(opened):
    """Two processes may have stored it at once, of which one died before it could tell."""
    storage = opened()
    names = [f"page-{i:02}" for i in range(20)]
    assert all(storage.put(names, [memoryview(b"1")] * 20))
    with storage.changing() as books:
        one, row = books.place("page-00")
        other = next(slab for slab in books.slabs.values() if slab is not one)
        double = other.take_free()
        assert double is not None
        for column in ("state", "length", "stored", "names"):
            getattr(other, column)[double] = getattr(one, column)[row]
        other.write(double, [memoryview(b"1")])
        other.save([double])
    storage.close()
    storage = opened()
    assert put(storage, new=b"2") == [True]
    with storage.looking() as books:
        tables = [found for slab in books.slabs.values() for _, found in slab.load(0, slab.shape.slots)]
    on_disk = [name for table in tables for name in table.names]
    assert sorted(on_disk) == sorted([*names, "new"])
    assert storage.usage().objects == 21
    assert get(storage, "page-00") == b"1"
    assert storage.trouble()["lost"] == 0


def test_an_object_that_went_to_another_place_is_found_there_by_who_never_changes_anything(opened):
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
from kvarve.storage.disk import Disk
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
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


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


def test_who_looks_whether_a_folder_is_in_use_is_taken_for_no_user_of_it(opened, folder):
    """Else the one who opens it at that moment would believe what processes of before a power cut told each other."""
    storage = opened()
    put(storage, a=b"1")
    storage.close()
    (model,) = folder.glob("models/*")
    found = []

    class Interrupted(WithoutSync):
        """Somebody opens the folder in the middle of a look."""

        def unlock(self, file: int) -> None:
            (model / "changes").write_bytes(b"")
            found.append(there(opened(), "a"))
            super().unlock(file)

    assert is_in_use(Interrupted(), model) is False
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
    start = threading.Barrier(4, timeout=60)
    ended: list[BaseException] = []

    def work(worker: int) -> None:
        start.wait()
        try:
            for turn in itertools.count():
                name = f"page-{worker}-{turn % 50}"
                storage.put([name, f"{name}-too"], [memoryview(bytes(9000))] * 2)
                storage.get([name, f"{name}-too"], [memoryview(bytearray(9000)) for _ in "12"])
        except BaseException as error:  # noqa: BLE001  whatever it is, it has to be the right one
            ended.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    while storage.usage().objects < 30:
        pass
    storage.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in ended] == [StorageError] * 3, ended
    assert all("closed" in str(error) for error in ended)


def test_a_process_that_stops_with_the_lock_in_its_hands_costs_the_others_no_more_than_a_wait(opened, monkeypatch):
    monkeypatch.setattr("kvarve.storage.folder.MUTEX_S", 0.05)
    storage, stopped = opened(), opened()
    put(storage, a=b"1")
    stopped._folder.disk.lock(stopped._folder._mutex)
    for call in (lambda: put(storage, b=b"2"), opened):
        with pytest.raises(StorageError, match="is it stopped"):
            call()
    assert get(storage, "a") == b"1"
    stopped._folder.disk.unlock(stopped._folder._mutex)
    assert put(storage, b=b"2") == [True]
