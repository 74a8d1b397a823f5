"""`CacheWorker` moves the pages of one rank: device and host arenas, lanes between tiers, and the storage.

It carries out the orders of a `CacheScheduler` (`do`) and tells it how they ended (`report`); both are plain data, so
the scheduler may live in another process. It decides nothing about pages. One thread (the engine's) calls it; lane
threads touch only slots that the scheduler gave them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvarve.cache.config import NO_HOST, CacheConfig, divide, split
from kvarve.cache.messages import ChangeMade, ChangeProposed, ChangeRefused, Order, Report
from kvarve.core.copies.effects import Effect
from kvarve.core.core_config import Slots
from kvarve.core.slots.extents import Cut
from kvarve.errors import Busy, ConfigError, KvarveError, StorageError
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.device_memory import DeviceMemory, driver_of
from kvarve.memory.engine_arena import EngineArena
from kvarve.memory.host_memory import HostMemory
from kvarve.memory.machine import device_bytes, on_host
from kvarve.pages.pools import ModelIdentity, PoolSpec, Tier
from kvarve.pages.sizes import format_size
from kvarve.records.record import record_bytes
from kvarve.records.seals import seal_of
from kvarve.storage import Breaker, Storage, StorageUsage, Tiers, check_storage
from kvarve.storage.urls import allocate, backend_of, only_read, parse_urls, shown
from kvarve.system.host import host_bytes
from kvarve.transfer.compression import Compressed, buffers_bytes, compressing, totals
from kvarve.transfer.flows import LANES, Flow
from kvarve.transfer.storage_connection import CLOSE_S, StorageConnection, open_guarded
from kvarve.transfer.transfer_engine import TransferEngine


class UnderWay(Busy):
    """Another change of the storage is in progress."""


def check(identity: ModelIdentity, config: CacheConfig, device: str = "cpu", *, blocks: bool = False) -> Slots:
    """The slots of each memory tier, or how it is cut; with `blocks`, the device's are an engine's own. ConfigError,
    before any allocation, for settings that cannot work."""
    shape, policies, slots = _shape(identity), config.policies, Slots()
    if not blocks:
        driver = driver_of(device)
        granule = int(on_host(device)) if driver is None else driver.granule
        slots[Tier.DEVICE] = divide(
            config.device_memory, *shape, policies, records=False, what="device", granule=granule
        )
    if config.host_memory:
        slots[Tier.HOST] = divide(config.host_memory, *shape, policies, records=True, what="host")
    urls = parse_urls(config.storages) if config.storages else ()
    buffers = buffers_bytes(urls, max(record_bytes(pool.payload_bytes) for pool in identity.pools))
    check_room(config, device, buffers)
    if config.storages:
        check_setting(identity, config)
    return slots


def check_room(config: CacheConfig, device: str, buffers: int = 0) -> None:
    """ConfigError for more memory than there is; `buffers`: bytes of the host beside its pages."""
    wanted, what, have = config.host_memory + buffers, "host memory", host_bytes()
    if on_host(device):
        wanted, what = wanted + config.device_memory, "device and host memory together"
    elif config.device_memory > (total := device_bytes(device) or config.device_memory):
        raise ConfigError(
            f"device memory must be at most the {format_size(total)} of {device}, "
            f"got {format_size(config.device_memory)}"
        )
    if wanted > have:
        raise ConfigError(f"{what} must be at most this machine's {format_size(have)}, got {format_size(wanted)}")


def check_setting(identity: ModelIdentity, config: CacheConfig) -> None:
    """ConfigError for storages that cannot work, as far as their URLs show it."""
    shape = _shape(identity)
    for url in parse_urls(config.storages):
        if not backend_of(url).bounded or backend_of(url).only_read(url):
            continue  # its size is set elsewhere
        try:
            split(url.size_bytes("capacity"), *shape, records=True, what="storage")
            if "quota" in url.parameters:  # a smaller one could not hold one prompt's pages
                split(url.size_bytes("quota"), *shape, records=True, what="quota")
        except ConfigError as e:
            raise ConfigError(f"{url.text}: {e}") from None
    check_storage(config.storages, label=identity.fingerprint(), description=str(identity), around=compressing)


def _shape(identity: ModelIdentity) -> tuple[tuple[PoolSpec, ...], int, int]:
    return identity.pools, identity.page_tokens, identity.chunk_tokens


def _counts(slots: Slots, tier: Tier) -> tuple[int, ...]:
    """The slots of each pool's arena, of which others may have the memory now."""
    found = slots.get(tier, ())
    return tuple(map(found.slots, range(len(found.per)))) if isinstance(found, Cut) else found


def _device_arenas(pools: Sequence[PoolSpec], divided: Cut | Sequence[int], device: str) -> list[DeviceArena]:
    if not isinstance(divided, Cut):
        return [DeviceArena(pool, slots, device) for pool, slots in zip(pools, divided, strict=False)]
    counts, driver = map(divided.slots, range(len(pools))), driver_of(device)
    if driver is None:
        assert on_host(device), "it had a driver when its memory was cut"
        return [DeviceArena(pool, slots, device) for pool, slots in zip(pools, counts, strict=True)]
    chains = [(pool, per) for pool, per in zip(pools, divided.per, strict=True) if pool.lookback is None]
    # Pieces as large as every part of an extent allows, as each takes calls of the driver.
    piece = math.gcd(divided.nbytes, *(per * buffer.nbytes for pool, per in chains for buffer in pool.buffers))
    shared = DeviceMemory(divided.count * divided.nbytes, piece, driver)
    try:
        return [
            DeviceArena(pool, slots, device, shared=shared, stride=divided.nbytes // per)
            for pool, slots, per in zip(pools, counts, divided.per, strict=True)
        ]
    except RuntimeError as e:
        raise ConfigError(f"the memory of {device} cannot be shared by pools: {e}") from e


@dataclass(frozen=True)
class Attached:
    """An attached storage and its connection. One that was given as an object has no URLs, tiers have several."""

    urls: tuple[str, ...]
    storage: Breaker | Tiers
    connection: StorageConnection

    @property
    def only_read(self) -> bool:
        """Whether nothing is to be stored in it, as its URLs ask for."""
        return only_read(self.urls)

    def status(self, now: float) -> dict[str, Any]:
        """Its state, as JSON; in a moment, even if the storage hangs. `now`: by its clock."""
        usage, trouble = None, self.storage.last_error
        try:
            usage = self.connection.usage()
        except StorageError as e:
            trouble = str(e)
        urls = [*map(shown, self.urls)]
        return {
            "url": urls[0] if len(urls) == 1 else urls or None,
            "up": self.storage.up,
            "for_s": round(max(0.0, now - self.storage.since), 3),
            "last_error": trouble or None,
            "capacity_bytes": usage and usage.capacity_bytes,
            "bytes": usage and usage.bytes,
            "objects": usage and usage.objects,
            "evicted_objects": usage and usage.evicted,
            "lost_objects": usage and usage.lost,
            "damaged_objects": usage and usage.damaged,
            "room_bytes": usage and usage.room_bytes,
            "read_only": bool(usage and usage.read_only),
        }


@dataclass
class Change:
    """A pending attach or detach (`attached` is None), which the scheduler has made in a step, or not at all."""

    number: int
    attached: Attached | None
    config: CacheConfig  # once it is made
    why: KvarveError | None = None  # why this rank declines it
    # The connection that it replaced, or the error for which it was not made.
    made: "Future[StorageConnection | None]" = field(default_factory=Future)


class CacheWorker:
    """The memory and the storage of one model on one rank; `identity.ranks` of them are one cache.

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
        clock: Callable[[], float] = time.monotonic,
        blocks: Sequence[EngineArena] = (),
        largest: Sequence[PoolSpec] = (),
    ) -> None:
        """`blocks`: by pool, the tensors of an engine whose blocks are the nearest tier. `largest`: by pool, as it is
        where its pages are largest, if ranks have other layers: memory is divided by these."""
        if not 0 <= rank < identity.ranks:
            raise ConfigError(f"rank must be from 0 to {identity.ranks - 1}, got {rank}")
        divided = replace(identity, pools=tuple(largest) or identity.pools)
        self.slots = check(divided, config, device, blocks=bool(blocks))  # of each memory tier and pool
        if storage is not None and not config.host_memory:
            raise ConfigError(NO_HOST)
        self.identity, self.config = identity, config
        self._clock = clock
        self._namespace, self._seal = identity.fingerprint(), seal_of(config.storage_key)
        pools = identity.pools
        self._change: Change | None = None  # proposed, and not decided
        self._proposed: ChangeProposed | None = None  # not reported yet
        self._changes = 0  # proposed so far
        self.attached: Attached | None = None
        self.device = _device_arenas(pools, self.slots.get(Tier.DEVICE, ()), device)
        self._moves = deque[tuple[Callable[[DeviceArena, range], None], int, int]]()  # that are not made yet
        self.host: list[HostArena] = []
        with ExitStack() as undo:
            shared, strides = None, [0] * len(pools)
            if isinstance(cut := self.slots.get(Tier.HOST), Cut):
                nbytes = cut.count * cut.nbytes
                shared = HostMemory(nbytes, torch.device(device), region=allocate(config.storages, nbytes))
                undo.callback(shared.close)
                strides = [cut.nbytes // per for per in cut.per]
            for pool, n, stride in zip(pools, _counts(self.slots, Tier.HOST), strides, strict=False):
                arena = HostArena(
                    pool,
                    n,
                    self._namespace,
                    rank,
                    identity.ranks,
                    device=device,
                    allocate=partial(allocate, config.storages),
                    seal=self._seal,
                    shared=shared,
                    stride=stride,
                )
                undo.callback(arena.close)
                self.host.append(arena)
            opened = storage is None and bool(config.storages)
            if opened:
                storage = self._open(config, answers=False)
                undo.callback(storage.close)
            self.transfers = TransferEngine(
                blocks or self.device,
                self.host,
                verify_host=config.policies.verify_host,
                hash_sample=config.policies.hash_sample,
                deadline_s=config.policies.storage_deadline_s,
                clock=clock,
            )
            undo.callback(self.transfers.close)
            if storage is not None:
                self.attached = self._guarded(storage, config.storages)
                self.transfers.attach(self.attached.connection)
            undo.pop_all()
        if self.attached is not None and opened:
            self.attached.storage.look()  # the cache starts even if the storage is down

    # --- between the scheduler and the lanes

    def report(self) -> Report:
        """What has happened since the last report; every report has to reach the scheduler, in order."""
        proposed, self._proposed = self._proposed, None
        return Report(self.transfers.collect(), self.up, proposed)

    def do(self, orders: Iterable[Order]) -> None:
        """Carry out the scheduler's orders; all of them, in the order given."""
        effects: list[Effect] = []
        for order in orders:
            if isinstance(order, ChangeMade):
                self.transfers.send(*effects)  # to the storage before
                effects.clear()
                self._switch(order)
            elif isinstance(order, ChangeRefused):
                # An earlier one may have been declined, and its place taken, while the order was on its way.
                if self._change is not None and self._change.number == order.change:
                    self._refuse(Busy(order.why) if order.busy else StorageError(order.why))
            else:
                effects.append(order)
        self.transfers.send(*effects)

    def move(self, left: Sequence[tuple[int, int]], joined: Sequence[tuple[int, int]]) -> None:
        """Take the memory of extents that have left a pool of the device, and give pools that of those that joined
        them. RuntimeError: the driver has failed, and what is left to do is done first by the next call."""
        if left:
            self.transfers.finish()  # what the device still does may touch them
        self._moves += [
            *((DeviceArena.release, *each) for each in left),
            *((DeviceArena.commit, *each) for each in joined),
        ]
        while self._moves:
            act, pool, extent = self._moves[0]
            cut = self.slots[Tier.DEVICE]
            assert isinstance(cut, Cut), "only a device that pools share has extents"
            act(self.device[pool], range(extent * cut.per[pool], (extent + 1) * cut.per[pool]))
            self._moves.popleft()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a copy has ended or `wake` was called, at most `timeout_s`; False if nothing has happened."""
        return self.transfers.ends.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        self.transfers.ends.wake()

    def arena(self, pool: str) -> Mapping[str, Tensor]:
        """The device tensors of a pool, by buffer name: [slots, *shape]."""
        return next(arena.buffers for arena in self.device if arena.pool.name == pool)

    def records(self, pool: str, key: bytes) -> list[memoryview]:
        """A page's records in host memory, writable: for tests that damage is noticed.

        There may be more than one, since a freed slot still holds its last record.
        """
        arena = next(arena for arena in self.host if arena.pool.name == pool)
        records = (arena.record(slot) for slot in range(arena.slots))
        return [record for record in records if arena.stamp.names(record, key)]

    def close(self, timeout_s: float, storage_s: float, *, up: bool) -> None:
        """Let the lanes finish, then close the storage, all within `timeout_s`, of which the storage may take
        `storage_s`; one that is not `up` is not waited for. A change that is pending is not made."""
        self.refuse(Busy("the cache is shutting down"))
        try:
            self.transfers.close(timeout_s, storage_s, up)
        finally:
            if self.attached is not None:
                # Break the reference cycle, which would keep host memory until a garbage collection.
                self.attached.storage.changed = lambda: None

    # --- the storage: attached and detached as the scheduler decides

    def opened(self, setting: str | Sequence[str], *, wait: str | None = None, write: str | None = None) -> Storage:
        """Open a storage (several URLs are tiers) for this model's pages, to be attached. From any thread, since it may
        take long.

        ConfigError, StorageError: it cannot be used, or not with these policies, and nothing has been touched.
        """
        config = self._with(setting, wait, write)
        check_setting(self.identity, config)
        return self._open(config, answers=True)

    def attach(
        self,
        storage: Storage,
        *,
        setting: str | Sequence[str] = (),
        back_up: bool = False,
        wait: str | None = None,
        write: str | None = None,
    ) -> Change:
        """Propose to attach an open storage in place of the present one; it belongs to the worker then.

        The scheduler makes the change in its next step; with several ranks in the first step in which all of them
        propose the same, and on none if one declines or after `CHANGE_S`. The change's `made` tells the outcome; if it
        is not made, the present storage stays and the new one is closed. With `back_up`, all pages in memory are dirty,
        whatever the write policy. A policy that is None stays as it is.

        ConfigError, StorageError, UnderWay: refused at once, and the storage is still the caller's.
        """
        if not self.config.host_memory:
            raise ConfigError(NO_HOST)
        config = self._with(setting, wait, write)
        self._check_free()
        return self._propose(self._guarded(storage, config.storages), config, back_up=back_up)

    def detach(self) -> Change:
        """Propose to detach the storage, if there is one; it ends the copies sent to it and is closed in the
        background.

        When, and whether on all ranks: as for `attach`. UnderWay: refused at once.
        """
        self._check_free()
        return self._propose(None, replace(self.config, storage=None))

    def decline(self, why: KvarveError) -> Change:
        """Tell the other ranks that this one cannot make the change that all were asked for, so that they do not wait
        for it; `made` raises `why`."""
        self._check_free()
        return self._propose(None, self.config, why=why)

    def refuse(self, why: Exception) -> None:
        """Give up the pending change, if there is one: the scheduler takes no more steps."""
        if self._change is not None:
            self._refuse(why)

    @property
    def up(self) -> bool:
        """Whether this rank's storage answers; True without one."""
        attached = self.attached
        return attached is None or (attached.storage.up and not attached.connection.hangs())

    def usage(self) -> StorageUsage | None:
        """What the storage holds, if there is one. From any thread; if the storage hangs, its last answer after a
        moment. StorageError: the storage cannot tell."""
        attached = self.attached
        return attached.connection.usage() if attached is not None else None

    def flows(self) -> dict[str, Flow]:
        """What each lane has moved, by its name."""
        return {LANES[edge]: flow for edge, flow in self.transfers.flows.items()}

    def stats(self) -> dict[str, float]:
        """The figures of each lane, by name."""
        stats: dict[str, float] = {}
        for lane in self.transfers.lanes:
            stats[f"lane_waiting.{lane.name}"] = lane.waiting()
            stats[f"lane_running.{lane.name}"] = lane.running()
            stats[f"lane_failed.{lane.name}"] = lane.counts.failed + lane.counts.late + lane.counts.refused
            stats[f"lane_stuck_s.{lane.name}"] = lane.stuck_s()
        for name, counts in (
            ("compared", self.transfers.fingerprints.compared),
            ("altered", self.transfers.fingerprints.altered),
        ):
            stats |= {f"{name}.{'.'.join(edge)}": count for edge, count in counts.copy().items()}
        attached = self.attached
        storage = None if attached is None else attached.storage
        for number, breaker in enumerate(storage.tiers if isinstance(storage, Tiers) else filter(None, [storage])):
            stats[f"breaker_open.{number}"] = breaker.open
            stats[f"breaker_opened.{number}"] = breaker.counts["went down"]
            stats[f"breaker_hung.{number}"] = breaker.counts["hung"]
            usage = breaker.known
            told = {
                "lost": usage.lost,
                "damaged": usage.damaged,
                "room": usage.room_bytes,
                "only_read": usage.read_only,
            }
            stats |= {f"storage_{name}.{number}": value for name, value in told.items() if value is not None}
        for pool, total in (totals(attached.storage) if attached is not None else {}).items():
            stats |= {f"compress_{name}.{pool}": value for name, value in total.items()}
        return stats

    def _with(self, setting: str | Sequence[str], wait: str | None, write: str | None) -> CacheConfig:
        """The settings with another storage, and other policies where they are given."""
        policies = replace(
            self.config.policies,
            storage_wait=self.config.policies.storage_wait if wait is None else wait,
            write_policy=self.config.policies.write_policy if write is None else write,
        )
        return replace(self.config, storage=setting if isinstance(setting, str) else tuple(setting), policies=policies)

    def _open(self, config: CacheConfig, *, answers: bool) -> Storage:
        return open_guarded(
            config.storages,
            label=self._namespace,
            description=str(self.identity),
            deadline_s=config.policies.storage_deadline_s,
            seal=self._seal,
            answers=answers,
            clock=self._clock,
        )

    def _guarded(self, storage: Storage, urls: tuple[str, ...]) -> Attached:
        if isinstance(storage, Breaker | Tiers):
            guarded = storage
            guarded.changed = self.wake
        else:
            deadline_s = self.config.policies.storage_deadline_s
            close_s = min(CLOSE_S, deadline_s)
            if not isinstance(storage, Compressed):  # one that was given as an object may have been written compressed
                storage = Compressed(storage)
            guarded = Breaker(storage, deadline_s=deadline_s, close_s=close_s, changed=self.wake, clock=self._clock)
        return Attached(urls, guarded, self.transfers.connect(guarded))

    def _check_free(self) -> None:
        if self._change is not None and self._change.why is None:
            raise UnderWay("another change of the storage is under way")

    def _propose(
        self, attached: Attached | None, config: CacheConfig, back_up: bool = False, why: KvarveError | None = None
    ) -> Change:
        self.refuse(Busy("another change took its place"))  # this rank declined an earlier request, which is over
        self._changes += 1
        self._change = change = Change(self._changes, attached, config, why)
        change.made.set_running_or_notify_cancel()  # it cannot be cancelled: all ranks make it or none
        only_read = attached is not None and attached.only_read
        self._proposed = ChangeProposed(change.number, config, attached is not None, back_up, why is None, only_read)
        self.wake()
        return change

    def _switch(self, made: ChangeMade) -> None:
        change, self._change = self._change, None
        assert change is not None and change.number == made.change, "the change was pending until now"
        self.config, self.attached = change.config, change.attached
        try:
            before = self.transfers.attach(None if change.attached is None else change.attached.connection)
        except BaseException as e:  # whatever it is, the thread that waits for the change is told
            change.made.set_exception(e)
            raise
        change.made.set_result(before)

    def _refuse(self, why: Exception) -> None:
        """Give up the pending change: close its storage, and fail its future."""
        change, self._change, self._proposed = self._change, None, None
        assert change is not None
        try:
            if change.attached is not None:
                self.transfers.retire(change.attached.connection)
        finally:
            change.made.set_exception(change.why or why)
