"""The agreement of ranks in several processes, over torch.distributed."""

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist

from kvarve.core.effects import Began, Ended, Event, agreed
from kvarve.ranks.agreement import AgreedStep, Proposal, granted


class Group:
    """The ranks of a torch.distributed group (a CPU backend such as gloo).

    A copy has begun or ended when it has on all ranks; a page is good if it is good on all, bad if it is bad on any. A
    storage that is down on one rank is down on all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)
        self._waiting: list[dict[int, Ended]] = [{} for _ in range(self.ranks)]
        self._begun: list[set[int]] = [set() for _ in range(self.ranks)]  # by rank, copies not yet ended on all ranks
        self._told: set[int] = set()  # copies begun on all ranks, of which the cores know

    def agree(
        self, events: Iterable[Event], now: float, up: bool = True, proposal: Proposal | None = None
    ) -> AgreedStep:
        news = [[each.op] if isinstance(each, Began) else [each.op, hex(each.good), hex(each.bad)] for each in events]
        received = [json.loads(text) for text in self._exchange(json.dumps([now, news, up, proposal]).encode())]
        for waiting, begun, (_, their_news, _, _) in zip(self._waiting, self._begun, received, strict=True):
            for op, *outcome in their_news:
                begun.add(op)
                if outcome:
                    waiting[op] = Ended(op, *(int(bits, 16) for bits in outcome))
        both: list[Event] = []
        begun_everywhere = set.intersection(*self._begun)
        for op in sorted(set.intersection(*(set(waiting) for waiting in self._waiting))):
            both.append(agreed([waiting.pop(op) for waiting in self._waiting]))
            begun_everywhere.discard(op)
            for begun in self._begun:
                begun.discard(op)
        both = [*(Began(op) for op in sorted(begun_everywhere - self._told)), *both]
        self._told = begun_everywhere
        proposals = [None if theirs is None else Proposal(*theirs) for *_, theirs in received]
        return AgreedStep(both, float(received[0][0]), all(theirs for _, _, theirs, _ in received), granted(proposals))

    def _exchange(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, by rank: first their lengths are gathered, then the bytes, padded to the longest."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b" ")), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self._group)
        return [bytes(text.tolist())[: int(length)] for text, length in zip(texts, lengths, strict=True)]
