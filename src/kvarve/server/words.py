"""From a body to what the engine is asked: JSON, the chat template, tokens. All of it takes time, so it runs on lanes.

What can be refused by its size alone is refused before time is spent on it: a body by the values in it, a prompt by its
characters. Between any two steps work ends whose client has left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from kvarve.engine.model import LoadedModel
from kvarve.engine.requests import Sampling
from kvarve.server.api import MOST_VALUES, Asked, ChatAsked, CompletionAsked, Refused, parse
from kvarve.server.encoder import Encoder
from kvarve.server.fields import Ignored

COMPLETION_TOKENS = 16  # as OpenAI
CHAT_TOKENS = 1024


class Gone(Exception):
    """The client does not listen any more."""


@dataclass(frozen=True)
class Prepared:
    """What a body came down to."""

    asked: Asked
    prompt: list[int]
    samplings: list[Sampling]  # of each answer


class Words:
    """Of one model, for any number of threads."""

    def __init__(self, model: LoadedModel, name: str) -> None:
        """`name`: by which clients ask for the model."""
        self._model, self._name = model, name
        self._encoder = Encoder(model.tokenizer)
        self.ignored = Ignored()
        self.spell = lru_cache(1 << 16)(partial(_spelled, model))

    def prepare(self, kind: type[Asked], body: bytes, left: Callable[[], bool]) -> Prepared:
        """Everything that can be refused before the engine hears of it. Gone: the client has `left`."""
        model = self._model
        asked = parse(kind, body, model.max_tokens + MOST_VALUES)
        self.check_model(asked.model)
        self.ignored.note(set(asked.unread()))
        if isinstance(asked, ChatAsked):
            _go_on(left)
            text = model.render_chat(asked.rendered(), asked.tools_offered, asked.chat_template_kwargs or {})
            prompt = self._tokens(text, "messages", left, special=False)
        else:
            assert isinstance(asked, CompletionAsked)
            given = asked.text_or_tokens()
            prompt = given if isinstance(given, list) else self._tokens(given, "prompt", left, special=True)
            self._check_length(len(prompt), "prompt")
        _go_on(left)
        left_over = model.max_tokens - len(prompt)
        default = min(left_over, CHAT_TOKENS if isinstance(asked, ChatAsked) else COMPLETION_TOKENS)
        return Prepared(asked, prompt, _samplings(asked, default))

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self._name:
            message = f"there is no model {model!r} here, only {self._name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    def _tokens(self, text: str, param: str, left: Callable[[], bool], *, special: bool) -> list[int]:
        self._check_length(self._encoder.at_least(text), param, f"{len(text)} characters, so at least ")
        _go_on(left)
        try:
            encoded = self._encoder.encode(text, special=special)
        except UnicodeEncodeError:
            raise Refused(400, "the prompt has half a character (a lone surrogate)", param=param) from None
        self._check_length(len(encoded), param)  # before there is a list of them
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


def _go_on(left: Callable[[], bool]) -> None:
    if left():
        raise Gone


def _samplings(asked: Asked, default_tokens: int) -> list[Sampling]:
    sampling = Sampling(
        max_tokens=default_tokens if asked.tokens_wanted is None else asked.tokens_wanted,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k or 0,
        min_p=asked.min_p or 0.0,
        seed=asked.seed,
        logit_bias=asked.biases,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        min_tokens=asked.min_tokens or 0,
        stop=asked.stops,
        ignore_eos=bool(asked.ignore_eos),
        logprobs=asked.alternatives,
    )
    seed, answers = sampling.seed, range(asked.answers)
    return [sampling if seed is None else replace(sampling, seed=seed + i) for i in answers]


def _spelled(model: LoadedModel, token: int) -> str:
    """A token's text by itself; half a character reads as U+FFFD."""
    return str(model.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
