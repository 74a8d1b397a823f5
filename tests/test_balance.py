"""When one pool evicts beside an idle one, and only then, a warning is logged."""

from itertools import pairwise
from typing import Any

import pytest

from kvarve.balance import LOOK_S, SAY_S, Imbalance, Watch, imbalances

Levels = dict[str, float]


def levels(**pools: tuple[int, int, int]) -> Levels:
    """A device with a chain, `kv`, and states: slots, used and evicted of each, of 100 bytes a page."""
    found: Levels = {"page_bytes.kv": 100, "page_bytes.state": 100, "lookback.kv": 0, "lookback.state": 1}
    for pool, (slots, used, evicted) in pools.items():
        found |= {f"slots.device.{pool}": slots, f"used.device.{pool}": used, f"evicted.device.{pool}": evicted}
    return found


CALM = levels(kv=(1000, 300, 0), state=(33, 33, 0))
CROWDED = levels(kv=(1000, 330, 0), state=(33, 33, 117))


def test_states_that_leave_beside_idle_attention_are_told_with_all_figures_and_the_flag() -> None:
    (found,) = imbalances(CALM, CROWDED)
    assert found == Imbalance("device", "state", 117, 33, "kv", 330, 1000, closer=True)
    assert found.advice(8192) == (
        "device: pool state evicted 117 pages (it has 33 slots) while kv uses 330 of 1,000: a "
        "--tokens-per-snapshot below 8,192 divides this memory better"
    )


def test_attention_that_leaves_beside_idle_states_is_told_with_the_other_direction() -> None:
    before, now = levels(kv=(500, 500, 9), state=(500, 40, 0)), levels(kv=(500, 470, 90), state=(500, 41, 0))
    (found,) = imbalances(before, now)
    assert (found.pool, found.idle, found.closer) == ("kv", "state", False)
    assert "above 256" in found.advice(256)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (CALM, CALM),
        (CROWDED, CROWDED),
        (CALM, levels(kv=(1000, 330, 0), state=(33, 33, 1))),
        (CALM, levels(kv=(1000, 500, 0), state=(33, 33, 117))),
        (CALM, levels(kv=(1000, 0, 300), state=(33, 0, 33))),
        (levels(kv=(1000, 1000, 0), state=(100, 9, 0)), levels(kv=(1000, 1000, 500), state=(100, 9, 0))),
        (levels(kv=(0, 0, 0), state=(33, 33, 0)), levels(kv=(0, 0, 0), state=(33, 33, 9))),
        (levels(kv=(9, 9, 0)), levels(kv=(9, 9, 9))),
        (CALM, CROWDED | {"evicted_spare.device.state": 117}),
        ({}, {}),
    ],
    ids=[
        *("nothing-evicted", "long-ago", "one-page", "half-used", "flushed", "not-worth-a-word", "no-slots", "alone"),
        *("inside-of-prompts", "nothing"),
    ],
)
def test_what_is_no_imbalance_is_passed_over(before: Levels, now: Levels) -> None:
    assert not [*imbalances(before, now)]


def test_each_tier_is_judged_by_itself() -> None:
    full_host = {name.replace("device", "host"): value for name, value in CROWDED.items() if "device" in name}
    idle_device = levels(kv=(1000, 0, 0), state=(33, 0, 0))
    (found,) = imbalances({}, idle_device | full_host)
    assert found.tier == "host"


def test_the_same_pool_is_told_of_once_in_a_while() -> None:
    watch, said, now_s = Watch(), [], 5.0
    evicted = range(0, 100 * 200, 100)
    for gone in evicted:
        assert now_s >= watch.due_s
        said += [now_s for _ in watch.look(levels(kv=(1000, 330, 0), state=(33, 33, gone)), now_s)]
        assert ("device", "state") in watch.found or not gone
        now_s = watch.due_s
    assert said[0] == 5.0 + LOOK_S, "not by a first look, which has nothing to compare with"
    assert {after - before for before, after in pairwise(said)} == {SAY_S}


def test_what_has_passed_is_no_longer_found() -> None:
    watch = Watch()
    steps: list[Any] = [watch.look(each, at) for at, each in enumerate((CALM, CROWDED, CROWDED))]
    assert [len(said) for said in steps] == [0, 1, 0] and not watch.found
