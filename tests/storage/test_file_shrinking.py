"""A store that is opened with less capacity, or that gives up a slab, keeps what was used last, wherever it lay."""

import errno
import itertools
import shutil
from pathlib import Path

import file_pages
import inspect_files
import pytest
from file_disks import MIB, Clockwork, Open, RiggedClockwork, file_name, quietly, total, trouble

from kvarve.storage import FileStorage
from kvarve.testing.suite import OTHER_LABEL, get, put
from tests.sim.faulty_disk import Fate, FaultyDisk

WIDE, NARROW = MIB, 256 << 10


def page(i: int, size_bytes: int = 4096) -> bytes:
    return i.to_bytes(4, "little") * (size_bytes // 4)


def filled(storage: FileStorage, disk: Clockwork, count: int, size_bytes: int = 4096) -> list[str]:
    """Objects, ten at a time; the names of those that are there."""
    for first in range(0, count, 10):
        assert all(put(storage, **{f"page-{i}": page(i, size_bytes) for i in range(first, first + 10)}))
        disk.elapse(1)
    names = [f"page-{i}" for i in range(count)]
    return [*itertools.compress(names, storage.exists(names))]


def use(storage: FileStorage, disk: Clockwork, names: list[str]) -> None:
    """Now, an hour after they were stored, one a second."""
    disk.elapse(3600)
    for name in names:
        assert get(storage, name) is not None
        disk.elapse(1)


def hot_among_cold(opened: Open, disk: Clockwork, count: int = 20) -> list[str]:
    """A closed store of 200 objects, of which so many were used last; their names."""
    storage = opened(WIDE, disk=disk)
    there_now = filled(storage, disk, 200)
    hot = there_now[:: len(there_now) // count][:count]
    use(storage, disk, hot)
    storage.close()
    return hot


def kept(storage: FileStorage, names: list[str]) -> int:
    """How many are there, with their bytes."""
    found = [name for name in names if storage.exists([name]) == [True]]
    for name in found:
        data = get(storage, name)
        assert data is not None and data == page(int(name[5:]), len(data))
    return len(found)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "s3fifo"])
def test_a_store_that_becomes_smaller_keeps_the_hot_objects_that_lay_among_cold_ones(opened, folder, eviction):
    disk = Clockwork()
    storage = opened(WIDE, disk=disk, eviction=eviction)
    there_now = filled(storage, disk, 200)
    hot = there_now[:: len(there_now) // 20][:20]
    use(storage, disk, hot * 2)
    before = {name: inspect_files.place(storage, name) for name in hot}
    assert len({place.slab for place in before.values()}) > 8, "hot objects lie in most slabs"
    storage.close()
    storage = opened(NARROW, disk=disk, eviction=eviction)
    assert total(folder) <= NARROW
    assert kept(storage, hot) == 20
    storage.close()
    storage = opened(NARROW, disk=disk, eviction=eviction)
    for name, place in before.items():
        stored_ns, length, used_ns, uses = inspect_files.place(storage, name).facts
        assert (stored_ns // 1_000_000, length) == (place.facts[0] // 1_000_000, place.facts[1])
        assert used_ns >= place.facts[2] and uses >= 2, "as old and as much used as it was"
    assert kept(storage, hot) == 20, "another process finds them where they were moved to"
    assert kept(storage, there_now) > 20


class Full(Clockwork):
    free_bytes = 1 << 40

    def space(self, folder):
        return self.free_bytes, 1 << 40

    def allocate(self, file, size_bytes):
        if size_bytes > self.free_bytes:
            raise trouble(errno.ENOSPC)
        super().allocate(file, size_bytes)

    def truncate(self, folder, name):
        self.free_bytes += super().look(folder, name).st_size
        super().truncate(folder, name)


@pytest.mark.parametrize("free_bytes", [1 << 40, 100 * MIB, 0], ids=["room", "full beyond the reserve", "wholly full"])
def test_a_store_that_becomes_smaller_than_one_of_its_slabs_keeps_its_hottest_objects(opened, folder, free_bytes):
    """On a full disk the room for them is that of the coldest slab."""
    disk = Full()
    storage = opened(WIDE, disk=disk)
    there_now = filled(storage, disk, 200)
    assert put(storage, large=bytes(20_000)) == [True]
    hot = there_now[:: len(there_now) // 4][:4]
    use(storage, disk, [*hot, "large"] if free_bytes < 1 << 40 else hot)
    least = min(shape.bytes for shape in inspect_files.slabs(storage).values())
    storage.close()
    disk.free_bytes = free_bytes
    storage = opened(least // 2 + (20 << 10), disk=disk)
    assert total(folder) <= least // 2 + (20 << 10)
    assert kept(storage, hot) == 4


def test_a_model_that_no_process_has_open_keeps_its_hot_objects_too(opened, folder):
    disk = Clockwork()
    hot = hot_among_cold(opened, disk)
    other = opened(NARROW, OTHER_LABEL, "model B", disk=disk)
    assert total(folder) <= NARROW
    other.close()
    assert kept(opened(NARROW, disk=disk), hot) == 20


def test_objects_are_moved_for_so_long_and_the_hottest_first(opened, folder, caplog):
    class Slow(Clockwork):
        pause_s = 0.0

        def write(self, file, data, at):
            self.elapse(self.pause_s * (file_name(file).startswith("slab") and not file_name(file).endswith("table")))
            return super().write(file, data, at)

    disk = Slow()
    hot = hot_among_cold(opened, disk, 60)
    disk.pause_s = 0.25
    began = disk.wall
    storage = opened(NARROW, disk=disk)
    assert (disk.wall - began) / 1e9 < 15, "objects are moved for 5 s, and the batch that was begun ends"
    assert "not all that is used could be moved in time" in caplog.text
    left = [name for name in hot if storage.exists([name]) == [True]]
    assert 0 < len(left) < 60 and kept(storage, hot[-20:]) == 20, "those used last"


def test_the_bytes_of_what_is_moved_are_on_the_medium_before_its_entry(opened):
    """Else an entry may outlive a power cut and its bytes not, and the original is given up for it."""

    class Ordered(Clockwork):
        unsynced: set[str] | None = None

        def write(self, file, data, at):
            name = file_name(file)
            if self.unsynced is not None and name.startswith("slab"):
                assert not name.endswith("table") or name.removesuffix(".table") not in self.unsynced
                self.unsynced |= {name} - {name.removesuffix(".table") + ".table"}
            return super().write(file, data, at)

        def sync(self, file):
            if self.unsynced is not None:
                self.unsynced.discard(file_name(file))

    disk = Ordered()
    hot = hot_among_cold(opened, disk)
    disk.unsynced = set()
    assert kept(opened(NARROW, disk=disk), hot) == 20
    assert disk.unsynced == set()


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_bad_sector_costs_the_objects_alone_that_were_to_be_moved_from_or_to_it(opened, folder, call):
    def bad(this: str, name: str, at: int) -> None:
        if this == call and len(name) == len("slab-000000") and at % (5 * 4096) == 0:
            raise trouble()

    disk = RiggedClockwork()
    hot = hot_among_cold(opened, disk)
    disk.happens = bad
    storage = opened(NARROW, disk=disk)
    disk.happens = quietly
    assert total(folder) <= NARROW
    assert 12 <= kept(storage, hot) < 20
    assert inspect_files.seized(storage) == 0 and put(storage, more=b"1") == [True]


def test_a_process_that_has_the_store_open_finds_what_another_one_has_moved(opened, folder):
    """A slab of one class gives its room to another class, and its hot objects are among others of its own."""
    disk = Clockwork()
    storage, other = opened(WIDE, disk=disk), opened(WIDE, disk=disk)
    lies = {name: inspect_files.place(storage, name).slab for name in filled(storage, disk, 300)}
    hot = [*{slab: name for name, slab in lies.items()}.values()]  # one of each slab
    use(storage, disk, hot)
    disk.elapse(1)

    def looks() -> None:
        assert kept(other, hot) == len(hot), "while each is there twice"
        other.delete(["none"])  # it frees what is there twice

    with inspect_files.before_removals(storage, looks):
        assert put(storage, large=bytes(40_000)) == [True]
    assert any(inspect_files.place(storage, name).slab != lies[name] for name in hot), "of the slab that was removed"
    assert kept(storage, hot) == kept(other, hot) == len(hot)
    assert total(folder) <= WIDE


def test_what_a_put_has_answered_for_is_not_evicted_for_what_is_moved(opened):
    disk = Clockwork()
    storage = opened(WIDE, disk=disk)
    lies = {name: inspect_files.place(storage, name).slab for name in filled(storage, disk, 300)}
    coldest = next(name for name, slab in lies.items() if slab != 0)
    use(storage, disk, [name for name in lies if name != coldest])
    names = [coldest, "large"]
    stored = storage.put(names, [memoryview(page(int(coldest[5:]))), memoryview(bytes(40_000))])
    assert stored == [True, True] and storage.exists(names) == stored


@pytest.mark.parametrize(("fate", "seeds"), [("killed", 1), ("dropped", 1), ("torn", 4)])
@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.long)])
def test_after_a_cut_at_any_moment_of_it_the_hot_objects_are_there_and_no_bytes_are_wrong(
    tmp_path: Path, fate: Fate, seeds: int, every: int
) -> None:
    root, wide, narrow = tmp_path / "root", 400 << 10, 120 << 10
    disk = FaultyDisk(root)
    storage = file_pages.opened(root, disk, capacity=wide)
    cold, hot = file_pages.pages("full", *range(70)), file_pages.pages("full", *range(100, 112))
    assert all(file_pages.store(storage, cold))
    storage.delete([page.name for page in cold[:60:5]])
    assert all(file_pages.store(storage, hot)), "in the rows of those, of all slabs"
    storage.close()
    began = len(disk.events)
    file_pages.opened(root, disk, capacity=narrow).close()
    missing = 0
    for count, seed in itertools.product(range(began, len(disk.events) + 1, every), range(seeds)):
        folder = tmp_path / f"{count} {seed}"
        disk.after(count, folder, fate, seed)
        storage = file_pages.opened(folder, capacity=narrow)
        missing += len({*hot} - file_pages.intact(storage, hot + cold))
        assert total(folder) <= narrow
        storage.close()
        shutil.rmtree(folder)
    assert not missing
