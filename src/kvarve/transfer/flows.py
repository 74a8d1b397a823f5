"""What lanes have moved: seconds, bytes and pages of their calls, for people and metrics. Nothing decides by it."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvarve.core.copies.effects import Page
from kvarve.core.copies.in_flight import BACKUP, FETCH, LOAD, PROBE, STORE, Edge
from kvarve.core.observe.histograms import BYTES, BYTES_PER_S, CALL_S, Histogram
from kvarve.pages.pools import PoolSpec

LANES: Mapping[Edge, str] = {
    BACKUP: "device-to-host",
    LOAD: "host-to-device",
    STORE: "host-to-storage",
    FETCH: "storage-to-host",
    PROBE: "storage-probe",
}


class Flow:
    """The calls of one lane so far, made by several threads, whatever storage was attached. Those that failed are left
    out."""

    def __init__(self, pools: Sequence[PoolSpec]) -> None:
        self._bytes, self._lock = [pool.payload_bytes for pool in pools], threading.Lock()
        self.seconds, self.bytes, self.bytes_per_s = Histogram(CALL_S), Histogram(BYTES), Histogram(BYTES_PER_S)
        self.pages: Counter[str] = Counter({pool.name: 0 for pool in pools})  # moved, or found by a probe
        self.asked: Counter[str] = Counter({pool.name: 0 for pool in pools})  # of a probe
        self._names = [pool.name for pool in pools]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which only reads it."""
        return vars(self) | {"_lock": None}

    def moved(self, seconds: float, pages: Iterable[Page], written: Iterable[Page] | None = None) -> None:
        """A call has copied `pages`; those that this rank itself has `written`, if that is not all of them."""
        pools = [page.pool for page in pages]
        nbytes = sum(self._bytes[pool] for pool in (pools if written is None else [page.pool for page in written]))
        with self._lock:
            self.seconds.observe(seconds)
            if nbytes:
                self.bytes.observe(nbytes)
                self.bytes_per_s.observe(nbytes / max(seconds, 1e-9))
            self.pages.update(self._names[pool] for pool in pools)

    def probed(self, seconds: float, asked: Iterable[Page], found: Iterable[Page]) -> None:
        """A call has asked for pages, of which some were found."""
        with self._lock:
            self.seconds.observe(seconds)
            self.asked.update(self._names[page.pool] for page in asked)
            self.pages.update(self._names[page.pool] for page in found)
