"""Requests to the engine and its output: plain data and a channel between two threads."""

import itertools
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvarve.core.observe.reasons import HITS, Reason
from kvarve.errors import ConfigError
from kvarve.pages.field_checks import require
from kvarve.pages.ticket import Ticket

MOST_LOGPROBS = 20  # alternatives that a request may ask for, as OpenAI's
BOUNDS = {  # of numbers that choose tokens, both included
    "temperature": (0, 100),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; a seed makes everything else repeatable.

    `top_k` of 0 or -1 is no limit; `min_p` is a share of the best token's probability. The penalties are OpenAI's and
    vLLM's: frequency and presence count an answer's tokens, repetition the prompt's too. No end token or stop text ends
    an answer in its first `min_tokens`. `logprobs`: how many alternatives come with each token and its likelihood.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logit of a token
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "of at most 64 bits", self.seed)
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        require(self.top_k >= -1, "top_k", "at least -1", self.top_k)
        for _, bias in self.logit_bias:
            require(-100 <= bias <= 100, "logit_bias", "between -100 and 100", bias)
        for name, (least, most) in BOUNDS.items():
            require(least <= getattr(self, name) <= most, name, f"between {least} and {most}", getattr(self, name))
        few = f"between 0 and max_tokens {self.max_tokens}"
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", few, self.min_tokens)
        asked = self.logprobs
        require(asked is None or 0 <= asked <= MOST_LOGPROBS, "logprobs", f"between 0 and {MOST_LOGPROBS}", asked)
        require(all(self.stop), "stop", "texts that are not empty", self.stop)


def check_prompt(prompt: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    """The ids [tokens]; ConfigError if there are none, or one is outside a vocabulary of this size."""
    if not len(prompt):
        raise ConfigError("the prompt must not be empty")
    try:
        ids = np.asarray(prompt)
    except ValueError:  # rows of different lengths
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iuO":
        raise ConfigError("the prompt must be a row of token ids, which are whole numbers")
    # numpy makes objects of numbers that are larger than any vocabulary, and of anything that is no number.
    if ids.dtype.kind == "O" or int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise ConfigError(f"the prompt's token ids must be in the model's vocabulary of {vocabulary}")
    return ids.astype(np.int64, copy=False)


def check_tokens(sampling: Sampling, vocabulary: int) -> None:
    """ConfigError if a sampling names a token outside a vocabulary of this size."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token in tokens:
            known = f"token ids of the model's vocabulary of {vocabulary}"
            require(0 <= token < vocabulary, name, known, token)


class Finish(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of one request; `device + host + storage` are those of the prompt that were cached, by tier, and `reasons`
    sum to the prompt, as the first of its samples found it. `queued_s`: from its submission until it was first
    admitted, None if it was not."""

    prompt: int
    completion: int
    device: int
    host: int
    storage: int
    reasons: Mapping[Reason, int] = field(default_factory=dict, compare=False)
    queued_s: float | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, prompt: int, completion: int, reasons: Mapping[Reason, int] | None, queued_s: float | None = None
    ) -> "TokenUsage":
        """`reasons`: None if the request ended before it resumed."""
        reasons = reasons or {Reason.NOT_READ: prompt}
        device, host, storage = (reasons.get(hit, 0) for hit in HITS)
        return cls(prompt, completion, device, host, storage, reasons, queued_s)

    def __str__(self) -> str:
        why = ", ".join(f"{tokens} {reason.value}" for reason, tokens in self.reasons.items())
        return f"{self.prompt} prompt tokens ({why}), {self.completion} answered"

    @property
    def tiers(self) -> tuple[int, int, int]:
        return self.device, self.host, self.storage

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage


class Likelihood(NamedTuple):
    """The natural logarithm of a token's probability by the model alone, and those of the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest first
    offset: int  # characters of the answer before this token


@dataclass(frozen=True)
class OutputChunk:
    """A part of an answer: some text (perhaps none), and in the last one why it ended.

    Text that could become a stop text, or half a character, comes in a later chunk than its tokens. `likelihoods` are
    those of this chunk's tokens, for a request that asked for them. The first and the last one have the `usage`, the
    last one the token or stop text that ended it (`matched`), if any did. The last one of a request that is handed over
    has its `ticket`, unless it failed or no storage was attached by then.
    """

    text: str
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    usage: TokenUsage | None = None
    error: str = ""
    likelihoods: tuple[Likelihood, ...] = ()
    ticket: Ticket | None = None
    matched: int | str | None = None


_numbers = itertools.count(1)


@dataclass(eq=False)
class Request:
    """One prompt to be answered. Its output goes to `deliver`, on the engine's thread; by default into `outputs`.

    `watch` gets how many tokens have been computed and the logits [vocabulary] after them, on the same thread: after
    each chunk of the prompt, again after a preemption, and for each token just before it is sampled. With
    `hand_over_s` the answer comes with a ticket, which tells another server that the shared storage will have the pages
    within `hand_over_s` seconds. A request with a `ticket` resumes from pages that another server handed over. Of
    several answers to one prompt (`sample_of`) the prompt is counted once, as the first that is admitted finds it.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    salt: str = ""
    priority: int = 0  # of its pages, where eviction is by priority: high stays longest
    read_cache: bool = True
    deliver: Callable[[OutputChunk], None] | None = None
    watch: Callable[[int, Tensor], None] | None = None
    hand_over_s: float | None = None
    ticket: Ticket | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    submitted_s: float = field(default_factory=time.monotonic)
    submitted_unix_s: float = field(default_factory=time.time)  # by which a ticket's time is judged, on all ranks alike
    sample_of: int | None = None  # the number of the request whose prompt this is, of those submitted with it before it
    outputs: "queue.SimpleQueue[OutputChunk]" = field(default_factory=queue.SimpleQueue)

    def check(self) -> None:
        """ConfigError for a salt or priority that the cache could not use; the engine checks the prompt."""
        require(isinstance(self.salt, str), "salt", "text", self.salt)
        try:
            self.salt.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the salt has half a character (a lone surrogate): {self.salt!r}") from None
        require(isinstance(self.priority, int), "priority", "a whole number", self.priority)
        waits_s = self.hand_over_s
        require(waits_s is None or 0 <= waits_s < math.inf, "hand_over_s", "finite and at least 0", waits_s)

    def result(self, timeout_s: float = 300.0) -> tuple[str, list[int], OutputChunk]:
        """Wait for the whole answer: its text, tokens and last chunk. `queue.Empty` after `timeout_s` without one."""
        text = ""
        tokens: list[int] = []
        while True:
            output = self.outputs.get(timeout=timeout_s)
            text += output.text
            tokens.extend(output.tokens)
            if output.finish is not None:
                return text, tokens, output
