"""The prefix tree: runs of pages that always came together, with the state of each position in them.

A run is split only here. All state of a position is in arrays or bit sets indexed by the position within its run, so
splitting is slicing. The tree knows tokens, keys, slots, residency and pins; it does not know leases, copies or
policies.
"""

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvarve.pages import boundaries
from kvarve.pages.boundaries import ones
from kvarve.pages.keys import HEAD_BYTES, KEY_BYTES, TOKEN_BYTES, names
from kvarve.pages.pools import MEMORY_TIERS

NOWHERE = -1  # no slot
UNTRACED = array("Q")  # all runs without computed hashes share it; a run replaces its array, and never changes it


class Pins:
    """How many pins each position of a run has: one small counter per position, updated for a set of positions at once.

    Bit i of plane j is bit j of position i's counter, so adding a set of positions is a carry that ripples through a
    few integers, splitting a run shifts the planes, and "is any position pinned" is one `or`. Nearly all runs have no
    pins and share one empty tuple.
    """

    __slots__ = ("_planes",)

    def __init__(self, planes: tuple[int, ...] = ()) -> None:
        self._planes = planes

    def add(self, positions: int) -> None:
        """Pin each of the positions once more."""
        planes = []
        for plane in self._planes:
            planes.append(plane ^ positions)
            positions &= plane
        self._planes = (*planes, positions) if positions else tuple(planes)

    def remove(self, positions: int) -> None:
        """Unpin each of the positions once; all of them must be pinned."""
        assert positions & ~self.held() == 0, "a position was unpinned more often than it was pinned"
        planes = []
        for plane in self._planes:
            planes.append(plane ^ positions)
            positions &= ~plane
        self._planes = _stripped(planes)

    def held(self) -> int:
        """The set of pinned positions."""
        held = 0
        for plane in self._planes:
            held |= plane
        return held

    def count(self, position: int) -> int:
        return sum((plane >> position & 1) << j for j, plane in enumerate(self._planes))

    def cut(self, at: int) -> "Pins":
        """Keep the positions from `at` on, renumbered from 0; return the counters of those before it."""
        low = Pins(_stripped([plane & ones(at) for plane in self._planes]))
        self._planes = _stripped([plane >> at for plane in self._planes])
        return low


def _stripped(planes: list[int]) -> tuple[int, ...]:
    """Planes without empty ones at the end."""
    while planes and not planes[-1]:
        planes.pop()
    return tuple(planes)


class Run:
    """Pages `first` to `end` of every prompt that passes here. A slot pool's index is its *place* (`SlotPools.place`).

    Sets of positions are local: bit i is position `first + i`.
    """

    __slots__ = {  # noqa: RUF023  identity, residency, pins, use
        "parent": "the run that this one goes on from; None for the root",
        "children": "the runs that go on from here, by the packed tokens of their first page",
        "first": "how many pages come before this run",
        "tokens": "its packed tokens",
        "named": "the keys of its first pages, as far as they have been computed",
        "heads": "what each page began with before it was bound to its chunk, where residency is told; else none",
        "traced": "64-bit hashes of all tokens up to the end of its first pages, as far as they have been computed",
        "width": "bytes of packed tokens in a page",
        "here": "[place] positions that are resident there",
        "slots": "[place] the slot, by position; None where no page is resident",
        "bad": "[place] positions whose bytes there failed their check: no hit, and no source of a copy",
        "coming": "[place, and each pool in storage] positions of which a backup to there is in flight",
        "stored": "[pool] positions known to be in storage",
        "ends": "positions after which a prompt ended, or a request has resumed",
        "passing": "[pool] positions kept while there is room, on the device alone: no prompt is known to resume there",
        "backed_up_since_use": "[pool] positions backed up to the host since the run's last use",
        "inside": "bit per place: it may have windows or states there that no likely resumption reads",
        "kids": "[place] how many child runs begin with a page there, which rests on this run's last position",
        "pins": "[memory tier, by its number] by position: how many leases and copies need all its pages there",
        "prefix_pins": "the same of leases that need its chains there, as the prefix of their pages",
        "followed": "whether a page has ever followed its last one",
        "used": "when it was used last, in ticks of the core",
        "used_s": "the same in seconds, for metrics alone",
        "came_s": "[place] when the first page came there, in seconds, for metrics alone",
        "uses": "how many requests have used it",
        "priority": "the highest priority of those requests",
        "failed_backups": "backups of it that failed since it was used last",
        "wanted": "whether an operator wants it in the attached storage, whatever the write policy",
        "queued": "bit per place: it stands in that slot pool's eviction order; then, of spare pages in that pool's; "
        "then the same in the orders of its salt",
    }

    def __init__(
        self,
        parent: "Run | None",
        first: int,
        tokens: bytes,
        named: bytes,
        pools: int,
        page_tokens: int,
        tiers: int = len(MEMORY_TIERS),
    ):
        """`tiers`: how many memory tiers there are."""
        self.parent = parent
        self.first = first
        self.tokens = tokens
        self.named = named
        self.heads = b""
        self.traced = UNTRACED
        self.width = page_tokens * TOKEN_BYTES
        self.children: dict[bytes, Run] = {}
        places = tiers * pools
        self.here = [0] * places
        self.bad = [0] * places
        self.coming = [0] * (places + pools)
        self.kids = [0] * places
        self.slots: list[array[int] | None] = [None] * places
        self.stored = [0] * pools
        self.passing = [0] * pools
        self.backed_up_since_use = [0] * pools
        self.pins = tuple([Pins() for _ in range(tiers)])
        self.prefix_pins = tuple([Pins() for _ in range(tiers)])
        self.ends = self.inside = self.used = self.uses = self.priority = self.failed_backups = self.queued = 0
        self.wanted = self.followed = False
        self.used_s = 0.0
        self.came_s = [0.0] * places

    @property
    def pages(self) -> int:
        return len(self.tokens) // self.width

    @property
    def end(self) -> int:
        return self.first + len(self.tokens) // self.width

    @property
    def head_bytes(self) -> int:
        """Of `heads`, for each page."""
        return min(HEAD_BYTES, self.width)

    def held(self, tier: int) -> int:
        """The local positions whose pages a lease or a copy needs in a memory tier."""
        return self.pins[tier].held() | self.prefix_pins[tier].held()

    def pinned(self) -> int:
        """The local positions that a lease or a copy needs in any tier: they stay in the tree."""
        held = 0
        for pins in (*self.pins, *self.prefix_pins):
            held |= pins.held()
        return held

    @property
    def keys(self) -> bytes:
        """Its keys, concatenated; each is computed when it is first needed."""
        unnamed, run = [], self
        while len(run.named) < run.pages * KEY_BYTES:
            assert run.parent is not None
            unnamed.append(run)
            run = run.parent
        for run in reversed(unnamed):
            assert run.parent is not None
            run.named = names(run.parent.named[-KEY_BYTES:], run.named, run.tokens, run.width // TOKEN_BYTES)
        return self.named

    @property
    def traces(self) -> "array[int]":
        """For each of its pages a hash of the root key and all tokens up to the page's end, the same on all ranks."""
        untraced, run = [], self
        while run.parent is not None and len(run.traced) < run.pages:
            untraced.append(run)
            run = run.parent
        for run in reversed(untraced):
            assert run.parent is not None
            before = run.traced or run.parent.traced
            trace, more = before[-1] if before else xxh3_64_intdigest(run.parent.named), array("Q")
            for at in range(len(run.traced) * run.width, len(run.tokens), run.width):
                trace = xxh3_64_intdigest(run.tokens[at : at + run.width], trace)
                more.append(trace)
            run.traced = run.traced + more
        return self.traced

    def key(self, position: int) -> bytes:
        at = (position - self.first) * KEY_BYTES
        return (self.named if at < len(self.named) else self.keys)[at : at + KEY_BYTES]

    def put(self, place: int, local: int, slots: Sequence[int]) -> None:
        """Make local positions (bits) resident in these slots, in order; none of them may be so."""
        assert not local & self.here[place], "two slots for one page"
        assert local.bit_count() == len(slots), "a slot for each page"
        assert local.bit_length() <= self.pages, "a page behind the run's end"
        table, at = self.slots[place], 0
        if table is None:
            table = self.slots[place] = array("i")
        for start, stop in boundaries.spans(local):
            if len(table) < start:
                table.extend([NOWHERE] * (start - len(table)))
            if len(table) == start:
                table.extend(slots[at : at + stop - start])
            elif stop - start == 1:
                table[start] = slots[at]
            else:
                table[start:stop] = array("i", slots[at : at + stop - start])
            at += stop - start
        self.here[place] |= local
        if local & 1 and self.parent is not None:
            self.parent.kids[place] += 1

    def take(self, place: int, position: int) -> int:
        """End the residency of a position in a slot pool and return its slot."""
        local = position - self.first
        table = self.slots[place]
        assert table is not None
        slot, table[local] = table[local], NOWHERE
        assert slot != NOWHERE, "no slot to give back"
        self.here[place] &= ~(1 << local)
        self.bad[place] &= ~(1 << local)
        if local == 0 and self.parent is not None:
            self.parent.kids[place] -= 1
        if not self.here[place]:
            self.slots[place] = None
        return slot

    def take_tail(self, place: int, local: int) -> Sequence[int]:
        """End the residency in a slot pool of all positions from a local one on, which have no gap; their slots."""
        table, here = self.slots[place], self.here[place]
        assert table is not None
        slots = table[local : here.bit_length()]
        del table[local:]
        low = boundaries.ones(local)
        self.here[place] = here & low
        self.bad[place] &= low
        if local == 0:
            self.slots[place] = None
            if self.parent is not None:
                self.parent.kids[place] -= 1
        return slots

    def slots_at(self, place: int, local: int) -> list[int]:
        """The slots of local positions (bits) that are resident, in order."""
        table, found = self.slots[place] or (), list[int]()
        for start, stop in boundaries.spans(local):
            found += table[start:stop]
        assert len(found) == local.bit_count() and NOWHERE not in found, "no such page here"
        return found

    def slot(self, place: int, position: int) -> int:
        table = self.slots[place]
        assert table is not None
        slot = table[position - self.first]
        assert slot != NOWHERE, "no such page here"
        return slot

    def append(self, tokens: bytes, named: bytes, heads: bytes = b"", followed: bool = False) -> None:
        """Lengthen the run; it must be a leaf, since children rest on its last position."""
        assert not self.children
        if len(self.named) == self.pages * KEY_BYTES:
            self.named += named
        self.tokens += tokens
        self.heads += heads
        self.followed = followed

    def add_child(self, tokens: bytes, named: bytes, heads: bytes, followed: bool) -> "Run":
        """A new run that goes on from this one's end."""
        pools, tiers = len(self.stored), len(self.pins)
        child = Run(self, self.end, tokens, named, pools, self.width // TOKEN_BYTES, tiers)
        self.children[tokens[: self.width]], child.heads, child.followed = child, heads, followed
        return child

    def trim(self, end: int) -> None:
        """Drop the positions from `end` on, which have no pages, pins or children."""
        keep = end - self.first
        self.tokens = self.tokens[: keep * self.width]
        self.named = self.named[: keep * KEY_BYTES]
        self.heads = self.heads[: keep * self.head_bytes]
        self.traced = self.traced[:keep] or UNTRACED
        mask = boundaries.ones(keep)
        self.ends &= mask
        self.passing = [bits & mask for bits in self.passing]
        self.followed = True
        self.stored = [bits & mask for bits in self.stored]
        self.backed_up_since_use = [bits & mask for bits in self.backed_up_since_use]
        for place, table in enumerate(self.slots):
            if table is not None:
                self.slots[place] = table[:keep]

    def split(self, at: int) -> "Run":
        """Cut before position `at`: a new run takes the front, this one keeps the tail. Returns the front.

        A reference to this run still leads to every position, by walking up from it (see `covering`).
        """
        cut = at - self.first
        assert 0 < cut < self.pages and self.parent is not None
        low = boundaries.ones(cut)
        front = Run(self.parent, self.first, self.tokens[: cut * self.width], self.named[: cut * KEY_BYTES], 0, 0)
        front.width = self.width
        front.heads, self.heads = self.heads[: cut * self.head_bytes], self.heads[cut * self.head_bytes :]
        front.traced, self.traced = self.traced[:cut] or UNTRACED, self.traced[cut:] or UNTRACED
        for name in ("used", "used_s", "uses", "priority", "failed_backups", "wanted", "inside"):
            setattr(front, name, getattr(self, name))
        front.came_s, front.followed = self.came_s.copy(), True
        front.ends, self.ends = self.ends & low, self.ends >> cut
        for name in ("here", "bad", "coming", "passing", "stored", "backed_up_since_use"):
            both = getattr(self, name)
            setattr(front, name, [bits & low for bits in both])
            setattr(self, name, [bits >> cut for bits in both])
        front.slots = [table and table[:cut] for table in self.slots]
        self.slots = [table and table[cut:] for table in self.slots]
        for run in (front, self):
            run.slots = [table if run.here[place] else None for place, table in enumerate(run.slots)]
        front.pins = tuple(pins.cut(cut) for pins in self.pins)
        front.prefix_pins = tuple(pins.cut(cut) for pins in self.prefix_pins)
        front.kids = [bits & 1 for bits in self.here]
        self.parent.children[front.tokens[: self.width]] = front
        self.tokens, self.named = self.tokens[cut * self.width :], self.named[cut * KEY_BYTES :]
        front.children = {self.tokens[: self.width]: self}
        self.parent, self.first = front, at
        return front

    def detach(self) -> None:
        """Take an empty leaf out of the tree. It keeps its parent, so references to it still lead to every position."""
        assert self.parent is not None and not self.children
        del self.parent.children[self.tokens[: self.width]]
        self.parent.followed = True
        self.tokens = self.named = self.heads = b""
        self.traced = UNTRACED


class Root(Run):
    """The empty run above all prompts that share a root key, which is its name."""

    __slots__ = ()

    def __init__(self, name: bytes, pools: int, page_tokens: int, tiers: int = len(MEMORY_TIERS)) -> None:
        super().__init__(None, 0, b"", name, pools, page_tokens, tiers)


def covering(run: Run, position: int) -> Run:
    """The run that holds `position`, for a position at or above the end of `run` on the way to the root."""
    while position < run.first:
        assert run.parent is not None
        run = run.parent
    assert position < run.end
    return run


def root_of(run: Run) -> Run:
    """The root above a run; its name is its root key."""
    while run.parent is not None:
        run = run.parent
    return run


def upward(run: Run, positions: int) -> list[tuple[Run, int]]:
    """The runs from `run` towards the root that hold any of `positions`, each with its share as local positions."""
    shares: list[tuple[Run, int]] = []
    at: Run | None = run
    while positions:
        assert at is not None
        if share := positions >> at.first:
            shares.append((at, share))
            positions &= (1 << at.first) - 1
        at = at.parent
    return shares


def downward(run: Run, positions: int, values: Sequence[int]) -> list[tuple[Run, int, Sequence[int]]]:
    """The same from the root towards `run`; of `values`, one for each position in order, each run with its share."""
    shares = upward(run, positions)
    if len(shares) == 1:
        return [(*shares[0], values)]
    found, at = [], 0
    for each, local in reversed(shares):
        count = local.bit_count()
        found.append((each, local, values[at : at + count]))
        at += count
    return found


def slots_of(run: Run, place: int, positions: int) -> list[int]:
    """The slots of resident positions at or above the end of `run`, in order."""
    return [slot for each, local in reversed(upward(run, positions)) for slot in each.slots_at(place, local)]


def keys_of(run: Run, positions: int) -> bytes:
    """The keys of positions at or above the end of `run`, in order, concatenated."""
    found = list[bytes]()
    for each, local in reversed(upward(run, positions)):
        named = each.named if local.bit_length() * KEY_BYTES <= len(each.named) else each.keys
        found.append(chosen_keys(named, local))
    return b"".join(found)


def chosen_keys(named: bytes, positions: int) -> bytes:
    """Of concatenated keys those of these positions, concatenated."""
    return b"".join(named[start * KEY_BYTES : stop * KEY_BYTES] for start, stop in boundaries.spans(positions))


def same_pages(left: bytes, right: bytes, start: int, pages: int, width: int) -> int:
    """How many leading pages of `left` are equal to those in `right` from byte `start` on; at most `pages`."""
    low, high = 0, min(pages, (len(right) - start) // width)
    while low < high:
        middle = (low + high + 1) // 2
        if right.startswith(left[low * width : middle * width], start + low * width):
            low = middle
        else:
            high = middle - 1
    return low


def walk(root: Run, tokens: bytes) -> tuple[list[Run], int]:
    """Follow packed `tokens` down from a root; changes nothing.

    Returns the runs passed and how many pages are known; if that is less than the end of the last run, the tokens
    leave the tree inside it.
    """
    width, run = root.width, root
    passed: list[Run] = []
    at, in_tokens = 0, tokens.startswith
    while True:
        child = run.children.get(tokens[at : at + width])
        if child is None:
            return passed, at // width
        passed.append(child)
        theirs = child.tokens
        if not in_tokens(theirs, at):
            return passed, at // width + same_pages(theirs, tokens, at, child.pages, width)
        at += len(theirs)
        run = child
