"""The engine answers as if there were no cache, no other request and no error; only sooner."""

from pathlib import Path

import pytest
import torch
from recorder import Recorder

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
    every_dtype,
    every_family,
    room_for,
    turns,
)
from kvarve.pages.pools import Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.request_scheduler import OVERTAKEN
from kvarve.reference.engine.requests import Finish, TokenUsage
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage

# --- the same bits from every tier


@every_dtype
@every_family
def test_the_logits_are_the_same_bits_wherever_the_pages_come_from(
    family: str, dtype: torch.dtype, make: Make, recorder: Recorder, tmp_path: Path
) -> None:
    model, url = a_model(family, dtype), f"file://{tmp_path}/store?capacity=16MiB"
    chunk = model.layout.chunk_tokens
    floor = PROMPT // chunk * chunk
    # Of a model of states alone one page is read, and no other has come from anywhere.
    come = floor if any(pool.lookback is None for pool in model.layout.pools) else model.layout.page_tokens
    engine = make(model, storage=url)
    _, expected, last = engine.submit(a_request()).result(LONG_S)
    cold = recorder.take()
    assert last.finish is Finish.LENGTH
    assert last.usage == TokenUsage(PROMPT, DECODED, 0, 0, 0)
    assert [*cold] == [*range(chunk, PROMPT, chunk), *range(PROMPT, PROMPT + DECODED)]
    assert all(logits.isfinite().all() for logits in cold.values())

    def again(engine: Engine, tier: Tier) -> None:
        _, tokens, last = engine.submit(a_request()).result(LONG_S)
        warm = recorder.take()
        assert tokens == expected, tier
        assert [*warm] == [*range(PROMPT, PROMPT + DECODED)], tier
        for position, logits in warm.items():
            assert torch.equal(logits, cold[position]), f"{tier} at {position}"
        assert last.usage is not None
        assert last.usage.cached == floor
        assert last.usage.tiers[tier] == (floor if tier is Tier.DEVICE else come), last.usage

    again(engine, Tier.DEVICE)
    assert engine.settle()
    assert engine.flush([Tier.DEVICE]) > 0
    again(engine, Tier.HOST)
    assert engine.flush() > 0
    again(engine, Tier.STORAGE)
    engine.shutdown()
    engine = make(model, storage=url)
    again(engine, Tier.STORAGE)
    assert engine.counts.computed_tokens == PROMPT - floor


@pytest.mark.parametrize("tokens", [1, 15, 16, 63, 64, 65, 128, 129, 2 * CHUNK + 16])
def test_a_prompt_of_any_length_resumes_at_the_last_line_of_the_grid_before_its_end(
    tokens: int, make: Make, recorder: Recorder
) -> None:
    engine = make(start=False)
    first, second = a_request(a_prompt(tokens), 3), a_request(a_prompt(tokens), 3)
    ((_, expected, _),) = by_hand(engine, first)
    cold = recorder.take()
    ((_, found, last),) = by_hand(engine, second)
    warm = recorder.take()
    assert found == expected
    assert all(torch.equal(logits, cold[position]) for position, logits in warm.items())
    assert last.usage == TokenUsage(tokens, 3, (tokens - 1) // CHUNK * CHUNK, 0, 0)


def test_pages_computed_in_half_a_chunk_are_not_shared(make: Make, recorder: Recorder) -> None:
    """A page has other last bits if its chunk was shorter, so a request that resumes there recomputes that chunk."""
    engine, prompt = make(start=False), a_prompt(4 * CHUNK)
    for tokens in (CHUNK + 2 * PAGE, 2 * CHUNK + PAGE, 3 * CHUNK):
        by_hand(engine, a_request(prompt[:tokens], 1))
        recorder.take()
    by_hand(engine, a_request(prompt, 1))
    warm = recorder.take()
    by_hand(make(start=False), a_request(prompt, 1))
    cold = recorder.take()
    assert [*warm] == [4 * CHUNK]
    assert torch.equal(warm[4 * CHUNK], cold[4 * CHUNK])


def test_pages_of_a_whole_chunk_do_not_serve_half_a_chunk(make: Make, recorder: Recorder) -> None:
    """The same the other way round: a prompt that ends in the middle of a chunk computes all of that middle itself."""
    prompt, engine = a_prompt(3 * CHUNK), make(start=False, deterministic=True)
    by_hand(engine, a_request(prompt, 1))
    for tokens in (2 * CHUNK + PAGE, 2 * CHUNK + PAGE + 5, CHUNK + 3 * PAGE):
        recorder.take()
        by_hand(engine, a_request(prompt[:tokens], 2))
        warm = recorder.take()
        by_hand(make(start=False, deterministic=True), a_request(prompt[:tokens], 2))
        cold = recorder.take()
        assert [*warm][-2:] == [tokens, tokens + 1]
        for position, logits in warm.items():
            assert torch.equal(logits, cold[position]), f"{tokens} tokens, at {position}"


def test_another_salt_or_a_skipped_lookup_computes_everything(make: Make) -> None:
    engine = make()
    engine.submit(a_request()).result(LONG_S)
    for request in (a_request(salt="another"), a_request(read_cache=False)):
        _, tokens, last = engine.submit(request).result(LONG_S)
        assert tokens == alone("qwen3_5", PROMPT, 7, DECODED)
        assert last.usage == TokenUsage(PROMPT, DECODED, 0, 0, 0)


# --- several at once


def test_a_long_prompt_delays_no_answer_by_more_than_one_chunk(make: Make, recorder: Recorder) -> None:
    engine = make(start=False)
    short = [engine.submit(a_request(a_prompt(10, seed), 12)) for seed in range(3)]
    turns(
        engine,
        lambda: all(not run.prefilling for run in engine.scheduler.running) and len(engine.scheduler.running) == 3,
    )
    for request in short:
        while not request.outputs.empty():
            request.outputs.get()
    long = engine.submit(a_request(a_prompt(6 * CHUNK), 4))
    recorder.calls.clear()
    for turn in range(1, 7):
        assert engine._turn()
        for request in short:
            assert len(request.outputs.get_nowait().tokens) == 1
            assert request.outputs.empty()
        chunks = [stop - start for _, start, stop in recorder.calls if stop - start > 1]
        assert chunks == [CHUNK] * turn, "one chunk for the prompt in each turn"
    assert len(long.outputs.get_nowait().tokens) == 1
    for _ in range(3):
        engine._turn()
        assert len(long.outputs.get_nowait().tokens) == 1


def test_a_request_that_waits_for_storage_is_overtaken(make: Make) -> None:
    model = a_model()
    storage = FaultyStorage(MemoryStorage(64 * MIB, model.identity.fingerprint(), "test"))
    engine = make(start=False, storage=storage, max_running=1, clock=lambda: 1000.0, storage_wait="all")
    storage.stall()
    slow = engine.submit(a_request(a_prompt(PROMPT, 1)))
    quick = engine.submit(a_request(a_prompt(PROMPT, 2), read_cache=False))
    try:
        turns(engine, lambda: not quick.outputs.empty(), at_most=30)
        assert slow.outputs.empty()
    finally:
        storage.release()
    turns(engine, lambda: engine.counts.finished == 2)
    assert slow.result(0.1)[1] == alone("qwen3_5", PROMPT, 1, DECODED)


def test_a_put_that_hangs_costs_no_request_and_no_hit_on_the_device(make: Make) -> None:
    """Four prompts, each asked twice in a row, on a device that holds two of them and a host that holds two."""
    model = a_model()
    storage = FaultyStorage(MemoryStorage(64 * MIB, model.identity.fingerprint(), "test"), stall_limit_s=LONG_S)
    storage.stall("put")
    pages = sum(pool.payload_bytes for pool in model.identity.pools)
    engine = make(model, storage=storage, device=room_for(model, 2 * PROMPT), host=2 * (PROMPT // PAGE) * pages)
    try:
        for seed in range(4):
            for found in (0, GRID_FLOOR):
                _, tokens, last = engine.submit(a_request(a_prompt(PROMPT, seed))).result(LONG_S)
                assert len(tokens) == DECODED and last.usage is not None and last.usage.device == found
            storage.wait_for_stalled_call()
    finally:
        storage.release()


def test_pages_fetched_for_later_requests_keep_no_slots_from_the_first_in_line(make: Make) -> None:
    """A page that a request waits for is pinned, on the device too; if no request runs, that would be for ever."""
    model = a_model()
    storage = MemoryStorage(64 * MIB, model.identity.fingerprint(), "test")
    engine = make(model, start=False, device=room_for(model, 18 * PAGE), storage=storage, max_running=1)
    core, prompt = engine.cache.scheduler.core, a_prompt(2 * CHUNK + 1, 1)
    by_hand(engine, a_request(prompt, 1))
    engine.cache.settle()
    engine.cache.flush([Tier.HOST])
    state = next(i for i, pool in enumerate(model.identity.pools) if pool.in_place)
    core.evictions.evict(state, 99)  # of the prompt storage alone has a state now, and the device all the rest
    running = engine.submit(a_request(a_prompt(8, 2), 16))
    turns(engine, lambda: engine.load()[0] == 1)
    first, behind = engine.submit(a_request(a_prompt(15 * PAGE, 3), 1)), engine.submit(a_request(prompt, 1))
    turns(engine, lambda: any(job.lease.holds for job in engine.scheduler.waiting))
    assert running.outputs.qsize() < 16
    engine.scheduler.waiting._overtaken = {
        id(job): OVERTAKEN for job in engine.scheduler.waiting if job.request is first
    }
    turns(engine, lambda: engine.counts.finished == 4, at_most=200)
    assert first.result(0.1)[1] == alone("qwen3_5", 15 * PAGE, 3, 1)
    assert behind.result(0.1)[1] == alone("qwen3_5", 2 * CHUNK + 1, 1, 1)


def test_a_requests_priority_reaches_its_pages(make: Make) -> None:
    engine = make(start=False, eviction="priority")
    request = a_request(a_prompt(PROMPT))
    request.priority = 7
    engine.submit(request)
    turns(engine, lambda: engine.counts.finished == 1)
    assert {run.priority for run in engine.cache.scheduler.core.tree.runs() if run.parent} == {7}
