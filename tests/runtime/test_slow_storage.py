"""A storage that is slow, hangs or is down costs only its own hits, and gets the stores that the policy wants."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Queue

import pytest
from filling import Clock, Request, StoreThatStays, a_config, a_region, an_identity, prompt, run, settle, until

from kvarve import prefix_cache
from kvarve.core.lease import Phase
from kvarve.model import Tier
from kvarve.prefix_cache import PrefixCache
from kvarve.storage import MemoryStorage
from kvarve.transfer.storage_connection import WORKERS

Make = Callable[..., PrefixCache]
LONG_S = 20.0


class Slow(StoreThatStays):
    """Takes its time for every call, as long as `release_all` was not called."""

    def __init__(self, inner: MemoryStorage, seconds: Callable[[], float]) -> None:
        super().__init__(inner)
        self._seconds, self._hurry = seconds, threading.Event()

    def release_all(self) -> None:
        self._hurry.set()

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._hurry.wait(self._seconds())
        return super().exists(names)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        self._hurry.wait(self._seconds())
        return super().get(names, into)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self._hurry.wait(self._seconds())
        return super().put(names, data)


class GatedGets(StoreThatStays):
    """Each get announces itself, and waits until it is let through."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.gates: Queue[threading.Event] = Queue()

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        gate = threading.Event()
        self.gates.put(gate)
        assert gate.wait(LONG_S)
        return super().get(names, into)


class HungPuts(StoreThatStays):
    """A put does not return until the test is over."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.over, self.hung = threading.Event(), threading.Event()

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self.hung.set()
        self.over.wait()
        return super().put(names, data)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes caches, and shuts them down at the end."""
    caches: list[tuple[PrefixCache, StoreThatStays | None]] = []

    def made(storage: StoreThatStays | None = None, clock: Clock | None = None, **settings: object) -> PrefixCache:
        kwargs = {} if clock is None else {"clock": clock}
        caches.append(
            (PrefixCache(an_identity(), a_config(**settings), storage=storage, **kwargs), storage)  # type: ignore[arg-type]
        )
        return caches[-1][0]

    yield made
    for cache, storage in caches:
        if isinstance(storage, HungPuts):
            storage.over.set()
        cache.shutdown(5)


# --- probes and fetches


def test_hits_behind_a_burst_of_misses_are_found_though_each_call_takes_a_tenth_of_a_second(make: Make) -> None:
    """Eight stored prompts of 1,300 tokens behind 60 that are not stored."""
    region = a_region()
    stored = [prompt(20.5, seed=seed) for seed in range(8)]
    first = make(StoreThatStays(region), device=4 << 20)
    for tokens in stored:
        run(first, tokens)
    settle(first)
    cache = make(Slow(region, lambda: 0.1), device=4 << 20)
    requests = [Request(cache, prompt(20.5, seed=100 + seed)) for seed in range(60)]
    requests += [Request(cache, tokens) for tokens in stored]
    for request in requests:
        request.wait()
    cached = sum(request.lease.boundary * 64 for request in requests)
    for request in requests:
        request.close()
    assert cached >= 9000, f"{cached} of 10,240 tokens"


def test_all_pages_are_waited_for_though_together_they_take_longer_than_one_call_may(make: Make) -> None:
    """A hundred pages, 0.9 s a get, and a deadline of 1 s for each: the last copies have not begun after 1.8 s."""
    region, clock = a_region(), Clock()
    first = make(StoreThatStays(region), device=8 << 20)
    run(first, prompt(100.5))
    settle(first)
    store = GatedGets(region)
    cache = make(store, clock, device=8 << 20, prefetch_policy="wait_complete", storage_deadline_s=1.0)
    request = Request(cache, prompt(100.5))
    until(cache, lambda: request.lease.phase is Phase.FETCHING)
    cache.claim(request.lease)
    before = clock.now
    while request.lease.phase is Phase.FETCHING:
        left = len(request.lease.ops)
        calls = min(WORKERS, left)
        gates = [store.gates.get(timeout=LONG_S) for _ in range(calls)]
        clock.now += 0.9
        cache.step()
        assert len(request.lease.ops) == left, "the other copies still wait"
        for gate in gates:
            gate.set()
        until(cache, lambda ops=left - calls: len(request.lease.ops) <= ops)  # type: ignore[misc]
    assert request.wait().lease.boundary == 100 and clock.now > before + 1.8
    request.close()


# --- stores


def test_all_of_fifteen_sequences_is_stored_by_a_slow_storage_with_a_third_of_them_in_the_host(make: Make) -> None:
    dice = random.Random(8)
    lock = threading.Lock()

    def seconds() -> float:
        with lock:
            return dice.uniform(0, 0.15)

    region = a_region()
    cache = make(Slow(region, seconds), device=4 << 20, host=600_000)
    capacity = cache.scheduler.core.slot_pools.capacity[len(cache.pools)]
    pages = capacity * 3 // 15 // 2 * 2
    for seed in range(15):
        run(cache, prompt(pages + 0.5, seed=seed), read=False)
    assert cache.settle(LONG_S * 5)
    again = make(StoreThatStays(region), device=8 << 20)
    assert [run(again, prompt(pages + 0.5, seed=seed))[2] for seed in range(15)] == [pages] * 15


def test_what_was_computed_during_an_outage_is_stored_after_it(make: Make) -> None:
    region = a_region()
    store = StoreThatStays(region)
    cache = make(store, device=4 << 20, host=500_000)
    store.dead = True
    for seed in range(25):
        run(cache, prompt(4.5, seed=seed))
    until(cache, lambda: not cache.up and not cache.scheduler.core.copies.storage)
    store.dead = False
    until(cache, lambda: cache.scheduler.core.copies.storage)
    assert cache.settle(LONG_S)
    again = make(StoreThatStays(region), device=4 << 20)
    assert [run(again, prompt(4.5, seed=seed))[2] for seed in range(25)] == [4] * 25


def test_settling_says_no_if_something_could_not_be_stored(make: Make) -> None:
    store = StoreThatStays(a_region())
    cache = make(store)
    run(cache, prompt(8.5))
    store.dead = True
    assert not cache.settle(LONG_S)
    store.dead = False
    until(cache, lambda: cache.scheduler.core.copies.storage)
    assert cache.settle(LONG_S)


# --- calls that hang


def test_a_put_that_hangs_costs_no_hit_on_the_device(make: Make) -> None:
    """20 prompts on a device that holds a third of them, each asked twice in a row."""
    store = HungPuts(a_region())
    cache = make(store, device=7000)
    assert cache.scheduler.core.slot_pools.capacity[0] < 20 * 8 / 3
    run(cache, prompt(8.5, seed=100))
    until(cache, store.hung.is_set)
    hits = []
    for seed in range(20):
        run(cache, prompt(8.5, seed=seed))
        hits.append(run(cache, prompt(8.5, seed=seed))[0])
    assert hits == [8] * 20


def whose_put_hangs(make: Make, detached: bool) -> tuple[PrefixCache, HungPuts]:
    """A cache with a put that hangs on its storage, which has been detached since, or is down."""
    store, clock = HungPuts(a_region()), Clock()
    cache = make(store, clock, storage_deadline_s=1.0)
    run(cache, prompt(8.5))
    until(cache, store.hung.is_set)
    if detached:
        cache.detach()
    else:
        clock.now += 2.0
    until(cache, lambda: not cache.scheduler.core.copies.storage)
    return cache, store


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "down"])
def test_a_call_that_hangs_on_a_storage_that_is_gone_blocks_no_flush(make: Make, detached: bool) -> None:
    cache, _ = whose_put_hangs(make, detached)
    assert cache.scheduler.core.copies.ops, "the call hangs"
    before = cache.now()
    assert cache.flush([Tier.DEVICE], timeout_s=1e9) > 0
    assert cache.now() == before, "it took no time by the frozen clock"


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "down"])
def test_a_shutdown_gives_calls_that_hang_on_a_storage_that_is_gone_a_moment_and_no_more(
    make: Make, detached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "CLOSE_S", 0.1)
    cache, store = whose_put_hangs(make, detached)
    ended = threading.Event()
    closing = threading.Thread(target=lambda: (cache.shutdown(1000.0), ended.set()), daemon=True)
    closing.start()
    assert ended.wait(LONG_S * 5), "long before its time is over"
    closing.join()
    assert not store.over.is_set(), "the call hangs as before"


def test_a_shutdown_ends_in_time_though_calls_hang(make: Make) -> None:
    store = HungPuts(a_region())
    cache = make(store, storage_deadline_s=60.0)
    run(cache, prompt(8.5))
    until(cache, store.hung.is_set)
    end = time.monotonic() + 4.0
    cache.shutdown(4.0)
    assert store.hung.is_set() and not store.over.is_set()
    assert time.monotonic() < end + 26.0, "long before its deadline, on a slow machine too"


def test_under_write_back_a_shutdown_stores_what_was_never_evicted(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    region = a_region()
    cache = make(StoreThatStays(region), write_policy="write_back")
    for seed in range(5):
        run(cache, prompt(8.5, seed=seed))
    assert not region.usage().objects
    with caplog.at_level(logging.WARNING):
        cache.shutdown(LONG_S)
    assert "could not be stored" not in caplog.text
    again = make(StoreThatStays(region))
    assert [run(again, prompt(8.5, seed=seed))[2] for seed in range(5)] == [8] * 5


def test_a_shutdown_says_how_much_could_not_be_stored(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = StoreThatStays(a_region())
    cache = make(store, write_policy="write_back")
    run(cache, prompt(8.5))
    store.dead = True
    with caplog.at_level(logging.WARNING):
        cache.shutdown(1.0)
    assert "pages in memory could not be stored" in caplog.text


def test_a_request_waits_in_the_queue_of_a_slow_storage_without_losing_patience(make: Make) -> None:
    """Its patience is a second, and the call before its own took 0.9 of that."""
    region, clock = a_region(), Clock()
    first = make(StoreThatStays(region))
    tokens = prompt(8.5)
    run(first, tokens)
    settle(first)
    store = StoreThatStays(region)
    cache = make(store, clock, prefetch_base_s=1.0, prefetch_per_ki_token_s=0.0)
    store.stall()
    other = Request(cache, prompt(8.5, seed=1))
    store.wait_for_stalled_call()
    request = Request(cache, tokens)  # its probe waits behind that one
    cache.step()
    assert not cache.claim(request.lease)
    clock.now += 0.9
    store.release()
    until(cache, lambda: other.lease.phase is Phase.QUEUED)
    clock.now += 0.9
    assert request.wait().lease.boundary == 8
    other.close()
    request.close()
