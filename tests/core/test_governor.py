"""Whether storing pays: a share of bytes, a horizon, and a sample that tells when it would pay again."""

from collections.abc import Iterator
from itertools import count

import pytest

from kvarve.core.copies.limits import SAMPLE, SAMPLED_PAGES, Governor
from kvarve.core.tree.tree import Root, Run
from kvarve.pages.keys import TOKEN_BYTES, pack

HORIZON = 160


def a_run(word: int, uses: int = 1, pages: int = 1) -> Run:
    run = Run(Root(b"r" * 32, 1, 1), 0, pack([word] * pages), b"", 1, 1)
    assert run.width == TOKEN_BYTES
    run.uses = uses
    return run


def sampled(governor: Governor) -> Iterator[Run]:
    """Runs that are of the sample, without end."""
    return (run for run in map(a_run, count()) if governor.wants(run))


def paused() -> Governor:
    governor = Governor(0.5, HORIZON)
    governor.stored(a_run(0), b"x", HORIZON)
    assert governor.paused
    return governor


def test_storing_goes_on_until_a_whole_horizon_has_been_seen() -> None:
    governor = Governor(0.5, HORIZON)
    for _ in range(HORIZON - 1):
        governor.stored(a_run(1), b"x", 1)
    assert not governor.paused
    governor.stored(a_run(1), b"x", 1)
    assert governor.paused


def test_storing_goes_on_as_long_as_enough_of_it_is_used() -> None:
    governor = Governor(0.5, HORIZON)
    for _ in range(10 * HORIZON):
        governor.used([b"x"], 1)
        governor.stored(a_run(1), b"x", 2)
    assert not governor.paused and governor.used_share == pytest.approx(0.5, abs=0.01)


def test_what_paid_once_is_forgotten_by_and_by() -> None:
    governor = Governor(0.5, HORIZON)
    governor.used([b"x"] * 3, HORIZON)
    horizons = 0
    while not governor.paused:
        governor.stored(a_run(1), b"x", HORIZON)
        horizons += 1
    assert 1 < horizons < 10


def test_in_a_pause_one_run_in_sixteen_goes_down_and_what_was_used_twice() -> None:
    governor = paused()
    wanted = sum(governor.wants(a_run(word)) for word in range(160 * SAMPLE))
    assert 80 < wanted < 320
    assert all(governor.wants(a_run(word, uses=2)) for word in range(100))


def test_storing_goes_on_when_the_sample_pays() -> None:
    governor = paused()
    for run, number in zip(sampled(governor), range(HORIZON), strict=False):
        key = b"%d" % number
        governor.stored(run, key, 1)
        governor.used([key], 1)
        if not governor.paused:
            break
    assert number + 1 == HORIZON // SAMPLE


def test_what_has_proven_itself_says_nothing_about_the_rest() -> None:
    governor = paused()
    for _ in range(10 * HORIZON):
        governor.stored(a_run(1, uses=2), b"proven", 1)
        governor.used([b"proven", b"stored before the pause"], 1)
    assert governor.stored_bytes == governor.used_bytes == 0 and governor.paused


def test_no_more_of_the_sample_is_remembered_than_a_bound() -> None:
    governor = Governor(0.5, 1)
    governor.stored(a_run(0), b"x", 1)
    governor.horizon_bytes = 1 << 60
    (run,) = [next(sampled(governor))]
    for number in range(SAMPLED_PAGES + 10):
        governor.stored(run, b"%d" % number, 1)
    governor.used([b"9"], 1)
    assert governor.used_bytes == 0
    governor.used([b"10", b"%d" % SAMPLED_PAGES], 1)
    assert governor.used_bytes == 2
