"""Exact hits on answers: they are computed again by prefill when idle, and decoded pages serve nobody else."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engines import CHUNK, Make, a_model, a_prompt, a_request, by_hand, engines, turns
from kvarve.cache.scheduler import Prompt
from kvarve.core.observe.reasons import Reason
from kvarve.pages.keys import pack
from kvarve.pages.pools import MEMORY_TIERS
from kvarve.reference.engine.answers_again import MOST, AnswersAgain
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.requests import Request, Sampling

make = pytest.fixture(engines)


def watching(prompt: list[int], max_tokens: int, read: bool = True) -> tuple[Request, dict[int, Tensor]]:
    """A request, and the logits of each of its answer's tokens by their position."""
    seen: dict[int, Tensor] = {}

    def watch(at: int, logits: Tensor) -> None:
        if at >= len(prompt):
            seen[at] = logits.clone()

    return Request(prompt, Sampling(max_tokens, ignore_eos=True), read_cache=read, watch=watch), seen


def cached(engine: Engine, prompt: list[int]) -> int:
    """The tokens of a prompt that were cached; the answer has no whole chunk of its own."""
    ((_, _, last),) = by_hand(engine, a_request(prompt, 1))
    assert last.usage is not None
    return last.usage.cached


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss_wide", "deepseek_v32"])
def test_conversations_in_batches_hit_their_answers_and_no_bit_of_a_logit_changes(make: Make, family: str) -> None:
    engine, dice = make(a_model(family), exact=True, start=False), random.Random(5)
    talks = [a_prompt(dice.randrange(20, 150), seed) for seed in range(3)]
    for turn in range(2):
        answers = by_hand(engine, *(a_request(talk, dice.randrange(40, 90)) for talk in talks))
        turns(engine, engine.at_rest)
        for at, (_, ids, _) in enumerate(answers):
            whole = (len(talks[at]) + len(ids)) // CHUNK * CHUNK
            talks[at] = [*talks[at], *ids, *a_prompt(dice.randrange(5, 60), at + 10 * turn)]
            (warm, seen), (cold, same) = (watching(talks[at], 3, read) for read in (True, False))
            (_, found, last), (_, other, _) = (*by_hand(engine, warm), *by_hand(engine, cold))  # each alone
            assert last.usage is not None and last.usage.cached == whole, "all that was known"
            assert found == other and seen.keys() == same.keys()
            assert all(torch.equal(seen[position], same[position]) for position in seen)
    assert engine.counts.recomputed_tokens > 0


def test_an_answer_is_a_hit_once_it_was_computed_again(make: Make) -> None:
    engine, prompt = make(exact=True, start=False), a_prompt(CHUNK - 4)
    ((_, ids, _),) = by_hand(engine, a_request(prompt, 8))
    turns(engine, engine.at_rest)
    assert cached(engine, [*prompt, *ids, 7]) == CHUNK


def test_a_flush_forgets_answers(make: Make) -> None:
    engine = make(exact=True, start=False)
    by_hand(engine, a_request(a_prompt(CHUNK - 4), 8))
    assert not engine.at_rest()
    engine.flush_memory(MEMORY_TIERS)
    assert engine.at_rest()


def test_an_answer_whose_prompt_has_left_memory_is_not_computed_again(make: Make) -> None:
    engine = make(exact=True, start=False)
    by_hand(engine, a_request(a_prompt(CHUNK + 60), 8))
    engine.cache.scheduler.core.flush(MEMORY_TIERS)
    turns(engine, engine.at_rest)
    assert engine.counts.recomputed_tokens == 0


def test_without_time_to_compute_it_again_an_answer_is_no_hit_and_that_is_the_reason(make: Make) -> None:
    engine, prompt = make(exact=True, start=False), a_prompt(CHUNK - 4)
    ((_, ids, _),) = by_hand(engine, a_request(prompt, 8))
    assert cached(engine, [*prompt, *ids, 7]) == 0, "decoded pages serve nobody else"
    assert engine.counts.reasons[Reason.ANSWER] == CHUNK
    assert sum(engine.counts.reasons.values()) == len(prompt) + len(prompt) + len(ids) + 1


def test_an_answer_that_is_computed_again_when_its_next_turn_comes_is_computed_once(make: Make) -> None:
    engine, prompt = make(exact=True, start=False, turn_tokens=CHUNK), a_prompt(CHUNK - 4)
    ((_, ids, _),) = by_hand(engine, a_request(prompt, CHUNK + 8))
    turns(engine, lambda: engine.counts.recomputed_tokens == CHUNK)
    assert cached(engine, [*prompt, *ids, 7]) == CHUNK
    turns(engine, engine.at_rest)
    assert engine.counts.recomputed_tokens == CHUNK, "the rest was computed with the next turn"


def test_a_request_goes_before_an_answer_that_is_computed_again_and_loses_none_of_its_chunks(make: Make) -> None:
    engine = make(exact=True, start=False, turn_tokens=CHUNK)
    by_hand(engine, a_request(a_prompt(CHUNK - 4), CHUNK + 8))
    turns(engine, lambda: engine.counts.recomputed_tokens == CHUNK)
    by_hand(engine, a_request(a_prompt(CHUNK + 1, 9), 1))
    assert engine.counts.recomputed_tokens == CHUNK and engine.load() == (0, 0)
    turns(engine, engine.at_rest)
    assert engine.counts.recomputed_tokens == 2 * CHUNK, "each chunk once"


@pytest.mark.long
def test_a_shutdown_meanwhile_leaves_no_lease(make: Make) -> None:
    engine = make(exact=True, start=False, turn_tokens=CHUNK)
    by_hand(engine, a_request(a_prompt(CHUNK - 4), CHUNK + 8))
    turns(engine, lambda: engine.counts.recomputed_tokens == CHUNK)
    assert engine._again is not None
    engine.shutdown(5)
    assert not engine.cache.scheduler.core.leases


def prepared(tokens: Sequence[int], salt: str = "") -> Prompt:
    return Prompt(salt.encode(), pack(tokens), page_tokens=2)


def test_only_answers_with_a_chunk_of_their_own_wait_and_none_that_a_later_prompt_has() -> None:
    waiting = AnswersAgain(4, prepared)
    waiting.ended([1, 2, 3, 4], [5], "", 0)
    assert not len(waiting), "the chunk is the prompt's"
    waiting.ended([1, 2, 3], [4], "", 0)
    waiting.ended([1, 2, 3], [4], "salt", 0)
    assert len(waiting) == 2
    waiting.comes(prepared([1, 2, 3, 4, 9]))
    assert waiting.take().salt == "salt" and not len(waiting)
    waiting.ended([1, 2, 3], [4], "", 0)
    waiting.ended([1, 2, 3, 4, 5], [6, 7, 8, 9], "", 0)
    last = waiting.take()
    assert (last.ids, last.known, last.tokens) == ([1, 2, 3, 4, 5, 6, 7, 8], 4, 8), "that has the first in it"
    assert not len(waiting)
    for number in range(MOST + 1):
        waiting.ended([number, 2, 3], [4], "", 0)
    assert len(waiting) == MOST and waiting.take().ids[0] == MOST, "the last comes first"
    assert [waiting.take().ids[0] for _ in range(MOST - 1)][-1] == 1, "and the oldest went"
