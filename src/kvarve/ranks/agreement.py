"""How tensor-parallel ranks stay one cache: they agree on the inputs of the core, and the core does the rest.

Every rank runs the same requests in the same order. What may differ is when a copy ends and whether it went well, what
time it is, whether storage answers, and when a change of it is asked for; so once per scheduler turn the ranks agree on
those, and each core then makes the same decisions.
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from kvarve.core.effects import Began, Ended, Event, agreed


class Proposal(NamedTuple):
    """A change that a rank would make with all others, or (not `ready`) cannot make though it was asked to."""

    what: str  # the same text on all ranks means the same change
    ready: bool = True


class AgreedStep(NamedTuple):
    """What all ranks go by in one step: what has begun and ended everywhere by now, in one order; one time for all;
    whether the storage answers on all of them; and whether the change that they proposal is made now.

    `granted` is None while there are ranks that wish nothing yet. Who will not wait for them any longer takes its wish
    back without a word: nothing is granted unless all wish it in the same step.
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
        """Say what has begun and ended here, what time it is, whether the storage answers, and what change is wished.
        Every rank has to call it."""
        ...


def granted(proposals: Sequence[Proposal | None]) -> bool | None:
    """Whether the ranks' wishes come true: once all have one, if it is the same and all are ready."""
    if None in proposals:
        return None
    return all(proposal is not None and proposal.ready and proposal == proposals[0] for proposal in proposals)


class Alone:
    """One rank: everything as it is."""

    ranks = 1

    def agree(
        self, events: Iterable[Event], now: float, up: bool = True, proposal: Proposal | None = None
    ) -> AgreedStep:
        return AgreedStep([*events], now, up, granted([proposal]))


class Group:
    """The ranks of a torch.distributed group (a CPU backend such as gloo).

    A copy has begun or ended when it has on all ranks; a page is good if it is good on all, bad if it is bad on any. A
    storage that is down on one rank is down on all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)
        self._waiting: list[dict[int, Ended]] = [{} for _ in range(self.ranks)]
        self._begun: list[set[int]] = [set() for _ in range(self.ranks)]  # on each rank, and not yet ended everywhere
        self._told: set[int] = set()  # what has begun everywhere, and the cores know of it

    def agree(
        self, events: Iterable[Event], now: float, up: bool = True, proposal: Proposal | None = None
    ) -> AgreedStep:
        news = [[each.op] if isinstance(each, Began) else [each.op, hex(each.good), hex(each.bad)] for each in events]
        heard = [json.loads(text) for text in self._exchange(json.dumps([now, news, up, proposal]).encode())]
        for waiting, begun, (_, their_news, _, _) in zip(self._waiting, self._begun, heard, strict=True):
            for op, *fate in their_news:
                begun.add(op)
                if fate:
                    waiting[op] = Ended(op, *(int(bits, 16) for bits in fate))
        both: list[Event] = []
        begun_everywhere = set.intersection(*self._begun)
        for op in sorted(set.intersection(*(set(waiting) for waiting in self._waiting))):
            both.append(agreed([waiting.pop(op) for waiting in self._waiting]))
            begun_everywhere.discard(op)
            for begun in self._begun:
                begun.discard(op)
        both = [*(Began(op) for op in sorted(begun_everywhere - self._told)), *both]
        self._told = begun_everywhere
        proposals = [None if theirs is None else Proposal(*theirs) for *_, theirs in heard]
        return AgreedStep(both, float(heard[0][0]), all(theirs for _, _, theirs, _ in heard), granted(proposals))

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, by rank: first the lengths, then the bytes padded to the longest."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b" ")), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self._group)
        return [bytes(text.tolist())[: int(length)] for text, length in zip(texts, lengths, strict=True)]
