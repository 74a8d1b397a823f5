"""Many at once: each is answered as if it were alone, whichever requests start, end or are preempted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engines import (
    CHUNK,
    DECODED,
    MIB,
    PAGE,
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
from kvarve.reference.engine import batch as batch_module
from kvarve.reference.engine import turns as turns_module
from kvarve.reference.engine.batch import together
from kvarve.reference.engine.paging import PagedTape, PagedWorkspace
from kvarve.reference.engine.requests import Finish
from kvarve.reference.engine.shards import divide
from kvarve.reference.engine.workspace import StateLayout
from kvarve.reference.verify.watched import Uncached
from tests.sim.models import STATES_ALONE, tiny_grid, tiny_model

# Positions beside the keys of its indexer.
ONE_BY_ONE = {"qwen4_exp", "minimax_m3", "mamba", "falcon_mamba", "glm5_next"}
# Their attention is not torch's, or their keys are made of what is kept.
PADDED = {"gpt_oss", "gpt_oss_wide", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "kimi_linear"}
PADDED |= {"longcat_flash", "kimi_k25"}
ASKED = [(20, 3, 3), (70, 4, 4), (13, 6, 5)]  # tokens, seed, most
GROWING = [(30, 3, 7), (29, 4, 9), (31, 5, 5)]  # each to a third page


@every_family
def test_answers_computed_together_are_those_computed_alone(family: str, make: Make) -> None:
    """They start and end at different times, cross pages, windows and lines of the grid, and share no length."""
    engine = make(a_model(family), start=False)
    requests = []
    for tokens, seed, most in ASKED:
        requests.append(engine.submit(a_request(a_prompt(tokens, seed), most)))
        engine._turn()
    turns(engine, lambda: engine.counts.finished == len(ASKED))
    for request, (tokens, seed, most) in zip(requests, ASKED, strict=True):
        assert request.result(0.1)[1] == alone(family, tokens, seed, most), (tokens, seed)


@every_family
def test_what_a_models_code_can_do_is_found_by_trying(family: str) -> None:
    model = a_model(family)
    found = together(model.model, model.layout)
    assert found.answers is (family not in ONE_BY_ONE)
    assert found.apart is (family not in ONE_BY_ONE | PADDED)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("family", ["jamba", pytest.param("mamba", marks=pytest.mark.long)])
def test_what_a_rank_can_do_is_what_the_whole_model_can(family: str) -> None:
    """Jamba cannot compute tails of unequal length together, and raises."""
    whole, part = a_model(family), tiny_model(family)
    divide(part, 0, 2, lambda _: None)
    layout = StateLayout.of(part, *tiny_grid(family))
    assert together(part, layout) == together(whole.model, whole.layout)


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
    assert not engine.together.answers
    answers = by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in ASKED[:3]))
    for (_, answer, _), (tokens, seed, most) in zip(answers, ASKED, strict=False):
        assert answer == alone("qwen3_5", tokens, seed, most)


def test_an_answer_that_closes_a_page_of_compressed_entries_is_the_one_without_a_cache(make: Make) -> None:
    """DeepSeek-V4 makes an entry of 4 tokens, and one of 128: both kinds close while it speaks."""
    model = a_model("deepseek_v4")
    engine, page = make(model, start=False), model.layout.page_tokens
    assert page == model.layout.chunk_tokens == 128
    asked = [(page - 3, 3, 5), (2 * page - 2, 4, 4)]
    answers = by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in asked))
    for (_, answer, _), (tokens, seed, most) in zip(answers, asked, strict=True):
        prompt = a_prompt(tokens, seed)
        assert answer == Uncached(model, most)(prompt).tokens
        going_on = [*prompt, *answer, 8]
        ((_, further, last),) = by_hand(engine, a_request(going_on, 1))
        assert last.usage is not None
        assert last.usage.cached == (len(prompt) + len(answer) - 1) // page * page  # the page that was said included
        assert further == Uncached(model, 1)(going_on).tokens


# --- memory


@every_family
def test_what_a_running_request_has_beside_its_pages_is_known_beforehand(family: str, make: Make) -> None:
    model = a_model(family)
    engine = make(model, start=False)
    engine.submit(a_request(a_prompt(CHUNK), 9))
    turns(engine, lambda: any(not job.prefilling for job in engine.scheduler.running))
    (job,) = engine.scheduler.running
    own = [tape._data for tape in job.state._tapes.values() if not isinstance(tape, PagedTape)]
    own += job.state._states.values()
    assert sum(tensor.nbytes for tensor in own) == model.layout.bytes_in_use


@every_family
def test_a_preempted_request_resumes_with_the_same_answer(family: str, make: Make) -> None:
    """Slots for two of them at most; each needs more the longer its answer gets."""
    model = a_model(family)
    if family in STATES_ALONE or model.layout.page_tokens != PAGE:
        return  # its answers take no slots, or none grows by a page
    engine = make(model, start=False, device=room_for(model, 5 * PAGE, shared=True), host=4 * MIB)
    requests = [engine.submit(a_request(a_prompt(tokens, seed), most)) for tokens, seed, most in GROWING]
    turns(engine, lambda: engine.counts.finished == len(GROWING), at_most=4000)
    assert engine.counts.preempted > 0
    for request, (tokens, seed, most) in zip(requests, GROWING, strict=True):
        _, answer, last = request.result(0.1)
        assert last.finish is Finish.LENGTH
        assert answer == alone(family, tokens, seed, most), (tokens, seed)
    assert not engine.cache.scheduler.core.leases
    assert engine.load() == (0, 0)


def test_a_deterministic_answer_is_the_same_to_the_last_bit_whichever_requests_run_or_are_preempted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model("qwen3_5", torch.bfloat16)
    real = turns_module.forward
    logits: dict[int, dict[int, Tensor]] = {}  # by length of the prompt, by tokens before
    differed: list[tuple[int, int]] = []

    def recorded(net: Any, state: PagedWorkspace, ids: Tensor) -> Tensor:
        found = real(net, state, ids)
        known = logits.setdefault(state.max_tokens, {}).setdefault(state.tokens, found.clone())
        if not torch.equal(known, found):
            differed.append((state.max_tokens, state.tokens))
        return found

    monkeypatch.setattr(turns_module, "forward", recorded)
    for tokens, seed, most in GROWING:
        by_hand(make(model, start=False, deterministic=True), a_request(a_prompt(tokens, seed), most))
    engine = make(model, start=False, deterministic=True, device=room_for(model, 5 * PAGE), host=4 * MIB)
    by_hand(engine, *(a_request(a_prompt(tokens, seed), most) for tokens, seed, most in GROWING))
    assert engine.counts.preempted > 0
    assert not differed


# --- an answer is found again


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_next_turn_of_a_conversation_finds_its_own_answer_unless_the_engine_is_deterministic(
    deterministic: bool, make: Make
) -> None:
    engine, prompt = make(start=False, deterministic=deterministic), a_prompt(50)
    ((_, answer, _),) = by_hand(engine, a_request(prompt, 20))
    ((_, _, last),) = by_hand(engine, a_request([*prompt, *answer, *a_prompt(20, 3)], 2))
    assert last.usage is not None
    assert last.usage.cached == (0 if deterministic else CHUNK)


# --- fairness, in turns


def test_a_short_prompt_is_not_held_up_by_long_ones(make: Make) -> None:
    engine = make(start=False, max_running=16, turn_tokens=2 * CHUNK)
    for seed in range(6):
        engine.submit(a_request(a_prompt(7 * CHUNK, seed), 2))
    for _ in range(3):
        engine._turn()
    short = engine.submit(a_request(a_prompt(20, 77), 2))
    assert turns(engine, lambda: not short.outputs.empty()) <= 6


def test_prompts_that_share_a_prefix_and_come_together_compute_it_once(make: Make) -> None:
    """A recurrent state is kept where they part, for the first of them is told."""
    engine, stem = make(start=False), a_prompt(2 * CHUNK)
    requests = [a_request([*stem, *a_prompt(CHUNK + 9, seed)], DECODED) for seed in range(3)]
    answers = by_hand(engine, *requests)
    assert engine.counts.computed_tokens <= 2 * CHUNK + 3 * (CHUNK + 9)
    for request, (_, answer, last) in zip(requests, answers, strict=True):
        ((_, expected, _),) = by_hand(make(start=False), a_request(request.prompt, DECODED))
        assert answer == expected
        assert last.usage is not None
    assert [last.usage and last.usage.cached for *_, last in answers] == [0] + [2 * CHUNK] * 2


def test_a_request_that_waits_for_a_prefix_goes_on_when_no_other_computes_it_any_more(make: Make) -> None:
    engine, stem = make(start=False, turn_tokens=CHUNK), a_prompt(5 * CHUNK)
    first, second = (engine.submit(a_request([*stem, seed], 3)) for seed in range(2))
    for _ in range(3):
        engine._turn()
    assert engine.load() == (1, 1)
    engine.abort(first)
    turns(engine, lambda: engine.counts.finished == 2)
    assert second.result(0.1)[2].finish is Finish.LENGTH
