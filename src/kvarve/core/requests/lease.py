"""A request's pins on its pages, from open to close."""

from collections.abc import Mapping, Sequence
from enum import Enum
from math import inf

from kvarve.core.observe.ghosts import Left
from kvarve.core.policies import Patience
from kvarve.core.tree.tree import Run
from kvarve.pages.boundaries import union
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES, names
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


class Lease:
    """`[0, boundary)` resumed from the tree · `[boundary, done)` published by it · `[done, grown)` in its own slots.

    Made by `Core.open`; fields are for reading only.
    """

    __slots__ = (
        "again",
        "arrived",
        "ask_again",
        "ask_all",
        "asked",
        "asked_again",
        "asked_s",
        "awaited",
        "bad",
        "begun",
        "boundary",
        "branch",
        "claimed",
        "deadline",
        "done",
        "ends",
        "expected",
        "expected_until",
        "fetched",
        "found",
        "grown",
        "heads",
        "held",
        "joined",
        "known",
        "landed",
        "latest",
        "left",
        "length",
        "lent",
        "limit",
        "loaded",
        "looked_s",
        "memory",
        "named",
        "number",
        "offered",
        "ops",
        "outside",
        "own",
        "page_tokens",
        "pages",
        "passing",
        "patience",
        "phase",
        "prefix_pins",
        "priority",
        "probed",
        "promised",
        "reads",
        "reloaded",
        "resumed",
        "retries",
        "root",
        "run",
        "seen",
        "snapshots",
        "soon_until",
        "storage",
        "tiers",
        "tokens",
        "told",
        "torn",
        "uncached",
        "wait_s",
    )

    def __init__(
        self,
        number: int,
        root: bytes,
        tokens: bytes,
        page_tokens: int,
        limit: int,
        run: Run,
        pools: int,
        patience: Patience,
        priority: int,
        reads: bool,
        again: bool,
    ) -> None:
        self.number = number
        self.root = root
        self.tokens = tokens
        self.heads = b""  # what its full pages begin with, where residency is told (`keys.heads`)
        self.named = b""  # the keys of its first pages, as far as they have been computed
        self.page_tokens = page_tokens
        self.length = len(tokens) // TOKEN_BYTES  # tokens of its prompt; others may follow
        self.pages = len(tokens) // (page_tokens * TOKEN_BYTES)  # that can be kept: all full ones, unless slots ran out
        self.limit = limit  # deepest boundary that leaves at least one token to compute and fits on the device
        self.patience = patience
        self.priority = priority
        self.reads = reads  # else it resumes from nothing
        self.again = again  # its request has read these pages by another lease, and counts as one use of them
        self.phase = Phase.QUEUED
        self.boundary = 0
        self.promised = 0  # the boundary that memory could serve when it was queued
        self.known = 0  # pages whose tokens the tree knew when it became ready, resident or not
        self.branch = 0  # the same, and of pages that have left it, if another prompt went on differently there
        self.deadline = 0.0  # of its wait for storage, or for a load
        self.wait_s = 0.0  # what is left of its patience with storage
        self.begun = False  # its patience runs: a worker has begun its copy or probe
        self.latest = 0.0  # its deadline is not moved beyond this
        self.asked_s: float | None = None  # since when it has been waiting for storage
        self.looked_s = 0.0  # when storage was asked about it last, or had answered
        self.asked_again = False  # storage has answered before, and it has been queued
        self.expected = 0  # a boundary whose pages are being written to storage
        self.expected_until = 0.0  # and may come until then
        none = [0] * pools  # of what is replaced later, and not changed
        self.awaited = none  # those that storage did not have yet
        self.soon_until = 0.0  # how long it may say that pages are being written
        self.ask_again = inf  # when to ask for them again
        self.ask_all = inf  # when to ask for all of them
        self.resumed = False  # the engine has its own copies of windows and states
        self.claimed = False
        self.run = run  # the deepest run that `held` and `prefix_pins` reach
        self.held = 0  # positions of which it pins all pages
        self.prefix_pins = 0  # positions of which it pins the chains
        self.tiers: tuple[Tier, ...] = MEMORY_TIERS  # of these pins: once ready, the device only
        self.ops: set[int] = set()  # copies in flight that it waits for
        self.probed = none  # positions that storage said it has
        self.told = 0  # positions of which storage said whether it has them
        self.asked = none  # positions of which a copy to the host or the device was begun, and has not come
        self.joined = none  # positions that another lease's fetch was to bring
        self.bad = [0] * pools  # positions of which a page failed its check
        self.landed: list[dict[int, int]] = [{} for _ in range(pools)]  # host slots filled from storage, by position
        self.lent = [0] * pools  # how many of the landed pages count towards the share of the host
        self.fetched = [0] * pools  # positions that came from storage
        self.loaded = 0  # positions with a page loaded from the host
        self.found = none  # pages on the device when it became ready
        self.memory = none  # the same in any memory tier
        self.seen = none  # those on the device that its sequence still has
        self.storage = False  # whether a storage was attached then
        self.left: Left | None = None  # what is remembered then of pages that have left memory
        self.own: list[dict[int, int]] = [{} for _ in range(pools)]  # its own device slots, by position
        self.ends = 0  # boundaries at which the prompt ends, branches off others, or could be resumed at most
        self.uncached = [0] * pools  # pages of an engine that were offered and not kept
        self.snapshots = 0  # boundaries at which windows and states are worth keeping
        self.passing = 0  # boundaries at which they are kept since there is room
        self.retries = 0  # loads and fetches put off to wait for evictions
        self.torn = False  # a load failed for some page
        self.reloaded = False  # and the second round of loads has begun
        self.outside: Sequence[int] = ()  # by pool, the pages (bits) that an engine has on a device of its own
        self.offered = none  # the pages (bits) that the engine has to name blocks for
        self.arrived = [0] * pools  # those of them that have been loaded
        self.done = 0
        self.grown = 0

    @property
    def keys(self) -> bytes:
        """The keys of all its full pages, concatenated."""
        self.named = names(self.root, self.named, self.tokens, self.page_tokens)
        return self.named

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

    def wait_from(self, now: float) -> None:
        """Its patience with storage runs from now on."""
        self.deadline = min(now + self.wait_s, self.latest)

    def postpone(self, seconds: float) -> None:
        """The clock by which it was opened was behind by `seconds`."""
        self.expected_until += seconds
        self.deadline += seconds
        self.looked_s += seconds
        self.latest += seconds
        self.asked_s = None if self.asked_s is None else self.asked_s + seconds

    def key(self, position: int) -> bytes:
        return self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def from_tiers(self) -> tuple[int, int, int]:
        """Pages of the hit by the farthest tier from which any pool's page came: (device, host, storage)."""
        hit = (1 << self.boundary) - 1
        storage = union(self.fetched) & hit
        host = self.loaded & hit & ~storage
        return self.boundary - storage.bit_count() - host.bit_count(), host.bit_count(), storage.bit_count()
