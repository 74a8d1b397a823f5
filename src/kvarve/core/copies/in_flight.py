"""Copies in flight: the pages that each one moves, its lease, and its pins until it has ended."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from kvarve.core.copies.effects import Column, Copy, Effect, Ended, Hurry, Pages, Probe, Refusal, Verified
from kvarve.core.lease import Lease
from kvarve.core.slots.residency import Residency
from kvarve.core.tree.tree import Run, chosen_keys, covering, keys_of, root_of
from kvarve.pages.boundaries import deepest, numbered, ones, span, spans, union
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier

GROWTH = 32  # a batch of a copy takes a share of the pages before it: one over this

Edge = tuple[Tier, Tier]

PROBE: Edge = (Tier.STORAGE, Tier.STORAGE)
FETCH: Edge = (Tier.STORAGE, Tier.HOST)
LOAD: Edge = (Tier.HOST, Tier.DEVICE)
BACKUP: Edge = (Tier.DEVICE, Tier.HOST)
STORE: Edge = (Tier.HOST, Tier.STORAGE)


class Part(NamedTuple):
    """The pages of one pool in a copy: their positions (bits), and by ascending position the slots at both ends."""

    pool: int
    positions: int
    sources: Sequence[int]
    targets: Sequence[int]


class PartOutcome(NamedTuple):
    """How the copy of a part ended: the positions that arrived (`good`), and those whose bytes failed their check
    (`bad`)."""

    part: Part
    good: int
    bad: int

    @property
    def lost(self) -> int:
        """The positions that did not arrive."""
        return self.part.positions & ~self.good

    @property
    def failed(self) -> int:
        """The positions of which there are no bytes to check: the copy itself failed."""
        return self.lost & ~self.bad


def note_bad(lease: Lease, pool: int, positions: int) -> None:
    """Pages of a lease's prompt failed their check."""
    lease.bad[pool] |= positions


def note_asked(lease: Lease, pages: Sequence[int]) -> None:
    """Copies of these pages (bits), by pool, are begun for a lease."""
    lease.asked = [asked | bits for asked, bits in zip(lease.asked, pages, strict=True)]


def note_come(lease: Lease, pages: Sequence[int]) -> None:
    """They have come."""
    lease.asked = [asked & ~bits for asked, bits in zip(lease.asked, pages, strict=True)]


@dataclass
class Op:
    """A copy or probe in flight, one part for each pool that it moves pages of. Until it has ended it owns its target
    slots and pins its sources in their tier.

    A load that has been `verified` gives target slots to the tree before it has ended, and pins their pages meanwhile.
    """

    edge: Edge
    parts: Sequence[Part]
    lease: Lease | None = None
    run: Run | None = None
    named: bytes = b""  # of a lease's pages from storage: the keys of its prompt when the copy was sent
    tokens: bytes = b""  # of a fetch: that prompt
    pinned: int = 0
    verified: int | None = None  # of a load: the pages (bits, by number) that are being copied after their check
    given: dict[int, int] = field(default_factory=dict)  # by pool, positions whose target slots it owns no longer
    filling: int = 0  # positions that it pins on the device until they have been copied
    wait_s: float = 0.0  # how long its lease waits for it to begin
    leaving: bool = False  # an eviction that waits for its copy
    onward: bool = False  # a copy to the host of pages that go on to storage
    void: bool = False  # its storage has been detached, or was down
    begun_s: float = inf  # when a worker began it
    joined: list[Lease] = field(default_factory=list)  # of a fetch: other leases that need pages of it too
    refused: Refusal = Refusal.NONE  # of a store that has ended: why the storage did not take pages
    counts: bool = True  # towards the share of the host; not once its storage has been detached

    @property
    def page_count(self) -> int:
        return sum(part.positions.bit_count() for part in self.parts)

    def of_pool(self, pool: int) -> int:
        """The positions of its pages of a pool."""
        return next((part.positions for part in self.parts if part.pool == pool), 0)

    def waiting(self, number: int) -> list[Lease]:
        """The leases that wait for it, which has this number."""
        return [lease for lease in (self.lease, *self.joined) if lease is not None and number in lease.ops]

    def owned(self, part: Part) -> int:
        """The positions of a part whose target slots it still owns."""
        return part.positions & ~self.given.get(part.pool, 0)

    def keys(self, part: Part) -> bytes:
        """The keys of a part's pages, concatenated."""
        return chosen_keys(self.named, part.positions) if self.run is None else keys_of(self.run, part.positions)

    def outcomes(self, event: Verified | Ended) -> list[PartOutcome]:
        """How each part was verified, or ended."""
        found, at = list[PartOutcome](), 0
        for part in self.parts:
            positions = part.positions
            count = positions.bit_count()
            good, bad = event.good >> at & ones(count), event.bad >> at & ones(count)
            found.append(PartOutcome(part, numbered(positions, good), numbered(positions, bad)))
            at += count
        return found


def batches(parts: Sequence[Part], enough: int) -> Iterator[list[Part]]:
    """Cut a copy into several, the first positions first, each as soon as it has `enough` pages. All pages of a
    position stay together."""
    if sum(part.positions.bit_count() for part in parts) <= enough:
        if parts:
            yield list(parts)
        return
    at = [0] * len(parts)
    for start, stop in pairwise([0, *_cuts(parts, enough)]):
        batch = list[Part]()
        for i, part in enumerate(parts):
            here = part.positions & span(start, stop)
            begin, at[i] = at[i], at[i] + here.bit_count()
            if here:
                batch.append(Part(part.pool, here, part.sources[begin : at[i]], part.targets[begin : at[i]]))
        yield batch


def _cuts(parts: Sequence[Part], enough: int) -> list[int]:
    """The positions at which batches of at least `enough` pages stop; the last one takes what is left. Each costs as
    much as some pages, so later ones are larger: what is lost when patience runs out is a share of what has come."""
    steps = Counter[int]()  # of how many parts have pages from here on
    for part in parts:
        for start, stop in spans(part.positions):
            steps[start] += 1
            steps[stop] -= 1
    cuts, before, count, height, size = list[int](), 0, 0, 0, enough
    for here, there in pairwise(sorted(steps)):
        height, at = height + steps[here], here
        while height and at < there:
            width = min(there - at, -(-(size - count) // height))
            at, count = at + width, count + width * height
            if count >= size:
                cuts.append(at)
                before, count = before + count, 0
                size = max(enough, before // GROWTH)
    return cuts if not count else [*cuts, max(steps)]


class Copies:
    """Starts copies, and knows those in flight."""

    def __init__(self, residency: Residency) -> None:
        self._slot_pools, self._residency = residency.slot_pools, residency
        self.ops: dict[int, Op] = {}
        self.effects: list[Effect] = []  # not taken yet
        self.sent = 0  # copies and probes so far; the last one has this number

    def send(self, op: Op) -> None:
        """Start a copy or probe of pages of the tree or, if it has no run, of a lease's prompt; source pages in the
        tree are pinned."""
        self.sent += 1
        self.ops[self.sent] = op
        if op.lease is not None and op.edge != BACKUP:  # no request waits for pages that an engine saves
            op.lease.ops.add(self.sent)
        if op.run is not None:
            op.pinned = union(part.positions for part in op.parts)
            op.run = covering(op.run, deepest(op.pinned))
            self._residency.pin(op.run, op.pinned, tiers=op.edge[:1])  # its target slots are its own
            root = root_of(op.run).named
        else:
            assert op.lease is not None
            op.named, root = op.lease.keys, op.lease.root
        pages = Pages(tuple(self._column(op, part) for part in op.parts))
        if op.edge == PROBE:
            self.effects.append(Probe(self.sent, pages, root, op.wait_s))
        else:
            urgent = op.edge == FETCH and op.lease is not None and op.lease.claimed
            self.effects.append(Copy(self.sent, *op.edge, pages, root, op.wait_s, urgent))

    def _column(self, op: Op, part: Part) -> Column:
        """The pages of a part, as an effect has them."""
        keys, sources, targets = op.keys(part), tuple(part.sources), tuple(part.targets)
        assert len(keys) == len(sources) * KEY_BYTES == len(targets) * KEY_BYTES, "a slot at both ends for each page"
        return Column(part.pool, keys, sources, targets)

    def join(self, lease: Lease, number: int) -> None:
        """A lease waits for a fetch of another one too."""
        op = self.ops[number]
        if lease is not op.lease and lease not in op.joined:
            op.joined.append(lease)
        lease.ops.add(number)

    def leave(self, lease: Lease, number: int) -> None:
        """A lease waits no longer for a copy, which ends without it if it is in flight."""
        lease.ops.discard(number)

    def leave_all(self, lease: Lease) -> None:
        lease.ops.clear()

    def hurry(self, lease: Lease) -> None:
        """A lease has been claimed: its copies from storage are urgent from now on."""
        if lease.ops and (fetches := tuple(op for op in sorted(lease.ops) if self.ops[op].edge == FETCH)):
            self.effects.append(Hurry(fetches))

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self.effects = self.effects, []
        return effects

    def leaving(self) -> list[Op]:
        """The copies in flight that evictions wait for."""
        return [op for op in self.ops.values() if op.leaving and not op.void]

    def fill(self, op: Op) -> None:
        """A verified load has given target slots to the tree, whose pages it pins until it has ended."""
        if op.given and op.run is not None:
            op.filling = union(op.given.values())
            self._residency.pin(op.run, op.filling, tiers=op.edge[1:])

    def end(self, number: int) -> Op | None:
        """A copy has ended: unpin its sources; its target slots are the caller's. None if there is no such copy."""
        op = self.ops.pop(number, None)
        if op is not None and op.run is not None:
            self._residency.unpin(op.run, op.pinned, tiers=op.edge[:1])
            self._residency.unpin(op.run, op.filling, tiers=op.edge[1:])
        return op

    def reads(self, place: int, slot: int) -> bool:
        """Whether a copy in flight reads a slot of a memory tier."""
        tier, pool = self._slot_pools.tier(place), place % len(self._slot_pools.pools)
        return any(
            part.pool == pool and slot in part.sources
            for op in self.ops.values()
            if op.edge[0] is tier
            for part in op.parts
        )
