"""Admission on plain numbers, and the law that no request waits in vain."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import CHUNK, MIB, PAGE, Make, a_model, a_prompt, a_request, alone, by_hand, every_family, room_for, turns
from kvarve.errors import ConfigError
from kvarve.reference.engine.admission import OVERTAKEN, Running, Waiting, begins, turns_until, youngest
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.requests import Finish
from tests.sim.law import waits_in_vain
from tests.sim.models import STATES_ALONE


def waiting(need: int, turns: int = 10, **more: Any) -> Waiting:
    return Waiting([need], turns, **more)


def begin(places: int, available: int, line: list[Waiting], running: list[Running] | None = None) -> list[int]:
    return [each.at for each in begins(places, [available], line, range(len(line)), running or [])]


# --- decisions


def test_requests_are_admitted_while_running_slots_and_pages_last() -> None:
    assert begin(2, 100, [waiting(10)] * 4) == [0, 1]
    assert begin(9, 30, [waiting(10)] * 4) == [0, 1, 2]
    assert begin(9, 0, [waiting(0)]) == [0]


def test_a_page_of_growth_stays_for_each_running_request_that_may_grow() -> None:
    running = [Running(50, 9, grows=True), Running(50, 9, grows=False)]
    assert begin(9, 10, [waiting(10)], running) == []
    assert begin(9, 11, [waiting(10)], running) == [0]
    assert begin(9, 21, [waiting(10, grows=True), waiting(10)], running) == [0]
    assert begin(9, 22, [waiting(10, grows=True), waiting(10)], running) == [0, 1]


def test_a_request_that_does_not_fit_is_passed_by_eight_and_by_those_that_end_in_time() -> None:
    running = [Running(50, 20, grows=False)]  # its 50 pages come back in 20 turns
    for passed in range(OVERTAKEN + 2):
        large = waiting(40, passed=passed)
        assert begin(9, 10, [large, waiting(5, turns=20)], running) == [1]
        assert begin(9, 10, [large, waiting(5, turns=21)], running) == ([1] if passed < OVERTAKEN else [])


def test_in_one_turn_too_a_request_is_passed_by_eight_at_most() -> None:
    running = [Running(50, 20, grows=False)]
    line = [waiting(90), *[waiting(1, turns=30)] * 20, *[waiting(1, turns=3)] * 4]
    found = begins(30, [50], line, range(len(line)), running)
    assert [each.at for each in found] == [*range(1, 9), *range(21, 25)]
    assert [each.not_delayed for each in found] == [frozenset()] * 8 + [frozenset({0})] * 4


def test_a_request_that_waits_for_a_copy_delays_no_other_and_counts_those_that_overtake_it() -> None:
    assert begin(9, 10, [waiting(90, waits=True, passed=99), waiting(5, turns=99)]) == [1]


def test_a_request_that_could_begin_is_not_overtaken_more_often_in_one_round() -> None:
    """The other is tried first, since it finds more in memory; then the first is due, and has to be tried."""
    line = [waiting(5, passed=OVERTAKEN - 1), waiting(5), waiting(5)]
    assert [each.at for each in begins(9, [100], line, [1, 2, 0], [])] == [1]


def test_slots_come_free_when_running_requests_end_by_their_max_tokens() -> None:
    running = [Running(10, 30, True), Running(20, 5, True)]
    assert turns_until([5], [10], 2, running) == 0
    assert turns_until([20], [10], 2, running) == 5
    assert turns_until([31], [10], 2, running) == 30
    assert turns_until([99], [10], 2, running) == 30


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
def test_the_youngest_is_the_one_that_was_admitted_last(began: list[int]) -> None:
    assert began[youngest(began)] == max(began)


@settings(max_examples=30)
@given(st.data())
def test_no_decision_takes_more_than_there_is(data: st.DataObject) -> None:
    available, places = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 6))
    line = [
        waiting(need, turns, passed=passed, grows=grows, waits=waits)
        for need, turns, passed, grows, waits in data.draw(
            st.lists(
                st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 9), st.booleans(), st.booleans()),
                max_size=12,
            )
        )
    ]
    running = [
        Running(*each)
        for each in data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40), st.booleans()), max_size=6))
    ]
    order = data.draw(st.permutations(range(len(line))))
    found = begins(places, [available], line, order, running)
    growth = sum(each.grows for each in running)
    assert len(found) <= places
    for each in found:
        assert not line[each.at].waits
        assert line[each.at].needs[0] + growth <= available
        available, growth = available - line[each.at].needs[0], growth + line[each.at].grows
        assert all(other < each.at and line[other].needs[0] > 0 for other in each.not_delayed)


# --- a prompt that fills the device


def exact(family: str, make: Make, pages: int, **settings: Any) -> tuple[Engine, int]:
    model = a_model(family)
    engine = make(model, start=False, device=room_for(model, pages * model.layout.page_tokens), **settings)
    return engine, engine.cache.scheduler.capacity_tokens()


@every_family
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_prompt_that_exactly_fills_the_device_is_answered(family: str, deterministic: bool, make: Make) -> None:
    if family in STATES_ALONE:
        return  # its prompts take no slots
    engine, room = exact(family, make, 2, deterministic=deterministic)
    for seed, most in enumerate((1, PAGE + 1)):
        request = engine.submit(a_request(a_prompt(room - most + 1, seed), most))
        turns(engine, lambda request=request: not engine.scheduler.waiting and not engine._accepted, at_most=300)
        assert request.result(0.1)[2].finish is Finish.LENGTH
    with pytest.raises(ConfigError, match=f"there is device memory for {room}$"):
        engine.submit(a_request(a_prompt(room), 2))


# --- no request waits in vain


def watched(engine: Engine) -> Engine:
    """The law is looked at in every turn."""
    admit = engine.scheduler.admit

    def admitted() -> None:
        admit()
        assert not (why := waits_in_vain(engine.scheduler, engine.cache.scheduler.core)), why
        assert not any(job.lease.ready for job in engine.scheduler.waiting), "waiting requests hold nothing"

    engine.scheduler.admit = admitted  # type: ignore[method-assign]
    return engine


@pytest.mark.long
def test_one_that_fits_does_not_wait_for_one_that_was_preempted(make: Make) -> None:
    """Two long answers preempt each other; a short prompt that arrives then is admitted at once."""
    model = a_model()
    engine = watched(make(model, start=False, device=room_for(model, 6 * PAGE)))
    long = [engine.submit(a_request(a_prompt(2 * PAGE + 2, seed), 3 * PAGE)) for seed in range(2)]
    turns(engine, lambda: engine.counts.preempted == 1)
    short = engine.submit(a_request(a_prompt(PAGE, 3), 4))
    waited = turns(engine, lambda: not short.outputs.empty(), at_most=40)
    assert waited <= 2
    assert engine.counts.finished == 0
    turns(engine, lambda: engine.counts.finished == 3)
    for seed, request in enumerate(long):
        assert request.result(0.1)[1] == alone("qwen3_5", 2 * PAGE + 2, seed, 3 * PAGE)


@pytest.mark.parametrize(
    ("family", "write"),
    [
        ("qwen3_5", "back"),
        pytest.param("gpt_oss", "through", marks=pytest.mark.long),
        pytest.param("deepseek_v32", "through", marks=pytest.mark.long),
    ],
)
def test_in_a_crowd_no_request_waits_in_vain_and_nothing_is_left(family: str, write: str, make: Make) -> None:
    """Whatever they did, and though some are aborted, slots, pins and tensors are as before."""
    model = a_model(family)
    engine = watched(
        make(model, start=False, device=room_for(model, 8 * PAGE), host=2 * MIB, max_running=5, write_policy=write)
    )
    asked = [(1 + seed * 37 % (6 * PAGE), seed % 7, 1 + seed * 13 % 8) for seed in range(7)]
    requests = []
    for number, (tokens, seed, most) in enumerate(asked):
        requests.append(engine.submit(a_request(a_prompt(tokens, seed), most)))
        if number % 3 == 0:
            engine._turn()
    for request in requests[4::2]:
        engine.abort(request)
        engine._turn()
    turns(engine, lambda: not engine._accepted)
    for request, (tokens, seed, most) in zip(requests, asked, strict=True):
        _, answer, last = request.result(0.1)
        assert answer == alone(family, tokens, seed, most)[: len(answer) if last.finish is Finish.ABORT else most]
    assert not engine._batches and not engine.scheduler.waiting._overtaken and not engine._pending
    engine.cache.flush()
    stats = engine.cache.stats()
    assert not stats["leases"] and not any(value for name, value in stats.items() if name.startswith("used."))


def test_what_waits_for_its_turn_leaves_its_pages_to_those_before_it(make: Make) -> None:
    """Pages of both short prompts were brought to the device again; the large one gets their slots when they end."""
    model = a_model()
    engine = watched(make(model, start=False, device=room_for(model, 18 * PAGE)))
    short = [a_prompt(2 * CHUNK + 1, seed) for seed in (1, 2)]
    for prompt in short:
        by_hand(engine, a_request(prompt, 1))
    engine.cache.settle()
    engine.cache.flush()
    behind = [engine.submit(a_request(prompt, 1)) for prompt in short]
    first = engine.submit(a_request(a_prompt(15 * PAGE, 3), 1))
    turns(engine, lambda: engine.counts.finished == 5, at_most=200)
    assert [alone("qwen3_5", 2 * CHUNK + 1, seed, 1) for seed in (1, 2)] == [each.result(0.1)[1] for each in behind]
    assert first.result(0.1)[1] == alone("qwen3_5", 15 * PAGE, 3, 1)


def test_a_request_that_was_preempted_is_one_use_of_its_pages(make: Make) -> None:
    engine, prompt = make(start=False), a_prompt(CHUNK + 5)
    engine.cache.scheduler.core.watch()
    by_hand(engine, a_request(prompt, 1))
    request = engine.submit(a_request(prompt, 4))
    for _ in range(2):
        turns(engine, lambda: bool(engine.scheduler.running))
        engine.scheduler.preempt(engine.scheduler.running[0])
    turns(engine, lambda: engine.counts.finished == 2)
    assert request.result(0.1)[2].finish is Finish.LENGTH and engine.counts.preempted == 2
    assert [each.hits for each in engine.cache.scheduler.core.hottest(9)] == [1]
