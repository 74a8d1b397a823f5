"""`PrefixCache`, the one class that an engine needs: the pure core, a transfer engine and a clock.

One thread (the engine's) calls it; lane threads touch only slots that the core gave them.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvarve.balance import Watch
from kvarve.config import NO_HOST, CacheConfig, spacing, split
from kvarve.core.cache import Core, Hit
from kvarve.core.lease import Lease
from kvarve.core.policies import WritePolicy
from kvarve.core.settings import CoreConfig
from kvarve.errors import Busy, ConfigError, KvarveError, StorageError
from kvarve.keys import TOKEN_BYTES, bind_to_chunk, pack, root_key
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.machine import device_bytes, host_bytes, on_host
from kvarve.memory.record import whole
from kvarve.model import MEMORY_TIERS, ModelIdentity, PoolSpec, Tier
from kvarve.ranks.agreement import Agreement, Alone, Proposal
from kvarve.sizes import format_size
from kvarve.storage import Breaker, Storage, StorageUsage, Tiers, check_storage, open_storage
from kvarve.storage.urls import SCHEMES, parse_urls
from kvarve.transfer.arrivals import Arrival
from kvarve.transfer.engine import TransferEngine
from kvarve.transfer.storage_connection import StorageConnection

log = logging.getLogger(__name__)

CHANGE_S = 30.0  # how long a rank waits for the others to propose the same change of the storage
CLOSE_S = 5.0  # how long closing a storage waits for a call that hangs
LEAST_WAIT_S = 0.001  # after a deadline: by the time that the ranks agree on, it may pass only some steps later

Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class Prompt:
    """Packed tokens and the root key, as the core takes them (`PrefixCache.prompt`)."""

    root: bytes
    tokens: bytes


class UnderWay(Busy):
    """Another change of the storage is in progress."""


def check(identity: ModelIdentity, config: CacheConfig, device: str = "cpu") -> dict[Tier, tuple[int, ...]]:
    """The slots of each memory tier. ConfigError, before any allocation, for settings that cannot work."""
    shape, apart = _shape(identity), _apart(identity, config)
    slots = {Tier.DEVICE: split(config.device_memory, *shape, records=False, what="device", per_snapshot=apart)}
    if config.host_memory:
        slots[Tier.HOST] = split(config.host_memory, *shape, records=True, what="host", per_snapshot=apart)
    wanted, what, have = config.host_memory, "host memory", host_bytes()
    if on_host(device):
        wanted, what = wanted + config.device_memory, "device and host memory together"
    elif config.device_memory > (total := device_bytes(device) or config.device_memory):
        raise ConfigError(
            f"device memory of {format_size(config.device_memory)} is more than the {format_size(total)} of {device}: "
            f"give less"
        )
    if wanted > have:
        raise ConfigError(f"{what}: {format_size(wanted)} are more than this machine's {format_size(have)}: give less")
    if config.storages:
        check_setting(identity, config)
    return slots


def check_setting(identity: ModelIdentity, config: CacheConfig) -> None:
    """ConfigError for storages that cannot work, as far as their URLs show it."""
    shape, apart = _shape(identity), _apart(identity, config)
    for url in parse_urls(config.storages):
        if "capacity" not in SCHEMES[url.scheme].parameters:
            continue  # its size is set elsewhere
        try:
            split(url.size_bytes("capacity"), *shape, records=True, what="storage", per_snapshot=apart)
            if "quota" in url.parameters:  # a smaller one could not hold one prompt's pages
                split(url.size_bytes("quota"), *shape, records=True, what="quota", per_snapshot=apart)
        except ConfigError as e:
            raise ConfigError(f"{url.text}: {e}") from None
    check_storage(config.storages, label=identity.fingerprint(), description=str(identity))


def _shape(identity: ModelIdentity) -> tuple[tuple[PoolSpec, ...], int, int]:
    return identity.pools, identity.page_tokens, identity.chunk_tokens


def _apart(identity: ModelIdentity, config: CacheConfig) -> int:
    return spacing(*_shape(identity), asked=config.policies.tokens_per_snapshot, every=config.policies.snapshot_every)


@dataclass(frozen=True)
class Attached:
    """An attached storage and its connection. One that was given as an object has no URLs, tiers have several."""

    urls: tuple[str, ...]
    storage: Breaker | Tiers
    connection: StorageConnection


@dataclass
class Change:
    """A pending attach or detach (`attached` is None), which is made in a step, or not at all."""

    proposal: Proposal
    attached: Attached | None
    config: CacheConfig  # once it is made
    back_up: bool
    # The connection that it replaced, or the error for which it was not made.
    made: "Future[StorageConnection | None]" = field(default_factory=Future)
    until: float | None = None  # its deadline, by the time that the ranks agree on; None before the first step
    why: KvarveError | None = None  # why this rank declines it


class PrefixCache:
    """Finds, keeps and brings back the pages of one model on one rank.

    A request's life: `open`, then `step` and `claim` until ready, `pages` to resume from, `grow` and `publish` for each
    chunk computed, `close`. `lookup` changes nothing. Settings come from `config`; a `storage` object may be given
    instead of a URL. Raises ConfigError or StorageError, before anything has been touched.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._agreement = clock, agreement or Alone()
        if not 0 <= rank < self._agreement.ranks:
            raise ConfigError(f"there is no rank {rank} among {self._agreement.ranks} ranks")
        identity = replace(identity, ranks=self._agreement.ranks)
        slots = check(identity, config, device)
        if storage is not None and not config.host_memory:
            raise ConfigError(NO_HOST)
        self.identity, self.config = identity, config
        self.pools = identity.pools
        self._now = 0.0  # the ranks agree on the time in each step
        self._early: list[Lease] = []  # opened before the first step, which sets their deadlines
        self._namespace = identity.fingerprint()
        self._device = [DeviceArena(pool, n, device) for pool, n in zip(self.pools, slots[Tier.DEVICE], strict=True)]
        self._host = [
            HostArena(pool, n, self._namespace, rank, self._agreement.ranks, layout=config.host_layout, device=device)
            for pool, n in zip(self.pools, slots.get(Tier.HOST, ()), strict=False)
        ]
        opened = storage is None and bool(config.storages)
        if opened:
            storage = self._open(config, answers=False)
        self._transfers = TransferEngine(
            self.pools,
            self._device,
            self._host,
            rank=rank,
            ranks=self._agreement.ranks,
            verify_host=config.policies.verify_host,
            deadline_s=config.policies.storage_deadline_s,
            clock=clock,
        )
        shape = (self.pools, slots, identity.page_tokens, identity.chunk_tokens)
        self.core = Core(CoreConfig(*shape, storage=storage is not None, policies=config.policies))
        self._balance = Watch()
        self._change: Change | None = None  # proposed, and not decided
        self.attached: Attached | None = None
        if storage is not None:
            self.attached = self._guarded(storage, config.storages)
            self._transfers.attach(self.attached.connection)
            if opened:
                self.attached.storage.look()  # the cache starts even if the storage is down

    # --- a request's life

    def lookup(self, tokens: Tokens, salt: str = "") -> Hit:
        """How deep a prompt could resume now, in pages; changes nothing."""
        return self.core.lookup(root_key(self._namespace, salt), self._known_by(pack(tokens)))

    def prompt(self, tokens: Tokens, salt: str = "") -> Prompt:
        """Prepare a prompt for `open`; from any thread, since a long prompt takes a while.

        ValueError if a token does not fit into 32 bits or the salt cannot be encoded.
        """
        return Prompt(root_key(self._namespace, salt), self._known_by(pack(tokens)))

    def open(self, tokens: Tokens | Prompt, salt: str = "", read: bool = True, priority: int = 0) -> Lease:
        """Open a lease for a request that begins to wait: its pages in storage are prefetched. With `read` false it
        resumes from nothing; pages used at a high `priority` are evicted last, if eviction is by priority."""
        known = tokens if isinstance(tokens, Prompt) else self.prompt(tokens, salt)
        lease = self.core.open(known.root, known.tokens, self._now, self.config.policies.patience(), read, priority)
        if not self._now:
            self._early.append(lease)
        self._send()
        return lease

    def claim(self, lease: Lease) -> bool:
        """The engine admits this request, so its pages are loaded to the device; True once the lease is ready.

        Ask again after each `step` (see `Core.claim`).
        """
        ready = self.core.claim(lease, self._now)
        self._send()
        return ready

    def resumed(self, lease: Lease) -> None:
        """Unpin the windows and states that the engine resumed from (see `Core.resumed`)."""
        self.core.resumed(lease)
        self._send()

    def extend(self, lease: Lease, tokens: Tokens) -> None:
        """Append tokens to the sequence of a ready lease (see `Core.extend`)."""
        chunk_bytes = self.identity.chunk_tokens * TOKEN_BYTES
        begun = lease.tokens[len(lease.tokens) // chunk_bytes * chunk_bytes :]
        self.core.extend(lease, self._known_by(begun + pack(tokens)), len(begun))

    def pages(self, lease: Lease) -> dict[str, tuple[range, list[int]]]:
        """The pages that a ready lease resumes from: for each pool the positions and their device slots."""
        return {pool.name: self.core.slots(lease, i) for i, pool in enumerate(self.pools)}

    def seat(self, lease: Lease, upto: int) -> bool:
        """Reserve device slots for a ready lease to compute in, up to a page; False if there are too few now (see
        `Core.seat`)."""
        seated = self.core.seat(lease, upto)
        self._send()
        return seated

    def room_tokens(self) -> int:
        """The longest sequence that fits on the device, in tokens."""
        slot_pools = self.core.slot_pools
        pages = min((slot_pools.capacity[pool] for pool in slot_pools.chains), default=1 << 40)
        return pages * self.identity.page_tokens

    def seats(self, lease: Lease, pool: str, start: int = 0) -> list[int]:
        """The device slots of a chain's pages from `start` on, as far as a ready lease has them (see `Core.seats`)."""
        return self.core.seats(lease, next(i for i, each in enumerate(self.pools) if each.name == pool), start)

    def mark(self, lease: Lease, boundary: int) -> bool:
        """Have a ready lease keep its windows and states at a boundary too (see `Core.mark`)."""
        return self.core.mark(lease, boundary)

    def short(self, lease: Lease, upto: int) -> bool:
        """Whether `grow` would keep fewer pages now than in a moment, when evictions that this starts have freed
        slots."""
        short = self.core.short(lease, upto)
        self._send()
        return short

    def grow(self, lease: Lease, upto: int) -> dict[str, dict[int, int]]:
        """Reserve slots for the pages up to `upto` that are worth keeping: for each pool the device slots by position.

        If slots run out fewer pages are kept. Never waits: under write-back ask `short` first.
        """
        fresh = self.core.grow(lease, upto)
        self._send()
        return {pool.name: slots for pool, slots in zip(self.pools, fresh, strict=True)}

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the pages before `upto`, which the engine has filled, to the tree."""
        self.core.publish(lease, upto)
        self._send()

    def close(self, lease: Lease) -> None:
        """Close a lease in any phase."""
        self.core.close(lease)
        self._send()

    def load_by_layers(self) -> None:
        """From now on a lease is ready once its pages have been verified, while they are still being copied: the engine
        waits for each layer of `arrivals` before it reads it."""
        self._transfers.layerwise = True

    def arrivals(self) -> list[Arrival]:
        """The loads that are still being copied (see `TransferEngine.arrivals`)."""
        return self._transfers.arrivals()

    def arena(self, pool: str) -> Mapping[str, Tensor]:
        """The device tensors of a pool, by buffer name: [slots, *shape]."""
        return next(arena.buffers for arena in self._device if arena.pool.name == pool)

    def records(self, pool: str, key: bytes) -> list[memoryview]:
        """A page's records in host memory, writable: for tests that damage is noticed.

        There may be more than one, since a freed slot still holds its last record.
        """
        arena = next(arena for arena in self._host if arena.pool.name == pool)
        records = (arena.record(slot) for slot in range(arena.slots))
        return [record for record in records if arena.stamp.names(record, key)]

    # --- time passes

    def step(self) -> None:
        """Once per scheduler turn: apply the copies that have ended, and send new ones."""
        proposal = None if self._change is None else self._change.proposal
        agreed = self._agreement.agree(self._transfers.collect(), self._clock(), self.up, proposal)
        self._now = agreed.now
        while self._early:
            self._early.pop().postpone(self._now)
        self.core.step(agreed.events, self._now)
        self._send()
        if self._now >= self._balance.due_s:
            for found in self._balance.look(self._levels(), self._now):
                log.warning("%s", found.advice(_apart(self.identity, self.config)))
        if self._change is None or not self._decide(self._change, agreed.granted):
            self._follow_storage(agreed.up)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a copy has ended, a request's patience has, or `wake` was called; at most `timeout_s`."""
        patience_s = max(LEAST_WAIT_S, self.core.patience_ends() - self._clock())
        return self._transfers.ends.wait(min(timeout_s, patience_s)) or patience_s <= timeout_s

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        self._transfers.ends.wake()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Step until every copy has ended and every pending backup and store has been made; False if pages are still
        dirty.

        A failed store is retried at once; after some failures in a row, or if the storage is down, it is not waited
        for.
        """
        self.core.retry()
        self.step()
        end = self._now + timeout_s  # by the agreed time, so that all ranks give up in the same step
        while not self.core.idle() and self._now < end:
            self.wait(0.05)
            self.core.retry()
            self.step()
        return self.core.idle() and not self.core.dirty()

    def flush(self, tiers: Sequence[Tier] = MEMORY_TIERS, timeout_s: float = 30.0) -> int:
        """Evict every unpinned page from memory tiers, after pending backups; storage keeps its own. Pages evicted."""
        end, gone = self._now + timeout_s, 0
        while True:
            self.settle(end - self._now)
            gone += self.evict(tiers)
            if self.core.idle() or self._now >= end:  # write-back copies pages down before they go
                return gone

    def evict(self, tiers: Sequence[Tier]) -> int:
        """Evict every unpinned page from memory tiers now, backed up or not. Pages evicted at once."""
        gone = self.core.flush(tiers)
        self._send()
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
        if self._change is not None:
            self._refuse(self._change, Busy("the cache is shutting down"))
        self._transfers.close(max(0.0, end - time.monotonic()), close_s, self.core.copies.storage)
        if self.attached is not None:
            # Break the reference cycle, which would keep host memory until a garbage collection.
            self.attached.storage.changed = lambda: None

    def _store_all(self, timeout_s: float) -> None:
        attached = self.attached is not None
        # By the agreed state of the storage, since all ranks must take the same number of steps.
        up = self.core.copies.storage
        if up and self.config.policies.write is WritePolicy.WRITE_BACK:
            self.core.back_up()
        if not self.settle(timeout_s if up or not attached else 0.0) and attached:
            log.warning("%d pages in memory could not be stored before the end", self.core.dirty())

    # --- attaching and detaching a storage

    def opened(self, setting: str | Sequence[str], *, prefetch: str | None = None, write: str | None = None) -> Storage:
        """Open a storage (several URLs are tiers) for this cache's pages, to be attached. From any thread, since it may
        take long.

        ConfigError, StorageError: it cannot be used, or not with these policies, and nothing has been touched.
        """
        config = self._with(setting, prefetch, write)
        check_setting(self.identity, config)
        return self._open(config, answers=True)

    def attach(
        self,
        storage: Storage,
        *,
        setting: str | Sequence[str] = (),
        back_up: bool = False,
        prefetch: str | None = None,
        write: str | None = None,
    ) -> Change:
        """Attach an open storage in place of the present one; it belongs to the cache then.

        That happens in the next `step`; with several ranks in the first step in which all of them propose the same, and
        on none if one declines or after `CHANGE_S`. The change's `made` tells the outcome; if it is not made, the
        present storage stays and the new one is closed. With `back_up`, all pages in memory are dirty, whatever the
        write policy. Policies stay as they are unless given.

        ConfigError, StorageError, UnderWay: refused at once, and the storage is still the caller's.
        """
        if not self.config.host_memory:
            raise ConfigError(NO_HOST)
        config = self._with(setting, prefetch, write)
        what = json.dumps([config.storages, prefetch, write, back_up])
        self._check_free()
        return self._propose(Change(Proposal(what), self._guarded(storage, config.storages), config, back_up))

    def detach(self) -> Change:
        """Detach the storage, if there is one; it ends the copies sent to it and is closed in the background.

        When, and whether on all ranks: as for `attach`. UnderWay: refused at once.
        """
        self._check_free()
        return self._propose(Change(Proposal("detach"), None, replace(self.config, storage=None), back_up=False))

    def decline(self, why: KvarveError) -> Change:
        """Tell the other ranks that this one cannot make the change that all were asked for, so that they do not wait
        for it; `made` raises `why`."""
        self._check_free()
        return self._propose(Change(Proposal("", ready=False), None, self.config, back_up=False, why=why))

    def now(self) -> float:
        """The time by the cache's clock."""
        return self._clock()

    @property
    def ranks(self) -> int:
        """How many ranks share this cache."""
        return self._agreement.ranks

    @property
    def up(self) -> bool:
        """Whether this rank's storage answers; True without one."""
        attached = self.attached
        return attached is None or (attached.storage.up and not attached.connection.hangs())

    def _with(self, setting: str | Sequence[str], prefetch: str | None, write: str | None) -> CacheConfig:
        """The settings with another storage, and other policies where they are given."""
        policies = replace(
            self.config.policies,
            prefetch_policy=self.config.policies.prefetch_policy if prefetch is None else prefetch,
            write_policy=self.config.policies.write_policy if write is None else write,
        )
        return replace(self.config, storage=setting if isinstance(setting, str) else tuple(setting), policies=policies)

    def _open(self, config: CacheConfig, *, answers: bool) -> Storage:
        return open_storage(
            config.storages,
            label=self._namespace,
            description=str(self.identity),
            guard=partial(Breaker, deadline_s=config.policies.storage_deadline_s, clock=self._clock),
            whole=whole,
            answers=answers,
        )

    def _guarded(self, storage: Storage, urls: tuple[str, ...]) -> Attached:
        if isinstance(storage, Breaker | Tiers):
            guarded = storage
            guarded.changed = self.wake
        else:
            deadline_s = self.config.policies.storage_deadline_s
            close_s = min(CLOSE_S, deadline_s)
            guarded = Breaker(storage, deadline_s=deadline_s, close_s=close_s, changed=self.wake, clock=self._clock)
        return Attached(urls, guarded, self._transfers.connect(guarded))

    def _check_free(self) -> None:
        if self._change is not None and self._change.proposal.ready:
            raise UnderWay("another change of the storage is under way")

    def _propose(self, change: Change) -> Change:
        if self._change is not None:  # this rank declined an earlier request, which is over
            self._refuse(self._change)
        self._change = change
        change.made.set_running_or_notify_cancel()  # it cannot be cancelled: all ranks make it or none
        self.wake()
        return change

    def _decide(self, change: Change, granted: bool | None) -> bool:
        """Make a change that all ranks propose, or give it up; whether it was made."""
        if granted is None:
            change.until = self._now + CHANGE_S if change.until is None else change.until
            if self._now >= change.until:
                self._refuse(change, Busy(f"the other ranks were not asked for the same within {CHANGE_S:g} s"))
            return False
        if not granted:
            self._refuse(change, StorageError("another rank cannot do it, or was asked for something else"))
            return False
        # All checks have passed: an exception from here on is a bug of ours, and the core's laws may not hold then.
        try:
            self.core.write_by(change.config.policies.write)  # first: the new policy decides which pages are dirty
            if change.attached is not None:
                self.core.attach(change.back_up)
            else:
                self.core.detach()
            before = self._transfers.attach(None if change.attached is None else change.attached.connection)
        except Exception as e:
            self._refuse(change, e)
            raise
        self._change, self.config, self.attached = None, change.config, change.attached
        change.made.set_result(before)
        self._step_core()
        return True

    def _refuse(self, change: Change, why: Exception | None = None) -> None:
        """Give up a change: close its storage, and fail its future."""
        self._change = None
        if change.attached is not None:
            self._transfers.retire(change.attached.connection)
        change.made.set_exception(change.why or why or Busy("another change took its place"))

    def _follow_storage(self, up: bool) -> None:
        """Go on without a storage that is down on any rank; once it is up again it gets the pages that are dirty."""
        if self.attached is None or up == self.core.copies.storage:
            return
        log.warning("storage %s", "is back: it gets what was written meanwhile" if up else "is down: on without it")
        if up:
            self.core.attach(again=True)
        else:
            self.core.detach(down=True)
        self._step_core()

    def _step_core(self) -> None:
        """Send the copies that follow from a change at once, not with the next step."""
        self.core.step((), self._now)
        self._send()

    # --- figures

    def stats(self) -> dict[str, float]:
        """Counters, levels and sizes by name; a lookback of 0 stands for all pages."""
        stats: dict[str, float] = asdict(self.core.counters)
        stats |= self._levels()
        stats["page_tokens"] = self.identity.page_tokens
        stats["tokens_per_snapshot"] = _apart(self.identity, self.config)
        for place in self._places():
            stats[f"imbalance.{'.'.join(place)}"] = place in self._balance.found
        for lane in self._transfers.lanes:
            stats[f"lane_waiting.{lane.name}"] = lane.waiting()
            stats[f"lane_failed.{lane.name}"] = lane.counts.failed + lane.counts.late + lane.counts.refused
            stats[f"lane_stuck_s.{lane.name}"] = lane.stuck_s()
        stats["offload_paused"] = self.core.governor.paused
        stats["offload_used_share"] = self.core.governor.used_share
        stats["stores_backing_off"] = self.core.backups.backing_off()
        stats["leases"] = len(self.core.leases)
        return stats

    def _places(self) -> list[tuple[str, str]]:
        """Tier and pool of each slot pool, in the core's order."""
        return [(tier.name.lower(), pool.name) for tier in MEMORY_TIERS for pool in self.pools]

    def _levels(self) -> dict[str, float]:
        """Size, fill and evictions of each slot pool."""
        levels: dict[str, float] = {}
        for pool in self.pools:
            levels[f"page_bytes.{pool.name}"] = pool.payload_bytes
            levels[f"lookback.{pool.name}"] = pool.lookback or 0
        slot_pools = self.core.slot_pools
        for number, place in enumerate(self._places()):
            name = ".".join(place)
            levels[f"slots.{name}"] = slot_pools.capacity[number]
            levels[f"used.{name}"] = slot_pools.capacity[number] - len(slot_pools.free[number])
            levels[f"evicted.{name}"] = slot_pools.evicted[number]
        return levels

    def usage(self) -> StorageUsage | None:
        """What the storage holds, if there is one. From any thread; if the storage hangs, its last answer after a
        moment. StorageError: the storage cannot tell."""
        attached = self.attached
        return attached.connection.usage() if attached is not None else None

    def _known_by(self, packed: bytes) -> bytes:
        return bind_to_chunk(packed, self.identity.page_tokens, self.identity.chunk_tokens)

    def _send(self) -> None:
        for effect in self.core.take():
            self._transfers.send(effect)
