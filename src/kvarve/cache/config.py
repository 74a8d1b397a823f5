"""An operator's settings of a cache, and how bytes become slots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarve.core.policies import Policies
from kvarve.core.slots.extents import Cut, cut
from kvarve.errors import ConfigError
from kvarve.pages.field_checks import SizeField, require_types
from kvarve.pages.pools import PoolSpec
from kvarve.pages.sizes import format_size, parse_size
from kvarve.records.record import BLOCK_BYTES, record_bytes

SHORTER = 7 / 8  # of the longest prompt: what is worth sharing memory by large extents
PROMPT_TOKENS = 8192  # assumed length of a prompt, see `spacing`
NO_HOST = "storage needs host memory, through which its pages travel: give host memory too"


@dataclass(frozen=True)
class CacheConfig:
    """The settings of one cache. ConfigError for values that cannot work.

    `device_memory` and `host_memory`: sizes, as "256MiB" or in bytes. `storage`: a URL such as
    "file:///var/kvarve?capacity=100GiB", or a tuple of them for tiers, the near and fast one first; it needs host
    memory. `storage_key`: a file; pages in storage that were not sealed with its bytes are misses.
    """

    device_memory: SizeField = SizeField()
    host_memory: SizeField = SizeField(0)
    storage: str | tuple[str, ...] | None = field(default=None, repr=False)  # it may hold a password
    policies: Policies = Policies()
    storage_key: str | None = None

    def __post_init__(self) -> None:
        require_types(self)
        if self.storage and not self.host_memory:
            raise ConfigError(NO_HOST)

    @property
    def storages(self) -> tuple[str, ...]:
        """The URLs of all storage tiers."""
        return (self.storage,) if isinstance(self.storage, str) else self.storage or ()


def spacing(pools: Sequence[PoolSpec], page_tokens: int, chunk_tokens: int, every: int = 0) -> int:
    """The distance in tokens between windows or states for which memory is divided where pools cannot share it.

    The geometric mean of two spacings: the one at which windows and states get as many bytes as the chains (so that at
    most half of memory is wasted, whatever the traffic), and `PROMPT_TOKENS` (decision 14 compares this and other rules
    on simulated traffic). At least a chunk, as none is kept within one, and at most `every`, the configured distance
    (0: they are kept only where prompts end and branch).
    """
    token = sum(pool.payload_bytes for pool in pools if pool.lookback is None) / page_tokens
    snapshot = sum(pool.payload_bytes * pool.lookback for pool in pools if pool.lookback is not None)
    apart = max(chunk_tokens, math.isqrt(round(PROMPT_TOKENS * snapshot / token)) if token else 0)
    return min(apart, max(every, chunk_tokens)) if every else apart


def divide(
    memory: int,
    pools: Sequence[PoolSpec],
    page_tokens: int,
    chunk_tokens: int,
    policies: Policies,
    *,
    records: bool,
    what: str,
    granule: int = 1,
) -> Cut | tuple[int, ...]:
    """The slots of each pool in a tier of `memory` bytes: cut into extents that the pools share, or divided once where
    the tier cannot be cut. `granule`: the bytes that the driver moves from pool to pool at once; 0: it moves
    none. Pools share by large granules only if prompts can be about as long as in divided memory. ConfigError if not
    even two chunks of a prompt would fit."""
    shape, states = (pools, page_tokens, chunk_tokens), policies.states
    apart = spacing(*shape, policies.snapshots.every)
    once = split(memory, *shape, records=records, what=what, per_snapshot=apart, states=states)
    found = cut_memory(memory, *shape, records=records, states=states, granule=granule) if granule else None
    if found is None or granule == 1:
        return found or once
    chains = [number for number, pool in enumerate(pools) if pool.lookback is None]
    return once if any(found.most(number) < SHORTER * once[number] for number in chains) else found


def split(
    memory: int,
    pools: Sequence[PoolSpec],
    page_tokens: int,
    chunk_tokens: int,
    *,
    records: bool,
    what: str,
    per_snapshot: int = 0,
    states: int = 0,
) -> tuple[int, ...]:
    """Slots per pool for `memory` bytes: one per page for a chain, fewer for windows and states.

    `records`: pages lie as host records. `states`: so many windows or states and no more; 0: as many as `per_snapshot`
    says. ConfigError if not even two chunks of a prompt would fit.
    """
    sizes, shares, fewest = _slot_prices(pools, page_tokens, chunk_tokens, records, per_snapshot)
    if states:
        backs = [pool.lookback for pool in pools]
        shares = [share if back is None else 0.0 for share, back in zip(shares, backs, strict=True)]
        fewest = [few if back is None else max(few, states * back) for few, back in zip(fewest, backs, strict=True)]
    least = sum(size * slots for size, slots in zip(sizes, fewest, strict=True))
    if memory < least:
        raise ConfigError(
            f"{format_size(memory)} of {what} memory is too little for this model: two chunks of a prompt "
            f"need {format_size(least) if parse_size(format_size(least)) >= least else least}"
        )
    spare = (memory - least) / (sum(size * share for size, share in zip(sizes, shares, strict=True)) or 1)
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


def cut_memory(
    memory: int,
    pools: Sequence[PoolSpec],
    page_tokens: int,
    chunk_tokens: int,
    *,
    records: bool,
    states: int = 0,
    granule: int = 1,
) -> Cut | None:
    """Extents of `memory` bytes for pools that share it; `states`: the most windows or states, 0 for any number. None
    if memory is too small to be cut, or has one pool. Several chains do not share: admission counts what is left for
    each of them by itself. `granule`: the part of an extent that has a buffer of a chain is a multiple of it."""
    if len(pools) < 2 or sum(pool.lookback is None for pool in pools) > 1:
        return None
    sizes, slots, fewest = _slot_prices(pools, page_tokens, chunk_tokens, records, 0)
    nbytes = [size * each for size, each in zip(sizes, slots, strict=True)]
    shares = [each / sum(nbytes) for each in nbytes]
    backs = [pool.lookback for pool in pools]
    bounds = [None if back is None else max(few, states * back) for back, few in zip(backs, fewest, strict=True)]
    unit = BLOCK_BYTES if records or granule > 1 else 1
    rows = [_row(pool, granule) for pool in pools] if granule > 1 else ()
    return cut(memory, sizes, fewest, shares, unit, bounds if states else (), granule, rows)


def _row(pool: PoolSpec, granule: int) -> int:
    """How many pages of a chain fill whole granules in each of its buffers; 0 for a pool whose pages lie by blocks."""
    if pool.lookback is not None:
        return 0
    return math.lcm(*(granule // math.gcd(granule, buffer.nbytes) for buffer in pool.buffers))


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
