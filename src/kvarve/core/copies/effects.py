"""Effects that the core asks for, and the events that answer them. Plain data; the core itself touches nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, TypeVar, overload

from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier


class Page(NamedTuple):
    """One page of a copy: `source` and `target` are slots in the arenas of memory tiers, or handles of blocks that an
    engine owns; -1 for storage."""

    pool: int
    key: bytes
    source: int
    target: int


class Column(NamedTuple):
    """Pages of one pool: their keys, concatenated, and the slots at both ends."""

    pool: int
    keys: bytes
    sources: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class Pages(Sequence[Page]):
    """Pages by columns. A reader makes single pages of them; the scheduler, which may send thousands, makes none."""

    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return sum(len(column.sources) for column in self.columns)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    @overload
    def __getitem__(self, at: int) -> Page: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Page]: ...
    def __getitem__(self, at: int | slice) -> Page | Sequence[Page]:
        return self._pages[at]

    @cached_property
    def _pages(self) -> tuple[Page, ...]:
        return tuple(page for column in self.columns for page in _pages_of(column))

    def __reduce__(self) -> tuple[type["Pages"], tuple[tuple[Column, ...]]]:
        return Pages, (self.columns,)


def _pages_of(column: Column) -> Iterator[Page]:
    keys = [column.keys[at : at + KEY_BYTES] for at in range(0, len(column.keys), KEY_BYTES)]
    return map(Page, repeat(column.pool), keys, column.sources, column.targets)


@dataclass(frozen=True)
class Copy:
    """Copy `pages` from one tier to the next; all are below one root key. Answer with one `Ended`, even if the copy
    failed or came too late; its request waits up to `wait_s` for it to begin. One from storage is `urgent` if its
    request has been claimed, and passes those that are not."""

    op: int
    source: Tier
    target: Tier
    pages: Pages
    root: bytes
    wait_s: float = 0.0
    urgent: bool = False


@dataclass(frozen=True)
class Probe:
    """Ask the storage which of these pages it has. Answer with one `Ended`, whose `good` pages are there; the request
    waits up to `wait_s` for it to begin."""

    op: int
    pages: Pages
    root: bytes
    wait_s: float = 0.0


@dataclass(frozen=True)
class Release:
    """A copy that used an engine's blocks has ended: the engine may free or reuse them; pages are (pool, handle)."""

    op: int
    pages: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Hurry:
    """Copies from storage have become urgent, as their request has been claimed. No answer; any may have ended."""

    ops: tuple[int, ...]


Transfer = Copy | Probe
Effect = Transfer | Hurry


def canonical(order: object) -> bytes:
    """Bytes that are equal on all ranks that have decided alike. Pages are written by column, as there may be
    thousands."""
    if not isinstance(order, Transfer):
        return repr(order).encode()
    columns = order.pages.columns
    told = vars(order) | {"pages": [(column.pool, column.sources, column.targets) for column in columns]}
    return f"{type(order).__name__}{told}".encode() + b"".join(column.keys for column in columns)


@dataclass(frozen=True)
class Began:
    """A worker has begun an effect; until then it waited behind others."""

    op: int


@dataclass(frozen=True)
class Verified:
    """The pages of a load have passed their check (`good`), or failed it (`bad`), and the good ones are being copied
    layer by layer. The request may resume: the engine waits for each layer. `Ended` follows, with the same bits."""

    op: int
    good: int
    bad: int = 0


class Refusal(IntEnum):
    """Why a storage that answers did not take pages."""

    NONE = 0
    FULL = 1
    READ_ONLY = 2


@dataclass(frozen=True)
class Ended:
    """The end of an effect: bit i of `good` says page i arrived (or is there), bit i of `bad` that it failed its
    check: its bytes are not those that its key names. `refused`: why a storage did not take the others."""

    op: int
    good: int
    bad: int = 0
    refused: Refusal = Refusal.NONE


Event = Began | Verified | Ended
Outcome = TypeVar("Outcome", Verified, Ended)


def agreed(ends: Sequence[Outcome]) -> Outcome:
    """How one effect was verified, or ended, on all ranks: a page is good if it is good on all of them, bad if it is
    bad on any."""
    good, bad = ends[0].good, 0
    for end in ends:
        good &= end.good
        bad |= end.bad
    refused = max(end.refused if isinstance(end, Ended) else Refusal.NONE for end in ends)
    more = {"refused": refused} if refused else {}
    return type(ends[0])(ends[0].op, good & ~bad, bad, **more)
