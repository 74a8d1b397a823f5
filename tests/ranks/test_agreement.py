"""Ranks that serve the same requests stay one cache, whatever happens on one of them."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from filling import Clock, Request, a_config, a_store, an_identity, prompt, run, settle

import forks
from gates import LONG_S
from kvarve.cache.attach import Admin
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.worker import Change, UnderWay
from kvarve.core.copies.effects import Began, Ended, Verified
from kvarve.errors import StorageError
from kvarve.ranks.agreement import AgreedStep, Agreement, Proposal, Votes, granted
from kvarve.storage import Breaker
from kvarve.testing import FaultyStorage

PROGRAM, RANKS = Path(__file__).with_name("one_rank.py"), 2


def test_two_caches_in_two_processes_find_the_same_boundaries(tmp_path: Path) -> None:
    words = [str(RANKS), str(tmp_path / "meeting")]
    started = [
        forks.Popen([sys.executable, str(PROGRAM), str(rank), *words], stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        answers = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * RANKS
    first, second = (json.loads(out.splitlines()[-1]) for out in answers)
    assert first == second
    *found, counters, nothing_left = first
    assert nothing_left
    cold, flushed, warm = found[:5], found[5], found[6:]
    assert [boundary for boundary, *_ in cold] == [0, 0, 0, 6, 0], "the fourth begins as the second"
    assert flushed > 0
    again = [boundary for boundary, *_ in warm[:5]]
    assert again[0] < 8, "a page of it was spoilt on one rank"
    assert again[2] < 10, "a page of it was lost on one rank"
    assert again[4] < 12, "its state was lost on one rank"
    assert (again[1], again[3]) == (8, 10)
    assert [boundary for boundary, *_ in warm[10:]] == [8, 8, 10, 10, 12]
    assert sum(storage for *_, storage in warm) > 0
    assert counters["bad_storage"] > 0


@pytest.mark.parametrize(
    ("proposals", "comes_true"),
    [
        ([None], None),
        ([Proposal("a")], True),
        ([Proposal("a", ready=False)], False),
        ([Proposal("a"), None, Proposal("a")], None),
        ([Proposal("a"), None, Proposal("b")], None),
        ([Proposal("a"), Proposal("a")], True),
        ([Proposal("a"), Proposal("b")], False),
        ([Proposal("a"), Proposal("a", ready=False)], False),
        ([Proposal("", ready=False), Proposal("", ready=False)], False),
    ],
)
def test_a_change_is_made_if_all_ranks_propose_it_and_are_ready(
    proposals: list[Proposal | None], comes_true: bool | None
) -> None:
    assert granted(proposals) is comes_true


class BesideAnother(Agreement):
    """The agreement of a rank with another one, which says what a test has it say."""

    ranks, up, later_s = 2, True, 0.0
    other: Proposal | None = None

    def agree(
        self, ended: Iterable[Ended], now: float, up: bool = True, proposal: Proposal | None = None, **_: object
    ) -> AgreedStep:
        return AgreedStep([*ended], now + self.later_s, self.up, granted([proposal, self.other]))


class Awaited(Future[Any]):
    """Tells when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        self.is_awaited.set()
        return super().result(timeout)


def test_a_change_that_one_rank_cannot_make_is_under_way_until_all_have_said_so(tmp_path: Path) -> None:
    """Else what a slower rank says of it refuses the next change, on all ranks."""
    agreement, calls = BesideAnother(), Queue[tuple[Callable[[], Change], Future[Change]]]()
    cache = PrefixCache(an_identity(), a_config(), agreement=agreement, clock=Clock())

    def on_its_thread(call: Callable[[], Change], _: float) -> Change:
        calls.put((call, answer := Future()))
        return answer.result(LONG_S)

    def turn(change_made: Future[Any] | None = None) -> None:
        call, answer = calls.get(timeout=LONG_S)
        change = call()
        change.made = change.made if change_made is None else change_made
        answer.set_result(change)

    admin = Admin(cache, on_its_thread, cache.scheduler.core.cleared)
    (tmp_path / "no-folder").touch()
    with ThreadPoolExecutor(1) as operator:
        impossible = operator.submit(admin.attach, f"file://{tmp_path}/no-folder/store?capacity=1MiB")
        declined = Awaited()
        impossible.add_done_callback(lambda _: declined.is_awaited.set())
        turn(declined)
        assert declined.is_awaited.wait(LONG_S)
        cache.step()
        assert not impossible.done(), "the other rank has not said yet that it cannot"
        with pytest.raises(UnderWay):
            admin.detach()
        agreement.other = Proposal("", ready=False)
        cache.step()
        with pytest.raises(StorageError, match="no-folder"):
            impossible.result(LONG_S)
        agreement.other = None
        detached = operator.submit(admin.detach)
        turn()
        cache.step()
        agreement.other = Proposal("detach")
        cache.step()
        assert detached.result(LONG_S)["attached"] is False
    cache.shutdown(5)


class Rung(Agreement):
    """Counts how often its sleep is to end."""

    def __init__(self) -> None:
        self.rung = 0

    def wake(self) -> None:
        self.rung += 1


def test_waking_a_cache_ends_the_sleep_of_its_agreement() -> None:
    agreement = Rung()
    cache = PrefixCache(an_identity(), a_config(), agreement=agreement, clock=Clock())
    before = agreement.rung
    cache.worker.wake()
    assert agreement.rung == before + 1
    cache.shutdown(5)


def a_stalled_store() -> FaultyStorage:
    """It has the prompt, and answers nothing more."""
    store = a_store()
    filling = PrefixCache(an_identity(), a_config(), storage=store)
    run(filling, prompt(8.5))
    settle(filling)
    filling.shutdown()
    store.stall()
    return store


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_request_loses_patience_in_the_step_in_which_the_ranks_agree_that_it_is_time(steps_before: int) -> None:
    """Clocks of two machines have nothing to do with each other; the own one stands still."""
    store, agreed = a_stalled_store(), BesideAnother()
    agreed.later_s = 5000.0
    cache = PrefixCache(an_identity(), a_config(), storage=store, agreement=agreed, clock=Clock())
    for _ in range(steps_before):
        cache.step()
    request = Request(cache, prompt(8.5))
    cache.step()
    try:
        assert not cache.claim(request.lease), "it gave up at once, on this rank only"
        cache.step()
        assert not request.lease.ready
        agreed.later_s = 10_000.0
        cache.step()
        assert request.lease.ready, "its patience has ended in this very step"
    finally:
        request.close()
        store.release()
        cache.shutdown(5)


def test_a_storage_that_is_down_on_another_rank_is_not_up() -> None:
    agreed = BesideAnother()
    cache = PrefixCache(an_identity(), a_config(), storage=a_store(), agreement=agreed, clock=Clock())
    for agreed.up in (True, False, True):
        cache.step()
        assert cache.up is agreed.up
    cache.shutdown(5)


class AtBarrier(Agreement):
    """The agreement of ranks that are threads: each step is one on all of them, at the first one's time."""

    ranks = 2

    def __init__(self, rank: int, barrier: threading.Barrier, said: dict[int, float]) -> None:
        self._rank, self._barrier, self._said, self.steps = rank, barrier, said, 0

    def agree(self, ended: Iterable[Ended], now: float, *_: object, **__: object) -> AgreedStep:
        self.steps += 1
        self._said[self._rank] = now
        self._barrier.wait()
        now = self._said[0]
        self._barrier.wait()
        return AgreedStep([], now)


class Ticking(Clock):
    """Goes on whenever it is asked."""

    def __init__(self, tick_s: float) -> None:
        super().__init__()
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.mark.parametrize("end", ["settle", "shutdown"])
def test_settling_gives_up_in_the_same_step_on_every_rank(end: str) -> None:
    """Else one rank would wait for ever in a step that the others do not take; one of them has just seen its storage go
    down, and has not told the others."""
    barrier, said, stores = threading.Barrier(2, timeout=30), dict[int, float](), [a_store(), a_store()]
    at = [AtBarrier(rank, barrier, said) for rank in range(2)]
    caches = [
        PrefixCache(
            an_identity(), a_config(), storage=stores[rank], agreement=at[rank], clock=Ticking([0.2, 0.06][rank])
        )
        for rank in range(2)
    ]
    for cache, store in zip(caches, stores, strict=True):
        store.stall()
        cache.open(prompt(8.5))
    attached = caches[1].worker.attached
    assert attached is not None and isinstance(attached.storage, Breaker)
    stores[1].dead = True
    with attached.storage._lock:
        attached.storage._count_failure("as if three calls had failed", by=3)
    assert not caches[1].up

    def give_up(rank: int) -> bool | None:
        return caches[rank].settle(5) if end == "settle" else caches[rank].shutdown(8)

    try:
        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(give_up, range(2))] == [False if end == "settle" else None] * 2
        assert at[0].steps == at[1].steps > 2
    finally:
        for cache, store in zip(caches, stores, strict=True):
            store.release()
            cache.worker.transfers.close(5)


# --- loads that have been verified


def test_a_load_is_verified_once_it_is_on_every_rank() -> None:
    votes = Votes(2)
    assert votes.merge([[Began(1), Verified(1, 0b111)], []]) == []
    assert votes.merge([[Ended(1, 0b111)], [Began(1)]]) == [Began(1)]
    assert votes.merge([[], [Verified(1, 0b011, 0b100)]]) == [Verified(1, 0b011, 0b100)]
    assert votes.merge([[], [Ended(1, 0b011, 0b100)]]) == [Ended(1, 0b011, 0b100)]
    assert votes.merge([[], []]) == []


def test_a_load_that_one_rank_could_not_begin_is_never_verified() -> None:
    votes = Votes(2)
    assert votes.merge([[Verified(1, 0b11)], [Ended(1, 0)]]) == [Began(1)]
    assert votes.merge([[Ended(1, 0b11)], []]) == [Ended(1, 0)]
