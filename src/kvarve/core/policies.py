"""An operator's choices as data: when to back up, how long to wait for storage, what to evict and what to keep.

`Policies` holds them all and checks them; the core, the worker, the simulator and the command line take it whole.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import inf

from kvarve.core.requests.snapshots import Snapshots
from kvarve.core.slots.orders import ORDERS
from kvarve.errors import ConfigError


class WritePolicy(Enum):
    """When a page is copied to the next tier: after its first use, after k uses, or when it is evicted."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True)
class Patience:
    """How long a request waits for its pages in storage: base + per 1,024 tokens that are not in memory, in seconds.

    The time runs from when the request's own copies begin; it stands still while they wait behind others that make
    progress. 0 takes the pages that have arrived when the request is claimed (best effort). With `each` the time starts
    anew whenever one of its copies begins or ends, so a request waits for all of them, however many there are.
    """

    base_s: float
    per_ki_token_s: float = 0.0
    each: bool = False

    def __post_init__(self) -> None:
        if not (self.base_s >= 0 and self.per_ki_token_s >= 0):
            raise ConfigError("the patience of a prefetch cannot be negative")

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.per_ki_token_s * tokens / 1024


BEST_EFFORT = Patience(0.0)
WAIT_COMPLETE = Patience(inf, each=True)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """An operator's choices for a cache, for all ranks the same. ConfigError for values that cannot work."""

    write_policy: str = "write_through"
    """when pages are backed up: write_through, write_through_selective or write_back"""
    selective_uses: int = 2
    """uses after which write_through_selective writes"""
    prefetch_policy: str = "timeout"
    """how to wait for storage: best_effort, timeout or wait_complete"""
    prefetch_base_s: float = 2.0
    """seconds to wait for storage"""
    prefetch_per_ki_token_s: float = 0.25
    """and per 1,024 tokens"""
    storage_deadline_s: float = 30.0
    """seconds after which a call to storage counts as hanging"""
    snapshot_ends: bool = True
    """keep windows and states where a prompt ends"""
    snapshot_branches: bool = True
    """keep windows and states where a prompt branches off a known one"""
    snapshot_every: int = 0
    """also keep windows and states every N tokens; 0: so far apart that they take little memory"""
    snapshot_chunks: bool = True
    """also keep windows and states at the end of each chunk, on the device alone, while a quarter of it is unused"""
    snapshot_gap: int = 0
    """the fewest tokens that a kept window or state has to save"""
    states: int = 0
    """the most windows or states of each kind that a memory tier keeps; 0: as the traffic asks"""
    eviction: str = "lru"
    """eviction order: lru, lfu, s3fifo or priority"""
    load_at_least: int = 0
    """the fewest tokens that a copy from the host to the device has to save"""
    fetch_at_least: int = 0
    """the fewest tokens that a copy from storage to the host has to save"""
    salt_share: float = 1.0
    """of each memory tier, the share that the prompts of one salt may keep; its own coldest pages go beyond that"""
    host_share: float = 0.8
    """of the host (of each pool, if they do not share it), the share that copies to and from storage may hold"""
    offload_pays_at: float = 0.01
    """of the bytes stored, the share that has to be used, or storing pauses until it would pay again; 0: never"""
    verify_host: bool = True
    """check pages in host memory before they are used"""
    hash_sample: float = 0.0
    """of all pages, the share whose bytes are compared before and after each copy; an altered one is dropped"""

    def __post_init__(self) -> None:
        if self.write_policy not in (known := [policy.value for policy in WritePolicy]):
            raise ConfigError(f"unknown write policy {self.write_policy!r}; known: {', '.join(known)}")
        if self.selective_uses < 1:
            raise ConfigError(f"selective uses must be at least 1, not {self.selective_uses}")
        if not 0 < self.storage_deadline_s < inf:
            raise ConfigError(
                f"the storage deadline must be above zero seconds and finite, not {self.storage_deadline_s}"
            )
        if self.prefetch_per_ki_token_s == inf:
            raise ConfigError("a wait needs an end: give a finite number of seconds per 1,024 tokens")
        self.patience()
        if self.eviction not in ORDERS:
            raise ConfigError(f"unknown eviction order {self.eviction!r}; known: {', '.join(ORDERS)}")
        if self.states < 0:
            raise ConfigError(f"memory cannot keep {self.states} states: give 0 or more")
        if min(self.load_at_least, self.fetch_at_least) < 0:
            raise ConfigError("the fewest tokens that a copy has to save cannot be negative")
        if not 0 < self.host_share <= 1:
            raise ConfigError(
                f"the share of the host that waits for storage is above 0 and at most 1, not {self.host_share}"
            )
        if not 0 < self.salt_share <= 1:
            raise ConfigError(f"the share of memory of one salt is above 0 and at most 1, not {self.salt_share}")
        if not 0 <= self.offload_pays_at < inf:
            raise ConfigError(
                f"the share of what is stored that has to be used is 0 or above and finite, not {self.offload_pays_at}"
            )
        if not 0 <= self.hash_sample <= 1:
            raise ConfigError(f"the share of pages that are compared is 0 to 1, not {self.hash_sample}")
        _ = self.snapshots

    @cached_property
    def write(self) -> WritePolicy:
        return WritePolicy(self.write_policy)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Which windows and states are worth keeping."""
        return Snapshots(self.snapshot_ends, self.snapshot_branches, self.snapshot_every, self.snapshot_gap)

    def patience(self) -> Patience:
        """How long a request waits for storage: also under "wait_complete" at most the storage deadline for each copy.

        ConfigError for an unknown prefetch policy.
        """
        known = {
            "best_effort": BEST_EFFORT,
            "wait_complete": WAIT_COMPLETE,
            "timeout": Patience(self.prefetch_base_s, self.prefetch_per_ki_token_s),
        }
        if self.prefetch_policy not in known:
            raise ConfigError(f"unknown prefetch policy {self.prefetch_policy!r}; known: {', '.join(known)}")
        asked = known[self.prefetch_policy]
        return replace(asked, base_s=min(asked.base_s, self.storage_deadline_s))
