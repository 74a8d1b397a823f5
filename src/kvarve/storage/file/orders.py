"""Which object is evicted first: an order over the columns of tables, computed for many objects at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvarve.storage.file.slabs import Slab
from kvarve.storage.file.table import STORED, Rows

# Objects never used again are evicted first while they are more than this share (the small queue of S3-FIFO).
_PROBATION = 0.1


class Candidates:
    """The columns by which an order compares objects, of all that may be evicted."""

    def __init__(self, places: Sequence[tuple[Slab, Rows]]) -> None:
        self._places = places

    @cached_property
    def stored(self) -> Rows:
        return np.concatenate([slab.stored[rows] for slab, rows in self._places])

    @cached_property
    def used(self) -> Rows:
        return np.concatenate([slab.used[rows] for slab, rows in self._places])

    @cached_property
    def uses(self) -> Rows:
        return np.concatenate([slab.uses[rows] for slab, rows in self._places])


def lru(among: Candidates) -> tuple[Rows, ...]:
    return (among.used,)


def lfu(among: Candidates) -> tuple[Rows, ...]:
    return (among.used, among.uses)


def s3fifo(among: Candidates) -> tuple[Rows, ...]:
    """Objects not used since they were stored go first, oldest first, while they are over a tenth of all."""
    once = among.uses == 0
    if once.mean() <= _PROBATION:
        return (among.used,)
    return (np.where(once, among.stored, among.used), (~once).astype(np.int64))


# As for numpy.lexsort: the last key counts most, and the smallest goes first.
ORDERS: Mapping[str, Callable[[Candidates], tuple[Rows, ...]]] = {"lru": lru, "lfu": lfu, "s3fifo": s3fifo}


@dataclass(frozen=True)
class Victim:
    """An object to be evicted, as it was when the order was computed."""

    slab: Slab
    row: int
    generation: int
    used: int
    uses: int

    def is_current(self, slabs: Mapping[int, Slab]) -> bool:
        """Whether it has not changed since, as far as this process knows."""
        slab, row = self.slab, self.row
        return (
            slabs.get(slab.number) is slab
            and slab.state[row] == STORED
            and slab.generation[row] == self.generation
            and slab.used[row] == self.used
            and slab.uses[row] == self.uses
        )


class EvictionQueue:
    """The next victims, in order; as columns, as there may be a hundred thousand. `useful`: one was still current."""

    def __init__(self, slabs: Sequence[Slab], which: Rows, rows: Rows) -> None:
        self._slabs, self._which, self._rows = slabs, which, rows
        self._generation, self._used, self._uses = (np.zeros(len(rows), np.int64) for _ in range(3))
        for number, slab in enumerate(slabs):
            here = which == number
            at = rows[here]
            self._generation[here], self._used[here], self._uses[here] = (
                slab.generation[at],
                slab.used[at],
                slab.uses[at],
            )
        self._next = 0
        self.useful = False

    def pop(self) -> Victim | None:
        """The next victim; None if there are no more."""
        at = self._next
        if at == len(self._rows):
            return None
        self._next += 1
        return Victim(
            self._slabs[self._which[at]],
            int(self._rows[at]),
            int(self._generation[at]),
            int(self._used[at]),
            int(self._uses[at]),
        )

    def first_used_ns(self) -> int | None:
        """When the first victim was used."""
        return int(self._used[0]) if len(self._used) else None


def coldest(slabs: Iterable[Slab], order: str, group: int | None = None) -> EvictionQueue:
    """The next victims among the objects of these slabs (of the group of this number).

    No lock is needed: the caller checks `Victim.is_current` of each victim that it pops.
    """
    places = []
    for slab in slabs:
        chosen = slab.state == STORED
        if group is not None:
            chosen &= slab.group == group
        rows = np.flatnonzero(chosen)
        if len(rows):
            places.append((slab, rows))
    if not places:
        return EvictionQueue([], np.zeros(0, np.int64), np.zeros(0, np.int64))
    ends = np.cumsum([len(rows) for _, rows in places])
    keys = ORDERS[order](Candidates(places))
    # Enough to spread the cost of the order over many victims. In LRU new objects go last; in other orders they may go
    # first, so a queue there is no longer than a 64th of all.
    count = max(64 if order == "lru" else 1, int(ends[-1]) // 64)
    first = _smallest(keys, count) if count < ends[-1] else np.arange(int(ends[-1]))
    first = first[np.lexsort([key[first] for key in keys])][:count]
    which = np.searchsorted(ends, first, "right")
    rows = np.concatenate([rows for _, rows in places])[first]
    return EvictionQueue([slab for slab, _ in places], which, rows)


def _smallest(keys: tuple[Rows, ...], count: int) -> Rows:
    """The indices of the `count` smallest, and of those equal to the last of them in the most significant key."""
    most = keys[-1]
    bound = np.partition(most, count)[count]
    below = np.flatnonzero(most < bound)
    equal = np.flatnonzero(most == bound)
    if len(keys) > 1 and len(equal) > count:
        inner = keys[-2][equal]
        equal = equal[np.argpartition(inner, count)[:count]]
    return np.concatenate([below, equal])


@dataclass(frozen=True)
class LastUse:
    """When the objects of a slab were used, on average and last, in ns of the store's time; -1 if there are none."""

    mean_ns: int = -1
    last_ns: int = -1

    @staticmethod
    def of(used: Rows) -> "LastUse":
        if not len(used):
            return LastUse()
        first = int(used.min())  # a float of some 10**18 is a multiple of 256
        return LastUse(first + int((used - first).mean()), int(used.max()))
