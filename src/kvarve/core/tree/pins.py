"""How many pins each position of a run has: one small counter per position, updated for a set of positions at once.

Bit i of plane j is bit j of position i's counter, so adding a set of positions is a carry that ripples through a few
integers, splitting a run shifts the planes, and "is any position pinned" is one `or`. Nearly all runs have no pins and
share one empty tuple.
"""

from kvarve.pages.boundaries import ones


class Pins:
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
