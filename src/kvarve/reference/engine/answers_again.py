"""Which answers are to be computed again by prefill, so that the next turn of a conversation finds them.

Decoding in batches rounds unlike prefill, so exact hits need pages of answers from prefill. They are computed in turns
that have nothing else to do, or with the next prompt that has them, whichever is first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST = 256  # sequences that wait; the oldest is dropped first


class Again(NamedTuple):
    """The whole chunks of a prompt and its answer."""

    salt: str
    priority: int
    tokens: bytes  # int64

    @property
    def ids(self) -> list[int]:
        return [*map(int, np.frombuffer(self.tokens, np.int64))]


class AnswersAgain:
    def __init__(self, grid_tokens: int) -> None:
        self._grid = grid_tokens
        self._waiting: list[Again] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def ended(self, salt: str, priority: int, tokens: Sequence[int], prompt: int) -> None:
        """An answer has ended; `prompt`: how many of the tokens are its prompt's."""
        end = len(tokens) // self._grid * self._grid
        if end > prompt // self._grid * self._grid:
            again = Again(salt, priority, np.asarray(tokens[:end], np.int64).tobytes())
            self.comes(salt, tokens)
            self._waiting = [*self._waiting, again][-MOST:]

    def comes(self, salt: str, prompt: Sequence[int]) -> None:
        """A prompt is computed now, with all answers that it has."""
        if any(each.salt == salt for each in self._waiting):
            data = np.asarray(prompt, np.int64).tobytes()
            self._waiting = [each for each in self._waiting if each.salt != salt or not data.startswith(each.tokens)]

    def take(self) -> Again:
        return self._waiting.pop(0)

    def put_back(self, again: Again) -> None:
        self._waiting.insert(0, again)

    def clear(self) -> None:
        self._waiting.clear()
