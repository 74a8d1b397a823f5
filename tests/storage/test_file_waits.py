"""Readers do not wait for long work of a store, and a store keeps nothing of groups that have no object any more."""

import threading
from typing import Any

import inspect_files
import pytest
from file_disks import MIB, Calls, Clockwork, Rigged
from processes import until

from kvarve.storage import FileStorage
from kvarve.storage.file import _slab_allocator as slab_allocator
from kvarve.storage.file._idle_models import IdleModels
from kvarve.storage.file._slab_allocator import AT_ONCE
from kvarve.testing.suite import OTHER_LABEL, get, put, there

CAPACITY = 512 << 10


def full(storage: FileStorage) -> list[str]:
    """Store until objects had to be evicted; the names that are there now."""
    names = [f"page-{i}" for i in range(150)]
    for at in range(0, 150, 10):
        assert all(put(storage, **dict.fromkeys(names[at : at + 10], bytes(4096))))
    assert storage.usage().evicted > 0
    return there(storage, *names).split()


def asked(storage: FileStorage, name: str) -> None:
    """Make every call of a reader; each has to be answered now."""
    calls = Calls()
    calls.start("exists", lambda: storage.exists([name, "x"]))
    calls.start("get", lambda: get(storage, name))
    calls.start("usage", lambda: storage.usage().objects)
    answers = calls.join()
    assert answers["exists"][1] is False
    assert answers["usage"] > 0


def while_it_waits(monkeypatch: pytest.MonkeyPatch, where: Any, what: str) -> tuple[threading.Event, threading.Event]:
    """The function `what` of `where` waits, once it is called, until it may go on."""
    began, goes_on, really = threading.Event(), threading.Event(), getattr(where, what)

    def waiting(*args: Any, **how: Any) -> Any:
        began.set()
        assert goes_on.wait(60)
        return really(*args, **how)

    monkeypatch.setattr(where, what, waiting)
    return began, goes_on


@pytest.mark.parametrize("long", ["victims are chosen", "the tables of other models are read"])
def test_a_reader_does_not_wait_while(opened, monkeypatch, long):
    """With a million objects that took up to 0.8 s, once for every 64th of them that was evicted."""
    other = opened(CAPACITY, OTHER_LABEL)
    full(other)
    other.close()
    storage = opened(CAPACITY)
    put(storage, first=bytes(9000))
    where, what = (slab_allocator, "coldest") if long.startswith("victims") else (IdleModels, "offers")
    began, goes_on = while_it_waits(monkeypatch, where, what)
    calls = Calls()
    calls.start("put", lambda: put(storage, new=b"1"))
    assert began.wait(60)
    asked(storage, "first")
    goes_on.set()
    assert calls.join() == {"put": [True]}


def test_a_reader_does_not_wait_until_all_of_a_slab_is_evicted(opened):
    storage = opened(8 * MIB)
    names = [f"page-{i}" for i in range(120)]
    assert all(storage.put(names, [memoryview(bytes(4096))] * 120))
    held = [name for name, place in inspect_files.places(storage).items() if place.slab == 0]
    assert len(held) > 3 * AT_ONCE
    left = []
    with inspect_files.turns(storage, lambda: (asked(storage, held[0]), left.append(sum(storage.exists(held))))):
        inspect_files.remove(storage, 0)
    assert left == [len(held) - 2 * AT_ONCE], "some of them have been evicted by then"
    assert storage.exists(held) == [False] * len(held)
    assert storage.usage().evicted == len(held)


def test_a_reader_waits_for_one_victim_of_a_put_and_not_for_all(opened):
    """The put let go of the lock between two rows, and had it again before the reader was awake."""
    disk, calls, seized = Rigged(), Calls(), []
    storage = opened(CAPACITY, disk=disk)
    there_still = full(storage)[-1]

    def seizes(call: str, name: str, at: int) -> None:
        if call != "lock_range":
            return
        seized.append(at)
        if len(seized) == 1:
            calls.start("exists", lambda: storage.exists([there_still]))
            until(lambda: inspect_files.is_asked(storage))
        elif len(seized) == 2:
            assert calls.join() == {"exists": [True]}

    disk.happens = seizes
    assert storage.put(["b", "c", "d"], [memoryview(b"1")] * 3) == [True] * 3
    assert len(seized) == 3


@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_reader_does_not_wait_until_tables_are_written(opened, what):
    disk = Rigged()
    storage = opened(CAPACITY, disk=disk)
    put(storage, a=b"1", b=b"2")
    seen = []

    disk.once(lambda: seen.append(asked(storage, "a")), "write", ".table")
    assert (put(storage, c=b"3") if what == "put" else storage.delete(["b"])) == [True]
    assert seen


def test_what_is_too_old_goes_in_parts_between_which_others_are_heard(opened):
    disk = Clockwork()
    storage = opened(8 * MIB, disk=disk, ttl_s=60.0)
    names = [f"page-{i}" for i in range(120)]
    assert all(storage.put(names, [memoryview(bytes(4096))] * 120))
    disk.elapse(100)
    put(storage, young=b"1")  # expired objects are freed now
    disk.elapse(59)
    assert inspect_files.rows(storage)["stored"] == 1
    assert all(storage.put(names, [memoryview(bytes(4096))] * 120))
    disk.elapse(61)
    left = []
    with inspect_files.turns(storage, lambda: left.append(inspect_files.rows(storage)["stored"])):
        assert put(storage, other=b"1") == [True]
    assert left and 0 < left[0] < 121


# --- victim lists of groups without objects


def test_of_salts_that_have_come_and_gone_nothing_stays(opened):
    """Each left a list of victims, of some 8 KB, for as long as the store was open."""
    storage = opened(MIB, quota_bytes=5 * 4096)
    for number in range(50):
        for pages in (range(5), range(5, 7)):  # the second call evicts objects of the first
            names = [f"{number:016x}-{page}" for page in pages]
            assert all(storage.put(names, [memoryview(b"1")] * len(names)))
        if number % 3 == 0:
            storage.delete([f"{number:016x}-{page}" for page in range(7)])
    names, counted = inspect_files.places(storage), inspect_files.groups(storage)
    assert counted.keys() == {name.partition("-")[0] for name in names}
    assert sum(counted.values()) == 4096 * len(names)
    assert inspect_files.orders(storage) <= 32
    for group in counted:
        storage.put([f"{group}-x"], [memoryview(b"1")])
        there = [name for name in inspect_files.places(storage) if name.startswith(group)]
        assert len(there) <= 5, "a quota holds for more salts than orders are kept of"


def test_two_salts_that_have_one_number_do_not_pay_for_each_other(opened, monkeypatch):
    for module in ("_index", "_slab_allocator"):
        monkeypatch.setattr(f"kvarve.storage.file.{module}.number_of", lambda group: 7)
    storage = opened(quota_bytes=3 * 4096)
    for i in range(20):
        for group in ("aaaa", "bbbb"):
            assert put(storage, **{f"{group}-{i}": b"1"}) == [True]
    assert there(storage, *(f"{group}-{i}" for group in ("aaaa", "bbbb") for i in range(20))) == (
        "aaaa-17 aaaa-18 aaaa-19 bbbb-17 bbbb-18 bbbb-19"
    )
