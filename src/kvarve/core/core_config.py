"""The core's settings and counters."""

from dataclasses import dataclass
from math import ceil

from kvarve.core.policies import Policies
from kvarve.core.slots.extents import Cut
from kvarve.errors import ConfigError, require_assertions
from kvarve.pages.pools import MEMORY_TIERS, PoolSpec, Tier

LOAD_DEADLINE_S = 30.0  # how long a copy to the device is waited for that makes no progress
HORIZON_HOSTS = 16  # hosts' worth of bytes: a page that comes back has left the host, so its next use is further off


Slots = dict[Tier, tuple[int, ...] | Cut]


@dataclass(frozen=True)
class CoreConfig:
    """The core's settings. `slots[tier]` says for each pool how many pages fit, or how a tier is cut that pools share.

    Leave out a tier that does not exist; without the device, the slots there belong to an engine, which says in `open`
    what it has, and copies go to and from blocks that it names.
    """

    pools: tuple[PoolSpec, ...]
    slots: Slots
    page_tokens: int = 64
    chunk_tokens: int = 256
    storage: bool = False
    policies: Policies = Policies()
    load_deadline_s: float = LOAD_DEADLINE_S  # how long a request waits for a copy to the device that never ends
    # A copy takes whole positions until it has this many pages. Its pages are late together if it is; and checks of one
    # copy overlap with reads of the next, so it is small.
    batch_pages: int = 16
    # A copy down from the core's own slots has more pages while they have fewer bytes than this:
    backup_bytes: int = 16 << 20  # to the host, since ranks have to agree on each copy
    store_bytes: int = 64 << 20  # to storage, since each store waits for the medium
    backup_pages: int = 256  # pages that backups may have in flight at once
    # Windows and states on the way through a prompt take this part of the bytes of its chain at most, and are no closer
    # than this, as prefill computes what lies between two of them at once.
    step_share: float = 1 / 24
    step_tokens: int = 1024
    prefill_tokens: int = 0  # what the engine computes at once, where that is more than a chunk
    offload_horizon_bytes: int = 0  # stored between two checks of that; 0: `HORIZON_HOSTS` times the host

    def __post_init__(self) -> None:
        require_assertions()
        if min(self.backup_bytes, self.store_bytes) < 0:
            raise ConfigError("a copy cannot have less than no bytes")
        if self.offload_horizon_bytes < 0:
            raise ConfigError("the horizon of what is stored cannot be negative")
        host = self.slots.get(Tier.HOST, ())
        if not (isinstance(host, Cut) or any(host)) and Tier.DEVICE not in self.slots:
            raise ConfigError("a cache needs slots on the device or in the host")

    @property
    def memory(self) -> tuple[Tier, ...]:
        """The memory tiers whose slots are the core's, near to far."""
        return tuple(tier for tier in MEMORY_TIERS if tier in self.slots or tier is Tier.HOST)

    @property
    def chain_bytes(self) -> int:
        """The bytes of a page of all chains."""
        return sum(pool.payload_bytes for pool in self.pools if pool.lookback is None)

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of all windows and states that a request resumes from."""
        return sum(pool.lookback * pool.payload_bytes for pool in self.pools if pool.lookback is not None)

    @property
    def step(self) -> int:
        """How many pages lie between two snapshots on the way through a prompt; 0 if there are none. A power of two,
        rounded up to whole forwards of the engine."""
        if not self.chain_bytes or not self.snapshot_bytes:
            return 0
        least = max(self.snapshot_bytes / self.chain_bytes / self.step_share, self.step_tokens / self.page_tokens)
        grid = max(self.chunk_tokens, self.prefill_tokens) // self.page_tokens
        return -(-(1 << (ceil(least) - 1).bit_length()) // grid) * grid


@dataclass
class Counters:
    """Totals since the start, in pages unless the name says otherwise."""

    requests: int = 0
    fetched: int = 0  # storage to host
    loaded: int = 0  # host to device
    backed_up: int = 0  # device to host
    stored: int = 0  # host to storage
    bad_storage: int = 0  # failed their check when read from storage
    bad_host: int = 0  # failed their check when read from the host
    failed: int = 0  # copies that failed
    late: int = 0  # arrived after their lease had stopped waiting
    duplicates: int = 0  # published by another request meanwhile
    uncached: int = 0  # computed, but no slot was free to keep them
    over_share: int = 0  # evicted since their salt had more than its share of memory
    given_up: int = 0  # runs quarantined
    dropped_failed: int = 0  # left memory unstored: of runs that had spent their retry budget,
    dropped_evicted: int = 0  # while their store was pending,
    dropped_unpaying: int = 0  # while storing paused because it did not pay,
    dropped_down: int = 0  # while the storage was down,
    dropped_full: int = 0  # while it had no room for what it was given,
    dropped_read_only: int = 0  # while it could only be read
    stored_bytes: int = 0
    used_bytes: int = 0  # of pages from storage that a request resumed from
    used_tokens: int = 0
    fetching_tokens: int = 0  # that need not be computed if fetches that were begun succeed
    deferred_tokens: int = 0  # the same of fetches that had to wait for slots in the host
    strays: int = 0  # answers about copies that are not in flight (copies, not pages)
