"""What the core does for a tenant depends on nothing that another salt's prompts say.

Two worlds live the same life. In one of them all other tenants ask the very prompts that this one asks, in the other
one prompts of their own that share as much with each other. Every copy, probe, slot and hit has to be the same, so no
time that follows from them can tell whether another salt has a prompt.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvarve.core.copies.effects import Probe, Transfer
from kvarve.core.observe.reasons import explain
from kvarve.pages.keys import root_key
from tests.sim.world import Life, World
from tests.sim.world.life import Action, Director, act
from tests.sim.world.scenes import draw

ASKS = "b"  # the salt of the tenant who wants to know
OTHER_DIGITS = str.maketrans("01", "23")
WITH_PROMPTS = ("open", "request", "elsewhere", "coming")
STEPS = 400


def elsewhere(action: Action) -> Action:
    """The same action where other tenants have prompts of their own."""
    kind, *rest = action
    if kind in WITH_PROMPTS and rest[1] != ASKS:
        return [kind, rest[0].translate(OTHER_DIGITS), *rest[1:]]
    return action


def done(effect: Transfer) -> Any:
    """All that a worker is asked for, but for the names of other tenants' pages."""
    mine = effect.root == root_key(b"world", ASKS)
    pages = [(page.pool, page.source, page.target, page.key if mine else b"") for page in effect.pages]
    edge = () if isinstance(effect, Probe) else (effect.source, effect.target, effect.urgent)
    return effect.op, edge, effect.wait_s, effect.root, pages


def twins(seed: int, **settings: Any) -> Iterator[tuple[World, World]]:
    """Two worlds after each action of one life."""
    dice = random.Random(seed)
    drawn = draw(dice)
    drawn["offload_pays_at"] = 0.0  # a pause of storing goes by a sample of names
    life = Life(seed, 1, drawn | settings)
    near, far = life.world(), life.world()
    assert isinstance(near, World) and isinstance(far, World)
    director = Director(dice)
    director.salts = "ab"
    while near.steps < STEPS:
        action = director.action(near)
        if action[0] == "extend":  # of a lease that may be anybody's
            continue
        assert act(near, action) == act(far, elsewhere(action))
        yield near, far


@pytest.mark.parametrize(
    ("share", "seeds"),
    [(0.3, 2), pytest.param(1.0, 8, marks=pytest.mark.long), pytest.param(0.3, 8, marks=pytest.mark.long)],
)
def test_a_tenant_is_served_the_same_whatever_other_salts_have_cached(share: float, seeds: int) -> None:
    seen = Counter[str]()
    for seed in range(seeds):
        print(f"seed {seed}")
        compare(seed, share, seen)
    assert seen, "it has asked"


def compare(seed: int, share: float, seen: Counter[str]) -> None:
    """One life, step by step; the reasons that the tenant was given are added to `seen`."""
    told = 0
    for near, far in twins(seed, salt_share=share):
        assert [done(effect) for effect in near.log[told:]] == [done(effect) for effect in far.log[told:]]
        told = len(near.log)
        assert len(near.leases) == len(far.leases)
        for mine, theirs in zip(near.leases, far.leases, strict=True):
            assert (mine.phase, mine.boundary, mine.own) == (theirs.phase, theirs.boundary, theirs.own)
            if mine.ready and mine.root == root_key(b"world", ASKS):
                assert explain(mine, near.core.paths) == explain(theirs, far.core.paths)
                seen.update(reason.value for reason in explain(mine, near.core.paths))
        assert near.core.residency.evicted == far.core.residency.evicted
