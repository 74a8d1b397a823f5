"""Objects of a storage: what is loaded is what was stored, and a storage in trouble costs only misses."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvarve.connectors.sglang.objects import Objects
from kvarve.core.copies.in_flight import STORE
from kvarve.errors import ConfigError, StorageError
from kvarve.storage import Breaker, FileStorage, MemoryStorage, Storage, Tiers
from kvarve.testing import FaultyStorage, Rule
from kvarve.testing.faulty_storage import Call
from kvarve.transfer.storage_connection import STORES, open_guarded
from kvarve.transfer.storage_road import BUFFERS, Kind

LABEL, NAMESPACE = b"\x01" * 32, b"\x07" * 32
LONG_S, SOON_S = 60.0, 0.1  # of calls that answer, and of calls that never do
KV = Kind(NAMESPACE, "kv", 10_000)
KEYS = [bytes([i]) * 32 for i in range(12)]


def payload(key: bytes, kind: Kind = KV) -> bytes:
    return (key + kind.pool.encode() + bytes([kind.rank])) * (kind.payload_bytes // 32 + 1)


class Slots:
    """An engine's host memory: a slot for each key. `lent` says whether the engine waits for our call."""

    def __init__(self, kind: Kind = KV, keys: Sequence[bytes] = KEYS) -> None:
        self.kind, self.keys, self.lent = kind, keys, False
        self.memory = [bytearray(kind.payload_bytes) for _ in keys]

    def put_down(self, i: int, view: memoryview) -> None:
        assert self.lent
        self.memory[i][:] = view

    def take_up(self, i: int, view: memoryview) -> None:
        assert self.lent
        view[:] = payload(self.keys[i], self.kind)[: self.kind.payload_bytes]

    def store(self, objects: Objects) -> list[bool]:
        self.lent = True
        stored = objects.store(self.kind, self.keys, self.take_up)
        self.lent = False
        return stored

    def load(self, objects: Objects) -> list[bool]:
        """Load all, and see that slots of pages that were not loaded are as they were."""
        self.memory = [bytearray(self.kind.payload_bytes) for _ in self.keys]
        self.lent = True
        loaded = objects.load(self.kind, self.keys, self.put_down)
        self.lent = False
        self.check(loaded)
        return loaded

    def check(self, loaded: Sequence[bool]) -> None:
        for key, memory, done in zip(self.keys, self.memory, loaded, strict=True):
            assert bytes(memory) == (
                payload(key, self.kind)[: self.kind.payload_bytes] if done else bytes(self.kind.payload_bytes)
            )


def stalled(inner: Storage, call: Call) -> FaultyStorage:
    """A storage of which one kind of call waits until it is released."""
    storage = FaultyStorage(inner, stall_limit_s=LONG_S)
    storage.stall(call)
    return storage


Open = Callable[..., Objects]


@pytest.fixture
def memory() -> MemoryStorage:
    return MemoryStorage(8 << 20, LABEL, "a model")


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes objects of a storage; a buffer holds three of the records here."""
    made: list[Objects] = []

    def make(storage: Storage, deadline_s: float = LONG_S, **settings: int) -> Objects:
        guarded = storage if isinstance(storage, (Breaker, Tiers)) else Breaker(storage, deadline_s=deadline_s)
        settings = {"buffer_memory": BUFFERS * 40_000, **settings}
        made.append(Objects(lambda: guarded, deadline_s=deadline_s, **settings))
        return made[-1]

    yield make
    for objects in made:
        objects.close()


def settled(objects: Objects) -> None:
    """Wait until every buffer is back, so that no call of the storage is in flight."""
    assert objects.road is not None and objects.road.buffers.wait_for_all(LONG_S)


# --- what is stored comes back


def test_what_is_stored_is_loaded_in_a_new_process(tmp_path: Path, opened: Open) -> None:
    settings: list[tuple[Kind, Slots]] = [(kind, Slots(kind)) for kind in (KV, Kind(NAMESPACE, "mamba", 100_001, 1, 2))]
    first = opened(FileStorage(tmp_path / "pages", 64 << 20, LABEL, "a model"))
    for _, slots in settings:
        assert slots.store(first) == [True] * 12
    first.close()
    again = opened(FileStorage(tmp_path / "pages", 64 << 20, LABEL, "a model"))
    for kind, slots in settings:
        assert again.exists([kind], [KEYS]) == [[True] * 12]
        assert slots.load(again) == [True] * 12
    assert again.counts["loaded"] == 24
    assert again.counts["loaded bytes"] == 12 * 10_000 + 12 * 100_001
    assert sum(rate.objects for rate in again.take_rates("load")) == 24
    assert again.take_rates("load") == []


def test_kinds_are_asked_for_in_one_call_and_do_not_meet(memory: MemoryStorage, opened: Open) -> None:
    sick = FaultyStorage(memory)
    objects = opened(sick)
    kinds = [KV, Kind(NAMESPACE, "swa", 64), Kind(b"\x08" * 32, "kv", 10_000), Kind(NAMESPACE, "kv", 10_000, 1, 2)]
    assert Slots(keys=KEYS[:5]).store(objects) == [True] * 5
    assert Slots().store(objects) == [True] * 12
    assert (objects.counts["already there"], objects.counts["stored"]) == (5, 12), "nothing is written again"
    before = sick.counts["exists"]
    assert objects.exists(kinds, [KEYS[:2]] * 4) == [[True] * 2, [False] * 2, [False] * 2, [False] * 2]
    assert sick.counts["exists"] == before + 1


# --- damage


@pytest.mark.parametrize("harm", ["flip the header", "flip the page", "truncate", "another's", "lost"])
def test_a_damaged_object_is_a_miss_and_is_stored_anew(memory: MemoryStorage, opened: Open, harm: str) -> None:
    sick, slots = FaultyStorage(memory, seed=3), Slots()
    objects = opened(sick)
    slots.store(objects)
    names = [KV.name(key) for key in KEYS]
    if harm == "lost":
        sick.lost = frozenset(names[4:5])
    elif harm == "another's":
        sick.swap(names[4], names[11])
    elif harm == "truncate":
        sick.truncate(names[4])
    else:
        sick.flip(names[4], 40 if "header" in harm else 5000)
    bad = {4, 11} if harm == "another's" else {4}
    expected = [i not in bad for i in range(12)]
    assert slots.load(objects) == expected
    if harm == "lost":
        assert objects.counts["gone"] == 1
        sick.restore()
    else:
        assert objects.counts["damaged"] == len(bad)
        assert objects.exists([KV], [KEYS]) == [expected]
    slots.store(objects)
    assert slots.load(objects) == [True] * 12


def test_a_damaged_object_that_cannot_be_deleted_is_missing_until_it_is(memory: MemoryStorage, opened: Open) -> None:
    sick, slots = FaultyStorage(memory), Slots()
    objects = opened(sick)
    slots.store(objects)
    sick.flip(KV.name(KEYS[0]), 5000)
    sick.rules = [Rule("raise", "delete")]
    assert slots.load(objects)[0] is False
    assert sick.exists([KV.name(KEYS[0])]) == [True]
    assert objects.exists([KV], [KEYS[:2]]) == [[False, True]]
    more = Slots(keys=[KEYS[0], b"x" * 32, b"y" * 32])
    assert more.store(objects) == [False, True, True], "and costs no other object of its call"
    sick.rules = []
    assert slots.store(objects) == [True] * 12
    assert objects.exists([KV], [KEYS[:2]]) == [[True, True]]
    assert slots.load(objects) == [True] * 12


# --- trouble


@pytest.mark.parametrize("call", ["exists", "get", "put", "delete", "drop"])
def test_a_storage_that_fails_is_a_miss(memory: MemoryStorage, opened: Open, call: str) -> None:
    sick, slots = FaultyStorage(memory), Slots()
    objects = opened(Breaker(sick, deadline_s=LONG_S, failures=100))
    slots.store(objects)
    sick.rules = [Rule("raise", call)]  # type: ignore[arg-type]
    others = Slots(keys=[bytes([i]) * 32 for i in range(100, 103)])
    assert objects.exists([KV], [KEYS[:1]]) == (None if call == "exists" else [[True]])
    assert any(slots.load(objects)) is (call != "get")
    assert any(others.store(objects)) is (call not in ("exists", "put"))
    assert objects.drop() is (call != "drop")


def test_a_load_that_comes_late_writes_to_no_slot(memory: MemoryStorage, opened: Open) -> None:
    slots = Slots()
    slots.store(opened(memory))
    gate = stalled(memory, "get")
    objects = opened(gate, SOON_S)
    assert slots.load(objects) == [False] * 12
    assert objects.counts["late"] > 0
    slots.memory = [bytearray(b"x" * KV.payload_bytes) for _ in KEYS]  # the engine has given them to another request
    gate.release()
    settled(objects)
    assert all(bytes(each) == b"x" * KV.payload_bytes for each in slots.memory)


def test_a_store_that_comes_late_stores_what_was_given(memory: MemoryStorage, opened: Open) -> None:
    gate, slots = stalled(memory, "put"), Slots(keys=KEYS[:2])
    objects = opened(gate, SOON_S)
    assert slots.store(objects) == [False] * 2
    gate.release()
    settled(objects)
    assert slots.load(opened(memory)) == [True] * 2


def test_a_store_that_is_given_up_before_its_turn_reads_no_slot(memory: MemoryStorage, opened: Open) -> None:
    gate, slots = stalled(memory, "put"), Slots()
    road = opened(gate).road
    assert road is not None
    slots.lent = True
    for at in range(STORES):
        road.fill([(KV, KEYS[at])], slots.take_up, LONG_S)
        gate.wait_for_stalled_call()
    read: list[int] = []
    last = road.fill([(KV, KEYS[9])], lambda i, view: read.append(i), LONG_S)
    last.give_up()
    gate.release()
    assert last.ended.wait(LONG_S) and last.became == ["late"]
    assert (read, memory.exists([KV.name(KEYS[9])])) == ([], [False])


def test_a_store_that_is_given_up_before_its_turn_waits_for_no_buffer(memory: MemoryStorage, opened: Open) -> None:
    objects, gate = opened(memory), threading.Event()
    road = objects.road
    assert road is not None
    busy = [road.call(STORE, lambda: gate.wait(LONG_S), LONG_S) for _ in range(STORES)]
    move = road.fill([(KV, KEYS[0])], Slots().take_up, LONG_S)
    move.give_up()
    buffers = [road.buffers.take(KV.record_bytes) for _ in range(BUFFERS)]
    gate.set()
    assert all(each.ended.wait(LONG_S) for each in busy) and move.ended.wait(LONG_S / 2)
    for buffer in buffers:
        assert buffer is not None
        road.buffers.give_back(buffer)


def test_a_store_for_which_no_buffer_comes_back_has_failed(memory: MemoryStorage, opened: Open) -> None:
    road = opened(memory, SOON_S).road
    assert road is not None
    while road.buffers.take(KV.record_bytes) is not None:
        pass
    move = road.fill([(KV, KEYS[0])], Slots().take_up, LONG_S)
    assert move.ended.wait(LONG_S) and move.became == ["failed"]


def test_stores_that_hang_leave_buffers_for_reads(memory: MemoryStorage, opened: Open) -> None:
    """Their threads are replaced, and other stores hang too."""
    Slots().store(opened(memory))
    gate, slots = stalled(memory, "put"), Slots()
    road = opened(Breaker(gate, deadline_s=LONG_S), SOON_S).road
    assert road is not None
    slots.lent = True
    stores = [road.fill([(KV, bytes([100 + at]) * 32)], slots.take_up, LONG_S) for at in range(BUFFERS)]
    while gate.counts["stall"] + sum(each.ended.is_set() for each in stores) < BUFFERS:
        road.wait(SOON_S)
        road.collect()
    read = road.get([(KV, KEYS[0])], slots.put_down, LONG_S)
    assert read.ended.wait(LONG_S) and read.became == ["done"]
    gate.release()
    assert all(each.ended.wait(LONG_S) for each in stores)


def test_calls_that_hang_hold_a_bounded_number_of_buffers_and_threads(memory: MemoryStorage, opened: Open) -> None:
    Slots().store(opened(memory))
    gate = stalled(memory, "get")
    never_down = Breaker(gate, deadline_s=LONG_S)
    objects = opened(never_down, SOON_S)
    loads = 0
    while gate.counts["stall"] < BUFFERS or loads < BUFFERS:
        loads += 1
        assert Slots().load(objects) == [False] * 12
    assert objects.counts["late"] + objects.counts["failed"] == 3 * loads, "of each load the first piece"
    assert gate.counts["stall"] == BUFFERS
    gate.release()
    settled(objects)


def test_a_full_storage_refuses_what_does_not_fit(opened: Open) -> None:
    objects, slots = opened(MemoryStorage(KV.record_bytes * 2, LABEL, "a model"), buffer_memory=BUFFERS << 20), Slots()
    assert slots.store(objects).count(True) == 2
    assert objects.counts["no space"] == 10


def test_a_storage_that_opens_late_is_a_miss_until_it_is_open(memory: MemoryStorage) -> None:
    Slots().store(Objects(lambda: Breaker(memory, deadline_s=LONG_S), deadline_s=LONG_S))
    gate, is_open = threading.Event(), threading.Event()

    def slowly() -> Breaker:
        assert gate.wait(LONG_S)
        return Breaker(memory, deadline_s=LONG_S)

    objects, slots = Objects(slowly, deadline_s=SOON_S), Slots()
    assert not objects.up
    assert not any(slots.store(objects)) and not any(slots.load(objects))
    gate.set()
    while not objects.up:
        is_open.wait(0.001)
    objects.deadline_s = LONG_S
    assert slots.load(objects) == [True] * 12
    for _ in range(2):
        objects.close()
    assert not (objects.up or any(slots.load(objects)) or any(slots.store(objects)) or objects.drop())


def test_a_storage_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    def open_(setting: str) -> Objects:
        return Objects(lambda: open_guarded(setting, label=LABEL, description="", deadline_s=LONG_S), deadline_s=LONG_S)

    with pytest.raises(ConfigError, match="capacity"):
        open_(f"file://{tmp_path}/pages")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("of another program")
    with pytest.raises(StorageError):
        open_(f"file://{tmp_path}/foreign?capacity=64MiB")


def test_a_drop_removes_this_labels_objects_alone(tmp_path: Path, opened: Open) -> None:
    ours, theirs = (
        opened(open_guarded(f"file://{tmp_path}/pages?capacity=64MiB", label=label, description="", deadline_s=LONG_S))
        for label in (LABEL, b"\x02" * 32)
    )
    slots = Slots()
    slots.store(ours)
    slots.store(theirs)
    assert ours.drop()
    assert slots.load(ours) == [False] * 12
    assert slots.load(theirs) == [True] * 12


def test_several_urls_are_tiers_and_a_near_copy_that_is_damaged_is_read_from_the_far_one(
    tmp_path: Path, opened: Open
) -> None:
    urls = [f"file://{tmp_path}/{name}?capacity=64MiB" for name in ("near", "far")]
    tiers = open_guarded(urls, label=LABEL, description="", deadline_s=LONG_S)
    assert isinstance(tiers, Tiers)
    objects, slots = opened(tiers), Slots()
    slots.store(objects)
    assert tiers.settle(LONG_S)
    near = FileStorage(tmp_path / "near", 64 << 20, LABEL, "")
    near.delete([KV.name(KEYS[3])])
    near.put([KV.name(KEYS[3])], [memoryview(bytes(KV.record_bytes))])
    near.close()
    assert slots.load(objects) == [True] * 12


@pytest.mark.parametrize(("writes", "reads"), [("zstd", "no"), ("no", "zstd")])
def test_pages_of_a_storage_that_compresses_come_back_whatever_the_reader_is_told(
    tmp_path: Path, opened: Open, writes: str, reads: str
) -> None:
    pytest.importorskip("zstandard")
    for compress in (writes, reads):
        url = f"file://{tmp_path}/pages?capacity=64MiB&compress={compress}"
        storage = open_guarded(url, label=LABEL, description="", deadline_s=LONG_S)
        objects, slots = opened(storage), Slots()
        if compress == writes:
            slots.store(objects)
            used = storage.usage().bytes
            assert used is not None and (used < 12 * KV.record_bytes) == (writes == "zstd")
        assert slots.load(objects) == [True] * 12
        objects.close()
