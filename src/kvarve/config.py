"""An operator's settings of a cache, and how bytes become slots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarve.core.eviction import ORDERS
from kvarve.core.policies import PageCost, Patience, WritePolicy, patience
from kvarve.core.settings import CoreConfig
from kvarve.core.snapshots import Snapshots
from kvarve.errors import ConfigError
from kvarve.memory.layouts import PAGE_FIRST_DIRECT, check_layout
from kvarve.memory.record import record_bytes
from kvarve.model import PoolSpec, Tier
from kvarve.sizes import format_size, parse_size

PROMPT_TOKENS = 8192  # assumed length of a prompt, see `spacing`
NO_HOST = "storage needs host memory, through which its pages travel: give host memory too"


@dataclass(frozen=True)
class CacheConfig:
    """The settings of one cache. Sizes in bytes, times in seconds; ConfigError for values that cannot work.

    `storage`: a URL, or several for tiers, the near and fast one first. `cost_doubles_at`: the context length in tokens
    at which attention costs as much as all other computing of a token (0: never), for eviction by "flops".
    `snapshot_gap`, `load_at_least` and `fetch_at_least`: the fewest tokens that a kept window or state, a copy to the
    device, or one from storage has to save. `host_share`: of each host pool, the share that copies to and from storage
    may hold. `offload_pays_at`: of the bytes stored, the share that has to be used, or storing pauses until it would
    pay again (0: never). `tokens_per_snapshot`: the tokens between two windows or states for which the pools
    divide their memory (0: by the model, see `spacing`). `host_layout`: how pages lie in host memory (see
    `memory.layouts`); only in the default one does storage read and write them in place.
    """

    device_memory: int
    host_memory: int = 0
    storage: str | tuple[str, ...] | None = None
    write_policy: str = "write_through"
    selective_uses: int = 2
    prefetch_policy: str = "timeout"
    prefetch_base_s: float = 2.0
    prefetch_per_ki_token_s: float = 0.25
    eviction: str = "lru"
    cost_doubles_at: int = 0
    snapshot_every: int = 0
    snapshot_gap: int = 0
    tokens_per_snapshot: int = 0
    load_at_least: int = 0
    fetch_at_least: int = 0
    host_share: float = 0.8
    offload_pays_at: float = 0.01
    verify_host: bool = True
    storage_deadline_s: float = 30.0
    host_layout: str = PAGE_FIRST_DIRECT

    def __post_init__(self) -> None:
        self.write()
        check_layout(self.host_layout)
        if not 0 < self.storage_deadline_s < math.inf:
            raise ConfigError(
                f"the storage deadline must be above zero seconds and finite, not {self.storage_deadline_s}"
            )
        if math.isinf(self.prefetch_per_ki_token_s):
            raise ConfigError("a wait needs an end: give a finite number of seconds per 1,024 tokens")
        self.wait()
        if self.selective_uses < 1:
            raise ConfigError(f"selective uses must be at least 1, not {self.selective_uses}")
        if self.eviction not in ORDERS:
            raise ConfigError(f"unknown eviction order {self.eviction!r}; known: {', '.join(ORDERS)}")
        if self.cost_doubles_at < 0:
            raise ConfigError(f"attention cannot cost as much as all else after {self.cost_doubles_at} tokens")
        if self.tokens_per_snapshot < 0:
            raise ConfigError(f"memory cannot be divided for a snapshot every {self.tokens_per_snapshot} tokens")
        if min(self.load_at_least, self.fetch_at_least) < 0:
            raise ConfigError("the fewest tokens that a copy has to save cannot be negative")
        if not 0 < self.host_share <= 1:
            raise ConfigError(
                f"the share of the host that waits for storage is above 0 and at most 1, not {self.host_share}"
            )
        if not 0 <= self.offload_pays_at < math.inf:
            raise ConfigError(
                f"the share of what is stored that has to be used is 0 or above and finite, not {self.offload_pays_at}"
            )
        Snapshots(every=self.snapshot_every, gap=self.snapshot_gap)
        if self.storage and not self.host_memory:
            raise ConfigError(NO_HOST)

    @property
    def storages(self) -> tuple[str, ...]:
        """The URLs of all storage tiers."""
        return (self.storage,) if isinstance(self.storage, str) else self.storage or ()

    def core(
        self,
        pools: tuple[PoolSpec, ...],
        slots: dict[Tier, tuple[int, ...]],
        page_tokens: int,
        chunk_tokens: int,
        storage: bool,
    ) -> CoreConfig:
        """The core's settings, for a cache of this shape."""
        return CoreConfig(
            pools,
            slots,
            page_tokens=page_tokens,
            chunk_tokens=chunk_tokens,
            storage=storage,
            write=self.write(),
            selective_uses=self.selective_uses,
            eviction=self.eviction,
            cost=PageCost(1.0, page_tokens / self.cost_doubles_at if self.cost_doubles_at else 0.0),
            snapshots=Snapshots(every=self.snapshot_every, gap=self.snapshot_gap),
            load_at_least=self.load_at_least,
            fetch_at_least=self.fetch_at_least,
            queue_deadline_s=self.storage_deadline_s,
            host_share=self.host_share,
            offload_pays_at=self.offload_pays_at,
        )

    def write(self) -> WritePolicy:
        try:
            return WritePolicy(self.write_policy)
        except ValueError:
            known = ", ".join(policy.value for policy in WritePolicy)
            raise ConfigError(f"unknown write policy {self.write_policy!r}; known: {known}") from None

    def wait(self) -> Patience:
        """The prefetch patience; "wait_complete" too ends once one copy takes longer than the storage deadline."""
        asked = patience(self.prefetch_policy, self.prefetch_base_s, self.prefetch_per_ki_token_s)
        return replace(asked, base_s=min(asked.base_s, self.storage_deadline_s))


def spacing(pools: Sequence[PoolSpec], page_tokens: int, chunk_tokens: int, asked: int = 0, every: int = 0) -> int:
    """The distance in tokens between windows or states for which memory is divided.

    `asked`, unless that is 0. Else the geometric mean of two spacings: the one at which windows and states get as many
    bytes as the chains (so that at most half of memory is wasted, whatever the traffic), and `PROMPT_TOKENS` (decision
    14 compares this and other rules on simulated traffic). At least a chunk, as none is kept within one, and at most
    `every`, the configured distance (0: they are kept only where prompts end and branch).
    """
    token = sum(pool.payload_bytes for pool in pools if pool.lookback is None) / page_tokens
    snapshot = sum(pool.payload_bytes * pool.lookback for pool in pools if pool.lookback is not None)
    apart = asked or max(chunk_tokens, math.isqrt(round(PROMPT_TOKENS * snapshot / token)) if token else 0)
    return min(apart, max(every, chunk_tokens)) if every else apart


def split(
    memory: int,
    pools: Sequence[PoolSpec],
    page_tokens: int,
    chunk_tokens: int,
    *,
    records: bool,
    what: str,
    per_snapshot: int = 0,
) -> tuple[int, ...]:
    """Slots per pool for `memory` bytes: one per page for a chain, fewer for windows and states.

    `records`: pages lie as host records. ConfigError if not even two chunks of a prompt would fit.
    """
    sizes, shares, fewest = _slot_prices(pools, page_tokens, chunk_tokens, records, per_snapshot)
    least = sum(size * slots for size, slots in zip(sizes, fewest, strict=True))
    if memory < least:
        raise ConfigError(
            f"{format_size(memory)} of {what} memory is too little for this model: two chunks of a prompt "
            f"need {format_size(least) if parse_size(format_size(least)) >= least else least}"
        )
    spare = (memory - least) / sum(size * share for size, share in zip(sizes, shares, strict=True))
    return tuple(few + int(spare * share) for few, share in zip(fewest, shares, strict=True))


def room_for(
    tokens: int,
    pools: Sequence[PoolSpec],
    page_tokens: int,
    chunk_tokens: int,
    *,
    records: bool,
    per_snapshot: int = 0,
) -> int:
    """The bytes of which `split` makes slots for two chunks, and for `tokens` more with their snapshots."""
    sizes, shares, fewest = _slot_prices(pools, page_tokens, chunk_tokens, records, per_snapshot)
    pages = math.ceil(tokens / page_tokens)
    slots = [few + math.ceil(pages * share) for few, share in zip(fewest, shares, strict=True)]
    return sum(size * count for size, count in zip(sizes, slots, strict=True)) + sum(sizes)


def _slot_prices(
    pools: Sequence[PoolSpec], page_tokens: int, chunk_tokens: int, records: bool, per_snapshot: int
) -> tuple[list[int], list[float], list[int]]:
    """For each pool: the bytes of a slot, its slots per page of a chain, and the fewest slots that it needs."""
    sizes = [record_bytes(pool.payload_bytes) if records else pool.payload_bytes for pool in pools]
    per_snapshot = per_snapshot or spacing(pools, page_tokens, chunk_tokens)
    shares = [
        1.0 if back is None else min(1.0, back * page_tokens / per_snapshot)
        for back in (pool.lookback for pool in pools)
    ]
    fewest = [2 * (chunk_tokens // page_tokens if pool.lookback is None else pool.lookback) for pool in pools]
    return sizes, shares, fewest
