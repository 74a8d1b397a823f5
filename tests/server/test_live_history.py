"""The past that the live page shows: an hour in bounded memory, and one sentence about what was computed."""

import re
from dataclasses import fields

import pytest

from kvarve.core.observe.reasons import HITS, Reason
from kvarve.core.policies import Policies
from kvarve.reference.server.live_history import (
    COARSE,
    EVERY_S,
    FINE,
    JOINED,
    LEAST_SHARE,
    OUTPUT,
    REQUESTS,
    History,
    Sample,
    advice,
    reasons,
)
from kvarve.reference.server.serve_settings import Settings


def sample(number: int, **more: float) -> Sample:
    happened = {Reason.HIT_HOST: 3, Reason.NEVER_SEEN: 1, REQUESTS: 2, OUTPUT: 5, "device-to-host": 100, **more}
    return Sample(
        1000 + EVERY_S * number, EVERY_S, {"device": number, "storage": None}, number % 7, 1, (0.5, None), happened
    )


def test_an_hour_is_kept_in_samples_of_ten_seconds_and_five_minutes_in_samples_of_two() -> None:
    history = History()
    for number in range(2 * COARSE * JOINED + 3):
        history.add(sample(number))
    five, hour = history.told(False), history.told(True)
    assert (len(five["unix_s"]), len(hour["unix_s"])) == (FINE, COARSE + 1)
    assert five["unix_s"][-1] == hour["unix_s"][-1] == 1000 + EVERY_S * number
    assert (
        hour["unix_s"][-2] - hour["unix_s"][0] == 10 * (COARSE - 1) and five["every_s"] == 2 and hour["every_s"] == 10
    )
    assert {*hour["prompt_tokens"][:-1]} == {4 * JOINED} and hour["prompt_tokens"][-1] == 4 * 3
    assert {*hour["cached_tokens"]["host"][:-1]} == {3 * JOINED} and {*hour["cached_tokens"]["device"]} == {0}
    assert {*hour["requests"][:-1]} == {2 * JOINED} and {*hour["output_tokens"][:-1]} == {5 * JOINED}
    assert {*hour["running"][:-1]} == {4, 5, 6} and hour["bytes"]["device"][-1] == number, (
        "peaks, and what was held last"
    )
    assert {*history.lanes()["device-to-host"]} == {50} and len(history.lanes()["device-to-host"]) <= FINE // JOINED + 1


def test_what_happened_lately_is_the_sum_of_as_many_samples() -> None:
    history = History()
    assert history.last(60) is None
    for number in range(FINE):
        history.add(sample(number))
    for seconds in (2, 60, 300, 3600):
        last, some = history.last(seconds), min(FINE, seconds / EVERY_S)
        assert last is not None and last.seconds == some * EVERY_S
        assert reasons(last) == {Reason.HIT_HOST: 3 * some, Reason.NEVER_SEEN: some}


OPTIONS = {f"--{each.name.replace('_', '-')}" for kind in (Settings, Policies) for each in fields(kind)}
COMPUTED = [reason for reason in Reason if reason not in HITS and reason is not Reason.ANOTHER_SAMPLE]


@pytest.mark.parametrize("reason", COMPUTED, ids=lambda reason: reason.value)
def test_each_reason_has_a_sentence_that_names_options_of_serve(reason: Reason) -> None:
    for host in (True, False):
        for storage in (True, False):
            for rounded in (True, False):
                said = advice({Reason.HIT_DEVICE: 88, reason: 12}, grid=64, rounded=rounded, host=host, storage=storage)
                assert said.startswith("12% ") and said.endswith(".") and "{" not in said and said.count(". ") == 0
                assert {*re.findall(r"--[a-z-]+", said)} <= OPTIONS


def test_the_largest_part_that_a_setting_changes_is_said_before_larger_ones_that_none_does() -> None:
    told = {Reason.HIT_DEVICE: 40, Reason.NEVER_SEEN: 40, Reason.EVICTED_HOST: 12, Reason.BELOW_GRID: 8}
    assert advice(told, grid=64) == "12% was here and left the host: more --host-memory brings it back."
    without = advice(told, grid=64, storage=False)
    assert without == "12% was here and left the host: more --host-memory, or a --storage, brings it back."
    few = {Reason.NEVER_SEEN: 99, Reason.EVICTED_HOST: 1}
    assert LEAST_SHARE > 0.01
    assert advice(few, grid=64) == "99% was never here: new text is computed once, and no setting changes that."
    assert advice({Reason.HIT_HOST: 9}, grid=64) == advice({}, grid=64) == ""
