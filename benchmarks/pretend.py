"""A model that is only a shape, and a cache with a fake engine, for benchmarks of page transfers."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease
from kvarve.core.policies import Policies
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec

PROMPT_TOKENS, PAGE_TOKENS, CHUNK_TOKENS, LAYERS = 4096, 64, 256, 8
PAGES = PROMPT_TOKENS // PAGE_TOKENS
PATIENCE_S = 120.0
MEET_S = 0.01

HEADS, STATE_HEADS = 4, 16


def identity(ranks: int = 1) -> ModelIdentity:
    """The shape of what each of several ranks holds."""
    kv = [
        (f"{layer}.{kind}", (PAGE_TOKENS, HEADS // ranks, 128), "bfloat16") for layer in range(LAYERS) for kind in "kv"
    ]
    state = [(f"{layer}", (STATE_HEADS // ranks, 128, 128), "float32") for layer in range(4)]
    pools = (
        PoolSpec("kv", tuple(BufferSpec(*each) for each in kv), None),
        PoolSpec("state", tuple(BufferSpec(*each) for each in state), 1, True),
    )
    return ModelIdentity("pretended", "none", "bfloat16", PAGE_TOKENS, CHUNK_TOKENS, pools, ranks=ranks)


IDENTITY = identity()
KV, STATE = IDENTITY.pools
PROMPT_BYTES = PAGES * KV.payload_bytes + STATE.payload_bytes


def until(cache: PrefixCache, done: Callable[[], bool]) -> None:
    """Wait and step, as an engine without other work does, until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, f"nothing has happened for {PATIENCE_S:.0f} s"
        cache.wait(0.05)
        cache.step()


class Restore:
    """Prompts of 4,096 tokens, each computed once and then brought back from storage."""

    def __init__(
        self, storage: str, ranks: int = 1, of_all: Callable[[float], list[float]] = lambda one: [one], **among: Any
    ) -> None:
        """`among`: this rank and its agreement with the others, where there are `ranks`; `of_all` waits for all of
        them, as a layer of a model does, and gives what each has given."""
        room = 12 * PROMPT_BYTES // ranks  # so that a store's share of the host holds a prompt
        settings = CacheConfig(room, room, storage, policies=Policies(storage_wait="all"))
        self.cache, self._first = PrefixCache(identity(ranks), settings, **among), 0
        self._of_all = of_all
        self.stored_s = 0.0  # from the last prompt's last page until storage had all, on all ranks

    def round(self) -> float:
        """Seconds from `open` until the pages of a prompt that only storage has are on the device, on all ranks."""
        cache = self.cache
        prompt = np.arange(PROMPT_TOKENS + 1) + self._first
        self._first += len(prompt)
        lease = cache.open(prompt)
        until(cache, lambda: cache.claim(lease))
        for name, slots in cache.grow(lease, PAGES).items():
            for buffer in cache.worker.arena(name).values():
                for position, slot in slots.items():
                    buffer[slot].fill_(_value(position))
        start = self._start()
        cache.publish(lease, PAGES)
        cache.close(lease)
        assert cache.settle(PATIENCE_S)
        self.stored_s = self._seconds_since(start)
        cache.flush(timeout_s=PATIENCE_S)
        start = self._start()
        lease = cache.open(prompt)
        until(cache, lambda: cache.claim(lease))
        seconds = self._seconds_since(start)
        self._check(lease)
        cache.flush(timeout_s=PATIENCE_S)
        return seconds

    def _start(self) -> float:
        """Wait until a moment that all ranks have agreed on: by then each has come back from agreeing."""
        start = max(self._of_all(time.perf_counter())) + MEET_S
        time.sleep(max(0.0, start - time.perf_counter()))
        return start

    def _seconds_since(self, start: float) -> float:
        """Until the last rank is here; no rank goes on before, as all share the cores."""
        return max(self._of_all(time.perf_counter())) - start

    def _check(self, lease: Lease) -> None:
        assert lease.boundary == PAGES, f"only {lease.boundary} of {PAGES} pages came back"
        for name, (positions, slots) in self.cache.pages(lease).items():
            for buffer in self.cache.worker.arena(name).values():
                for position, slot in zip(positions, slots, strict=True):
                    assert buffer[slot].flatten()[-1].item() == _value(position), "another page's bytes"
        self.cache.close(lease)


def _value(position: int) -> int:
    return position % 251  # small enough for bfloat16 to hold it exactly
