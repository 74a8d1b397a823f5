"""The prover's prompts: lengths at, before and after every kind of boundary, random tokens."""

from dataclasses import dataclass

import numpy as np

from kvarve.errors import ConfigError
from kvarve.reference.engine.model import LoadedModel
from kvarve.settings.commands import Verify

TURNS = 3  # of a conversation


@dataclass(frozen=True)
class Plan:
    """`chunks`: how many whole chunks the longest prompt has; `reach`: tokens that the widest window looks back."""

    page: int
    chunk: int
    chunks: int
    decode: int
    reach: int
    vocabulary: int
    seed: int
    quick: bool

    @classmethod
    def of(cls, options: Verify, model: LoadedModel) -> "Plan":
        """Prompts as long as the windows need, but at most --tokens; ConfigError if none that short could hit."""
        page, chunk, tokens, quick = options.page_tokens, options.chunk_tokens, options.tokens, options.quick
        max_tokens, vocabulary = model.max_tokens, model.model.get_input_embeddings().num_embeddings
        reach = max((pool.lookback or 0) * page for pool in model.layout.pools)
        decode = 2 if quick else 4
        wanted = max(2, -(-reach // chunk) + 1) if quick else max(3, -(-reach // chunk) + 2)
        most = max_tokens if tokens is None else min(tokens, max_tokens)
        chunks = min(wanted, (most - chunk // 2 - 1 - TURNS * decode) // chunk)
        if chunks < 1:
            least = chunk + chunk // 2 + 1 + TURNS * decode
            limit = f"--tokens {tokens}" if tokens is not None and tokens < max_tokens else f"a context of {max_tokens}"
            raise ConfigError(
                f"{limit} is too little to prove anything: the shortest prompt that can hit has {chunk + 1} tokens, "
                f"and the proof needs {least}: allow more, or choose smaller --chunk-tokens"
            )
        return cls(page, chunk, chunks, decode, reach, vocabulary, options.seed, quick)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt: its whole chunks, half a chunk and a token."""
        return self.whole + self.chunk // 2 + 1

    @property
    def whole(self) -> int:
        """Tokens of its whole chunks: with one token after them, the logits depend on the pages directly."""
        return self.chunks * self.chunk

    @property
    def leaves_windows(self) -> bool:
        """Whether the longest prompt resumes where the widest window no longer reaches its beginning."""
        return self.whole >= self.reach

    def lengths(self) -> list[int]:
        """Lengths at each kind of boundary, one before it and one after it."""
        page, chunk, last = self.page, self.chunk, self.whole
        lines = [chunk, last] if self.quick else [page, chunk, last, last + page]
        some = {page + 1, self.longest} if self.quick else {1, self.longest}
        around = {line + more for line in lines for more in ((0, 1) if self.quick else (-1, 0, 1))}
        return sorted(tokens for tokens in some | around if 0 < tokens <= self.longest)

    @property
    def stored_tokens(self) -> int:
        """How many tokens' pages the proof leaves in storage, at most."""
        return sum(self.lengths()) + self.longest * (self.chunks + 20)

    def prompt(self, tokens: int, number: int = 0) -> list[int]:
        """Tokens drawn from the whole vocabulary: prompts of one number share a prefix, others share nothing."""
        random = np.random.default_rng((self.seed, number))
        return list(map(int, random.integers(0, self.vocabulary, 2 * self.longest)[:tokens]))

    def full(self, tokens: int) -> int:
        """Where a prompt of `tokens` resumes if all of it is cached: at a chunk boundary, with a token left."""
        return (tokens - 1) // self.chunk * self.chunk
