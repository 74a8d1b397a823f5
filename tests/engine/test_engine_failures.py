"""A request that is aborted or fails harms no other; each gets its last output even if the engine stops or dies."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import DECODED, GRID_FLOOR, LONG_S, PROMPT, Make, a_prompt, a_request, alone, by_hand, turns
from kvarve.errors import Busy, ConfigError
from kvarve.reference.engine.requests import Finish, OutputChunk, Request


def test_an_aborted_request_leaves_nothing_held_wherever_it_was(make: Make) -> None:
    engine = make(start=False, max_running=2)
    decoding, prefilling, waiting = (engine.submit(a_request(a_prompt(size), 40)) for size in (10, 400, 20))
    turns(engine, lambda: len(engine.scheduler.running) == 2 and not engine.scheduler.running[0].prefilling)
    assert engine.load() == (2, 1)
    assert [run.prefilling for run in engine.scheduler.running] == [False, True]
    for request in (waiting, prefilling, decoding):
        engine.abort(request)
        engine.abort(request)
    turns(engine, lambda: engine.counts.finished == 3)
    for request in (waiting, prefilling, decoding):
        _, tokens, last = request.result(0.1)
        assert last.finish is Finish.ABORT
        assert last.usage is not None
        assert last.usage.completion == len(tokens)
        assert request.outputs.empty()
    assert not engine.cache.scheduler.core.leases
    assert engine.load() == (0, 0)
    assert engine.counts.ends[Finish.ABORT] == 3
    engine.cache.flush()
    engine.cache.scheduler.audit()
    assert not any(value for name, value in engine.cache.stats().items() if name.startswith("used."))
    ((_, tokens, _),) = by_hand(engine, a_request(a_prompt(PROMPT, 3)))
    assert tokens == alone("qwen3_5", PROMPT, 3, DECODED)


@pytest.mark.parametrize("broken", [False, True])
def test_a_request_that_comes_while_the_engine_stops_gets_its_last_output(
    broken: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes: before the last check for new requests, or after it."""
    engine, going, ready = make(start=False), threading.Event(), threading.Event()
    step = engine.cache.step

    def last_step(*say: Callable[[], bytes]) -> bytes:
        ready.set()
        assert going.wait(LONG_S)
        if broken:
            raise AssertionError("a bug")
        return step(*say)

    monkeypatch.setattr(engine.cache, "step", last_step)
    engine.start()
    assert ready.wait(LONG_S)
    told: list[str] = []

    def submit(seed: int) -> None:
        while not told or told[-1] != "busy":  # until the door is closed
            try:
                request = engine.submit(a_request(a_prompt(5, seed), 1))
            except Busy as e:
                if "try again later" not in str(e):
                    told.append("busy")
                    return
                continue
            told.append("queued")
            requests.append(request)

    requests: list[Request] = [engine.submit(a_request(a_prompt(5), 1))]
    others = [threading.Thread(target=submit, args=(seed,)) for seed in range(3)]
    for other in others:
        other.start()
    if not broken:
        others.append(threading.Thread(target=engine.shutdown))
        others[-1].start()
    going.set()
    for other in (engine._thread, *others):
        other.join(LONG_S)
        assert not other.is_alive()
    for request in requests:
        assert request.result(1)[2].finish in (Finish.ERROR, Finish.ABORT, Finish.LENGTH)
    assert told[-1] == "busy"


def test_shutting_down_ends_those_that_run_and_keeps_what_they_computed(make: Make, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?capacity=1GiB"
    engine = make(storage=url, max_running=1)
    pieces: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
    said = threading.Event()

    def deliver(piece: OutputChunk) -> None:
        pieces.put(piece)
        if pieces.qsize() == 3:
            said.set()
            assert engine._stopping.wait(LONG_S)

    engine.submit(a_request(max_tokens=500, deliver=deliver))
    assert said.wait(LONG_S)
    waiting = engine.submit(a_request(a_prompt(20)))
    engine.shutdown()
    while (piece := pieces.get(timeout=LONG_S)).finish is None:
        pass
    assert piece.finish is Finish.ABORT
    assert waiting.result(LONG_S)[2].finish is Finish.ABORT
    with pytest.raises(Busy, match="shutting down"):
        engine.submit(a_request())
    engine.shutdown()
    _, tokens, last = make(storage=url).submit(a_request()).result(LONG_S)
    assert tokens == alone("qwen3_5", PROMPT, 7, DECODED)
    assert last.usage is not None
    assert last.usage.storage == GRID_FLOOR


def test_a_call_that_the_engine_did_not_make_in_time_is_never_made(make: Make) -> None:
    engine, done, may_go_on, begun = make(), [], threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        assert may_go_on.wait(LONG_S)

    threading.Thread(target=lambda: engine.ask(busy, LONG_S)).start()
    assert begun.wait(LONG_S)
    with pytest.raises(Busy, match="did not get round to it"):
        engine.ask(lambda: done.append("late"), 0.01)
    may_go_on.set()
    engine.ask(lambda: done.append("in time"), LONG_S)
    assert done == ["in time"]


def test_all_of_several_are_taken_or_none(make: Make) -> None:
    engine = make(start=False, max_running=1, max_waiting=3)
    engine.submit(a_request(a_prompt(10), 2))

    def three(most: int = 2) -> list[Request]:
        return [a_request(a_prompt(10, seed), most if seed == 2 else 2) for seed in range(3)]

    with pytest.raises(ConfigError, match="maximum context length is 1024 tokens"):
        engine.submit(*three(most=2000))
    with pytest.raises(ConfigError, match="requests at once must be at most 4, got 5"):
        engine.submit(*three(), *three()[:2])
    engine.submit(*(first := three()))
    with pytest.raises(Busy, match="4 requests are being served or wait already"):
        engine.submit(a_request())
    turns(engine, lambda: engine.counts.finished == 2)
    with pytest.raises(Busy, match="2 requests are being served or wait already"):
        engine.submit(*three())
    turns(engine, lambda: engine.counts.finished == 4)
    assert [request.result(0.1)[2].finish for request in first] == [Finish.LENGTH] * 3
    engine.submit(*(second := three()))
    turns(engine, lambda: engine.counts.finished == 7)
    assert [request.result(0.1)[1] for request in second] == [alone("qwen3_5", 10, seed, 2) for seed in range(3)]
