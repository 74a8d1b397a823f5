"""Which object goes first when room is short: an order over the columns of tables, worked out for many at once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvarve.storage.slabs import Slab
from kvarve.storage.table import STORED, Rows

# Of what was never used again, a share above this goes before everything else (the small queue of S3-FIFO).
_PROBATION = 0.1


@dataclass(frozen=True)
class Coldness:
    """The columns that an order looks at, of all objects among which one is to go."""

    stored: Rows
    used: Rows
    uses: Rows


def lru(among: Coldness) -> tuple[Rows, ...]:
    return (among.used,)


def lfu(among: Coldness) -> tuple[Rows, ...]:
    return (among.used, among.uses)


def s3fifo(among: Coldness) -> tuple[Rows, ...]:
    """What was not used again since it was stored goes first, oldest first, while that is over a tenth of all."""
    once = among.uses == 0
    if once.mean() <= _PROBATION:
        return (among.used,)
    return (np.where(once, among.stored, among.used), (~once).astype(np.int64))


# As for numpy.lexsort: the last key counts most, and the smallest goes first.
ORDERS: Mapping[str, Callable[[Coldness], tuple[Rows, ...]]] = {"lru": lru, "lfu": lfu, "s3fifo": s3fifo}


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


def coldest(slabs: Iterable[Slab], order: str, group: int | None = None) -> list[Victim]:
    """Those who go first among the objects of these slabs (of this group), the very first of them last."""
    places = []
    for slab in slabs:
        chosen = slab.state == STORED
        if group is not None:
            chosen &= slab.group == group
        rows = np.flatnonzero(chosen)
        if len(rows):
            places.append((slab, rows))
    if not places:
        return []
    among = Coldness(
        *(
            np.concatenate([getattr(slab, column)[rows] for slab, rows in places])
            for column in ("stored", "used", "uses")
        )
    )
    keys = ORDERS[order](among)
    first = np.arange(len(among.used))
    # So many that working out the order costs little for each. What is new comes last in LRU, but may come first in
    # other orders: there only so few that what has come since would be no more than a 64th of all.
    count = max(64 if order == "lru" else 1, len(first) // 64)
    if count < len(first):
        first = _smallest(keys, count)
    first = first[np.lexsort([key[first] for key in keys])]
    ends = np.cumsum([len(rows) for _, rows in places])
    found = []
    for place in first[:count][::-1].tolist():
        which = int(np.searchsorted(ends, place, "right"))
        slab, rows = places[which]
        row = int(rows[place - (int(ends[which]) - len(rows))])
        used, uses = int(slab.used[row]), int(slab.uses[row])
        found.append(Victim(slab, row, int(slab.generation[row]), used, uses))
    return found


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


def age_of(slab: Slab) -> float:
    """When its objects were used on average; of a slab that holds nothing, before everything."""
    held = slab.used[slab.state == STORED]
    return float(held.mean()) if len(held) else -1.0


def last_used(slab: Slab) -> int:
    """When the last of its objects was used; of a slab that holds nothing, before everything."""
    held = slab.used[slab.state == STORED]
    return int(held.max()) if len(held) else -1
