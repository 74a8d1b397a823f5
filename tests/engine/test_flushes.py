"""A flush takes no longer than it may, whoever else flushes, and those who ask at once share one."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from engines import LONG_S
from kvarve.errors import Busy
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.reference.engine.flushes import Flushes

HOURS_S = 9000.0


class Memory:
    """What a flush asks of a cache: its backups end when told, and each eviction finds a page."""

    def __init__(self) -> None:
        self.evicted: list[tuple[Tier, ...]] = []
        self.backups_end = threading.Event()
        self.at_eviction: Callable[[], None] = lambda: None
        self.asked = threading.Event()

    def idle(self) -> bool:
        self.asked.set()
        return self.backups_end.is_set()

    def flush(self, tiers: Sequence[Tier]) -> int:
        self.evicted.append(tuple(tiers))
        self.at_eviction()
        return 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def flushes(memory: Memory) -> Flushes:
    return Flushes(memory, lambda what, seconds, order: what(), lambda: False)


def pages(flush: "Future[int]") -> int:
    return flush.result(LONG_S)


def test_who_has_less_time_ends_the_flush_that_is_under_way(memory: Memory, flushes: Flushes) -> None:
    patient = flushes.begin(MEMORY_TIERS, HOURS_S)
    assert memory.asked.wait(LONG_S)
    hasty = flushes.begin([Tier.HOST, Tier.DEVICE], 0.0)
    assert pages(hasty) == pages(patient) == 1, "one flush of both"
    assert memory.evicted == [MEMORY_TIERS]


def test_who_asks_while_pages_are_evicted_has_them_evicted_once_more(memory: Memory, flushes: Flushes) -> None:
    joined = list[Future[int]]()

    def another() -> None:
        if not joined:
            joined.append(flushes.begin(MEMORY_TIERS, HOURS_S))

    memory.backups_end.set()
    memory.at_eviction = another
    assert pages(flushes.begin(MEMORY_TIERS, HOURS_S)) == pages(joined[0]) == 2
    assert pages(flushes.begin(MEMORY_TIERS, HOURS_S)) == 1, "a new one"


def test_who_keeps_asking_does_not_keep_a_flush_beyond_its_time(memory: Memory, flushes: Flushes) -> None:
    joined = list[Future[int]]()

    def another() -> None:
        if len(joined) < 50:
            joined.append(flushes.begin(MEMORY_TIERS, 0.0))

    memory.at_eviction = another
    first = flushes.begin(MEMORY_TIERS, 0.0)
    assert pages(first) == 1
    assert pages(joined[0]) == 1


def test_a_long_turn_of_the_engine_is_waited_for_within_the_time_and_then_told(memory: Memory) -> None:
    busy = [Busy("it computes")] * 3

    def ask(what: Callable[[], Any], seconds: float, order: object) -> Any:
        if busy:
            raise busy.pop()
        return what()

    flushes = Flushes(memory, ask, lambda: False)
    memory.backups_end.set()
    assert pages(flushes.begin(MEMORY_TIERS, HOURS_S)) == 1
    for over, time_s in ((False, 0.0), (True, HOURS_S)):
        busy += [Busy("it computes")]
        with pytest.raises(Busy, match="it computes"):
            pages(Flushes(memory, ask, lambda over=over: over).begin(MEMORY_TIERS, time_s))  # type: ignore[misc]


def test_a_turn_that_is_too_long_for_one_is_not_for_another_who_has_more_time(memory: Memory) -> None:
    computed = threading.Event()

    def ask(what: Callable[[], Any], seconds: float, order: object) -> Any:
        if not computed.wait(0.001):
            raise Busy("it computes")
        return what()

    flushes = Flushes(memory, ask, lambda: False)
    memory.backups_end.set()
    patient, hasty = flushes.begin(MEMORY_TIERS, HOURS_S), flushes.begin(MEMORY_TIERS, 0.0)
    with pytest.raises(Busy, match="it computes"):
        pages(hasty)
    assert not patient.done()
    computed.set()
    assert pages(patient) == 1
