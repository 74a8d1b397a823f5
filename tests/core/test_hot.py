"""Which prefixes are resumed from most is known, in bounded memory, by counts that exact ones confirm."""

import random
from collections import Counter
from typing import Any

import pytest

from kvarve.core.observe.hot import MOST, Hot
from kvarve.core.tree.tree import Root, Run
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES, names, pack, root_key
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, PAGE_TOKENS, STATE, World, config, fork, prompt

DEVICE, HOST, STORAGE = Tier
ROOT = root_key(b"world")


def resumes(hot: Hot, run: Run, boundary: int) -> None:
    top = run
    while top.parent is not None:
        top = top.parent
    hot.resumed(top.named, run, boundary)


def leaf(top: Root, seed: int, pages: int) -> Run:
    tokens = pack(prompt(pages, seed, extra=0))
    return Run(top, 0, tokens, b"", 1, PAGE_TOKENS)


def test_many_prefixes_cost_no_more_memory_and_the_frequent_ones_are_among_those_that_are_known() -> None:
    dice = random.Random(7)
    top, hot, most = Root(ROOT, 1, PAGE_TOKENS), Hot(most=10, halve_every=10**9), 10
    runs = [leaf(top, seed, pages=8) for seed in range(400)]
    exact, covered = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for n in range(1, 5001):
        seed = dice.choice((1, 2, 3)) if dice.random() < 0.5 else dice.randrange(400)
        boundary = 4 if seed <= 3 else dice.randint(1, 8)
        resumes(hot, runs[seed], boundary)
        exact[seed, boundary] += 1
        covered.update((seed, pages) for pages in range(1, boundary + 1))
        if n % 100:
            continue
        known = {(runs.index(each.run), each.pages): each for each in hot.hottest(1000)}
        assert len(known) <= most
        assert all(known[name].count >= count for name, count in exact.items() if count > n / most)
        assert all(each.hits <= covered[name] for name, each in known.items()), "no hit is made up"
    assert {(seed, 4) for seed in (1, 2, 3)} == {(runs.index(each.run), each.pages) for each in hot.hottest(3)}


def test_counts_are_of_late() -> None:
    top, hot = Root(ROOT, 1, PAGE_TOKENS), Hot(halve_every=20)
    old, new = leaf(top, 1, 4), leaf(top, 2, 4)
    for _ in range(20):
        resumes(hot, old, 4)
    assert [(each.run, each.hits) for each in hot.hottest(2)] == [(old, 10)]
    for _ in range(40):
        resumes(hot, new, 4)
    assert [(each.run, each.hits) for each in hot.hottest(2)] == [(new, 15), (old, 2)]
    for _ in range(40):
        resumes(hot, new, 4)
    assert [each.run for each in hot.hottest(2)] == [new]


def watched(**settings: Any) -> World:
    """A world whose core counts what is resumed from."""
    pools = settings.pop("pools", (ATTENTION,))
    world = World(config=config(*pools, **settings))
    world.core.watch()
    return world


def hottest(world: World, count: int = 10) -> list[tuple[int, int, int, int, int, Tier | None]]:
    return [each[2:] for each in world.core.hottest(count)]


def test_a_shared_beginning_has_the_hits_of_all_that_go_on_from_it() -> None:
    world = watched(device=64)
    world.request(prompt(4))
    assert hottest(world) == [], "computed and not resumed from"
    for word in range(3):
        world.request(fork(4, word))
        world.request(fork(4, word))
    (shared, *own) = world.core.hottest(10)
    assert shared.key == names(ROOT, b"", pack(prompt(4)), PAGE_TOKENS)[3 * KEY_BYTES : 4 * KEY_BYTES]
    assert (shared.root, shared.pages, shared.hits) == (ROOT, 4, 6)
    assert [(each.pages, each.hits) for each in own] == [(6, 1)] * 3
    assert world.core.hottest(1) == [shared]


def test_it_says_in_which_tiers_the_pages_are() -> None:
    world = watched(pools=(ATTENTION, STATE), device=16, host=64, storage=True)
    world.request(prompt(6))
    world.settle()
    world.request(prompt(6))
    world.settle()
    assert hottest(world) == [(6, 1, 6, 6, 6, DEVICE)]
    world.flush(DEVICE)
    assert hottest(world) == [(6, 1, 0, 6, 6, HOST)]
    world.flush(HOST)
    assert hottest(world) == [(6, 1, 0, 0, 0, None)], "what storage has of a page that left memory is not known"
    world.request(prompt(6))
    assert hottest(world)[0][1:3] == (2, 6)


def test_another_prompt_in_the_run_of_one_that_left_is_not_taken_for_it() -> None:
    world = watched(device=16)
    world.request(prompt(6))
    world.request(prompt(6))
    assert world.core.hot is not None
    run = world.core.hot.hottest(1)[0].run
    run.trim(2)
    run.append(pack(fork(2, 5, more=8))[2 * run.width :], b"")
    assert run.end == 6 and hottest(world) == [(6, 1, 0, 0, 0, None)]


def test_nothing_is_counted_where_no_one_watches() -> None:
    world = World(config=config(ATTENTION, device=64))
    world.request(prompt(4))
    world.request(prompt(4))
    assert world.core.hottest(1) == [] and world.core.hot is None
    world.core.watch()
    world.request(prompt(4))
    assert [(each.pages, each.hits) for each in world.core.hottest(1)] == [(4, 1)]


@pytest.mark.parametrize(("turns", "most"), [(24, 4), pytest.param(600, MOST, marks=pytest.mark.long)])
def test_it_is_bounded_and_agrees_with_what_a_prompt_would_find(turns: int, most: int) -> None:
    def live() -> tuple[World, dict[bytes, tuple[bytes, bytes]]]:
        world, dice = watched(pools=(ATTENTION, STATE), device=40, host=80), random.Random(0)
        world.core.hot = Hot(most)
        world.core.context.tell.add(world.core.hot)
        of_key = dict[bytes, tuple[bytes, bytes]]()
        for turn in range(turns):
            tokens, salt = prompt(dice.randint(1, 8), seed=dice.randrange(turns // 75 or 2)), dice.choice("abc")
            root, packed = root_key(b"world", salt), pack(tokens)
            keys = names(root, b"", packed, PAGE_TOKENS)
            for at in range(0, len(keys), KEY_BYTES):
                of_key[keys[at : at + KEY_BYTES]] = root, packed
            world.request(tokens, salt)
            if dice.random() < 0.05:
                world.flush(dice.choice((DEVICE, HOST)))
            if turn % 20 == 0:
                assert all(max(each.device, each.host) <= each.pages for each in world.core.hottest(1000))
        return world, of_key

    (one, of_key), (two, _) = live(), live()
    found = one.core.hottest(1000)
    assert len(found) == most and found == two.core.hottest(1000), "the same inputs give the same answer"
    assert {each.resumes for each in found if each.key} == {DEVICE, HOST, None} or turns < 600
    for each in found:
        if each.key:
            root, packed = of_key[each.key]
            width = PAGE_TOKENS * TOKEN_BYTES
            hit = one.core.lookup(root, packed[: each.pages * width] + pack([0]))
            assert root == each.root and (hit.device == each.pages) == (each.resumes is DEVICE)
            assert (hit.memory == each.pages) == (each.resumes is not None)
            assert each.pages - each.device <= each.host or not each.resumes


def test_a_prompt_that_its_request_reads_again_is_no_hit() -> None:
    world = watched(device=64)
    world.request(prompt(4))
    for again in (False, True, True):
        world.compute(world.open(prompt(4), again=again))
    assert [hits for _, hits, *_ in hottest(world)] == [1]
