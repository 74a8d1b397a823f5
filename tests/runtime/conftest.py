"""Lets the tests of this folder import `filling`, which stands beside them, and makes caches for them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "storage"))  # real servers of storages

from filling import POOLS, Clock, Make, a_config, an_identity
from object_servers import rclone  # noqa: F401  a fixture

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.pages.pools import PoolSpec
from kvarve.testing import FaultyStorage


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes caches, and shuts them down at the end, when calls that were held up go on."""
    caches: list[tuple[PrefixCache, FaultyStorage | None]] = []

    def made(
        storage: FaultyStorage | None = None,
        clock: Clock | None = None,
        pools: tuple[PoolSpec, ...] = POOLS,
        **settings: object,
    ) -> PrefixCache:
        kwargs = {} if clock is None else {"clock": clock}
        cache = PrefixCache(an_identity(pools), a_config(**settings), storage=storage, **kwargs)  # type: ignore[arg-type]
        caches.append((cache, storage))
        return cache

    yield made
    for cache, storage in caches:
        if storage is not None:
            storage.release()
        cache.shutdown(5)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
