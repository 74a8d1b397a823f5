"""Responses as plain data: OpenAI's forms, whole or as the chunks of a stream. No engine, no socket."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvarve.core.observe.reasons import HITS, Reason
from kvarve.pages.pools import Tier
from kvarve.pages.ticket import Ticket
from kvarve.reference.engine.requests import Finish, Likelihood, OutputChunk, TokenUsage

# vLLM's name: its routers carry this field from one server's answer to the next one's request. What is in it is ours.
TRANSFER = "kv_transfer_params"
Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot express; as OpenAI


def by_tier(reasons: Mapping[Reason, int]) -> dict[str, int]:
    """Tokens of prompts that were cached."""
    return {tier.name.lower(): reasons.get(hit, 0) for tier, hit in zip(Tier, HITS, strict=True)}


@dataclass(frozen=True)
class ResponseUsage:
    """The `usage` of a response: tokens, the prompt's by the reason why they were cached or not, and latencies in ms as
    the server measured them."""

    prompt: int
    completion: int
    reasons: Mapping[Reason, int]
    ttft_ms: float | None
    total_ms: float

    def details(self) -> dict[str, int]:
        return by_tier(self.reasons)

    def json(self) -> Json:
        cached = self.details()
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
    """One answer, as far as it has arrived."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    usage: TokenUsage | None = None  # from its first chunk on; the count of completion tokens is that of its last one
    finish: Finish | None = None
    matched: int | str | None = None  # the token or stop text that ended it
    seconds: float = 0.0  # from the request's arrival to its end

    def add(self, chunk: OutputChunk, seconds: float) -> None:
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.likelihoods += chunk.likelihoods
        self.usage = chunk.usage or self.usage
        if chunk.finish is not None:
            self.finish, self.matched, self.seconds = chunk.finish, chunk.matched, seconds


class Form(Protocol):
    """Writes answers as JSON, whole or as the chunks of a stream."""

    spell: Callable[[int], str] | None  # a token's own text, if likelihoods are to be written

    def whole(self, answers: Sequence[Choice], usage: ResponseUsage, ticket: Ticket | None) -> Any: ...

    def opening(self, index: int) -> Iterator[Json]:
        """What a stream says of an answer before its text."""
        return iter(())

    def chunks(self, index: int, chunk: OutputChunk, answer: Choice) -> Iterator[Json]:
        """What a stream says of one output chunk; the `answer` has it already."""
        ...

    def counted(self, chunk: Json, usage: Callable[[], ResponseUsage]) -> Json:
        """A chunk with the usage so far, if the request wants it."""
        return chunk

    def closing(self, usage: ResponseUsage) -> Iterator[Json]:
        """What a stream says when all answers have ended."""
        return iter(())


@dataclass(frozen=True)
class OpenAIForm(Form):
    """Completions or chat completions."""

    chat: bool
    id: str
    model: str
    spell: Callable[[int], str] | None = None
    include_usage: bool = False
    continuous: bool = False  # each chunk has the usage so far
    details: bool = False  # SGLang's `sglext.cached_tokens_details`
    answers: int = 1  # to each prompt
    echo: Sequence[str] = ()  # the prompts, if answers begin with them
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def whole(self, answers: Sequence[Choice], usage: ResponseUsage, ticket: Ticket | None) -> Json:
        choices = []
        for index, one in enumerate(answers):
            assert one.finish is not None
            message = {"role": "assistant", "content": one.text, "refusal": None}
            content = {"message": message} if self.chat else {"text": self._echoed(index) + one.text}
            choices.append(self._choice(index, content, one.finish.value, one.likelihoods))
        whole = self._head() | {"choices": choices, "usage": usage.json()}
        return whole | self._details(usage) | _transfer(ticket)

    def opening(self, index: int) -> Iterator[Json]:
        """The first chunk of a chat answer names the role; that of a completion is its prompt, if it echoes one."""
        if self.chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
        elif self.echo:
            yield self._chunk(index, {"text": self._echoed(index)}, None)

    def chunks(self, index: int, chunk: OutputChunk, answer: Choice) -> Iterator[Json]:
        """None if the output chunk is empty; a chat's finish reason has a chunk of its own. A ticket comes with the
        finish reason."""
        text, likelihoods, ticket = chunk.text, chunk.likelihoods, chunk.ticket
        finish = None if chunk.finish is None else chunk.finish.value
        if self.chat:
            if text or (self.spell and likelihoods):
                yield self._chunk(index, {"delta": {"content": text}}, None, likelihoods)
            if finish is not None:
                yield self._chunk(index, {"delta": {}}, finish) | _transfer(ticket)
        elif text or finish is not None or (self.spell and likelihoods):
            yield self._chunk(index, {"text": text}, finish, likelihoods) | _transfer(ticket)

    def counted(self, chunk: Json, usage: Callable[[], ResponseUsage]) -> Json:
        return chunk | {"usage": usage().json()} if self.continuous else chunk

    def closing(self, usage: ResponseUsage) -> Iterator[Json]:
        """The chunks after all answers: where tokens were cached, and the usage, if the request wants them."""
        head = self._head(".chunk") | {"choices": []}
        if self.details:
            # SGLang's benchmark of completions, unlike that of chats, reads the first choice of this chunk too.
            chunk = head if self.chat else self._chunk(0, {"text": ""}, None)
            yield chunk | self._details(usage) | ({"usage": None} if self.include_usage else {})
        if self.include_usage:
            yield head | {"usage": usage.json()}

    def _details(self, usage: ResponseUsage) -> Json:
        return {"sglext": {"cached_tokens_details": usage.details()}} if self.details else {}

    def _echoed(self, index: int) -> str:
        return self.echo[index // self.answers] if self.echo else ""

    def _chunk(self, index: int, content: Json, finish: str | None, likelihoods: Sequence[Likelihood] = ()) -> Json:
        chunk = self._head(".chunk") | {"choices": [self._choice(index, content, finish, likelihoods)]}
        return chunk | ({"usage": None} if self.include_usage else {})

    def _choice(self, index: int, content: Json, finish: str | None, likelihoods: Sequence[Likelihood]) -> Json:
        return {"index": index, **content, "logprobs": self._logprobs(likelihoods), "finish_reason": finish}

    def _logprobs(self, likelihoods: Sequence[Likelihood]) -> Json | None:
        if self.spell is None or not likelihoods:
            return None
        spell = self.spell
        if self.chat:
            return {"content": [_chat_logprob(one, spell) for one in likelihoods], "refusal": None}
        return {
            "tokens": [spell(one.token) for one in likelihoods],
            "token_logprobs": [finite(one.logprob) for one in likelihoods],
            "top_logprobs": [_top_logprobs(one, spell) for one in likelihoods],
            "text_offset": [one.offset for one in likelihoods],
        }

    def _head(self, part: str = "") -> Json:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _transfer(ticket: Ticket | None) -> Json:
    return {} if ticket is None else {TRANSFER: {"ticket": ticket.json()}}


def finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _top_logprobs(one: Likelihood, spell: Callable[[int], str]) -> dict[str, float]:
    """Logprobs by text, as in OpenAI's completions; tokens of equal text keep the highest. The sampled token is always
    included."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(spell(token), finite(logprob))
    return found


def _chat_logprob(one: Likelihood, spell: Callable[[int], str]) -> Json:
    def entry(token: int, logprob: float) -> Json:
        text = spell(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    return entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}


def event(data: Json | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
