"""A core over an engine's blocks: which pages the engine has, which it loads, and when its blocks are released."""

from collections import Counter
from itertools import count

import pytest

from kvarve.core.lease import Lease, Phase
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, EVERY_PAGE, STATE, WINDOW, config, fork, prompt
from tests.sim.world.engine_blocks_world import EngineWorld
from tests.sim.world.life import born, live

STEPS = 2000


def world(*pools: object, host: int = 64, **rest: object) -> EngineWorld:
    settings = config(*pools, device=None, host=host, keep_states=EVERY_PAGE, **rest)  # type: ignore[arg-type]
    return EngineWorld(settings, blocks=200, pieces=[1, 2, 3][: len(pools)])


def saved(here: EngineWorld, pages: int = 6) -> None:
    """A prompt that is in the host, and not in the engine's blocks."""
    here.request(prompt(pages))
    here.evict()
    assert not here.blocks.cached


def claimed(here: EngineWorld, pages: int = 6) -> Lease:
    lease = here.open(prompt(pages))
    here.claim(lease)
    here.settle()
    here.claim(lease)
    return lease


def test_lives_over_an_engines_blocks_break_no_law() -> None:
    steps, seen = 0, Counter[str]()
    for seed in count(704):
        print(f"python -m tests.sim.world --blocks --seeds {seed}:{seed + 1}")
        life = live(*born(seed, "blocks"))
        steps, seen = steps + life.steps, seen + life.seen + life.happened()
        if steps >= STEPS:
            break
    expected = {"brought", "declined", "saved", "evicted by the engine", "out of blocks", "counted loaded"}
    expected |= {"hit pages from device", "hit pages from host", "counted stored", "counted fetched", "lost"}
    assert not (missing := expected - set(+seen)), missing


def test_a_lease_offers_what_the_engine_lacks_for_the_deepest_boundary() -> None:
    here = world(ATTENTION, STATE)
    saved(here)
    lease = claimed(here)
    assert lease.phase is Phase.OFFERED and lease.boundary == 6
    assert lease.offered == [0b111111, 0b100000]
    here.load(lease)
    here.settle()
    assert lease.ready and lease.boundary == 6 and lease.from_tiers() == (0, 6, 0)


def test_blocks_are_released_only_when_their_copy_has_ended() -> None:
    """A request that was aborted must not free blocks that a copy still writes to."""
    here = world(ATTENTION)
    saved(here)
    lease = claimed(here)
    here.load(lease)
    (op,) = here.flying
    here.close(lease)
    held = [handle for handle, users in here.blocks.users.items() if users]
    assert len(held) == 6, "the copy is in flight"
    here.step([here.end(op)])
    assert not +here.blocks.users
    here.drain()


def test_a_rotten_page_lowers_the_boundary_and_is_replaced_by_the_next_save() -> None:
    here = world(ATTENTION, STATE)
    saved(here)
    here.rot(Tier.HOST, 3, prompt(6))
    lease = claimed(here)
    here.load(lease)
    here.settle()
    assert lease.ready and lease.boundary < 4 and here.core.counters.bad_host == 1
    here.forward(lease, 6)
    here.save(lease, -1)
    here.settle()
    here.close(lease)
    assert here.hit(prompt(6)) == (0, 6)


def test_a_page_behind_a_gap_is_not_saved() -> None:
    here = world(ATTENTION)
    lease = here.start(prompt(6))
    here.forward(lease, 6)
    assert here.save(lease, 0b110111) == [0b000111]
    assert here.save(lease, 0b111000) == [0b111000], "the next save begins where the copies in flight end"
    here.settle()
    assert here.hit(prompt(6)) == (0, 6)
    assert here.save(lease, -1) == [0], "and nothing is saved twice"


@pytest.mark.parametrize("engine_has", [0, 3])
@pytest.mark.parametrize("pools", [(ATTENTION,), (ATTENTION, WINDOW, STATE)])
def test_storage_brings_the_pages_behind_those_that_only_the_engine_has(
    pools: tuple[object, ...], engine_has: int
) -> None:
    """They were fetched for nothing: the host takes no page of a chain behind a gap."""
    here = world(*pools, storage=True)
    here.request(prompt(6))
    here.settle()
    here.flush(Tier.HOST)
    here.evict(pick=engine_has)
    lease = claimed(here)
    here.load(lease)
    here.settle()
    assert lease.ready and lease.boundary == 6 and here.core.counters.duplicates == 0


def test_saving_later_pages_does_not_evict_those_that_they_rest_on() -> None:
    here = world(ATTENTION, STATE, host=4)
    lease = here.start(prompt(9))
    for pages in range(1, 10):
        here.forward(lease, pages)
        here.save(lease, -1)
        here.settle()
    core, blocks = here.core, here.core.engine_blocks
    assert blocks.kept(lease) == blocks.kept(lease, coming=False) == 4
    assert (core.counters.backed_up, core.counters.uncached) == (8, 2 * 5), "each page is copied, or counted, once"


@pytest.mark.parametrize("pool", [STATE, WINDOW])
def test_where_prompts_branch_pages_are_kept_though_the_host_is_full_of_ends(pool: object) -> None:
    here = world(ATTENTION, pool, host=[200, 12])  # type: ignore[arg-type]
    for seed in range(1, 6):
        here.request(prompt(6, seed=seed))
    found = []
    for talk in range(4):
        here.evict()
        found.append(here.request(fork(6, talk)).boundary)
    assert found[2:] == [6, 6], "the second prompt shows where they branch"
