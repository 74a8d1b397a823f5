"""The core by example: what it finds, brings back, keeps, gives up and forgets."""

from array import array

import pytest

from kvarve.core.audit import audit
from kvarve.core.backups import RETRY_BUDGET
from kvarve.core.effects import Began, Copy, Probe
from kvarve.core.lease import Phase
from kvarve.core.policies import BEST_EFFORT, WAIT_COMPLETE, Patience, Policies
from kvarve.core.slot_pools import SlotPools
from kvarve.errors import ConfigError
from kvarve.keys import TOKEN_BYTES, extend, pack, root_key
from kvarve.model import Tier
from kvarve.testing.world import ATTENTION, INDEX, PAGE_TOKENS, STATE, WINDOW, World, config, dump, fork, prompt, runs

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


def copies(world: World, source: Tier, target: Tier) -> list[Copy]:
    """All copies along an edge so far."""
    return [each for each in world.log if isinstance(each, Copy) and (each.source, each.target) == (source, target)]


def in_flight(world: World) -> Copy | Probe:
    (effect,) = world.flying.values()
    return effect


# --- what is a hit


def test_six_attention_pages_a_state_after_page_three_and_three_index_keys_give_boundary_zero() -> None:
    world = World(config=config(ATTENTION, STATE, INDEX, host=64))
    world.request(prompt(4))
    world.request(prompt(6))
    world.flush(DEVICE)
    world.rot(HOST, 3, prompt(6), pool=2)
    world.rot(HOST, 5, prompt(6), pool=1)
    lease = world.open(prompt(6))
    world.settle()
    assert world.ready(lease) and lease.boundary == 0
    hit = world.core.lookup(root_key(b"world"), pack(prompt(6)))
    # The state resumes at 4, which the index keys do not reach; the index keys reach 3, where there is no state.
    assert hit.by_pool == (6, 4, 3)
    assert (hit.device, hit.memory, hit.known) == (0, 0, 6)


def test_a_prompt_that_comes_again_resumes_at_its_last_grid_boundary() -> None:
    world = World(config=config(ATTENTION, STATE, grid=2))
    world.request(prompt(7))
    assert world.request(prompt(7)).boundary == 6


@pytest.mark.parametrize(("pages", "extra", "hit"), [(4, 0, 3), (4, 1, 4), (1, 0, 0), (0, 1, 0), (0, 0, 0)])
def test_a_resume_leaves_at_least_one_token_to_compute(pages: int, extra: int, hit: int) -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(pages, extra=extra))
    assert world.request(prompt(pages, extra=extra)).boundary == hit


def test_a_conversation_goes_on_where_the_last_prompt_ended() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE))
    world.request(prompt(4, extra=0))
    assert world.request(prompt(9)).boundary == 4
    assert world.request(prompt(12)).boundary == 9


def test_a_state_is_kept_where_a_prompt_leaves_a_known_one() -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(6))
    assert world.request(fork(3, 7)).boundary == 0, "no earlier prompt branched off here"
    assert world.request(fork(3, 8)).boundary == 3


def test_states_are_kept_every_so_many_tokens_when_asked() -> None:
    world = World(config=config(ATTENTION, STATE, snapshot_every=2 * PAGE_TOKENS))
    world.request(prompt(7))
    assert world.resident(DEVICE, pool=1) == 4, "at 2, 4, 6, and where the prompt ends"
    assert world.hit(prompt(5)) == (4, 4)


def test_attention_alone_resumes_anywhere() -> None:
    world = World(config=config(ATTENTION))
    world.request(prompt(6))
    assert world.request(fork(3, 7)).boundary == 3


def test_a_model_without_attention_resumes_where_its_states_and_windows_are() -> None:
    world = World(config=config(STATE, WINDOW))
    world.request(prompt(6))
    assert world.request(prompt(6)).boundary == 6
    assert world.request(prompt(9)).boundary == 6
    assert [world.resident(DEVICE, pool) for pool in (0, 1)] == [2, 6], "what 6 and 9 need"


def test_salts_share_nothing() -> None:
    world = World(config=config(ATTENTION))
    world.request(prompt(4), salt="mine")
    assert world.hit(prompt(4), salt="mine") == (4, 4)
    assert world.hit(prompt(4), salt="yours") == world.hit(prompt(4)) == (0, 0)
    assert world.request(prompt(4), salt="yours").boundary == 0
    assert world.resident(DEVICE) == 8


def test_salts_share_nothing_even_where_the_tokens_are_the_same_bytes_in_memory() -> None:
    world = World(config=config(ATTENTION))
    world.request(prompt(4), salt="mine")
    tokens = pack(prompt(4))
    mine, yours = (world.core.open(root_key(b"world", salt), tokens, now=0.0) for salt in ("mine", "yours"))
    assert world.core.claim(mine, now=0.0) and world.core.claim(yours, now=0.0)
    assert (mine.boundary, yours.boundary) == (4, 0)


def test_a_request_that_must_not_read_resumes_from_nothing_and_still_keeps_what_is_new() -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(4))
    assert world.request(prompt(6), read=False).boundary == 0
    assert world.hit(prompt(6)) == (6, 6)


def test_a_lookup_changes_nothing() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, device=12, host=12, storage=True))
    for tokens in (prompt(5), fork(3, 7), prompt(2, seed=1)):
        world.request(tokens)
    lease = world.open(prompt(8))
    before = dump(world.core)
    for pages in range(9):
        for salt in ("", "nobody"):
            world.core.lookup(root_key(b"world", salt), pack(prompt(pages)))
            world.core.lookup(root_key(b"world", salt), pack(fork(pages // 2, 7, 5)))
    assert dump(world.core) == before
    world.close(lease)


# --- where it comes from


def test_a_hit_on_the_device_copies_nothing() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(5))
    so_far = len(world.log)
    lease = world.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (5, (5, 0, 0))
    assert len(world.log) == so_far


def test_a_hit_in_the_host_says_so() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(5))
    assert world.flush(DEVICE) == 5
    lease = world.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (5, (0, 5, 0))
    assert world.core.counters.loaded == 5 and world.core.counters.fetched == 0


def test_a_hit_in_storage_says_so_and_outlives_a_restart() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(5))
    reborn = World(config=world.core.config)
    reborn.storage = world.storage
    lease = reborn.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (5, (0, 0, 5))
    assert reborn.core.counters.fetched == reborn.core.counters.loaded == 6
    assert reborn.core.counters.stored == 0, "what came from storage is not written to it again"


def test_a_hit_in_all_three_tiers_is_told_apart() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.request(prompt(4))
    world.flush(DEVICE)
    world.request(prompt(2))
    lease = world.request(prompt(6))
    assert (lease.boundary, lease.from_tiers()) == (6, (2, 2, 2))


def test_the_host_brings_back_the_windows_tail_and_one_state_and_no_more() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, host=64, snapshot_every=PAGE_TOKENS))
    world.request(prompt(8))
    assert [world.resident(HOST, pool) for pool in range(3)] == [8, 8, 8]
    world.flush(DEVICE)
    lease = world.start(prompt(8))
    (load,) = copies(world, HOST, DEVICE)
    assert [sum(page.pool == pool for page in load.pages) for pool in range(3)] == [8, 3, 1]
    world.settle()
    assert lease.ready and lease.boundary == 8


def test_shallow_pages_travel_first() -> None:
    world = World(config=config(STATE, ATTENTION, host=64, storage=True, batch_pages=2))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(6))
    world.step([world.end(in_flight(world).op)])
    order = [lease.keys.index(page.key) // 32 for copy in copies(world, STORAGE, HOST) for page in copy.pages]
    assert order == sorted(order) and len(order) == 7


def test_no_device_of_our_own_room_is_spent_on_what_the_device_has() -> None:
    world = World(config=config(ATTENTION, STATE, device=[6, 2], host=64))
    world.request(prompt(5))
    world.request(prompt(1, seed=1))  # takes the sixth page and the other state
    world.core.flush([])
    assert world.request(prompt(5)).boundary == 5
    assert not copies(world, HOST, DEVICE)


# --- when room is short


def test_a_request_on_a_device_full_of_pinned_pages_is_computed_without_keeping() -> None:
    world = World(config=config(ATTENTION, STATE, device=4, host=64))
    world.request(prompt(3, seed=1))
    first = world.start(prompt(4))
    world.grow(first, 4)
    world.publish(first, 4)
    second = world.start(prompt(3, seed=1))
    world.settle()
    assert world.ready(second) and second.boundary == 0, "it is in the host, but there is nowhere to bring it"
    assert world.grow(second, 3) == [{}, {}]
    assert world.core.keepable(second) == 0 and world.core.counters.uncached == 3
    world.publish(second, 0)
    world.close(second)
    world.close(first)
    assert world.request(prompt(3, seed=1)).boundary == 3


def test_a_request_is_kept_as_far_as_there_is_room() -> None:
    world = World(config=config(ATTENTION, STATE, device=[4, 8]))
    lease = world.request(prompt(6))
    assert world.core.counters.uncached == 2 and lease.done == 4
    assert world.hit(prompt(6)) == (4, 4), "the last boundary that the device can hold has its state"
    assert world.resident(DEVICE) == 4


def test_a_deeper_hit_that_has_no_room_becomes_a_shallower_one() -> None:
    world = World(config=config(ATTENTION, device=6, host=64))
    world.request(prompt(6))
    world.flush(DEVICE)
    other = world.start(prompt(3, seed=1))
    world.grow(other, 3)
    lease = world.request(prompt(6))
    assert lease.boundary == 3 and lease.from_tiers() == (0, 3, 0)


def test_eviction_takes_the_tail_first() -> None:
    world = World(config=config(ATTENTION, device=6))
    world.request(prompt(6))
    world.request(prompt(2, seed=1))
    assert world.hit(prompt(6)) == (4, 4) and world.hit(prompt(2, seed=1)) == (2, 2)


def test_eviction_takes_what_was_used_longest_ago() -> None:
    world = World(config=config(ATTENTION, device=6))
    world.request(prompt(3, seed=1))
    world.request(prompt(3, seed=2))
    world.request(prompt(3, seed=1))
    world.request(prompt(3, seed=3))
    assert [world.hit(prompt(3, seed=seed))[0] for seed in (1, 2, 3)] == [3, 0, 3]


def test_a_shared_beginning_outlives_its_branches() -> None:
    world = World(config=config(ATTENTION, device=8))
    world.request(fork(2, 7, 7))
    world.request(fork(2, 8, 7))
    world.request(prompt(6, seed=1))
    assert world.hit(fork(2, 7, 7)) == (2, 2)


def test_what_a_lease_holds_is_never_evicted() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, device=12, host=12))
    world.request(prompt(6))
    lease = world.start(prompt(6))
    for seed in range(1, 6):
        world.request(prompt(6, seed=seed))
    world.flush(DEVICE, HOST)
    assert world.core.slots(lease, 0)[0] == range(6) and world.core.slots(lease, 2)[0] == range(5, 6)
    world.close(lease)
    world.drain()


def test_what_the_device_has_of_a_prompt_stays_while_the_rest_of_it_is_loaded() -> None:
    world = World(config=config(ATTENTION, host=64))
    for word in (7, 8):
        world.request(fork(3, word))
    world.flush(DEVICE)
    world.request(prompt(3))
    lease = world.start(fork(3, 7))
    assert lease.phase is Phase.LOADING and world.resident(DEVICE) == 3
    assert world.flush(DEVICE) == 0
    assert world.ready(lease) and lease.from_tiers() == (3, 2, 0)


def test_a_state_goes_with_the_attention_pages_that_lead_to_it() -> None:
    world = World(config=config(ATTENTION, STATE, device=8))
    world.request(prompt(4))
    assert world.resident(DEVICE, pool=1) == 1
    world.request(prompt(7, seed=1))
    assert world.resident(DEVICE, pool=1) == 1 and world.hit(prompt(4)) == (0, 0)
    assert world.hit(prompt(7, seed=1)) == (7, 7)


def test_attention_pages_go_with_the_index_keys_of_their_positions() -> None:
    world = World(config=config(ATTENTION, INDEX, STATE, device=[16, 6, 16]))
    world.request(prompt(4))
    world.request(prompt(4, seed=1))
    assert [world.resident(DEVICE, pool) for pool in range(3)] == [6, 6, 1]


def test_a_flush_says_how_many_pages_went() -> None:
    world = World(config=config(ATTENTION, STATE, device=8))
    world.request(prompt(4))
    assert world.flush(DEVICE) == 5, "four attention pages and the state that rested on them"


# --- when something goes wrong


def test_a_host_page_that_fails_its_check_is_not_used_and_a_recomputed_one_replaces_it() -> None:
    world = World(config=config(ATTENTION, host=64))
    world.request(prompt(5))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(5))
    lease = world.request(prompt(5))
    assert lease.boundary == 2 and world.core.counters.bad_host == 1
    world.flush(DEVICE)
    lease = world.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (5, (0, 5, 0)) and world.core.counters.bad_host == 1


def test_a_bad_state_in_the_host_is_replaced_by_a_recomputed_one_too() -> None:
    world = World(config=config(ATTENTION, STATE, host=64))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.rot(HOST, 3, prompt(4), pool=1)
    assert world.request(prompt(4)).boundary == 0
    world.flush(DEVICE)
    assert world.request(prompt(4)).boundary == 4


def test_a_host_page_found_bad_on_its_way_to_storage_is_backed_up_anew_from_the_device() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    lease = world.start(prompt(4))
    world.settle()
    world.grow(lease, 4)
    world.publish(lease, 4)
    world.close(lease)
    world.step()
    world.step([world.end(in_flight(world).op)])
    store = in_flight(world)
    assert isinstance(store, Copy) and store.target is STORAGE
    world.step([world.end(store.op, rotten=0b100)])
    world.settle()
    assert world.core.counters.bad_host == 1
    world.flush(DEVICE)
    world.settle()
    assert world.hit(prompt(4)) == (0, 4), "the device had a good page all the time"
    assert len(world.storage.objects) == 4


def test_a_page_with_a_bad_copy_in_the_host_may_leave_when_a_good_one_has_taken_its_place() -> None:
    world = World(config=config(ATTENTION, device=8, host=64))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(4))
    one, two = world.start(prompt(4)), world.start(prompt(4))
    first, second = world.flying
    world.step([world.end(first)])
    assert one.boundary == 2
    world.compute(one, rest=False)  # while the other still reads the bad one, which therefore stays
    world.step([world.end(second)])
    world.close(two)
    for _ in range(2):
        world.flush(DEVICE)
        world.settle()
    assert world.hit(prompt(4)) == (0, 4) and world.resident(DEVICE) == 0


def test_a_state_with_a_bad_copy_in_the_host_gives_its_room_though_that_copy_is_still_read() -> None:
    world = World(config=config(ATTENTION, STATE, device=8, host=64))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.rot(HOST, 3, prompt(4), pool=1)
    one, two = world.start(prompt(4)), world.start(prompt(4))
    first, second = world.flying
    world.step([world.end(first)])
    world.close(two)  # whose copy goes on
    world.compute(one, rest=False)
    assert world.resident(DEVICE, pool=1) == 1
    world.flush(DEVICE)
    assert world.resident(DEVICE, pool=1) == 0
    world.step([world.end(second)])
    assert world.hit(prompt(4)) == (0, 0), "there was none but the bad one"


def test_a_bad_host_page_is_replaced_by_the_one_in_storage() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(4))
    lease = world.open(prompt(4))
    world.settle()
    assert world.ready(lease) and lease.boundary == 2
    world.close(lease)
    lease = world.open(prompt(4))
    world.settle()
    assert world.ready(lease) and lease.boundary == 4, "storage had a good page all the time"


def test_a_bad_host_page_is_not_replaced_while_a_copy_still_reads_it() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(4))
    one, two = world.start(prompt(4)), world.start(prompt(4))
    first, second = world.flying
    world.step([world.end(first)])
    three = world.open(prompt(4))
    while three.ops:  # storage has a good one, and brings it
        world.step([world.end(op) for op in sorted(three.ops)])
    world.step([world.end(second)])
    assert one.boundary == two.boundary == 2 and world.core.counters.fetched == 1
    for lease in (one, two, three):
        world.close(lease)
    assert world.request(prompt(4)).boundary == 4, "now it may"


def test_a_page_that_storage_lost_lowers_the_boundary() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(5))
    world.flush(DEVICE, HOST)
    world.forget(3, prompt(5))
    lease = world.request(prompt(5))
    assert (lease.boundary, lease.from_tiers()) == (3, (0, 0, 3))


def test_a_page_that_storage_loses_between_probe_and_fetch_lowers_the_boundary() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(5))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(5))
    world.step([world.end(in_flight(world).op)])
    assert lease.phase is Phase.FETCHING
    world.forget(1, prompt(5))
    world.settle()
    assert world.ready(lease) and lease.boundary == 1
    assert world.core.counters.failed == 1
    assert world.core.counters.fetched == 4 and world.resident(HOST) == 1, "what nothing leads to is given back"


def test_a_page_that_storage_corrupted_is_counted_and_lowers_the_boundary() -> None:
    world = World(config=config(ATTENTION, WINDOW, host=64, storage=True, snapshot_every=PAGE_TOKENS))
    world.request(prompt(7))
    world.flush(DEVICE, HOST)
    world.rot(STORAGE, 5, prompt(7), pool=0)
    lease = world.request(prompt(7))
    # Windows 4 to 6 were fetched for boundary 7; those for boundary 5 come in a second round.
    assert lease.boundary == 5 and world.core.counters.bad_storage == 1
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(5))
    world.flush(DEVICE, HOST)
    world.rot(STORAGE, 3, prompt(5))
    lease = world.request(prompt(5))
    assert lease.boundary == 3 and world.core.counters.bad_storage == 1
    world.flush(DEVICE, HOST)
    assert world.request(prompt(5)).boundary == 5, "what was recomputed has been stored again"


def test_a_page_that_storage_lost_is_stored_again_when_it_was_recomputed() -> None:
    world = World(config=config(ATTENTION, STATE, device=[32, 2], host=[32, 1], storage=True))
    world.request(prompt(4))
    for seed in (1, 2, 3):  # the state leaves memory, the attention pages stay
        world.request(prompt(2, seed=seed))
    assert world.hit(prompt(4)) == (0, 0) and world.resident(DEVICE) == 10
    kept = len(world.storage.objects)
    world.forget(3, prompt(4), pool=1)
    assert world.request(prompt(4)).boundary == 0
    assert len(world.storage.objects) == kept


def test_storage_that_answers_nothing_is_a_miss() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(4))
    world.settle(lost=True)
    assert world.ready(lease) and lease.boundary == 0


def test_a_page_that_fails_to_load_is_tried_once_more_and_then_a_miss() -> None:
    world = World(config=config(ATTENTION, host=64))
    world.request(prompt(4))
    world.flush(DEVICE)
    lease = world.start(prompt(4))
    world.step([world.end(in_flight(world).op, lost=0b0100)])
    world.step([world.end(in_flight(world).op, lost=0b01)])
    assert lease.ready and lease.boundary == 2 and world.core.counters.failed == 2
    world.close(lease)
    assert world.request(prompt(4)).boundary == 4


# --- patience


def fetching(how_patient: Patience) -> World:
    """A prompt of six pages on its way from storage, in three copies."""
    world = World(config=config(ATTENTION, host=64, storage=True, batch_pages=2))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(6), patience=how_patient)
    world.step([world.end(in_flight(world).op)])
    assert lease.phase is Phase.FETCHING and len(world.flying) == 3
    return world


def test_what_has_arrived_when_patience_runs_out_is_used() -> None:
    world = fetching(Patience(3))
    (lease,) = world.leases
    first, second, third = world.flying
    assert not world.claim(lease)
    world.step([Began(first)])
    world.step([world.end(first)], later_s=2.9)
    assert lease.phase is Phase.FETCHING
    world.step(later_s=0.2)
    assert lease.phase is Phase.LOADING
    load = max(world.flying)
    world.step([world.end(load)])
    assert lease.ready and (lease.boundary, lease.from_tiers()) == (2, (0, 0, 2))
    world.step([world.end(third), world.end(second)])
    assert world.core.counters.late == 4
    assert world.resident(HOST) == 4, "late pages are kept if they fit on; the third copy came before the second"
    world.drain()


def test_patience_grows_with_what_is_missing() -> None:
    assert Patience(1.5, 2.0).seconds(512) == 2.5
    assert Policies(prefetch_base_s=2.0, prefetch_per_ki_token_s=0.25).patience().seconds(4096) == 3.0
    assert Policies(prefetch_policy="best_effort").patience() == BEST_EFFORT
    assert Policies(prefetch_policy="wait_complete", storage_deadline_s=7.0).patience() == Patience(7.0, each=True)
    with pytest.raises(ConfigError, match="negative"):
        Patience(-1)


def test_patience_does_not_run_out_while_a_request_waits_in_the_queue() -> None:
    world = fetching(Patience(3))
    (lease,) = world.leases
    world.step(later_s=100)
    assert lease.phase is Phase.FETCHING
    assert world.ready(lease) and lease.boundary == 0, "but by the time it is claimed it has"


def test_best_effort_does_not_wait_for_storage() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    lease = world.open(prompt(4), patience=BEST_EFFORT)
    assert isinstance(in_flight(world), Probe) and not lease.ready
    assert world.claim(lease) and lease.boundary == 0
    world.step([world.end(in_flight(world).op)])
    assert not world.flying, "the answer comes too late to fetch anything"


def test_best_effort_takes_what_came_while_the_request_was_queued() -> None:
    world = fetching(BEST_EFFORT)
    (lease,) = world.leases
    first, second, _ = world.flying
    world.step([world.end(second), world.end(first)])
    assert lease.phase is Phase.FETCHING
    world.claim(lease)
    world.step([world.end(op) for op in [*world.flying][1:]])
    assert lease.ready and lease.boundary == 4


def test_endless_patience_waits_for_every_copy_to_end() -> None:
    world = fetching(WAIT_COMPLETE)
    (lease,) = world.leases
    assert not world.claim(lease)
    world.step(later_s=1e9)
    assert lease.phase is Phase.FETCHING
    world.settle()
    assert lease.ready and lease.boundary == 6


# --- requests side by side


def test_what_two_requests_publish_at_once_is_kept_once() -> None:
    world = World(config=config(ATTENTION, STATE, device=16))
    one, two = world.start(prompt(4)), world.start(prompt(4))
    for lease in (one, two):
        world.grow(lease, 4)
    world.publish(one, 4)
    world.publish(two, 4)
    assert world.core.counters.duplicates == 5
    assert world.resident(DEVICE) == 4 and len(world.core.slot_pools.free[0]) == 12
    world.close(one)
    world.close(two)
    world.drain()


def test_two_requests_that_load_the_same_pages_keep_them_once() -> None:
    world = World(config=config(ATTENTION, STATE, device=16, host=16))
    world.request(prompt(4))
    world.flush(DEVICE)
    one, two = world.start(prompt(4)), world.start(prompt(4))
    first, second = world.flying
    world.step([world.end(second), world.end(first)])
    assert one.boundary == two.boundary == 4 and world.resident(DEVICE) == 4
    assert len(world.core.slot_pools.free[0]) == 12


def test_unpublished_room_is_free_when_a_request_is_closed() -> None:
    world = World(config=config(ATTENTION, STATE, device=16))
    lease = world.start(prompt(6))
    world.grow(lease, 6)
    world.publish(lease, 2)
    world.close(lease)
    assert world.resident(DEVICE) == 2 and len(world.core.slot_pools.free[0]) == 14


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_late_completions_of_a_closed_lease_free_their_slots(turns: int) -> None:
    world = World(config=config(ATTENTION, STATE, device=8, host=8, storage=True, batch_pages=2))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    lease = world.start(prompt(4))
    for _ in range(turns):
        world.step([world.end(op) for op in [*world.flying]])
    assert lease.phase is (Phase.PROBING, Phase.FETCHING, Phase.LOADING)[turns] and world.flying
    world.close(lease)
    world.core.close(lease)  # twice is once
    world.settle()
    world.drain()


def test_a_lease_closed_half_way_through_a_fetch_leaves_behind_what_fits_on() -> None:
    world = fetching(WAIT_COMPLETE)
    world.step([world.end(next(iter(world.flying)))])
    world.close(world.leases[0])
    assert len(world.core.slot_pools.free[1]) == 64 - 6 and world.resident(HOST) == 2
    last = [*world.flying][1]
    world.step([world.end(last)])
    assert len(world.core.slot_pools.free[1]) == 64 - 4, "there is a gap before it"
    world.settle()
    assert world.resident(HOST) == 4 and world.core.counters.late == 4 and world.core.prefetch.held == [0]


def test_closing_twice_changes_nothing() -> None:
    world = World(config=config(ATTENTION))
    lease = world.open(prompt(2))
    world.close(lease)
    before = dump(world.core)
    world.core.close(lease)
    assert dump(world.core) == before


# --- backups


def test_write_through_backs_up_what_was_computed_once_and_stores_it() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    world.request(prompt(4))
    assert world.resident(HOST) == 4 and len(world.storage.objects) == 5
    counters = world.core.counters
    assert (counters.backed_up, counters.stored) == (5, 5)
    world.request(prompt(4))
    assert (counters.backed_up, counters.stored) == (5, 5), "and does not do it again"


def test_a_failing_backup_is_tried_so_many_times_and_again_after_the_next_use() -> None:
    world = World(config=config(ATTENTION, host=64))
    lease = world.start(prompt(4))
    world.grow(lease, 4)
    world.publish(lease, 4)
    world.close(lease)
    world.settle(lost=True)
    assert len(copies(world, DEVICE, HOST)) == RETRY_BUDGET and world.core.idle()
    assert world.core.counters.failed == 4 * RETRY_BUDGET and world.core.counters.given_up == 1
    for _ in range(5):
        world.step()
    assert len(copies(world, DEVICE, HOST)) == RETRY_BUDGET
    lease = world.start(prompt(4))
    assert lease.boundary == 4
    world.close(lease)
    world.settle()
    assert len(copies(world, DEVICE, HOST)) == RETRY_BUDGET + 1 and world.resident(HOST) == 4


def test_what_is_used_again_on_its_way_to_storage_is_not_sent_a_second_time() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4), rest=False)
    while not copies(world, HOST, STORAGE):
        world.step([world.end(op) for op in [*world.flying]])
    lease = world.start(prompt(4))
    assert lease.boundary == 4
    world.step()
    assert len(copies(world, HOST, STORAGE)) == 1


def test_backups_in_flight_are_bounded() -> None:
    world = World(config=config(ATTENTION, host=64, batch_pages=2, backup_pages=4))
    for seed in range(1, 5):
        lease = world.start(prompt(5, seed=seed))
        world.grow(lease, 5)
        world.publish(lease, 5)
        world.close(lease)
    most = 0
    while True:
        world.step([world.end(op) for op in [*world.flying][:1]])
        most = max(most, sum(len(effect.pages) for effect in world.flying.values()))
        if world.core.idle():
            break
    assert most <= 4 + 1 and world.resident(HOST) == 20  # the bound is looked at before each copy of 2


def test_a_run_that_is_split_before_it_was_backed_up_is_backed_up_whole() -> None:
    world = World(config=config(ATTENTION, host=64))
    for tokens in (prompt(6), fork(3, 7)):
        lease = world.start(tokens)
        world.grow(lease, 6)
        world.publish(lease, 6)
        world.close(lease)
    world.settle()
    assert world.resident(HOST) == world.resident(DEVICE) == 9


def test_a_selective_backup_waits_for_enough_uses() -> None:
    world = World(config=config(ATTENTION, host=64, write_policy="write_through_selective", selective_uses=2))
    world.request(prompt(4))
    assert world.resident(HOST) == 0
    world.request(prompt(4))
    assert world.resident(HOST) == 4


def test_a_request_that_publishes_in_parts_is_one_use() -> None:
    world = World(config=config(ATTENTION, host=64, write_policy="write_through_selective", selective_uses=2))
    world.request(prompt(4), chunks=4)
    assert world.resident(HOST) == 0


def test_a_request_that_resumes_and_goes_on_is_one_use() -> None:
    world = World(config=config(ATTENTION, host=64, write_policy="write_through_selective", selective_uses=3))
    world.request(prompt(4))
    world.request(prompt(6))
    assert world.resident(HOST) == 0
    world.request(prompt(6))
    assert world.resident(HOST) >= 4


def test_write_back_demotes_before_it_drops() -> None:
    world = World(config=config(ATTENTION, device=8, host=8, storage=True, write_policy="write_back"))
    world.request(prompt(6))
    assert not copies(world, DEVICE, HOST), "nothing is copied before it has to go"
    assert world.flush(DEVICE) == 0 and world.resident(DEVICE) == 6, "it goes when its copy has landed"
    world.settle()
    assert (world.resident(DEVICE), world.resident(HOST)) == (0, 6)
    for _ in range(2):  # a storage may hold half of the share of the host at once
        assert world.flush(HOST) == 0
        world.settle()
    assert (world.resident(HOST), len(world.storage.objects)) == (0, 6)
    assert world.request(prompt(6)).from_tiers() == (0, 0, 6)


def test_write_back_keeps_what_could_not_be_copied() -> None:
    world = World(config=config(ATTENTION, device=8, host=8, write_policy="write_back"))
    world.request(prompt(4))
    world.flush(DEVICE)
    world.settle(lost=True)
    assert world.hit(prompt(4)) == (4, 4)


def test_what_loses_its_copy_below_to_another_that_comes_down_stays_itself() -> None:
    world = World(config=config(ATTENTION, STATE, device=[32, 2], host=[32, 1], write_policy="write_back"))
    world.request(prompt(2))
    for _ in range(2):
        world.flush(DEVICE)
        world.settle()
    world.request(prompt(2))
    world.request(prompt(4))
    assert [world.resident(tier, pool=1) for tier in (DEVICE, HOST)] == [2, 1]
    world.request(prompt(6, seed=1, extra=0))  # needs the room of both states, of which the host can keep only one
    assert world.hit(prompt(2)) == (2, 2) and world.hit(prompt(4))[1] == 4


def test_what_only_the_device_has_comes_down_before_it_goes_when_pages_in_the_host_rest_on_it() -> None:
    world = World(config=config(ATTENTION, host=64))
    for word in (7, 8):
        world.request(fork(2, word), rest=False)
    world.step()
    stem = extend(root_key(b"world"), pack(prompt(2)), PAGE_TOKENS)
    while not world.core.idle():  # the backups of what both begin with fail, those of their ends do not
        failing = {op: effect.pages[0].key in stem for op, effect in world.flying.items()}
        world.step([world.end(op, lost=-1 if fails else 0) for op, fails in failing.items()])
    assert (world.resident(DEVICE), world.resident(HOST)) == (8, 6)
    for _ in range(2):
        world.flush(DEVICE)
        world.settle()
    assert world.hit(fork(2, 7)) == world.hit(fork(2, 8)) == (0, 4)


def test_write_back_makes_room_before_it_is_needed() -> None:
    world = World(config=config(ATTENTION, device=16, host=64, write_policy="write_back"))
    for seed in range(1, 5):
        world.request(prompt(4, seed=seed))
    assert len(world.core.slot_pools.free[0]) == 2, "an eighth of the device"
    assert all(world.hit(prompt(4, seed=seed))[1] == 4 for seed in range(1, 5))


def test_without_a_host_nothing_is_backed_up() -> None:
    world = World(config=config(ATTENTION, STATE, storage=True))
    world.request(prompt(4))
    assert not world.log and world.core.idle()


def test_a_run_with_more_states_than_the_host_holds_comes_to_rest() -> None:
    world = World(config=config(ATTENTION, STATE, device=32, host=[32, 2], snapshot_every=2 * PAGE_TOKENS))
    world.request(prompt(8))
    assert world.resident(HOST, pool=1) == 2


# --- pages that were here when a request began, and went while it ran


def test_pages_seen_at_the_start_may_leave_the_device_before_the_rest_is_published() -> None:
    world = World(config=config(ATTENTION, device=32, host=32))
    world.request(prompt(4))
    lease = world.start(prompt(6), read=False)
    world.grow(lease, 6)
    world.publish(lease, 2)
    world.flush(DEVICE)
    world.publish(lease, 6)  # pages 4 and 5, whose parent is now in the host only
    audit(world.core)
    world.close(lease)
    world.drain()


def test_pages_beyond_the_boundary_that_need_no_room_stay_while_the_rest_is_computed() -> None:
    world = World(config=config(ATTENTION, STATE))
    world.request(prompt(6))
    lease = world.start(prompt(5))
    assert lease.boundary == 0, "there is no state at 5"
    assert [len(slots) for slots in world.grow(lease, 5)] == [0, 1], "but the attention pages are here already"
    world.flush(DEVICE)
    world.publish(lease, 5)
    world.close(lease)
    assert world.hit(prompt(5)) == (5, 5)


def test_the_attention_pages_that_a_request_resumed_from_stay_until_it_is_closed() -> None:
    world = World(config=config(ATTENTION, STATE, device=[64, 4], host=[64, 4]))
    for tokens in (prompt(10), fork(6, 7, 3), fork(4, 7, 3)):
        world.request(tokens)
    for seed in range(1, 7):  # other states push out those of our prompt
        world.request(prompt(2, seed=seed))
    world.request(prompt(2))
    lease = world.open(prompt(8))
    assert world.ready(lease) and lease.boundary == 2
    world.grow(lease, 8)
    world.publish(lease, 3)
    world.flush(DEVICE)
    world.publish(lease, 8)
    world.flush(DEVICE)  # World sees that the engine's pages are still what they were
    world.close(lease)
    world.drain()


def test_making_room_for_a_deep_hit_may_cost_the_pages_of_a_shallower_one() -> None:
    world = World(
        config=config(
            ATTENTION,
            WINDOW,
            device=[32, 4],
            host=[32, 4],
            write_policy="write_back",
            snapshot_every=PAGE_TOKENS,
        )
    )
    world.request(prompt(4))
    for _ in range(2):
        world.flush(DEVICE)
        world.settle()
    assert [world.resident(tier, pool) for tier in (DEVICE, HOST) for pool in (0, 1)] == [0, 0, 4, 4]
    world.request(prompt(3, seed=1))  # takes three of the device's four windows, and the host has none of them
    # Boundary 4 needs three windows, one is free, so others move down, where they push out the window of boundary 1.
    lease = world.open(prompt(4))
    world.settle()
    assert world.ready(lease)
    world.close(lease)
    world.drain()


# --- what is forgotten


def test_a_salt_under_which_nothing_is_kept_is_forgotten() -> None:
    world = World(config=config(ATTENTION))
    world.close(world.open(prompt(4), salt="shy"))
    assert not world.core.slot_pools.roots
    world.request(prompt(4), salt="loud")
    assert [*world.core.slot_pools.roots] == [root_key(b"world", "loud")]
    world.flush(DEVICE)
    assert not world.core.slot_pools.roots


def test_a_salt_whose_pages_were_evicted_is_forgotten() -> None:
    world = World(config=config(ATTENTION, device=4))
    for user in range(20):
        world.request(prompt(4), salt=f"user {user}")
    assert [*world.core.slot_pools.roots] == [root_key(b"world", "user 19")]


def test_an_eviction_order_does_not_remember_what_left_the_tree() -> None:
    world = World(config=config(ATTENTION, STATE, device=[8, 64]))
    for seed in range(1, 201):
        world.request(prompt(4, seed=seed))
    alive = sum(1 for _ in runs(world.core))
    assert all(len(order.runs()) <= 4 * alive for order in world.core.slot_pools.orders)


def test_a_flush_spares_what_somebody_holds() -> None:
    world = World(config=config(ATTENTION, STATE, device=16, host=16))
    world.request(prompt(2, seed=1))
    world.request(prompt(4))
    lease = world.start(prompt(4))
    assert world.flush(DEVICE, HOST) > 0
    assert world.hit(prompt(4)) == (4, 4) and world.hit(prompt(2, seed=1)) == (0, 0)
    world.close(lease)
    world.drain()


# --- what is illegal raises, and changes nothing


def test_illegal_calls_raise_and_change_nothing() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    early = world.start(prompt(4))
    ready = world.start(prompt(5, seed=1), read=False)
    world.grow(ready, 4)
    world.publish(ready, 2)
    core, before = world.core, dump(world.core)
    for illegal in (
        lambda: core.grow(early, 1),
        lambda: core.publish(early, 0),
        lambda: core.slots(early, 0),
        lambda: core.grow(ready, 6),
        lambda: core.publish(ready, 5),
        lambda: core.publish(ready, 1),
    ):
        with pytest.raises(AssertionError):
            illegal()
        assert dump(core) == before
    with pytest.raises(ValueError, match="between 0 and"):
        pack([-1])


def test_a_tier_cannot_have_fewer_than_no_slots() -> None:
    with pytest.raises(ConfigError, match="attention: -1 slots on the host"):
        SlotPools([ATTENTION], {DEVICE: (4,), HOST: (-1,)}, PAGE_TOKENS)


# --- while requests wait


def test_a_request_that_waited_behind_one_that_computed_its_prefix_resumes_from_it() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True))
    waiting = [world.open(prompt(6)) for _ in range(3)]
    world.request(prompt(6))
    for lease in waiting:
        assert world.ready(lease) and lease.boundary == 6
        world.close(lease)


def test_what_a_waiting_request_counts_on_may_go_before_its_turn() -> None:
    world = World(config=config(ATTENTION))
    world.request(prompt(4))
    world.request(prompt(2, seed=1))
    world.start(prompt(2, seed=1))  # stays, and so does the tree
    waiting = world.open(prompt(4))
    assert world.flush(DEVICE) == 4
    assert world.claim(waiting) and waiting.boundary == 0


def test_waiting_requests_take_no_room_on_the_device() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, storage=True, device=14))
    for seed in range(8):
        world.request(prompt(6, seed=seed))
    world.flush(DEVICE)
    waiting = [world.open(prompt(6, seed=seed)) for seed in range(8)]
    world.settle()
    assert world.resident(DEVICE) == 0
    for lease in waiting:
        assert world.ready(lease) and lease.boundary == 6, "it is as good as if they had come one by one"
        world.close(lease)


def test_waiting_requests_hold_what_came_from_storage_and_nothing_on_the_device() -> None:
    world = World(config=config(ATTENTION, STATE, host=16, storage=True, device=8))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    waiting = world.open(prompt(6))
    world.settle()
    assert waiting.phase is Phase.QUEUED and world.resident(HOST) == 6
    world.flush(HOST)
    assert world.resident(HOST) == 6, "what landed for a request stays until its turn"
    world.request(prompt(6, seed=1))
    world.request(prompt(6, seed=2))
    assert world.ready(waiting) and waiting.boundary == 6 and waiting.from_tiers() == (0, 0, 6)


def test_what_a_waiting_request_lost_in_memory_is_asked_of_storage_when_its_turn_comes() -> None:
    world = World(config=config(ATTENTION, STATE, host=8, storage=True, device=8))
    world.request(prompt(6))
    waiting = world.open(prompt(6))
    world.request(prompt(6, seed=1))
    assert world.hit(prompt(6)) == (0, 0)
    assert world.ready(waiting) and waiting.boundary == 6 and waiting.from_tiers() == (2, 0, 4)


def test_waiting_for_storage_never_holds_more_of_the_host_than_its_share() -> None:
    world = World(config=config(ATTENTION, host=16, storage=True, device=16, host_share=0.5))
    for seed in range(4):
        world.request(prompt(4, seed=seed))
    world.flush(DEVICE, HOST)
    waiting = [world.open(prompt(4, seed=seed)) for seed in range(4)]
    for _ in range(20):
        world.step([world.end(op) for op in [*world.flying]])
        assert 16 - len(world.core.slot_pools.free[1]) <= 8
    assert [lease.phase for lease in waiting] == [Phase.QUEUED] * 2 + [Phase.PROBING] * 2
    for lease in waiting:
        assert world.ready(lease) and lease.boundary == 4
        world.close(lease)


def test_who_has_its_turn_takes_the_share_of_those_who_wait() -> None:
    world = World(config=config(ATTENTION, host=16, storage=True, device=16, host_share=0.5))
    for seed in range(2):
        world.request(prompt(8, seed=seed))
    world.flush(DEVICE, HOST)
    first, second = (world.open(prompt(8, seed=seed)) for seed in range(2))
    for _ in range(8):
        world.step([world.end(op) for op in [*world.flying]])
    assert first.phase is Phase.QUEUED and second.phase is Phase.PROBING
    assert world.ready(second) and second.boundary == 8


def test_room_for_the_rest_of_a_prompt_is_never_made_at_the_cost_of_its_beginning() -> None:
    world = World(config=config(ATTENTION, host=6, storage=True))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.request(prompt(3))
    world.request(prompt(3, seed=1))
    world.flush(DEVICE)
    lease = world.open(prompt(6))
    world.open(prompt(3, seed=1))  # so the first one's beginning is the coldest that there is
    assert world.ready(lease) and lease.boundary == 6 and lease.from_tiers() == (0, 3, 3)


# --- private copies, and sequences that go on


def test_windows_and_states_may_go_once_the_engine_has_its_own_copy() -> None:
    world = World(config=config(ATTENTION, WINDOW, STATE, device=8))
    world.request(prompt(6))
    lease = world.start(prompt(6))
    assert world.flush(DEVICE) == 0
    world.resumed(lease)
    world.flush(DEVICE)
    assert [world.resident(DEVICE, pool) for pool in range(3)] == [6, 0, 0], "what it publishes rests on attention"


def test_a_sequence_that_goes_on_is_kept_where_it_ends_now() -> None:
    world = World(config=config(ATTENTION, STATE))
    lease = world.start(prompt(3))
    world.extend(lease, prompt(6)[3 * PAGE_TOKENS + 1 :])
    assert world.core.keepable(lease) == 6
    world.grow(lease, 6)
    world.publish(lease, 6)
    world.close(lease)
    assert world.request(prompt(8)).boundary == 6
    assert world.request(prompt(3)).boundary == 0, "its first end was not the end"


def test_a_session_goes_on_in_the_page_that_its_last_turn_began() -> None:
    world = World(config=config(ATTENTION, STATE))
    session = world.start(prompt(3, extra=1))
    world.grow(session, 3)
    world.publish(session, 3)
    for turn in (4, 5, 6):
        world.extend(session, prompt(turn, extra=1)[(turn - 1) * PAGE_TOKENS + 1 :])
        world.grow(session, turn)
        world.publish(session, turn)
        assert world.hit(prompt(turn)) == (turn, turn)
    world.close(session)


def test_a_sequence_may_be_known_otherwise_from_where_it_is_not_published() -> None:
    """A chunk that is not whole yet gets its last name when it is."""
    world = World(config=config(ATTENTION))
    core, lease = world.core, world.start(prompt(3, extra=1))
    world.grow(lease, 2)
    world.publish(lease, 2)
    begun, other = lease.keys, prompt(4, seed=9)[2 * PAGE_TOKENS :]
    with pytest.raises(AssertionError, match="keeps its name"):
        core.extend(lease, pack(other), 2 * TOKEN_BYTES * PAGE_TOKENS)  # of which one page is published
    assert lease.keys == begun
    core.extend(lease, pack(other), (PAGE_TOKENS + 1) * TOKEN_BYTES)
    whole = prompt(2, extra=0) + other
    assert lease.keys == b"".join(extend(lease.root, pack(whole), PAGE_TOKENS))
    assert core.keepable(lease) == 4


def test_a_sequence_that_found_no_room_is_not_kept_when_it_goes_on() -> None:
    world = World(config=config(ATTENTION, device=2))
    lease = world.start(prompt(3))
    world.grow(lease, 3)
    world.extend(lease, prompt(6)[3 * PAGE_TOKENS + 1 :])
    assert world.core.keepable(lease) == 2
    world.publish(lease, 2)
    world.close(lease)


# --- thresholds, deadlines, and answers about no copy in flight


def test_what_saves_too_little_is_not_brought_to_the_device() -> None:
    world = World(config=config(ATTENTION, host=64, load_at_least=4 * PAGE_TOKENS))
    world.request(prompt(3))
    world.request(prompt(4, seed=1))
    world.flush(DEVICE)
    assert world.request(prompt(3)).boundary == 0
    assert world.request(prompt(4, seed=1)).boundary == 4


def test_what_saves_too_little_is_not_fetched_from_storage() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True, fetch_at_least=4 * PAGE_TOKENS))
    world.request(prompt(3))
    world.request(prompt(4, seed=1))
    world.flush(DEVICE, HOST)
    assert world.request(prompt(3)).boundary == 0
    assert not copies(world, STORAGE, HOST)
    assert world.request(prompt(4, seed=1)).boundary == 4


def test_a_copy_to_the_device_that_never_ends_is_not_waited_for_for_ever() -> None:
    world = World(config=config(ATTENTION, host=64, load_deadline_s=5.0))
    world.request(prompt(4))
    world.flush(DEVICE)
    lease = world.start(prompt(4))
    world.step(later_s=4.9)
    assert lease.phase is Phase.LOADING
    world.step(later_s=0.2)
    assert lease.ready and lease.boundary == 0
    world.settle()
    world.close(lease)
    assert world.request(prompt(4)).from_tiers() == (4, 0, 0), "it arrived all the same"


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4), rest=False)
    ended = [world.end(op) for op in [*world.flying]]
    world.step(ended)
    before = dump(world.core)
    world.step(ended)
    assert world.core.counters.strays == len(ended)
    world.core.counters.strays = 0
    world.flying.clear()
    assert dump(world.core)["trees"] == before["trees"] and dump(world.core)["free"] == before["free"]


# --- a storage that comes and goes


def test_a_storage_that_is_detached_is_asked_nothing_and_given_nothing() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.flush(DEVICE, HOST)
    waiting = world.open(prompt(4))
    world.detach()
    assert world.ready(waiting) and waiting.boundary == 0
    world.close(waiting)
    log = len(world.log)
    world.request(prompt(4, seed=1))
    assert not [each for each in world.log[log:] if isinstance(each, Probe) or STORAGE in (each.source, each.target)]


def test_a_storage_that_is_attached_gets_what_is_in_memory_when_asked() -> None:
    world = World(config=config(ATTENTION, STATE, host=64))
    world.request(prompt(4))
    world.attach()
    world.settle()
    assert not world.storage.objects
    world.attach(world.storage, back_up=True)
    world.settle()
    assert len(world.storage.objects) == 5


def test_a_store_that_takes_the_place_of_another_is_not_taken_for_it() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4), rest=False)
    while not copies(world, HOST, STORAGE):
        world.step([world.end(op) for op in [*world.flying]])
    world.detach()
    world.attach()
    world.step([world.end(op) for op in [*world.flying]])
    world.request(prompt(4))
    assert len(world.storage.objects) == 4


def test_a_storage_that_takes_the_place_of_another_gets_what_that_one_had() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4))
    world.detach()
    world.attach(back_up=True)
    world.settle()
    assert len(world.storage.objects) == 4


def test_what_comes_late_from_a_storage_that_has_gone_is_stored_in_the_next_one() -> None:
    world = fetching(WAIT_COMPLETE)
    world.detach()
    world.attach()
    world.step([world.end(op) for op in [*world.flying]])
    assert world.core.counters.late == 6
    world.close(world.leases[0])
    assert world.request(prompt(6)).boundary == 6
    assert len(world.storage.objects) == 6


def test_what_was_to_leave_for_a_storage_that_has_gone_stays() -> None:
    world = World(config=config(ATTENTION, device=8, host=8, storage=True, write_policy="write_back"))
    world.request(prompt(3))
    world.flush(DEVICE)
    world.settle()
    assert world.flush(HOST) == 0 and copies(world, HOST, STORAGE)
    world.detach()
    world.settle()
    assert world.hit(prompt(3)) == (0, 3)


def test_a_core_without_a_host_refuses_a_storage() -> None:
    with pytest.raises(ConfigError, match="host"):
        World(config=config(ATTENTION)).core.attach()


# --- how much is worth keeping


def test_a_state_close_behind_another_is_not_admitted() -> None:
    world = World(config=config(ATTENTION, STATE, snapshot_every=PAGE_TOKENS, snapshot_gap=3 * PAGE_TOKENS))
    world.request(prompt(8))
    assert world.resident(DEVICE, pool=1) == 2 and world.hit(prompt(5)) == (3, 3) and world.hit(prompt(8)) == (6, 6)


def test_a_storage_that_is_attached_in_place_of_another_is_not_taken_for_it() -> None:
    world = World(config=config(ATTENTION, host=64, storage=True))
    world.request(prompt(4), rest=False)
    while not copies(world, HOST, STORAGE):
        world.step([world.end(op) for op in [*world.flying]])
    world.attach()
    world.step([world.end(op) for op in [*world.flying]])
    world.request(prompt(4))
    assert len(world.storage.objects) == 4


def test_a_bad_state_in_the_host_leaves_a_shallower_boundary_to_load() -> None:
    world = World(config=config(ATTENTION, STATE, host=64, snapshot_every=2 * PAGE_TOKENS))
    world.request(prompt(8))
    world.flush(DEVICE)
    world.rot(HOST, 7, prompt(8), pool=1)
    lease = world.request(prompt(8))
    assert lease.boundary == 6, "the state there was as good"
    assert world.core.counters.bad_host == 1


def test_a_host_whose_pages_never_arrive_is_given_up_after_a_second_round() -> None:
    world = World(config=config(ATTENTION, STATE, host=64))
    world.request(prompt(6))
    world.flush(DEVICE)
    lease = world.start(prompt(6))
    for _ in range(2):
        assert lease.phase is Phase.LOADING
        world.step([world.end(op, lost=-1) for op in [*world.flying]])
    assert lease.ready and lease.boundary == 0


def test_a_sequence_computes_in_slots_that_lie_in_a_row_if_there_are_such() -> None:
    world = World(config=config(ATTENTION, device=64))
    slot_pools = world.core.slot_pools
    slot_pools.free[0] = array("i", [40, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 3, 9, 1, 7])
    slot_pools.straighten(0, 3, after=-1)
    assert [slot_pools.free[0].pop() for _ in range(3)] == [20, 21, 22]
    slot_pools.straighten(0, 1, after=22)
    assert slot_pools.free[0].pop() == 23
    slot_pools.straighten(0, 2, after=7)
    assert [slot_pools.free[0].pop() for _ in range(2)] == [24, 25]
