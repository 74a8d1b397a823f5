"""Rank 2 of 8 holds other heads than rank 2 of 4: neither reads the other's pages."""

import pytest
from filling import POOLS, a_config, a_store, an_identity, prompt, run, settle

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.pages.pools import PoolSpec
from kvarve.ranks.agreement import Agreement
from kvarve.testing import FaultyStorage


class OneOf(Agreement):
    """A rank whose others always agree with it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks


@pytest.fixture
def store() -> FaultyStorage:
    return a_store()


def served(
    store: FaultyStorage, rank: int, ranks: int, pools: tuple[PoolSpec, ...] = POOLS, computes: int | None = None
) -> tuple[int, int, int]:
    """One prompt on one rank: how many of its pages came from device, host and storage; all of them are stored.

    It computes bytes of its own, unless it `computes` those of another rank."""
    cache = PrefixCache(
        an_identity(pools), a_config(storage_wait="all"), storage=store, rank=rank, agreement=OneOf(ranks)
    )
    try:
        found = run(cache, prompt(4.5), rank=rank if computes is None else computes)
        settle(cache)
        return found
    finally:
        cache.shutdown(5)


def test_a_rank_of_eight_is_not_served_the_pages_of_that_rank_of_four(store: FaultyStorage) -> None:
    assert served(store, rank=2, ranks=4) == (0, 0, 0)
    assert served(store, rank=2, ranks=4) == (0, 0, 4), "its own pages it finds again"
    assert served(store, rank=2, ranks=8) == (0, 0, 0)
    assert served(store, rank=2, ranks=8) == (0, 0, 4)


def test_what_all_ranks_hold_alike_is_shared_by_the_ranks_of_one_number(store: FaultyStorage) -> None:
    alike = tuple(PoolSpec(p.name, p.buffers, p.lookback, p.in_place, replicated=True) for p in POOLS)
    for rank in range(2):  # each writes its part, so both have to compute it once
        served(store, rank, 2, alike, computes=0)
    assert served(store, 1, 2, alike, computes=0) == (0, 0, 4)
    assert served(store, 1, 3, alike, computes=0) == (0, 0, 0)


def test_the_number_of_ranks_is_in_the_fingerprint() -> None:
    caches = [PrefixCache(an_identity(), a_config(), rank=2, agreement=OneOf(ranks)) for ranks in (4, 8)]
    prints = [cache.identity.fingerprint() for cache in caches]
    assert prints[0] != prints[1]
    assert [cache.identity.ranks for cache in caches] == [4, 8]
    for cache in caches:
        cache.shutdown(5)
