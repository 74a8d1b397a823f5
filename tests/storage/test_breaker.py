"""A storage that is down costs nothing, is noticed when it is back, and is never closed during a call."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from light import light
from memories import in_memory, over_memories

from gates import threads
from kvarve.errors import ConfigError, StorageError
from kvarve.storage import MemoryStorage, StorageUsage
from kvarve.storage._breaker import Breaker
from kvarve.testing import CapacitySuite, FaultyStorage, MakeStorage, Rule, StorageSuite
from kvarve.testing.suite import LABEL, Damage, get, put

LONG_S = 20.0  # nothing here waits so long unless something is broken
DEADLINE_S = 30.0  # on the clock of the test, which moves when it is told to


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ward:
    """A breaker around a storage that fails as told. Its probes come when the test says so."""

    def __init__(self, *rules: Rule, **settings: float) -> None:
        self.sick = FaultyStorage(MemoryStorage(1 << 20, LABEL, "model A"), rules, stall_limit_s=LONG_S)
        self.clock, self.turns, self.pauses = Clock(), queue.Queue[bool](), queue.Queue[tuple[threading.Event, float]]()
        self.before = {*threading.enumerate()}
        self.storage = Breaker(
            self.sick,
            deadline_s=DEADLINE_S,
            changed=lambda: self.turns.put(self.storage.up),
            clock=self.clock,
            pause=self._pause,
            **settings,
        )
        self.callers = ThreadPoolExecutor(8)
        self.left_behind: list[threading.Event] = []

    def _pause(self, event: threading.Event, pause_s: float) -> None:
        self.pauses.put((event, pause_s))
        assert event.wait(LONG_S)

    def next_pause(self) -> float:
        """The prober's next pause in seconds; it lasts until `probe` is called."""
        self.woken, pause_s = self.pauses.get(timeout=LONG_S)
        return pause_s

    def probe(self) -> None:
        self.woken.set()

    def turn(self) -> bool:
        """Whether it has gone up (or down), as the callback reports."""
        return self.turns.get(timeout=LONG_S)

    def hang(self, call: Callable[[], object]) -> Future[object]:
        """Make a call that hangs in the storage until it is released."""
        self.sick.stall()
        hanging = self.callers.submit(call)
        self.sick.wait_for_stalled_call()
        return hanging

    def leave_behind(self) -> threading.Event:
        """Calls that hang now return only when this event is set, not with the others; new calls are answered."""
        self.left_behind.append(self.sick.leave_behind())
        return self.left_behind[-1]

    def fail(self, times: int = 3) -> None:
        for _ in range(times):
            with pytest.raises(StorageError, match="injected"):
                put(self.storage, x=b"1")

    def go_down(self) -> None:
        self.sick.dead = True
        self.fail()
        assert self.turn() is False

    def close(self) -> None:
        for event in self.left_behind:
            event.set()
        self.sick.release()
        self.storage.close()
        self.callers.shutdown()


@pytest.fixture
def make_ward() -> Iterator[Callable[..., Ward]]:
    wards = []

    def make(*rules: Rule, **settings: float) -> Ward:
        wards.append(Ward(*rules, **settings))
        return wards[-1]

    yield make
    for ward in wards:
        ward.close()
        assert ward.before.issuperset(threading.enumerate())
        assert ward.turns.empty(), "a callback for a change that did not happen"


@pytest.fixture
def ward(make_ward: Callable[..., Ward]) -> Ward:
    return make_ward()


@light
class TestABreakerThatIsUpIsItsInner(StorageSuite, CapacitySuite):
    @pytest.fixture
    def make_storage(self) -> Iterator[MakeStorage]:
        with over_memories(lambda memory: Breaker(memory(0), deadline_s=DEADLINE_S)) as make:
            yield make

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        return in_memory()


def test_after_three_failures_in_a_row_no_call_reaches_the_storage(ward: Ward) -> None:
    put(ward.storage, a=b"1", b=b"22")
    assert ward.storage.usage().objects == 2
    ward.sick.dead = True
    ward.fail(2)
    assert ward.storage.up
    ward.fail(1)
    assert ward.turn() is False
    assert not ward.storage.up
    assert ward.storage.last_error == "put: injected: the backend is dead, put did 0 of 1"
    asked = ward.sick.counts.copy()
    buffer = bytearray(b"as it was")
    assert ward.storage.exists(["a", "b"]) == [False, False]
    assert ward.storage.get(["a", "b"], [memoryview(buffer)] * 2) == [None, None]
    assert put(ward.storage, c=b"1", d=b"2", e=b"3") == [False, False, False]
    assert ward.storage.delete(["a"]) == [False]
    assert ward.storage.usage() == StorageUsage(2, 3, 1 << 20, 0)
    assert buffer == b"as it was"
    assert ward.sick.counts == asked
    unasked = {what: count for what, count in ward.storage.counts.items() if what.endswith(": down")}
    assert unasked == {
        "exists missed: down": 2,
        "get missed: down": 2,
        "put dropped: down": 3,
        "delete dropped: down": 1,
        "last known usage: down": 1,
    }


def test_while_it_is_down_a_name_that_cannot_be_is_refused_and_closing_ends_the_asking(ward: Ward) -> None:
    ward.sick.dead = True
    ward.storage.look()
    assert ward.turn() is False, "it does not answer its first call"
    with pytest.raises(ConfigError, match="cannot name"):
        ward.storage.exists(["a/b"])
    ward.next_pause()
    ward.storage.close()
    assert ward.before.issuperset(threading.enumerate())
    assert not ward.storage.up
    with pytest.raises(StorageError, match="closed"):
        ward.storage.exists(["a"])


@pytest.mark.parametrize("proof", ["get", "put", "delete"])
def test_something_read_stored_or_removed_breaks_the_row_and_what_an_index_may_answer_does_not(
    ward: Ward, proof: str
) -> None:
    proofs = {
        "get": lambda: get(ward.storage, "a"),
        "put": lambda: put(ward.storage, b=b"2"),
        "delete": lambda: ward.storage.delete(["a"]),
    }
    put(ward.storage, a=b"1")
    for prove in (proofs[proof], lambda: None):
        ward.sick.dead = True
        ward.fail(2)
        ward.sick.dead = False
        prove()
        ward.storage.exists(["a"]), ward.storage.usage(), get(ward.storage, "none"), ward.storage.delete(["none"])
    ward.sick.dead = True
    assert ward.storage.up
    ward.fail(1)
    assert ward.turn() is False


@pytest.mark.parametrize("noticed_by", ["a look", "a call"])
def test_a_call_that_hangs_opens_the_circuit_and_the_next_one_does_not_join_it(ward: Ward, noticed_by: str) -> None:
    put(ward.storage, a=b"1")
    hanging = ward.hang(lambda: get(ward.storage, "a"))
    ward.clock.now += DEADLINE_S
    assert ward.storage.up
    ward.clock.now += 0.001
    assert not ward.storage.up if noticed_by == "a look" else put(ward.storage, b=b"1") == [False]
    assert ward.turn() is False
    assert ward.storage.last_error == "get: no answer within 30 s"
    assert ward.storage.since == ward.clock.now
    assert ward.storage.exists(["a"]) == [False]
    ward.sick.release()
    assert hanging.result(LONG_S) == b"1", "late, and true all the same"
    assert ward.turn() is True
    assert get(ward.storage, "a") == b"1"


def test_one_hang_is_held_against_it_once(ward: Ward) -> None:
    put(ward.storage, a=b"1")
    lost = ward.hang(lambda: get(ward.storage, "a"))
    ward.clock.now += DEADLINE_S + 1
    assert not ward.storage.up
    assert ward.turn() is False
    ward.leave_behind()
    ward.next_pause()
    ward.probe()
    assert ward.turn() is True
    ward.clock.now += 10 * DEADLINE_S
    assert ward.storage.up
    assert get(ward.storage, "a") == b"1"
    assert ward.storage.counts["hung"] == 1
    assert not lost.done()


def test_probes_back_off_up_to_a_limit_until_the_storage_answers(ward: Ward) -> None:
    ward.go_down()
    for expected in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert ward.next_pause() == pytest.approx(expected)
        ward.probe()
    assert ward.next_pause() == 2.0
    assert not ward.storage.up
    ward.sick.dead = False
    ward.probe()
    assert ward.turn() is True
    assert put(ward.storage, a=b"1") == [True]
    assert (ward.storage.counts["went down"], ward.storage.counts["came up"]) == (1, 1)


def test_a_half_open_circuit_opens_at_the_next_failure_and_probes_back_off_further(
    make_ward: Callable[..., Ward],
) -> None:
    ward = make_ward(Rule("raise", "put"))  # a folder that became read-only
    ward.fail(3)
    assert ward.turn() is False
    for expected in (0.1, 0.2, 0.4):
        assert ward.next_pause() == pytest.approx(expected)
        ward.probe()
        assert ward.turn() is True
        ward.fail(1)
        assert ward.turn() is False
    ward.next_pause()
    ward.probe()
    assert ward.turn() is True
    ward.sick.rules = []
    assert put(ward.storage, a=b"1") == [True]
    ward.sick.dead = True
    ward.fail(3)
    assert ward.turn() is False
    assert ward.next_pause() == pytest.approx(0.1)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "found"])
def test_a_probe_reads_what_is_known_to_be_there(make_ward: Callable[..., Ward], stored: bool) -> None:
    """The index may be in memory and the disk lost, so an answer from the index proves nothing."""
    ward = make_ward()
    put(ward.storage if stored else ward.sick, a=b"1")
    if not stored:  # by an earlier process
        assert ward.storage.exists(["a"]) == [True]
    ward.sick.rules = [Rule("raise", "get"), Rule("raise", "put")]
    ward.fail(3)
    assert ward.turn() is False
    ward.next_pause()
    ward.probe()
    ward.next_pause()
    assert not ward.storage.up
    assert ward.storage.last_error == "probe: injected: get failed after 0 of 1"
    ward.sick.rules = []
    ward.probe()
    assert ward.turn() is True


def test_a_probe_that_hangs_stays_the_only_one(ward: Ward) -> None:
    put(ward.storage, a=b"1")
    ward.go_down()
    ward.next_pause()
    ward.sick.stall()
    ward.sick.dead = False
    ward.probe()
    ward.sick.wait_for_stalled_call()
    asked = ward.sick.counts["exists"]
    probing = threads("kvarve probes")
    for _ in range(5):
        ward.clock.now += 10 * DEADLINE_S
        assert not ward.storage.up
        assert get(ward.storage, "a") is None
    assert (ward.sick.counts["exists"], threads("kvarve probes")) == (asked, probing)
    assert len(probing) == 1
    ward.sick.release()
    assert ward.turn() is True


def test_a_failure_from_before_it_came_back_says_nothing_of_now(ward: Ward) -> None:
    """Four calls are in a dead storage: three fail and open the breaker; the fourth fails long after the recovery."""
    slow = ward.hang(lambda: put(ward.storage, a=b"1"))
    come_back = ward.leave_behind()
    ward.clock.now += 1
    ward.go_down()
    ward.sick.dead = False
    ward.next_pause()
    ward.clock.now += 1
    ward.probe()
    assert ward.turn() is True
    ward.sick.dead = True
    come_back.set()
    with pytest.raises(StorageError):
        slow.result(LONG_S)
    assert ward.storage.up


@pytest.mark.parametrize("what", ["a call", "the probe"])
def test_closing_leaves_what_hangs_and_the_last_that_comes_back_closes_it(
    make_ward: Callable[..., Ward], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ward, closed = make_ward(close_s=0.01), threading.Event()
    inner_close = ward.sick.close

    def close() -> None:
        inner_close()
        closed.set()

    monkeypatch.setattr(ward.sick, "close", close)
    put(ward.storage, a=b"1")
    if what == "a call":
        hanging = ward.hang(lambda: get(ward.storage, "a"))
    else:
        ward.go_down()
        ward.next_pause()
        ward.sick.dead = False
        ward.sick.stall()
        ward.probe()
        ward.sick.wait_for_stalled_call()
    ward.storage.close()
    ward.storage.close()
    assert not closed.is_set(), "closed during a call"
    with pytest.raises(StorageError, match="closed"):
        get(ward.storage, "a")
    ward.sick.release()
    assert closed.wait(LONG_S)
    if what == "a call":
        assert hanging.result(LONG_S) == b"1"


def test_a_bug_below_is_trouble_and_where_no_thread_is_to_be_had_that_probes_the_next_call_tries_again(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[bool]:
        raise ZeroDivisionError("in a backend")

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threading.Thread, "start", no_more)
        meanwhile.setattr(ward.sick, "exists", broken)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                ward.storage.exists(["a"])
        assert ward.turn() is False
    with monkeypatch.context() as still:
        still.setattr(ward.sick, "exists", broken)
        assert get(ward.storage, "x") is None
        ward.next_pause()
        ward.probe()
        ward.next_pause()
        assert "ZeroDivisionError" in ward.storage.last_error
    ward.probe()
    assert ward.turn() is True


@pytest.mark.long
def test_many_threads_through_many_turns_leave_it_up_and_nothing_in_flight() -> None:
    sick = FaultyStorage(MemoryStorage(1 << 20, LABEL, "model A"), seed=5)
    sick.rules = [Rule("raise", call, probability=0.3) for call in ("exists", "get", "put")]
    turns: queue.Queue[bool] = queue.Queue()
    storage = Breaker(
        sick, deadline_s=DEADLINE_S, changed=lambda: turns.put(True), probe_first_s=0.0001, probe_most_s=0.001
    )
    start = threading.Barrier(8, timeout=LONG_S)

    def work(worker: int) -> int:
        start.wait()
        raised = 0
        for turn in range(200):
            name = f"page-{(worker + turn) % 16}"
            data = name.encode() * 10
            try:
                storage.exists([name])
                put(storage, **{name: data})
                assert get(storage, name) in (None, data)
            except StorageError:
                raised += 1
        return raised

    with ThreadPoolExecutor(8) as callers:
        raised = sum(ended.result(LONG_S) for ended in [callers.submit(work, i) for i in range(8)])
    assert storage.counts["raised"] == raised
    sick.rules = []
    while not storage.up:
        turns.get(timeout=LONG_S)
    assert storage.counts["went down"] == storage.counts["came up"] > 0
    assert not storage._in_flight
    storage.close()
