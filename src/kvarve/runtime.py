"""`PrefixCache`, the one class that an engine needs: the pure core, its hands and a clock.

One thread (the engine's) calls it; the lanes' threads only ever touch slots that the core gave them.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvarve.config import NO_HOST, CacheConfig, split
from kvarve.core.cache import Core, Hit
from kvarve.core.lease import Lease
from kvarve.errors import ConfigError
from kvarve.keys import TOKEN_BYTES, pack, root_key, seal
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.model import MEMORY_TIERS, ModelIdentity, Tier
from kvarve.ranks.agreement import Agreement, Alone
from kvarve.sizes import format_size
from kvarve.storage import Storage, Usage, check_storage, open_storage
from kvarve.storage.urls import parse_url
from kvarve.transfer.hands import Hands

LEAST_WAIT_S = 0.001  # for a patience that is over: the ranks agree on the time, so it may not be in the next step
GROW_WAIT_S = 0.5  # for evictions under way; then a request goes on without keeping its pages

Tokens = Sequence[int] | npt.NDArray[np.integer]


def check(identity: ModelIdentity, config: CacheConfig) -> dict[Tier, tuple[int, ...]]:
    """Everything that can be refused before anything is allocated or touched; the slots of each memory tier."""
    shape = (identity.pools, identity.page_tokens, identity.chunk_tokens)
    every = config.tokens_per_snapshot
    slots = {Tier.DEVICE: split(config.device_memory, *shape, records=False, what="device", per_snapshot=every)}
    if config.host_memory:
        slots[Tier.HOST] = split(config.host_memory, *shape, records=True, what="host", per_snapshot=every)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.device_memory + config.host_memory > have:
        raise ConfigError(
            f"device and host memory of {format_size(config.device_memory + config.host_memory)} together are more "
            f"than this machine's {format_size(have)}: give less"
        )
    if config.storage:
        capacity = parse_url(config.storage).size_bytes("capacity")
        try:
            split(capacity, *shape, records=True, what="storage", per_snapshot=every)
        except ConfigError as e:
            raise ConfigError(f"{config.storage}: {e}") from None
        check_storage(config.storage, label=identity.fingerprint(), description=str(identity))
    return slots


class PrefixCache:
    """Finds, keeps and brings back the pages of one model on one rank.

    A request's life: `open`, then `step` and `claim` until ready, `pages` to resume from, `grow` and `publish` for each
    chunk computed, `close`. `lookup` asks without changing anything. Settings come from `config`; a `storage` object
    may be given instead of a URL. Raises ConfigError or StorageError, and nothing has been touched then.
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
        slots = check(identity, config)
        if storage is not None and not config.host_memory:
            raise ConfigError(NO_HOST)
        self.identity, self.config = identity, config
        self.pools = identity.pools
        self._clock, self._agreement = clock, agreement or Alone()
        self._now = 0.0  # the ranks agree on the time in each step
        self._early: list[Lease] = []  # opened before the first step: their patience begins with it
        self._namespace = identity.fingerprint()
        self._device = [DeviceArena(pool, n, device) for pool, n in zip(self.pools, slots[Tier.DEVICE], strict=True)]
        self._host = [
            HostArena(pool, n, self._namespace, rank)
            for pool, n in zip(self.pools, slots.get(Tier.HOST, ()), strict=False)
        ]
        if storage is None and config.storage:
            storage = open_storage(config.storage, label=self._namespace, description=str(identity))
        self._storage = storage
        self._hands = Hands(
            self.pools,
            self._device,
            self._host,
            storage,
            rank=rank,
            ranks=self._agreement.ranks,
            verify_host=config.verify_host,
            deadline_s=config.storage_deadline_s,
        )
        shape = (self.pools, slots, identity.page_tokens, identity.chunk_tokens)
        self.core = Core(config.core(*shape, storage=storage is not None))

    # --- a request's life

    def lookup(self, tokens: Tokens, salt: str = "") -> Hit:
        """How deep a prompt could resume now, in pages; changes nothing."""
        return self.core.lookup(root_key(self._namespace, salt), self._known_by(pack(tokens)))

    def open(self, tokens: Tokens, salt: str = "", read: bool = True, priority: int = 0) -> Lease:
        """A request begins to wait: what storage has of it comes nearer. `read` false resumes from nothing; what is
        used at a high `priority` goes last, where eviction is by priority."""
        root = root_key(self._namespace, salt)
        lease = self.core.open(root, self._known_by(pack(tokens)), self._now, self.config.wait(), read, priority)
        if not self._now:
            self._early.append(lease)
        self._send()
        return lease

    def claim(self, lease: Lease) -> bool:
        """The engine has a place for this request, so its pages come to the device; True once the lease is ready.

        Ask again after each `step` (see `Core.claim`).
        """
        ready = self.core.claim(lease, self._now)
        self._send()
        return ready

    def resumed(self, lease: Lease) -> None:
        """The engine has its own copies of the windows and states that it resumed from (see `Core.resumed`)."""
        self.core.resumed(lease)
        self._send()

    def extend(self, lease: Lease, tokens: Tokens) -> None:
        """The sequence of a ready lease goes on with more tokens (see `Core.extend`)."""
        chunk_bytes = self.identity.chunk_tokens * TOKEN_BYTES
        begun = lease.tokens[len(lease.tokens) // chunk_bytes * chunk_bytes :]
        self.core.extend(lease, self._known_by(begun + pack(tokens)), len(begun))

    def pages(self, lease: Lease) -> dict[str, tuple[range, list[int]]]:
        """What a ready lease resumes from: for each pool the positions and their device slots."""
        return {pool.name: self.core.slots(lease, i) for i, pool in enumerate(self.pools)}

    def seat(self, lease: Lease, upto: int) -> bool:
        """Take room for a ready lease to compute in on the device, up to a page; False if there is none now (see
        `Core.seat`)."""
        seated = self.core.seat(lease, upto)
        self._send()
        return seated

    def room_tokens(self) -> int:
        """How many tokens of a single sequence fit on the device at most."""
        shelves = self.core.shelves
        pages = min((shelves.capacity[pool] for pool in shelves.chains), default=1 << 40)
        return pages * self.identity.page_tokens

    def seats(self, lease: Lease, pool: str, start: int = 0) -> list[int]:
        """The device slots of a chain's pages from `start` on, as far as a ready lease has them (see `Core.seats`)."""
        return self.core.seats(lease, next(i for i, each in enumerate(self.pools) if each.name == pool), start)

    def grow(self, lease: Lease, upto: int) -> dict[str, dict[int, int]]:
        """Room for the pages up to `upto` that are worth keeping: for each pool the device slots by position.

        Under write-back this waits a moment for pages that are being copied down; if there is no room even then, fewer
        pages are kept.
        """
        end = self._now + GROW_WAIT_S
        while self.core.short(lease, upto) and self._now < end:
            self._send()
            self.wait(0.01)
            self.step()
        fresh = self.core.grow(lease, upto)
        self._send()
        return {pool.name: slots for pool, slots in zip(self.pools, fresh, strict=True)}

    def publish(self, lease: Lease, upto: int) -> None:
        """The engine has filled the pages before `upto`: they are everybody's now."""
        self.core.publish(lease, upto)
        self._send()

    def close(self, lease: Lease) -> None:
        """End a request, whatever it was doing."""
        self.core.close(lease)
        self._send()

    def arena(self, pool: str) -> Mapping[str, Tensor]:
        """The device tensors of a pool, by buffer name: [slots, *shape]."""
        return next(arena.buffers for arena in self._device if arena.pool.name == pool)

    def records(self, pool: str, key: bytes) -> list[memoryview]:
        """A page's records in host memory as they lie there, writable: for whoever proves that damage is noticed.

        There may be more than one, for a slot that is free again still holds what it held.
        """
        arena = next(arena for arena in self._host if arena.pool.name == pool)
        records = (arena.record(slot) for slot in range(arena.slots))
        return [record for record in records if arena.stamp.names(record, key)]

    # --- time passes

    def step(self) -> None:
        """Once per scheduler turn: take in what has ended, send what is to be done next."""
        ended, self._now = self._agreement.agree(self._hands.collect(), self._clock())
        while self._early:
            self._early.pop().deadline += self._now
        self.core.step(ended, self._now)
        self._send()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something has ended, a request's patience has, or `wake` was called; at most `timeout_s`."""
        patience_s = max(LEAST_WAIT_S, self.core.patience_ends() - self._clock())
        return self._hands.ends.wait(min(timeout_s, patience_s)) or patience_s <= timeout_s

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        self._hands.ends.wake()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Step until every copy has ended and every backup has been written; False if that takes too long.

        A storage that fails is tried again at once, and not waited for when it has failed some times in a row.
        """
        self.core.retry()
        self.step()
        end = self._now + timeout_s  # by the time that the ranks agree on, so that all give up in the same step
        while not self.core.idle():
            if self._now >= end:
                return False
            self.wait(0.05)
            self.core.retry()
            self.step()
        return True

    def flush(self, tiers: Sequence[Tier] = MEMORY_TIERS, timeout_s: float = 30.0) -> int:
        """Evict what nobody holds from memory tiers, after the backups under way; storage stays. Pages that went."""
        end, gone = self._now + timeout_s, 0
        while True:
            self.settle(end - self._now)
            gone += self.evict(tiers)
            if self.core.idle() or self._now >= end:  # write-back copies pages down before they go
                return gone

    def evict(self, tiers: Sequence[Tier]) -> int:
        """Evict what nobody holds from memory tiers now, backed up or not. Pages that went at once."""
        gone = self.core.flush(tiers)
        self._send()
        return gone

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Finish what is under way, then stop the lanes and close the storage, whole."""
        self.settle(timeout_s)
        self._hands.close(timeout_s)

    # --- what is going on

    def stats(self) -> dict[str, float]:
        """Counters, levels and sizes by name, for metrics and for people; a lookback of 0 stands for all pages."""
        stats: dict[str, float] = asdict(self.core.counters)
        stats["page_tokens"] = self.identity.page_tokens
        for pool in self.pools:
            stats[f"page_bytes.{pool.name}"] = pool.payload_bytes
            stats[f"lookback.{pool.name}"] = pool.lookback or 0
        shelves = self.core.shelves
        for place, capacity in enumerate(shelves.capacity):
            tier, number = divmod(place, len(self.pools))
            name = f"{Tier(tier).name.lower()}.{self.pools[number].name}"
            stats[f"slots.{name}"] = capacity
            stats[f"used.{name}"] = capacity - len(shelves.free[place])
            stats[f"evicted.{name}"] = shelves.evicted[place]
        for lane in self._hands.lanes.values():
            stats[f"lane_waiting.{lane.name}"] = lane.waiting()
            stats[f"lane_failed.{lane.name}"] = lane.counts.failed + lane.counts.late + lane.counts.refused
            stats[f"lane_stuck_s.{lane.name}"] = lane.stuck_s()
        stats["offload_paused"] = self.core.governor.paused
        stats["offload_used_share"] = self.core.governor.used_share
        stats["stores_resting"] = self.core.backups.resting()
        stats["leases"] = len(self.core.leases)
        return stats

    def usage(self) -> Usage | None:
        """What the storage holds, if there is one."""
        return self._storage.usage() if self._storage is not None else None

    def _known_by(self, packed: bytes) -> bytes:
        return seal(packed, self.identity.page_tokens, self.identity.chunk_tokens)

    def _send(self) -> None:
        for effect in self.core.take():
            self._hands.send(effect)
