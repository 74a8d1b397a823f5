"""A request's pins on its pages, from open to close."""

from collections.abc import Mapping, Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

from kvarve.core.policies import BEST_EFFORT, Patience
from kvarve.core.tree.ghosts import Left
from kvarve.core.tree.tree import Run
from kvarve.pages.boundaries import union
from kvarve.pages.keys import HEAD_BYTES, KEY_BYTES, TOKEN_BYTES, names
from kvarve.pages.pools import MEMORY_TIERS, Tier


class Phase(Enum):
    """Where a lease stands between its copies; `MOVES` says what follows on what."""

    PROBING = "probing"  # storage is asked which pages it has
    FETCHING = "fetching"  # pages are copied from storage to the host
    QUEUED = "queued"  # no copy is in flight; the engine has not admitted the request
    OFFERED = "offered"  # the pages for a boundary are in the host, and the engine has to name its blocks for them
    LOADING = "loading"  # pages are copied from the host to the device
    READY = "ready"  # the engine may resume at `boundary`
    CLOSED = "closed"

    __hash__ = object.__hash__  # members are singletons, and a lease looks its moves up: Enum's own hash is slower


class Cause(Enum):
    """Why a lease moves to another phase."""

    PROBE = "storage is probed"
    FETCH = "pages are fetched"
    DONE = "nothing more comes from storage"
    OFFER = "the engine is offered pages"
    LOAD = "pages are loaded"
    READY = "its pages are on the device"
    CLOSE = "the request ends"

    __hash__ = object.__hash__  # as above


# The only moves that there are. Pages that were lost may send a lease back: to storage, or to load once more.
MOVES: Mapping[tuple[Phase, Cause], Phase] = {
    (Phase.QUEUED, Cause.PROBE): Phase.PROBING,
    (Phase.PROBING, Cause.PROBE): Phase.PROBING,
    (Phase.PROBING, Cause.FETCH): Phase.FETCHING,
    (Phase.PROBING, Cause.DONE): Phase.QUEUED,
    (Phase.FETCHING, Cause.FETCH): Phase.FETCHING,
    (Phase.FETCHING, Cause.DONE): Phase.QUEUED,
    (Phase.QUEUED, Cause.OFFER): Phase.OFFERED,
    (Phase.OFFERED, Cause.LOAD): Phase.LOADING,
    (Phase.OFFERED, Cause.READY): Phase.READY,
    (Phase.QUEUED, Cause.LOAD): Phase.LOADING,
    (Phase.LOADING, Cause.LOAD): Phase.LOADING,
    (Phase.QUEUED, Cause.READY): Phase.READY,
    (Phase.LOADING, Cause.READY): Phase.READY,
    **{(phase, Cause.CLOSE): Phase.CLOSED for phase in Phase if phase is not Phase.CLOSED},
}
# The copies that a lease waits for in each phase, by their tiers; none in any other.
WAITS_FOR: Mapping[Phase, tuple[Tier, Tier]] = {
    Phase.PROBING: (Tier.STORAGE, Tier.STORAGE),
    Phase.FETCHING: (Tier.STORAGE, Tier.HOST),
    Phase.LOADING: (Tier.HOST, Tier.DEVICE),
}


class Prompt(NamedTuple):
    """A request's prompt: packed tokens under a root key."""

    root: bytes
    tokens: bytes
    heads: bytes = b""  # the first bytes of each full page (`keys.heads`), if page events are published
    named: bytes = b""  # the keys of its first pages, as far as they are known


class Ask(NamedTuple):
    """How a request reads its prompt's pages."""

    patience: Patience = BEST_EFFORT  # with storage
    reads: bool = True  # else it resumes from nothing
    priority: int = 0  # of the pages that it uses, for eviction by priority
    outside: Sequence[int] = ()  # by pool, the pages (bits) that an engine has on a device of its own
    # (boundary, seconds): another process is writing the pages before that boundary to storage, and has finished within
    # that time.
    expected: tuple[int, float] = (0, 0.0)
    # It has read its pages by another lease, which it gave up or has for another sample: it counts as one use of them.
    again: bool = False


PLAIN = Ask()


class Lease:
    """`[0, boundary)` resumed from the tree · `[boundary, done)` published by it · `[done, grown)` in its own slots.

    Made by `Core.open`; fields are for reading only, each is written by one file (`tests/core/test_writers.py`).
    """

    __slots__ = {  # noqa: RUF023  in the order of its life
        "number": "by which it is known",
        "root": "the key of its prompt's root",
        "tokens": "the packed tokens of its sequence",
        "heads": "the first bytes of each full page, if page events are published",
        "named": "the keys of its first pages, as far as they have been computed",
        "page_tokens": "tokens of a page",
        "length": "tokens of its prompt; others may follow",
        "limit": "deepest boundary that leaves at least one token to compute and fits on the device",
        "patience": "with storage",
        "priority": "of the pages that it uses",
        "reads": "else it resumes from nothing",
        "again": "its request has read these pages by another lease, and counts as one use of them",
        "outside": "by pool, the pages (bits) that an engine has on a device of its own",
        "claimed": "whether the engine has admitted it",
        "phase": "where it stands between its copies",
        # its copies
        "ops": "copies in flight that it waits for",
        "asked": "positions of which a copy to the host or the device was begun, and has not come",
        "bad": "positions of which a page failed its check",
        # its pins
        "run": "the deepest run that `held` and `prefix_pins` reach",
        "held": "positions of which it pins all pages",
        "prefix_pins": "positions of which it pins the chains",
        "tiers": "of these pins: once ready, the device only",
        # its wait
        "promised": "the boundary that memory could serve when it was queued",
        "deadline": "of its wait for storage, or for a load",
        "wait_s": "what is left of its patience with storage",
        "begun": "its patience runs: a worker has begun its copy or probe",
        "latest": "its deadline is not moved beyond this",
        "asked_s": "since when it has been waiting for storage, or None",
        "looked_s": "when storage was asked about it last, or had answered",
        "asked_again": "storage has answered before, and it has been queued",
        "expected": "a boundary whose pages are being written to storage",
        "expected_until": "and may come until then",
        "awaited": "positions that storage did not have yet",
        "ask_again": "when to ask for them again",
        "ask_all": "when to ask for all of them",
        "probed": "positions that storage said it has",
        "told": "positions of which storage said whether it has them",
        "joined": "positions that another lease's fetch was to bring",
        "landed": "host slots filled from storage, by position",
        "lent": "how many of the landed pages count towards the share of the host",
        "fetched": "positions that came from storage",
        "retries": "loads and fetches put off to wait for evictions",
        # what it found when it became ready
        "known": "pages whose tokens the tree knew then, resident or not",
        "found": "pages on the device",
        "memory": "the same in any memory tier",
        "storage": "whether a storage was attached then",
        "left": "what is remembered then of pages that have left memory; None before",
        "loaded": "positions with a page loaded from the host",
        "torn": "a load failed for some page",
        "reloaded": "and the second round of loads has begun",
        # over an engine's blocks
        "offered": "the pages (bits) that the engine has to name blocks for",
        "arrived": "those of them that have been loaded",
        "uncached": "pages of an engine that were offered and not kept",
        # which windows and states it keeps
        "branch": "the pages that are known or have left the tree, if another prompt went on differently there",
        "ends": "boundaries at which the prompt ends, branches off others, or could be resumed at most",
        "snapshots": "boundaries at which windows and states are worth keeping",
        "passing": "boundaries at which they are kept since there is room",
        # its growth
        "boundary": "where it resumes",
        "done": "the page up to which it has published",
        "grown": "the page up to which it has slots",
        "pages": "that can be kept: all full ones, unless slots ran out",
        "seen": "pages on the device when it became ready that its sequence still has",
        "own": "its own device slots, by position",
        "resumed": "the engine has its own copies of windows and states",
    }

    def __init__(
        self, number: int, prompt: Prompt, ask: Ask, page_tokens: int, limit: int, run: Run, pools: int, now: float
    ) -> None:
        """`run`: the root above its prompt; `pools`: how many there are."""
        self.number, self.page_tokens, self.limit, self.run = number, page_tokens, limit, run
        self.root, self.tokens, self.heads, self.named = prompt
        self.patience, self.reads, self.priority, self.outside, (self.expected, expected_s), self.again = ask
        if not self.reads:
            self.outside = ()
        self.length = len(self.tokens) // TOKEN_BYTES
        self.pages = self.length // page_tokens
        self.phase = Phase.QUEUED
        self.tiers: tuple[Tier, ...] = MEMORY_TIERS
        self.left: Left | None = None
        self.claimed = self.begun = self.asked_again = self.storage = False
        self.torn = self.reloaded = self.resumed = False
        self.ops: set[int] = set()
        self.held = self.prefix_pins = self.promised = self.told = self.retries = self.loaded = self.known = 0
        self.branch = self.ends = self.snapshots = self.passing = self.boundary = self.done = self.grown = 0
        self.deadline = self.wait_s = self.latest = 0.0
        self.looked_s, self.expected_until = now, now + expected_s
        self.asked_s: float | None = None
        self.ask_again = self.ask_all = inf
        # By pool; `none` is replaced later, and not changed.
        none = [0] * pools
        self.asked = self.awaited = self.probed = self.joined = none
        self.found = self.memory = self.seen = self.offered = none
        self.bad, self.lent, self.fetched, self.arrived, self.uncached = none[:], none[:], none[:], none[:], none[:]
        self.landed: list[dict[int, int]] = [{} for _ in none]
        self.own: list[dict[int, int]] = [{} for _ in none]

    @property
    def keys(self) -> bytes:
        """The keys of all its full pages, concatenated."""
        self.named = names(self.root, self.named, self.tokens, self.page_tokens)
        return self.named

    def name(self, keys: bytes) -> None:
        """The keys of its first pages are known, if they were not."""
        self.named = self.named or keys

    def replace(self, stays: int, tokens: bytes, heads: bytes) -> None:
        """Other tokens follow on the first `stays` bytes of its sequence."""
        pages = stays // (self.page_tokens * TOKEN_BYTES)
        self.tokens = self.tokens[:stays] + tokens
        self.named = self.named[: pages * KEY_BYTES]
        self.heads = self.heads[: pages * min(HEAD_BYTES, self.page_tokens * TOKEN_BYTES)] + heads

    def move(self, cause: Cause) -> None:
        """Go to the phase that follows, for this cause, on the present one."""
        after = MOVES.get((self.phase, cause))
        assert after is not None, f"a lease that is {self.phase.value} cannot move because {cause.value}"
        self.phase = after

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY

    @property
    def counted(self) -> bool:
        """Whether its request has counted as a use of its pages, by this lease or another."""
        return self.again or self.left is not None

    @property
    def on_device(self) -> bool:
        """Whether it pins pages on the device, or owns slots there."""
        return self.phase in (Phase.LOADING, Phase.READY)

    @property
    def holds(self) -> bool:
        """Whether it pins any page, if only those that were fetched for it and those before them."""
        return bool(self.held or self.prefix_pins)

    def key(self, position: int) -> bytes:
        return self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def from_tiers(self) -> tuple[int, int, int]:
        """Pages of the hit by the farthest tier from which any pool's page came: (device, host, storage)."""
        hit = (1 << self.boundary) - 1
        storage = union(self.fetched) & hit
        host = self.loaded & hit & ~storage
        return self.boundary - storage.bit_count() - host.bit_count(), host.bit_count(), storage.bit_count()
