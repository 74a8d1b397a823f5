"""Who goes next: the order of those who wait, and what a turn computes. Plain decisions; no tensor, thread or cache."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

LOOK_AHEAD = 16  # so many of those who wait longest are looked at for what they would find in memory
OVERTAKEN = 8  # nobody is overtaken more often than that


class Line(Generic[T]):
    """Those who wait. Who finds more in memory may go first, but nobody is overtaken for ever."""

    def __init__(self) -> None:
        self._waiting: list[T] = []
        self._overtaken: dict[int, int] = {}  # by id: how often somebody who came later went first

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, who: T) -> None:
        self._waiting.append(who)

    def rejoin(self, who: T) -> None:
        """Who had its turn already and lost it comes before all others, but for those who lost theirs before."""
        at = next((at for at, each in enumerate(self._waiting) if not self._due(each)), len(self._waiting))
        self._waiting.insert(at, who)
        self._overtaken[id(who)] = OVERTAKEN

    def leave(self, who: T) -> None:
        """Somebody goes away without having had its turn."""
        self._waiting.remove(who)
        self._overtaken.pop(id(who), None)

    def go(self, who: T) -> None:
        """Somebody's turn has come."""
        for each in self._waiting[: self._waiting.index(who)]:
            self._overtaken[id(each)] = self._overtaken.get(id(each), 0) + 1
        self.leave(who)

    def order(self, found: Callable[[T], int]) -> list[T]:
        """All who wait, whose turn it is first: who has been overtaken often enough, then who has most in memory."""
        due = [each for each in self._waiting if self._due(each)]
        rest = [each for each in self._waiting if not self._due(each)]
        near = sorted(rest[:LOOK_AHEAD], key=found, reverse=True) if len(rest) > 1 else rest
        return due + near + rest[LOOK_AHEAD:]

    def _due(self, who: T) -> bool:
        return self._overtaken.get(id(who), 0) >= OVERTAKEN


def within(budget: int, pieces: Iterable[tuple[T, int]]) -> Iterator[T]:
    """The first pieces of work (what, tokens) that fit into a budget together, and at least one."""
    first = True
    for what, tokens in pieces:
        if tokens > budget and not first:
            return
        yield what
        first, budget = False, budget - tokens
