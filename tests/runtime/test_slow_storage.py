"""A storage that is slow, hangs or is down costs only its own hits, and gets the stores that the policy wants."""

import logging
import threading
from queue import Queue

import pytest
from filling import Clock, Make, Request, a_region, a_store, prompt, run, settle, until

from kvarve.cache import prefix_cache
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Phase
from kvarve.pages.pools import Tier
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage
from kvarve.transfer.storage_connection import FETCHES

LONG_S = 20.0


def gated_gets(region: MemoryStorage) -> tuple[FaultyStorage, Queue[threading.Event]]:
    """Each get announces itself, and waits until it is let through."""
    store, gates = FaultyStorage(region, stays=True), Queue[threading.Event]()

    def before(call: str) -> None:
        if call == "get":
            gate = threading.Event()
            gates.put(gate)
            assert gate.wait(LONG_S)

    store.before = before
    return store, gates


# --- probes and fetches


def test_all_pages_are_waited_for_though_together_they_take_longer_than_one_call_may(make: Make) -> None:
    """0.9 s a get, and a deadline of 1 s for each: the last copies have not begun after 1.8 s."""
    region, clock = a_region(), Clock()
    first = make(FaultyStorage(region, stays=True), device=80_000)
    run(first, prompt(100.5))
    settle(first)
    store, gates_of_calls = gated_gets(region)
    cache = make(store, clock, device=80_000, host=2 << 20, storage_wait="all", storage_deadline_s=1.0)
    request = Request(cache, prompt(100.5))
    until(cache, lambda: request.lease.phase is Phase.FETCHING)
    cache.claim(request.lease)
    before = clock.now
    while request.lease.phase is Phase.FETCHING:
        left = len(request.lease.ops)
        calls = min(FETCHES, left)
        gates = [gates_of_calls.get(timeout=LONG_S) for _ in range(calls)]
        clock.now += 0.9
        cache.step()
        assert len(request.lease.ops) == left, "the other copies still wait"
        for gate in gates:
            gate.set()
        until(cache, lambda ops=left - calls: len(request.lease.ops) <= ops)  # type: ignore[misc]
    assert request.wait().lease.boundary == 100 and clock.now > before + 1.8
    request.close()


# --- stores


def test_all_sequences_are_stored_by_a_slow_storage_with_a_third_of_them_in_the_host(make: Make) -> None:
    region = a_region()
    slow = FaultyStorage(region, stays=True)
    slow.before = lambda call: call == "put" and threading.Event().wait(0.02)
    cache = make(slow, host=90_000)
    assert 4 <= cache.scheduler.core.slot_pools.capacity[len(cache.identity.pools)] < 2 * 8
    for seed in range(4):
        run(cache, prompt(8.5, seed=seed), read=False)
    assert cache.settle(LONG_S * 5)
    again = make(FaultyStorage(region, stays=True))
    assert [run(again, prompt(8.5, seed=seed))[2] for seed in range(4)] == [8] * 4


def test_what_was_computed_during_an_outage_is_stored_after_it(make: Make) -> None:
    region = a_region()
    store = FaultyStorage(region, stays=True)
    cache = make(store, host=90_000)
    store.dead = True
    for seed in range(8):
        run(cache, prompt(4.5, seed=seed))
    until(cache, lambda: not cache.up and not cache.scheduler.core.storage.attached)
    store.dead = False
    until(cache, lambda: cache.scheduler.core.storage.attached)
    assert cache.settle(LONG_S)
    again = make(FaultyStorage(region, stays=True))
    assert [run(again, prompt(4.5, seed=seed))[2] for seed in range(8)] == [4] * 8


def test_settling_says_no_if_something_could_not_be_stored(make: Make) -> None:
    store = a_store()
    cache = make(store)
    run(cache, prompt(8.5))
    store.dead = True
    assert not cache.settle(LONG_S)
    store.dead = False
    until(cache, lambda: cache.scheduler.core.storage.attached)
    assert cache.settle(LONG_S)


# --- calls that hang


def test_a_put_that_hangs_costs_no_hit_on_the_device(make: Make) -> None:
    """More prompts than the device holds, each asked twice in a row."""
    store = a_store()
    store.stall("put")
    cache = make(store, device=7000, host=1 << 20)
    run(cache, prompt(8.5, seed=100))
    until(cache, lambda: store.counts["stall: put"] > 0)
    count = cache.scheduler.core.slot_pools.capacity[0] // 8 + 2
    assert count < 12
    for seed in range(count):
        run(cache, prompt(8.5, seed=seed))
        assert run(cache, prompt(8.5, seed=seed))[0] == 8


def whose_put_hangs(make: Make, detached: bool) -> PrefixCache:
    """A cache with a put that hangs on its storage, which has been detached since, or is down."""
    store, clock = a_store(), Clock()
    store.stall("put")
    cache = make(store, clock, storage_deadline_s=1.0)
    run(cache, prompt(8.5))
    until(cache, lambda: store.counts["stall: put"] > 0)
    if detached:
        cache.worker.detach()
    else:
        clock.now += 2.0
    until(cache, lambda: not cache.scheduler.core.storage.attached)
    assert cache.scheduler.core.copies.ops, "the call hangs"
    return cache


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "down"])
def test_calls_that_hang_on_a_storage_that_is_gone_block_no_flush_and_a_shutdown_gives_them_a_moment_and_no_more(
    make: Make, detached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "CLOSE_S", 0.1)
    cache = whose_put_hangs(make, detached)
    before = cache.clock()
    assert cache.flush([Tier.DEVICE], timeout_s=1e9) > 0
    assert cache.clock() == before, "it took no time by the frozen clock"
    assert cache.scheduler.core.copies.ops, "the call hangs as before"
    ended = threading.Event()
    closing = threading.Thread(target=lambda: (cache.shutdown(1000.0), ended.set()), daemon=True)
    closing.start()
    assert ended.wait(LONG_S), "long before its time is over"
    closing.join()


def test_a_shutdown_ends_in_time_though_calls_hang(make: Make) -> None:
    store = a_store()
    store.stall("put")
    cache = make(store, storage_deadline_s=60.0)
    run(cache, prompt(8.5))
    until(cache, lambda: store.counts["stall: put"] > 0)
    cache.shutdown(0.2)
    assert not store.usage().objects
    store.release()
    while not store.usage().objects:  # the put has hung until now
        cache.wait(0.01)


def test_under_write_back_a_shutdown_stores_what_was_never_evicted(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    region = a_region()
    cache = make(FaultyStorage(region, stays=True), write_policy="back")
    for seed in range(2):
        run(cache, prompt(8.5, seed=seed))
    assert not region.usage().objects
    with caplog.at_level(logging.WARNING):
        cache.shutdown(LONG_S)
    assert "could not be stored" not in caplog.text
    again = make(FaultyStorage(region, stays=True))
    assert [run(again, prompt(8.5, seed=seed))[2] for seed in range(2)] == [8] * 2


def test_a_shutdown_says_how_much_could_not_be_stored(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = a_store()
    cache = make(store, write_policy="back")
    run(cache, prompt(8.5))
    store.dead = True
    with caplog.at_level(logging.WARNING):
        cache.shutdown(1.0)
    assert "pages in memory could not be stored" in caplog.text
