"""Which tokens may come, and how often: the chances are known, and tokens are drawn until each has come up."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.reference.engine.requests import Sampling
from kvarve.reference.engine.sampling import BLOCK, Draw, _weigh, choose_all, likelihood

CHANCES = (0.4, 0.05, 0.3, 0.15, 0.1)  # of tokens 0 to 4


def logits(chances: Sequence[float] = CHANCES) -> Tensor:
    return torch.tensor(chances).log()


def choose(logits: Tensor, *asked: Any) -> int:
    (token,) = choose_all(logits[None], [Draw(*asked)])
    assert token is not None
    return token


def drawn(times: int = 500, chances: Sequence[float] = CHANCES, **settings: Any) -> Counter[int]:
    random = torch.Generator().manual_seed(1)
    sampling = Sampling(**({"temperature": 1.0} | settings))
    return Counter(choose(logits(chances), sampling, random) for _ in range(times))


def expect(found: Counter[int], chances: dict[int, float]) -> None:
    """Just these tokens, about as often as their chances say (five standard deviations of slack)."""
    times, whole = found.total(), sum(chances.values())
    assert set(found) == set(chances)
    for token, chance in chances.items():
        share = chance / whole
        assert abs(found[token] / times - share) < 5 * math.sqrt(share * (1 - share) / times), (token, found)


def test_top_k_leaves_the_k_likeliest() -> None:
    assert set(drawn(50, top_k=1)) == {0}
    expect(drawn(top_k=3), {0: 0.4, 2: 0.3, 3: 0.15})


def test_tokens_as_likely_as_the_last_of_top_k_stay_too() -> None:
    expect(drawn(chances=(0.4, 0.2, 0.2, 0.1, 0.1), top_k=2), {0: 0.4, 1: 0.2, 2: 0.2})


def test_min_p_drops_what_is_less_likely_than_that_share_of_the_best() -> None:
    assert drawn(200, min_p=0.0) == drawn(200)
    expect(drawn(min_p=0.3), {0: 0.4, 2: 0.3, 3: 0.15})
    assert set(drawn(50, min_p=1.0)) == {0}


def test_top_p_counts_the_chances_among_those_that_top_k_has_left() -> None:
    # Of 0.4, 0.3 and 0.15 the first two are 82%; of everything they are 70%, and a third would be needed for 80%.
    expect(drawn(top_k=3, top_p=0.8), {0: 0.4, 2: 0.3})
    expect(drawn(top_p=0.8), {0: 0.4, 2: 0.3, 3: 0.15})


def test_min_p_comes_last_and_looks_at_what_the_others_have_left() -> None:
    # Were it first, 0.4 alone would be 57% of what it leaves, and top_p would stop there.
    expect(drawn(top_p=0.5, min_p=0.5), {0: 0.4, 2: 0.3})


def test_the_temperature_comes_before_the_limits() -> None:
    assert set(drawn(min_p=0.3, temperature=5.0)) == {0, 1, 2, 3, 4}
    assert set(drawn(min_p=0.3, temperature=0.2)) == {0}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1, got -0.1"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
        ({"min_p": math.nan}, "min_p must be between 0 and 1, got nan"),
        ({"logit_bias": ((3, 0.0), (4, -101.0))}, "logit_bias must be between -100 and 100"),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias must be between -100 and 100"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be between -2 and 2, got 2.1"),
        ({"presence_penalty": math.nan}, "presence_penalty must be between -2 and 2, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 100, got 0.0"),
        ({"min_tokens": -1}, "min_tokens must be between 0 and max_tokens 16, got -1"),
        ({"min_tokens": 17}, "min_tokens must be between 0 and max_tokens 16, got 17"),
        ({"logprobs": -1}, "logprobs must be between 0 and 20, got -1"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Sampling(**settings)


# --- penalties and biases

GIVEN = (2.0, -1.0, 1.5, 0.5, 0.0)


def weighed(
    prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = (), ends: Sequence[int] = (), **settings: Any
) -> list[float]:
    """The logits from which a token is chosen."""
    given = torch.tensor(GIVEN)
    _weigh(given, Draw(Sampling(**settings), None, prompt_ids, output_ids, ends))
    return [float(logit) for logit in given.tolist()]


def test_frequency_penalty_counts_output_tokens_and_presence_penalty_only_whether_they_occur() -> None:
    output_ids = [0, 0, 0, 2]
    assert weighed([4, 4], output_ids, frequency_penalty=0.5) == [0.5, -1.0, 1.0, 0.5, 0.0]
    assert weighed([4, 4], output_ids, presence_penalty=0.5) == [1.5, -1.0, 1.0, 0.5, 0.0]
    assert weighed([4, 4], output_ids, presence_penalty=-1.0, frequency_penalty=1.0) == [0.0, -1.0, 1.5, 0.5, 0.0]
    assert weighed([4, 4], [], presence_penalty=1.0, frequency_penalty=1.0) == [*GIVEN]


def test_repetition_penalty_makes_prompt_and_output_tokens_less_likely_whatever_the_logits_sign() -> None:
    assert weighed([1, 1, 2], [0], repetition_penalty=2.0) == [1.0, -2.0, 0.75, 0.5, 0.0]
    assert weighed([1, 1, 2], [0], repetition_penalty=0.5) == [4.0, -0.5, 3.0, 0.5, 0.0]


def test_no_end_is_chosen_within_min_tokens() -> None:
    never = -math.inf
    assert weighed(output_ids=[1], ends=[0, 3], min_tokens=2) == [never, -1.0, 1.5, never, 0.0]
    assert weighed(output_ids=[1, 1], ends=[0, 3], min_tokens=2) == weighed(output_ids=[1], min_tokens=2) == [*GIVEN]
    assert weighed(output_ids=[1], ends=[0], min_tokens=2, logit_bias=((0, 100.0),), repetition_penalty=2.0)[0] == never


def test_the_penalties_come_after_the_bias_and_before_the_temperature() -> None:
    assert weighed([0], [], repetition_penalty=2.0, logit_bias=((0, -3.0),))[0] == -2.0
    sampling = Sampling(temperature=0.0, presence_penalty=2.0)
    assert choose(torch.tensor(GIVEN), sampling, None) == 0
    assert choose(torch.tensor(GIVEN), sampling, None, [], [0]) == 2


# --- many rows at once

ASKED = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1e-40, "top_p": 0.4},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 1.0, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0], ids=["equal", "flat", "normal", "peaked"])
def test_a_row_draws_the_same_token_in_a_batch_as_alone(spread: float) -> None:
    given = spread * torch.randn(3 * BLOCK + 1, 500, generator=torch.Generator().manual_seed(3))

    def draws() -> list[Draw]:
        return [
            Draw(Sampling(**ASKED[row % len(ASKED)]), torch.Generator().manual_seed(row), [1], [2, 3], [4])
            for row in range(len(given))
        ]

    before = given.clone()
    together = choose_all(given, draws())
    assert torch.equal(given, before), "they are the model's"
    alone = [choose(logits, *draw) for logits, draw in zip(given, draws(), strict=True)]
    assert together == alone
    backwards = choose_all(given.flip(0), draws()[::-1])
    assert backwards == alone[::-1]


def test_a_row_that_is_no_number_takes_no_other_along() -> None:
    given = torch.tensor([CHANCES] * 4).log()
    given[1, 2] = math.nan
    given[3] = -math.inf
    found = choose_all(given, [Draw(Sampling(temperature=1.0, top_p=0.9), None)] * 4)
    assert [token is None for token in found] == [False, True, False, True]


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0], ids=["equal", "flat", "normal", "peaked"])
def test_top_p_leaves_what_a_full_sort_in_double_leaves(spread: float, top_p: float) -> None:
    """Of tokens that are as likely as the last one, any may be dropped, but exactly as many as needed."""
    logits = spread * torch.randn(400, generator=torch.Generator().manual_seed(5))
    best = logits.double().softmax(-1).sort(descending=True).values
    kept = int((best.cumsum(-1) - best < top_p + 1e-6).sum())
    random, sampling = torch.Generator().manual_seed(1), Sampling(temperature=1.0, top_p=top_p)
    found = {choose(logits, sampling, random) for _ in range(400)}
    chances = logits.double().softmax(-1)
    assert len(found) <= kept
    assert min(float(chances[token]) for token in found) >= float(best[kept - 1]) * (1 - 1e-6)


# --- how likely


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_likelihood_is_the_models_own_in_float32(dtype: torch.dtype) -> None:
    given = (logits() + 3).to(dtype)  # no distribution yet
    found = likelihood(given, 3, 2, offset=7)
    expected = given.float() - given.float().logsumexp(-1)
    assert (found.token, found.offset) == (3, 7)
    assert found.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 2]
    assert [value for _, value in found.top] == pytest.approx([float(expected[0]), float(expected[2])], abs=1e-6)
