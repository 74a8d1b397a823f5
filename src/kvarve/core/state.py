"""The state of a core: its settings and time, its leases, and its parts, each of which keeps one kind of fact.

A part may ask and change another part through the state, as eviction does, which has to back up pages first.
"""

from kvarve.core.copies.backups import Backups
from kvarve.core.copies.in_flight import Copies
from kvarve.core.core_config import CoreConfig, Counters
from kvarve.core.observe.hot import Hot
from kvarve.core.requests.lease import Lease
from kvarve.core.requests.paths import Paths
from kvarve.core.requests.prefetch import Prefetch
from kvarve.core.slots.slot_pools import SlotPools


class State:
    """`slot_pools`: the tree and which page is in which slot · `copies` in flight · `backups`: what is dirty ·
    `paths`: what of a prompt is where · `prefetch`: what waits for storage · `hot`: what is resumed from most."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.now = 0.0
        self.counters = Counters()
        self.leases: dict[int, Lease] = {}
        self.hot: Hot | None = None  # where it is watched
        self.slot_pools = SlotPools(self)
        self.copies = Copies(self)
        self.backups = Backups(self)
        self.paths = Paths(self)
        self.prefetch = Prefetch(self)
