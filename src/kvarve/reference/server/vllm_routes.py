"""vLLM's endpoints, for its clients: tokens of a text, a flush under its name, the version."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as Http
from pydantic import BaseModel, Field

from kvarve import __version__
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.server import fields
from kvarve.reference.server.api import MOST_VALUES, Body, Message, Refused, parse
from kvarve.reference.server.openapi import reads
from kvarve.reference.server.prepare import RequestPreparer


class TokenizeRequest(Body):
    refused = fields.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        self.refuse()
        if (self.prompt is None) == (self.messages is None):
            raise Refused(400, "a request has prompt or messages, one of them", param="prompt")


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Any]

    def check(self) -> None:
        if not all(type(token) is int for token in self.tokens):
            raise Refused(400, "tokens must be a list of token ids", param="tokens")


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


def tokenize(preparer: RequestPreparer, model: LoadedModel, body: bytes) -> Tokens:
    """The tokens of a prompt or of messages."""
    request = parse(TokenizeRequest, body)
    preparer.check_model(request.model)
    text, special = request.prompt, request.prompt is not None
    if request.messages is not None:
        messages = [message.rendered(f"messages[{i}]") for i, message in enumerate(request.messages)]
        text = model.render_chat(messages, request.tools or None, request.chat_template_kwargs or {})
    assert text is not None
    special = special if request.add_special_tokens is None else request.add_special_tokens
    param = "messages" if request.prompt is None else "prompt"
    tokens = preparer.tokens(text, param, lambda: False, special=special)
    named = model.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
    return Tokens(count=len(tokens), max_model_len=model.max_tokens, tokens=tokens, token_strs=named)


def detokenize(preparer: RequestPreparer, model: LoadedModel, body: bytes) -> Text:
    """The text of tokens."""
    request = parse(DetokenizeRequest, body, model.max_tokens + MOST_VALUES)
    preparer.check_model(request.model)
    return Text(prompt=preparer.text(request.tokens))


T = TypeVar("T")
Work = Callable[[RequestPreparer, LoadedModel, bytes], T]


def add_vllm(open_to_all: APIRouter, guarded: APIRouter, done: Callable[[Http, Work[Any]], Awaitable[Any]]) -> None:
    """`done` has work on a request's body done on a lane; `guarded` is for what needs the API key."""

    def on_a_lane(work: Work[Any]) -> Callable[[Http], Awaitable[Any]]:
        async def endpoint(http: Http) -> Any:
            return await done(http, work)

        return endpoint

    for work, kind, answer in ((tokenize, TokenizeRequest, Tokens), (detokenize, DetokenizeRequest, Text)):
        said: dict[str, Any] = {"name": work.__name__, "description": work.__doc__, "response_model": answer}
        guarded.post(f"/{work.__name__}", **said, **reads(kind, 403, 404))(on_a_lane(work))

    @open_to_all.get("/version")
    async def version() -> Version:
        """kvarve's version."""
        return Version(version=__version__)
