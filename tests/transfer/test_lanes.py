"""A piece of work ends exactly once, whatever happens to it and to those before it."""

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from kvarve.core.effects import Ended
from kvarve.errors import StorageError
from kvarve.transfer.lanes import Ends, Lane

LONG_S = 20.0  # nothing here waits so long unless something is broken


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Work that says when it has begun, and does not end before it is told to."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self) -> tuple[int, int]:
        self.begun.release()
        assert self.open.wait(LONG_S)
        return 1, 0

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=LONG_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def collect(ends: Ends, count: int) -> list[Ended]:
    """The next `count` ends, and no more than those."""
    ended = ends.collect()
    while len(ended) < count:
        assert ends.wait(LONG_S), f"only {ended} of {count} have ended"
        ended += ends.collect()
    assert len(ended) == count
    return ended


def test_work_is_done_in_the_order_in_which_it_was_sent() -> None:
    ends, seen = Ends(), []
    lane = Lane("test", ends)
    for op in range(50):
        lane.send(op, lambda op=op: (seen.append(op), (op, 0))[1], LONG_S)  # type: ignore[misc]
    assert collect(ends, 50) == [Ended(op, op, 0) for op in range(50)]
    assert seen == [*range(50)]
    assert lane.close(LONG_S)
    assert lane.counts.done == 50


def test_an_end_tells_what_the_work_answered() -> None:
    ends = Ends()
    lane = Lane("test", ends)
    lane.send(7, lambda: (1 << 200 | 5, 2), LONG_S)
    assert collect(ends, 1) == [Ended(7, 1 << 200 | 5, 2)]
    assert lane.close(LONG_S)


def test_two_workers_carry_two_pieces_at_once() -> None:
    ends, both = Ends(), threading.Barrier(2, timeout=LONG_S)
    lane = Lane("test", ends, workers=2)
    for op in range(2):
        lane.send(op, lambda: (both.wait() >= 0, 0), LONG_S)
    assert {end.op: end.good for end in collect(ends, 2)} == {0: 1, 1: 1}
    assert lane.close(LONG_S)
    assert (lane.counts.done, lane.counts.failed) == (2, 0)


def test_a_full_lane_refuses_and_says_so_at_once(gate: Gate) -> None:
    ends = Ends()
    lane = Lane("test", ends, depth=2)
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()
    for op in (1, 2, 3, 4):
        lane.send(op, lambda: (1, 0), LONG_S)
    assert lane.waiting() == 2
    assert ends.collect() == [Ended(3, 0), Ended(4, 0)]
    assert lane.counts.refused == 2
    gate.open.set()
    assert collect(ends, 3) == [Ended(op, 1) for op in range(3)]
    assert lane.close(LONG_S)
    assert ends.collect() == []


def test_work_that_comes_too_late_ends_without_being_started(gate: Gate) -> None:
    ends, clock, started = Ends(), Clock(), []
    lane = Lane("test", ends, clock=clock)
    lane.send(0, gate, 1.0)  # it has begun in time, so it may take as long as it likes
    gate.wait_until_begun()
    lane.send(1, lambda: (started.append(1), (1, 0))[1], 5.0)  # type: ignore[misc]
    lane.send(2, lambda: (started.append(2), (1, 0))[1], 50.0)  # type: ignore[misc]
    clock.now += 6
    gate.open.set()
    assert collect(ends, 3) == [Ended(0, 1), Ended(1, 0), Ended(2, 1)]
    assert started == [2]
    assert lane.close(LONG_S)
    assert (lane.counts.done, lane.counts.late) == (2, 1)


@pytest.mark.parametrize(
    ("trouble", "told"),
    [(StorageError("the disk is gone"), "the disk is gone"), (KeyError("a bug"), "KeyError: 'a bug'")],
    ids=["trouble", "bug"],
)
def test_work_that_raises_ends_and_the_lane_goes_on(
    trouble: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> tuple[int, int]:
        raise trouble

    ends = Ends()
    lane = Lane("test", ends)
    lane.send(0, work, LONG_S)
    lane.send(1, lambda: (1, 0), LONG_S)
    assert collect(ends, 2) == [Ended(0, 0), Ended(1, 1)]
    assert lane.close(LONG_S)
    assert (lane.counts.failed, lane.counts.done, lane.counts.last_error) == (1, 1, told)
    assert told in caplog.text


def test_the_same_trouble_again_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> tuple[int, int]:
        raise StorageError("the disk is gone")

    ends = Ends()
    lane = Lane("test", ends)
    for op in range(10):
        lane.send(op, work, LONG_S)
    collect(ends, 10)
    assert lane.close(LONG_S)
    assert caplog.text.count("the disk is gone") == 1
    assert lane.counts.failed == 10


def test_closing_finishes_what_waits_and_takes_nothing_more(gate: Gate) -> None:
    ends = Ends()
    lane = Lane("test", ends)
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()
    for op in range(1, 20):
        lane.send(op, lambda: (1, 0), LONG_S)
    gate.open.set()
    assert lane.close(LONG_S)
    assert collect(ends, 20) == [Ended(op, 1) for op in range(20)]
    lane.send(20, lambda: (1, 0), LONG_S)
    assert ends.collect() == [Ended(20, 0)]
    assert lane.counts.refused == 1
    assert lane.close(LONG_S)


def test_closing_does_not_wait_for_a_worker_that_hangs(gate: Gate) -> None:
    ends = Ends()
    lane = Lane("test", ends, workers=2)
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()
    assert not lane.close(0.01)
    assert ends.collect() == []
    gate.open.set()
    assert lane.close(LONG_S)
    assert ends.collect() == [Ended(0, 1)]


def test_closing_a_full_lane_does_not_wait_for_a_worker_that_hangs(gate: Gate) -> None:
    lane = Lane("test", Ends(), depth=1)
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()
    lane.send(1, lambda: (1, 0), LONG_S)
    answers: list[bool] = []
    closing = threading.Thread(target=lambda: answers.append(lane.close(0.01)), daemon=True)
    closing.start()
    closing.join(3)
    try:
        assert answers == [False], "close has not come back"
    finally:
        gate.open.set()
        closing.join(LONG_S)


def test_a_wait_ends_when_something_ends_or_somebody_wakes_it(gate: Gate) -> None:
    ends = Ends()
    assert not ends.wait(0.0)
    waker = threading.Thread(target=ends.wake)
    waker.start()
    assert ends.wait(LONG_S)
    waker.join()
    assert ends.wait(0.0), "the wake counts until somebody has looked"
    assert ends.collect() == []
    assert not ends.wait(0.0)
    lane = Lane("test", ends)
    lane.send(0, gate, LONG_S)
    gate.open.set()
    assert ends.wait(LONG_S)
    assert ends.collect() == [Ended(0, 1)]
    assert lane.close(LONG_S)


@pytest.mark.parametrize("seed", range(5))
def test_every_piece_ends_exactly_once_whatever_becomes_of_it(seed: int) -> None:
    print(f"seed {seed}")
    rng, ends, clock = random.Random(seed), Ends(), Clock()
    lane = Lane("test", ends, depth=5, workers=3, clock=clock)

    def fail() -> tuple[int, int]:
        raise StorageError("gone")

    ended: list[Ended] = []
    for op in range(300):
        lane.send(op, rng.choice([fail, lambda: (1, 0), lambda: (0, 1)]), rng.choice([-1.0, 0.0, LONG_S]))
        if rng.random() < 0.2:
            clock.now += 1
        if rng.random() < 0.3:
            ended += ends.collect()
    assert lane.close(LONG_S)
    ended += ends.collect()
    assert Counter(end.op for end in ended) == Counter(range(300))
    counts = lane.counts
    assert counts.done + counts.failed + counts.late + counts.refused == 300
