"""A request in the engine: its computed and output tokens so far, and where its text ends; and what has been counted of
all requests. It decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvarve.cache.scheduler import Prompt
from kvarve.core.lease import Lease
from kvarve.core.observe.histograms import TOKEN_S, TOKENS, Histogram, Rate
from kvarve.core.observe.reasons import HITS, Reason
from kvarve.reference.engine.model import Detokenizer, LoadedModel
from kvarve.reference.engine.paging import PagedWorkspace
from kvarve.reference.engine.request_scheduler import Task
from kvarve.reference.engine.requests import Finish, Request
from kvarve.reference.engine.sampling import Draw


class Job(Task):
    """A request from its first turn to its last: its lease, its answer, and while it runs its private state."""

    def __init__(
        self, request: Request, prompt: Prompt, lease: Lease, model: LoadedModel, first: "Job | None" = None
    ) -> None:
        """`first`: of the same request's answers to this prompt."""
        super().__init__(lease, len(request.prompt), request.sampling.max_tokens)
        self.request, self.packed = request, prompt
        self.workspace: PagedWorkspace | None = None
        self.detokenizer = Detokenizer(model.tokenizer)
        self.text = ""  # not delivered yet, as it could be the beginning of a stop text
        self.characters = 0  # of the answer's text, delivered or not
        self.output_ids: list[int] = []  # all but the last of them computed
        # Why the prompt's tokens were cached or not, as the first of its samples found that was admitted; one for all.
        self.reasons: dict[Reason, int] = {} if first is None else first.reasons
        self.counts_prompt = False  # it is the one that found that
        self.answer = 0  # tokens up to the end of an answer in its prompt that was not computed again when it came
        self.queued_s: float | None = None  # until then, from its submission
        self.began_s, self.last_s = 0.0, 0.0  # when it was first computed, and when its last token so far was sampled
        self.first_s: float | None = None  # when its first one was
        self.leased_tokens = self.prefill_until  # tokens that its lease covers
        sampling = request.sampling
        self.prompt_ids = frozenset(request.prompt if sampling.repetition_penalty != 1 else ())
        self.ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else model.eos_ids)
        self.alone = False  # computed alone, as a batch with it has failed
        self.short_s: float | None = None  # since when it waits for slots for its next pages
        seed = sampling.seed
        self.random = torch.Generator().manual_seed(seed) if seed is not None else None

    def explained(self, reasons: Mapping[Reason, int]) -> None:
        """Why its prompt's tokens were cached or not, when it was admitted."""
        self.reasons |= reasons
        left = self.answer - (self.prompt - self.uncached)
        for reason in (Reason.NEVER_SEEN, Reason.UNKNOWN):  # by the cache, which knows nothing of answers
            if (waits := min(self.reasons.get(reason, 0), left)) > 0:
                left -= waits
                self.reasons[reason] -= waits
                self.reasons[Reason.ANSWER] = self.reasons.get(Reason.ANSWER, 0) + waits

    @property
    def output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def uncached(self) -> int:
        """Tokens of its prompt that were not cached when the first of its samples was admitted."""
        return self.prompt - sum(self.reasons.get(hit, 0) for hit in HITS)

    @property
    def computed(self) -> int:
        return 0 if self.workspace is None else self.workspace.tokens

    def sequence(self, start: int, stop: int) -> list[int]:
        prompt = len(self.request.prompt)
        return [*self.request.prompt[start:stop], *self.output_ids[max(0, start - prompt) : max(0, stop - prompt)]]

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end it now."""
        return self.request.sampling.stop if len(self.output_ids) > self.request.sampling.min_tokens else ()

    @property
    def state(self) -> PagedWorkspace:
        assert self.workspace is not None, "the request is not running"
        return self.workspace

    @property
    def draw(self) -> Draw:
        """The input of its next token's sampling."""
        return Draw(self.request.sampling, self.random, self.prompt_ids, self.output_ids, self.ends)


def find_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first stop text begins, if there is one."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end could be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for length in range(1, min(len(stop), len(text) + 1)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass
class EngineCounts:
    """Tokens and seconds; histograms have one value for each request, unless they say otherwise. A prompt of several
    samples is counted once."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # of answers, by prefill, while there was nothing else to do
    prefill_compute_s: float = 0.0  # in which the engine's thread computed these
    # Of the prompts' tokens, and beside them those of further samples.
    reasons: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    output_tokens: int = 0
    ends: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))
    preempted: int = 0
    # From its arrival until it is computed, to its first token, and to its last.
    queue_s: Histogram = field(default_factory=Histogram)
    ttft_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    # From the begin of its computation to its first token, from there to its last, and the two together.
    prefill_s: Histogram = field(default_factory=Histogram)
    decode_s: Histogram = field(default_factory=Histogram)
    inference_s: Histogram = field(default_factory=Histogram)
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))  # between two tokens: one for each
    output_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))  # the mean of these
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_computed_tokens: Histogram = field(default_factory=_tokens)  # of the prompt, when it was first admitted
    request_output_tokens: Histogram = field(default_factory=_tokens)
    turn_tokens: Histogram = field(default_factory=_tokens)  # computed by a turn that computed any
    output_rate: Rate = field(default_factory=Rate)
    # Tokens of prompts that were admitted lately, and those of them that were cached.
    admitted_rate: Rate = field(default_factory=Rate)
    cached_rate: Rate = field(default_factory=Rate)

    @property
    def finished(self) -> int:
        return sum(self.ends.values())

    def began(self, job: Job, now: float) -> None:
        """A request is computed from now on, for the first time."""
        job.began_s, job.queued_s = now, now - job.request.submitted_s
        self.queue_s.observe(job.queued_s)
        if job.counts_prompt:
            self.request_computed_tokens.observe(job.uncached)
            self.admitted_rate.add(now, job.prompt)
            self.cached_rate.add(now, job.prompt - job.uncached)

    def sampled(self, job: Job, now: float) -> None:
        """A token of an answer."""
        self.output_tokens += 1
        self.output_rate.add(now, 1)
        if job.first_s is None:
            job.first_s = now
            self.ttft_s.observe(now - job.request.submitted_s)
            self.prefill_s.observe(now - job.began_s)
        else:
            self.inter_token_s.observe(now - job.last_s)
        job.last_s = now

    def answered(self, job: Job) -> None:
        """A request has been answered in full."""
        assert job.first_s is not None
        decode_s = job.last_s - job.first_s
        self.e2e_s.observe(job.last_s - job.request.submitted_s)
        self.decode_s.observe(decode_s)
        self.inference_s.observe(job.last_s - job.began_s)
        if job.output_tokens > 1:
            self.output_token_s.observe(decode_s / (job.output_tokens - 1))
        if job.counts_prompt:
            self.request_prompt_tokens.observe(job.prompt)
        self.request_output_tokens.observe(job.output_tokens)

    def ended(self, job: Job) -> None:
        """A request has ended, for whatever reason."""
        if job.queued_s is None:
            return  # it has not begun
        if job.counts_prompt:
            self.prompt_tokens += job.prompt
        for reason, tokens in job.reasons.items() if job.counts_prompt else ((Reason.ANOTHER_SAMPLE, job.prompt),):
            self.reasons[reason] += tokens
