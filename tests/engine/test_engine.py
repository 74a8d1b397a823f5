"""The engine answers as if there were no cache, no other request and no error; only sooner."""

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    CHUNK,
    DECODED,
    GRID_FLOOR,
    LONG_S,
    MIB,
    PAGE,
    PROMPT,
    Make,
    a_model,
    a_prompt,
    a_request,
    alone,
    by_hand,
    room_for,
    turns,
)
from torch import Tensor

import kvarve.engine.engine as engine_module
from kvarve.core.audit import audit
from kvarve.engine.engine import Engine
from kvarve.engine.paging import PagedWorkspace
from kvarve.engine.requests import Finish, OutputChunk, Request, Sampling, TokenUsage
from kvarve.engine.scheduler import OVERTAKEN
from kvarve.engine.state import StateLayout, Workspace
from kvarve.errors import Busy, ConfigError
from kvarve.model import Tier
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage
from kvarve.testing.models import VOCAB

FAMILIES = ["qwen3", "qwen3_5", "gpt_oss", "deepseek_v32"]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class Recorder:
    """Stands between the engine and the model and keeps the logits after every forward, by position, per workspace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward = engine_module.forward
        self.calls: list[tuple[Workspace, int, int]] = []  # workspace, tokens before and after
        self.logits: list[Tensor] = []
        self.before: Callable[[Workspace, Tensor], None] = lambda workspace, ids: None
        self.after: Callable[[Workspace, Tensor], Tensor] = lambda workspace, logits: logits
        monkeypatch.setattr(engine_module, "forward", self._record)

    def _record(self, model: Any, workspace: Workspace, ids: Tensor) -> Tensor:
        self.before(workspace, ids)
        start = workspace.tokens
        logits = self.after(workspace, self._forward(model, workspace, ids))
        self.calls.append((workspace, start, workspace.tokens))
        self.logits.append(logits.clone())
        return logits

    def take(self) -> dict[int, Tensor]:
        """The logits of one request by the number of tokens before them; then it begins anew."""
        found = {stop: logits for (_, _, stop), logits in zip(self.calls, self.logits, strict=True)}
        assert len(found) == len(self.calls), "more than one request has been recorded"
        self.calls, self.logits = [], []
        return found


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


# --- the same bits from every tier


@every_dtype
@every_family
def test_the_logits_are_the_same_bits_wherever_the_pages_come_from(
    family: str, dtype: torch.dtype, make: Make, recorder: Recorder, tmp_path: Path
) -> None:
    model, url = a_model(family, dtype), f"file://{tmp_path}/store?capacity=1GiB"
    engine = make(model, storage=url)
    _, expected, last = engine.submit(a_request()).result(LONG_S)
    cold = recorder.take()
    assert last.finish is Finish.LENGTH
    assert last.usage == TokenUsage(PROMPT, DECODED, 0, 0, 0)
    assert [*cold] == [64, 128, 192, 256, 320, *range(PROMPT, PROMPT + DECODED)]
    assert all(logits.isfinite().all() for logits in cold.values())

    def again(engine: Engine, tier: Tier) -> None:
        _, tokens, last = engine.submit(a_request()).result(LONG_S)
        warm = recorder.take()
        assert tokens == expected, tier
        assert [*warm] == [*range(PROMPT, PROMPT + DECODED)], tier
        for position, logits in warm.items():
            assert torch.equal(logits, cold[position]), f"{tier} at {position}"
        assert last.usage is not None
        assert last.usage.cached == GRID_FLOOR
        assert last.usage[2 + tier] == GRID_FLOOR, last.usage

    again(engine, Tier.DEVICE)
    assert engine.settle()
    assert engine.flush([Tier.DEVICE]) > 0
    again(engine, Tier.HOST)
    again(engine, Tier.DEVICE)
    assert engine.flush() > 0
    again(engine, Tier.STORAGE)
    engine.shutdown()
    engine = make(model, storage=url)
    again(engine, Tier.STORAGE)
    again(engine, Tier.DEVICE)
    assert engine.counts.computed_tokens == 2 * (PROMPT - GRID_FLOOR)


@every_family
@pytest.mark.parametrize("tokens", [1, 15, 16, 63, 64, 65, 128, 129, 2 * CHUNK + 16])
def test_a_prompt_of_any_length_resumes_at_the_last_line_of_the_grid_before_its_end(
    family: str, tokens: int, make: Make, recorder: Recorder
) -> None:
    engine = make(a_model(family), start=False)
    first, second = a_request(a_prompt(tokens), 3), a_request(a_prompt(tokens), 3)
    ((_, expected, _),) = by_hand(engine, first)
    cold = recorder.take()
    ((_, found, last),) = by_hand(engine, second)
    warm = recorder.take()
    assert found == expected
    assert all(torch.equal(logits, cold[position]) for position, logits in warm.items())
    assert last.usage == TokenUsage(tokens, 3, (tokens - 1) // CHUNK * CHUNK, 0, 0)


@every_family
def test_a_conversation_goes_on_from_what_was_kept_of_it(family: str, make: Make, recorder: Recorder) -> None:
    engine, other = make(a_model(family), start=False), make(a_model(family), start=False)
    history = a_prompt(200)
    for turn in range(3):
        ((_, found, last),) = by_hand(engine, a_request(history, 5))
        warm = recorder.take()
        ((_, expected, _),) = by_hand(other, a_request(history, 5, read_cache=False))
        cold = recorder.take()
        assert found == expected
        assert all(torch.equal(logits, cold[position]) for position, logits in warm.items())
        assert last.usage is not None
        assert last.usage.cached == (0 if turn == 0 else (len(history) - 95) // CHUNK * CHUNK), turn
        history = [*history, *found, *a_prompt(90, seed=turn)]


def test_a_prompt_that_branches_off_another_is_answered_as_if_it_were_alone(make: Make, recorder: Recorder) -> None:
    engine, stem = make(start=False), a_prompt(200)
    prompts = [[*stem, *a_prompt(60 + seed, seed)] for seed in range(4)]
    cached_tokens = []
    for prompt in prompts:
        ((_, found, last),) = by_hand(engine, a_request(prompt))
        warm = recorder.take()
        ((_, expected, _),) = by_hand(make(start=False), a_request(prompt))
        cold = recorder.take()
        assert found == expected
        assert all(torch.equal(logits, cold[position]) for position, logits in warm.items())
        assert last.usage is not None
        cached_tokens.append(last.usage.cached)
    assert cached_tokens == [0, 0, 192, 192]  # the state where they part is kept when the second one parts


@every_family
def test_pages_computed_in_half_a_chunk_are_not_shared(family: str, make: Make, recorder: Recorder) -> None:
    """A page has other last bits if its chunk was shorter, so a request that resumes there recomputes that chunk."""
    engine, prompt = make(a_model(family), start=False), a_prompt(5 * CHUNK)
    for tokens in (2 * CHUNK + 2 * PAGE, 3 * CHUNK + PAGE, 4 * CHUNK):
        by_hand(engine, a_request(prompt[:tokens], 1))
        recorder.take()
    by_hand(engine, a_request(prompt, 1))
    warm = recorder.take()
    by_hand(make(a_model(family), start=False), a_request(prompt, 1))
    cold = recorder.take()
    assert [*warm] == [5 * CHUNK]
    assert torch.equal(warm[5 * CHUNK], cold[5 * CHUNK])


@every_family
def test_what_another_computed_in_a_whole_chunk_is_no_part_of_half_a_chunk(
    family: str, make: Make, recorder: Recorder
) -> None:
    """The same the other way round: a prompt that ends in the middle of a chunk computes all of that middle itself."""
    model, prompt = a_model(family), a_prompt(5 * CHUNK)
    page, chunk = model.layout.page_tokens, model.layout.chunk_tokens
    engine = make(model, start=False, deterministic=True)
    by_hand(engine, a_request(prompt, 1))
    for tokens in (3 * chunk + page, 3 * chunk + 2 * page, 3 * chunk + page + 5, 2 * chunk + 3 * page):
        recorder.take()
        by_hand(engine, a_request(prompt[:tokens], 4))
        warm = recorder.take()
        by_hand(make(model, start=False, deterministic=True), a_request(prompt[:tokens], 4))
        cold = recorder.take()
        assert [*warm][-4:] == [*range(tokens, tokens + 4)]
        for position, logits in warm.items():
            assert torch.equal(logits, cold[position]), f"{tokens} tokens, at {position}"


def test_another_salt_or_no_wish_to_read_computes_everything(make: Make) -> None:
    engine = make()
    engine.submit(a_request()).result(LONG_S)
    for request in (a_request(salt="another"), a_request(read_cache=False)):
        _, tokens, last = engine.submit(request).result(LONG_S)
        assert tokens == alone("qwen3_5", PROMPT, 7, DECODED)
        assert last.usage == TokenUsage(PROMPT, DECODED, 0, 0, 0)


# --- several at once


@every_family
def test_requests_side_by_side_are_answered_as_if_each_were_alone(family: str, make: Make) -> None:
    engine = make(a_model(family), max_running=3)
    asked = [(50 + 37 * seed, seed, 4 + seed) for seed in range(8)]
    requests = [engine.submit(a_request(a_prompt(tokens, seed), most)) for tokens, seed, most in asked]
    requests += [engine.submit(a_request(a_prompt(tokens, seed), most)) for tokens, seed, most in asked[::-1]]
    for request, (tokens, seed, most) in zip(requests, asked + asked[::-1], strict=True):
        _, answer, last = request.result(LONG_S)
        assert answer == alone(family, tokens, seed, most)
        assert last.finish is Finish.LENGTH
    assert engine.load() == (0, 0)
    assert engine.counts.output_tokens == 2 * sum(most for *_, most in asked)


@every_family
def test_with_memory_for_hardly_one_prompt_two_at_once_are_still_answered_right(family: str, make: Make) -> None:
    model = a_model(family)
    engine = make(model, start=False, device=room_for(model, PROMPT + 3 * PAGE), host=2 * MIB)
    for _ in range(2):
        answers = by_hand(engine, *(a_request(a_prompt(PROMPT, seed)) for seed in (1, 2, 1)))
        for (_, tokens, _), seed in zip(answers, (1, 2, 1), strict=True):
            assert tokens == alone(family, PROMPT, seed, DECODED)
    assert not engine.cache.core.leases
    with pytest.raises(ConfigError, match="for which there is device memory"):
        engine.submit(a_request(a_prompt(PROMPT + 3 * PAGE), 40))


def test_a_long_prompt_delays_no_answer_by_more_than_one_chunk(make: Make, recorder: Recorder) -> None:
    engine = make(start=False)
    short = [engine.submit(a_request(a_prompt(10, seed), 50)) for seed in range(3)]
    turns(
        engine,
        lambda: all(not run.prefilling for run in engine.scheduler.running) and len(engine.scheduler.running) == 3,
    )
    for request in short:
        while not request.pieces.empty():
            request.pieces.get()
    long = engine.submit(a_request(a_prompt(6 * CHUNK), 4))
    recorder.calls.clear()
    for turn in range(1, 7):
        assert engine._turn()
        for request in short:
            assert len(request.pieces.get_nowait().tokens) == 1
            assert request.pieces.empty()
        chunks = [stop - start for _, start, stop in recorder.calls if stop - start > 1]
        assert chunks == [CHUNK] * turn, "one chunk for the prompt in each turn"
    assert len(long.pieces.get_nowait().tokens) == 1
    for _ in range(3):
        engine._turn()
        assert len(long.pieces.get_nowait().tokens) == 1


def test_prompts_take_turns(make: Make, recorder: Recorder) -> None:
    engine = make(start=False)
    requests = [engine.submit(a_request(a_prompt(5 * CHUNK, seed), 1)) for seed in range(3)]
    for _ in range(15):
        engine._turn()
    workspaces = [id(workspace) for workspace, _, _ in recorder.calls]
    assert workspaces == workspaces[:3] * 5
    assert len({*workspaces}) == 3
    assert all(request.result(0.1)[2].finish is Finish.LENGTH for request in requests)


def test_who_waits_for_storage_is_passed_by(make: Make) -> None:
    model = a_model()
    storage = FaultyStorage(MemoryStorage(64 * MIB, model.identity.fingerprint(), "test"))
    engine = make(start=False, storage=storage, max_running=1, clock=lambda: 1000.0, prefetch_policy="wait_complete")
    storage.stall()
    slow = engine.submit(a_request(a_prompt(PROMPT, 1)))
    quick = engine.submit(a_request(a_prompt(PROMPT, 2), read_cache=False))
    try:
        turns(engine, lambda: not quick.pieces.empty(), at_most=30)
        assert slow.pieces.empty()
    finally:
        storage.release()
    turns(engine, lambda: engine.counts.finished == 2)
    assert slow.result(0.1)[1] == alone("qwen3_5", PROMPT, 1, DECODED)


def test_a_put_that_hangs_costs_no_request_and_no_hit_on_the_device(make: Make) -> None:
    """Twelve prompts, each asked twice in a row, on a device that holds two of them and a host that holds four."""
    model, over, hung = a_model(), threading.Event(), threading.Event()

    class HungPuts(MemoryStorage):
        def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
            hung.set()
            over.wait()
            return super().put(names, data)

    storage = HungPuts(64 * MIB, model.identity.fingerprint(), "test")
    pages = sum(pool.payload_bytes for pool in model.identity.pools)
    engine = make(model, storage=storage, device=room_for(model, 2 * PROMPT), host=4 * (PROMPT // PAGE) * pages)
    try:
        for seed in range(12):
            for found in (0, GRID_FLOOR):
                _, tokens, last = engine.submit(a_request(a_prompt(PROMPT, seed))).result(LONG_S)
                assert tokens == alone("qwen3_5", PROMPT, seed, DECODED)
                assert last.usage is not None and last.usage.device == found
            assert hung.wait(LONG_S)
    finally:
        over.set()


def test_equal_prompts_that_wait_behind_each_other_are_computed_once(make: Make) -> None:
    engine = make(start=False, max_running=1)
    requests = [engine.submit(a_request(a_prompt(PROMPT, 1))) for _ in range(6)]
    turns(engine, lambda: engine.counts.finished == len(requests))
    found = [request.result(0.1)[2].usage for request in requests]
    cached = [usage and usage.device + usage.host + usage.storage for usage in found]
    assert cached == [0] + [(PROMPT - 1) // CHUNK * CHUNK] * 5
    assert len({tuple(request.prompt) for request in requests}) == 1


def test_a_crowd_that_comes_at_once_hits_as_if_it_came_one_by_one(make: Make) -> None:
    model = a_model()
    room = 40 * sum(pool.payload_bytes for pool in model.identity.pools)  # for a few such prompts, not for twelve
    engine = make(model, start=False, max_running=2, device=room)
    prompts = [a_prompt(PROMPT, seed) for seed in range(12)]
    for prompt in prompts:
        request = engine.submit(a_request(prompt))
        turns(engine, lambda request=request: not request.pieces.empty() and not any(engine.load()))
        engine.cache.settle()
    engine.cache.flush([Tier.DEVICE])
    crowd = [engine.submit(a_request(prompt)) for prompt in prompts]
    turns(engine, lambda: engine.counts.finished == 24)
    hits = [request.result(0.1)[2].usage for request in crowd]
    assert [usage and usage.host for usage in hits] == [(PROMPT - 1) // CHUNK * CHUNK] * 12


def test_pages_fetched_for_later_requests_keep_no_slots_from_the_first_in_line(make: Make) -> None:
    """A page that a request waits for is pinned, on the device too; if no request runs, that would be for ever."""
    model = a_model()
    storage = MemoryStorage(64 * MIB, model.identity.fingerprint(), "test")
    engine = make(model, start=False, device=room_for(model, 34 * PAGE), storage=storage, max_running=1)
    core, prompt = engine.cache.core, a_prompt(4 * CHUNK + 1, 1)
    by_hand(engine, a_request(prompt, 1))
    engine.cache.settle()
    engine.cache.flush([Tier.HOST])
    state = next(i for i, pool in enumerate(model.identity.pools) if pool.in_place)
    core.slot_pools.evict(state, 99)  # of the prompt storage alone has a state now, and the device all the rest
    running = engine.submit(a_request(a_prompt(8, 2), 24))
    turns(engine, lambda: engine.load()[0] == 1)
    first, behind = engine.submit(a_request(a_prompt(31 * PAGE, 3), 1)), engine.submit(a_request(prompt, 1))
    turns(engine, lambda: any(job.lease.holds for job in engine.scheduler.waiting))
    assert running.pieces.qsize() < 24
    engine.scheduler.waiting._overtaken = {
        id(job): OVERTAKEN for job in engine.scheduler.waiting if job.request is first
    }
    turns(engine, lambda: engine.counts.finished == 4, at_most=200)
    assert first.result(0.1)[1] == alone("qwen3_5", 31 * PAGE, 3, 1)
    assert behind.result(0.1)[1] == alone("qwen3_5", 4 * CHUNK + 1, 1, 1)


def test_a_requests_priority_reaches_its_pages(make: Make) -> None:
    engine = make(start=False, eviction="priority")
    request = a_request(a_prompt(PROMPT))
    request.priority = 7
    engine.submit(request)
    turns(engine, lambda: engine.counts.finished == 1)
    assert {run.priority for run in engine.cache.core.slot_pools.runs() if run.parent} == {7}


# --- going away, failing, dying


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
        assert request.pieces.empty()
    assert not engine.cache.core.leases
    assert engine.load() == (0, 0)
    assert engine.counts.aborted == 3
    engine.cache.flush()
    audit(engine.cache.core)
    assert not any(value for name, value in engine.cache.stats().items() if name.startswith("used."))
    ((_, tokens, _),) = by_hand(engine, a_request(a_prompt(PROMPT, 3)))
    assert tokens == alone("qwen3_5", PROMPT, 3, DECODED)


def test_aborting_what_is_over_or_never_came_is_nothing(make: Make) -> None:
    engine = make(start=False)
    request = a_request(a_prompt(5), 1)
    by_hand(engine, request)
    engine.abort(request)
    engine.abort(a_request())
    engine._turn()
    assert request.pieces.empty()
    assert engine.counts.finished == 1


@pytest.mark.parametrize("when", ["prompt", "answer"])
def test_a_request_that_fails_harms_no_other(when: str, make: Make, recorder: Recorder) -> None:
    poison = 299

    def fail(workspace: Workspace, ids: Tensor) -> None:
        if when == "prompt" and bool((ids == poison).any()):
            raise RuntimeError("out of memory")
        if when == "answer" and ids.shape[1] == 1 and workspace.max_tokens == 77 + 9:
            raise RuntimeError("out of memory")

    recorder.before = fail
    engine = make(start=False)
    bad = a_request([*a_prompt(76), poison], 9)
    good = [a_request(a_prompt(PROMPT, seed)) for seed in (1, 2)]
    (_, _, failed), *answers = by_hand(engine, bad, *good)
    assert failed.finish is Finish.ERROR
    assert failed.error == "RuntimeError: out of memory"
    for (_, tokens, last), seed in zip(answers, (1, 2), strict=True):
        assert last.finish is Finish.LENGTH
        assert tokens == alone("qwen3_5", PROMPT, seed, DECODED)
    assert engine.counts.failed == 1
    assert not engine.cache.core.leases
    assert not engine.broken


def test_a_request_whose_state_finds_no_memory_harms_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(PagedWorkspace):
        def __init__(self, layout: StateLayout, max_tokens: int, *args: Any) -> None:
            if max_tokens > 500:
                raise RuntimeError("out of memory")
            super().__init__(layout, max_tokens, *args)

    monkeypatch.setattr(engine_module, "PagedWorkspace", Small)
    engine = make(start=False)
    large, small = by_hand(engine, a_request(a_prompt(600)), a_request(a_prompt(PROMPT, 1)))
    assert (large[2].finish, large[2].error) == (Finish.ERROR, "RuntimeError: out of memory")
    assert small[1] == alone("qwen3_5", PROMPT, 1, DECODED)
    assert not engine.cache.core.leases


def test_a_listener_that_fails_harms_no_other(make: Make) -> None:
    """A client that is gone, say, whose event loop is closed."""

    def deliver(piece: OutputChunk) -> None:
        raise RuntimeError("the event loop is closed")

    engine = make(start=False)
    engine.submit(a_request(a_prompt(10), deliver=deliver))
    engine.submit(other := a_request(a_prompt(PROMPT, 1)))
    turns(engine, lambda: engine.counts.finished == 2)
    assert other.result(0.1)[1] == alone("qwen3_5", PROMPT, 1, DECODED)
    assert not engine.cache.core.leases


@pytest.mark.parametrize("leases_close", [True, False])
def test_when_the_engine_dies_every_request_gets_its_last_piece(
    leases_close: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps = make(start=False, max_running=2), iter(range(1000))
    step = engine.cache.step

    def stuck(lease: object) -> None:
        raise AssertionError("another bug")

    def broken() -> None:
        if next(steps) == 4:
            raise AssertionError("a bug")
        step()

    monkeypatch.setattr(engine.cache, "step", broken)
    if not leases_close:
        monkeypatch.setattr(engine.cache, "close", stuck)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
    requests = [engine.submit(a_request(a_prompt(PROMPT, seed), 50)) for seed in range(4)]
    engine.start()
    engine._thread.join(LONG_S)
    for request in requests:
        *_, last = request.result(0.1)
        assert last.finish is Finish.ERROR
        assert last.error == "the engine has stopped: AssertionError: a bug"
    with pytest.raises(Busy, match="AssertionError: a bug"):
        engine.submit(a_request())


def test_when_the_cache_cannot_open_a_request_every_request_gets_its_last_piece(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(start=False)

    def broken(*args: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(engine.cache, "open", broken)
    requests = [engine.submit(a_request(a_prompt(20, seed))) for seed in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: None)
        engine.start()
        engine._thread.join(LONG_S)
    assert not engine._thread.is_alive() or not engine.broken
    told = [request.pieces.qsize() for request in requests]
    assert told == [1, 1, 1], "a request waits for ever"


@pytest.mark.parametrize("broken", [False, True])
def test_a_request_that_comes_while_the_engine_stops_gets_its_last_piece(
    broken: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes: before the last look at what has come, or after it."""
    engine, going, ready = make(start=False), threading.Event(), threading.Event()
    step = engine.cache.step

    def last_step() -> None:
        ready.set()
        assert going.wait(LONG_S)
        if broken:
            raise AssertionError("a bug")
        step()

    monkeypatch.setattr(engine.cache, "step", last_step)
    engine.start()
    assert ready.wait(LONG_S)
    told: list[str] = []

    def submit(seed: int) -> None:
        while not told or told[-1] != "busy":  # until the door is closed
            try:
                request = engine.submit(a_request(a_prompt(5, seed), 1))
            except Busy:
                told.append("busy")
                return
            told.append("queued")
            requests.append(request)

    requests: list[Request] = [engine.submit(a_request(a_prompt(5), 1))]
    others = [threading.Thread(target=submit, args=(seed,)) for seed in range(3)]
    for other in others:
        other.start()
    if not broken:
        engine._stopping.set()
    going.set()
    engine._thread.join(LONG_S)
    for other in others:
        other.join(LONG_S)
    for request in requests:
        assert request.result(1)[2].finish in (Finish.ERROR, Finish.ABORT, Finish.LENGTH)
    assert told[-1] == "busy"


def test_a_full_engine_tells_the_next_request_to_try_again(make: Make) -> None:
    engine = make(start=False, max_running=1, max_waiting=2)
    requests = [a_request(a_prompt(10, seed), 2) for seed in range(3)]
    for request in requests:
        engine.submit(request)
    with pytest.raises(Busy, match="3 requests are being served or wait already"):
        engine.submit(a_request())
    turns(engine, lambda: engine.counts.finished == 1)
    engine.submit(last := a_request(a_prompt(10, 9), 2))
    turns(engine, lambda: engine.counts.finished == 4)
    assert last.result(0.1)[2].finish is Finish.LENGTH


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


def test_an_engine_that_was_never_started_shuts_down(make: Make) -> None:
    make(start=False).shutdown(5)


def test_what_others_ask_of_the_engine_is_answered_by_its_thread(make: Make) -> None:
    engine = make()
    engine.submit(a_request()).result(LONG_S)
    assert engine.settle(LONG_S)
    assert engine.flush(timeout_s=LONG_S) > 0
    assert engine.flush(timeout_s=LONG_S) == 0
    engine.shutdown()
    with pytest.raises(Busy):
        engine.ask(lambda: 1, 0.01)


def test_what_the_engine_did_not_get_round_to_in_time_is_never_done(make: Make) -> None:
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


@pytest.mark.parametrize(
    ("prompt", "most", "told"),
    [
        ([], 1, "the prompt is empty"),
        ([1, VOCAB], 1, "outside the model's vocabulary of 300"),
        ([-1], 1, "outside the model's vocabulary"),
        ([1] * 1000, 25, "more than the 1024 that qwen3_5 can attend to"),
    ],
)
def test_a_request_that_can_never_be_answered_is_refused_and_takes_no_place(
    prompt: list[int], most: int, told: str, make: Make
) -> None:
    engine = make(start=False, max_running=1, max_waiting=1)
    for _ in range(3):
        with pytest.raises(ConfigError, match=told):
            engine.submit(a_request(prompt, most))
    by_hand(engine, a_request([1] * 20, 2), a_request([2] * 20, 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 101.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_sampling_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**settings)


# --- the text of an answer


def say(recorder: Recorder, script: Sequence[int], prompt_tokens: int = 5) -> None:
    """Have the model say these tokens, whatever it thinks."""

    def scripted(workspace: Workspace, logits: Tensor) -> Tensor:
        said = workspace.tokens - prompt_tokens
        logits = torch.zeros_like(logits)
        logits[script[min(said, len(script) - 1)] if said >= 0 else 0] = 1
        return logits

    recorder.after = scripted


def pieces_of(request: Request) -> list[OutputChunk]:
    found = []
    while not request.pieces.empty():
        found.append(request.pieces.get())
    return found


def scripted(
    make: Make, recorder: Recorder, text: str, stop: tuple[str, ...], most: int = 200, **kwargs: Any
) -> list[OutputChunk]:
    script = [*a_model().tokenizer.encode(text), 256]
    say(recorder, script)
    engine, request = make(start=False), a_request(a_prompt(5), most, stop=stop, ignore_eos=False, **kwargs)
    engine.submit(request)
    turns(engine, lambda: engine.counts.finished == 1)
    return pieces_of(request)


def test_an_answer_ends_at_the_end_token_which_is_no_text(make: Make, recorder: Recorder) -> None:
    pieces = scripted(make, recorder, "hello", ())
    assert [piece.text for piece in pieces] == ["h", "e", "l", "l", "o", ""]
    assert pieces[-1].finish is Finish.STOP
    assert pieces[-1].tokens == (256,)
    assert pieces[-1].usage == TokenUsage(5, 6, 0, 0, 0)


def test_the_end_token_can_be_ignored(make: Make, recorder: Recorder) -> None:
    h, i = a_model().tokenizer.encode("hi")
    say(recorder, [h, 256, i, 256])
    engine = make(start=False)
    ((text, tokens, last),) = by_hand(engine, a_request(a_prompt(5), 4))
    assert (text, tokens, last.finish) == ("hi", [h, 256, i, 256], Finish.LENGTH)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello wor END ld", ("END",), "hello wor "),
        ("hello wor ENd ld", ("END",), "hello wor ENd ld"),
        ("aab aaab", ("aaab",), "aab "),
        ("one two three", ("three", "two"), "one "),
        ("one two", ("two three", "two"), "one "),
        ("one tw", ("two",), "one tw"),
        ("ENDless", ("END",), ""),
        ("héllo wörld", ("ör",), "héllo w"),
        ("héllo", ("h",), ""),
    ],
)
def test_a_stop_text_ends_an_answer_and_none_of_it_is_delivered(
    text: str, stop: tuple[str, ...], expected: str, make: Make, recorder: Recorder
) -> None:
    pieces = scripted(make, recorder, text, stop)
    assert "".join(piece.text for piece in pieces) == expected
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish is Finish.STOP
    assert sum(len(piece.tokens) for piece in pieces) == pieces[-1].usage.completion  # type: ignore[union-attr]
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_what_could_become_a_stop_text_is_held_back_until_it_cannot(make: Make, recorder: Recorder) -> None:
    pieces = scripted(make, recorder, "aENxEND", ("END",))
    assert [piece.text for piece in pieces] == ["a", "", "", "ENx", "", "", ""]


def test_an_answer_cut_off_by_its_length_says_what_was_held_back(make: Make, recorder: Recorder) -> None:
    pieces = scripted(make, recorder, "aEN", ("END",), most=3)
    assert "".join(piece.text for piece in pieces) == "aEN"
    assert pieces[-1].finish is Finish.LENGTH


def test_a_character_is_delivered_when_it_is_whole(make: Make, recorder: Recorder) -> None:
    pieces = scripted(make, recorder, "é😀!", ())
    assert [piece.text for piece in pieces] == ["", "é", "", "", "", "😀", "!", ""]


def test_a_seed_repeats_an_answer_whichever_other_requests_run(make: Make) -> None:
    engine = make(start=False)

    def ask(seed: int | None) -> Request:
        return a_request(a_prompt(30), 12, temperature=1.5, seed=seed)

    ((_, first, _),) = by_hand(engine, ask(1))
    answers = [tokens for _, tokens, _ in by_hand(engine, ask(2), ask(None), ask(1), ask(3), ask(1))]
    assert answers[2] == answers[4] == first
    assert len({tuple(tokens) for tokens in (answers[0], answers[3], first)}) == 3


def test_a_small_top_p_leaves_only_the_likeliest_token(make: Make) -> None:
    engine = make(start=False)
    ((_, greedy, _),) = by_hand(engine, a_request(a_prompt(30), 8))
    ((_, found, _),) = by_hand(engine, a_request(a_prompt(30), 8, temperature=2.0, top_p=1e-6, seed=5))
    assert found == greedy


@pytest.mark.parametrize(("least", "expected"), [(0, "a "), (2, "a "), (3, "a END b "), (4, "a END b "), (13, None)])
def test_a_stop_text_is_heeded_if_it_begins_after_min_tokens(
    least: int, expected: str | None, make: Make, recorder: Recorder
) -> None:
    pieces = scripted(make, recorder, "a END b END c", ("END",), most=13, min_tokens=least)
    assert "".join(piece.text for piece in pieces) == (expected or "a END b END c")
    assert pieces[-1].finish is (Finish.STOP if expected else Finish.LENGTH)


def test_the_next_best_token_replaces_an_end_token_within_min_tokens(make: Make, recorder: Recorder) -> None:
    say(recorder, [256])
    engine = make(start=False)
    ((_, tokens, last),) = by_hand(engine, a_request(a_prompt(5), 9, ignore_eos=False, min_tokens=3))
    assert last.finish is Finish.STOP
    assert tokens[-1] == 256
    assert len(tokens) == 4
    ((_, tokens, last),) = by_hand(engine, a_request(a_prompt(5), 9, stop_token_ids=(256,)))
    assert (tokens, last.finish) == ([256], Finish.STOP)


def test_penalties_count_prompt_and_answer_even_after_a_preemption(make: Make) -> None:
    wide, narrow = make(start=False), make(start=False, device=room_for(a_model(), 200))

    def ask(seed: int) -> Request:
        return a_request(a_prompt(30, seed), 60, repetition_penalty=100.0, frequency_penalty=2.0)

    expected = [by_hand(wide, ask(seed))[0][1] for seed in range(5)]
    for seed, tokens in enumerate(expected):
        assert len({*tokens}) == 60
        assert not {*tokens} & {*a_prompt(30, seed)}
    found = by_hand(narrow, *map(ask, range(5)))
    assert narrow.counts.preempted > 0
    assert [tokens for _, tokens, _ in found] == expected


# --- how likely it was


def test_every_token_comes_with_its_likelihood_if_asked_for(make: Make, recorder: Recorder) -> None:
    engine = make(start=False)
    engine.submit(request := a_request(a_prompt(70), 5, temperature=1.0, seed=3, logprobs=2))
    turns(engine, lambda: engine.counts.finished == 1)
    pieces, logits = pieces_of(request), recorder.take()
    found = [likelihood for piece in pieces for likelihood in piece.likelihoods]
    assert [(likelihood.token,) for likelihood in found] == [piece.tokens for piece in pieces]
    for position, likelihood in enumerate(found, 70):
        own = torch.log_softmax(logits[position], -1)
        assert likelihood.logprob == float(own[likelihood.token])
        assert likelihood.top == tuple((int(token), float(own[token])) for token in own.topk(2).indices)
    engine.submit(request := a_request(a_prompt(70), 5, temperature=1.0, seed=3))
    turns(engine, lambda: engine.counts.finished == 2)
    silent = pieces_of(request)
    assert [piece.tokens for piece in silent] == [piece.tokens for piece in pieces]
    assert not any(piece.likelihoods for piece in silent)


@pytest.mark.parametrize(
    ("text", "most", "finish"), [("aé ENx END", 20, Finish.STOP), ("é😀", 20, Finish.STOP), ("a😀", 3, Finish.LENGTH)]
)
def test_a_likelihood_goes_with_its_token_even_if_the_text_is_held_back(
    text: str, most: int, finish: Finish, make: Make, recorder: Recorder
) -> None:
    pieces = scripted(make, recorder, text, ("END",), most, logprobs=0)
    assert pieces[-1].finish is finish
    assert [tuple(one.token for one in piece.likelihoods) for piece in pieces] == [piece.tokens for piece in pieces]
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == [*a_model().tokenizer.encode(text), 256][: len(tokens)]
    offsets = [one.offset for piece in pieces for one in piece.likelihoods]
    # A byte's text begins where its character does.
    assert offsets == [i for i, letter in enumerate(f"{text}.") for _ in letter.encode()][: len(tokens)]


# --- several at once


def test_all_of_several_are_taken_or_none(make: Make) -> None:
    engine = make(start=False, max_running=1, max_waiting=3)
    engine.submit(a_request(a_prompt(10), 2))

    def three(most: int = 2) -> list[Request]:
        return [a_request(a_prompt(10, seed), most if seed == 2 else 2) for seed in range(3)]

    with pytest.raises(ConfigError, match="more than the 1024"):
        engine.submit(*three(most=2000))
    with pytest.raises(ConfigError, match="5 requests at once are more than the 4 that the engine takes"):
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
