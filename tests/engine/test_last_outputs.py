"""Every accepted request gets exactly one last output, whatever breaks, and a broken cache ends the engine."""

import threading
from functools import partial
from types import FunctionType
from typing import Any

import pytest

from engines import CHUNK, LONG_S, Make, a_model, a_prompt, a_request, alone, by_hand, room_for, turns
from kvarve.errors import Broken, Busy, ConfigError
from kvarve.reference.engine import turns as turns_module
from kvarve.reference.engine.batch import Batch
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.inputs import Stop
from kvarve.reference.engine.model import Detokenizer
from kvarve.reference.engine.paging import PagedWorkspace
from kvarve.reference.engine.requests import Finish, Request
from kvarve.reference.engine.turns import Call
from kvarve.storage import MemoryStorage

ASKED = [(8, 2, 16), (7, 4, 12), (2 * CHUNK + 23, 1, 9), (2 * CHUNK - 4, 3, 9), (CHUNK, 5, 9)]


class Fault(RuntimeError):
    pass


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, kind: type[Exception] = Fault, module: str = ""
) -> list[int]:
    """The call number `at` of something raises, in a `module`; how often it has been called."""
    real, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at + 1:
            raise kind(f"{name} fails")
        return real(*args, **kwargs)

    there = FunctionType(call.__code__, globals() | {"__name__": module or __name__}, closure=call.__closure__)
    monkeypatch.setattr(owner, name, there)
    return calls


def crowded(make: Make, **settings: Any) -> Engine:
    """An engine in which some requests are preempted."""
    return make(start=False, device=room_for(a_model(), 4 * CHUNK), max_running=4, **settings)


def served(engine: Engine) -> list[Request]:
    requests = [a_request(a_prompt(tokens, seed), most, logprobs=1) for tokens, seed, most in ASKED]
    for request in requests:
        engine.submit(request)
    engine.start()
    return requests


def last_outputs(request: Request) -> list[Finish]:
    found = []
    while not request.outputs.empty():
        piece = request.outputs.get()
        if piece.finish is not None:
            found.append(piece.finish)
    return found


CACHE_CALLS = ["open", "claim", "reserve", "block_table", "pages", "resumed"]
CACHE_CALLS += ["grow", "publish", "extend", "close", "step", "short"]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *((name, 0) for name in CACHE_CALLS),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in CACHE_CALLS if name != "extend"),
    ],
)
def test_a_call_of_the_cache_that_fails_stops_the_engine_and_each_request_gets_one_last_output(
    name: str, at: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = crowded(make)
    cache, scheduler = engine.cache, engine.cache.scheduler
    owner = next(each for each in (cache, scheduler, scheduler.core, scheduler.core.growth) if hasattr(each, name))
    kind = AssertionError if at else KeyError  # whatever it is
    calls = failing(monkeypatch, owner, name, at, kind, module="kvarve.core.core")
    requests = served(engine)
    engine._thread.join(LONG_S)
    assert calls[0] > at, "it was never called"
    assert not engine._thread.is_alive()
    assert engine.broken == f"the engine has stopped: {kind.__name__}: {kind(f'{name} fails')}"
    told = [last_outputs(request) for request in requests]
    assert all(len(each) == 1 for each in told), told
    assert Finish.ERROR in {finish for each in told for finish in each}
    with pytest.raises(Busy, match=f"{name} fails"):
        engine.submit(a_request())
    with pytest.raises(Busy, match=f"{name} fails"):
        engine.ask(lambda: 1, LONG_S)


PARTS: list[tuple[Any, str, int]] = [
    (turns_module, "forward", 4),
    (turns_module, "forward", 0),
    (turns_module, "choose_all", 0),
    (turns_module, "likelihood", 2),
    (Batch, "forward", 3),
    (Batch, "__init__", 0),
    (Batch, "forward", 0),
    (Detokenizer, "__init__", 1),
    (Detokenizer, "push", 0),
    (Detokenizer, "push", 9),
    (Detokenizer, "flush", 0),
    (PagedWorkspace, "__init__", 2),
    (PagedWorkspace, "save", 0),
    (PagedWorkspace, "own", 0),
]


@pytest.mark.parametrize(("owner", "name", "at"), PARTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_part_that_fails_ends_one_request_at_most(
    owner: Any, name: str, at: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = crowded(make)
    calls = failing(monkeypatch, owner, name, at)
    requests = served(engine)
    found = [request.result(LONG_S) for request in requests]
    assert calls[0] > at, "it was never called"
    assert not engine.broken
    ended = [last.finish for *_, last in found]
    assert ended.count(Finish.ERROR) <= 1
    assert set(ended) <= {Finish.ERROR, Finish.LENGTH}
    for (_, tokens, last), (length, seed, most) in zip(found, ASKED, strict=True):
        if last.finish is Finish.LENGTH:
            assert tokens == alone("qwen3_5", length, seed, most)
        else:
            assert last.error == f"Fault: {name} fails"
    assert all(request.outputs.empty() for request in requests), "nothing after the last output"
    ((_, tokens, _),) = [engine.submit(a_request(a_prompt(20, 9), 3)).result(LONG_S)]
    assert tokens == alone("qwen3_5", 20, 9, 3)
    assert engine.ask(lambda: [*engine.cache.scheduler.core.leases], LONG_S) == []


def test_a_tokenizer_that_fails_whenever_it_is_asked_ends_each_request_and_not_the_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise Fault("no such token")

    engine = make(start=False)
    monkeypatch.setattr(Detokenizer, "push", broken)
    monkeypatch.setattr(Detokenizer, "flush", broken)
    waiting, running = (engine.submit(a_request(a_prompt(20, seed), 5)) for seed in range(2))
    engine.abort(waiting)
    turns(engine, lambda: not engine._accepted)
    for request in (waiting, running):
        last = request.result(0.1)[2]
        assert (last.finish, last.error) == (Finish.ERROR, "Fault: no such token")
    assert not engine.broken
    assert not engine.cache.scheduler.core.leases


@pytest.mark.parametrize("started", [False, True])
def test_a_request_submitted_before_the_start_gets_its_last_output_at_shutdown(started: bool, make: Make) -> None:
    engine = make(start=False)
    requests = [engine.submit(a_request(a_prompt(20, seed), 5)) for seed in range(3)]
    engine.abort(requests[0])
    if started:
        engine._calls.put(Call(None, partial(engine._do, Stop(LONG_S))))
        engine.start()
    engine.shutdown(LONG_S)
    engine.shutdown(LONG_S)
    assert [last_outputs(request) for request in requests] == [[Finish.ABORT]] * 3
    with pytest.raises(Busy):
        engine.submit(a_request())


def test_when_the_engine_hangs_shutdown_ends_every_request_and_no_piece_comes_after(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, going, begun = make(start=False), threading.Event(), threading.Event()
    real = turns_module.forward

    def hang(*args: Any) -> Any:
        begun.set()
        assert going.wait(LONG_S)
        return real(*args)

    monkeypatch.setattr(turns_module, "forward", hang)
    requests = [engine.submit(a_request(a_prompt(5 * CHUNK, seed), 2)) for seed in range(2)]
    engine.start()
    assert begun.wait(LONG_S)
    engine.shutdown(0.01)
    assert [last_outputs(request) for request in requests] == [[Finish.ABORT]] * 2
    going.set()
    engine._thread.join(LONG_S)
    assert not engine._thread.is_alive()
    assert all(request.outputs.empty() for request in requests)
    assert not engine.broken


def test_a_failed_assertion_in_a_call_from_another_thread_stops_the_engine_too(make: Make) -> None:
    engine = make()

    def broken() -> None:
        raise AssertionError("a law")

    with pytest.raises(AssertionError, match="a law"):
        engine.ask(broken, LONG_S)
    engine._thread.join(LONG_S)
    assert not engine._thread.is_alive()
    assert engine.broken == "the engine has stopped: AssertionError: a law"


def test_a_bug_of_the_cache_in_a_flush_stops_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    failing(monkeypatch, engine.cache.scheduler.core, "flush", 0, KeyError, module="kvarve.core.core")
    with pytest.raises(Broken, match="flush fails"):
        engine.flush()
    engine._thread.join(LONG_S)
    assert not engine._thread.is_alive() and "flush fails" in engine.broken


def test_a_law_of_resuming_that_fails_stops_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(start=False)
    failing(monkeypatch, PagedWorkspace, "resumed", 0, AssertionError)
    request = engine.submit(a_request(a_prompt(8), 2))
    engine.start()
    engine._thread.join(LONG_S)
    assert not engine._thread.is_alive() and "resumed fails" in engine.broken
    assert last_outputs(request) == [Finish.ERROR]


def test_the_same_request_is_served_once(make: Make) -> None:
    engine, request = make(start=False), a_request(a_prompt(20), 2)
    engine.submit(request)
    with pytest.raises(ConfigError, match="cannot be served twice"):
        engine.submit(request)
    with pytest.raises(ConfigError, match="cannot be served twice"):
        engine.submit(*[a_request(a_prompt(20), 2)] * 2)
    turns(engine, lambda: not engine._accepted)
    assert last_outputs(request) == [Finish.LENGTH]


@pytest.mark.parametrize("at", [0, 1, 9])
def test_no_token_counts_that_was_in_no_piece(at: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Detokenizer, "push", at)
    engine = make(start=False)
    request = engine.submit(a_request(a_prompt(20, 3), 12))
    engine.start()
    _, tokens, last = request.result(LONG_S)
    assert last.finish is Finish.ERROR and last.usage is not None
    assert last.usage.completion == len(tokens) == engine.counts.output_tokens == at


@pytest.mark.parametrize("name", ["publish", "step"])
def test_a_broken_cache_writes_nothing_more_to_storage_and_shuts_down(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, closed = MemoryStorage(64 << 20, a_model().identity.fingerprint(), ""), list[int]()
    monkeypatch.setattr(store, "close", lambda: closed.append(store.usage().objects))
    engine = make(start=False, storage=store, write_policy="back")
    by_hand(engine, a_request(a_prompt(5 * CHUNK), 2))
    assert engine.cache.scheduler.core.idle() and store.usage().objects == 0
    core = engine.cache.scheduler.core
    failing(monkeypatch, core if name == "step" else core.growth, name, 0, AssertionError)
    request = engine.submit(a_request(a_prompt(5 * CHUNK, 1), 2))
    engine.start()
    assert request.result(LONG_S)[2].finish is Finish.ERROR
    engine.shutdown(LONG_S)
    assert {*closed} == {0}, "after a failed assertion no page in memory is stored"
