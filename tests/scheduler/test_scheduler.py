"""A scheduler without a worker, and a worker without a scheduler: how each handles the other's messages."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from filling import PAGE, a_config, a_store, an_identity, prompt

from kvarve.cache.messages import ChangeMade, ChangeProposed, ChangeRefused, Report
from kvarve.cache.scheduler import CacheScheduler
from kvarve.cache.worker import CacheWorker, check
from kvarve.core.copies.effects import Copy, Ended, Hurry, Probe
from kvarve.errors import Busy, StorageError
from kvarve.pages.pools import Tier
from kvarve.ranks.agreement import AgreedStep, Agreement

DETACHED = replace(a_config(), storage=None)


def a_scheduler(storage: bool = True) -> CacheScheduler:
    return CacheScheduler(an_identity(), a_config(), check(an_identity(), a_config()), storage=storage)


class Denied(Agreement):
    """The other ranks have proposed something else."""

    def agree(self, *report: object, **more: object) -> AgreedStep:
        return super().agree(*report, **more)._replace(granted=False)  # type: ignore[arg-type]


def test_copies_sent_before_a_change_of_the_storage_stand_before_it() -> None:
    scheduler = a_scheduler()
    scheduler.step(Report(), 1.0)
    scheduler.open(prompt(4.5))
    scheduler.step(Report(proposed=ChangeProposed(1, DETACHED, attach=False)), 2.0)
    probe, made = scheduler.take()
    assert isinstance(probe, Probe) and made == ChangeMade(1)
    assert not scheduler.storage_up and scheduler.take() == []


def test_a_change_that_the_ranks_do_not_grant_changes_nothing() -> None:
    shape = an_identity(), a_config(), check(an_identity(), a_config())
    scheduler = CacheScheduler(*shape, storage=True, agreement=Denied())
    scheduler.step(Report(proposed=ChangeProposed(1, DETACHED, attach=False)), 1.0)
    (refused,) = scheduler.take()
    assert isinstance(refused, ChangeRefused) and refused.change == 1 and not refused.busy
    assert scheduler.storage_up and scheduler.config == a_config()


def test_a_storage_that_a_worker_reports_down_is_asked_for_nothing_until_it_is_back() -> None:
    scheduler = a_scheduler()
    scheduler.step(Report(up=False), 1.0)
    scheduler.open(prompt(4.5))
    assert scheduler.take() == [] and not scheduler.storage_up
    scheduler.step(Report(), 2.0)
    scheduler.open(prompt(4.5))
    assert [type(order) for order in scheduler.take()] == [Probe] * 2, "also about the request that waits"


def test_a_claim_makes_all_fetches_of_its_request_urgent_with_one_order() -> None:
    scheduler = a_scheduler()
    scheduler.step(Report(), 1.0)
    lease = scheduler.open(prompt(100.5))
    (probe,) = scheduler.take()
    assert isinstance(probe, Probe)
    scheduler.step(Report([Ended(probe.op, (1 << len(probe.pages)) - 1)]), 2.0)
    fetches = [order.op for order in scheduler.take() if isinstance(order, Copy) and not order.urgent]
    assert len(fetches) > 5
    scheduler.claim(lease)
    assert scheduler.take() == [Hurry(tuple(fetches))]


def test_an_answer_about_a_copy_that_is_not_in_flight_is_counted_and_changes_nothing() -> None:
    scheduler = a_scheduler()
    scheduler.step(Report([Ended(99, 1)]), 1.0)
    assert scheduler.core.counters.strays == 1 and scheduler.take() == []
    scheduler.audit()


def test_a_refusal_that_was_on_its_way_leaves_the_change_that_took_the_place_pending() -> None:
    worker, store = CacheWorker(an_identity(), a_config()), a_store()
    declined = worker.decline(StorageError("not on this rank"))
    assert worker.report().proposed == ChangeProposed(declined.number, a_config(), attach=False, ready=False)
    attached = worker.attach(store)
    with pytest.raises(StorageError, match="not on this rank"):
        declined.made.result(0)
    worker.do([ChangeRefused(declined.number, "another rank cannot", busy=False)])
    assert not attached.made.done() and worker.attached is None
    proposed = worker.report().proposed
    assert proposed is not None and proposed.change == attached.number and worker.report().proposed is None
    worker.do([ChangeMade(attached.number)])
    assert attached.made.result(0) is None and worker.attached is not None
    worker.close(5, 1, up=True)


def test_a_worker_that_closes_gives_its_pending_change_up() -> None:
    worker = CacheWorker(an_identity(), a_config(), storage=a_store())
    change = worker.detach()
    worker.close(5, 1, up=True)
    with pytest.raises(Busy, match="shutting down"):
        change.made.result(0)
    assert worker.report().proposed is None


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From its call on the system starts no more threads."""

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    yield lambda: monkeypatch.setattr(threading.Thread, "start", fails)


def test_a_change_is_answered_though_the_storage_before_it_cannot_be_retired(
    no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = CacheWorker(an_identity(), a_config(), storage=a_store())
    change = worker.detach()
    no_threads()
    with pytest.raises(StorageError, match="can't start new thread") as raised:
        worker.do([ChangeMade(change.number)])
    assert change.made.exception(0) is raised.value
    monkeypatch.undo()
    worker.close(5, 1, up=True)


def test_a_refused_change_is_answered_though_its_storage_cannot_be_retired(
    no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = CacheWorker(an_identity(), a_config())
    change = worker.attach(a_store())
    no_threads()
    with pytest.raises(StorageError, match="can't start new thread"):
        worker.do([ChangeRefused(change.number, "another rank cannot", busy=False)])
    with pytest.raises(StorageError, match="another rank cannot"):
        change.made.result(0)
    monkeypatch.undo()
    worker.close(5, 1, up=True)


def test_a_worker_answers_each_order_once_whatever_becomes_of_it() -> None:
    store = a_store()
    worker, scheduler = CacheWorker(an_identity(), a_config(), storage=store), a_scheduler()
    scheduler.step(worker.report(), 1.0)
    scheduler.open(prompt(4.5))
    (probe,) = scheduler.take()
    assert isinstance(probe, Probe | Copy)
    store.dead = True
    worker.do([probe])
    worker.close(5, 1, up=True)  # the lanes have finished, so no answer is still to come
    assert [event for event in worker.report().events if isinstance(event, Ended)] == [Ended(probe.op, 0)]


# --- over an engine's blocks


def over_blocks() -> CacheScheduler:
    identity = replace(an_identity(), chunk_tokens=2 * PAGE)
    slots = {Tier.HOST: (64,) * len(identity.pools)}
    return CacheScheduler(identity, a_config(), slots, storage=True)


def test_pages_of_an_unfinished_chunk_are_not_saved_as_their_names_still_change() -> None:
    scheduler = over_blocks()
    scheduler.step(Report(), 1.0)
    lease = scheduler.open(prompt(3))
    scheduler.claim(lease)
    scheduler.step(Report([Ended(order.op, 0) for order in scheduler.take() if isinstance(order, Probe)]), 1.5)
    assert scheduler.claim(lease)
    saved = scheduler.blocks.save(lease, [{0: 100, 1: 101, 2: 102} for _ in scheduler.pools])
    assert all(positions & 0b100 == 0 for positions in saved) and any(saved)
    sealed = {page.target: page.key for copy in copies(scheduler, Tier.HOST) for page in copy.pages}
    assert sealed and {*sealed.values()} <= {lease.key(0), lease.key(1)}


def test_an_engine_with_blocks_of_its_own_gets_no_device_slots() -> None:
    scheduler = over_blocks()
    scheduler.step(Report(), 1.0)
    lease = scheduler.open(prompt(3))
    refused = [lambda: scheduler.pages(lease), lambda: scheduler.grow(lease, 2), lambda: scheduler.publish(lease, 2)]
    refused += [scheduler.capacity_tokens, lambda: scheduler.demand([]), scheduler.device_state]
    for call in refused:
        with pytest.raises(AssertionError, match="an engine owns the device"):
            call()
    scheduler.audit()


def copies(scheduler: CacheScheduler, target: Tier) -> list[Copy]:
    return [order for order in scheduler.take() if isinstance(order, Copy) and order.target is target]
