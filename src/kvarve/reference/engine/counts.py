"""What the engine has done so far. Its thread counts, any thread reads."""

from dataclasses import dataclass, field

from kvarve.core.observe.histograms import TOKEN_S, TOKENS, Histogram, Rate
from kvarve.core.observe.reasons import Reason
from kvarve.reference.engine.job import Job
from kvarve.reference.engine.requests import Finish


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass
class EngineCounts:
    """Tokens and seconds; histograms have one value for each request, unless they say otherwise. A prompt of several
    samples is counted once."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
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

    @property
    def failed(self) -> int:
        return self.ends[Finish.ERROR]

    @property
    def aborted(self) -> int:
        return self.ends[Finish.ABORT]

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
