"""How long a claimed request waits for storage: for its own copies, not for those before them."""

import pytest

from kvarve.core.copies.effects import Began
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import Patience
from tests.sim.world import ATTENTION, PAGE_TOKENS, STATE, World, config, prompt


def stocked(prompts: int, pages: int = 6, **settings: object) -> World:
    """Storage has some prompts, and memory nothing."""
    world = World(config=config(ATTENTION, host=64, storage=True, **settings))
    for seed in range(prompts):
        world.stock(b"".join(token.to_bytes(4, "little") for token in prompt(pages, seed=seed)))
    return world


def waiting(world: World, seed: int, patience: Patience, pages: int = 6) -> Lease:
    lease = world.open(prompt(pages, seed=seed), patience=patience)
    assert not world.claim(lease)
    return lease


def ops(lease: Lease) -> list[int]:
    return sorted(lease.ops)


def test_patience_does_not_run_while_a_probe_waits_behind_others_that_go_on() -> None:
    world = stocked(8)
    leases = [waiting(world, seed, Patience(2)) for seed in range(8)]
    for lease in leases:
        (probe,) = ops(lease)
        assert lease.phase is Phase.PROBING, "however long those before it took"
        world.step([Began(probe)], later_s=1.0)
        world.step([world.end(probe)], later_s=0.5)
        assert lease.phase is Phase.FETCHING


def test_patience_runs_where_nothing_moves() -> None:
    """All workers hang, so a request that waits behind them gives up as if they were its own."""
    world = stocked(1)
    lease = waiting(world, 0, Patience(2))
    world.step(later_s=2.1)
    assert lease.ready and lease.boundary == 0


def test_copies_of_others_put_it_off_only_so_long() -> None:
    world = stocked(40, storage_deadline_s=5.0)
    last = waiting(world, 39, Patience(2))
    for seed in range(39):
        world.step(later_s=0.9)
        if last.ready:
            break
        other = waiting(world, seed, Patience(100))
        world.step([Began(*ops(other))])
    assert last.ready and 7.0 <= world.now < 8.0


def test_what_a_probe_took_of_the_patience_is_missing_for_the_copies() -> None:
    world = stocked(1)
    lease = waiting(world, 0, Patience(2))
    (probe,) = ops(lease)
    world.step([Began(probe)])
    world.step([world.end(probe)], later_s=1.5)
    (fetch,) = ops(lease)
    world.step([Began(fetch)], later_s=0.4)
    world.step(later_s=0.4)
    assert lease.phase is Phase.FETCHING
    world.step(later_s=0.2)
    assert lease.ready


@pytest.mark.parametrize("each", [True, False])
def test_wait_complete_waits_as_long_as_copies_end_one_by_one(each: bool) -> None:
    """100 pages, a second for each copy, and a patience of two."""
    world = World(config=config(ATTENTION, STATE, device=128, host=256, storage=True, batch_pages=4))
    world.stock(b"".join(token.to_bytes(4, "little") for token in prompt(100)))
    lease = waiting(world, 0, Patience(2, each=each), pages=100)
    world.step([world.end(*ops(lease))])
    for op in ops(lease):
        world.step([Began(op)] if op in world.flying else [])
        world.step([world.end(op)] if op in world.flying else [], later_s=1.0)
    while lease.phase is Phase.LOADING:
        world.step([world.end(op) for op in ops(lease)])
    assert lease.ready and lease.boundary == (100 if each else 0), "the state is in the last copy"


def test_patience_counts_from_the_first_step_for_a_request_that_came_before_it() -> None:
    world = stocked(1)
    lease = waiting(world, 0, Patience(2))
    world.core.prefetch.postpone(lease, 1000.0)
    world.step(later_s=1001.9)
    assert lease.phase is Phase.PROBING
    world.step(later_s=0.2)
    assert lease.ready


def test_a_late_page_is_not_kept_under_the_name_of_what_has_replaced_its_tokens() -> None:
    world = stocked(1)
    lease, ours = waiting(world, 0, Patience(2)), prompt(6, seed=9)
    world.step([world.end(*ops(lease))])
    (fetch,) = ops(lease)
    world.step(later_s=5.0)
    assert lease.ready and lease.boundary == 0, "it did not wait any longer"
    world.extend(lease, ours[2 * PAGE_TOKENS :], replaced=len(prompt(6)) - 2 * PAGE_TOKENS)
    world.step([world.end(fetch)])
    both = prompt(6)[: 2 * PAGE_TOKENS] + ours[2 * PAGE_TOKENS :]
    assert world.hit(prompt(6)) == world.hit(both) == (0, 2), "the pages before those are the same"
    world.close(lease)
