"""Runs of pages, against a plain trie with one node per page and one fact per position."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarve.core.tree.tree import NOWHERE, Root, Run, covering, same_pages, upward, walk
from kvarve.pages.keys import KEY_BYTES, extend, pack, root_key

PAGE_TOKENS = 2
WIDTH = PAGE_TOKENS * 4
POOLS = 2
ROOT = root_key(b"tree")

Prompts = st.lists(st.lists(st.integers(0, 1), max_size=18), min_size=1, max_size=12)


def pages(tokens: bytes) -> list[bytes]:
    return [tokens[at : at + WIDTH] for at in range(0, len(tokens) // WIDTH * WIDTH, WIDTH)]


def top() -> Run:
    return Root(ROOT, POOLS, PAGE_TOKENS)


def insert(root: Run, tokens: bytes, named: int = 99) -> Run:
    """Make positions for all full pages of a prompt, with names as far as `named`; the deepest run of it."""
    path, known = walk(root, tokens)
    tail, end = (path[-1] if path else root), len(pages(tokens))
    if known == end:
        return tail
    rest = tokens[known * WIDTH : end * WIDTH]
    keys = b"".join(extend(ROOT, tokens, PAGE_TOKENS)[known:named])
    if known < tail.end:
        tail = tail.split(known)
    if tail.parent is not None and not tail.children:
        tail.append(rest, keys)
        return tail
    child = Run(tail, known, rest, keys, POOLS, PAGE_TOKENS)
    tail.children[rest[:WIDTH]] = child
    return child


def facts(root: Run) -> dict[bytes, Any]:
    """The tree's facts of each position, by the position's key."""
    known, stack = {}, [root]
    while stack:
        run = stack.pop()
        stack.extend(run.children.values())
        for local in range(run.pages):
            known[run.key(run.first + local)] = (
                run.first + local,
                [run.slot(at, run.first + local) if here >> local & 1 else NOWHERE for at, here in enumerate(run.here)],
                [run.here[place] >> local & 1 for place in range(2 * POOLS)],
                [run.bad[place] >> local & 1 for place in range(2 * POOLS)],
                [run.coming[place] >> local & 1 for place in range(3 * POOLS)],
                [(run.stored[pool] >> local & 1, run.backed_up_since_use[pool] >> local & 1) for pool in range(POOLS)],
                run.pins[0].count(local),
                (run.used, run.uses, run.failed_backups),
            )
    return known


def check_shape(root: Run) -> None:
    stack = [root]
    while stack:
        run = stack.pop()
        for first_page, child in run.children.items():
            assert child.parent is run and child.first == run.end and child.tokens[:WIDTH] == first_page
            assert len(child.tokens) == child.pages * WIDTH > 0
            stack.append(child)
        for place in range(2 * POOLS):
            assert run.kids[place] == sum(child.here[place] & 1 for child in run.children.values())
            assert (run.slots[place] is None) == (run.here[place] == 0)


@settings(max_examples=30)
@given(Prompts)
def test_a_walk_knows_as_many_pages_as_a_trie_does(prompts: list[list[int]]) -> None:
    root, trie = top(), set[tuple[bytes, ...]]()
    for tokens in map(pack, prompts):
        path, known = walk(root, tokens)
        own = pages(tokens)
        assert known == max(depth for depth in range(len(own) + 1) if depth == 0 or tuple(own[:depth]) in trie)
        assert b"".join(run.tokens for run in path)[: known * WIDTH] == tokens[: known * WIDTH]
        insert(root, tokens)
        trie |= {tuple(own[: depth + 1]) for depth in range(len(own))}
        assert walk(root, tokens)[1] == len(own)
        check_shape(root)
    assert len(facts(root)) == len(trie), "one position for each node of the trie"


@settings(max_examples=8)
@given(Prompts, st.randoms(use_true_random=False))
def test_a_split_changes_nothing_that_is_known_of_a_position(prompts: list[list[int]], dice: random.Random) -> None:
    root, slots = top(), iter(range(10_000))
    held: list[tuple[Run, int]] = []
    for tokens in prompts:
        before = facts(root)
        tail = insert(root, pack(tokens))
        assert {key: facts(root)[key] for key in before} == before, "a new prompt changes no fact of another"
        for position in range(tail.end):
            run = covering(tail, position)
            for place in range(2 * POOLS):
                local = 1 << position - run.first
                if not run.here[place] & local and dice.random() < 0.5:
                    run.put(place, local, [next(slots)])
                    run.bad[place] |= local if dice.random() < 0.2 else 0
                elif run.here[place] & local and dice.random() < 0.3:
                    run.take(place, position)
            run.stored[dice.randrange(POOLS)] |= 1 << position - run.first
            run.backed_up_since_use[dice.randrange(POOLS)] |= 1 << position - run.first
            run.coming[dice.randrange(3 * POOLS)] |= 1 << position - run.first
        positions = dice.getrandbits(tail.end) if tail.end else 0
        for run, share in upward(tail, positions):
            run.pins[0].add(share)
        held.append((tail, positions))
        check_shape(root)
    # A reference to a run from before its split still finds every position by walking up from it.
    for tail, positions in held:
        for run, share in upward(tail, positions):
            run.pins[0].remove(share)
    assert all(fact[6] == 0 for fact in facts(root).values())


def test_slots_are_put_and_read_around_gaps() -> None:
    tail = insert(top(), pack([*range(16)]))
    tail.put(0, 0b00110010, [1, 4, 5])
    tail.put(0, 0b01001001, [0, 3, 6])
    assert tail.here[0] == 0b01111011 and tail.slots_at(0, 0b01011001) == [0, 3, 4, 6]
    assert [tail.slot(0, at) for at in (0, 1, 3, 4, 5, 6)] == [0, 1, 3, 4, 5, 6]
    for absent in (0b100, 0b10000000):
        with pytest.raises(AssertionError):
            tail.slots_at(0, absent)
    for wrong in ((0b1000100, [2, 6]), (1 << 8, [8]), (0b100, [2, 7])):
        with pytest.raises(AssertionError):
            tail.put(0, *wrong)
    assert tail.here[0] == 0b01111011 and tail.slots_at(0, 0b01111011) == [0, 1, 3, 4, 5, 6]


def test_a_trimmed_run_forgets_its_tail_and_can_be_lengthened_again() -> None:
    root = top()
    tokens, other = pack([*range(12)]), pack([*range(6), 99, 99, 99, 99])
    tail = insert(root, tokens)
    for position in range(3):
        tail.put(1, 1 << position, [position])
    tail.stored[0] = 0b111111
    tail.trim(3)
    assert tail.end == 3 and tail.stored[0] == 0b111 and walk(root, tokens)[1] == 3
    assert insert(root, other) is tail and tail.end == 5
    assert [tail.slot(1, position) for position in range(3)] == [0, 1, 2]
    tail.put(1, 1 << 4, [9])
    assert tail.slot(1, 4) == 9


@settings(max_examples=30)
@given(st.binary(max_size=40), st.binary(max_size=60), st.integers(0, 3), st.integers(0, 6), st.integers(1, 5))
def test_same_pages_counts_equal_pages(left: bytes, right: bytes, start: int, most: int, width: int) -> None:
    most = min(most, len(left) // width)
    right = right[: start * width] + left[: len(right)]  # often equal for a while
    expected = 0
    while (
        expected < most
        and len(right) >= start * width + (expected + 1) * width
        and left[expected * width : (expected + 1) * width]
        == right[start * width + expected * width : start * width + (expected + 1) * width]
    ):
        expected += 1
    assert same_pages(left, right, start * width, most, width) == expected


@settings(max_examples=30)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=18), st.integers(0, 9), st.booleans()), max_size=12))
def test_a_page_gets_its_name_when_it_is_needed_whatever_came_between(
    prompts: list[tuple[list[int], int, bool]],
) -> None:
    root = top()
    for ids, named, ask in prompts:
        tail = insert(root, pack(ids), named)
        if ask:
            assert tail.keys
    for ids, _, _ in prompts:
        path, known = walk(root, pack(ids))
        assert b"".join(run.keys for run in path)[: known * KEY_BYTES] == b"".join(extend(ROOT, pack(ids), PAGE_TOKENS))
