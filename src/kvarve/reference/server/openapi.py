"""What /openapi.json says besides what FastAPI finds in the endpoints: answers in their forms, errors, and bodies,
which endpoints read themselves, within limits."""

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvarve import __version__
from kvarve.reference.server.api import Body

Json = dict[str, Any]
PATH = "/openapi.json"
_REF = "#/components/schemas/{model}"
_ABOUT = (
    "Any other path gets 404 and any other method 405, in the form of the other errors. A body is read as JSON "
    "whatever its Content-Type says."
)
_WHY = {
    400: "the request cannot be read, or asks for what cannot be served; `param` names the field",
    401: "the key is missing or wrong",
    403: "a page in a browser may not ask for this, or the server has no admin key",
    404: "there is no such model or path",
    408: "the body did not arrive in time",
    409: "a change is under way, or the storage is in another state",
    413: "the body is too large",
    415: "the body is a form",
    421: "the server does not answer to the name in Host",
    500: "the answer could not be computed: `message` says why",
    503: "the server is full, draining or without its engine; empty if no connection was free",
}


class WhyNot(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: WhyNot


class Ok(BaseModel):
    status: Literal["ok"] = "ok"


class TokensByTier(BaseModel):
    device: int
    host: int
    storage: int


class PromptTokens(BaseModel):
    cached_tokens: int


class UsageOfCache(BaseModel):
    cached_tokens: TokensByTier
    reasons: dict[str, int]
    ttft_ms: float | None
    total_ms: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    kvarve: UsageOfCache


class Choice(BaseModel):
    index: int
    logprobs: Json | None
    finish_reason: Literal["stop", "length", "abort"]


class TextChoice(Choice):
    text: str


class Said(BaseModel):
    role: str
    content: str


class ChatChoice(Choice):
    message: Said


class Answers(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class Completion(Answers):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Answers):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class MetaInfo(BaseModel):
    id: str
    finish_reason: Json
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: TokensByTier


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Api(FastAPI):
    """An application with the endpoints alone that it is given, and their document."""

    def __init__(self) -> None:
        # A path with a slash at its end is not redirected: that would name the scheme and the host that this server
        # sees, which behind a proxy are not the client's.
        super().__init__(
            title="kvarve",
            version=__version__,
            description=_ABOUT,
            docs_url=None,
            redoc_url=None,
            openapi_url=PATH,
            redirect_slashes=False,
            responses=errors(421, 500, 503),
        )

    def openapi(self) -> Json:
        if (told := self.openapi_schema) is None:
            told = super().openapi()
            for operation in (each for methods in told["paths"].values() for each in methods.values()):
                operation["responses"].pop("422", None)  # of FastAPI's own errors, which are 400 here
            schemas = told["components"]["schemas"]
            del schemas["HTTPValidationError"], schemas["ValidationError"]
            schemas |= models_json_schema([(kind, "validation") for kind in _read], ref_template=_REF)[1]["$defs"]
        return told


_read: set[type[BaseModel]] = {Error}  # the types of this document that FastAPI does not know of


def _json(kind: type[BaseModel]) -> Json:
    return {"application/json": {"schema": {"$ref": _REF.format(model=kind.__name__)}}}


def errors(*statuses: int) -> dict[int | str, Json]:
    """The `responses` of an endpoint or router that answers with these errors too."""
    again = {"headers": {"Retry-After": {"required": True, "schema": {"type": "integer"}}}}
    told = {status: {"description": _WHY[status], "content": _json(Error)} for status in statuses}
    return {status: one | again if status == 503 else one for status, one in told.items()}


def reads(kind: type[Body], *statuses: int, needed: bool = True) -> Json:
    """The keywords of an endpoint that reads a body of this kind, and of its errors, which may have more `statuses`."""
    _read.add(kind)
    body = {"required": needed, "content": _json(kind)}
    return {"openapi_extra": {"requestBody": body}, "responses": errors(400, 408, 413, *statuses)}


def streams(said: Mapping[str, Any]) -> Json:
    """The same keywords, of an endpoint that answers with events if it is asked to."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    ok = {200: {"content": {"text/event-stream": {"schema": event}}}}
    return {**said, "responses": said["responses"] | ok}
