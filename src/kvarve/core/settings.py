"""What the core is told at the start, and what it counts."""

from dataclasses import dataclass

from kvarve.core.policies import WritePolicy
from kvarve.model import PoolSpec, Tier


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
    snapshot_every: int = 0  # keep windows and states every so many tokens too; 0: only where a prompt ends or branches
    batch_pages: int = 64  # pages per copy: what can be late together
    backup_pages: int = 256  # pages that backups may have in flight at once: what a slow storage can hold of the host


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
