"""An operator's choices as data: when to back up, how long to wait for storage, what to evict and what to keep.

`Policies` holds them all and checks them; the core, the worker, the simulator and the command line take it whole.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import inf
from typing import Any, Literal

from kvarve.errors import ConfigError
from kvarve.pages.field_checks import require_types


class WritePolicy(Enum):
    """When a page is copied to the next tier: after its first use, after N uses, or when it is evicted."""

    WRITE_THROUGH = "through"
    WRITE_THROUGH_SELECTIVE = "through:N"
    WRITE_BACK = "back"


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
    asks: bool = True  # else storage is not even asked: the request takes what is in memory

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.per_ki_token_s * tokens / 1024


BEST_EFFORT = Patience(0.0)
WAIT_COMPLETE = Patience(inf, each=True)
MEMORY_ALONE = Patience(0.0, asks=False)
_PATIENCE = {"none": BEST_EFFORT, "all": WAIT_COMPLETE}
# How people write three policies. A text beside the choices is one of theirs with other numbers.
Write = Literal["through", "through:2", "back"] | str
Wait = Literal["none", "2s+0.25s/Ki", "all"] | str
States = Literal["ends,branches,chunks", "ends,branches", "ends", "none"] | str
Order = Literal["lru", "lfu", "s3fifo", "priority"]
_SECONDS = "([0-9]{1,9}(?:[.][0-9]{1,9})?)s"
_WRITE = re.compile("through(?::([1-9][0-9]{0,8}))?|back")
_WAIT = re.compile(f"none|all|{_SECONDS}(?:[+]{_SECONDS}/Ki)?")
_STATE = "(?:ends|branches|chunks|every:([1-9][0-9]{0,11}))"
_STATES = re.compile(f"none|{_STATE}(?:,{_STATE})*")

_Limit = tuple[str, Callable[[Any], object]]  # in words, and whether a value keeps it


def _at_least(least: int) -> _Limit:
    return f"at least {least}", lambda value: value >= least


_SHARE: _Limit = "above 0 and at most 1", lambda value: 0 < value <= 1
_FINITE: _Limit = "at least 0 and finite", lambda value: 0 <= value < inf
# What the values of `Policies` have to keep, beside their types.
_LIMITS: dict[str, _Limit] = {
    "write_policy": ("through, through:N (after N uses) or back", _WRITE.fullmatch),
    "storage_wait": ("none, all, or seconds with seconds per 1,024 tokens, such as 2s+0.25s/Ki", _WAIT.fullmatch),
    "storage_deadline_s": ("above 0 and finite", lambda value: 0 < value < inf),
    "keep_states": ("none, or a list such as ends,branches,chunks,every:4096 (in tokens)", _STATES.fullmatch),
    "states": _at_least(0),
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
    prompt ends (`ends`), where it branches off a known prompt (`branches`), at the end of each chunk while there is
    room (`chunks`), and at every multiple of `every` tokens (0: where they take little)."""

    ends: bool = True
    branches: bool = True
    chunks: bool = True
    every: int = 0

    def boundaries(self, pages: int, limit: int, branch: int, page_tokens: int, grid: int, step: int = 0) -> int:
        """The set of boundaries to keep, on the prefill grid; those of chunks depend on the room there is.

        For a prompt of `pages` full pages that can be resumed at most at `limit` when it comes again, that branches off
        known prompts after `branch` pages (0: nowhere). `step`: pages after which they take little (0: nowhere).
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
        return wanted & ~1


@dataclass(frozen=True, kw_only=True)
class Policies:
    """An operator's choices for a cache, for all ranks the same. ConfigError for values that cannot work."""

    write_policy: Write = "through"
    """When pages are copied to the next tier: at their first use (through), at their Nth (through:N), or when they are
    evicted (back)"""
    storage_wait: Wait = "2s+0.25s/Ki"
    """Time for which a request waits for its pages in storage: none, until all have come (all), or seconds and more
    seconds per 1,024 tokens that are not in memory"""
    storage_deadline_s: float = 30.0
    """Seconds after which a call to storage counts as hanging"""
    keep_states: States = "ends,branches,chunks"
    """Places where windows and states are kept, or none: where prompts end (ends), where they branch off a known one
    (branches), at the end of each chunk, on the device while a quarter of it is unused (chunks), and every N tokens
    (every:N; without it, so far apart that they take little memory)"""
    states: int = 0
    """Most windows or states of each kind that a memory tier keeps; 0 follows the traffic"""
    eviction: Order = "lru"
    """Eviction order; priority is that of requests (cache_priority)"""
    load_at_least: int = 0
    """Fewest tokens that a copy from the host to the device has to save"""
    fetch_at_least: int = 0
    """Fewest tokens that a copy from storage to the host has to save"""
    salt_share: float = 1.0
    """Share of each memory tier that the prompts of one salt may keep; beyond it, its own coldest pages leave"""
    host_share: float = 0.8
    """Share of the host (of each pool, if they do not share it) that copies to and from storage may hold"""
    offload_pays_at: float = 0.01
    """Share of the stored bytes that has to be used, or storing pauses until it would pay again; 0 never pauses"""
    verify_host: bool = True
    """Check pages in host memory before they are used"""
    hash_sample: float = 0.0
    """Share of all pages whose bytes are compared before and after each copy; an altered one is dropped"""

    def __post_init__(self) -> None:
        require_types(self)
        given = {name: getattr(self, name) for name in _LIMITS}
        wrong = [name for name, (_, holds) in _LIMITS.items() if not holds(given[name])]
        if wrong:  # all at once
            raise ConfigError("; ".join(f"{name} must be {_LIMITS[name][0]}, got {given[name]!r}" for name in wrong))

    @cached_property
    def write(self) -> WritePolicy:
        kind, after, _ = self.write_policy.partition(":")
        return WritePolicy(kind + (":N" if after else ""))

    @cached_property
    def selective_uses(self) -> int:
        """The uses after which a selective policy writes; 1 where it is none."""
        return int(self.write_policy.partition(":")[2] or 1)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Which windows and states are worth keeping."""
        named = self.keep_states.split(",")
        every = max((int(name[6:]) for name in named if name.startswith("every:")), default=0)
        return Snapshots("ends" in named, "branches" in named, "chunks" in named, every)

    def patience(self) -> Patience:
        """How long a request waits for storage: at most the storage deadline for each copy."""
        timed = _WAIT.fullmatch(self.storage_wait)
        assert timed is not None, "checked when it was made"
        base_s, per_ki_token_s = map(float, timed.groups("0"))
        asked = _PATIENCE.get(self.storage_wait, Patience(base_s, per_ki_token_s))
        return replace(asked, base_s=min(asked.base_s, self.storage_deadline_s))
