"""What is asked of the engine, and what it answers: plain data and a channel between two threads."""

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from kvarve.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; a seed makes everything else repeatable."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"a seed has 64 bits at most, {self.seed} has more")
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature must be between 0 and 100, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if any(not text for text in self.stop):
            raise ConfigError("a stop text cannot be empty")


class Finish(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Usage(NamedTuple):
    """Tokens of one request; `device + host + storage` is what was cached of the prompt, by where it came from."""

    prompt: int
    completion: int
    device: int
    host: int
    storage: int

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: some text (perhaps none), and with the last piece why it ended."""

    text: str
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    error: str = ""


_numbers = itertools.count(1)


@dataclass(eq=False)
class Request:
    """One prompt to be answered. Its pieces go to `deliver`, on the engine's thread; by default into `pieces`.

    `watch` is shown the logits [vocabulary] of which each token is chosen, just before that, on the same thread.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    salt: str = ""
    priority: int = 0  # of its pages, where eviction is by priority: high stays longest
    read_cache: bool = True
    deliver: Callable[[Piece], None] | None = None
    watch: Callable[[Tensor], None] | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    submitted_s: float = field(default_factory=time.monotonic)
    pieces: "queue.SimpleQueue[Piece]" = field(default_factory=queue.SimpleQueue)

    def give(self, piece: Piece) -> None:
        (self.deliver or self.pieces.put)(piece)

    def result(self, timeout_s: float = 300.0) -> tuple[str, list[int], Piece]:
        """Wait for the whole answer: its text, its tokens and the last piece. `queue.Empty` after `timeout_s`."""
        text = ""
        tokens: list[int] = []
        while True:
            piece = self.pieces.get(timeout=timeout_s)
            text += piece.text
            tokens.extend(piece.tokens)
            if piece.finish is not None:
                return text, tokens, piece
