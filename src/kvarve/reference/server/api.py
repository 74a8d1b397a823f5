"""The OpenAI API's requests as plain data. No engine, no socket.

A field that would change the answer is either obeyed or refused, never ignored (`fields` has the lists); an unknown
field is ignored and counted.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, from_json

from kvarve.errors import KvarveError
from kvarve.pages.ticket import HandOverError, Ticket
from kvarve.reference.engine.requests import BOUNDS, MOST_LOGPROBS, Sampling
from kvarve.reference.server import fields
from kvarve.reference.server.fields import Neutral
from kvarve.reference.server.forms import TRANSFER, Form, OpenAIForm
from kvarve.settings.engine_flags import our_wait, our_write, storage_url

MOST_ANSWERS = 16  # to one prompt
MOST_PROMPTS = 256  # in one request
MOST_LETTERS = 1024  # of a salt, as vLLM, and of a stop text
MOST_NAMED = 1024  # tokens in logit_bias or stop_token_ids: each token of the answer is compared with all of them
MOST_OBJECTS = 1 << 14  # of JSON: messages, their parts, tools
MOST_VALUES = 1 << 16  # of any kind, beside the tokens of a prompt; and names of them
SMALL_BYTES = 1 << 16  # JSON up to this size is parsed fast enough, whatever is in it
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_TOKEN = re.compile(r"-?[0-9]{1,10}", re.ASCII)
LONGEST_HAND_OVER_S = 86_400.0


_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    500: "internal_error",
    503: "unavailable",
}


class Refused(KvarveError):
    """A request that gets an error instead of an answer, in the form that OpenAI's clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers
        self.code = code or _CODES.get(status) or ("invalid_value" if param else "invalid_request")

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def unsupported(param: str, message: str) -> Refused:
    return Refused(400, message, param=param, code="unsupported_parameter")


class Body(BaseModel):
    # Strict: a number written as a string is an error of the client's.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[Neutral] = {}
    instead: ClassVar[dict[str, str]] = fields.INSTEAD

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the fields that are refused unless they ask for nothing, and the engine's bounds of numbers."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, neutral in cls.refused.items():
            properties.setdefault(name, {"enum": [None, *neutral]})
        for name, (least, most) in BOUNDS.items():
            for form in properties.get(name, {}).get("anyOf", ()):
                if form["type"] == "number":
                    form |= {"minimum": least, "maximum": most}
        return schema

    def check(self) -> None:
        """Refuse a well-formed request that cannot be served."""

    def refuse(self, place: str = "", param: str | None = None) -> None:
        """Refuse fields that ask for an unsupported feature; `place` is a prefix of their names in the message."""
        if name := fields.unmet(self.model_extra or {}, self.refused):
            instead = f"{self.instead[name]} is its name here" if name in self.instead else "leave it out"
            raise unsupported(param or name, f"{place}{name} is not supported: {instead}")

    def unread(self) -> Iterator[str]:
        """The names of fields that are ignored."""
        return fields.unread(self.model_extra or {}, self.refused)


class HandOver(Body):
    """What a request's `kv_transfer_params` say."""

    hand_over_s: Annotated[float, Field(ge=0, le=LONGEST_HAND_OVER_S)] | None = None
    """prefill server: when its pages are expected in the shared storage"""
    ticket: Any = None
    """decode server: from the prefill server's answer"""

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


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Body):
    """How tokens are chosen, under the names that all servers share; null means unset."""

    most_stops: ClassVar[int] = 4

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_NAMED, fail_fast=True)] | None = None
    ignore_eos: bool | None = None

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

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
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def may_be_mute(self) -> bool:
        """Whether an answer may have no tokens."""
        return False

    def limits(self, left: int) -> tuple[int, int, int | None]:
        """The most and the fewest tokens of an answer, for which the context has `left`, and the seed."""
        raise NotImplementedError

    def sampling(self, left: int, logprobs: int | None) -> Sampling:
        most, fewest, seed = self.limits(left)
        return Sampling(
            max_tokens=most or int(self.may_be_mute),  # the engine computes one at least
            min_tokens=fewest,
            seed=seed,
            logit_bias=self.biases,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            **{"temperature": 1.0, **{name: value for name in _NUMBERS if (value := getattr(self, name)) is not None}},
        )

    def check(self) -> None:
        self.refuse()
        _ = self.biases
        if len(self.stops) > self.most_stops:
            raise Refused(400, f"at most {self.most_stops} stop texts, not {len(self.stops)}", param="stop")
        if (longest := max(map(len, self.stops), default=0)) > MOST_LETTERS:
            raise Refused(400, f"a stop text has at most {MOST_LETTERS} characters, not {longest}", param="stop")


class Asked(Body):
    """A request for answers in any form: what its preparation and its submission read; null means unset."""

    asks_for: ClassVar[str] = "prompt"  # the field that has the prompt
    operation: ClassVar[str] = "text_completion"  # as OpenTelemetry calls it

    model: str | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MOST_LETTERS)] | None = None
    extra_key: Annotated[str, Field(max_length=MOST_LETTERS)] | None = None  # as SGLang calls a tenant; "" is none
    cache_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # for --eviction priority: high stays
    skip_reading_prefix_cache: bool | None = None

    @property
    def salt(self) -> str:
        """The cache's salt: requests that differ in `cache_salt` or in `extra_key` share no pages."""
        if self.cache_salt is None and not self.extra_key:
            return ""
        return json.dumps([self.cache_salt, self.extra_key or None])

    @property
    def hand_over(self) -> HandOver:
        return HandOver()

    @property
    def alternatives(self) -> int | None:
        """How many top logprobs to return for each token; None if the request wants no logprobs."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with its prompt."""
        return False

    def prompts(self) -> Sequence[str | list[int]]:
        """Each as text or as token ids."""
        raise NotImplementedError

    def sampled(self, prompts: int) -> Sequence[Sampled]:
        """How the answers to each of the prompts are sampled; all have as many answers."""
        raise NotImplementedError

    def form(self, number: str, name: str, spell: Callable[[int], str] | None, echo: Sequence[str]) -> Form:
        """What writes the answers; `number` names the response, `name` the model, `spell` a token."""
        raise NotImplementedError


class RequestBody(Asked, Sampled):
    """The fields that both kinds of OpenAI's requests share; null means unset."""

    default_tokens: ClassVar[int]

    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_tokens: int | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: HandOver | None = None
    parallel_tool_calls: bool | None = None
    return_cached_tokens_details: bool | None = None  # as SGLang: in `sglext`

    @property
    def hand_over(self) -> HandOver:
        return self.kv_transfer_params or HandOver()

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def limits(self, left: int) -> tuple[int, int, int | None]:
        most = min(left, self.default_tokens) if self.tokens_wanted is None else self.tokens_wanted
        return most, self.min_tokens or 0, self.seed

    def sampled(self, prompts: int) -> Sequence[Sampled]:
        return [self] * prompts

    def form(self, number: str, name: str, spell: Callable[[int], str] | None, echo: Sequence[str]) -> Form:
        return OpenAIForm(
            chat=isinstance(self, ChatRequest),
            id=number,
            model=self.model or name,
            spell=spell,
            include_usage=self.include_usage,
            continuous=bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats),
            details=bool(self.return_cached_tokens_details),
            answers=self.answers,
            echo=echo,
        )

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        if self.stream_options is not None:
            yield from (f"stream_options.{name}" for name in self.stream_options.unread())

    def check(self) -> None:
        super().check()
        if self.stream_options is not None:
            self.stream_options.refuse("stream_options.", "stream_options")
        if self.best_of not in (None, self.answers):
            raise unsupported("best_of", "best_of is not supported: leave it out, all n answers are given")
        self.hand_over.check()
        if self.hand_over.ticket is not None and self.skip_reading_prefix_cache:
            raise Refused(
                400, "a ticket is to be read from the cache: leave out skip_reading_prefix_cache", param=TRANSFER
            )
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options need stream to be true", param="stream_options")


class CompletionRequest(RequestBody):
    refused = fields.COMPLETION
    default_tokens = 16  # as OpenAI

    prompt: str | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def may_be_mute(self) -> bool:
        return self.echoes

    def prompts(self) -> Sequence[str | list[int]]:
        return listed(self.prompt, "prompt")

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            why = "a prompt's own tokens get none here; leave out one of them"
            raise unsupported("echo", f"echo with logprobs is not supported: {why}")
        if self.kv_transfer_params is not None and len(self.prompts()) > 1:
            raise Refused(400, f"{TRANSFER} are those of one prompt: send each by itself", param=TRANSFER)


def listed(given: Any, param: str) -> Sequence[str | list[int]]:
    """The prompts of a text, of a list of token ids, or of a list of one of these. Refused for anything else."""
    prompts = given if isinstance(given, list) and given and type(given[0]) is not int else [given]
    if len(prompts) > MOST_PROMPTS:
        raise Refused(400, f"{len(prompts)} prompts in one request are more than {MOST_PROMPTS}", param=param)
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            message = f"the {param} must be a text or a list of token ids, or a list of several such prompts"
            raise Refused(400, message, param=param)
    if len({type(one) for one in prompts}) > 1:
        raise Refused(400, f"the {param} has texts and token ids: send them apart", param=param)
    return prompts


class Part(Body):
    type: str
    text: str | None = None


class Message(Body):
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
        check_values(text.encode(), MOST_VALUES)
        try:
            arguments = from_json(text, allow_inf_nan=False)
        except ValueError:
            return call
        if isinstance(arguments, dict):
            return call | {"function": function | {"arguments": arguments}}
    return call


class ChatRequest(RequestBody):
    refused = fields.CHAT
    default_tokens = 1024
    asks_for = "messages"
    operation = "chat"

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
            why = "nothing here can make a model call a tool"
            raise unsupported("tool_choice", f'tool_choice can be "none" or "auto": {why}')
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


class FlushRequest(Body):
    """Strict: an unknown field may be a misspelt `tiers`, and a flush cannot be undone."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tiers: str | Annotated[list[str], Field(fail_fast=True)] | None = None


class AttachRequest(Body):
    """Strict: an unknown field may be a misspelt policy."""

    model_config = ConfigDict(strict=True, extra="forbid")

    url: str | Annotated[list[str], Field(fail_fast=True)]  # several are tiers
    storage_wait: str | None = None
    write_policy: str | None = None
    back_up: bool | None = None

    def storage(self) -> "AttachRequest":
        return self


class AttachHiCache(Body):
    """The same in SGLang's names. The storage is a URL, or one of SGLang's names with its extra config."""

    model_config = ConfigDict(strict=True, extra="forbid")

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None

    def storage(self) -> AttachRequest:
        return AttachRequest(
            url=storage_url(self.hicache_storage_backend, self.hicache_storage_backend_extra_config_json),
            storage_wait=our_wait(self.hicache_storage_prefetch_policy),
            write_policy=our_write(self.hicache_write_policy),
        )


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], body: bytes, most_values: int = MOST_VALUES) -> BodyT:
    """Parse a JSON body, whatever its content type. Refused if it is not JSON or has too many values."""
    check_values(body, most_values)
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


def check_values(body: bytes, most: int) -> None:
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
