"""An answer's tokens and text: where it ends, what is held back, and how likely each token was."""

import pytest
import torch
from recorder import Recorder, pieces_of, say, scripted

from engines import PAGE, Make, a_model, a_prompt, a_request, by_hand, room_for, turns
from kvarve.reference.engine.requests import Finish, Request, TokenUsage

# --- the text of an answer


def test_an_answer_ends_at_the_end_token_which_is_no_text(make: Make, recorder: Recorder) -> None:
    pieces = scripted(make, recorder, "hello", ())
    assert [piece.text for piece in pieces] == ["h", "e", "l", "l", "o", ""]
    assert pieces[-1].finish is Finish.STOP
    assert pieces[-1].tokens == (256,)
    assert pieces[-1].usage == TokenUsage(5, 6, 0, 0, 0)


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


def test_a_seed_repeats_an_answer_whichever_other_requests_run(make: Make) -> None:
    engine = make(start=False)

    def ask(seed: int | None) -> Request:
        return a_request(a_prompt(30), 12, temperature=1.5, seed=seed)

    ((_, first, _),) = by_hand(engine, ask(1))
    answers = [tokens for _, tokens, _ in by_hand(engine, ask(2), ask(None), ask(1), ask(3), ask(1))]
    assert answers[2] == answers[4] == first
    assert len({tuple(tokens) for tokens in (answers[0], answers[3], first)}) == 3


@pytest.mark.parametrize(("least", "expected"), [(0, "a "), (2, "a "), (3, "a END b "), (4, "a END b "), (13, None)])
def test_a_stop_text_counts_if_it_begins_after_min_tokens(
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
    wide, narrow = make(start=False), make(start=False, device=room_for(a_model(), 5 * PAGE))

    def ask(seed: int) -> Request:
        return a_request(a_prompt(30, seed), 7 + seed, repetition_penalty=100.0, frequency_penalty=2.0)

    expected = [by_hand(wide, ask(seed))[0][1] for seed in range(3)]
    for seed, tokens in enumerate(expected):
        assert len({*tokens} - {*a_prompt(30, seed)}) == 7 + seed
    found = by_hand(narrow, *map(ask, range(3)))
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
