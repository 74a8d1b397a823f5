"""Which object is evicted first: an order over the columns of tables, computed for many objects at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvarve.storage.file._slabs import Slab
from kvarve.storage.file._table import STORED, Rows

# Objects never used again are evicted first while they are more than this share (the small queue of S3-FIFO).
_PROBATION = 0.1


def lru(stored: Rows, used: Rows, uses: Rows) -> tuple[Rows, ...]:
    return (used,)


def lfu(stored: Rows, used: Rows, uses: Rows) -> tuple[Rows, ...]:
    return (used, uses)


def s3fifo(stored: Rows, used: Rows, uses: Rows) -> tuple[Rows, ...]:
    """Objects not used since they were stored go first, oldest first, while they are over a tenth of all."""
    once = uses == 0
    if once.mean() <= _PROBATION:
        return (used,)
    return (np.where(once, stored, used), (~once).astype(np.int64))


# As for numpy.lexsort: the last key counts most, and the smallest goes first.
ORDERS: Mapping[str, Callable[[Rows, Rows, Rows], tuple[Rows, ...]]] = {"lru": lru, "lfu": lfu, "s3fifo": s3fifo}


@dataclass(frozen=True)
class Victim:
    """An object to be evicted, as it was when the order was computed. It names its slab, so that a queue of victims
    keeps no file open."""

    slab: tuple[int, int]  # number and identity
    row: int
    generation: int
    used: int
    uses: int

    def place(self, slabs: Mapping[int, Slab]) -> tuple[Slab, int] | None:
        """Where it is; None if it has changed since, as far as this process knows."""
        slab, row = slabs.get(self.slab[0]), self.row
        if slab is None or (slab.number, slab.identity) != self.slab or slab.state[row] != STORED:
            return None
        now = int(slab.generation[row]), int(slab.used[row]), int(slab.uses[row])
        return (slab, row) if now == (self.generation, self.used, self.uses) else None


@dataclass
class EvictionQueue:
    """The next victims, in order. `first_used_ns`: when the first was used; `useful`: one was still current."""

    victims: Iterator[Victim]
    first_used_ns: int | None
    useful: bool = False


def coldest(slabs: Iterable[Slab], order: str, group: int | None = None) -> EvictionQueue:
    """The next victims among the objects of these slabs (of the group of this number).

    No lock is needed: the caller asks for the `Victim.place` of each victim that it pops.
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
        return EvictionQueue(iter(()), None)
    stored, used, uses, generation = (
        np.concatenate([getattr(slab, column)[rows] for slab, rows in places])
        for column in ("stored", "used", "uses", "generation")
    )
    ends = np.cumsum([len(rows) for _, rows in places])
    keys = ORDERS[order](stored, used, uses)
    # Enough to spread the cost of the order over many victims. In LRU new objects go last; in other orders they may go
    # first, so a queue there is no longer than a 64th of all.
    count = max(64 if order == "lru" else 1, int(ends[-1]) // 64)
    first = _smallest(keys, count) if count < ends[-1] else np.arange(int(ends[-1]))
    first = first[np.lexsort([key[first] for key in keys])][:count]
    named = [(slab.number, slab.identity) for slab, _ in places]
    columns = (np.concatenate([rows for _, rows in places]), generation, used, uses)
    victims = map(
        Victim,
        map(named.__getitem__, np.searchsorted(ends, first, "right")),
        *(map(int, column[first]) for column in columns),  # the columns stay arrays
    )
    return EvictionQueue(victims, int(used[first[0]]))


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
