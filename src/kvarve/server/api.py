"""What may be asked over HTTP and how it is answered: OpenAI's words, as plain data. No engine, no socket.

A field that would change the answer is either obeyed or refused, never ignored; a field that nobody knows is ignored.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvarve.errors import KvarveError

# What is known elsewhere and not done here, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "documents": ([],),
    "prompt_embeds": (),
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
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _same(one: Any, other: Any) -> bool:
    """Equal, and not as 0 equals false."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


class _Words(BaseModel):
    # Strict: a number written as a string is a mistake that should be heard of.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def check(self) -> None:
        """Refuse what is well written and cannot be done."""


class StreamOptions(_Words):
    include_usage: bool | None = None


class Asked(_Words):
    """What both kinds of request may say; null means that nothing was said."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    cache_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # for --eviction priority: high stays
    skip_reading_prefix_cache: bool | None = None

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None and not any(_same(value, ok) for ok in UNSUPPORTED[name]):
                raise Refused(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        if len(self.stops) > 4:
            raise Refused(400, f"at most 4 stop texts, not {len(self.stops)}", param="stop")
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options need stream to be true", param="stream_options")


class CompletionAsked(Asked):
    prompt: str | list[Any]

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


class Part(_Words):
    type: str
    text: str | None = None


class Message(_Words):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None

    def rendered(self, place: str) -> dict[str, str]:
        """What a chat template reads. Parts are joined by line ends, as vLLM does."""
        for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise Refused(400, f"{place}.{name} is not supported", param="messages", code="unsupported_parameter")
        content = self.content
        if isinstance(content, list):
            if odd := next((part for part in content if part.type != "text" or part.text is None), None):
                raise Refused(400, f"{place} has a part of type {odd.type!r}: only text is read", param="messages")
            content = "\n".join(part.text or "" for part in content)
        if content is None:
            raise Refused(400, f"{place} has no content", param="messages")
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class ChatAsked(Asked):
    messages: Annotated[list[Message], Field(min_length=1)]

    def rendered(self) -> list[dict[str, str]]:
        return [message.rendered(f"messages[{i}]") for i, message in enumerate(self.messages)]


class FlushAsked(_Words):
    tiers: str | list[str] | None = None


WordsT = TypeVar("WordsT", bound=_Words)


def parse(kind: type[WordsT], body: bytes) -> WordsT:
    """The request in a body of JSON, whatever its content type; Refused if it is none."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise Refused(400, f"the body is not JSON: {first['msg']}", code="invalid_json") from None
        place = ".".join(str(step) for step in first["loc"]) or "the body"
        param = str(first["loc"][0]) if first["loc"] else None
        raise Refused(400, f"{place}: {first['msg']}", param=param) from None
    asked.check()
    return asked


@dataclass(frozen=True)
class Told:
    """The numbers of an answer: tokens, those cached by tier, and milliseconds as the server saw them."""

    prompt: int
    completion: int
    cached: dict[str, int]
    ttft_ms: float | None
    total_ms: float

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "kvarve": {"cached_tokens": self.cached, "ttft_ms": self.ttft_ms, "total_ms": self.total_ms},
        }


@dataclass(frozen=True)
class Form:
    """How an answer is written: as a completion or as a chat, whole or in chunks."""

    chat: bool
    id: str
    created: int  # seconds since 1970
    model: str

    def whole(self, text: str, finish: str, told: Told) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._head(self._kind) | {"choices": [choice], "usage": told.usage()}

    def opening(self) -> dict[str, Any] | None:
        """The first chunk, which says who speaks; a completion has none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.chat else None

    def chunk(self, text: str, finish: str | None) -> dict[str, Any]:
        if not self.chat:
            return self._chunk({"text": text}, finish)
        return self._chunk({"delta": {"content": text} if text else {}}, finish)

    def closing(self, told: Told) -> dict[str, Any]:
        """The chunk after the last, for those who asked for the usage."""
        return self._head(self._kind_of_chunk) | {"choices": [], "usage": told.usage()}

    def _chunk(self, said: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._head(self._kind_of_chunk) | {"choices": [choice]}

    @property
    def _kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    @property
    def _kind_of_chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
