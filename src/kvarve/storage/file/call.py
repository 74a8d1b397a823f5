"""What a store may hold; what a put may do, what it has done so far, and what it needs next. Plain data."""

from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvarve.errors import ConfigError
from kvarve.storage.file.orders import ORDERS
from kvarve.storage.file.slabs import Slab

RowAddress = tuple[Slab, int]
DEFAULT_THREADS = 4


def check_limits(ttl_s: float | None, quota_bytes: int | None, eviction: str, threads: int) -> None:
    """Raise ConfigError unless a file storage can be opened with these."""
    if ttl_s is not None and not ttl_s > 0:
        raise ConfigError(f"objects that live for {ttl_s} s are never found: give a ttl above zero, such as 7d")
    if quota_bytes is not None and quota_bytes <= 0:
        raise ConfigError(f"a quota of {quota_bytes} bytes admits no object: give one above zero, such as 1GiB")
    if eviction not in ORDERS:
        raise ConfigError(f"unknown eviction order {eviction!r}; known: {', '.join(ORDERS)}")
    if threads < 1:
        raise ConfigError(f"{threads} threads read and write nothing: give at least 1")


@dataclass(frozen=True)
class Limits:
    capacity_bytes: int
    eviction: str = "lru"
    ttl_ns: int | None = None
    quota_bytes: int | None = None
    durable: bool = True


@dataclass(eq=False)
class Call:
    """State of one put. It may not evict objects that it has answered for."""

    kept: set[int] = field(default_factory=set)  # entries of what was there already, and of what it stored
    stored: list[set[RowAddress]] = field(default_factory=list)  # per round
    touched: set[Slab] = field(default_factory=set)  # of all objects that it answers for
    seized: list[RowAddress] = field(default_factory=list)  # rows to be filled, of the round
    busy: set[Slab] = field(default_factory=set)  # slabs of which other processes are filling the last free rows
    of_group: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # slot bytes reserved
    grown: set[int] = field(default_factory=set)  # slot classes that cannot get another slab now
    stuck: set[int] = field(default_factory=set)  # slot classes for which no removal frees enough
    freed_bytes: int = 0  # of the disk, by slabs that it removed
    low: bool = False  # the disk is as full as it may be, so only rows whose blocks are allocated are usable
    full: bool = False  # the disk had no blocks for a free row, so only rows that were filled before are usable
    contended: bool = False  # in this round other processes had all rows, or removed a slab

    def begin_round(self) -> None:
        self.seized.clear()
        self.busy.clear()
        self.contended = False


@dataclass(eq=False)
class InFlightPut:
    """The rows of one round of a put."""

    places: dict[int, RowAddress] = field(default_factory=dict)  # by the object's number in the call
    failed: dict[int, OSError] = field(default_factory=dict)
    moving: list[Future[OSError | None]] = field(default_factory=list)  # writes in flight
    slabs: set[Slab] = field(default_factory=set)  # with objects that it answers for and that may not be synced yet


@dataclass(frozen=True)
class NeedSlab:
    """No row is free: the caller should add a slab with slots of this size."""

    slot_bytes: int


@dataclass(frozen=True)
class NeedVictims:
    """The caller has to compute an eviction queue, for a slot class or for a group."""

    slot_bytes: int | None
    group: str | None


def group_of(name: str) -> str:
    """The part of a name before the first "-": the group shares a quota."""
    group, dash, _ = name.partition("-")
    return group if dash else ""
