"""A request in the engine: its computed and output tokens so far, and where its text ends. It decides nothing."""

import torch

from kvarve.cache.scheduler import Prompt
from kvarve.core.lease import Lease
from kvarve.core.observe.reasons import HITS, Reason
from kvarve.reference.engine.model import Detokenizer, LoadedModel
from kvarve.reference.engine.paging import PagedWorkspace
from kvarve.reference.engine.request_scheduler import Task
from kvarve.reference.engine.requests import Request
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
