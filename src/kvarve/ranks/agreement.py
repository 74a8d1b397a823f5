"""How tensor-parallel ranks stay one cache: they agree on the inputs of their cores, which then decide alike.

Every rank runs the same requests in the same order. Ranks differ in when a copy ends and whether it succeeds, in their
clocks, in whether storage answers, and in when a change of storage is requested; so they agree on these once per
scheduler turn.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvarve.core.effects import Event


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


class Agreement(Protocol):
    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        ...

    def agree(
        self, events: Iterable[Event], now: float, up: bool = True, proposal: Proposal | None = None
    ) -> AgreedStep:
        """Tell the other ranks this one's events, time, storage state and proposal. Every rank has to call it."""
        ...


def granted(proposals: Sequence[Proposal | None]) -> bool | None:
    """Whether a change is made: None until every rank has a proposal, then whether all are equal and ready."""
    if None in proposals:
        return None
    return all(proposal is not None and proposal.ready and proposal == proposals[0] for proposal in proposals)


class Alone:
    """The agreement of a single rank."""

    ranks = 1

    def agree(
        self, events: Iterable[Event], now: float, up: bool = True, proposal: Proposal | None = None
    ) -> AgreedStep:
        return AgreedStep([*events], now, up, granted([proposal]))
