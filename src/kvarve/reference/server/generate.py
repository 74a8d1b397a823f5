"""SGLang's /generate as plain data: its request, and the form of its answers. No engine, no socket."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvarve.pages.ticket import Ticket
from kvarve.reference.engine.requests import MOST_LOGPROBS, Finish, Likelihood, OutputChunk
from kvarve.reference.server import fields
from kvarve.reference.server.api import MOST_LETTERS, MOST_PROMPTS, Asked, Refused, Sampled, listed
from kvarve.reference.server.forms import Choice, Form, ResponseUsage, by_tier, finite

DEFAULT_TOKENS = 128

Rid = Annotated[str, Field(min_length=1, max_length=MOST_LETTERS)]


class SamplingParams(Sampled):
    """SGLang's names of what `Sampled` has not; null means unset, but of `max_new_tokens` as many as fit."""

    refused = fields.SAMPLING_PARAMS
    instead = fields.INSTEAD_IN_SAMPLING_PARAMS
    most_stops = 32

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    @property
    def may_be_mute(self) -> bool:
        return True  # a prompt is computed so that later ones find it

    def limits(self, left: int) -> tuple[int, int, int | None]:
        most = self.max_new_tokens
        if most is None:
            most = left if "max_new_tokens" in self.model_fields_set else min(left, DEFAULT_TOKENS)
        return most, self.min_new_tokens or 0, self.sampling_seed

    def refuse(self, place: str = "sampling_params.", param: str | None = "sampling_params") -> None:
        super().refuse(place, param)


class GenerateRequest(Asked):
    refused = fields.GENERATE
    instead = fields.INSTEAD_IN_GENERATE

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    # One for all prompts, or one for each.
    sampling_params: Annotated[
        list[SamplingParams] | None, BeforeValidator(lambda given: [given] if isinstance(given, dict) else given)
    ] = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    rid: Rid | Annotated[list[Rid], Field(max_length=MOST_PROMPTS)] | None = None

    @property
    def asks_for(self) -> str:  # type: ignore[override]
        return "text" if self.input_ids is None else "input_ids"

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs_num or 0) if self.return_logprob else None

    def prompts(self) -> Sequence[str | list[int]]:
        prompts = listed(self.text if self.input_ids is None else self.input_ids, self.asks_for)
        if self.input_ids is not None and isinstance(prompts[0], str):
            raise Refused(400, "input_ids has texts: send them as text", param="input_ids")
        return prompts

    def sampled(self, prompts: int) -> Sequence[Sampled]:
        given = self.sampling_params or [SamplingParams()]
        return given if len(given) == prompts else given * prompts

    @property
    def batch(self) -> bool:
        """Whether the response is a list."""
        lists = isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))
        return lists or self.sampled(1)[0].answers > 1

    def check(self) -> None:
        self.refuse()
        if (self.text is None) == (self.input_ids is None):
            raise Refused(400, "a request has text or input_ids, one of them", param="text")
        prompts = len(self.prompts())
        params = self.sampled(prompts)
        for one in params[:1] if len(self.sampling_params or ()) < 2 else params:
            one.check()
        if len(params) != prompts:
            why = f"{len(params)} sampling_params for {prompts} prompts: send one for all, or one for each"
            raise Refused(400, why, param="sampling_params")
        if len({one.answers for one in params}) > 1:
            raise Refused(400, "n must be the same for all prompts of a request", param="sampling_params")
        if isinstance(self.rid, list) and len(self.rid) != prompts * params[0].answers:
            raise Refused(400, "rid must be a text, or a list of one for each answer", param="rid")
        if self.top_logprobs_num and not self.return_logprob:
            raise Refused(400, "top_logprobs_num needs return_logprob to be true", param="top_logprobs_num")

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        for one in self.sampling_params or ():
            yield from (f"sampling_params.{name}" for name in one.unread())

    def form(self, number: str, name: str, spell: Callable[[int], str] | None, echo: Sequence[str]) -> Form:
        return GenerateForm(
            self.rid or number,
            self.batch,
            logprobs=self.alternatives is not None,
            top=bool(self.alternatives),
            spell=spell if self.return_text_in_logprobs else None,
        )


@dataclass(frozen=True)
class GenerateForm(Form):
    """An object for an answer, a list of them for a batch; each event of a stream has the whole answer so far."""

    rid: str | list[str]
    batch: bool
    logprobs: bool
    top: bool
    spell: Callable[[int], str] | None = None

    def whole(self, answers: Sequence[Choice], usage: ResponseUsage, ticket: Ticket | None) -> Any:
        written = [self._answer(index, one) for index, one in enumerate(answers)]
        return written if self.batch else written[0]

    def chunks(self, index: int, chunk: OutputChunk, answer: Choice) -> Iterator[dict[str, Any]]:
        yield self._answer(index, answer) | ({"index": index} if self.batch else {})

    def _answer(self, index: int, one: Choice) -> dict[str, Any]:
        assert one.usage is not None
        rid = self.rid[index] if isinstance(self.rid, list) else f"{self.rid}_{index}" if self.batch else self.rid
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": _finish(one),
            "prompt_tokens": one.usage.prompt,
            "completion_tokens": len(one.tokens),
            "cached_tokens": one.usage.cached,
            "cached_tokens_details": by_tier(one.usage.reasons),
            "weight_version": "default",
        }
        if one.finish is not None:
            meta["e2e_latency"] = round(one.seconds, 6)
        if self.logprobs:
            meta |= self._logprobs(one.likelihoods)
        return {"text": one.text, "output_ids": one.tokens, "meta_info": meta}

    def _logprobs(self, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [self._entry(one.token, one.logprob) for one in likelihoods],
            "output_token_logprobs_length": len(likelihoods),
        }
        if self.top:
            top = [[self._entry(*each) for each in one.top] for one in likelihoods]
            meta |= {"input_top_logprobs": [], "output_top_logprobs": top}
        return meta

    def _entry(self, token: int, logprob: float) -> list[Any]:
        return [finite(logprob), token, None if self.spell is None else self.spell(token)]


def _finish(one: Choice) -> dict[str, Any] | None:
    match one.finish:
        case None:
            return None
        case Finish.LENGTH:
            return {"type": "length", "length": len(one.tokens)}
        case Finish.STOP:
            return {"type": "stop", "matched": one.matched}
        case _:
            return {"type": "abort", "message": "the server is shutting down"}
