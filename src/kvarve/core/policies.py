"""An operator's choices as data: when to back up, how long to wait for storage, what to evict and what to keep.

`Policies` holds them all and checks them; the core, the worker, the simulator and the command line take it whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import inf
from typing import Any

from kvarve.core.slots.orders import ORDERS
from kvarve.pages.boundaries import members
from kvarve.pages.field_checks import require, require_types


class WritePolicy(Enum):
    """When a page is copied to the next tier: after its first use, after k uses, or when it is evicted."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True)
class Patience:
    """How long a request waits for its pages in storage: base + per 1,024 tokens that are not in memory, in seconds.

    The time runs from when the request's own copies begin; it stands still while they wait behind others that make
    progress. 0 takes the pages that have arrived when the request is claimed (best effort). With `each` the time starts
    anew whenever one of its copies begins or ends, so a request waits for all of them, however many there are.
    """

    base_s: float
    per_ki_token_s: float = 0.0
    each: bool = False

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.per_ki_token_s * tokens / 1024


BEST_EFFORT = Patience(0.0)
WAIT_COMPLETE = Patience(inf, each=True)
_PATIENCE = {"best_effort": BEST_EFFORT, "wait_complete": WAIT_COMPLETE}  # of "timeout" two settings say it

_Limit = tuple[str, Callable[[Any], bool]]  # in words, and whether a value keeps it


def _one_of(*known: str) -> _Limit:
    return f"one of {', '.join(known)}", lambda value: value in known


def _at_least(least: int) -> _Limit:
    return f"at least {least}", lambda value: value >= least


_SHARE: _Limit = "above 0 and at most 1", lambda value: 0 < value <= 1
_FINITE: _Limit = "at least 0 and finite", lambda value: 0 <= value < inf
# What the values of `Policies` have to keep, beside their types.
_LIMITS: dict[str, _Limit] = {
    "write_policy": _one_of(*(policy.value for policy in WritePolicy)),
    "selective_uses": _at_least(1),
    "prefetch_policy": _one_of(*_PATIENCE, "timeout"),
    "prefetch_base_s": _at_least(0),
    "prefetch_per_ki_token_s": _FINITE,  # a wait needs an end
    "storage_deadline_s": ("above 0 and finite", lambda value: 0 < value < inf),
    "snapshot_every": _at_least(0),
    "snapshot_gap": _at_least(0),
    "states": _at_least(0),
    "eviction": _one_of(*ORDERS),
    "load_at_least": _at_least(0),
    "fetch_at_least": _at_least(0),
    "salt_share": _SHARE,
    "host_share": _SHARE,
    "offload_pays_at": _FINITE,
    "hash_sample": ("from 0 to 1", lambda value: 0 <= value <= 1),
}


@dataclass(frozen=True)
class Snapshots:
    """Which windows and states are worth keeping: they are large, and most are never read again. Keep them where a
    prompt ends (`ends`), where it branches off a known prompt (`branches`), and at every multiple of `every` tokens (0:
    where they take little). None is admitted that would save fewer than `gap` tokens over the one before it."""

    ends: bool = True
    branches: bool = True
    every: int = 0
    gap: int = 0

    def boundaries(
        self, pages: int, limit: int, branch: int, kept: int, page_tokens: int, grid: int, step: int = 0
    ) -> int:
        """The set of boundaries to keep, on the prefill grid.

        For a prompt of `pages` full pages that can be resumed at most at `limit` when it comes again, that branches off
        known prompts after `branch` pages (0: nowhere), and whose boundaries `kept` have their windows and states.
        `step`: pages after which they take little (0: nowhere).
        """
        marks: list[int] = []
        if self.ends:
            marks += pages, limit
        if self.branches:
            marks.append(branch)
        if self.every:
            marks += range(apart := max(1, self.every // page_tokens), pages + 1, apart)
        if step:
            marks += range(step, pages + 1, step)
        wanted = 0
        for mark in marks:
            wanted |= 1 << mark // grid * grid
        wanted &= ~1
        return self._admitted(wanted, kept, page_tokens) if self.gap else wanted

    def _admitted(self, wanted: int, kept: int, page_tokens: int) -> int:
        """The wanted boundaries that are kept already, or far enough from the one before them."""
        admitted, last = 0, 0
        for boundary in members(wanted | kept):
            if kept >> boundary & 1 or (boundary - last) * page_tokens >= self.gap:
                admitted |= 1 << boundary
                last = boundary
        return admitted & wanted


@dataclass(frozen=True, kw_only=True)
class Policies:
    """An operator's choices for a cache, for all ranks the same. ConfigError for values that cannot work."""

    write_policy: str = "write_through"
    """when pages are backed up: write_through, write_through_selective or write_back"""
    selective_uses: int = 2
    """uses after which write_through_selective writes"""
    prefetch_policy: str = "timeout"
    """how to wait for storage: best_effort, timeout or wait_complete"""
    prefetch_base_s: float = 2.0
    """seconds to wait for storage"""
    prefetch_per_ki_token_s: float = 0.25
    """and per 1,024 tokens"""
    storage_deadline_s: float = 30.0
    """seconds after which a call to storage counts as hanging"""
    snapshot_ends: bool = True
    """keep windows and states where a prompt ends"""
    snapshot_branches: bool = True
    """keep windows and states where a prompt branches off a known one"""
    snapshot_every: int = 0
    """also keep windows and states every N tokens; 0: so far apart that they take little memory"""
    snapshot_chunks: bool = True
    """also keep windows and states at the end of each chunk, on the device alone, while a quarter of it is unused"""
    snapshot_gap: int = 0
    """the fewest tokens that a kept window or state has to save"""
    states: int = 0
    """the most windows or states of each kind that a memory tier keeps; 0: as the traffic asks"""
    eviction: str = "lru"
    """eviction order: lru, lfu, s3fifo or priority"""
    load_at_least: int = 0
    """the fewest tokens that a copy from the host to the device has to save"""
    fetch_at_least: int = 0
    """the fewest tokens that a copy from storage to the host has to save"""
    salt_share: float = 1.0
    """of each memory tier, the share that the prompts of one salt may keep; its own coldest pages go beyond that"""
    host_share: float = 0.8
    """of the host (of each pool, if they do not share it), the share that copies to and from storage may hold"""
    offload_pays_at: float = 0.01
    """of the bytes stored, the share that has to be used, or storing pauses until it would pay again; 0: never"""
    verify_host: bool = True
    """check pages in host memory before they are used"""
    hash_sample: float = 0.0
    """of all pages, the share whose bytes are compared before and after each copy; an altered one is dropped"""

    def __post_init__(self) -> None:
        require_types(self)
        for name, (condition, holds) in _LIMITS.items():
            require(holds(value := getattr(self, name)), name, condition, value)

    @cached_property
    def write(self) -> WritePolicy:
        return WritePolicy(self.write_policy)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Which windows and states are worth keeping."""
        return Snapshots(self.snapshot_ends, self.snapshot_branches, self.snapshot_every, self.snapshot_gap)

    def patience(self) -> Patience:
        """How long a request waits for storage: at most the storage deadline for each copy."""
        timed = Patience(self.prefetch_base_s, self.prefetch_per_ki_token_s)
        asked = _PATIENCE.get(self.prefetch_policy, timed)
        return replace(asked, base_s=min(asked.base_s, self.storage_deadline_s))
