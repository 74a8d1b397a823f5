"""A storage that dies, pages that are damaged, a cache that is flushed or shut down."""

import gc
import weakref
from pathlib import Path

import pytest
from filling import (
    ALL,
    ATTENTION,
    LONG,
    POOLS,
    STATE,
    WINDOW,
    Make,
    Request,
    a_config,
    a_full_store,
    a_store,
    an_identity,
    nothing_is_left,
    prompt,
    run,
    settle,
    until,
    used,
)

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.pages.pools import PoolSpec, Tier
from kvarve.records.record import HEADER_BYTES

# --- faults


def test_when_storage_dies_requests_go_on_with_what_memory_has(make: Make) -> None:
    store = a_full_store()
    cache = make(store)
    other = prompt(8.5, seed=3)
    run(cache, other)
    settle(cache)
    store.dead = True
    assert run(cache, LONG) == (0, 0, 0)
    assert run(cache, LONG) == (ALL, 0, 0)
    assert run(cache, other) == (ALL, 0, 0)
    fresh = prompt(8.5, seed=4)
    assert run(cache, fresh) == (0, 0, 0)
    settle(cache)
    cache.flush([Tier.DEVICE])
    assert run(cache, fresh) == (0, ALL, 0)
    store.dead = False
    until(cache, lambda: cache.up)  # it is probed, and gets the pages stored meanwhile
    settle(cache)
    cache.flush()
    assert run(cache, fresh) == (0, 0, ALL)


@pytest.mark.parametrize(
    ("pool", "damage"),
    [(ATTENTION, "flip"), (WINDOW, "truncate"), (STATE, "flip"), (STATE, "delete")],
    ids=lambda it: getattr(it, "name", it),
)
def test_a_page_that_storage_damaged_or_lost_is_computed_and_stored_again(
    make: Make, pool: PoolSpec, damage: str
) -> None:
    store = a_full_store()
    names = [name for name in store.inner._region.objects if f".{pool.name}." in name]  # type: ignore[attr-defined]
    {"flip": store.flip, "truncate": store.truncate, "delete": lambda name: store.delete([name])}[damage](names[-1])
    if damage == "flip":  # not in the padding
        store.flip(names[-1], HEADER_BYTES)
    cache = make(store)
    assert sum(run(cache, LONG)) < ALL
    assert cache.scheduler.core.counters.bad_storage == (damage != "delete")
    settle(cache)
    cache.flush()
    assert run(cache, LONG) == (0, 0, ALL)


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_a_page_that_changed_in_host_memory_is_computed_anew(make: Make, pool: PoolSpec) -> None:
    cache = make(a_store())
    run(cache, LONG)
    settle(cache)
    cache.flush([Tier.DEVICE])
    host = cache.worker.host[POOLS.index(pool)]
    for slot in range(host.slots):
        host.record(slot)[HEADER_BYTES + 1] ^= 8
    assert run(cache, LONG) == (0, 0, 0)
    assert cache.scheduler.core.counters.bad_host > 0
    settle(cache)
    assert run(cache, LONG) == (ALL, 0, 0)
    cache.flush([Tier.DEVICE])
    assert run(cache, LONG) == (0, ALL, 0)


def test_a_flush_while_requests_run_evicts_no_page_that_they_pin(make: Make) -> None:
    cache = make(a_store())
    run(cache, LONG)
    settle(cache)
    first, second = Request(cache, LONG).wait(), Request(cache, prompt(9, seed=1)).wait()
    second.chunk()
    other = prompt(9, seed=2)
    run(cache, other)
    assert cache.flush() > 0
    cache.scheduler.audit()
    first.look()
    assert cache.lookup(LONG).device == ALL
    assert cache.lookup(other).memory == 0
    first.compute().close()
    second.compute().close()
    assert run(cache, prompt(9, seed=1)) == (ALL, 0, 0)
    settle(cache)
    assert nothing_is_left(cache)


def test_one_flush_evicts_all_unpinned_pages_whatever_was_used_last(make: Make) -> None:
    cache, stem = make(pools=(ATTENTION,)), prompt(4)
    for seed in (1, 2):
        run(cache, prompt(8.5, seed, prefix=stem))
    settle(cache)
    assert cache.scheduler.core.evictions.evict(0, 8) == 8  # both ends leave the device, so that the stem could go next
    assert used(cache)["device.attention"] == 4
    assert run(cache, prompt(8.5, seed=3, prefix=stem)) == (4, 0, 0)  # but it gets a new end, used later than itself
    cache.flush([Tier.DEVICE])
    assert used(cache) == {"host.attention": 4 + 3 * 4}


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_flush_with_a_dead_storage_ends(make: Make, policy: str) -> None:
    store = a_store()
    cache = make(store, write_policy=policy)
    run(cache, LONG)
    store.dead = True
    assert nothing_is_left(cache)


def test_a_shutdown_does_not_wait_for_a_storage_that_is_down(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, waited = a_store(), list[float]()
    cache = make(store)
    store.dead = True
    run(cache, LONG)
    while cache.up:
        cache.wait(0.01)
        cache.scheduler.core.storage.retry()
        cache.step()
    monkeypatch.setattr(cache, "settle", waited.append)
    cache.shutdown()
    assert waited == [0.0]


def test_a_cache_that_was_shut_down_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    cache = PrefixCache(an_identity(), a_config(storage=f"file://{tmp_path}/store?capacity=64MiB"))
    run(cache, LONG)
    cache.shutdown()
    kept = weakref.ref(cache.worker.host[0])
    gc.disable()  # its timing is arbitrary, and a cache's memory is large
    try:
        del cache
        assert kept() is None
    finally:
        gc.enable()


def test_shutting_down_while_requests_run_leaves_what_they_published(make: Make, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?capacity=64MiB"
    cache = PrefixCache(an_identity((ATTENTION,)), a_config(storage=url))
    request = Request(cache, LONG).wait()
    request.chunk()
    request.chunk()
    cache.shutdown()
    again = PrefixCache(an_identity((ATTENTION,)), a_config(storage=url))
    assert run(again, LONG) == (0, 0, 4)
    again.shutdown()
