"""What a listener is told of pages is what is there: a mirror that starts empty and hears all is the cache itself."""

import pytest

from kvarve.core.core import Core
from kvarve.pages.boundaries import members, of, spans
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES, bind_to_chunk, extend, heads, pack
from kvarve.pages.pools import Tier
from tests.sim.world import Life, World, born, live
from tests.sim.world.engines import Shop
from tests.sim.world.life import act, finish

Pages = dict[tuple[Tier, int], set[bytes]]


class Mirror:
    """What a listener knows, by tier and pool; checks that what it hears makes sense by itself."""

    def __init__(self, core: Core, *others: Core) -> None:
        """`others`: of other ranks, which tell the same."""
        self.core, self.residency, self.pages = core, core.tell(), Pages()
        self._others = [other.tell() for other in others]
        self.entered = self.left = self.began = 0

    def hear(self) -> None:
        heard = self.residency.take()
        assert all(other.take() == heard for other in self._others)
        for told in heard:
            if told is None:
                self.pages.clear()
                self.began += 1
                continue
            keys = [told.keys[at : at + KEY_BYTES] for at in range(0, len(told.keys), KEY_BYTES)]
            here = self.pages.setdefault((told.tier, told.pool), set())
            if not told.entered:
                assert told.tier is Tier.STORAGE or here.issuperset(keys), "only a page that is there leaves"
                here.difference_update(keys)
                self.left += len(keys) if told.tier is not Tier.STORAGE else 0
                continue
            assert told.tier is Tier.STORAGE or not here.intersection(keys), "only a page that is not there enters"
            page_tokens = self.core.config.page_tokens
            assert len(told.tokens) == len(keys) * page_tokens * TOKEN_BYTES
            if told.parent:
                assert extend(told.parent, told.tokens, page_tokens) == keys, "its tokens and its parent name a page"
            here.update(keys)
            self.entered += len(keys) if told.tier is not Tier.STORAGE else 0

    def check(self) -> None:
        """The memory tiers are mirrored exactly; of storage, all that the tree knows is there."""
        there = resident(self.core)
        for place, keys in there.items():
            if place[0] is Tier.STORAGE:
                assert self.pages.get(place, set()) >= keys, place
        assert {place: keys for place, keys in self.pages.items() if keys and place[0] is not Tier.STORAGE} == {
            place: keys for place, keys in there.items() if place[0] is not Tier.STORAGE
        }


def resident(core: Core) -> Pages:
    """By tier and pool, the keys of the pages in the tree."""
    slot_pools, pools = core.slot_pools, range(len(core.config.pools))
    found = Pages()
    for run in core.tree.runs():
        places = [(slot_pools.tier(place), place % len(pools), here) for place, here in enumerate(run.here)]
        places += [(Tier.STORAGE, pool, run.stored[pool]) for pool in pools if core.storage.attached]
        for tier, pool, here in places:
            if here:
                found.setdefault((tier, pool), set()).update(run.key(run.first + local) for local in members(here))
    return found


def retold(life: Life) -> Mirror:
    """Replay a life with a listener, which is right after every action."""
    here = life.world()
    world: World = here.world if isinstance(here, Shop) else here
    mirror = Mirror(*world.cores)
    for action in life.actions:
        act(here, action)
        mirror.hear()
        mirror.check()
    finish(here)
    mirror.hear()
    mirror.check()
    return mirror


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        ("core", range(1)),
        ("blocks", range(19, 20)),
        *[pytest.param("core", range(seed, seed + 50), marks=pytest.mark.long) for seed in range(1, 200, 50)],
        pytest.param("blocks", range(20, 40), marks=pytest.mark.long),
    ],
)
def test_who_hears_all_knows_what_is_in_each_tier(kind: str, seeds: range) -> None:
    mirrors = []
    for seed in seeds:
        print(f"seed {seed}")
        life, dice = born(seed, kind)
        live(life, dice, 250 if len(seeds) > 1 else {"core": 80, "blocks": 100}[kind])
        mirrors.append(retold(life))
    assert sum(each.entered for each in mirrors) >= sum(each.left for each in mirrors) > 0
    assert {tier for each in mirrors for tier, _ in each.pages} >= {Tier.HOST, Tier.STORAGE}


def test_a_listener_that_comes_late_or_missed_some_is_told_all_anew() -> None:
    life, dice = born(1)
    live(life, dice, 150)
    world = life.world()
    assert isinstance(world, World)
    for action in life.actions[: len(life.actions) // 2]:
        act(world, action)
    mirror = Mirror(*world.cores)
    mirror.hear()
    mirror.check()
    for action in life.actions[len(life.actions) // 2 :]:
        act(world, action)
    for core in world.cores:
        core.tell().take()  # lost
        core.tell().tell_all()
    mirror.hear()
    mirror.check()
    assert mirror.began == 2


def test_the_heads_of_pages_undo_what_binds_them_to_their_chunk() -> None:
    for page_tokens in (1, 4, 8, 16):
        tokens = [*range(100, 100 + 5 * 16 + 3)]
        packed, width = pack(tokens), page_tokens * TOKEN_BYTES
        bound, first = bind_to_chunk(packed, page_tokens, 16), heads(packed, page_tokens)
        pages, size = len(tokens) // page_tokens, min(32, width)
        assert len(first) == pages * size
        back = b"".join(
            first[at * size : (at + 1) * size] + bound[at * width + size : (at + 1) * width] for at in range(pages)
        )
        assert back == packed[: pages * width]


def test_rows_of_a_set() -> None:
    for pages in range(1 << 7):
        assert of(at for start, stop in spans(pages) for at in range(start, stop)) == pages
    assert [*spans(0b1101110)] == [(1, 4), (5, 7)]
