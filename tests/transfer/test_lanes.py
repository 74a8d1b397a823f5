"""A piece ends exactly once, whatever happens to it and to those before it."""

import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from gates import threads
from kvarve.core.copies.effects import Ended, Event
from kvarve.errors import StorageError
from kvarve.transfer.lanes import MOST_HANGING, PASSED, Ends, Lane

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
    assert lane.close(LONG_S)  # by a worker, as `collect` was not called meanwhile
    assert collect(ends, 3) == [Ended(0, 1), Ended(1, 0), Ended(2, 1)]
    assert started == [2]
    assert (lane.counts.done, lane.counts.late) == (2, 1)


def test_what_waits_behind_a_call_that_hangs_ends_at_its_deadline(gate: Gate) -> None:
    ends, clock = Ends(), Clock()
    lane = Lane("test", ends, clock=clock)
    lane.send(0, gate, 1.0)
    gate.wait_until_begun()
    lane.send(1, lambda: (1, 0), 5.0)
    lane.send(2, lambda: (1, 0), 50.0)
    clock.now += 5
    assert ends.collect() == [], "at its deadline it may still begin"
    clock.now += 0.001
    assert ends.collect() == [Ended(1, 0)], "no worker was free, and none was needed"
    assert ends.collect() == [] and lane.waiting() == 1
    clock.now += 100
    assert ends.collect() == [Ended(2, 0)], "but a piece that really runs keeps its slots"
    gate.open.set()
    assert lane.close(LONG_S)
    assert ends.collect() == [Ended(0, 1)], "and ends when it comes back"
    assert (lane.counts.done, lane.counts.late) == (1, 2)


def test_another_worker_replaces_one_that_hangs_which_exits_when_its_call_returns(gate: Gate) -> None:
    ends, clock = Ends(), Clock()
    lane = Lane("another", ends, clock=clock, patience_s=10.0)
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()
    lane.send(1, lambda: (1, 0), 100.0)
    clock.now += 10
    assert ends.collect() == [] and lane.waiting() == 1
    assert lane.busy_s() == 10
    clock.now += 0.001
    assert ends.wait(0.0), "`wait` returns, so that the ends are collected"
    assert collect(ends, 1) == [Ended(1, 1)]
    assert lane.busy_s() == 0
    assert lane.stuck_s() > 10
    assert len(threads("kvarve another")) == 2
    gate.open.set()
    assert collect(ends, 1) == [Ended(0, 1)]
    for thread in threads("kvarve another 0"):
        thread.join(LONG_S)
    assert len(threads("kvarve another")) == 1
    lane.send(2, lambda: (1, 0), LONG_S)
    assert collect(ends, 1) == [Ended(2, 1)]
    assert lane.close(LONG_S)


def test_not_for_ever_do_others_take_the_place_of_those_that_hang(gate: Gate) -> None:
    ends, clock = Ends(), Clock()
    lane = Lane("test", ends, clock=clock, patience_s=10.0)
    for op in range(MOST_HANGING + 2):
        lane.send(op, gate, 10_000.0)
    for _ in range(MOST_HANGING + 1):
        gate.wait_until_begun()
        clock.now += 11
        assert ends.collect() == []
    assert lane.waiting() == 1
    assert lane.busy_s() == 11
    gate.open.set()
    assert len(collect(ends, MOST_HANGING + 2)) == MOST_HANGING + 2
    assert lane.close(LONG_S)


def test_a_wait_is_over_when_something_has_waited_for_too_long(gate: Gate) -> None:
    ends, clock = Ends(), Clock()
    lane = Lane("test", ends, clock=clock)
    lane.send(0, gate, 1.0)
    gate.wait_until_begun()
    lane.send(1, lambda: (1, 0), 5.0)
    assert not ends.wait(0.0)
    clock.now += 5.001
    assert ends.wait(50 * LONG_S)  # the gate would give up before
    assert ends.collect() == [Ended(1, 0)]
    assert not ends.wait(0.0), "nothing waits any more"


def test_a_lane_says_for_how_long_its_oldest_call_has_been_running() -> None:
    ends, clock, gates = Ends(), Clock(), [Gate(), Gate()]
    lane = Lane("test", ends, workers=2, clock=clock)
    assert lane.stuck_s() == 0
    for op, gate in enumerate(gates):
        lane.send(op, gate, LONG_S)
        gate.wait_until_begun()
        clock.now += 3
    assert lane.stuck_s() == 6
    for op, gate in enumerate(gates):
        gate.open.set()
        assert collect(ends, 1) == [Ended(op, 1)]
        assert lane.stuck_s() == 3 * (1 - op)
    assert lane.close(LONG_S)


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


# --- pieces that become one call


class Carrier:
    """Shared work that notes its arguments; part `n` is good in bit n, and bad in the next."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.trouble: Exception | None = None
        self.silent = 0  # parts at the end that it does not answer for

    def __call__(self, parts: Sequence[int]) -> list[tuple[int, int]]:
        self.calls.append([*parts])
        if self.trouble is not None:
            raise self.trouble
        return [(1 << part, 2 << part) for part in parts[: len(parts) - self.silent]]


def behind(gate: Gate, lane: Lane) -> None:
    """Everything sent from now on waits until the gate opens."""
    lane.send(99, gate, LONG_S)
    gate.wait_until_begun()


def test_pieces_that_wait_for_the_same_work_become_one_call_and_each_has_its_own_end(gate: Gate) -> None:
    ends, carrier = Ends(), Carrier()
    lane = Lane("test", ends)
    behind(gate, lane)
    for op in range(5):
        lane.send_part(op, carrier, op, 3, LONG_S)
    gate.open.set()
    assert collect(ends, 6)[1:] == [Ended(op, 1 << op, 2 << op) for op in range(5)]
    assert carrier.calls == [[0, 1, 2, 3, 4]]
    assert lane.close(LONG_S)
    assert (lane.counts.done, lane.counts.calls) == (6, 2)


def test_a_piece_that_finds_a_free_worker_does_not_wait_for_others() -> None:
    ends, carrier = Ends(), Carrier()
    lane = Lane("test", ends)
    for op in range(3):
        lane.send_part(op, carrier, op, 1, LONG_S)
        assert collect(ends, 1) == [Ended(op, 1 << op, 2 << op)]
    assert carrier.calls == [[0], [1], [2]]
    assert lane.close(LONG_S)


def test_one_call_is_bounded_and_a_piece_is_never_divided(gate: Gate) -> None:
    ends, carrier = Ends(), Carrier()
    lane = Lane("test", ends, together=10)
    behind(gate, lane)
    for op, size in enumerate([4, 6, 1, 99, 5, 5, 1]):
        lane.send_part(op, carrier, op, size, LONG_S)
    gate.open.set()
    assert collect(ends, 8)[1:] == [Ended(op, 1 << op, 2 << op) for op in range(7)]
    assert carrier.calls == [[0, 1], [2], [3], [4, 5], [6]]
    assert lane.close(LONG_S)


def test_work_that_is_not_the_same_is_not_done_together(gate: Gate) -> None:
    ends, one, other = Ends(), Carrier(), Carrier()
    lane = Lane("test", ends)
    behind(gate, lane)
    for op, carrier in enumerate([one, one, other, one]):
        lane.send_part(op, carrier, op, 1, LONG_S)
    lane.send(4, lambda: (7, 0), LONG_S)
    gate.open.set()
    assert [end.op for end in collect(ends, 6)] == [99, 0, 1, 2, 3, 4]
    assert one.calls == [[0, 1], [3]] and other.calls == [[2]]
    assert lane.close(LONG_S)


@pytest.mark.parametrize("trouble", [StorageError("the disk is gone"), KeyError("a bug"), None])
def test_a_call_that_fails_ends_all_its_pieces_with_nothing_good(gate: Gate, trouble: Exception | None) -> None:
    ends, carrier = Ends(), Carrier()
    lane = Lane("test", ends)
    behind(gate, lane)
    for op in range(3):
        lane.send_part(op, carrier, op, 1, LONG_S)
    carrier.trouble, carrier.silent = trouble, 1  # or one of them has no answer, and it is unknown which
    gate.open.set()
    assert collect(ends, 4)[1:] == [Ended(0, 0), Ended(1, 0), Ended(2, 0)]
    carrier.trouble, carrier.silent = None, 0
    lane.send_part(3, carrier, 3, 1, LONG_S)
    assert collect(ends, 1) == [Ended(3, 8, 16)], "and the lane goes on"
    assert lane.close(LONG_S)
    assert (lane.counts.done, lane.counts.failed) == (2, 3)


def test_what_is_too_late_is_left_out_of_a_call(gate: Gate) -> None:
    ends, clock, carrier = Ends(), Clock(), Carrier()
    lane = Lane("test", ends, clock=clock)
    behind(gate, lane)
    for op in range(4):
        lane.send_part(op, carrier, op, 1, 5.0 if op in (0, 2) else 50.0)
    clock.now += 6
    gate.open.set()
    assert lane.close(LONG_S)
    fates = {end.op: end.good for end in collect(ends, 5)}
    assert fates == {99: 1, 0: 0, 1: 2, 2: 0, 3: 8}
    assert carrier.calls == [[1, 3]]


# --- the end of a lane


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


def test_what_waits_behind_a_worker_that_hangs_ends_when_the_lane_is_closed(gate: Gate) -> None:
    ends = Ends()
    lane = Lane("test", ends)
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()
    lane.send(1, lambda: (1, 0), LONG_S)
    assert not lane.close(0.01)
    assert ends.collect() == [Ended(1, 0)]
    gate.open.set()
    assert lane.close(LONG_S)
    assert ends.collect() == [Ended(0, 1)]
    assert not ends._lanes, "a closed lane is not watched"


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


def test_a_wait_ends_when_something_ends_or_it_is_woken(gate: Gate) -> None:
    ends = Ends()
    assert not ends.wait(0.0)
    waker = threading.Thread(target=ends.wake)
    waker.start()
    assert ends.wait(LONG_S)
    waker.join()
    assert ends.wait(0.0), "the wake counts until the next `collect`"
    assert ends.collect() == []
    assert not ends.wait(0.0)
    lane = Lane("test", ends)
    lane.send(0, gate, LONG_S)
    gate.open.set()
    assert ends.wait(LONG_S)
    assert ends.collect() == [Ended(0, 1)]
    assert lane.close(LONG_S)


def test_a_thread_that_sleeps_elsewhere_is_rung_when_it_would_find_itself_woken() -> None:
    ends, found = Ends(), list[bool]()
    ends.rings = lambda: found.append(ends.woken())
    ends.wake()
    assert found == [True]
    assert ends.collect() == [] and not ends.woken()
    ends.put(Ended(0, 1))
    assert found == [True, True]
    assert ends.collect() == [Ended(0, 1)]


def test_an_event_that_is_handed_on_at_once_is_not_collected_and_wakes_no_thread() -> None:
    ends, handed = Ends(), list[Event]()
    ends.taken = lambda event: handed.append(event) is None
    ends.rings = handed.clear
    ends.put(Ended(0, 1))
    assert handed == [Ended(0, 1)]
    assert not ends.woken() and ends.collect() == []


@pytest.mark.parametrize("seed", range(5))
def test_every_piece_ends_exactly_once_whatever_becomes_of_it(seed: int) -> None:
    print(f"seed {seed}")
    rng, ends, clock = random.Random(seed), Ends(), Clock()
    lane = Lane("test", ends, depth=5, workers=3, clock=clock)
    together = Carrier()

    def fail() -> tuple[int, int]:
        raise StorageError("gone")

    ended: list[Ended] = []

    def all_fail(parts: Sequence[int]) -> list[tuple[int, int]]:
        fail()
        return []

    for op in range(300):
        work, deadline_s = rng.choice([fail, lambda: (1, 0), lambda: (0, 1)]), rng.choice([-1.0, 0.0, LONG_S])
        if rng.random() < 0.5:
            lane.send_part(op, rng.choice([all_fail, together]), op, rng.randint(1, 40), deadline_s)
        else:
            lane.send(op, work, deadline_s)
        if rng.random() < 0.2:
            clock.now += 1
        if rng.random() < 0.3:
            ended += ends.collect()
    assert lane.close(LONG_S)
    ended += ends.collect()
    assert Counter(end.op for end in ended) == Counter(range(300))
    counts = lane.counts
    assert counts.done + counts.failed + counts.late + counts.refused == 300


def busy_with(lane: Lane, gate: Gate, seen: list[int]) -> Callable[..., None]:
    """Sends pieces that wait until the gate opens, and note the order in which they are done."""
    lane.send(0, gate, LONG_S)
    gate.wait_until_begun()

    def send(op: int, urgent: bool = False) -> None:
        lane.send(op, lambda: (seen.append(op), (1, 0))[1], LONG_S, urgent)  # type: ignore[func-returns-value]

    return send


def test_urgent_work_passes_the_rest_and_keeps_its_own_order(gate: Gate) -> None:
    ends, seen = Ends(), list[int]()
    lane = Lane("test", ends)
    send = busy_with(lane, gate, seen)
    for op in (1, 2, 3, 4):
        send(op, urgent=op > 2)
    lane.hurry([2, 0, 99])  # their request has been claimed; 0 is in flight, and 99 of another storage
    gate.open.set()
    collect(ends, 5)
    assert seen == [2, 3, 4, 1]
    assert lane.close(LONG_S)


def test_work_that_is_not_urgent_is_passed_a_bounded_number_of_times(gate: Gate) -> None:
    ends, seen = Ends(), list[int]()
    lane = Lane("test", ends)
    send = busy_with(lane, gate, seen)
    send(1)
    send(2)
    for op in range(3, 3 + 3 * PASSED):
        send(op, urgent=True)
    gate.open.set()
    collect(ends, 3 * PASSED + 3)
    assert seen.index(1) == PASSED and seen.index(2) == 2 * PASSED + 1
    assert [op for op in seen if op > 2] == [*range(3, 3 + 3 * PASSED)]
    assert lane.close(LONG_S)


def test_a_worker_that_waits_keeps_nothing_of_what_it_has_done() -> None:
    class Buffers:
        def work(self) -> tuple[int, int]:
            return 1, 0

    ends, freed, buffers = Ends(), threading.Event(), Buffers()
    lane = Lane("test", ends)
    weakref.finalize(buffers, freed.set)
    lane.send(0, buffers.work, LONG_S)
    assert collect(ends, 1) == [Ended(0, 1)]
    del buffers
    assert freed.wait(LONG_S)
    assert lane.close(LONG_S)
