"""Request preparation: parse the JSON, render the chat template, tokenize. It is slow, so it runs on lanes.

Oversized input is refused before any time is spent on it: a body by its number of values, a prompt by its characters.
Preparation stops between two steps if the client has disconnected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.requests import Sampling, check_prompt
from kvarve.reference.server.api import MOST_VALUES, Asked, ChatRequest, Refused, parse
from kvarve.reference.server.encoder import Encoder
from kvarve.reference.server.fields import Ignored


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class Prepared:
    """A parsed and tokenized request. Answer i is to prompt i // n, if each prompt has n answers."""

    request: Asked
    prompts: list[list[int]]
    samplings: list[Sampling]  # of each answer
    echo: list[str]  # the prompts, if answers begin with them
    mute: frozenset[int]  # answers of no tokens: their prompts are computed, and what follows is not told


class RequestPreparer:
    """Prepares requests for one model. Thread-safe."""

    def __init__(self, model: LoadedModel, name: str) -> None:
        """`name`: the served model name."""
        self._model, self._name = model, name
        self._encoder = Encoder(model.tokenizer)
        self.ignored = Ignored()
        self.spell = lru_cache(1 << 16)(partial(_token_text, model))

    def prepare(self, kind: type[Asked], body: bytes, left: Callable[[], bool]) -> Prepared:
        """Parse, check and tokenize a body: only valid requests reach the engine. ClientGone: `left` answered True."""
        model = self._model
        request = parse(kind, body, model.max_tokens + MOST_VALUES)
        self.check_model(request.model)
        self.ignored.note(set(request.unread()))
        if isinstance(request, ChatRequest):
            _check_connected(left)
            text = model.render_chat(request.rendered(), request.tools_offered, request.chat_template_kwargs or {})
            given: Sequence[str | list[int]] = [text]
        else:
            given = request.prompts()
        special = not isinstance(request, ChatRequest)
        prompts = [self.tokens(one, request.asks_for, left, special=special) for one in given]
        _check_connected(left)
        samplings, mute = list[Sampling](), set[int]()
        for prompt, sampled in zip(prompts, request.sampled(len(prompts)), strict=True):
            room = model.max_tokens - len(prompt)
            if sampled.limits(room)[0] == 0 and sampled.may_be_mute:
                mute |= {*range(len(samplings), len(samplings) + sampled.answers)}
            sampling = sampled.sampling(room, request.alternatives)
            samplings += _answers(sampling, sampled.answers)
        echo = [one if isinstance(one, str) else self.text(one) for one in given] if request.echoes else []
        return Prepared(request, prompts, samplings, echo, frozenset(mute))

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self._name:
            message = f"there is no model {model!r} here, only {self._name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    def tokens(self, given: str | list[int], param: str, left: Callable[[], bool], *, special: bool) -> list[int]:
        """The tokens of a prompt that fits into the model's context; Refused for one that does not."""
        if isinstance(given, list):
            self._check_length(len(given), param)
            return given
        text = given
        self._check_length(self._encoder.at_least(text), param, f"{len(text)} characters, so at least ")
        _check_connected(left)
        try:
            encoded = self._encoder.encode(text, special=special)
        except UnicodeEncodeError:
            raise Refused(400, "the prompt has half a character (a lone surrogate)", param=param) from None
        self._check_length(len(encoded), param)  # before the list of ids is built
        return list(encoded.ids)

    def text(self, tokens: list[int]) -> str:
        """What tokens say, special ones included; Refused if one is outside of the vocabulary."""
        check_prompt(tokens or [0], self._model.model.get_input_embeddings().num_embeddings)
        decoded = self._model.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def _check_length(self, tokens: int, param: str, why: str = "") -> None:
        if tokens >= self._model.max_tokens:
            raise Refused(
                400,
                f"the prompt is too long: it has {why}{tokens} tokens, the answer has one at least, and "
                f"this model's maximum context length is {self._model.max_tokens} tokens",
                param=param,
                code="context_length_exceeded",
            )


def _check_connected(left: Callable[[], bool]) -> None:
    if left():
        raise ClientGone


def _answers(sampling: Sampling, count: int) -> list[Sampling]:
    seed = sampling.seed
    return [sampling if seed is None else replace(sampling, seed=seed + i) for i in range(count)]


def _token_text(model: LoadedModel, token: int) -> str:
    """The text of one token by itself; an incomplete UTF-8 sequence reads as U+FFFD."""
    return str(model.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
