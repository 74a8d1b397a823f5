"""How tensor-parallel ranks stay one cache: they agree on the inputs of the core, and the core does the rest.

Every rank runs the same requests in the same order. What may differ is when a copy ends and whether it went well, and
what time it is; so once per scheduler turn the ranks agree on those, and each core then makes the same decisions.
"""

import json
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from kvarve.core.effects import Ended, agreed


class Agreement(Protocol):
    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        ...

    def agree(self, ended: Iterable[Ended], now: float) -> tuple[list[Ended], float]:
        """What has ended on every rank by now, in one order, and one time for all. Every rank has to call it."""
        ...


class Alone:
    """One rank: everything that ended, as it ended."""

    ranks = 1

    def agree(self, ended: Iterable[Ended], now: float) -> tuple[list[Ended], float]:
        return [*ended], now


class Group:
    """The ranks of a torch.distributed group (a CPU backend such as gloo).

    A copy has ended when it has ended on all ranks; a page is good if it is good on all, bad if it is bad on any.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)
        self._waiting: list[dict[int, Ended]] = [{} for _ in range(self.ranks)]

    def agree(self, ended: Iterable[Ended], now: float) -> tuple[list[Ended], float]:
        news = [[end.op, hex(end.good), hex(end.bad)] for end in ended]
        heard = [json.loads(text) for text in self._exchange(json.dumps([now, news]).encode())]
        for waiting, (_, their_news) in zip(self._waiting, heard, strict=True):
            for op, good, bad in their_news:
                waiting[op] = Ended(op, int(good, 16), int(bad, 16))
        both = []
        for op in sorted(set.intersection(*(set(waiting) for waiting in self._waiting))):
            both.append(agreed([waiting.pop(op) for waiting in self._waiting]))
        return both, float(heard[0][0])

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, by rank: first the lengths, then the bytes padded to the longest."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b" ")), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self._group)
        return [bytes(text.tolist())[: int(length)] for text, length in zip(texts, lengths, strict=True)]
