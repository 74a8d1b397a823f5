"""Copies in flight: the pages that each one moves, its lease, and its pins until it has ended."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvarve import boundaries
from kvarve.boundaries import deepest
from kvarve.core.effects import Copy, Effect, Hurry, Page, Probe
from kvarve.core.lease import Lease
from kvarve.core.tree import Run, covering, each_covering, root_of
from kvarve.keys import KEY_BYTES
from kvarve.model import Tier

if TYPE_CHECKING:
    from kvarve.core.state import State

Edge = tuple[Tier, Tier]

PROBE: Edge = (Tier.STORAGE, Tier.STORAGE)
FETCH: Edge = (Tier.STORAGE, Tier.HOST)
LOAD: Edge = (Tier.HOST, Tier.DEVICE)
BACKUP: Edge = (Tier.DEVICE, Tier.HOST)
STORE: Edge = (Tier.HOST, Tier.STORAGE)


class Moving(NamedTuple):
    """One page of a copy in flight: pool, position, and the slots at both ends."""

    pool: int
    position: int
    source: int
    target: int


class CopyOutcome(NamedTuple):
    """How a page's copy ended: it arrived (`good`), its bytes failed their check (`bad`), or neither."""

    page: Moving
    good: bool
    bad: bool


def note_bad(lease: Lease, outcomes: Iterable[CopyOutcome]) -> None:
    """A lease waited for these pages; some failed their check."""
    for page, _, bad in outcomes:
        lease.bad[page.pool] |= bad << page.position


@dataclass
class Op:
    """A copy or probe in flight. Until it has ended it owns its target slots and pins its sources in their tier.

    A load that has been `verified` gives target slots to the tree before it has ended, and pins their pages meanwhile.
    """

    edge: Edge
    pages: list[Moving]
    lease: Lease | None = None
    run: Run | None = None
    named: bytes = b""  # of a lease's pages from storage: the keys of its prompt when the copy was sent
    pinned: int = 0
    verified: int | None = None  # of a load: the pages (bits) that are being copied after their check
    given: int = 0  # pages (bits) whose target slots it does not own any more
    filling: int = 0  # positions that it pins on the device until they have been copied
    wait_s: float = 0.0  # how long its lease waits for it to begin
    leaving: bool = False  # an eviction that waits for its copy
    onward: bool = False  # a copy to the host of pages that go on to storage
    void: bool = False  # its storage has been detached, or was down
    counts: bool = True  # towards the share of the host; not once its storage has been detached


class Copies:
    """Starts copies, and knows those in flight."""

    def __init__(self, state: "State") -> None:
        self.ops: dict[int, Op] = {}
        self.effects: list[Effect] = []  # not taken yet
        self.storage = False  # whether one is attached and up
        self._slot_pools = state.slot_pools
        self.sent = 0  # copies and probes so far; the last one has this number

    def send(self, op: Op) -> None:
        """Start a copy or probe of pages of the tree or, if it has no run, of a lease's prompt; source pages in the
        tree are pinned."""
        self.sent += 1
        self.ops[self.sent] = op
        if op.lease is not None and op.edge != BACKUP:  # no request waits for pages that an engine saves
            op.lease.ops.add(self.sent)
        if op.run is not None:
            op.pinned = boundaries.of(page.position for page in op.pages)
            op.run = covering(op.run, deepest(op.pinned))
            self._slot_pools.pin(op.run, op.pinned, tiers=op.edge[:1])  # its target slots are its own
            positions = [page.position for page in op.pages]
            keys = [run.key(at) for run, at in zip(each_covering(op.run, positions), positions, strict=True)]
            root = root_of(op.run).named
        else:
            assert op.lease is not None
            op.named = named = op.lease.keys
            keys = [named[page.position * KEY_BYTES : (page.position + 1) * KEY_BYTES] for page in op.pages]
            root = op.lease.root
        pages = tuple(Page(page.pool, key, page.source, page.target) for page, key in zip(op.pages, keys, strict=True))
        if op.edge == PROBE:
            self.effects.append(Probe(self.sent, pages, root, op.wait_s))
        else:
            urgent = op.edge == FETCH and op.lease is not None and op.lease.claimed
            self.effects.append(Copy(self.sent, *op.edge, pages, root, op.wait_s, urgent))

    def hurry(self, lease: Lease) -> None:
        """A lease has been claimed: its copies from storage are urgent from now on."""
        if lease.ops and (fetches := tuple(op for op in sorted(lease.ops) if self.ops[op].edge == FETCH)):
            self.effects.append(Hurry(fetches))

    def end(self, number: int) -> Op | None:
        """A copy has ended: unpin its sources; its target slots are the caller's. None if there is no such copy."""
        op = self.ops.pop(number, None)
        if op is not None and op.run is not None:
            self._slot_pools.unpin(op.run, op.pinned, tiers=op.edge[:1])
            self._slot_pools.unpin(op.run, op.filling, tiers=op.edge[1:])
        return op

    def reads(self, place: int, slot: int) -> bool:
        """Whether a copy in flight reads a slot of a memory tier."""
        tier, pool = self._slot_pools.tier(place), place % len(self._slot_pools.pools)
        return any(
            page.source == slot and page.pool == pool
            for op in self.ops.values()
            if op.edge[0] is tier
            for page in op.pages
        )
