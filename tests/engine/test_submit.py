"""`submit` refuses bad requests on the caller's thread, so that they never reach the engine's own."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines import CHUNK, Make, a_prompt, a_request, alone, by_hand, turns
from kvarve.core.observe.reasons import HITS
from kvarve.errors import Busy, ConfigError
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.requests import Request, Sampling
from tests.sim.models import VOCAB


def refused(engine: Engine, told: str, **request: Any) -> None:
    with pytest.raises(ConfigError, match=told):
        engine.submit(a_request(**{"prompt": [1, 2]} | request))


@pytest.mark.parametrize("salt", ["\ud800", "tenant \udcff", "a\udfff\ud800b"], ids=ascii)
def test_a_salt_that_has_no_bytes_is_refused_and_the_engine_serves_on(salt: str, make: Make) -> None:
    engine = make()
    refused(engine, "the salt has half a character", salt=salt)
    assert engine.submit(a_request(a_prompt(10, 1), 2)).result()[1] == alone("qwen3_5", 10, 1, 2)
    assert not engine.broken


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"salt": None}, "salt must be text, got None"),
        ({"salt": b"tenant"}, "salt must be text"),
        ({"priority": "high"}, "priority must be a whole number, got 'high'"),
        ({"priority": None}, "priority must be a whole number"),
        ({"prompt": [1.5, 2.0]}, "the prompt must be a row of token ids"),
        ({"prompt": [True, False]}, "the prompt must be a row of token ids"),
        ({"prompt": [[1], [2]]}, "the prompt must be a row of token ids"),
        ({"prompt": [[1], [2, 3]]}, "the prompt must be a row of token ids"),
        ({"prompt": ["1"]}, "the prompt must be a row of token ids"),
        ({"prompt": [None]}, "must be in the model's vocabulary"),
        ({"prompt": [1, 1 << 70]}, "must be in the model's vocabulary"),
        ({"prompt": [VOCAB]}, "must be in the model's vocabulary of 300"),
        ({"prompt": [5, -1]}, "must be in the model's vocabulary of 300"),
        ({"prompt": []}, "the prompt must not be empty"),
    ],
    ids=str,
)
def test_a_request_of_another_form_is_refused_and_takes_no_place(wrong: dict[str, Any], told: str, make: Make) -> None:
    engine = make(start=False, max_running=1, max_waiting=1)
    places = engine.capacity_left()
    for _ in range(3):
        refused(engine, told, **wrong)
    assert engine.capacity_left() == places == 2
    by_hand(engine, a_request([1] * 20, 2), a_request([2] * 20, 2))


class Watched(Sequence[int]):
    """A prompt that counts how often it is iterated over."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.looks = tokens, 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: Any) -> Any:
        return self.tokens[at]

    def __iter__(self) -> Iterator[int]:
        self.looks += 1
        return iter(self.tokens)

    def __array__(self, *args: Any, **kwargs: Any) -> NDArray[np.int64]:
        self.looks += 1
        return np.array(self.tokens, *args)


def test_a_prompt_is_looked_at_once_however_many_answers_it_gets(make: Make) -> None:
    engine, prompt = make(start=False), Watched(a_prompt(100))
    engine.submit(*[Request(prompt, Sampling(2, seed=seed)) for seed in range(16)])
    assert prompt.looks == 1
    twice = Watched(a_prompt(100))
    with pytest.raises(ConfigError, match="max_tokens 2000"):
        engine.submit(Request(twice, Sampling(2)), Request(twice, Sampling(2000)))
    assert twice.looks == 1


def test_of_several_samples_the_first_to_begin_says_what_was_cached_of_their_prompt(make: Make) -> None:
    engine, prompt = make(start=False), a_prompt(3 * CHUNK)
    first = Request(prompt, Sampling(2))
    more = [Request(prompt, Sampling(2), sample_of=first.number) for _ in range(3)]
    engine.submit(first, *more)
    engine.abort(first)  # it never begins
    turns(engine, lambda: engine.counts.finished == 4)
    usages = [one.result(0.1)[2].usage for one in (first, *more)]
    assert all(usage is not None and usage.cached == 0 for usage in usages)
    counts = engine.counts
    assert counts.prompt_tokens == counts.request_prompt_tokens.sum == len(prompt)
    told = {reason.value: tokens for reason, tokens in counts.reasons.items() if tokens}
    assert told.pop("another_sample") == 2 * len(prompt) and sum(told.values()) == len(prompt)
    assert not told.keys() & {hit.value for hit in HITS}
    for rate, tokens in ((counts.admitted_rate, len(prompt)), (counts.cached_rate, 0)):
        assert sum(amount for _, amount in rate._ring) == tokens


def test_a_sample_of_another_prompt_is_refused(make: Make) -> None:
    engine, first = make(start=False), a_request([1, 2, 3], 1)
    for odd in (
        a_request([1, 2, 3], 1, sample_of=first.number),  # equal tokens, but not the same request's
        a_request(first.prompt, 1, sample_of=first.number, salt="another"),
        a_request(first.prompt, 1, sample_of=first.number + 99),
    ):
        with pytest.raises(ConfigError, match="must have its sample's prompt, and come before it"):
            engine.submit(first, odd)
    with pytest.raises(ConfigError, match="come before it"):
        engine.submit(a_request(first.prompt, 1, sample_of=first.number), first)
    assert engine.load() == (0, 0)


def test_capacity_left_are_those_that_submit_would_take(make: Make) -> None:
    engine = make(start=False, max_running=1, max_waiting=2)
    for left in (3, 2, 1):
        assert engine.capacity_left() == left
        engine.submit(a_request([1, 2, 3], 1))
    assert engine.capacity_left() == 0
    with pytest.raises(Busy):
        engine.submit(a_request([1, 2, 3], 1))
