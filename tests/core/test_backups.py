"""Pages on their way to a storage that fails, is slow, or is not worth it."""

import pytest

from kvarve.core.copies.dirty import BUSY_S, LOOK_AGAIN_S, RETRY_BUDGET
from kvarve.core.copies.effects import Copy
from kvarve.core.copies.limits import BACK_OFF_S, MAX_BACK_OFF_S
from kvarve.core.lease import Phase
from kvarve.pages.keys import KEY_BYTES, names, pack, root_key
from kvarve.pages.pools import PoolSpec, Tier
from tests.sim.world import ATTENTION, EVERY_PAGE, STATE, World, config, fork, prompt, runs
from tests.sim.world.scenes import PAGE_TOKENS

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
PAGE_BYTES = ATTENTION.payload_bytes


def stores(world: World) -> list[int]:
    """The stores in flight."""
    return [op for op, each in world.flying.items() if isinstance(each, Copy) and each.target is STORAGE]


def others(world: World) -> list[int]:
    return [op for op in world.flying if op not in stores(world)]


def write(world: World, *seeds: int, pages: int = 4) -> None:
    """Prompts are computed and backed up to the host; their stores are sent if allowed, and stay in flight."""
    for seed in seeds:
        lease = world.start(prompt(pages, seed=seed), read=False)  # so that nothing asks storage
        world.grow(lease, pages)
        world.publish(lease, lease.grown)
        world.close(lease)
    world.step()
    while others(world):
        world.step([world.end(op) for op in others(world)])


def fail(world: World, later_s: float = 0.0) -> None:
    """All stores in flight fail."""
    world.step([world.end(op, lost=-1) for op in stores(world)], later_s)


# --- a storage that fails


def test_after_a_failed_store_nothing_is_stored_for_a_while_and_then_one_copy_tries() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1, 2, 3)
    assert len(stores(world)) == 3
    fail(world)
    assert not stores(world)
    world.step(later_s=BACK_OFF_S * 0.99)
    assert not stores(world)
    world.step(later_s=BACK_OFF_S * 0.02)
    assert len(stores(world)) == 1
    for _ in range(3):
        world.step(later_s=1.0)
    assert len(stores(world)) == 1, "storage is half-open until that store has ended"
    world.step([world.end(op) for op in stores(world)])
    assert len(stores(world)) == 2, "and when it has succeeded the others follow at once"
    world.settle()
    assert len(world.storage.objects) == 12


def test_a_rest_is_twice_as_long_each_time_up_to_a_bound_and_short_again_after_a_good_store() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1)
    rest_s = BACK_OFF_S
    for _ in range(12):
        fail(world)
        begun = world.now
        assert world.core.storage.back_off_until == pytest.approx(begun + rest_s)
        world.step(later_s=rest_s)
        rest_s = min(MAX_BACK_OFF_S, 2 * rest_s)
    assert rest_s == MAX_BACK_OFF_S
    world.step([world.end(op) for op in stores(world)])
    assert len(world.storage.objects) == 4
    write(world, 2)
    fail(world)
    assert world.core.storage.back_off_until == pytest.approx(world.now + BACK_OFF_S)


def test_a_page_that_was_bad_in_the_host_is_not_the_storages_fault() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1, 2)
    first, second = stores(world)
    world.step([world.end(first, rotten=0b1), world.end(second)])
    world.settle()
    assert world.now == 0.0 and len(world.storage.objects) == 8, "it was backed up anew, and nothing backed off"


def test_what_was_sent_before_a_rest_does_not_make_it_longer() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1, 2, 3)
    ends = [world.end(op, lost=-1) for op in stores(world)]
    world.step(ends[:1])
    world.step(ends[1:], later_s=BACK_OFF_S / 2)
    world.step(later_s=BACK_OFF_S / 2)
    assert len(stores(world)) == 1


def test_a_storage_that_was_away_gets_all_that_is_still_in_memory() -> None:
    """However often it failed: an outage uses up no retry budget."""
    world = World(config=config(ATTENTION, host=64, storage=True))
    for seed in range(1, 6):
        write(world, seed)
        for _ in range(2 * RETRY_BUDGET):
            fail(world, later_s=MAX_BACK_OFF_S)
    assert not world.storage.objects and world.core.counters.given_up == 0
    world.step(later_s=MAX_BACK_OFF_S)
    world.settle()
    assert len(world.storage.objects) == 20
    assert world.core.counters.dropped_evicted == world.core.counters.dropped_failed == 0


def test_what_storage_has_may_leave_memory_uncounted() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    assert world.core.counters.dropped_evicted == 0


def test_a_storage_that_keeps_failing_is_not_waited_for() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1)
    for _ in range(RETRY_BUDGET):
        assert not world.core.idle()
        fail(world)
        assert not stores(world)
        world.step(later_s=MAX_BACK_OFF_S) if world.core.storage.failures < RETRY_BUDGET else None
    assert world.core.idle()


def test_the_host_is_not_emptied_ahead_of_need_while_stores_rest() -> None:
    world = World(config=config(ATTENTION, device=16, host=16, storage=True, write_policy="back"))
    for seed in range(1, 12):
        write(world, seed)
        if stores(world):
            fail(world)
    assert world.core.backups.backing_off()
    assert sum(run.here[1].bit_count() for run in runs(world.core)) == 16, "its pages cannot be stored, and may stay"


def test_another_storage_does_not_rest_for_the_failures_of_the_last_one() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 1)
    fail(world)
    world.detach()
    world.attach(back_up=True)
    world.step()
    assert len(stores(world)) == 1


def test_a_run_that_is_split_while_stores_rest_is_stored_whole() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    write(world, 0, pages=6)
    fail(world)
    lease = world.start(fork(3, 7))
    while not world.claim(lease):
        world.step([world.end(op) for op in others(world)])
    world.step()
    assert lease.boundary == 3 and not stores(world)
    world.grow(lease, 6)
    world.publish(lease, 6)
    world.close(lease)
    assert len([*runs(world.core)]) == 4
    world.settle()
    assert len(world.storage.objects) == 9


# --- a storage that is slow


def test_a_slow_storage_holds_its_share_and_nothing_due_to_it_is_forgotten() -> None:
    world = World(config=config(ATTENTION, host=40, storage=True, host_share=0.4))
    write(world, *range(1, 9))
    for _ in range(10 * RETRY_BUDGET):
        world.step(later_s=1.0)
        assert sum(len(world.flying[op].pages) for op in stores(world)) == 8
    world.settle()
    assert len(world.storage.objects) == 32
    assert world.core.counters.given_up == 0


def test_where_pools_share_the_host_copies_hold_a_share_of_its_bytes_whichever_pool_has_them() -> None:
    shared = {"host": (40, [1, 1], [1, 1])}
    world = World(config=config(ATTENTION, STATE, device=64, host=1, storage=True, cut=shared, host_share=0.5))
    write(world, 1, 2, pages=12)
    assert sum(len(world.flying[op].pages) for op in stores(world)) == 10, "half of the share, all of one pool"
    world.settle()
    assert len(world.storage.objects) == 26
    world.flush(DEVICE, HOST)
    first, second = (world.open(prompt(12, seed=seed)) for seed in (1, 2))
    for _ in range(20):
        world.step([world.end(op) for op in [*world.flying]])
    assert sum(world.core.prefetch.held) == 13 and second.phase is Phase.PROBING, "of 20, so that another waits"
    assert world.ready(first) and first.boundary == 12
    world.close(first)
    assert world.ready(second) and second.boundary == 12


def test_a_slow_storage_does_not_keep_pages_from_coming_down_to_the_host() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True, backup_pages=4))
    write(world, 1)
    assert len(stores(world)) == 1
    write(world, 2, 3)
    assert world.resident(HOST) == 12 and len(stores(world)) == 1


def test_what_finds_no_room_in_the_host_goes_down_when_there_is_some() -> None:
    world = World(config=config(ATTENTION, device=64, host=4, storage=True, host_share=1.0))
    world.stock(pack(prompt(4, seed=1)))
    waits = world.open(prompt(4, seed=1))
    world.settle()
    assert world.resident(HOST) == 4 and waits.holds, "the pages fetched for it"
    write(world, 2)
    world.settle()
    assert world.core.idle() and world.core.backups.count_dirty(), (
        "it waits for host slots, and `idle` does not wait for it"
    )
    world.close(waits)
    world.step(later_s=LOOK_AGAIN_S)
    world.settle()
    assert len(world.storage.objects) == 8 and not world.core.backups.count_dirty()


# --- few large stores


def test_a_run_has_one_store_in_flight_and_the_next_takes_all_that_came_to_the_host_meanwhile() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True, batch_pages=2, store_bytes=8 * PAGE_BYTES))
    lease = world.start(prompt(14), read=False)
    sizes = list[int]()
    for upto in range(2, 15, 2):
        world.grow(lease, upto)
        world.publish(lease, upto)
        world.step()
        world.step([world.end(op) for op in others(world)])
        assert len(stores(world)) == 1
        if not sizes:
            sizes.append(len(world.flying[stores(world)[0]].pages))
    while stores(world):
        world.step([world.end(op) for op in stores(world)])
        sizes += [len(world.flying[op].pages) for op in stores(world)]
    assert sizes == [2, 8, 4] and len(world.storage.objects) == 14


@pytest.mark.parametrize(("pages", "copies"), [(8, [8]), (10, [10]), (11, [8, 3]), (18, [8, 10])])
def test_a_rest_of_a_quarter_goes_with_the_copy_before_it(pages: int, copies: list[int]) -> None:
    few = {"batch_pages": 2, "backup_bytes": 8 * PAGE_BYTES}
    world = World(config=config(ATTENTION, device=64, host=64, **few))
    lease = world.start(prompt(pages), read=False)
    world.grow(lease, pages)
    world.publish(lease, pages)
    world.step()
    assert [len(world.flying[op].pages) for op in others(world)] == copies


def test_a_prompt_is_stored_though_others_have_another_page_whenever_their_store_ends() -> None:
    world = World(config=config(ATTENTION, device=256, host=256, storage=True))
    growing = [world.start(prompt(8, seed=seed), read=False) for seed in range(12)]
    for upto in range(1, 6):
        stored = stores(world)
        for lease in growing:
            world.grow(lease, upto)
            world.publish(lease, upto)
        if upto == 1:
            write(world, 99)
        world.step()
        while others(world):
            world.step([world.end(op) for op in others(world)])
        world.step([world.end(op) for op in stored])
    assert {*world.storage.objects.values()} >= {*_keys(prompt(4, seed=99))}


def test_a_store_that_hangs_holds_the_rest_of_its_run_for_a_moment() -> None:
    world = World(config=config(ATTENTION, device=64, host=64, storage=True))
    lease = world.start(prompt(16), read=False)
    for upto in (2, 16):
        world.grow(lease, upto)
        world.publish(lease, upto)
        world.step()
        world.step([world.end(op) for op in others(world)])
    (hung,) = stores(world)
    world.step(later_s=BUSY_S / 2)
    assert stores(world) == [hung]
    world.step(later_s=BUSY_S / 2)
    (op,) = {*stores(world)} - {hung}
    world.step([world.end(op)])
    assert len(world.storage.objects) == 14 and world.core.backups.count_dirty() == 2


def _keys(tokens: list[int]) -> list[bytes]:
    named = names(root_key(b"world", ""), b"", pack(tokens), PAGE_TOKENS)
    return [named[at : at + KEY_BYTES] for at in range(0, len(named), KEY_BYTES)]


# --- a storage that does not pay


def test_what_came_from_storage_and_leads_nowhere_has_saved_nothing() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(6))
    world.step([world.end(op) for op in [*world.flying]])  # the probe
    world.step([world.end(op, lost=0b1000) for op in [*world.flying]])
    assert world.ready(lease) and lease.boundary == 3
    assert world.core.counters.used_bytes == 3 * PAGE_BYTES
    assert world.core.counters.used_tokens == 3 * world.core.config.page_tokens


def test_a_beginning_that_many_share_has_proven_itself_as_far_as_they_share_it() -> None:
    world = World(
        config=config(ATTENTION, host=64, storage=True, offload_pays_at=0.5, offload_horizon_bytes=4 * PAGE_BYTES)
    )
    world.request(prompt(4, seed=9))
    assert world.core.governor.paused
    for word in range(20, 23):  # the first makes one run, the second splits it
        world.request(fork(6, word, more=20))
    names = {world._key(prompt(6), at, "") for at in range(6)}
    assert names <= {key for key, _, _ in world.storage.objects}


@pytest.mark.parametrize("pool", [ATTENTION, STATE], ids=lambda pool: pool.name)
def test_in_a_pause_all_that_a_request_resumes_from_has_been_used_once_more(pool: PoolSpec) -> None:
    """Also where no page rests on those before it."""
    pays = {"offload_pays_at": 0.5, "offload_horizon_bytes": pool.payload_bytes}
    world = World(config=config(pool, host=64, storage=True, keep_states=EVERY_PAGE, **pays))
    world.request(prompt(4, seed=9))
    before = len(world.storage.objects)
    write(world, 0, pages=6)
    lease = world.start(fork(3, 7), read=False)  # so the first six pages are two runs now
    world.grow(lease, 6)
    world.publish(lease, 6)
    world.close(lease)
    world.settle()
    assert world.core.governor.paused and len(world.storage.objects) == before
    world.request(prompt(6))
    assert len(world.storage.objects) == before + 6


def test_what_storage_saved_is_counted_in_tokens_and_bytes_and_keeps_storing_going() -> None:
    world = World(
        config=config(
            ATTENTION, STATE, host=64, storage=True, offload_pays_at=0.5, offload_horizon_bytes=6 * PAGE_BYTES
        )
    )
    for _ in range(3):
        lease = world.request(prompt(4))
        world.flush(DEVICE, HOST)
    assert lease.from_tiers() == (0, 0, 4)
    counters = world.core.counters
    assert counters.stored_bytes == 5 * PAGE_BYTES
    assert counters.used_bytes == 2 * 5 * PAGE_BYTES, "four attention pages and the last state, twice"
    assert counters.used_tokens == 2 * 4 * world.core.config.page_tokens
    assert world.core.governor.used_share == 2.0
    world.request(prompt(4, seed=1))
    assert not world.core.governor.paused
