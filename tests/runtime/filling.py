"""An engine without a model: it fills each page with bytes that only this prompt has, and looks before it resumes.

The expected content of a page is computed from pool, buffer, salt and all tokens up to its chunk's end (a model may
have read them all for it), by no code under test; so a page that is wrong, stale, half copied or another prompt's
cannot pass.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease
from kvarve.core.policies import Policies
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec
from kvarve.pages.ticket import Ticket
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage, Rule

PAGE, CHUNK = 64, 128
ATTENTION = PoolSpec("attention", (BufferSpec("k", (4, 3), "float32"), BufferSpec("v", (5,), "bfloat16")), None)
WINDOW = PoolSpec("window", (BufferSpec("w", (2, 9), "float16"),), 3)
STATE = PoolSpec("state", (BufferSpec("conv", (7,), "float32"), BufferSpec("ids", (3,), "int64")), 1, in_place=True)
POOLS = (ATTENTION, WINDOW, STATE)
ROOM, HOST_ROOM = 1 << 17, 4 << 20  # bytes in which nothing here runs short; an audit looks at each slot
TURNS = 1000
Make = Callable[..., PrefixCache]


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def an_identity(pools: tuple[PoolSpec, ...] = POOLS, weights: str = "w1") -> ModelIdentity:
    return ModelIdentity("test", weights, "float32", PAGE, CHUNK, pools)


def a_config(
    device: int = ROOM, host: int = HOST_ROOM, storage: str | tuple[str, ...] | None = None, **policies: Any
) -> CacheConfig:
    return CacheConfig(device, host, storage, Policies(**policies))


def a_region(identity: ModelIdentity | None = None) -> MemoryStorage:
    return MemoryStorage(1 << 26, (identity or an_identity()).fingerprint(), "test")


def a_store(*rules: Rule, seed: int = 0, identity: ModelIdentity | None = None) -> FaultyStorage:
    """It outlives a cache's shutdown, as a disk would."""
    return FaultyStorage(a_region(identity), rules, seed=seed, stays=True)


def prompt(pages: float, seed: int = 0, prefix: Sequence[int] = ()) -> list[int]:
    """A prompt of this many pages, beginning with another one."""
    rest = np.random.default_rng(seed).integers(0, 1 << 20, int(pages * PAGE) - len(prefix))
    return [*prefix, *map(int, rest)]


def page_bytes(pool: PoolSpec, buffer: BufferSpec, tokens: Sequence[int], salt: str, rank: int = 0) -> Tensor:
    """What one buffer of a page holds, by its position and all tokens up to its chunk's end."""
    digest = hashlib.shake_256(f"{pool.name} {buffer.name} {salt} {rank} ".encode())
    digest.update(np.asarray(tokens, dtype=np.int64).tobytes())
    raw = np.frombuffer(bytearray(digest.digest(buffer.nbytes)), dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, buffer.dtype)).view(buffer.shape)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


class Request:
    """One prompt on its way through a cache."""

    def __init__(
        self,
        cache: PrefixCache,
        tokens: Sequence[int],
        salt: str = "",
        read: bool = True,
        rank: int = 0,
        ticket: Ticket | None = None,
    ) -> None:
        self.cache, self.tokens, self.salt, self.rank = cache, tokens, salt, rank
        self.lease: Lease = cache.open(tokens, salt, read, ticket=ticket)
        self.at = 0
        cache.scheduler.audit()

    def wait(self) -> "Request":
        """Claim a place and step until it is ready."""
        for _ in range(TURNS):
            self.cache.step()
            self.cache.scheduler.audit()
            if self.cache.claim(self.lease):
                self.look()
                return self
            self.cache.wait(0.05)
        raise AssertionError(f"not ready after {TURNS} turns, but {self.lease.phase}")

    def look(self) -> None:
        """Compare every page that this request resumes from with its expected content."""
        boundary = self.lease.boundary
        assert boundary % (CHUNK // PAGE) == 0
        assert boundary * PAGE < max(1, len(self.tokens)), "nothing is left to compute"
        self.at = boundary * PAGE
        for name, (positions, slots) in self.cache.pages(self.lease).items():
            pool = next(pool for pool in self.cache.identity.pools if pool.name == name)
            assert positions == range(0 if pool.lookback is None else max(0, boundary - pool.lookback), boundary)
            for position, slot in zip(positions, slots, strict=True):
                for buffer in pool.buffers:
                    found = self.cache.worker.arena(name)[buffer.name][slot]
                    assert equal_bits(found, self.expected(pool, buffer, position)), f"{name} page {position}"

    def expected(self, pool: PoolSpec, buffer: BufferSpec, position: int) -> Tensor:
        whole = (position * PAGE // CHUNK + 1) * CHUNK
        return page_bytes(pool, buffer, [position, *self.tokens[:whole]], self.salt, self.rank)

    def chunk(self) -> bool:
        """Compute up to the next line of the grid as an engine does; False when the prompt is done."""
        stop = min(len(self.tokens), (self.at // CHUNK + 1) * CHUNK)
        self.at = stop
        upto = min(stop // PAGE, self.lease.pages)
        if stop % CHUNK == 0 and upto > self.lease.grown:
            fresh = self.cache.grow(self.lease, upto)
            for pool in self.cache.identity.pools:
                for position, slot in fresh[pool.name].items():
                    for buffer in pool.buffers:
                        self.cache.worker.arena(pool.name)[buffer.name][slot] = self.expected(pool, buffer, position)
            self.cache.scheduler.audit()
            self.cache.publish(self.lease, self.lease.grown)
        self.cache.scheduler.audit()
        return stop < len(self.tokens)

    def compute(self) -> "Request":
        while self.chunk():
            pass
        return self

    def close(self) -> Lease:
        self.cache.close(self.lease)
        self.cache.scheduler.audit()
        return self.lease


def run(
    cache: PrefixCache, tokens: Sequence[int], salt: str = "", read: bool = True, rank: int = 0
) -> tuple[int, int, int]:
    """A whole request; its pages from device, host and storage."""
    return Request(cache, tokens, salt, read, rank).wait().compute().close().from_tiers()


def settle(cache: PrefixCache) -> None:
    """Step until nothing more happens by itself."""
    cache.settle(30)
    assert cache.scheduler.core.idle()
    cache.scheduler.audit()


def until(cache: PrefixCache, holds: Callable[[], bool]) -> None:
    """Step until something holds."""
    for _ in range(TURNS):
        cache.step()
        cache.scheduler.audit()
        if holds():
            return
        cache.wait(0.05)
    raise AssertionError(f"not within {TURNS} turns")


def used(cache: PrefixCache) -> dict[str, int]:
    """Pages by tier and pool, of those that have any."""
    return {
        name.removeprefix("used."): int(value)
        for name, value in cache.stats().items()
        if name.startswith("used.") and value
    }


def nothing_is_left(cache: PrefixCache) -> bool:
    """Whether, after a flush, every slot is free and no lease is open."""
    cache.flush()
    cache.scheduler.audit()
    return not used(cache) and not cache.scheduler.core.leases and not cache.scheduler.core.copies.ops


LONG, ALL = prompt(8.5), 8  # a prompt, and its pages that can be resumed from


def a_full_store(tokens: list[int] = LONG) -> FaultyStorage:
    """A storage that has all pages of a prompt, written by a cache that has been shut down."""
    store = a_store()
    cache = PrefixCache(an_identity(), a_config(), storage=store)
    run(cache, tokens)
    settle(cache)
    cache.shutdown(5)
    return store
