"""What has left memory is remembered: which pages of a prompt, and the tier that had them last."""

import random
from collections.abc import Sequence

from kvarve.core.tree.ghosts import Left
from kvarve.pages.keys import pack, root_key
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, PAGE_TOKENS, STATE, World, config, fork, prompt
from tests.sim.world.views import runs

DEVICE, HOST, STORAGE = Tier


def left(world: World, tokens: Sequence[int], salt: str = "") -> Left:
    root, packed = root_key(b"world", salt), pack(tokens)
    known = world.core.lookup(root, packed).known
    return world.core.tree.ghosts.of(root, packed, known)


def pages(world: World) -> int:
    return world.core.tree.ghosts._pages


def test_a_prompt_that_left_is_remembered_up_to_where_another_goes_its_own_way() -> None:
    world = World(config=config(ATTENTION, device=16))
    world.request(prompt(12))
    world.flush(DEVICE)
    assert left(world, prompt(12)) == Left(((DEVICE, 12),), 12, False, True)
    assert left(world, fork(5, 1)) == Left(((DEVICE, 5),), 5, True, True)
    assert left(world, prompt(3)) == Left(((DEVICE, 3),), 3, True, True)
    assert left(world, prompt(3, seed=9)) == Left()
    assert left(world, prompt(12), salt="another") == Left()


def test_what_is_forgotten_makes_the_list_of_its_salt_partial() -> None:
    world = World(config=config(ATTENTION, device=16))
    world.core.tree.ghosts._limit = 40
    for seed in range(3):
        world.request(prompt(12, seed=seed))
        world.flush(DEVICE)
    assert left(world, prompt(12, seed=0)).whole and left(world, prompt(1, seed=7)) == Left(whole=True)
    for seed in range(3, 6):
        world.request(prompt(12, seed=seed))
        world.flush(DEVICE)
    assert pages(world) <= 40
    assert left(world, prompt(12, seed=0)) == left(world, prompt(1, seed=7)) == Left(whole=False)
    assert left(world, prompt(12, seed=5)) == Left(((DEVICE, 12),), 12, False, False)


def test_a_salt_with_more_than_its_share_forgets_its_own_first() -> None:
    world = World(config=config(ATTENTION, device=2000))
    ghosts = world.core.tree.ghosts
    ghosts._limit = 3000
    world.request(prompt(12), salt="small")
    world.flush(DEVICE)
    for seed in range(4):
        world.request(prompt(1000, seed=seed), salt="large")
        world.flush(DEVICE)
    assert pages(world) <= 3000
    assert left(world, prompt(12), salt="small") == Left(((DEVICE, 12),), 12, False, True)
    assert not left(world, prompt(1), salt="large").whole


def test_of_random_traffic_exactly_what_was_there_and_is_not_is_remembered() -> None:
    for seed in range(2):
        dice = random.Random(seed)
        pools = dice.choice([(ATTENTION,), (ATTENTION, STATE), (STATE,)])
        world = World(config=config(*pools, device=dice.choice([8, 14]), host=dice.choice([0, 12])))
        world.core.tree.ghosts._limit = 10**6
        ever = set[tuple[int, ...]]()
        asked = list[list[int]]()
        for _ in range(40):
            tokens = [dice.choice([1, 1, 1, 2])] * dice.randrange(2, 12) + [dice.randrange(3) for _ in range(6)]
            world.request(tokens)
            asked.append(tokens)
            for run in runs(world.core):
                ever |= prefixes(run.parent, run.tokens)
            dice.random() < 0.2 and world.flush(DEVICE, HOST)
            for tokens in asked[-8:]:
                count = len(tokens) // PAGE_TOKENS
                was = next((n for n in range(count) if tuple(tokens[: (n + 1) * PAGE_TOKENS]) not in ever), count)
                known = world.core.lookup(root_key(b"world", ""), pack(tokens)).known
                assert known + left(world, tokens).pages == was, f"seed {seed}: {tokens}"


def prefixes(parent: object, tokens: bytes) -> set[tuple[int, ...]]:
    """All prefixes, in whole pages, that end in a run."""
    above = b""
    while parent is not None:
        above, parent = parent.tokens + above, parent.parent  # type: ignore[attr-defined]
    whole = memoryview(above + tokens).cast("I").tolist()
    first = len(above) // 4 // PAGE_TOKENS
    return {tuple(whole[: end * PAGE_TOKENS]) for end in range(first + 1, len(whole) // PAGE_TOKENS + 1)}
