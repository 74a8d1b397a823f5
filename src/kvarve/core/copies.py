"""Copies in flight: what each one moves, whom it is for, and what it pins until it has ended."""

from dataclasses import dataclass
from typing import NamedTuple

from kvarve import boundaries
from kvarve.boundaries import deepest
from kvarve.core.effects import Copy, Effect, Page, Probe
from kvarve.core.lease import Lease
from kvarve.core.shelves import Shelves
from kvarve.core.tree import Run, covering, root_of
from kvarve.model import Tier

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


class Fate(NamedTuple):
    """How a page's journey ended: it arrived, or its bytes were not what they should be, or neither."""

    page: Moving
    good: bool
    bad: bool


@dataclass
class Op:
    """A copy or probe in flight; it owns its target slots and pins both ends until it has ended."""

    edge: Edge
    pages: list[Moving]
    lease: Lease | None = None
    run: Run | None = None
    pinned: int = 0
    leaving: bool = False  # an eviction that waits for its copy
    void: bool = False  # the storage that it was for has been detached


class Copies:
    """Starts copies, and knows all that have not ended."""

    def __init__(self, shelves: Shelves) -> None:
        self.ops: dict[int, Op] = {}
        self.effects: list[Effect] = []  # not taken yet
        self.storage = False  # whether there is one now
        self._shelves = shelves
        self._number = 0

    def send(self, op: Op) -> None:
        """Start a copy or probe of pages of the tree or, where it has no run, of a lease's prompt; what it touches in
        the tree is pinned."""
        self._number += 1
        self.ops[self._number] = op
        if op.lease is not None:
            op.lease.ops.add(self._number)
        if op.run is not None:
            op.pinned = boundaries.of(page.position for page in op.pages)
            op.run = covering(op.run, deepest(op.pinned))
            self._shelves.pin(op.run, op.pinned)
            keys = [covering(op.run, page.position).key(page.position) for page in op.pages]
            root = root_of(op.run).named
        else:
            assert op.lease is not None
            keys = [op.lease.key(page.position) for page in op.pages]
            root = op.lease.root
        pages = tuple(Page(page.pool, key, page.source, page.target) for page, key in zip(op.pages, keys, strict=True))
        if op.edge == PROBE:
            self.effects.append(Probe(self._number, pages, root))
        else:
            self.effects.append(Copy(self._number, *op.edge, pages, root))

    def end(self, number: int) -> Op | None:
        """A copy has ended: its pins are gone, its target slots are the caller's. None if there is no such copy."""
        op = self.ops.pop(number, None)
        if op is not None and op.run is not None:
            self._shelves.unpin(op.run, op.pinned)
        return op

    def reads(self, place: int, slot: int) -> bool:
        """Whether a copy in flight reads a slot of a memory tier."""
        tier, pool = divmod(place, len(self._shelves.pools))
        return any(
            page.source == slot and page.pool == pool
            for op in self.ops.values()
            if op.edge[0] == tier
            for page in op.pages
        )
