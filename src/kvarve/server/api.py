"""The OpenAI API's requests and responses as plain data. No engine, no socket.

A field that would change the answer is either obeyed or refused, never ignored (`fields` has the lists); an unknown
field is ignored and counted.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from kvarve.core.reasons import HITS, Reason
from kvarve.engine.requests import MOST_LOGPROBS, Likelihood
from kvarve.errors import KvarveError
from kvarve.model import Tier
from kvarve.server import fields
from kvarve.server.fields import Neutral
from kvarve.ticket import HandOverError, Ticket

MOST_ANSWERS = 16  # to one prompt
MOST_LETTERS = 1024  # of a salt, as vLLM, and of a stop text
MOST_NAMED = 1024  # tokens in logit_bias or stop_token_ids: each token of the answer is compared with all of them
MOST_OBJECTS = 1 << 14  # of JSON: messages, their parts, tools
MOST_VALUES = 1 << 16  # of any kind, beside the tokens of a prompt; and names of them
SMALL_BYTES = 1 << 16  # JSON up to this size is parsed fast enough, whatever is in it
_TOKEN = re.compile(r"-?[0-9]{1,10}", re.ASCII)
LONGEST_HAND_OVER_S = 86_400.0
# vLLM's name: its routers carry this field from one server's answer to the next one's request. What is in it is ours.
TRANSFER = "kv_transfer_params"
LEAST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot express; as OpenAI


class Refused(KvarveError):
    """A request that gets an error instead of an answer, in the form that OpenAI's clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Body(BaseModel):
    # Strict: a number written as a string is an error of the client's.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[Neutral] = {}

    def check(self) -> None:
        """Refuse a well-formed request that cannot be served."""

    def refuse(self, place: str = "", param: str | None = None) -> None:
        """Refuse fields that ask for an unsupported feature; `place` is a prefix of their names in the message."""
        if name := fields.unmet(self.model_extra or {}, self.refused):
            instead = f"{fields.INSTEAD[name]} is its name here" if name in fields.INSTEAD else "leave it out"
            message = f"{place}{name} is not supported: {instead}"
            raise Refused(400, message, param=param or name, code="unsupported_parameter")

    def unread(self) -> Iterator[str]:
        """The names of fields that are ignored."""
        return fields.unread(self.model_extra or {}, self.refused)


class HandOver(_Body):
    """What a request's `kv_transfer_params` say."""

    hand_over_s: Annotated[float, Field(ge=0, le=LONGEST_HAND_OVER_S)] | None = None
    """of a prefill server: when its pages are expected in the shared storage"""
    ticket: Any = None
    """of a decode server: from the prefill server's answer"""

    def check(self) -> None:
        if odd := [name for name, value in (self.model_extra or {}).items() if value is not None]:
            raise Refused(
                400,
                f'{TRANSFER} has no {min(odd)[:40]!r} here: send {{"hand_over_s": SECONDS}} to the server that '
                f"prefills, and {TRANSFER} of its answer to the one that decodes",
                param=TRANSFER,
            )
        try:
            self.opened()
        except HandOverError as e:
            raise Refused(400, f"{TRANSFER}.ticket: {e}", param=TRANSFER) from None

    def opened(self) -> Ticket | None:
        return None if self.ticket is None else Ticket.of_json(self.ticket)


class StreamOptions(_Body):
    refused = fields.STREAM_OPTIONS

    include_usage: bool | None = None


class RequestBody(_Body):
    """The fields that both kinds of request share; null means unset."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_NAMED, fail_fast=True)] | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MOST_LETTERS)] | None = None
    extra_key: Annotated[str, Field(max_length=MOST_LETTERS)] | None = None  # as SGLang calls a tenant; "" is none
    cache_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # for --eviction priority: high stays
    skip_reading_prefix_cache: bool | None = None
    kv_transfer_params: HandOver | None = None
    parallel_tool_calls: bool | None = None

    @property
    def salt(self) -> str:
        """The cache's salt: requests that differ in `cache_salt` or in `extra_key` share no pages."""
        if self.cache_salt is None and not self.extra_key:
            return ""
        return json.dumps([self.cache_salt, self.extra_key or None])

    @property
    def hand_over(self) -> HandOver:
        return self.kv_transfer_params or HandOver()

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def alternatives(self) -> int | None:
        """How many top logprobs to return for each token; None if the request wants no logprobs."""
        raise NotImplementedError

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """(token, bias) pairs. Checked here, as pydantic would build one error for every token."""
        if (given := len(self.logit_bias or ())) > MOST_NAMED:
            raise Refused(400, f"logit_bias can name {MOST_NAMED} tokens at most, not {given}", param="logit_bias")
        found = []
        for name, bias in (self.logit_bias or {}).items():
            if not _TOKEN.fullmatch(name):
                raise Refused(400, f"logit_bias: {name[:40]!r} is no token id", param="logit_bias")
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise Refused(400, f"logit_bias.{name}: the bias must be a number", param="logit_bias")
            found.append((int(name), bias))
        return tuple(found)

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        if self.stream_options is not None:
            yield from (f"stream_options.{name}" for name in self.stream_options.unread())

    def check(self) -> None:
        self.refuse()
        if self.stream_options is not None:
            self.stream_options.refuse("stream_options.", "stream_options")
        if self.best_of not in (None, self.answers):
            message = "best_of is not supported: leave it out, all n answers are given"
            raise Refused(400, message, param="best_of", code="unsupported_parameter")
        _ = self.biases
        self.hand_over.check()
        if self.hand_over.ticket is not None and self.skip_reading_prefix_cache:
            raise Refused(
                400, "a ticket is to be read from the cache: leave out skip_reading_prefix_cache", param=TRANSFER
            )
        if len(self.stops) > 4:
            raise Refused(400, f"at most 4 stop texts, not {len(self.stops)}", param="stop")
        if (longest := max(map(len, self.stops), default=0)) > MOST_LETTERS:
            raise Refused(400, f"a stop text has at most {MOST_LETTERS} characters, not {longest}", param="stop")
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options need stream to be true", param="stream_options")


class CompletionRequest(RequestBody):
    refused = fields.COMPLETION

    prompt: str | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def text_or_tokens(self) -> str | list[int]:
        """The one prompt, as text or as token ids; a list of one prompt is that prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not all(type(token) is int for token in prompt):
            if len(prompt) > 1 and all(isinstance(one, str | list) for one in prompt):
                raise Refused(400, f"one prompt per request, not {len(prompt)}", param="prompt")
            prompt = prompt[0] if len(prompt) == 1 else None
            if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
                prompt = None
        if isinstance(prompt, str | list):
            return prompt
        raise Refused(400, "the prompt must be a text or a list of token ids", param="prompt")


class Part(_Body):
    type: str
    text: str | None = None


class Message(_Body):
    refused = fields.MESSAGE

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def rendered(self, place: str) -> dict[str, Any]:
        """The message as the chat template reads it. Text parts are joined by line ends, as in vLLM."""
        self.refuse(f"{place}.", "messages")
        content = self.content
        if isinstance(content, list):
            if odd := next((part for part in content if part.type != "text" or part.text is None), None):
                raise Refused(400, f"{place} has a part of type {odd.type!r}: only text is read", param="messages")
            content = "\n".join(part.text or "" for part in content)
        if content is None and not self.tool_calls:
            raise Refused(400, f"{place} has no content", param="messages")
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The tool call with its arguments parsed, as templates expect; unchanged if they are not a JSON object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
        _check_values(text.encode(), MOST_VALUES)
        try:
            arguments = from_json(text, allow_inf_nan=False)
        except ValueError:
            return call
        if isinstance(arguments, dict):
            return call | {"function": function | {"arguments": arguments}}
    return call


class ChatRequest(RequestBody):
    refused = fields.CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tools_offered(self) -> list[dict[str, Any]] | None:
        """The tools that the template renders."""
        return None if self.tool_choice == "none" else self.tools or None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs need logprobs to be true", param="top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            message = 'tool_choice can be "none" or "auto": nothing here can make a model call a tool'
            raise Refused(400, message, param="tool_choice", code="unsupported_parameter")
        if self.parallel_tool_calls is False and self.tools_offered:
            message = "parallel_tool_calls can be true: nothing here can keep a model from calling two tools at once"
            raise Refused(400, message, param="parallel_tool_calls", code="unsupported_parameter")

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        for message in self.messages:
            yield from (f"messages.{name}" for name in message.unread())
            if isinstance(message.content, list):
                yield from (f"messages.content.{name}" for part in message.content for name in part.unread())

    def rendered(self) -> list[dict[str, Any]]:
        return [message.rendered(f"messages[{i}]") for i, message in enumerate(self.messages)]


class FlushRequest(_Body):
    """Strict: an unknown field may be a misspelt `tiers`, and a flush cannot be undone."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tiers: str | Annotated[list[str], Field(fail_fast=True)] | None = None


class AttachRequest(_Body):
    """Strict: an unknown field may be a misspelt policy."""

    model_config = ConfigDict(strict=True, extra="forbid")

    url: str | Annotated[list[str], Field(fail_fast=True)]  # several are tiers
    prefetch_policy: str | None = None
    write_policy: str | None = None
    back_up: bool | None = None


BodyT = TypeVar("BodyT", bound=_Body)


def parse(kind: type[BodyT], body: bytes, most_values: int = MOST_VALUES) -> BodyT:
    """Parse a JSON body, whatever its content type. Refused if it is not JSON or has too many values."""
    _check_values(body, most_values)
    try:
        request = kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise Refused(400, f"the body is not JSON: {first['msg']}", code="invalid_json") from None
        place = ".".join(str(step) for step in first["loc"]) or "the body"
        param = str(first["loc"][0]) if first["loc"] else None
        raise Refused(400, f"{place}: {first['msg']}", param=param) from None
    request.check()
    return request


def _check_values(body: bytes, most: int) -> None:
    """Refuse JSON of too many values: the parser holds the GIL until it has made all of them.

    Strings may be as long as the body: the cost is per object and per name (some microseconds), and per other value.
    """
    if len(body) <= SMALL_BYTES:
        return
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.cumsum(plain == ord('"'), dtype=np.uint8) & 1 == 0  # not within a string
    objects, names, lists, commas = (int(np.count_nonzero(outside & (plain == ord(sign)))) for sign in "{:[,")
    for count, bound, what in ((objects, MOST_OBJECTS, "objects"), (names, MOST_VALUES, "names")):
        if count > bound:
            raise Refused(400, f"the body has {count} JSON {what}, more than {bound}", code="body_too_large")
    if objects + lists + commas > most:
        message = f"the body has about {objects + lists + commas} JSON values, more than {most}"
        raise Refused(400, message, code="context_length_exceeded")


@dataclass(frozen=True)
class ResponseUsage:
    """The `usage` of a response: tokens, the prompt's by the reason why they were cached or not, and latencies in ms as
    the server measured them."""

    prompt: int
    completion: int
    reasons: Mapping[Reason, int]
    ttft_ms: float | None
    total_ms: float

    def json(self) -> dict[str, Any]:
        cached = {tier.name.lower(): self.reasons.get(hit, 0) for tier, hit in zip(Tier, HITS, strict=True)}
        reasons = {reason.value: tokens for reason, tokens in self.reasons.items()}
        times = {"ttft_ms": self.ttft_ms, "total_ms": self.total_ms}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "kvarve": {"cached_tokens": cached, "reasons": reasons, **times},
        }


@dataclass
class Choice:
    """One complete answer."""

    text: str = ""
    finish: str = ""
    likelihoods: list[Likelihood] = field(default_factory=list)


@dataclass(frozen=True)
class Form:
    """Writes responses as completions or chat completions, whole or as stream chunks."""

    chat: bool
    id: str
    created: int  # seconds since 1970
    model: str
    spell: Callable[[int], str] | None = None  # a token's own text, if likelihoods are to be written

    def whole(self, answers: Sequence[Choice], usage: ResponseUsage, ticket: Ticket | None) -> dict[str, Any]:
        choices = []
        for index, one in enumerate(answers):
            message = {"role": "assistant", "content": one.text, "refusal": None}
            content = {"message": message} if self.chat else {"text": one.text}
            choices.append(self._choice(index, content, one.finish, one.likelihoods))
        return self._head(self._kind) | {"choices": choices, "usage": usage.json()} | _transfer(ticket)

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        """The first chunk of a chat answer, which names the role; a completion has none."""
        if self.chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunks(
        self, index: int, text: str, finish: str | None, likelihoods: Sequence[Likelihood], ticket: Ticket | None
    ) -> Iterator[dict[str, Any]]:
        """The stream chunks of one output chunk, none if it is empty; a chat's finish reason has a chunk of its own.
        A ticket comes with the finish reason."""
        if self.chat:
            if text or (self.spell and likelihoods):
                yield self._chunk(index, {"delta": {"content": text}}, None, likelihoods)
            if finish is not None:
                yield self._chunk(index, {"delta": {}}, finish) | _transfer(ticket)
        elif text or finish is not None or (self.spell and likelihoods):
            yield self._chunk(index, {"text": text}, finish, likelihoods) | _transfer(ticket)

    def closing(self, usage: ResponseUsage) -> dict[str, Any]:
        """The final chunk, sent if the request has `include_usage`."""
        return self._head(self._kind_of_chunk) | {"choices": [], "usage": usage.json()}

    def _chunk(
        self, index: int, content: dict[str, Any], finish: str | None, likelihoods: Sequence[Likelihood] = ()
    ) -> dict[str, Any]:
        return self._head(self._kind_of_chunk) | {"choices": [self._choice(index, content, finish, likelihoods)]}

    def _choice(
        self, index: int, content: dict[str, Any], finish: str | None, likelihoods: Sequence[Likelihood]
    ) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": self._logprobs(likelihoods), "finish_reason": finish}

    def _logprobs(self, likelihoods: Sequence[Likelihood]) -> dict[str, Any] | None:
        if self.spell is None or not likelihoods:
            return None
        spell = self.spell
        if self.chat:
            return {"content": [_chat_logprob(one, spell) for one in likelihoods], "refusal": None}
        return {
            "tokens": [spell(one.token) for one in likelihoods],
            "token_logprobs": [_finite(one.logprob) for one in likelihoods],
            "top_logprobs": [_top_logprobs(one, spell) for one in likelihoods],
            "text_offset": [one.offset for one in likelihoods],
        }

    @property
    def _kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    @property
    def _kind_of_chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _transfer(ticket: Ticket | None) -> dict[str, Any]:
    return {} if ticket is None else {TRANSFER: {"ticket": ticket.json()}}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _top_logprobs(one: Likelihood, spell: Callable[[int], str]) -> dict[str, float]:
    """Logprobs by text, as in OpenAI's completions; tokens of equal text keep the highest. The sampled token is always
    included."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(spell(token), _finite(logprob))
    return found


def _chat_logprob(one: Likelihood, spell: Callable[[int], str]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = spell(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    return entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
