"""`PrefixCache`, a scheduler and its worker in one process: all that the reference engine and Transformers need.

One thread (the engine's) calls it. After each call it hands the scheduler's orders to the worker.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvarve.cache.config import CacheConfig
from kvarve.cache.scheduler import CacheScheduler, Prompt, Tokens
from kvarve.cache.worker import Attached, CacheWorker
from kvarve.core.core_config import Counters
from kvarve.core.observe.page_events import Told
from kvarve.core.policies import WritePolicy
from kvarve.core.requests.lease import Lease
from kvarve.pages.pools import MEMORY_TIERS, ModelIdentity, Tier
from kvarve.pages.ticket import Ticket
from kvarve.ranks.agreement import Agreement, Alone
from kvarve.storage import Storage
from kvarve.transfer.arrivals import Arrival
from kvarve.transfer.flows import LANES, Flow
from kvarve.transfer.storage_connection import CLOSE_S

log = logging.getLogger(__name__)

LOOK_S = 0.05  # between two steps of several ranks with copies in flight: for what else a rank may have to say
LEAST_WAIT_S = 0.001  # after a deadline: by the time that the ranks agree on, it may pass only some steps later


class Listener(Protocol):
    """Is told what enters and leaves each tier. While it has no `room` it misses some, and then is told all anew."""

    def room(self) -> bool: ...

    def put(self, told: Sequence[Told]) -> None: ...


class PrefixCache:
    """Finds, keeps and brings back the pages of one model on one rank.

    A request's life: `open`, then `step` and `claim` until ready, `pages` to resume from, `grow` and `publish` for each
    chunk computed, `close`. `lookup` changes nothing. Settings come from `config`; a `storage` object may be given
    instead of a URL. Raises ConfigError or StorageError, before anything has been touched. Methods without a text are
    those of `CacheScheduler` or `CacheWorker`.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        config: CacheConfig,
        *,
        device: str = "cpu",
        storage: Storage | None = None,
        rank: int = 0,
        agreement: Agreement | None = None,
        prefill_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        agreement = agreement or Alone()
        identity = replace(identity, ranks=agreement.ranks)
        self.identity, self.pools, self.rank, self._clock = identity, identity.pools, rank, clock
        self.worker = CacheWorker(identity, config, device=device, storage=storage, rank=rank, clock=clock)
        self._agreement, ends = agreement, self.worker.transfers.ends
        ends.taken, ends.rings = agreement.happened, agreement.wake
        attached = self.worker.attached
        self.scheduler = CacheScheduler(
            identity,
            config,
            self.worker.slots,
            storage=attached is not None,
            only_read=attached is not None and attached.only_read,
            agreement=agreement,
            prefill_tokens=prefill_tokens,
        )
        self._listener: Listener | None = None
        self._missed = True  # the listener does not know what was told before
        # Calls that leave no orders behind, as they are.
        scheduler, worker = self.scheduler, self.worker
        self.lookup, self.prompt, self.pages = scheduler.lookup, scheduler.prompt, scheduler.pages
        self.extend, self.mark, self.keepable = scheduler.extend, scheduler.mark, scheduler.keepable
        self.block_table, self.shared_prefix = scheduler.block_table, scheduler.shared_prefix
        self.export, self.check_ticket, self.audit = scheduler.export, scheduler.check_ticket, scheduler.audit
        self.capacity_tokens, self.demand = scheduler.capacity_tokens, scheduler.demand
        self.device_state, self.making_room = scheduler.device_state, scheduler.making_room
        self.copying, self.found, self.explain = scheduler.copying, scheduler.found, scheduler.explain
        self.hottest, self.watch = scheduler.hottest, scheduler.watch
        self.note, self.fail, self.ages = scheduler.note, scheduler.fail, scheduler.ages
        self.shape, self.idle, self.dirty = scheduler.shape, scheduler.idle, scheduler.dirty
        self.arena, self.records, self.wake, self.usage = worker.arena, worker.records, worker.wake, worker.usage
        self.opened, self.attach, self.detach, self.decline = (
            worker.opened,
            worker.attach,
            worker.detach,
            worker.decline,
        )

    # --- a request's life

    def open(
        self,
        tokens: Tokens | Prompt,
        salt: str = "",
        read: bool = True,
        priority: int = 0,
        ticket: Ticket | None = None,
        unix_s: float = 0.0,
        again: bool = False,
    ) -> Lease:
        lease = self.scheduler.open(tokens, salt, read, priority, ticket, unix_s, (), again)
        self._send()
        return lease

    def claim(self, lease: Lease) -> bool:
        ready = self.scheduler.claim(lease)
        self._send()
        return ready

    def resumed(self, lease: Lease) -> None:
        self.scheduler.resumed(lease)
        self._send()

    def reserve(self, lease: Lease, upto: int) -> bool:
        reserved = self.scheduler.reserve(lease, upto)
        self._send()
        return reserved

    def short(self, lease: Lease, upto: int) -> bool:
        short = self.scheduler.short(lease, upto)
        self._send()
        return short

    def grow(self, lease: Lease, upto: int) -> dict[str, dict[int, int]]:
        fresh = self.scheduler.grow(lease, upto)
        self._send()
        return fresh

    def publish(self, lease: Lease, upto: int) -> None:
        self.scheduler.publish(lease, upto)
        self._send()

    def close(self, lease: Lease) -> None:
        self.scheduler.close(lease)
        self._send()

    def load_by_layers(self) -> None:
        """From now on a lease is ready once its pages have been verified, while they are still being copied: the engine
        waits for each layer of `arrivals` before it reads it."""
        self.worker.transfers.layerwise = True

    def arrivals(self) -> list[Arrival]:
        """The loads that are still being copied (see `TransferEngine.arrivals`)."""
        return self.worker.transfers.arrivals()

    # --- time passes

    def step(self, say: Callable[[], bytes] = bytes) -> bytes:
        """Once per scheduler turn: apply the copies that have ended, and send new ones.

        Returns what rank 0 says to all ranks for this turn; there `say` is asked for it, after the flag of `wake` has
        been cleared.
        """
        try:
            report = self.worker.report()
            said = self.scheduler.step(report, self._clock(), say())
        except Exception as e:  # a bug of ours: what waits for a change is told, and nothing more is sent
            self.worker.refuse(e)
            raise
        self._send()
        self._tell()
        return said

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a copy has ended, a request's patience has, or `wake` was called; at most `timeout_s`.

        Of several ranks only rank 0 sleeps, as the others wait for its next step; while copies are in flight, until one
        has begun or ended on all ranks (`Agreement.wait`), or for `LOOK_S`.
        """
        if self.rank:
            return True
        patience_s = max(LEAST_WAIT_S, self.scheduler.patience_ends() - self._clock())
        if self.ranks > 1 and self.scheduler.in_flight():
            timeout_s = min(timeout_s, LOOK_S)
            happened = self._agreement.wait(min(timeout_s, patience_s), self.worker.transfers.ends.woken)
        else:
            happened = self.worker.wait(min(timeout_s, patience_s))
        return happened or patience_s <= timeout_s

    def now(self) -> float:
        """The time by the cache's clock."""
        return self._clock()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Step until every copy has ended and every pending backup and store has been made; False if pages are still
        dirty.

        A failed store is retried at once; after some failures in a row, or if the storage is down, it is not waited
        for.
        """
        self.scheduler.retry()
        self.step()
        end = self.scheduler.now + timeout_s  # by the agreed time, so that all ranks give up in the same step
        while not self.idle() and self.scheduler.now < end:
            self.wait(0.05)
            self.scheduler.retry()
            self.step()
        return self.idle() and not self.dirty()

    def flush(self, tiers: Sequence[Tier] = MEMORY_TIERS, timeout_s: float = 30.0) -> int:
        """Evict every unpinned page from memory tiers, after pending backups; storage keeps its own. Pages evicted."""
        end, gone = self.scheduler.now + timeout_s, 0
        while True:
            self.settle(end - self.scheduler.now)
            gone += self.evict(tiers)
            if self.idle() or self.scheduler.now >= end:  # write-back copies pages down before they go
                return gone

    def evict(self, tiers: Sequence[Tier]) -> int:
        """Evict every unpinned page from memory tiers now, backed up or not. Pages evicted at once."""
        gone = self.scheduler.flush(tiers)
        self._send()
        self._tell()
        return gone

    def shutdown(self, timeout_s: float = 30.0, *, store: bool = True) -> None:
        """Write dirty pages to storage, stop the lanes and close the storage, all within `timeout_s`.

        A storage that is down is not waited for, and calls that hang on one that is down or detached get some seconds
        at most. The count of pages that could not be stored is logged. `store` false: the core is not used any more, as
        it has broken a law and a slot may hold another page's bytes.
        """
        end = time.monotonic() + timeout_s
        close_s = min(CLOSE_S, timeout_s / 4)
        if store:
            self._store_all(timeout_s - 2 * close_s)
        self.worker.close(max(0.0, end - time.monotonic()), close_s, up=self.scheduler.storage_up)

    def _store_all(self, timeout_s: float) -> None:
        attached = self.attached is not None
        # By the agreed state of the storage, since all ranks must take the same number of steps.
        up = self.scheduler.storage_up
        if up and self.config.policies.write is WritePolicy.WRITE_BACK:
            self.scheduler.back_up()
        if not self.settle(timeout_s if up or not attached else 0.0) and attached:
            log.warning("%d pages in memory could not be stored before the end", self.dirty())

    # --- attaching and detaching a storage

    @property
    def config(self) -> CacheConfig:
        """The settings now: a change of the storage may bring other policies."""
        return self.worker.config

    @property
    def attached(self) -> Attached | None:
        return self.worker.attached

    @property
    def up(self) -> bool:
        """Whether the storage is used: it answers, on all ranks as far as these have told each other."""
        return self.worker.up and (self.ranks == 1 or self.attached is None or self.scheduler.storage_up)

    @property
    def ranks(self) -> int:
        return self.scheduler.ranks

    # --- figures

    @property
    def counters(self) -> Counters:
        return self.scheduler.counters

    def stats(self) -> dict[str, float]:
        """The figures of the scheduler and of the worker's lanes, by name."""
        return self.scheduler.stats() | self.worker.stats()

    def flows(self) -> dict[str, Flow]:
        """What each lane has moved, by its name."""
        return {LANES[edge]: flow for edge, flow in self.worker.transfers.flows.items()}

    def tell(self, listener: "Listener") -> None:
        """From now on have told in each step what enters and leaves each tier; before the first request."""
        self.scheduler.tell()
        self._listener = listener

    def _tell(self) -> None:
        if self._listener is None:
            return
        residency = self.scheduler.tell()
        if not self._listener.room():
            residency.take()
            self._missed = True
            return
        if self._missed:
            residency.tell_all()
            self._missed = False
        if told := residency.take():
            self._listener.put(told)

    def _send(self) -> None:
        self.worker.move(*self.scheduler.moved())  # before any copy into the slots of extents that have joined a pool
        if orders := self.scheduler.take():
            self.worker.do(orders)
