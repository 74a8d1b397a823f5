"""What the core is told at the start, and what it counts."""

from dataclasses import dataclass

from kvarve.core.policies import FLAT_COST, PageCost, WritePolicy
from kvarve.core.snapshots import ENDS_AND_BRANCHES, Snapshots
from kvarve.errors import ConfigError
from kvarve.model import PoolSpec, Tier

HORIZON_HOSTS = 16  # what comes back from storage has left the host, so a page's next use is further away than one


@dataclass(frozen=True)
class CoreConfig:
    """What the core has to know. `slots[tier][pool]` says how many pages fit; without a host tier leave it out."""

    pools: tuple[PoolSpec, ...]
    slots: dict[Tier, tuple[int, ...]]
    page_tokens: int = 64
    chunk_tokens: int = 256
    storage: bool = False
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_uses: int = 2  # write_through_selective: uses before the first backup
    eviction: str = "lru"  # which page goes first: one of `kvarve.core.eviction.ORDERS`
    cost: PageCost = FLAT_COST  # what computing a page anew costs: for the eviction orders that weigh it
    snapshots: Snapshots = ENDS_AND_BRANCHES  # which windows and states are worth keeping
    load_at_least: int = 0  # tokens that the host must save, for a copy to the device to be worth it
    fetch_at_least: int = 0  # tokens that storage must save, for a copy to the host to be worth it
    load_deadline_s: float = 30.0  # how long a request waits for a copy to the device that never ends
    queue_deadline_s: float = 30.0  # and, beyond its patience, for copies from storage that wait behind others
    batch_pages: int = 16  # pages per copy: what can be late together; while some are checked, others are read
    backup_pages: int = 256  # pages that backups may have in flight at once
    host_share: float = 0.8  # of each host pool, what waiting for storage may hold at once
    offload_pays_at: float = 0.01  # the share of the bytes stored that has to be used, or storing pauses; 0: never
    offload_horizon_bytes: int = 0  # stored between two looks at that; 0: so many times the host as `HORIZON_HOSTS`

    def __post_init__(self) -> None:
        if self.offload_pays_at < 0 or self.offload_horizon_bytes < 0:
            raise ConfigError("the share of what is stored that has to be used, and its horizon, cannot be negative")
        if not 0 <= self.host_share <= 1:
            raise ConfigError(f"the share of the host that waits for storage is between 0 and 1, not {self.host_share}")


@dataclass
class Counters:
    """What happened so far, in pages unless the name says otherwise."""

    requests: int = 0
    fetched: int = 0  # storage to host
    loaded: int = 0  # host to device
    backed_up: int = 0  # device to host
    stored: int = 0  # host to storage
    bad_storage: int = 0  # failed their check when read from storage
    bad_host: int = 0  # failed their check when read from the host
    failed: int = 0  # copies that did not end well
    late: int = 0  # arrived when nobody waited any more
    duplicates: int = 0  # published by somebody else meanwhile
    uncached: int = 0  # computed without room to keep them
    given_up: int = 0  # runs whose backup failed too often, until they are used again or some time has passed
    dropped_failed: int = 0  # left memory unstored: of runs whose backup failed too often,
    dropped_evicted: int = 0  # before it was their turn to be stored,
    dropped_unpaying: int = 0  # while storing paused because it did not pay,
    dropped_down: int = 0  # while the storage did not answer
    stored_bytes: int = 0
    used_bytes: int = 0  # came from storage, and a request resumed from them
    used_tokens: int = 0
    strays: int = 0  # answers about copies that are not in flight (copies, not pages)
