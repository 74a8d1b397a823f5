"""One prompt, computed alone without any cache, and through a cache as an engine does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.reference.engine.model import LoadedModel, forward
from kvarve.reference.engine.paging import keep, resumed, wait_for_room
from kvarve.reference.engine.workspace import Workspace
from kvarve.reference.engine.wrappers import cache_argument, compute

Step = Callable[[Tensor], Tensor]
READY_S = 120.0  # every deadline in a cache is well below this


class Stuck(Exception):
    """A cache or an engine did not answer in time, or not as it has to."""


@dataclass
class Transcript:
    """The output of a run: the logits by the number of tokens before them, and the greedy answer."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    def take(self, at: int, logits: Tensor, prompt: int, decode: int) -> None:
        self.logits[at] = logits
        if at >= prompt and len(self.tokens) < decode:
            self.tokens.append(int(logits.argmax()))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in every bit: a NaN is equal to itself, and -0 is not 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def differences(found: Transcript, expected: Transcript) -> list[int]:
    """Where the logits differ, by the number of tokens before; logits that were not expected count."""
    return [
        at
        for at, logits in found.logits.items()
        if at not in expected.logits or not same_bits(logits, expected.logits[at])
    ]


def largest(found: Transcript, expected: Transcript, positions: Sequence[int]) -> float:
    """The largest difference of two logits at some positions."""
    pairs = [(found.logits[at], expected.logits[at]) for at in positions if at in expected.logits]
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs), default=float("nan"))


class Uncached:
    """A model's transcripts without a cache, on the same grid of chunks; each prompt is computed once."""

    def __init__(self, model: LoadedModel, decode: int) -> None:
        self.model, self.decode = model, decode
        self._known: dict[tuple[int, ...], Transcript] = {}

    def __call__(self, prompt: Sequence[int]) -> Transcript:
        key = tuple(prompt)
        if key not in self._known:
            workspace = Workspace(self.model.layout, len(prompt) + self.decode, self.model.model.device)
            self._known[key] = self._compute(prompt, lambda ids: forward(self.model.model, workspace, ids))
        return self._known[key]

    def by_transformers(self, prompt: Sequence[int]) -> tuple[Transcript, Any]:
        """The transcript of transformers alone with its own cache; and that cache."""
        model = self.model.model
        cache: Any = None  # the model makes its own
        at = 0

        def step(ids: Tensor) -> Tensor:
            nonlocal cache, at
            # As `generate` does: without positions, some models count from 0 in every chunk.
            positions = torch.arange(at, at + ids.shape[1], device=ids.device)[None]
            output = compute(model, cache, input_ids=ids, position_ids=positions, logits_to_keep=1)
            cache, at = output[cache_argument(model)], at + ids.shape[1]
            logits: Tensor = output.logits[0, -1]
            return logits

        return self._compute(prompt, step), cache

    def _compute(self, prompt: Sequence[int], step: Step) -> Transcript:
        device, chunk, whole = self.model.model.device, self.model.layout.chunk_tokens, len(prompt)
        found = Transcript()
        ids = torch.tensor([[*prompt]], device=device)
        for start in range(0, whole, chunk):
            stop = min(start + chunk, whole)
            found.take(stop, step(ids[:, start:stop]), whole, self.decode)
        for at in range(whole + 1, whole + self.decode):
            found.take(at, step(torch.tensor([found.tokens[-1:]], device=device)), whole, self.decode)
        return found


class ProofRequest:
    """One prompt through a cache; leaving the `with` early aborts it."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PrefixCache,
        prompt: Sequence[int],
        decode: int,
        salt: str = "",
        read: bool = True,
    ) -> None:
        self.model, self.cache, self.prompt, self.decode = model, cache, prompt, decode
        self.transcript = Transcript()
        self._ids = torch.tensor([[*prompt]], device=model.model.device)
        self.waited_s = 0.0
        self._workspace: Workspace | None = None
        self.lease = cache.open(prompt, salt, read)

    def __enter__(self) -> "ProofRequest":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.cache.close(self.lease)

    def wait(self) -> None:
        """Claim the lease and step until its pages are on the device."""
        start = time.monotonic()
        while True:
            self.cache.step()
            ready, self.waited_s = self.cache.claim(self.lease), time.monotonic() - start
            if ready:
                return
            if self.waited_s > READY_S:
                raise Stuck(f"a request was still {self.lease.phase.value} after {READY_S:.0f} s")
            self.cache.wait(0.05)

    def resume(self) -> None:
        """Copy the lease's pages into the request's private workspace."""
        tokens, layout, device = len(self.prompt) + self.decode, self.model.layout, self.model.model.device
        self._workspace = resumed(self.cache, self.lease, layout, tokens, device)

    @property
    def resumed(self) -> bool:
        return self._workspace is not None

    def advance(self) -> bool:
        """Compute the next chunk or token; False when the answer is complete."""
        assert self._workspace is not None
        at, whole, chunk = self._workspace.tokens, len(self.prompt), self.model.layout.chunk_tokens
        if at < whole:
            ids = self._ids[:, at : min(whole, (at // chunk + 1) * chunk)]
        else:
            ids = torch.tensor([self.transcript.tokens[-1:]], device=self._ids.device)
        logits = forward(self.model.model, self._workspace, ids)
        if at < whole:
            wait_for_room(self.cache, self.lease, self._workspace)
            keep(self.cache, self.lease, self._workspace)
        self.transcript.take(self._workspace.tokens, logits, whole, self.decode)
        return len(self.transcript.tokens) < self.decode

    def from_tiers(self) -> tuple[int, int, int]:
        """Tokens of the prompt that came from device, host and storage."""
        device, host, storage = (pages * self.model.layout.page_tokens for pages in self.lease.from_tiers())
        return device, host, storage
