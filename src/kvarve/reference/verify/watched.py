"""What a model computes: alone without a cache, and in the engine itself, as `Request.watch` tells it."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.scheduler import Prompt
from kvarve.core.lease import Lease
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.inputs import Evict
from kvarve.reference.engine.job import Job
from kvarve.reference.engine.layers import FP8, cache_argument, compute, narrowed, widened
from kvarve.reference.engine.model import LoadedModel, forward
from kvarve.reference.engine.rank_processes import Ranks
from kvarve.reference.engine.requests import Finish, Request, Sampling, TokenUsage
from kvarve.reference.engine.workspace import StateLayout, Workspace
from kvarve.system.background import BackgroundCall

Step = Callable[[Tensor], Tensor]
T = TypeVar("T")

ANSWER_S = 600.0  # between two pieces of one answer, while others are computed
ASK_S = 60.0  # for the engine's thread to answer a question
SETTLE_S = 60.0
SLICE_S = 5.0  # for which the other ranks wait at once
END_S = 10.0  # of an engine


class Stuck(Exception):
    """A cache or an engine did not answer in time, or not as it has to."""


@dataclass
class Transcript:
    """The output of a run: the logits by the number of tokens before them, and the greedy answer."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)


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


@contextmanager
def _rounding(layout: StateLayout) -> Iterator[None]:
    """Within it, transformers' own caches round keys and values as pages in FP8 do."""
    theirs = Cache.update

    def update(self: Any, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        def kept(states: Tensor, what: str) -> Tensor:
            scale = layout.scale(f"layers.{layer_idx}.{what}")
            return widened(narrowed(states, FP8, scale), states.dtype, scale)

        rounded = kept(keys, "keys")
        values = rounded if values is keys else kept(values, "values")
        return theirs(self, rounded, values, layer_idx, *args, **kwargs)

    if layout.scales is not None:
        Cache.update = update
    try:
        yield
    finally:
        Cache.update = theirs


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

        with _rounding(self.model.layout):
            return self._compute(prompt, step), cache

    def _compute(self, prompt: Sequence[int], step: Step) -> Transcript:
        device, chunk, whole = self.model.model.device, self.model.layout.chunk_tokens, len(prompt)
        found = Transcript()
        ids = torch.tensor([[*prompt]], device=device)
        for start in range(0, whole, chunk):
            stop = min(start + chunk, whole)
            found.logits[stop] = step(ids[:, start:stop])
        for at in range(whole, whole + self.decode):
            found.tokens.append(int(found.logits[at].argmax()))
            if len(found.tokens) < self.decode:
                found.logits[at + 1] = step(torch.tensor([found.tokens[-1:]], device=device))
        return found


@dataclass(frozen=True)
class Question:
    """A prompt, to be answered with `most` tokens. `leaves`: it is aborted when so many tokens have been computed; 0:
    a turn after it has come."""

    prompt: Sequence[int]
    most: int
    salt: str = ""
    read: bool = True
    leaves: int | None = None


@dataclass(frozen=True)
class Answer:
    prompt: Sequence[int]
    found: Transcript
    usage: TokenUsage


class WatchedEngine(Engine):
    """The engine, asked by one thread, which waits for all that it has asked.

    Of several `ranks` each calls the same methods, and sees what itself computes: the engine of rank 0 is asked, and
    those of the others follow.
    """

    def __init__(self, model: LoadedModel, cache: PrefixCache, ranks: Ranks | None, **settings: Any) -> None:
        super().__init__(model, cache, **settings)
        self._ranks = ranks
        self.before: Callable[[Lease], None] | None = None  # called when a request's pages are there and not yet read
        self._followed: queue.SimpleQueue[tuple[Request, Transcript]] = queue.SimpleQueue()

    # --- on the engine's thread

    def _enqueue(self, request: Request, prompt: Prompt) -> None:
        if self.cache.rank:
            request.deliver, found = None, Transcript()
            request.watch = partial(self._see, request, found, None)
            self._followed.put((request, found))
        super()._enqueue(request, prompt)

    def _resume(self, job: Job) -> None:
        if self.before is not None:
            self.before(job.lease)
        super()._resume(job)

    def _see(self, request: Request, found: Transcript, leaves: int | None, at: int, logits: Tensor) -> None:
        if self.deterministic and at in found.logits and not same_bits(found.logits[at], logits):
            raise Stuck(f"computed again, the logits after {at} tokens are others")
        found.logits[at] = logits
        if leaves is not None and at >= leaves:
            self.abort(request)

    # --- on the thread that asks

    def answers(
        self, questions: Sequence[Question], at_once: int | None = None, then: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        """The answers to questions, of which `at_once` are computed at the same time; by default all. `then` is called
        whenever one has been answered, and others have not."""
        asked, found = list[tuple[Request, Transcript]](), list[Answer]()
        for question in questions:
            if len(asked) - len(found) == at_once:
                found.append(self._answer(questions[len(found)], *asked[len(found)]))
                then()
            asked.append(self._asked(question))
        while len(found) < len(asked):
            found.append(self._answer(questions[len(found)], *asked[len(found)]))
        if not self.cache.rank:
            self.ask(self.cache.scheduler.audit, ASK_S)
        return found

    def _asked(self, question: Question) -> tuple[Request, Transcript]:
        if self.cache.rank:
            return self._next()
        request = Request(
            question.prompt, Sampling(question.most, ignore_eos=True), question.salt, read_cache=question.read
        )
        request.watch = partial(self._see, request, found := Transcript(), question.leaves)
        self.submit(request)
        if question.leaves == 0:
            self._begin_to_serve()
            self.ask(lambda: None, ASK_S)  # it may be admitted in this turn, and is aborted in the next one
            self.abort(request)
        return request, found

    def _next(self) -> tuple[Request, Transcript]:
        while True:
            try:
                return self._followed.get(timeout=1)
            except queue.Empty:
                if self._ended:
                    raise Stuck(self.broken or "rank 0 asks nothing more") from None

    def _answer(self, question: Question, request: Request, found: Transcript) -> Answer:
        self._begin_to_serve()
        try:
            _, found.tokens, last = request.result(ANSWER_S)
        except queue.Empty:
            raise Stuck(f"the engine sent nothing for {ANSWER_S:.0f} s") from None
        prompt = question.prompt
        due = Finish.LENGTH if question.leaves is None else Finish.ABORT
        said = [found.logits[at] for at in sorted(found.logits) if at >= len(prompt)]
        numbers = not (said and bool(said[-1].isnan().any()))
        if last.usage is None or last.finish is not (due if numbers else Finish.ERROR):
            raise Stuck(f"a prompt of {len(prompt)} tokens ended with {last.finish}: {last.error}")
        whole = question.leaves is None and numbers  # else the last logits may have brought no token
        likeliest = [int(logits.argmax()) for logits in said][: None if whole else len(found.tokens)]
        if found.tokens != likeliest or (whole and len(likeliest) != question.most):
            raise Stuck(f"a prompt of {len(prompt)} tokens was not answered with the likeliest tokens")
        return Answer(prompt, found, last.usage)

    def _begin_to_serve(self) -> None:
        """Start, if that has not been done: not before all first questions have been asked."""
        if not self.cache.rank and self._thread.ident is None:
            self.start()

    def meet(self) -> None:
        """Wait for all ranks, while nothing is being answered."""
        if self._ranks is not None:
            self._ranks.meet()

    def _of_first(self, find: Callable[[], T]) -> T | Any:
        """What rank 0 finds."""
        self._begin_to_serve()
        found = None if self.cache.rank else find()
        return found if self._ranks is None else self._ranks.of_first(found)

    def stats(self) -> dict[str, float]:
        return dict(self._of_first(lambda: self.ask(self.cache.scheduler.stats, ASK_S)))

    def written(self) -> None:
        """Wait until all backups are written."""
        end = time.monotonic() + SETTLE_S
        while not self._of_first(lambda: self.settle(SLICE_S)):
            if self._of_first(lambda: time.monotonic() > end):
                raise Stuck(f"backups were not written within {SETTLE_S:.0f} s")

    def rest(self) -> None:
        """Wait until no answer is to be computed again; each rank by itself, as ranks that compute cannot meet."""
        self._begin_to_serve()
        end = time.monotonic() + SETTLE_S
        while not self.ask(self.at_rest, ASK_S):
            if time.monotonic() > end:
                raise Stuck(f"answers were not computed again within {SETTLE_S:.0f} s")

    def empty(self, tiers: Sequence[Tier] = MEMORY_TIERS) -> None:
        """Empty memory tiers after the backups; Stuck if pages are left."""
        self.written()
        self._of_first(lambda: self.flush(tiers, SLICE_S))
        names = tuple(f"used.{tier.name.lower()}." for tier in tiers)
        if left := [name for name, count in self.stats().items() if count and name.startswith(names)]:
            raise Stuck(f"memory could not be emptied: {', '.join(left)}")

    def evict(self, tiers: Sequence[Tier]) -> None:
        """Evict every unpinned page of some tiers, whatever is being answered."""
        if not self.cache.rank:
            self.ask(lambda: self.cache.scheduler.core.flush(tiers), ASK_S, Evict(tuple(tiers)))


@contextmanager
def watched(
    model: LoadedModel, cache: PrefixCache, ranks: Ranks | None = None, **settings: Any
) -> Iterator[WatchedEngine]:
    """An engine over this cache, which ends with it. `settings`: of `Engine`."""
    engine = WatchedEngine(model, cache, ranks, **settings)
    following = BackgroundCall("kvarve follows", engine.follow) if cache.rank else None
    try:
        yield engine
    finally:
        if following is None:
            engine.shutdown(END_S)
        else:
            following.result()
            if not engine.broken:
                cache.scheduler.audit()
    if engine.broken:
        raise Stuck(engine.broken)
