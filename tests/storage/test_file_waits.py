"""Readers do not wait for long work of a store, and a store keeps nothing of groups that have no object any more."""

import gc
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from file_disks import MIB, Calls, Clockwork, Rigged, WithoutSync

from kvarve.storage import FileStorage
from kvarve.storage.file.idle_models import IdleModels
from kvarve.storage.file.slab_allocator import AT_ONCE
from kvarve.testing.suite import OTHER_LABEL, get, put, there

CAPACITY = 512 << 10


def full(storage: FileStorage, count: int = 200) -> list[str]:
    """Store until objects had to be evicted; the names that are there now."""
    names = [f"page-{i}" for i in range(count)]
    for name in names:
        assert put(storage, **{name: bytes(4096)}) == [True]
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


def test_a_lookup_does_not_wait_while_victims_are_chosen(opened, monkeypatch):
    """With a million objects that took up to 0.8 s, once for every 64th of them that was evicted."""
    storage = opened(CAPACITY)
    some = full(storage)
    storage._allocator._queues.clear()
    began, goes_on = while_it_waits(
        monkeypatch, __import__("kvarve.storage.file.slab_allocator", fromlist=["coldest"]), "coldest"
    )
    calls = Calls()
    calls.start("put", lambda: put(storage, new=b"1"))
    assert began.wait(60)
    asked(storage, some[-1])
    goes_on.set()
    assert calls.join() == {"put": [True]}


def test_a_reader_does_not_wait_until_the_tables_of_other_models_are_read(opened, monkeypatch):
    other = opened(CAPACITY, OTHER_LABEL, "model B")
    full(other)
    other.close()
    storage = opened(CAPACITY)
    put(storage, first=bytes(9000))
    began, goes_on = while_it_waits(monkeypatch, IdleModels, "offers")
    calls = Calls()
    calls.start("put", lambda: put(storage, new=b"1"))
    assert began.wait(60)
    asked(storage, "first")
    goes_on.set()
    assert calls.join() == {"put": [True]}


class Turns:
    """A lock; before it is taken for the third time a reader goes first."""

    def __init__(self, lock: Any, between: Callable[[], None]) -> None:
        self.lock, self.between, self.taken = lock, between, 0

    def __enter__(self) -> None:
        self.taken += 1
        if self.taken == 3:
            self.between()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_reader_does_not_wait_until_all_of_a_slab_is_evicted(opened):
    storage = opened(8 * MIB)
    names = [f"page-{i}" for i in range(120)]
    assert all(storage.put(names, [memoryview(bytes(4096))] * 120))
    slab = storage._index.slabs[0]
    held = [name for name in names if storage._index.place(name)[0] is slab]
    assert len(held) > 3 * AT_ONCE
    left = []
    with storage._changing():
        turns = Turns(storage._lock, lambda: (asked(storage, held[0]), left.append(sum(storage.exists(held)))))
        storage._allocator._lock = turns
        storage._allocator.remove(slab, "a test")
    assert left == [len(held) - 2 * AT_ONCE], "some of them have been evicted by then"
    assert storage.exists(held) == [False] * len(held)
    assert storage.usage().evicted == len(held)


class Seizing(WithoutSync):
    """Before a row is locked it asks `seizes()`."""

    seizes: Callable[[], None] = staticmethod(lambda: None)

    def lock_range(self, file: int, at: int, size_bytes: int) -> bool:
        self.seizes()
        return super().lock_range(file, at, size_bytes)


def test_a_reader_waits_for_one_victim_of_a_put_and_not_for_all(opened):
    """The put let go of the lock between two rows, and had it again before the reader was awake."""
    disk, calls, seized = Seizing(), Calls(), []
    storage = opened(CAPACITY, disk=disk)
    there_still = full(storage)[-1]

    def seizes() -> None:
        seized.append(len(seized))
        if len(seized) == 1:
            calls.start("exists", lambda: storage.exists([there_still]))
            while not storage._asking.locked():
                pass
        elif len(seized) == 2:
            assert calls.join() == {"exists": [True]}

    disk.seizes = seizes
    assert storage.put(["b", "c", "d"], [memoryview(b"1")] * 3) == [True] * 3
    assert len(seized) == 3


@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_reader_does_not_wait_until_tables_are_written(opened, what):
    disk = Rigged()
    storage = opened(CAPACITY, disk=disk)
    put(storage, a=b"1", b=b"2")
    seen = []

    def happens(call: str, name: str, at: int) -> None:
        if call == "write" and name.endswith(".table"):
            disk.happens = lambda call, name, at: None
            asked(storage, "a")
            seen.append(name)

    disk.happens = happens
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
    assert storage._index.states()["stored"] == 1
    assert all(storage.put(names, [memoryview(bytes(4096))] * 120))
    disk.elapse(61)
    left = []
    storage._allocator._lock = Turns(storage._lock, lambda: left.append(storage._index.states()["stored"]))
    assert put(storage, other=b"1") == [True]
    assert left and 0 < left[0] < 121


# --- victim lists of groups without objects


def salt(number: int) -> str:
    return f"{number:016x}"


def test_of_salts_that_have_come_and_gone_nothing_stays(opened):
    """Each left a list of victims, of some 8 KB, for as long as the store was open."""
    storage = opened(2 * MIB, quota_bytes=65 * 4096, disk=WithoutSync())

    def come_and_go(first: int, last: int) -> None:
        for number in range(first, last):
            for pages in (range(65), range(65, 70)):  # the second call evicts the objects of the first
                names = [f"{salt(number)}-{page}" for page in pages]
                assert all(storage.put(names, [memoryview(b"1")] * len(names)))
            if number % 3 == 0:
                storage.delete([f"{salt(number)}-{page}" for page in range(70)])

    come_and_go(0, 70)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        come_and_go(1000, 1100)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{grown} bytes for 100 salts")
    assert grown < 300_000
    index = storage._index
    there_now = {name.partition("-")[0] for name in index.entries}
    assert index._of_group.keys() == there_now
    assert sum(index._of_group.values()) == 4096 * len(index.entries)
    assert len(storage._allocator._queues) <= 32


def test_two_salts_that_have_one_number_do_not_pay_for_each_other(opened, monkeypatch):
    for module in ("index", "slab_allocator"):
        monkeypatch.setattr(f"kvarve.storage.file.{module}.number_of", lambda group: 7)
    storage = opened(quota_bytes=3 * 4096)
    for i in range(20):
        for group in ("aaaa", "bbbb"):
            assert put(storage, **{f"{group}-{i}": b"1"}) == [True]
    assert there(storage, *(f"{group}-{i}" for group in ("aaaa", "bbbb") for i in range(20))) == (
        "aaaa-17 aaaa-18 aaaa-19 bbbb-17 bbbb-18 bbbb-19"
    )


def test_a_quota_holds_for_more_salts_than_orders_are_kept_of(opened):
    storage = opened(8 * MIB, quota_bytes=2 * 4096, disk=WithoutSync())
    for page in range(4):
        for number in range(100):
            assert put(storage, **{f"{salt(number)}-{page}": b"1"}) == [True]
    for number in range(100):
        assert storage.exists([f"{salt(number)}-{page}" for page in range(4)]) == [False, False, True, True]
    assert len(storage._allocator._queues) <= 32
