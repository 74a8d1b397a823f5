"""How tensor-parallel ranks stay one cache: they agree on the inputs of their cores, which then decide alike.

Every rank runs the same requests in the same order. Ranks differ in when a copy ends and whether it succeeds, in their
clocks, in whether storage answers, and in when a change of storage is requested; so they agree on these once per
scheduler turn.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvarve.core.effects import Began, Ended, Event, Verified, agreed


class Proposal(NamedTuple):
    """A change of the storage that a rank proposes, or (not `ready`) declines."""

    what: str  # the same text on all ranks means the same change
    ready: bool = True


class AgreedStep(NamedTuple):
    """The inputs of one step on all ranks: the events that have happened on every rank, in one order; one time; whether
    the storage answers on all ranks; and whether the change that they propose is made now.

    `granted` is None while some rank proposes nothing. A rank may withdraw its proposal at any time: a change is
    granted only in a step in which all ranks propose it.
    """

    events: list[Event]
    now: float
    up: bool = True
    granted: bool | None = None
    said: bytes = b""  # by rank 0 to all ranks, for this step


class Agreement(Protocol):
    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        ...

    def agree(
        self,
        events: Iterable[Event],
        now: float,
        up: bool = True,
        proposal: Proposal | None = None,
        *,
        waiting: bool = True,
        says: bytes = b"",
    ) -> AgreedStep:
        """Tell the other ranks this one's events, time, storage state and proposal. Every rank has to call it.

        `waiting`: whether anything is in flight, by what all ranks know alike; if not, none waits for another's events.
        `says`: of rank 0, for all ranks.
        """
        ...

    def happened(self, event: Event) -> bool:
        """An event of this rank, the moment that it happens, from any thread. Whether the other ranks are told now; if
        not, it has to be among those of a later `agree`."""
        ...

    def wait(self, timeout_s: float, woken: Callable[[], bool]) -> bool:
        """Rank 0 sleeps between two turns, while a copy is in flight, until an event has happened on every rank or
        `woken` returns True, which it calls again after each `wake`. False after `timeout_s`."""
        ...

    def wake(self) -> None:
        """Have rank 0's `wait` call `woken` again, from any thread."""
        ...

    def note(self, decided: bytes) -> None:
        """Something that this rank's core has decided, which all ranks have to decide alike."""
        ...

    def fail(self, why: str) -> str:
        """This rank cannot go on: the others are told; which rank is at fault, and why."""
        ...


def granted(proposals: Sequence[Proposal | None]) -> bool | None:
    """Whether a change is made: None until every rank has a proposal, then whether all are equal and ready."""
    if None in proposals:
        return None
    return all(proposal is not None and proposal.ready and proposal == proposals[0] for proposal in proposals)


class Votes:
    """The events of all ranks, until each has happened on every rank; the part of an agreement without a network.

    A copy has begun, been verified or ended when it has on all ranks; a page is good if it is good on all, bad if it is
    bad on any.
    """

    def __init__(self, ranks: int) -> None:
        # By rank: copies and probes not yet ended on all ranks.
        self._begun: list[set[int]] = [set() for _ in range(ranks)]
        self._verified: list[dict[int, Verified]] = [{} for _ in range(ranks)]
        self._ended: list[dict[int, Ended]] = [{} for _ in range(ranks)]
        self._told: set[int] = set()  # copies begun on all ranks, of which the cores know

    def merge(self, news: Sequence[Iterable[Event]]) -> list[Event]:
        """Take the new events of each rank; returns those that have happened on all now, in one order."""
        for begun, verified, ended, events in zip(self._begun, self._verified, self._ended, news, strict=True):
            for event in events:
                begun.add(event.op)
                if isinstance(event, Verified):
                    verified[event.op] = event
                elif isinstance(event, Ended):
                    ended[event.op] = event
        over = sorted(set.intersection(*(set(ended) for ended in self._ended)))
        ends = [agreed([ended.pop(op) for ended in self._ended]) for op in over]
        for begun, verified in zip(self._begun, self._verified, strict=True):
            begun.difference_update(over)
            for op in over:
                verified.pop(op, None)
        checked = sorted(set.intersection(*(set(verified) for verified in self._verified)))
        checks = [agreed([verified.pop(op) for verified in self._verified]) for op in checked]
        everywhere = set.intersection(*self._begun)
        begins = [Began(op) for op in sorted(everywhere - self._told)]
        self._told = everywhere
        return [*begins, *checks, *ends]


class Alone:
    """The agreement of a single rank."""

    ranks = 1

    def agree(
        self,
        events: Iterable[Event],
        now: float,
        up: bool = True,
        proposal: Proposal | None = None,
        *,
        waiting: bool = True,
        says: bytes = b"",
    ) -> AgreedStep:
        return AgreedStep([*events], now, up, granted([proposal]), says)

    def happened(self, event: Event) -> bool:
        return False

    def wait(self, timeout_s: float, woken: Callable[[], bool]) -> bool:
        return True

    def wake(self) -> None:
        pass

    def note(self, decided: bytes) -> None:
        pass

    def fail(self, why: str) -> str:
        return why
