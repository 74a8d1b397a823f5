"""The core's settings and counters."""

from dataclasses import dataclass

from kvarve.core.policies import FLAT_COST, PageCost, WritePolicy
from kvarve.core.snapshots import ENDS_AND_BRANCHES, Snapshots
from kvarve.errors import ConfigError
from kvarve.model import PoolSpec, Tier

HORIZON_HOSTS = 16  # hosts' worth of bytes: a page that comes back has left the host, so its next use is further off


@dataclass(frozen=True)
class CoreConfig:
    """The core's settings. `slots[tier][pool]` says how many pages fit; without a host tier leave it out."""

    pools: tuple[PoolSpec, ...]
    slots: dict[Tier, tuple[int, ...]]
    page_tokens: int = 64
    chunk_tokens: int = 256
    storage: bool = False
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_uses: int = 2  # write_through_selective: uses before the first backup
    eviction: str = "lru"  # which page goes first: one of `kvarve.core.eviction.ORDERS`
    cost: PageCost = FLAT_COST  # of recomputing a page: for the eviction orders that weigh it
    snapshots: Snapshots = ENDS_AND_BRANCHES  # which windows and states are worth keeping
    load_at_least: int = 0  # tokens that a copy to the device must save to be worth it
    fetch_at_least: int = 0  # tokens that a copy from storage must save to be worth it
    load_deadline_s: float = 30.0  # how long a request waits for a copy to the device that never ends
    queue_deadline_s: float = 30.0  # and, beyond its patience, for copies from storage that wait behind others
    batch_pages: int = 16  # pages per copy: these can be late together; small, so that checks overlap with reads
    backup_pages: int = 256  # pages that backups may have in flight at once
    host_share: float = 0.8  # of each host pool, for pages of copies to and from storage
    offload_pays_at: float = 0.01  # the share of the bytes stored that has to be used, or storing pauses; 0: never
    offload_horizon_bytes: int = 0  # stored between two checks of that; 0: `HORIZON_HOSTS` times the host

    def __post_init__(self) -> None:
        if self.offload_pays_at < 0 or self.offload_horizon_bytes < 0:
            raise ConfigError("the share of what is stored that has to be used, and its horizon, cannot be negative")
        if not 0 <= self.host_share <= 1:
            raise ConfigError(f"the share of the host that waits for storage is between 0 and 1, not {self.host_share}")


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
    given_up: int = 0  # runs quarantined
    dropped_failed: int = 0  # left memory unstored: of runs that had spent their retry budget,
    dropped_evicted: int = 0  # while their store was pending,
    dropped_unpaying: int = 0  # while storing paused because it did not pay,
    dropped_down: int = 0  # while the storage was down
    stored_bytes: int = 0
    used_bytes: int = 0  # of pages from storage that a request resumed from
    used_tokens: int = 0
    strays: int = 0  # answers about copies that are not in flight (copies, not pages)
