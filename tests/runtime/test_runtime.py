"""A request resumes from the right bytes, whichever tier they come from and whatever fails on the way."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from filling import (
    ALL,
    ATTENTION,
    LONG,
    PAGE,
    POOLS,
    STATE,
    WINDOW,
    Clock,
    Make,
    Request,
    a_config,
    a_full_store,
    a_store,
    an_identity,
    nothing_is_left,
    prompt,
    run,
    settle,
    until,
    used,
)

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.errors import Broken, ConfigError
from kvarve.pages.pools import PoolSpec, Tier

# --- where pages come from


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("ends", "hit"),
    [
        (lambda cache: None, ALL),
        (lambda cache: fail(KeyError("of the caller")), ALL),
        (lambda cache: cache.lookup([-1]), ALL),
        (lambda cache: cache.open(LONG, salt="\ud800"), ALL),
        (lambda cache: fail(Broken("in the cache")), 0),
        (lambda cache: cache.claim(None), 0),
    ],
    ids=["well", "the caller's error", "no token", "no salt", "broken", "a bug"],
)
def test_at_the_end_of_a_block_pages_are_stored_unless_the_cache_has_failed(
    make: Make, ends: Callable[[PrefixCache], object], hit: int
) -> None:
    store = a_store()
    with suppress(KeyError, ConfigError, Broken, AttributeError), make(store, write_policy="back") as cache:
        run(cache, LONG)
        ends(cache)
    assert sum(run(make(store), LONG)) == hit


@pytest.mark.parametrize(
    "pools",
    [(ATTENTION,), (WINDOW,), (STATE,), POOLS],
    ids=lambda pools: "-".join(pool.name for pool in pools),
)
def test_a_prompt_is_found_on_the_device_then_the_host_then_in_storage_then_after_a_restart(
    make: Make, pools: tuple[PoolSpec, ...]
) -> None:
    store = a_store(identity=an_identity(pools))
    cache = make(store, pools=pools)
    assert run(cache, LONG) == (0, 0, 0)
    assert run(cache, LONG) == (ALL, 0, 0)
    settle(cache)
    assert cache.flush([Tier.DEVICE]) > 0
    assert sum(run(cache, LONG)[1:]) > 0
    cache.flush([Tier.DEVICE])
    cache.flush()
    assert not used(cache)
    hit = run(cache, LONG)
    assert (sum(hit), hit[1]) == (ALL, 0)
    assert hit[2] > 0
    cache.shutdown()
    hit = run(make(store, pools=pools), LONG)
    assert sum(hit) == ALL
    assert hit[2] > 0


def test_a_cache_starts_without_a_damaged_folder_and_uses_it_once_it_is_mended(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?capacity=64MiB"
    cache = PrefixCache(an_identity(), a_config(storage=url))
    run(cache, LONG)
    cache.shutdown()
    (tmp_path / "store" / "kvarve.json").write_bytes(b"{")
    (tmp_path / "store" / "models").rename(tmp_path / "models")
    cache = PrefixCache(an_identity(), a_config(storage=url))
    assert cache.worker.attached is not None and not cache.up
    assert "kvarve.json is damaged" in cache.worker.attached.storage.last_error
    assert run(cache, LONG) == (0, 0, 0)
    cache.scheduler.core.flush([Tier.DEVICE, Tier.HOST])
    (tmp_path / "models").rename(tmp_path / "store" / "models")
    until(cache, lambda: cache.scheduler.storage_up)
    assert run(cache, LONG) == (0, 0, ALL)
    cache.shutdown()


@pytest.mark.parametrize("with_storage", [False, True])
def test_a_continuation_resumes_where_the_prompt_before_it_ended(make: Make, with_storage: bool) -> None:
    cache = make(a_store() if with_storage else None)
    run(cache, LONG)
    longer = prompt(13.2, seed=1, prefix=LONG)
    assert run(cache, longer) == (ALL, 0, 0)
    settle(cache)
    cache.flush()
    assert run(cache, longer) == ((0, 0, 12) if with_storage else (0, 0, 0))


def test_prompts_that_part_inside_of_a_chunk_share_nothing_of_it(make: Make) -> None:
    """The last bits of a token's state may depend on all tokens of its chunk."""
    cache = make(a_store(), pools=(ATTENTION,))
    first, other = (prompt(10.5, seed, prefix=LONG[: 7 * PAGE]) for seed in (1, 2))
    run(cache, first)
    assert cache.lookup(other).known == 6
    assert sum(run(cache, other)) == 6
    assert used(cache)["device.attention"] == 6 + 2 * 4
    settle(cache)
    cache.flush()
    assert run(cache, first) == (0, 0, 10)
    assert run(cache, other) == (6, 0, 4)


def test_a_sequence_that_goes_on_is_found_by_a_prompt_of_all_of_it(make: Make) -> None:
    """A chunk that a prompt began and its answer filled is known as one that a prompt had from the beginning."""
    cache = make(a_store(), pools=(ATTENTION,))
    begun = Request(cache, LONG[: 5 * PAGE + 7]).wait()
    for more in (LONG[5 * PAGE + 7 : 5 * PAGE + 9], LONG[5 * PAGE + 9 : 8 * PAGE]):
        cache.scheduler.extend(begun.lease, more)
        begun.tokens = [*begun.tokens, *more]
    begun.compute().close()
    assert sum(run(cache, LONG)) == ALL


@pytest.mark.parametrize("host", [True, False])
def test_without_storage_or_a_host_what_is_left_is_the_last_tier(make: Make, host: bool) -> None:
    cache = make() if host else make(host=0)
    run(cache, LONG)
    settle(cache)
    assert run(cache, LONG) == (ALL, 0, 0)
    cache.flush([Tier.DEVICE])
    assert run(cache, LONG) == (0, ALL * host, 0)
    cache.flush()
    assert run(cache, LONG) == (0, 0, 0)
    assert cache.worker.usage() is None


# --- sharing between salts


def test_another_salt_shares_nothing(make: Make) -> None:
    cache = make(a_store())
    for salt in ("", "a", "b"):
        assert run(cache, LONG, salt) == (0, 0, 0)
    for salt in ("", "a", "b"):
        assert run(cache, LONG, salt) == (ALL, 0, 0)
    settle(cache)
    cache.flush()
    for salt in ("b", "", "a"):
        assert run(cache, LONG, salt) == (0, 0, ALL)
    assert cache.lookup(LONG, "c").memory == 0


def test_a_request_that_may_not_read_computes_all_and_still_leaves_its_pages(make: Make) -> None:
    cache = make(a_store())
    assert run(cache, LONG, read=False) == (0, 0, 0)
    assert run(cache, LONG) == (ALL, 0, 0)
    assert run(cache, LONG, read=False) == (0, 0, 0)
    assert run(cache, LONG) == (ALL, 0, 0)
    settle(cache)
    assert nothing_is_left(cache)


def test_a_prompt_shorter_than_a_chunk_is_served_and_nothing_of_it_is_kept(make: Make) -> None:
    cache = make(a_store())
    for pages in (0, 1 / PAGE, 1 - 1 / PAGE, 1, 1.5) * 2:
        assert run(cache, prompt(pages)) == (0, 0, 0)
        settle(cache)
    assert not used(cache)


def test_at_least_one_token_is_left_to_compute(make: Make) -> None:
    cache = make()
    for pages, found in ((2, 0), (2 + 1 / PAGE, 2), (4, 2), (4 + 1 / PAGE, 4), (5, 4), (6, 4)):
        tokens = prompt(pages, seed=int(100 * pages))
        run(cache, tokens)
        assert run(cache, tokens) == (found, 0, 0)
        assert cache.lookup(tokens).device == found


# --- when pages are written


def test_write_back_backs_up_what_is_evicted(make: Make) -> None:
    store = a_store()
    cache = make(store, write_policy="back")
    run(cache, LONG)
    settle(cache)
    assert "host.attention" not in used(cache)
    cache.flush([Tier.DEVICE])
    assert "device.attention" not in used(cache)
    assert used(cache)["host.attention"] == ALL
    assert store.usage().objects == 0
    assert run(cache, LONG) == (0, ALL, 0)
    for tiers in ("device", ("host",), (Tier.STORAGE,)):
        with pytest.raises(ConfigError, match="tiers must be"):
            cache.flush(tiers)
    cache.flush()
    assert not used(cache)
    assert run(cache, LONG) == (0, 0, ALL)


def test_of_a_prompt_larger_than_the_device_is_kept_what_fits(make: Make) -> None:
    """An engine goes on asking for slots as it computes: beyond what fits it gets none."""
    cache = make(device=8_000)
    request = Request(cache, prompt(80.5))
    capacity = cache.scheduler.core.slot_pools.capacity[0]
    assert cache.claim(request.lease) and capacity < 80
    kept = [sum(map(len, cache.grow(request.lease, upto).values())) for upto in range(1, 81)]
    assert 0 < request.lease.grown <= capacity and not any(kept[request.lease.grown :])
    cache.close(request.lease)


@pytest.mark.parametrize("policy", ["through", "through:1", "back"])
def test_under_every_write_policy_more_prompts_than_the_device_holds_come_back(make: Make, policy: str) -> None:
    store = a_store()
    cache = make(store, device=8_000, host=1 << 20, write_policy=policy)
    prompts = [prompt(4.5, seed) for seed in range(15)]
    assert 4 < cache.scheduler.core.slot_pools.capacity[0] < 15 * 4
    for tokens in prompts:
        run(cache, tokens)
        settle(cache)
    for tokens in prompts:
        assert sum(run(cache, tokens)) == 4
        settle(cache)  # under write-back a slot is free only when its page has been copied
    assert nothing_is_left(cache)


# --- how long a request waits


def test_a_wait_is_over_with_the_patience_of_a_request(make: Make) -> None:
    """An engine with nothing else to do sleeps: until the earliest deadline of a request that waits for storage."""
    store, clock = a_full_store(), Clock()
    cache = make(store, clock, storage_wait="5.0s")
    store.stall()
    request = Request(cache, LONG)
    store.wait_for_stalled_call()
    cache.step()
    assert not cache.claim(request.lease)
    assert not cache.wait(0.0)
    clock.now += 5.001
    assert cache.wait(20)
    cache.step()
    assert request.lease.ready
    request.compute().close()
    store.release()
    settle(cache)
    assert nothing_is_left(cache)


def test_two_requests_that_compute_the_same_pages_keep_them_once(make: Make) -> None:
    cache = make(a_store())
    first, second = Request(cache, LONG).wait(), Request(cache, LONG).wait()
    while first.chunk() | second.chunk():
        pass
    first.close()
    second.close()
    assert used(cache)["device.attention"] == ALL
    assert cache.scheduler.core.counters.duplicates > 0
    assert run(cache, LONG) == (ALL, 0, 0)
