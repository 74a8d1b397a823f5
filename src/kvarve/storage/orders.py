"""Which object goes first when room is short: an order over the columns of tables, worked out for many at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvarve.storage.slabs import Slab
from kvarve.storage.table import STORED, Rows

# Of what was never used again, a share above this goes before everything else (the small queue of S3-FIFO).
_PROBATION = 0.1


class Candidates:
    """The columns that an order looks at, of all objects among which one is to go."""

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
    """What was not used again since it was stored goes first, oldest first, while that is over a tenth of all."""
    once = among.uses == 0
    if once.mean() <= _PROBATION:
        return (among.used,)
    return (np.where(once, among.stored, among.used), (~once).astype(np.int64))


# As for numpy.lexsort: the last key counts most, and the smallest goes first.
ORDERS: Mapping[str, Callable[[Candidates], tuple[Rows, ...]]] = {"lru": lru, "lfu": lfu, "s3fifo": s3fifo}


@dataclass(frozen=True)
class Victim:
    """An object whose turn it was to go when the order was worked out."""

    slab: Slab
    row: int
    generation: int
    used: int
    uses: int

    def stands(self, slabs: Mapping[int, Slab]) -> bool:
        """Whether nothing has happened to it since, as far as this process knows."""
        slab, row = self.slab, self.row
        return (
            slabs.get(slab.number) is slab
            and slab.state[row] == STORED
            and slab.generation[row] == self.generation
            and slab.used[row] == self.used
            and slab.uses[row] == self.uses
        )


class EvictionQueue:
    """Those who go first, in their order. Columns, as there may be a hundred thousand of them. `useful`: whether one of
    them has gone."""

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
        """The next of them."""
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
        """When the very first of them was used."""
        return int(self._used[0]) if len(self._used) else None


def coldest(slabs: Iterable[Slab], order: str, group: int | None = None) -> EvictionQueue:
    """Those who go first among the objects of these slabs (of a group of this number).

    Nobody need keep others from the slabs meanwhile: whoever takes one of the line looks whether it still stands.
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
    # So many that working out the order costs little for each. What is new comes last in LRU, but may come first in
    # other orders: there only so few that what has come since would be no more than a 64th of all.
    count = max(64 if order == "lru" else 1, int(ends[-1]) // 64)
    first = _smallest(keys, count) if count < ends[-1] else np.arange(int(ends[-1]))
    first = first[np.lexsort([key[first] for key in keys])][:count]
    which = np.searchsorted(ends, first, "right")
    rows = np.concatenate([rows for _, rows in places])[first]
    return EvictionQueue([slab for slab, _ in places], which, rows)


def _smallest(keys: tuple[Rows, ...], count: int) -> Rows:
    """The places of the `count` smallest, and of those that equal the last of them in the key that counts most."""
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
    """When the objects of a slab were used, on average and the last of them, in ns of the store's time; before
    everything if there are none."""

    mean_ns: int = -1
    last_ns: int = -1

    @staticmethod
    def of(used: Rows) -> "LastUse":
        if not len(used):
            return LastUse()
        first = int(used.min())  # a float of some 10**18 is a multiple of 256
        return LastUse(first + int((used - first).mean()), int(used.max()))
