"""Attach and detach while requests are served: no request fails, no slot leaks, a failed change has no effect."""

import threading
from itertools import count
from pathlib import Path

import pytest
from filling import (
    ALL,
    LONG,
    Clock,
    Make,
    Request,
    a_store,
    nothing_is_left,
    prompt,
    run,
    settle,
    until,
    used,
)

from gates import threads
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.copies.in_flight import STORE
from kvarve.core.lease import Phase
from kvarve.errors import Busy, ConfigError, KvarveError, StorageError
from kvarve.pages.pools import Tier
from kvarve.testing import FaultyStorage
from kvarve.transfer import storage_connection

OTHER = prompt(8.5, seed=3)
LONG_S = 20.0


def attach(cache: PrefixCache, store: FaultyStorage, **how: object) -> None:
    change = cache.worker.attach(store, **how)  # type: ignore[arg-type]
    cache.step()
    change.made.result(0)


def detach(cache: PrefixCache) -> None:
    change = cache.worker.detach()
    cache.step()
    before = change.made.result(0)
    assert before is None or before.closed.wait(LONG_S)


def gone(before: list[threading.Thread]) -> None:
    """Threads that have begun since end by themselves, or the test's time limit does."""
    for thread in {*threads("kvarve")} - {*before}:
        thread.join(LONG_S)
        assert not thread.is_alive(), thread.name


# --- attach and detach


@pytest.mark.parametrize(
    ("policy", "down_to_the_host"),
    [("through", False), ("through:9", False), ("back", False), ("back", True)],
)
def test_what_is_in_memory_goes_to_a_store_that_is_attached_if_asked(
    make: Make, policy: str, down_to_the_host: bool
) -> None:
    cache, store = make(write_policy=policy), a_store()
    run(cache, LONG)
    settle(cache)
    if down_to_the_host:
        cache.flush([Tier.DEVICE])
    settle(cache)
    attach(cache, store, back_up=True)
    settle(cache)
    assert store.usage().objects > 0, "and before anything is evicted"
    cache.scheduler.core.flush([Tier.DEVICE, Tier.HOST])
    settle(cache)
    cache.flush()
    assert run(cache, LONG) == (0, 0, ALL)


def test_what_a_policy_does_not_want_is_not_stored_because_a_store_was_down(make: Make) -> None:
    store = a_store()
    cache = make(store, write_policy="back")
    store.dead = True
    while cache.up:
        run(cache, prompt(4.5, seed=store.counts["exists"]))
    run(cache, LONG)
    store.dead = False
    until(cache, lambda: cache.scheduler.core.storage.attached)
    settle(cache)
    assert store.usage().objects == 0


def test_a_store_gets_what_is_computed_after_it_was_attached(make: Make) -> None:
    cache, store = make(), a_store()
    run(cache, LONG)
    settle(cache)
    attach(cache, store)
    settle(cache)
    assert store.usage().objects == 0
    run(cache, OTHER)
    settle(cache)
    cache.flush()
    assert run(cache, LONG) == (0, 0, 0)
    assert run(cache, OTHER) == (0, 0, ALL)


def test_a_store_that_takes_anothers_place_gets_everything_and_the_other_is_closed(make: Make) -> None:
    first, second = a_store(), a_store()
    cache = make(first)
    run(cache, LONG)
    settle(cache)
    change = cache.worker.attach(second, back_up=True)
    assert not first.closed.is_set(), "the new one has not come yet"
    cache.step()
    before = change.made.result(0)
    assert before is not None and before.closed.wait(LONG_S) and first.closed.is_set()
    settle(cache)
    assert second.usage().objects == first.usage().objects > 0
    cache.flush()
    assert run(cache, LONG) == (0, 0, ALL)
    asked = first.counts["exists"]
    run(cache, OTHER)
    assert first.counts["exists"] == asked
    assert not second.closed.is_set()


def test_without_a_storage_no_probe_is_sent_and_it_can_be_attached_again(make: Make, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?capacity=64MiB"
    cache = make(storage_deadline_s=30.0)
    detach(cache)
    for _ in range(2):
        attach(cache, cache.worker.opened(url), setting=url)  # type: ignore[arg-type]
        assert cache.worker.attached is not None and cache.worker.attached.urls == (url,)
        assert sum(run(cache, LONG)) in (0, ALL)
        settle(cache)
        detach(cache)
        assert cache.worker.attached is None and cache.worker.usage() is None
        cache.flush()
        assert run(cache, LONG) == (0, 0, 0)
        cache.flush()
    attach(cache, cache.worker.opened(url))  # type: ignore[arg-type]
    assert run(cache, LONG) == (0, 0, ALL)


def test_a_request_that_waits_for_a_detached_storage_is_computed_at_once(make: Make) -> None:
    store, clock = a_store(), Clock()
    cache = make(store, clock, storage_wait="all")
    store.stall()
    request = Request(cache, LONG)
    store.wait_for_stalled_call()
    assert request.lease.phase is Phase.PROBING and not cache.claim(request.lease)
    change = cache.worker.detach()
    cache.step()
    change.made.result(0)
    assert cache.claim(request.lease)
    request.look()
    request.compute().close()
    store.release()
    settle(cache)
    until(cache, lambda: nothing_is_left(cache))  # a call that hung may still be on its way back


def test_policies_come_with_a_store_and_stay(make: Make) -> None:
    cache, store = make(write_policy="back"), a_store()
    run(cache, LONG)
    settle(cache)
    assert "host.attention" not in used(cache)
    attach(cache, store, wait="none", write="through", back_up=True)
    settle(cache)
    assert used(cache)["host.attention"] == ALL and store.usage().objects > 0
    policies = cache.worker.config.policies
    assert (policies.storage_wait, policies.write_policy) == ("none", "through")
    assert policies.patience().base_s == 0
    detach(cache)
    attach(cache, a_store())
    policies = cache.worker.config.policies
    assert (policies.storage_wait, policies.write_policy) == ("none", "through")


# --- one that hangs


def test_a_storage_that_hangs_harms_no_request_after_it_was_detached(make: Make) -> None:
    before = threads("kvarve")
    old, new = a_store(), a_store()
    cache = make(old, storage_deadline_s=0.2)
    old.stall()
    run(cache, LONG)
    old.wait_for_stalled_call()  # a worker hangs while it uses host pages
    change = cache.worker.attach(new, back_up=True)
    cache.step()
    gone_depot = change.made.result(0)
    assert gone_depot is not None
    assert gone_depot.closed.wait(LONG_S), "it is given up"
    assert not old.closed.is_set(), "and not closed during a call"
    run(cache, OTHER)
    until(cache, lambda: new.counts["put"] > 0 and not cache.scheduler.core.backups.dirty.to_host)
    assert cache.scheduler.core.copies.ops, "copies that hang keep their slots"
    old.release()
    until(cache, lambda: not cache.scheduler.core.copies.ops)
    settle(cache)
    assert old.closed.wait(LONG_S)
    cache.flush()
    assert run(cache, OTHER) == (0, 0, ALL)
    settle(cache)
    until(cache, lambda: nothing_is_left(cache))  # a call that hung may still be on its way back
    cache.shutdown()
    gone(before)


def test_what_waited_behind_a_call_that_hangs_ends_when_the_store_is_given_up(make: Make) -> None:
    store, clock = a_store(), Clock()
    cache = make(store, clock, storage_deadline_s=0.2, storage_wait="none")
    store.stall()
    run(cache, prompt(8.5, seed=20))
    store.wait_for_stalled_call()
    assert cache.worker.transfers.connection is not None
    lane, seeds = cache.worker.transfers.connection.lanes[STORE], count(21)
    while not (lane.waiting() and lane.busy_s()):  # one call may take all queued copies, as long as a worker is free
        run(cache, prompt(8.5, seed=next(seeds)))
        clock.now += 0.001
    change = cache.worker.detach()
    cache.step()
    before = change.made.result(0)
    assert before is not None and before.closed.wait(LONG_S)
    cache.step()
    assert lane.counts.late > 0 and lane.waiting() == 0
    assert cache.scheduler.core.copies.ops, "copies that have begun hang"
    store.release()
    until(cache, lambda: not cache.scheduler.core.copies.ops)
    until(cache, lambda: nothing_is_left(cache))  # a call that hung may still be on its way back


def test_figures_of_a_store_that_hangs_are_those_it_gave_last(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store()
    cache = make(store)
    run(cache, LONG)
    settle(cache)
    monkeypatch.setattr(storage_connection, "USAGE_S", LONG_S)
    usage = cache.worker.usage()
    assert usage is not None and usage.objects > 0
    monkeypatch.setattr(storage_connection, "USAGE_S", 0.01)
    store.stall()
    stalled = threads("kvarve")
    assert [cache.worker.usage() for _ in range(5)] == [usage] * 5
    assert len({*threads("kvarve")} - {*stalled}) <= 1, "one thread hangs, however often `usage` is called"
    store.release()


# --- up and down


@pytest.mark.parametrize("another", [False, True])
def test_a_store_that_is_down_is_not_asked_and_it_or_another_gets_what_was_written_meanwhile(
    make: Make, another: bool
) -> None:
    store = a_store()
    cache = make(store)
    store.dead = True
    while cache.up:
        run(cache, prompt(4.5, seed=store.counts["exists"]))
        settle(cache)
    cache.step()
    asked = store.counts["put"], store.counts["get"]
    run(cache, LONG)
    settle(cache)
    assert (store.counts["put"], store.counts["get"]) == asked
    if another:
        attach(cache, a_store(), back_up=True)
        assert cache.up
    store.dead = False
    until(cache, lambda: cache.up)
    settle(cache)
    cache.flush()
    assert run(cache, LONG) == (0, 0, ALL)


def test_requests_that_wait_for_a_hung_storage_resume_at_its_deadline_and_others_never_wait(make: Make) -> None:
    filled, clock = a_store(), Clock()
    cache = make(filled, clock, storage_wait="99.0s+9.0s/Ki", storage_deadline_s=7.0)
    run(cache, LONG)
    settle(cache)
    filled.stall()
    waits = Request(cache, OTHER)
    filled.wait_for_stalled_call()
    assert not cache.claim(waits.lease)
    assert run(cache, LONG) == (ALL, 0, 0), "a request that needs no page of it is not delayed: the clock stood still"
    clock.now += 7.01
    cache.step()
    assert not cache.up
    assert cache.claim(waits.lease), "its patience is longer than that"
    waits.compute().close()
    assert run(cache, prompt(8.5, seed=5)) == (0, 0, 0), "misses cost nothing now"
    filled.release()
    until(cache, lambda: cache.up)
    settle(cache)
    cache.flush()
    assert run(cache, OTHER) == (0, 0, ALL)
    until(cache, lambda: nothing_is_left(cache))  # a call that hung may still be on its way back


# --- a failed change has no effect


def goes_on(cache: PrefixCache) -> None:
    """The attached storage works as before."""
    settle(cache)
    cache.flush()
    assert run(cache, LONG) == (0, 0, ALL)
    run(cache, OTHER)
    settle(cache)
    cache.flush()
    assert run(cache, OTHER) == (0, 0, ALL)
    settle(cache)
    until(cache, lambda: nothing_is_left(cache))  # a call that hung may still be on its way back


@pytest.fixture
def full(make: Make) -> PrefixCache:
    cache = make(a_store())
    run(cache, LONG)
    settle(cache)
    return cache


def test_an_unknown_policy_is_refused(full: PrefixCache) -> None:
    config, store = full.worker.config, a_store()
    with pytest.raises(ConfigError, match=r"storage_wait must be .* got 'hope'"):
        full.worker.attach(store, wait="hope")
    with pytest.raises(ConfigError, match=r"write_policy must be .* got 'later'"):
        full.worker.attach(store, write="later")
    assert full.worker.config is config and not store.closed.is_set(), "it is still the caller's"
    goes_on(full)


def test_a_store_that_cannot_be_opened_is_refused(full: PrefixCache, tmp_path: Path) -> None:
    (tmp_path / "something else").write_text("of another program")
    for url, complaint in (
        ("nfs://x", "unknown storage 'nfs'"),
        ("file://{folder}/x", "must say how much it may hold"),
        ("file://{folder}/x?capacity=1KiB", "too little for this model"),
        ("file://{folder}/x?capacity=64MiB&quota=1KiB", "1 KiB of quota memory is too little for this model"),
        ("file://{folder}?capacity=64MiB", "is not empty and not a kvarve storage folder"),
    ):
        with pytest.raises(KvarveError, match=complaint):
            full.worker.opened(url.format(folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["something else"]
    goes_on(full)


def test_a_store_without_workers_is_refused(full: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads("kvarve")
    start, started = threading.Thread.start, 0

    def fails(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    store = a_store()
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(StorageError, match="no workers for a storage: can't start new thread"):
        full.worker.attach(store)
    monkeypatch.undo()
    assert not store.closed.is_set()
    gone(before)
    goes_on(full)


@pytest.mark.parametrize("kind", [AssertionError, ZeroDivisionError])
def test_a_bug_in_the_middle_of_a_change_is_raised_by_the_step_and_told_to_the_caller(
    kind: type[Exception], full: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise kind("a bug")

    before = threads("kvarve")
    store = a_store()
    monkeypatch.setattr(full.scheduler.core.tree, "runs", broken)
    change = full.worker.attach(store, back_up=True)
    with pytest.raises(kind, match="a bug"):
        full.step()
    with pytest.raises(kind, match="a bug"):
        change.made.result(0)
    assert store.closed.wait(LONG_S)
    gone(before)


def test_two_changes_at_once_are_one_too_many(full: PrefixCache) -> None:
    store, other = a_store(), a_store()
    first = full.worker.attach(store, back_up=True)
    for second in (lambda: full.worker.attach(other), full.worker.detach):
        with pytest.raises(Busy, match="another change"):
            second()
    assert not other.closed.is_set()
    full.step()
    first.made.result(0)
    goes_on(full)
    assert store.usage().objects > 0


def test_a_change_that_is_not_made_before_the_end_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, store = make(), a_store()
    change = cache.worker.attach(store)
    monkeypatch.setattr(cache, "settle", lambda timeout_s: True)
    cache.shutdown()
    with pytest.raises(Busy, match="shutting down"):
        change.made.result(0)
    assert store.closed.wait(LONG_S)
    assert cache.flush([Tier.DEVICE]) == 0
