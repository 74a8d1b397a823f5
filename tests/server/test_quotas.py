"""Limits of keys: a bucket fills evenly, and what was taken is given back by time alone."""

import random

import pytest

from kvarve.reference.server.keyfile import Key
from kvarve.reference.server.quotas import MOST_WAIT_S, OverQuota, Quotas, Visit

MINUTE_S = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def key(**limits: int) -> Key:
    return Key("a", "0" * 64, **limits)


def used(quotas: Quotas, of: Key, prompt: int, output: int) -> Visit:
    visit = quotas.begin(of)
    visit.prompt(prompt)
    visit.answered(output)
    visit.end()
    return visit


def test_a_minute_has_so_many_requests_and_the_wait_that_is_told_is_enough(quotas: Quotas, clock: Clock) -> None:
    mine = key(requests_per_minute=6)
    for _ in range(6):
        quotas.begin(mine)
    with pytest.raises(OverQuota) as over:
        quotas.begin(mine)
    assert over.value.limit == "requests_per_minute" and over.value.wait_s == pytest.approx(10)
    clock.now += over.value.wait_s + 1e-6
    quotas.begin(mine)
    with pytest.raises(OverQuota):
        quotas.begin(mine)
    clock.now += 100 * MINUTE_S
    for _ in range(6):
        quotas.begin(mine)
    with pytest.raises(OverQuota):
        quotas.begin(mine)


def test_tokens_of_prompts_and_answers_count_and_a_long_prompt_is_answered_first(quotas: Quotas, clock: Clock) -> None:
    mine = key(tokens_per_minute=600)
    used(quotas, mine, 500, 50)
    used(quotas, mine, 5000, 0)  # there were 50 left
    with pytest.raises(OverQuota) as over:
        quotas.begin(mine)
    assert over.value.limit == "tokens_per_minute" and over.value.wait_s == pytest.approx((4950 + 1) / 10)
    clock.now += over.value.wait_s
    used(quotas, mine, 1, 0)


def test_requests_that_begin_together_do_not_all_overdraw(quotas: Quotas) -> None:
    mine = key(tokens_per_minute=100)
    visits = [quotas.begin(mine) for _ in range(10)]
    visits[0].prompt(100)
    for visit in visits[1:]:
        with pytest.raises(OverQuota):
            visit.prompt(100)
    assert quotas.counts()["prompt_tokens"] == {"a": 100}


def test_an_answer_counts_while_it_is_computed(quotas: Quotas) -> None:
    mine = key(tokens_per_minute=100)
    running = quotas.begin(mine)
    running.prompt(1)
    running.answered(98)
    quotas.begin(mine).end()
    running.answered(1)
    with pytest.raises(OverQuota):
        quotas.begin(mine)
    assert quotas.counts()["output_tokens"] == {"a": 99} and quotas.counts()["running"] == {"a": 1}


def test_the_time_of_a_full_bucket_is_not_kept_for_a_long_answer(quotas: Quotas, clock: Clock) -> None:
    mine = key(tokens_per_minute=60)
    running = quotas.begin(mine)
    clock.now += MINUTE_S  # nothing was used of the first minute
    running.answered(60)
    running.end()
    with pytest.raises(OverQuota):
        quotas.begin(mine)


def test_so_many_requests_run_at_once_and_one_that_ends_makes_room(quotas: Quotas) -> None:
    mine = key(concurrent_requests=2)
    first, _ = quotas.begin(mine), quotas.begin(mine)
    with pytest.raises(OverQuota) as over:
        quotas.begin(mine)
    assert over.value.limit == "concurrent_requests" and over.value.wait_s > 0
    first.end()
    quotas.begin(mine)
    assert quotas.counts()["running"] == {"a": 2}


def test_a_refused_request_takes_nothing(quotas: Quotas) -> None:
    mine = key(requests_per_minute=2, concurrent_requests=1)
    visit = quotas.begin(mine)
    for _ in range(5):
        with pytest.raises(OverQuota):
            quotas.begin(mine)
    visit.end()
    quotas.begin(mine)
    assert quotas.counts()["refused"] == {"a.concurrent_requests": 5} and quotas.counts()["requests"] == {"a": 2}


def test_a_changed_limit_counts_at_once_and_what_was_used_stays_used(quotas: Quotas) -> None:
    used(quotas, key(tokens_per_minute=1000), 900, 0)
    with pytest.raises(OverQuota):
        used(quotas, key(tokens_per_minute=1), 1, 0), used(quotas, key(tokens_per_minute=1), 1, 0)
    used(quotas, key(), 10**9, 0)
    used(quotas, key(tokens_per_minute=1), 1, 0)


def test_no_wait_is_longer_than_an_hour(quotas: Quotas) -> None:
    mine = key(tokens_per_minute=1)
    used(quotas, mine, 10**12, 0)
    with pytest.raises(OverQuota) as over:
        quotas.begin(mine)
    assert over.value.wait_s == MOST_WAIT_S


@pytest.mark.parametrize("seed", range(5))
def test_in_any_minute_no_more_is_admitted_than_two_minutes_allow(seed: int, quotas: Quotas, clock: Clock) -> None:
    draw, mine = random.Random(seed), key(requests_per_minute=30)
    admitted = list[float]()
    for _ in range(3000):
        clock.now += draw.expovariate(2)
        try:
            quotas.begin(mine).end()
            admitted.append(clock.now)
        except OverQuota:
            pass
    for at in admitted:
        assert sum(at <= other < at + MINUTE_S for other in admitted) <= 60, seed
    minutes = (admitted[-1] - admitted[0]) / MINUTE_S
    assert 29 * minutes <= len(admitted) <= 30 * minutes + 31, seed
