"""Only the right bytes of a page count as good, whatever a storage or a stray write does to it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvarve.core.copies.effects import Copy, Ended, Hurry, Page, Probe, Refusal
from kvarve.core.core_config import LOAD_DEADLINE_S
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.pages.keys import object_name
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from kvarve.records.record import BLOCK_BYTES, HEADER_BYTES
from kvarve.storage import MemoryStorage, Storage
from kvarve.system.regions import HostRegion
from kvarve.testing import FaultyStorage, Rule
from kvarve.transfer.transfer_engine import TransferEngine

KV = PoolSpec("attention", (BufferSpec("k", (4, 3), "float32"), BufferSpec("v", (4, 2), "bfloat16")), None)
STATE = PoolSpec("state", (BufferSpec("conv", (1500,), "float32"),), 1, in_place=True)
POOLS = (KV, STATE)
NAMESPACE, ROOT, SLOTS, LONG_S = b"m" * 32, b"r" * 32, 8, 20.0
D, H, S = Tier.DEVICE, Tier.HOST, Tier.STORAGE


class Recording(MemoryStorage):
    """Remembers the names that were written, in order; an object that exists is not written."""

    def __init__(self) -> None:
        super().__init__(1 << 20, NAMESPACE, "test")
        self.written: list[str] = []

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self.written += [name for name, there in zip(names, self.exists(names), strict=True) if not there]
        return super().put(names, data)


class Bench:
    """Real arenas and lanes around a storage; page `i` of a pool has the key `key(i)` and content of its own."""

    def __init__(
        self,
        *rules: Rule,
        rank: int = 0,
        verify_host: bool = True,
        **times: Any,  # of the engine: its storage's deadline, its clock
    ) -> None:
        self.device = [DeviceArena(pool, SLOTS) for pool in POOLS]
        self.host = [HostArena(pool, SLOTS, NAMESPACE, rank) for pool in POOLS]
        self.inner = Recording()
        self.storage = FaultyStorage(self.inner, rules, seed=3)
        self.transfers = TransferEngine(self.device, self.host, verify_host=verify_host, **times)
        self.attach(self.storage)
        self.rank, self.ops = rank, 0
        self.begun: list[int] = []
        for tensor in (tensor for arena in self.device for tensor in arena.buffers.values()):
            tensor.copy_(torch.arange(float(tensor.numel())).view(tensor.shape))

    def attach(self, storage: Storage) -> None:
        self.transfers.attach(self.transfers.connect(storage))

    def key(self, page: int) -> bytes:
        return bytes([page + 1]) * 32

    def name(self, page: int, pool: int = 0) -> str:
        return object_name(ROOT, self.key(page), POOLS[pool].name, self.rank)

    def run(self, effect: Callable[[int], Copy | Probe]) -> Ended:
        self.ops += 1
        self.transfers.send(effect(self.ops))
        (ended,) = self.ends(1)
        assert ended.op == self.ops
        return ended

    def ends(self, count: int) -> list[Ended]:
        """The next pieces that end; `begun` knows which of them were said to begin."""
        found: list[Ended] = []
        while len(found) < count:
            assert self.transfers.ends.wait(LONG_S)
            for event in self.transfers.collect():
                if isinstance(event, Ended):
                    found.append(event)
                else:
                    self.begun.append(event.op)
        return found

    def copy(self, source: Tier, target: Tier, *pages: tuple[int, int, int, int]) -> Ended:
        """Pages as (pool, page, source slot, target slot)."""
        moved = tuple(Page(pool, self.key(page), here, there) for pool, page, here, there in pages)
        return self.run(lambda op: Copy(op, source, target, moved, ROOT))

    def store(self, *pages: tuple[int, int]) -> Ended:
        """Device to storage; (pool, page) has the slot of its page's number everywhere."""
        assert self.copy(D, H, *((pool, page, page, page) for pool, page in pages)).good == (1 << len(pages)) - 1
        return self.copy(H, S, *((pool, page, page, -1) for pool, page in pages))

    def fetch(self, *pages: tuple[int, int, int]) -> Ended:
        """(pool, page, host slot)"""
        return self.copy(S, H, *((pool, page, -1, slot) for pool, page, slot in pages))

    def content(self, pool: int, slot: int) -> list[torch.Tensor]:
        return [tensor[slot].clone() for tensor in self.device[pool].buffers.values()]

    def wipe(self) -> None:
        for arena in self.host:
            for slot in range(SLOTS):
                arena.record(slot)[:] = b"\xee" * arena.stride
        for tensor in (tensor for device in self.device for tensor in device.buffers.values()):
            tensor.fill_(-1)

    def stored(self, *pages: tuple[int, int]) -> list[bool]:
        return self.inner.exists([self.name(page, pool) for pool, page in pages])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_page_goes_all_the_way_down_and_comes_back_as_it_was(bench: Bench) -> None:
    before = {(pool, page): bench.content(pool, page) for pool in (0, 1) for page in (2, 5)}
    assert bench.store(*before).good == 0b1111
    bench.wipe()
    assert bench.fetch((0, 2, 7), (1, 5, 1), (1, 2, 3), (0, 5, 0)) == Ended(bench.ops, 0b1111)
    assert bench.copy(H, D, (0, 2, 7, 4), (1, 5, 1, 6), (1, 2, 3, 0), (0, 5, 0, 2)).good == 0b1111
    for (pool, page), slot in {(0, 2): 4, (1, 5): 6, (1, 2): 0, (0, 5): 2}.items():
        for found, expected in zip(bench.content(pool, slot), before[pool, page], strict=True):
            assert torch.equal(found, expected)
    assert all((tensor == -1).all() for tensor in bench.content(0, 3)), "a slot outside the copy was written"


def test_a_probe_says_which_pages_are_there(bench: Bench) -> None:
    bench.store((0, 0), (1, 3))
    asked = tuple(Page(pool, bench.key(page), -1, -1) for pool, page in [(0, 0), (1, 0), (0, 3), (1, 3)])
    assert bench.run(lambda op: Probe(op, asked, ROOT)) == Ended(bench.ops, 0b1001)


DAMAGES: dict[str, Callable[[Bench], Any]] = {
    **{f"flip {at}": lambda bench, at=at: bench.storage.flip(bench.name(1), at) for at in (0, 60, 255, 261, 319)},
    # What was read before is in memory already, so only the length can reveal it.
    **{
        f"cut at {size}": lambda bench, size=size: bench.storage.truncate(bench.name(1), size)
        for size in (0, 266, 4095)
    },
    "too long": lambda bench: bench.storage.write({bench.name(1): bytes(bench.host[0].record(1)) + b"x"}),
    "another page": lambda bench: bench.storage.swap(bench.name(1), bench.name(3)),
    "another pool": lambda bench: bench.storage.swap(bench.name(1), bench.name(1, 1)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_object_is_bad_and_deleted_and_the_others_are_good(
    bench: Bench, damage: Callable[[Bench], Any]
) -> None:
    pages = [(0, 0), (0, 1), (0, 2)]
    bench.store(*pages, (0, 3), (1, 1))
    damage(bench)
    assert bench.fetch(*((pool, page, page) for pool, page in pages)) == Ended(bench.ops, 0b101, 0b010)
    assert bench.stored(*pages) == [True, False, True]


def test_an_object_that_was_lost_is_neither_good_nor_bad() -> None:
    bench = Bench(Rule("lose", probability=0.5))
    pages = [(0, page) for page in range(SLOTS)]
    assert bench.store(*pages).good == 0xFF, "the storage lies, and we cannot know"
    there = bench.stored(*pages)
    assert 0 < sum(there) < SLOTS
    bench.wipe()
    good = sum(1 << page for page in range(SLOTS) if there[page])
    assert bench.fetch(*((0, page, page) for page in range(SLOTS))) == Ended(bench.ops, good)


@pytest.mark.parametrize("call", ["exists", "get", "put"])
def test_a_storage_that_fails_fails_every_page_of_the_copy(call: str) -> None:
    bench = Bench()
    bench.store((0, 0), (0, 1))
    bench.storage.rules = [Rule("raise", call=call)]  # type: ignore[arg-type]
    if call == "get":
        assert bench.fetch((0, 0, 2), (0, 1, 3)) == Ended(bench.ops, 0)
    elif call == "put":
        assert bench.copy(H, S, (0, 0, 0, -1), (0, 1, 1, -1)) == Ended(bench.ops, 0)
    else:
        asked = tuple(Page(0, bench.key(page), -1, -1) for page in (0, 1))
        assert bench.run(lambda op: Probe(op, asked, ROOT)) == Ended(bench.ops, 0)
    bench.storage.rules = []
    assert bench.fetch((0, 0, 2), (0, 1, 3)) == Ended(bench.ops, 0b11), "and the lane goes on"


def test_a_put_that_fails_half_way_fails_every_page_and_the_next_one_writes_only_the_rest() -> None:
    bench = Bench(Rule("raise", call="put", nth=1))
    pages = [(0, page) for page in range(SLOTS)]
    assert bench.store(*pages) == Ended(bench.ops, 0)
    done = [*bench.inner.written]
    assert len(done) < SLOTS
    assert bench.copy(H, S, *((0, page, page, -1) for page in range(SLOTS))) == Ended(bench.ops, 0xFF)
    assert sorted(bench.inner.written) == sorted(bench.name(page) for page in range(SLOTS))


def test_a_page_without_room_in_storage_is_not_good_and_told_apart_from_one_whose_store_failed() -> None:
    bench = Bench()
    bench.attach(MemoryStorage(3 * 4096, NAMESPACE, "small"))
    ended = bench.store(*((0, page) for page in range(4)))
    assert ended == Ended(bench.ops, 0b0111, refused=Refusal.FULL)
    assert bench.store((0, 0)) == Ended(bench.ops, 1)


def test_a_page_for_a_storage_that_can_only_be_read_is_told_apart_from_one_without_room() -> None:
    bench = Bench()
    bench.storage.read_only = True
    assert bench.store((0, 0)) == Ended(bench.ops, 0, refused=Refusal.READ_ONLY)


def test_what_is_there_is_not_asked_for_before_it_is_stored(bench: Bench) -> None:
    bench.store((0, 0), (0, 1))
    assert bench.storage.counts["put"] == 1 and not bench.storage.counts["exists"]


def stalled(bench: Bench, *stores: tuple[tuple[int, int], ...]) -> None:
    """The first of these waits in storage, so the others wait in their lane."""
    for pages in stores:
        bench.copy(D, H, *((pool, page, page, page) for pool, page in pages))
    bench.storage.stall()
    for op, pages in enumerate(stores, 100):
        moved = tuple(Page(pool, bench.key(page), page, -1) for pool, page in pages)
        bench.transfers.send(Copy(op, H, S, moved, ROOT))
        if op == 100:
            bench.storage.wait_for_stalled_call()


def ends(bench: Bench, count: int) -> dict[int, tuple[int, int]]:
    return {end.op: (end.good, end.bad) for end in bench.ends(count)}


def test_stores_that_wait_become_one_put_and_each_has_its_own_end(bench: Bench) -> None:
    stalled(bench, ((0, 0),), ((0, 1), (1, 2)), ((0, 3), (0, 4), (0, 1)), ((1, 5),))
    bench.host[0].record(4)[HEADER_BYTES + 9] ^= 4
    bench.storage.release()
    assert ends(bench, 4) == {100: (0b1, 0), 101: (0b11, 0), 102: (0b101, 0b010), 103: (0b1, 0)}
    assert len(bench.storage.puts) == 2
    assert bench.stored((0, 0), (0, 1), (1, 2), (0, 3), (0, 4), (1, 5)) == [True, True, True, True, False, True]


def probe(bench: Bench, op: int, *pages: tuple[int, int]) -> Probe:
    return Probe(op, tuple(Page(pool, bench.key(page), -1, -1) for pool, page in pages), ROOT)


def test_probes_that_wait_become_one_question_and_each_has_its_own_answer(bench: Bench) -> None:
    bench.store((0, 0), (1, 2))
    asked = bench.storage.counts["exists"]
    bench.storage.stall()
    bench.transfers.send(probe(bench, 100, (0, 0), (0, 1)))
    bench.storage.wait_for_stalled_call()
    for op in range(101, 160):
        bench.transfers.send(probe(bench, op, (0, 1), (1, op % 3), (0, 0)))
    bench.storage.release()
    expected = {op: (0b110 if op % 3 == 2 else 0b100, 0) for op in range(101, 160)}
    assert ends(bench, 60) == {100: (0b1, 0), **expected}
    assert bench.storage.counts["exists"] == asked + 2


def test_probes_do_not_wait_behind_fetches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.store((0, 0))
    reading, get = threading.Event(), bench.storage.get
    monkeypatch.setattr(bench.storage, "get", lambda *args: reading.wait(LONG_S) and get(*args))
    for op in range(100, 108):
        bench.transfers.send(Copy(op, S, H, (Page(0, bench.key(0), -1, op - 100),), ROOT))
    bench.transfers.send(probe(bench, 200, (0, 0)))
    assert ends(bench, 1) == {200: (0b1, 0)}
    reading.set()
    assert len(ends(bench, 8)) == 8


def test_fetches_of_claimed_requests_pass_those_that_are_merely_hoped_for(bench: Bench) -> None:
    bench.store(*((0, page) for page in range(8)))
    order, get = list[str](), bench.storage.get
    inside, on = threading.Semaphore(0), threading.Semaphore(0)

    def slow(names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        order.extend(names)
        inside.release()
        assert on.acquire(timeout=LONG_S)
        return get(names, into)

    bench.storage.get = slow  # type: ignore[method-assign]
    for page, urgent in enumerate([False] * 5 + [True, False]):  # the first three have a worker each
        bench.transfers.send(Copy(100 + page, S, H, (Page(0, bench.key(page), -1, page),), ROOT, urgent=urgent))
        assert page > 2 or inside.acquire(timeout=LONG_S)
    bench.transfers.send(Hurry((106,)))
    for _ in range(4):
        on.release()
        assert inside.acquire(timeout=LONG_S)
    on.release(3)
    assert [order.index(bench.name(page)) for page in (5, 6, 3, 4)] == [3, 4, 5, 6]
    assert len(ends(bench, 7)) == 7


def test_what_storage_is_asked_for_says_when_it_begins_and_what_it_is_given_does_not(bench: Bench) -> None:
    bench.store((0, 0))
    assert bench.begun == []
    bench.fetch((0, 0, 3))
    bench.run(lambda op: probe(bench, op, (0, 0)))
    assert bench.begun == [bench.ops - 1, bench.ops]


@pytest.mark.parametrize("pool", [0, 1])
def test_a_page_that_changed_in_host_memory_does_not_reach_the_device(bench: Bench, pool: int) -> None:
    before = bench.content(pool, 1)
    bench.copy(D, H, (pool, 0, 0, 0), (pool, 1, 1, 1))
    bench.host[pool].record(0)[HEADER_BYTES + 9] ^= 4
    for tensor in bench.device[pool].buffers.values():
        tensor.fill_(-1)
    assert bench.copy(H, D, (pool, 0, 0, 5), (pool, 1, 1, 6)) == Ended(bench.ops, 0b10, 0b01)
    assert all((tensor == -1).all() for tensor in bench.content(pool, 5))
    assert all(torch.equal(a, b) for a, b in zip(bench.content(pool, 6), before, strict=True))


def test_a_page_that_changed_in_host_memory_is_never_stored(bench: Bench) -> None:
    bench.copy(D, H, (0, 0, 0, 0), (0, 1, 1, 1))
    bench.host[0].record(0)[HEADER_BYTES + 9] ^= 4
    assert bench.copy(H, S, (0, 0, 0, -1), (0, 1, 1, -1)) == Ended(bench.ops, 0b10, 0b01)
    assert bench.inner.written == [bench.name(1)]
    # Not even where storage has a good one: the page in memory must not count as the same.
    bench.storage.write({bench.name(0): bytes(4096)})
    assert bench.copy(H, S, (0, 0, 0, -1)) == Ended(bench.ops, 0, 1)


def test_host_memory_is_trusted_where_an_operator_says_so() -> None:
    bench = Bench(verify_host=False)
    bench.copy(D, H, (0, 0, 0, 0))
    bench.host[0].record(0)[0] ^= 1
    assert bench.copy(H, D, (0, 0, 0, 5)) == Ended(bench.ops, 1)


def test_closing_finishes_what_was_sent_and_closes_the_storage(bench: Bench) -> None:
    bench.copy(D, H, (0, 0, 0, 0))
    bench.transfers.send(Copy(99, H, S, (Page(0, bench.key(0), 0, -1),), ROOT))
    bench.transfers.close(LONG_S)
    assert bench.transfers.collect() == [Ended(99, 1)]
    assert bench.inner.written == [bench.name(0)]
    assert bench.inner._region is None


# --- device copies do not know the storage's deadline


class HeldCopies:
    """Has the copies of an engine between device and host wait, page by page, until it is let on."""

    def __init__(self, transfers: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        mover = transfers._copies._mover
        self._move, self.begun, self.on = mover.move, threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(mover, "move", self._held)

    def _held(self, *args: Any) -> None:
        self.begun.release()
        assert self.on.wait(LONG_S)
        self._move(*args)


def test_a_device_copy_slower_than_a_storage_may_be_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(deadline_s=1e-9)
    bench.copy(D, H, (0, 0, 0, 0))
    bench.transfers.layerwise = True
    held = HeldCopies(bench.transfers, monkeypatch)
    bench.transfers.send(Copy(99, H, D, (Page(0, bench.key(0), 0, 5),), ROOT))
    assert held.begun.acquire(timeout=LONG_S)
    (arrival,) = bench.transfers.arrivals()
    assert not arrival.done
    held.on.set()
    arrival.wait_all()
    assert all(torch.equal(*tensors) for tensors in zip(bench.content(0, 0), bench.content(0, 5), strict=True))


def test_a_device_copy_may_wait_longer_than_a_storage_may_take_to_begin_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    bench = Bench(deadline_s=1.0, clock=lambda: now[0])
    bench.copy(D, H, (0, 0, 0, 0), (0, 1, 1, 1))
    held = HeldCopies(bench.transfers, monkeypatch)
    for op in (97, 98, 99):
        bench.transfers.send(Copy(op, H, D, (Page(0, bench.key(0), 0, op - 94),), ROOT))
        assert op > 97 or held.begun.acquire(timeout=LONG_S)
        now[0] += LOAD_DEADLINE_S / 2
    now[0] += 1.0
    assert bench.transfers.collect() == [Ended(98, 0)]
    held.on.set()
    assert bench.ends(2) == [Ended(97, 1), Ended(99, 1)]


def test_copies_that_are_sent_together_wait_for_one_event_of_the_compute_stream(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked, ready = list[object](), bench.transfers._copies.ready
    monkeypatch.setattr(bench.transfers._copies, "ready", lambda: marked.append(ready()) or marked[-1])
    saves = [Copy(op, D, H, (Page(0, bench.key(op), op, op),), ROOT) for op in range(3)]
    bench.transfers.send(*saves, probe(bench, 3, (0, 7)))
    assert sorted(ends(bench, 4).items()) == [(0, (1, 0)), (1, (1, 0)), (2, (1, 0)), (3, (0, 0))]
    assert len(marked) == 1
    assert all(bench.host[0].intact(op, bench.key(op)) for op in range(3))


# --- memory that is lent


class Lent(Recording):
    """Notes where memory lies that it is lent: for good, or for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.registered, self.lent = list[int](), list[int]()

    def register(self, region: HostRegion) -> None:
        self.registered.append(region.address)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self.lent += map(address, data)
        return super().put(names, data)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        self.lent += map(address, into)
        return super().get(names, into)


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_a_storage_registers_the_memory_that_it_will_touch_and_no_other() -> None:
    bench, storage = Bench(), Lent()
    bench.attach(storage)
    pages = [(pool, page) for pool in (0, 1) for page in (2, 5)]
    bench.store(*pages)
    assert bench.fetch(*((pool, page, 7 - page) for pool, page in pages)).good == 0b1111
    assert len(storage.lent) == 8 and all(at % BLOCK_BYTES == 0 for at in storage.lent), "not fit for direct I/O"
    in_arenas = [
        any(start <= at < start + len(arena.memory) for arena in bench.host for start in [address(arena.memory)])
        for at in storage.lent
    ]
    assert storage.registered == [address(arena.memory) for arena in bench.host] and all(in_arenas)
