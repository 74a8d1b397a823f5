"""Request preparation: parse the JSON, render the chat template, tokenize. It is slow, so it runs on lanes.

Oversized input is refused before any time is spent on it: a body by its number of values, a prompt by its characters.
Preparation stops between two steps if the client has disconnected.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from kvarve.engine.model import LoadedModel
from kvarve.engine.requests import Sampling
from kvarve.server.api import MOST_VALUES, ChatRequest, CompletionRequest, Refused, RequestBody, parse
from kvarve.server.encoder import Encoder
from kvarve.server.fields import Ignored

COMPLETION_TOKENS = 16  # as OpenAI
CHAT_TOKENS = 1024


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class Prepared:
    """A parsed and tokenized request."""

    request: RequestBody
    prompt: list[int]
    samplings: list[Sampling]  # of each answer


class RequestPreparer:
    """Prepares requests for one model. Thread-safe."""

    def __init__(self, model: LoadedModel, name: str) -> None:
        """`name`: the served model name."""
        self._model, self._name = model, name
        self._encoder = Encoder(model.tokenizer)
        self.ignored = Ignored()
        self.spell = lru_cache(1 << 16)(partial(_token_text, model))

    def prepare(self, kind: type[RequestBody], body: bytes, left: Callable[[], bool]) -> Prepared:
        """Parse, check and tokenize a body: only valid requests reach the engine. ClientGone: `left` answered True."""
        model = self._model
        request = parse(kind, body, model.max_tokens + MOST_VALUES)
        self.check_model(request.model)
        self.ignored.note(set(request.unread()))
        if isinstance(request, ChatRequest):
            _check_connected(left)
            text = model.render_chat(request.rendered(), request.tools_offered, request.chat_template_kwargs or {})
            prompt = self._tokens(text, "messages", left, special=False)
        else:
            assert isinstance(request, CompletionRequest)
            given = request.text_or_tokens()
            prompt = given if isinstance(given, list) else self._tokens(given, "prompt", left, special=True)
            self._check_length(len(prompt), "prompt")
        _check_connected(left)
        left_over = model.max_tokens - len(prompt)
        default = min(left_over, CHAT_TOKENS if isinstance(request, ChatRequest) else COMPLETION_TOKENS)
        return Prepared(request, prompt, _samplings(request, default))

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self._name:
            message = f"there is no model {model!r} here, only {self._name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    def _tokens(self, text: str, param: str, left: Callable[[], bool], *, special: bool) -> list[int]:
        self._check_length(self._encoder.at_least(text), param, f"{len(text)} characters, so at least ")
        _check_connected(left)
        try:
            encoded = self._encoder.encode(text, special=special)
        except UnicodeEncodeError:
            raise Refused(400, "the prompt has half a character (a lone surrogate)", param=param) from None
        self._check_length(len(encoded), param)  # before the list of ids is built
        return encoded.ids()

    def _check_length(self, tokens: int, param: str, why: str = "") -> None:
        if tokens >= self._model.max_tokens:
            raise Refused(
                400,
                f"the prompt has {why}{tokens} tokens, and with one to answer that is more than the context of "
                f"{self._model.max_tokens} tokens that {self._name} has",
                param=param,
                code="context_length_exceeded",
            )


def _check_connected(left: Callable[[], bool]) -> None:
    if left():
        raise ClientGone


def _samplings(request: RequestBody, default_tokens: int) -> list[Sampling]:
    sampling = Sampling(
        max_tokens=default_tokens if request.tokens_wanted is None else request.tokens_wanted,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        seed=request.seed,
        logit_bias=request.biases,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        min_tokens=request.min_tokens or 0,
        stop=request.stops,
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.alternatives,
    )
    seed, answers = sampling.seed, range(request.answers)
    return [sampling if seed is None else replace(sampling, seed=seed + i) for i in answers]


def _token_text(model: LoadedModel, token: int) -> str:
    """The text of one token by itself; an incomplete UTF-8 sequence reads as U+FFFD."""
    return str(model.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
