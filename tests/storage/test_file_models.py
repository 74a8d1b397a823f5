"""Several models in one folder share its capacity by last use; and a folder has one capacity at a time."""

import itertools

import inspect_files
import numpy as np
import pytest
from file_disks import MIB, Clockwork, everything, file_name, model_of

from kvarve.cli.main import main
from kvarve.errors import StorageError
from kvarve.storage.file._eviction_queue import LastUse
from kvarve.storage.file.folder import Wanted, check_folder
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

CAPACITY = 512 << 10
HOUR_S = 3600.0


def names(model: str, first: int, last: int) -> list[str]:
    return [f"{model}-{i}" for i in range(first, last)]


def fill(storage, disk: Clockwork, those: list[str], *, every_s: float = 1.0, size_bytes: int = 4096) -> None:
    for at in range(0, len(those), 10):
        some = those[at : at + 10]
        assert put(storage, **dict.fromkeys(some, bytes(size_bytes))) == [True] * len(some)
        disk.elapse(10 * every_s)


def kept(storage, those: list[str]) -> int:
    return sum(storage.exists(those))


def full(opened, disk: Clockwork, label: bytes = LABEL, model: str = "a") -> list[str]:
    """A folder full of one model, closed; its names in the order of their last use."""
    storage, all_names = opened(CAPACITY, label, disk=disk), names(model, 0, 150)
    fill(storage, disk, all_names)
    there_now = [*itertools.compress(all_names, storage.exists(all_names))]
    assert 60 < len(there_now) < 150 and storage.usage().evicted > 0
    storage.close()
    return there_now


# --- idle models


def test_a_model_that_writes_on_evicts_its_own_pages_before_slightly_older_ones_of_an_idle_model(opened):
    disk = Clockwork()
    idle, lately = opened(CAPACITY, disk=disk), names("a", 0, 20)
    fill(idle, disk, lately)
    idle.close()
    busy = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    fill(busy, disk, names("b", 0, 130))
    assert busy.usage().evicted > 20
    again = opened(CAPACITY, disk=disk)
    assert kept(again, lately) == 20


def test_the_first_page_of_a_model_does_not_cost_another_one_all_it_has(opened):
    disk = Clockwork()
    before = full(opened, disk)
    other = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    assert put(other, **{"b-0": b"1"}) == [True]
    other.close()
    storage = opened(CAPACITY, disk=disk)
    assert kept(storage, before) >= len(before) - 12, "a slab"
    assert storage.exists(before[-30:]) == [True] * 30


def test_slabs_of_idle_models_go_the_longest_unused_first_whosever_they_are(opened):
    disk = Clockwork()
    for model, label in (("a", b"first"), ("b", b"second")):
        storage = opened(CAPACITY, label, disk=disk)
        fill(storage, disk, names(model, 0, 40))
        storage.close()
    disk.elapse(HOUR_S)
    storage = opened(CAPACITY, b"first", disk=disk)
    for name in names("a", 30, 40):
        get(storage, name)
    storage.close()
    disk.elapse(60)
    third = opened(CAPACITY, b"third", disk=disk)
    fill(third, disk, names("c", 0, 50), every_s=0.1)
    first, second = opened(CAPACITY, b"first", disk=disk), opened(CAPACITY, b"second", disk=disk)
    assert first.exists(names("a", 30, 40)) == [True] * 10
    assert kept(first, names("a", 0, 20)) == 0
    assert kept(second, names("b", 0, 40)) > kept(first, names("a", 0, 30))


def test_what_a_model_stores_for_long_enough_is_all_that_stays(opened, folder):
    """As within one model: the least recently used slab is evicted, and every slab can be evicted."""
    disk = Clockwork()
    full(opened, disk)
    other = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    for first in range(0, 300, 30):
        assert all(put(other, **dict.fromkeys(names("b", first, first + 30), bytes(4096))))
        disk.elapse(30)
    assert not (folder / "models" / LABEL.hex()[:16]).exists()
    assert kept(other, names("b", 220, 300)) == 80


def test_a_model_that_is_open_gives_nothing_to_another(opened):
    disk = Clockwork()
    one = opened(CAPACITY, disk=disk)
    fill(one, disk, names("a", 0, 40))
    disk.elapse(10 * HOUR_S)
    other = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    fill(other, disk, names("b", 0, 200))
    assert one.exists(names("a", 0, 40)) == [True] * 40


def test_of_an_idle_model_the_last_slab_of_a_class_goes_last(opened):
    """A prompt needs a page of each class: with the only slab of one all the others are worth nothing."""
    disk = Clockwork()
    storage = opened(CAPACITY, disk=disk)
    fill(storage, disk, ["a-state"], size_bytes=20_000)
    fill(storage, disk, names("a", 0, 70))
    storage.close()
    other = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    fill(other, disk, names("b", 0, 45))
    other.close()
    storage = opened(CAPACITY, disk=disk)
    assert kept(storage, names("a", 0, 70)) < 70
    assert there(storage, "a-state") == "a-state"


def test_an_idle_models_times_in_the_future_do_not_keep_it_for_ever(opened, folder):
    disk, wrong = Clockwork(), Clockwork()
    wrong.wall += 300 * 365 * 24 * 3600 * 10**9
    storage = opened(CAPACITY, disk=wrong)
    fill(storage, wrong, names("a", 0, 60))
    storage.close()
    (model_of(folder) / "clock").unlink()
    other = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    fill(other, disk, names("b", 0, 220))
    assert kept(other, names("b", 140, 220)) == 80


def test_an_idle_models_order_of_use_is_what_its_processes_left_even_if_they_were_killed(opened):
    disk = Clockwork()
    storage = opened(CAPACITY, disk=disk)
    fill(storage, disk, names("a", 0, 60))
    disk.elapse(HOUR_S)
    assert all(get(storage, name) is not None for name in names("a", 0, 10))
    inspect_files.die(storage)
    other = opened(CAPACITY, OTHER_LABEL, "model B", disk=disk)
    fill(other, disk, names("b", 0, 60), every_s=0.1)
    other.close()
    storage = opened(CAPACITY, disk=disk)
    assert kept(storage, names("a", 0, 10)) == 10
    assert kept(storage, names("a", 20, 60)) < 40


def test_slabs_that_one_call_has_filled_have_an_order():
    """Means of 10**18 ns were floats, with steps of 128 ns: which slab was evicted was chance."""
    now_ns = 1_700_000_000_000_000_000
    assert LastUse.of(np.array([now_ns + 1, now_ns + 3])) == LastUse(now_ns + 2, now_ns + 3)


# --- one capacity


@pytest.mark.parametrize(("capacity", "label"), [(64 << 10, LABEL), (CAPACITY + 1, OTHER_LABEL)])
def test_an_opening_with_another_capacity_is_refused_and_takes_nothing_from_the_open_store(
    opened, folder, capacity, label
):
    storage = opened(CAPACITY)
    those = names("a", 0, 50)
    assert all(storage.put(those, [memoryview(bytes(4096))] * 50))
    before = everything(folder)
    for call in (
        lambda: check_folder(Wanted(folder, capacity, label, "model")),
        lambda: opened(capacity, label, "model"),
    ):
        with pytest.raises(StorageError) as refusal:
            call()
        told = str(refusal.value)
        assert f"is open with a capacity of 512 KiB ({CAPACITY} bytes), not" in told and f"({capacity} bytes)" in told
        assert "give the same, or first end or detach the processes that have it open" in told and "\n" not in told
    assert everything(folder) == before
    assert storage.exists(those) == [True] * 50
    opened(CAPACITY, label, "model")
    storage.close()


def test_the_capacity_of_a_process_that_has_died_binds_no_other(opened):
    other = opened(CAPACITY)
    with pytest.raises(StorageError, match="is open with a capacity"):
        opened(MIB)
    inspect_files.die(other)
    assert put(opened(MIB), a=b"1") == [True]


def test_maintenance_needs_to_know_no_capacity(opened, folder):
    storage = opened(CAPACITY)
    put(storage, **{"aaaa-1": b"1"})
    (model,) = FolderUpkeep(folder).contents().models
    with FolderUpkeep(folder).opened(model) as beside:
        assert beside.collect()["expired"] == 0
        with pytest.raises(StorageError, match="not 1 MiB"):
            opened(MIB)
        assert put(opened(CAPACITY), **{"aaaa-2": b"1"}) == [True]
    for words in (["gc", f"file://{folder}?capacity=1GiB"], ["drop", str(folder), "--group", "aaaa", "--yes"]):
        assert main(["storage", *words]) == 0
    assert there(storage, "aaaa-1", "aaaa-2") == ""


class Full(Clockwork):
    """No file of a process takes a byte that was not there: there is no block left for it."""

    def write(self, file, data, at):
        size_bytes = sum(len(each) for each in data)
        if file_name(file).startswith("process-") and at + size_bytes > self.size(file):
            raise OSError(28, "No space left on device")
        return super().write(file, data, at)


def test_a_store_on_a_full_disk_still_opens_and_is_not_shrunk(opened, folder):
    """Its capacity could not be written, so a second opener with a smaller one evicted its objects."""
    first = opened(CAPACITY)
    put(first, a=b"1")
    first.close()
    storage = opened(CAPACITY, disk=Full())
    assert there(storage, "a") == "a"
    with pytest.raises(StorageError, match="is open with a capacity"):
        opened(64 << 10)
    storage.close()
    (model,) = FolderUpkeep(folder).contents().models
    with FolderUpkeep(folder).opened(model):  # it has the number, and takes no capacity
        opened(MIB).close()
    assert there(opened(64 << 10, disk=Full()), "a") == "a"
    with pytest.raises(StorageError, match="capacity of 64 KiB"):
        opened(CAPACITY)


def test_a_process_that_cannot_write_its_capacity_does_not_open_a_store(opened, folder):
    storage = opened(CAPACITY)
    assert put(storage, a=b"1") == [True]
    with pytest.raises(StorageError, match="No space left on device"):
        opened(CAPACITY, disk=Full())
    assert there(storage, "a") == "a"
