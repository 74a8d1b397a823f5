"""Many at once: each is answered as if it were alone, whichever requests start, end or are preempted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import (
    CHUNK,
    DECODED,
    MIB,
    PAGE,
    PROMPT,
    Make,
    a_model,
    a_prompt,
    a_request,
    alone,
    by_hand,
    every_family,
    room_for,
    turns,
)
from kvarve.engine import batch as batch_module
from kvarve.engine import turns as turns_module
from kvarve.engine.batch import Batch, batches
from kvarve.engine.engine import Engine
from kvarve.engine.model import load_model
from kvarve.engine.paging import PagedTape, PagedWorkspace
from kvarve.engine.requests import Finish, Request
from kvarve.engine.shards import divide
from kvarve.engine.state import StateLayout
from kvarve.engine.tails import tails
from kvarve.testing.models import STATES_ALONE, save_checkpoint, tiny_grid, tiny_model
from kvarve.verify.requests import Uncached

# Positions beside the keys of its indexer.
ONE_BY_ONE = {"qwen4_exp", "minimax_m3", "mamba", "falcon_mamba"}
ASKED = [(20, 3, 30), (150, 4, 40), (64, 5, 24), (7, 6, 61), (130, 7, 9)]  # tokens, seed, most


@every_family
def test_answers_computed_together_are_those_computed_alone(family: str, make: Make) -> None:
    """They start and end at different times, cross pages, windows and lines of the grid, and share no length."""
    engine = make(a_model(family), start=False)
    requests = []
    for tokens, seed, most in ASKED:
        requests.append(engine.submit(a_request(a_prompt(tokens, seed), most)))
        for _ in range(3):
            engine._turn()
    turns(engine, lambda: engine.counts.finished == len(ASKED))
    for request, (tokens, seed, most) in zip(requests, ASKED, strict=True):
        assert request.result(0.1)[1] == alone(family, tokens, seed, most), (tokens, seed)


@every_family
def test_what_a_models_code_can_do_is_found_by_trying(family: str) -> None:
    model = a_model(family)
    assert batches(model.model, model.layout) is (family not in ONE_BY_ONE)


@pytest.mark.parametrize("family", ["jamba", "mamba", "qwen3_5"])
def test_what_a_rank_can_do_is_what_the_whole_model_can(family: str, tmp_path: Path) -> None:
    """Jamba cannot compute tails of unequal length together, and raises."""
    page, chunk = tiny_grid(family)
    save_checkpoint(tiny_model(family), tmp_path / family)
    can = []
    for ranks in (1, 2):
        model = load_model(str(tmp_path / family), page_tokens=page, chunk_tokens=chunk).model
        if ranks > 1:
            divide(model, 0, ranks, lambda _: None)
        layout = StateLayout.of(model, page, chunk)
        can.append((batches(model, layout), tails(model, layout)))
    assert can[0] == can[1]


@pytest.mark.parametrize("fault", ["mask", "position", "crash"])
def test_code_that_confuses_rows_is_found_out_and_computed_one_by_one(
    fault: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model()
    monkeypatch.setattr(batch_module, "_tried", {})
    forward = type(model.model).forward

    def confused(self: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[0] > 1:
            if fault == "crash":
                raise NotImplementedError("one at a time, please")
            if fault == "mask":
                inputs["attention_mask"] = None
            else:
                inputs["position_ids"] = inputs["position_ids"].amax().expand_as(inputs["position_ids"])
        return forward(self, **inputs)

    monkeypatch.setattr(type(model.model), "forward", confused)
    engine = make(model, start=False)
    assert not engine.batches
    answers = by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in ASKED[:3]))
    for (_, answer, _), (tokens, seed, most) in zip(answers, ASKED, strict=False):
        assert answer == alone("qwen3_5", tokens, seed, most)


def test_answers_take_one_forward_a_turn(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = make(start=False, turn_tokens=6 * CHUNK), list[int]()
    forward = Batch.forward

    def whole_chunks_only(model: Any, state: PagedWorkspace, ids: Tensor) -> Tensor:
        assert ids.shape[1] == CHUNK
        return real(model, state, ids)

    def counted(self: Batch, model: Any, tokens: list[int]) -> Tensor:
        sizes.append(len(tokens))
        return forward(self, model, tokens)

    monkeypatch.setattr(Batch, "forward", counted)
    monkeypatch.setattr(turns_module, "forward", whole_chunks_only)
    requests = [engine.submit(a_request(a_prompt(CHUNK, seed), 10)) for seed in range(6)]
    turns(engine, lambda: engine.counts.finished == 6)
    assert all(len(request.result(0.1)[1]) == 10 for request in requests)
    assert sizes == [6] * 9


real = turns_module.forward


def test_an_answer_that_closes_a_page_of_compressed_entries_is_the_one_without_a_cache(make: Make) -> None:
    """DeepSeek-V4 makes an entry of 4 tokens, and one of 128: both kinds close while it speaks."""
    model = a_model("deepseek_v4")
    engine, page = make(model, start=False), model.layout.page_tokens
    assert page == model.layout.chunk_tokens == 128
    asked = [(page - 9, 3, 30), (2 * page - 5, 4, 24), (page - 1, 5, 10), (20, 6, 20)]
    answers = by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in asked))
    for (_, answer, _), (tokens, seed, most) in zip(answers, asked, strict=True):
        prompt = a_prompt(tokens, seed)
        assert answer == Uncached(model, most)(prompt).tokens == alone("deepseek_v4", tokens, seed, most)
        going_on = [*prompt, *answer, *a_prompt(7, 8)]
        ((_, further, last),) = by_hand(engine, a_request(going_on, DECODED))
        assert last.usage is not None
        assert last.usage.cached == (len(prompt) + len(answer) - 1) // page * page  # the page that was said included
        assert further == Uncached(model, DECODED)(going_on).tokens


# --- memory


@every_family
def test_what_a_running_request_has_beside_its_pages_is_known_beforehand(family: str, make: Make) -> None:
    model = a_model(family)
    engine = make(model, start=False)
    engine.submit(a_request(a_prompt(3 * CHUNK), 40))
    turns(engine, lambda: any(not job.prefilling for job in engine.scheduler.running))
    (job,) = engine.scheduler.running
    own = [tape._data for tape in job.state._tapes.values() if not isinstance(tape, PagedTape)]
    own += job.state._states.values()
    assert sum(tensor.nbytes for tensor in own) == model.layout.bytes_in_use


@every_family
def test_a_preempted_request_resumes_with_the_same_answer(family: str, make: Make) -> None:
    if family in STATES_ALONE:
        return  # its answers take no slots, so none is ever preempted
    """Slots for two of them at most; each needs more the longer its answer gets."""
    model = a_model(family)
    engine = make(model, start=False, device=room_for(model, 200, shared=True), host=4 * MIB)
    requests = [engine.submit(a_request(a_prompt(tokens, seed), most)) for tokens, seed, most in ASKED]
    turns(engine, lambda: engine.counts.finished == len(ASKED), at_most=4000)
    if model.layout.page_tokens == PAGE:  # else none grows by a page
        assert engine.counts.preempted > 0
    for request, (tokens, seed, most) in zip(requests, ASKED, strict=True):
        _, answer, last = request.result(0.1)
        assert last.finish is Finish.LENGTH
        assert answer == alone(family, tokens, seed, most), (tokens, seed)
    assert not engine.cache.scheduler.core.leases
    assert engine.load() == (0, 0)


def test_a_deterministic_answer_is_the_same_to_the_last_bit_whichever_requests_run_or_are_preempted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model("qwen3_5", torch.bfloat16)
    logits: dict[int, dict[int, Tensor]] = {}  # by length of the prompt, by tokens before
    differed: list[tuple[int, int]] = []

    def recorded(net: Any, state: PagedWorkspace, ids: Tensor) -> Tensor:
        found = real(net, state, ids)
        known = logits.setdefault(state.max_tokens, {}).setdefault(state.tokens, found.clone())
        if not torch.equal(known, found):
            differed.append((state.max_tokens, state.tokens))
        return found

    monkeypatch.setattr(turns_module, "forward", recorded)
    for tokens, seed, most in ASKED:
        by_hand(make(model, start=False, deterministic=True), a_request(a_prompt(tokens, seed), most))
    engine = make(model, start=False, deterministic=True, device=room_for(model, 200), host=4 * MIB)
    by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in ASKED))
    by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in ASKED[::-1]))
    assert engine.counts.preempted > 0
    assert not differed


def test_a_shared_prefix_lies_on_the_device_once(make: Make) -> None:
    engine, stem = make(a_model("qwen3"), start=False), a_prompt(6 * CHUNK)
    by_hand(engine, a_request([*stem, 1], 1))
    before = engine.cache.stats()["used.device.attention"]
    assert before == 6 * CHUNK // PAGE
    requests = [engine.submit(a_request([*stem, seed], 40)) for seed in range(8)]
    turns(engine, lambda: engine.counts.output_tokens >= 8)
    tables = [job.state.tables["attention"].slots for job in engine.scheduler.running]
    assert len(tables) == 8
    assert len({tuple(slots[: 6 * CHUNK // PAGE]) for slots in tables}) == 1
    assert engine.cache.stats()["used.device.attention"] <= before + 8 * 2
    turns(engine, lambda: engine.counts.finished == 9)
    assert engine.cache.stats()["used.device.attention"] <= before + 8 * 2
    assert all(request.result(0.1)[2].finish is Finish.LENGTH for request in requests)


def test_a_batch_that_fails_ends_only_the_requests_that_fail_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, failures = Batch.forward, [RuntimeError("out of memory")]

    def failing(self: Batch, model: Any, tokens: list[int]) -> Tensor:
        logits = forward(self, model, tokens)  # the states have moved on
        if len(tokens) == 3 and failures:
            raise failures.pop()
        return logits

    monkeypatch.setattr(Batch, "forward", failing)
    engine = make(start=False)
    answers = by_hand(engine, *(a_request(a_prompt(PROMPT, seed), 20) for seed in (1, 2, 3)))
    for (_, answer, last), seed in zip(answers, (1, 2, 3), strict=True):
        assert last.finish is Finish.LENGTH
        assert answer == alone("qwen3_5", PROMPT, seed, 20)
    assert not failures


# --- an answer is found again


def test_the_next_turn_of_a_conversation_finds_its_own_answer(make: Make) -> None:
    engine, prompt = make(start=False), a_prompt(50)
    ((_, answer, _),) = by_hand(engine, a_request(prompt, 100))
    ((_, _, last),) = by_hand(engine, a_request([*prompt, *answer, *a_prompt(20, 3)], 5))
    assert last.usage is not None
    assert last.usage.cached == 2 * CHUNK


def test_a_deterministic_engine_keeps_no_answers(make: Make) -> None:
    engine, prompt = make(start=False, deterministic=True), a_prompt(50)
    ((_, answer, _),) = by_hand(engine, a_request(prompt, 100))
    ((_, _, last),) = by_hand(engine, a_request([*prompt, *answer, *a_prompt(20, 3)], 5))
    assert last.usage is not None
    assert last.usage.cached == 0


# --- fairness, in turns


def first_token_turns(engine: Engine, arrivals: dict[int, list[Request]]) -> dict[int, int]:
    """By a request's number the turns between its coming and its first token."""
    came: dict[int, int] = {}
    waits: dict[int, int] = {}
    all_requests = [request for requests in arrivals.values() for request in requests]
    for turn in range(5000):
        for request in arrivals.get(turn, ()):
            engine.submit(request)
            came[request.number] = turn
        engine._turn()
        for request in all_requests:
            if request.number not in waits and not request.outputs.empty():
                waits[request.number] = turn - came[request.number]
        if len(waits) == len(all_requests):
            return waits
    raise AssertionError("a request starves")


def test_a_short_prompt_is_not_held_up_by_long_ones(make: Make) -> None:
    engine = make(start=False, max_running=16, turn_tokens=2 * CHUNK)
    long, short = [a_request(a_prompt(12 * CHUNK, seed), 2) for seed in range(6)], a_request(a_prompt(20, 77), 2)
    waits = first_token_turns(engine, {0: long, 3: [short]})
    assert waits[short.number] <= 5


def test_prompts_that_share_a_prefix_and_come_together_compute_it_once(make: Make) -> None:
    """A recurrent state is kept where they part, for the first of them is told."""
    engine, stem = make(start=False), a_prompt(5 * CHUNK)
    requests = [a_request([*stem, *a_prompt(CHUNK + 9, seed)], DECODED) for seed in range(5)]
    answers = by_hand(engine, *requests)
    assert engine.counts.computed_tokens <= 5 * CHUNK + 5 * (CHUNK + 9)
    for request, (_, answer, last) in zip(requests, answers, strict=True):
        ((_, expected, _),) = by_hand(make(start=False), a_request(request.prompt, DECODED))
        assert answer == expected
        assert last.usage is not None
    assert [last.usage and last.usage.cached for *_, last in answers] == [0] + [5 * CHUNK] * 4


def test_a_request_that_waits_for_a_prefix_goes_on_when_no_other_computes_it_any_more(make: Make) -> None:
    engine, stem = make(start=False, turn_tokens=CHUNK), a_prompt(8 * CHUNK)
    first, second = (engine.submit(a_request([*stem, seed], 3)) for seed in range(2))
    for _ in range(3):
        engine._turn()
    assert engine.load() == (1, 1)
    engine.abort(first)
    turns(engine, lambda: engine.counts.finished == 2)
    assert second.result(0.1)[2].finish is Finish.LENGTH
