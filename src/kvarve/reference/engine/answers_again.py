"""Which answers are to be computed again by prefill, so that the next turn of a conversation finds them.

Decoding in batches rounds unlike prefill, so exact hits need pages of answers from prefill. They are computed in turns
that have nothing else to do, while the prompt is in memory, or with the next prompt that has them.
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
    prompt: int  # tokens of the prompt's own whole chunks

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
        end, known = (count // self._grid * self._grid for count in (len(tokens), prompt))
        if end > known:
            again = Again(salt, priority, np.asarray(tokens[:end], np.int64).tobytes(), known)
            self.comes(salt, tokens)
            self._waiting = [*self._waiting, again][-MOST:]

    def comes(self, salt: str, prompt: Sequence[int]) -> None:
        """A prompt is computed now, with all answers that it has."""
        if any(each.salt == salt for each in self._waiting):
            data = np.asarray(prompt, np.int64).tobytes()
            self._waiting = [each for each in self._waiting if each.salt != salt or not data.startswith(each.tokens)]

    def take(self) -> Again:
        """The last, whose prompt is likeliest to be in memory still."""
        return self._waiting.pop()

    def put_back(self, again: Again) -> None:
        self._waiting.append(again)

    def clear(self) -> None:
        self._waiting.clear()
