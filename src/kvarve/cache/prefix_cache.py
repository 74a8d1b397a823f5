"""`PrefixCache`, a scheduler and its worker in one process: all that the reference engine and Transformers need.

One thread (the engine's) calls it. What its methods have the scheduler order goes to the worker at once; what is asked
of the scheduler itself goes with the next of these calls.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from types import TracebackType
from typing import Protocol, Self

from kvarve.cache.config import CacheConfig
from kvarve.cache.scheduler import CacheScheduler, Prompt, Tokens
from kvarve.cache.worker import CacheWorker
from kvarve.core.core import Hit
from kvarve.core.lease import Lease
from kvarve.core.observe.page_events import Told
from kvarve.core.policies import WritePolicy
from kvarve.errors import Broken, ConfigError, KvarveError
from kvarve.pages.pools import MEMORY_TIERS, ModelIdentity, Tier
from kvarve.pages.ticket import Ticket
from kvarve.ranks.agreement import Agreement
from kvarve.storage import Storage
from kvarve.transfer.storage_connection import CLOSE_S

log = logging.getLogger(__name__)

LOOK_S = 0.05  # between two steps of several ranks with copies in flight: for what else a rank may have to say
LEAST_WAIT_S = 0.001  # after a deadline: by the time that the ranks agree on, it may pass only some steps later


# Of the cache's call tree; arenas and storages are called from here.
PARTS = ("kvarve.core.", "kvarve.cache.", "kvarve.ranks.", "kvarve.transfer.")


@contextmanager
def bugs_as_broken(assertions: bool = False) -> Iterator[None]:
    """The border for whoever catches the errors of one request: an exception inside that is a bug of the cache becomes
    Broken, since the cache may be half changed, and it is no request's error. `assertions`: any failed one is a bug."""
    try:
        yield
    except Exception as e:
        assert e.__traceback__ is not None
        inside = e.__traceback__.tb_next  # without this frame, which is the cache's too
        if not isinstance(e, Broken) and (_came_out(e, inside) or (assertions and isinstance(e, AssertionError))):
            raise Broken(f"{type(e).__name__}: {e}") from e
        raise


def is_bug(error: BaseException | None) -> bool:
    """Whether an exception is a bug of a cache: it came out of one, and is no answer such as ConfigError; or Broken.
    An interrupt counts if it met the core in the middle of a change."""
    return error is not None and _came_out(error, error.__traceback__)


def _came_out(error: BaseException, came_by: TracebackType | None) -> bool:
    if isinstance(error, KvarveError):
        return isinstance(error, Broken)
    parts = PARTS if isinstance(error, Exception) else PARTS[:1]
    return any(frame.f_globals.get("__name__", "").startswith(parts) for frame, _ in walk_tb(came_by))


class Listener(Protocol):
    """Receives what enters and leaves each tier. While `room` is False events are dropped; afterwards it gets a full
    snapshot."""

    def room(self) -> bool: ...

    def put(self, told: Sequence[Told]) -> None: ...


class PrefixCache:
    """Finds, keeps and brings back the pages of one model on one rank.

    A request's life: `open`, then `step` and `claim` until ready, `pages` to resume from, `grow` and `publish` for each
    chunk computed, `close`. For more, such as figures, ask its `scheduler` (and the core of that) and its `worker`.
    Settings come from `config`; a `storage` object may be given instead of a URL. Raises ConfigError or StorageError,
    before anything has been touched.
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
        agreement = agreement or Agreement()
        identity = replace(identity, ranks=agreement.ranks)
        self.identity, self.rank, self.clock = identity, rank, clock
        self.worker = CacheWorker(identity, config, device=device, storage=storage, rank=rank, clock=clock)
        ends = self.worker.transfers.ends
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, came_by: object) -> None:
        self.shutdown(store=not is_bug(error))  # after a bug no page can be trusted

    # --- a request's life

    def lookup(self, tokens: Tokens | Prompt, salt: str = "") -> Hit:
        """How deep a prompt could resume now, in pages; changes nothing."""
        return self.scheduler.lookup(tokens, salt)

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
        """Open a lease for a request that begins to wait: its pages in storage are prefetched (see
        `CacheScheduler.open`)."""
        lease = self.scheduler.open(tokens, salt, read, priority, ticket, unix_s, (), again)
        self._send()
        return lease

    def claim(self, lease: Lease) -> bool:
        """The engine admits this request, so its pages are loaded to the device. True once the lease is ready; ask
        again after each `step`."""
        ready = self.scheduler.claim(lease)
        self._send()
        return ready

    def pages(self, lease: Lease) -> dict[str, tuple[range, list[int]]]:
        """The pages that a ready lease resumes from: for each pool the positions and their slots (`worker.arena`)."""
        return self.scheduler.pages(lease)

    def reserve(self, lease: Lease, upto: int) -> bool:
        """Reserve slots for a ready lease to compute in (see `Growth.reserve`); they have memory when this returns."""
        reserved = self.scheduler.core.growth.reserve(lease, upto)
        self._send()
        return reserved

    def short(self, lease: Lease, upto: int) -> bool:
        """Whether `grow` would lack slots that are about to come free; the copies that free them begin now."""
        short = self.scheduler.core.growth.short(lease, upto)
        self._send()
        return short

    def grow(self, lease: Lease, upto: int) -> dict[str, dict[int, int]]:
        """Reserve slots for the pages up to `upto` that are worth keeping: for each pool the slots by position. Fill
        them, then `publish`."""
        fresh = self.scheduler.grow(lease, upto)
        self._send()
        return fresh

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the pages before `upto`, which have been filled, to the tree: others may resume from them."""
        self.scheduler.publish(lease, upto)
        self._send()

    def close(self, lease: Lease) -> None:
        """Close a lease in any phase; what it has published stays."""
        self.scheduler.close(lease)
        self._send()

    # --- time passes

    def step(self, say: Callable[[], bytes] = bytes) -> bytes:
        """Once per scheduler turn: apply the copies that have ended, and send new ones.

        Returns what rank 0 says to all ranks for this turn; there `say` is asked for it, after the flag of `wake` has
        been cleared.
        """
        try:
            report = self.worker.report()
            said = self.scheduler.step(report, self.clock(), say())
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
        self._send()
        if self.rank:
            return True
        patience_s = max(LEAST_WAIT_S, self.scheduler.core.patience_ends() - self.clock())
        if self.identity.ranks > 1 and self.scheduler.core.copies.ops:
            timeout_s = min(timeout_s, LOOK_S)
            happened = self.scheduler.agreement.wait(min(timeout_s, patience_s), self.worker.transfers.ends.woken)
        else:
            happened = self.worker.wait(min(timeout_s, patience_s))
        return happened or patience_s <= timeout_s

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Step until every copy has ended and every pending backup and store has been made; False if pages are still
        dirty.

        A failed store is retried at once; after some failures in a row, or if the storage is down, it is not waited
        for.
        """
        self.scheduler.core.retry()
        self.step()
        end = self.scheduler.now + timeout_s  # by the agreed time, so that all ranks give up in the same step
        while not self.scheduler.core.idle() and self.scheduler.now < end:
            self.wait(0.05)
            self.scheduler.core.retry()
            self.step()
        return self.scheduler.core.idle() and not self.scheduler.core.dirty()

    def flush(self, tiers: Sequence[Tier] = MEMORY_TIERS, timeout_s: float = 30.0) -> int:
        """Evict every unpinned page from memory tiers, after pending backups; storage keeps its own. Pages evicted."""
        if not all(tier in MEMORY_TIERS and isinstance(tier, Tier) for tier in tiers):
            raise ConfigError(f"tiers must be of Tier.DEVICE and Tier.HOST, got {tiers!r}")
        end, gone = self.scheduler.now + timeout_s, 0
        while True:
            self.settle(end - self.scheduler.now)
            gone += self.scheduler.core.flush(tiers)
            self._send()
            self._tell()
            if self.scheduler.core.idle() or self.scheduler.now >= end:  # write-back copies pages down before they go
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
        attached = self.worker.attached is not None
        # By the agreed state of the storage, since all ranks must take the same number of steps.
        up = self.scheduler.storage_up
        if up and self.worker.config.policies.write is WritePolicy.WRITE_BACK:
            self.scheduler.core.back_up()
        if not self.settle(timeout_s if up or not attached else 0.0) and attached:
            log.warning("%d pages in memory could not be stored before the end", self.scheduler.core.dirty())

    # --- figures

    @property
    def up(self) -> bool:
        """Whether the storage is used: it answers, on all ranks as far as these have told each other."""
        alone = self.identity.ranks == 1 or self.worker.attached is None
        return self.worker.up and (alone or self.scheduler.storage_up)

    def stats(self) -> dict[str, float]:
        """The figures of the scheduler and of the worker's lanes, by name."""
        return self.scheduler.stats() | self.worker.stats()

    def tell(self, listener: Listener) -> None:
        """From now on have told in each step what enters and leaves each tier; before the first request."""
        self.scheduler.core.tell()
        self._listener = listener

    def _tell(self) -> None:
        if self._listener is None:
            return
        residency = self.scheduler.core.tell()
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
