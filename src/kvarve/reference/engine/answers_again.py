"""Which answers are to be computed again by prefill, so that the next turn of a conversation finds them.

Decoding in batches rounds unlike prefill, so exact hits need pages of answers from prefill. They are computed in turns
that have nothing else to do, while the prompt is in memory, or with the next prompt that has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvarve.cache.scheduler import Prompt
from kvarve.pages.keys import TOKEN_BYTES, pack, unpack

MOST = 64  # answers that wait; the oldest is dropped first


class Again(NamedTuple):
    """The whole chunks of a prompt and its answer."""

    prepared: Prompt
    packed: bytes  # its token ids
    salt: str
    priority: int
    known: int  # tokens of the prompt's own whole chunks

    @property
    def ids(self) -> list[int]:
        return unpack(self.packed)

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def continued(self) -> Prompt:
        """With one token more, since no prompt is a hit up to its last token."""
        return replace(self.prepared, tokens=self.prepared.tokens + bytes(TOKEN_BYTES))


class AnswersAgain:
    def __init__(self, grid_tokens: int, prepare: Callable[[Sequence[int], str], Prompt]) -> None:
        self._grid, self._prepare = grid_tokens, prepare
        self._waiting: list[Again] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def ended(self, prompt: Sequence[int], answer: Sequence[int], salt: str, priority: int) -> None:
        """An answer to a prompt has ended."""
        end, known = (count // self._grid * self._grid for count in (len(prompt) + len(answer), len(prompt)))
        if end > known:
            ids = [*prompt, *answer][:end]
            again = Again(self._prepare(ids, salt), pack(ids), salt, priority, known)
            self.comes(again.prepared)
            self._waiting = [*self._waiting, again][-MOST:]

    def comes(self, prompt: Prompt) -> int:
        """A prompt is computed now, with all answers that it has; its tokens up to the end of the last one's chunks."""
        found = [
            each
            for each in self._waiting
            if each.prepared.root == prompt.root and prompt.tokens.startswith(each.prepared.tokens)
        ]
        self._waiting = [each for each in self._waiting if each not in found]
        return max((each.tokens for each in found), default=0)

    def take(self) -> Again:
        """The last, whose prompt is likeliest to be in memory still."""
        return self._waiting.pop()

    def put_back(self, again: Again) -> None:
        self._waiting.append(again)

    def clear(self) -> None:
        self._waiting.clear()
