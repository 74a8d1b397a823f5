"""How tensor-parallel ranks stay one cache: they agree on the inputs of their cores, which then decide alike.

Every rank runs the same requests in the same order. Ranks differ in when a copy ends and whether it succeeds, in their
clocks, in whether storage answers, and in when a change of storage is requested; so they agree on these once per
scheduler turn.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvarve.core.copies.effects import Began, Ended, Event, Verified, agreed


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


class Agreement:
    """The agreement of a single rank, and what that of several has to do."""

    ranks = 1  # how many there are

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
        return AgreedStep([*events], now, up, granted([proposal]), says)

    def happened(self, event: Event) -> bool:
        """An event of this rank, the moment that it happens, from any thread. Whether the other ranks are told now; if
        not, it has to be among those of a later `agree`."""
        return False

    def wait(self, timeout_s: float, woken: Callable[[], bool]) -> bool:
        """Rank 0 sleeps between two turns, while a copy is in flight, until an event has happened on every rank (a few
        milliseconds longer if copies have only begun) or `woken` returns True, which it calls again after each `wake`.
        False after `timeout_s`."""
        return True

    def wake(self) -> None:
        """Have rank 0's `wait` call `woken` again, from any thread."""

    def note(self, decided: bytes) -> None:
        """Something that this rank's core has decided, which all ranks have to decide alike, in the same order."""

    def fail(self, why: str) -> str:
        """This rank cannot go on: the others are told; which rank is at fault, and why."""
        return why


def granted(proposals: Sequence[Proposal | None]) -> bool | None:
    """Whether a change is made: None until every rank has a proposal, then whether all are equal and ready."""
    if None in proposals:
        return None
    return all(proposal is not None and proposal.ready and proposal == proposals[0] for proposal in proposals)


@dataclass
class _Vote:
    """On which ranks a copy or probe has begun, been verified and ended."""

    begun: set[int] = field(default_factory=set)
    verified: dict[int, Verified] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    told: bool = False  # to the cores, that it has begun


class Votes:
    """The events of all ranks, until each has happened on every rank; the part of an agreement without a network.

    A copy has begun, been verified or ended when it has on all ranks; a page is good if it is good on all, bad if it is
    bad on any.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, _Vote] = {}  # copies and probes that have begun on some rank and not ended on all

    def merge(self, news: Sequence[Iterable[Event]]) -> list[Event]:
        """Take the new events of each rank; returns those that have happened on all now, in one order."""
        assert len(news) == self._ranks, "news of each rank"
        begins, checks, ends = list[Event](), list[Event](), list[Event]()
        changed: dict[int, _Vote] = {}
        for rank, events in enumerate(news):
            for event in events:
                vote = changed[event.op] = self._open.setdefault(event.op, _Vote())
                vote.begun.add(rank)
                if isinstance(event, Verified):
                    vote.verified[rank] = event
                elif isinstance(event, Ended):
                    vote.ended[rank] = event
        for op, vote in sorted(changed.items()):
            if len(vote.ended) == self._ranks:
                ends.append(agreed([*vote.ended.values()]))
                del self._open[op]
                continue
            if len(vote.begun) == self._ranks and not vote.told:
                begins.append(Began(op))
                vote.told = True
            if len(vote.verified) == self._ranks:
                checks.append(agreed([*vote.verified.values()]))
                vote.verified.clear()
        return [*begins, *checks, *ends]
