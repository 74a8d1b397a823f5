"""The agreement of ranks in several processes, over torch.distributed."""

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist

from kvarve.core.effects import Began, Ended, Event, Verified
from kvarve.ranks.agreement import AgreedStep, Proposal, Votes, granted

KINDS: dict[str, type[Verified] | type[Ended]] = {"verified": Verified, "ended": Ended}


def _plain(event: Event) -> list[int | str]:
    """An event as JSON; pages are hexadecimal, since they may be more than 64."""
    if isinstance(event, Began):
        return [event.op]
    kind = next(name for name, each in KINDS.items() if isinstance(event, each))
    return [event.op, kind, hex(event.good), hex(event.bad)]


def _event(op: int, kind: str = "", good: str = "", bad: str = "") -> Event:
    return KINDS[kind](op, int(good, 16), int(bad, 16)) if kind else Began(op)


class Group:
    """The ranks of a torch.distributed group (a CPU backend such as gloo).

    A storage that is down on one rank is down on all. What makes an event one of all ranks: `Votes`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)
        self._votes = Votes(self.ranks)

    def agree(
        self, events: Iterable[Event], now: float, up: bool = True, proposal: Proposal | None = None
    ) -> AgreedStep:
        mine = json.dumps([now, [_plain(event) for event in events], up, proposal])
        received = [json.loads(text) for text in self._exchange(mine.encode())]
        happened = self._votes.merge([[_event(*each) for each in news] for _, news, _, _ in received])
        proposals = [None if theirs is None else Proposal(*theirs) for *_, theirs in received]
        up = all(theirs for _, _, theirs, _ in received)
        return AgreedStep(happened, float(received[0][0]), up, granted(proposals))

    def _exchange(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, by rank: first their lengths are gathered, then the bytes, padded to the longest."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b" ")), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self._group)
        return [bytes(text.tolist())[: int(length)] for text, length in zip(texts, lengths, strict=True)]
