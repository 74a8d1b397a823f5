"""The OpenAPI document at /openapi.json: what an application really serves. No engine, no socket.

Paths and methods are those of the application's routes, bodies those that `api.parse` reads, with the fields that
`fields` refuses. Endpoints read raw bodies and write raw answers, so the rest, which FastAPI cannot know, is in one
table here. Nothing in the document is of one server but which keys it asks for.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from kvarve import __version__
from kvarve.reference.server.admin import HICACHE
from kvarve.reference.server.api import AttachHiCache, AttachRequest, Body, ChatRequest, CompletionRequest, FlushRequest
from kvarve.reference.server.generate import GenerateRequest
from kvarve.reference.server.keyfile import Keyring
from kvarve.reference.server.vllm_routes import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]
PATH = "/openapi.json"
KEY, ADMIN_KEY = "key", "admin key"  # the names of its security schemes
TEXT, EVENTS, JSON = "text/plain", "text/event-stream", "application/json"
_REF = "#/components/schemas/{model}"

ERRORS = {
    400: "the request cannot be read, or asks for what cannot be served; `param` names the field",
    401: "the key is missing or wrong",
    403: "a page in a browser may not ask for this, or the server has no admin key",
    404: "there is no such model or path",
    408: "the body did not arrive in time",
    409: "a change is under way, or the storage is in another state",
    413: "the body is too large",
    415: "the body is a form",
    421: "the server does not answer to the name in Host",
    429: "the key's limits are reached; Retry-After says for how long",
    500: "the answer could not be computed: `message` says why",
    502: "the replica that was asked ended before it had answered",
    503: "the server is full, draining or without its engine; empty if no connection was free",
}
ALWAYS, WITH_BODY = (421, 500, 503), (400, 408, 413)


def _object(*required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


def _or_null(kind: str) -> Json:
    return {"type": [kind, "null"]}


TEXT_, WHOLE, NUMBER, FLAG, ANY = ({"type": kind} for kind in ("string", "integer", "number", "boolean", "object"))
ERROR = _object(error=_object(message=TEXT_, type=TEXT_, param=_or_null("string"), code=_or_null("string")))
_TIERS = _object(device=WHOLE, host=WHOLE, storage=WHOLE)
_USAGE = _object(
    prompt_tokens=WHOLE,
    completion_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details=_object(cached_tokens=WHOLE),
    kvarve=_object(
        cached_tokens=_TIERS,
        reasons={"type": "object", "additionalProperties": WHOLE},
        ttft_ms=_or_null("number"),
        total_ms=NUMBER,
    ),
)
_CARD = _object(id=TEXT_, object=TEXT_, created=WHOLE, owned_by=TEXT_, root=TEXT_, max_model_len=WHOLE)
_OK = _object(status=TEXT_)
_FINISHED = {"enum": ["stop", "length", "abort"]}
_GENERATED = _object(
    text=TEXT_,
    output_ids=_list(WHOLE),
    meta_info=_object(
        id=TEXT_,
        finish_reason=ANY,
        prompt_tokens=WHOLE,
        completion_tokens=WHOLE,
        cached_tokens=WHOLE,
        cached_tokens_details=_TIERS,
    ),
)


def _answers(content: Json, name: str) -> Json:
    """OpenAI's answers; `content` has the text of one."""
    one = _object(index=WHOLE, logprobs=_or_null("object"), finish_reason=_FINISHED, **content)
    head: Json = {"id": TEXT_, "object": {"const": name}, "created": WHOLE, "model": TEXT_}
    return _object(**head, choices=_list(one), usage=_USAGE)


@dataclass(frozen=True)
class Operation:
    """What an endpoint does, reads and answers."""

    what: str
    answer: Json | None = None  # None: text
    body: type[Body] | None = None
    needs_body: bool = True
    key: str = ""  # "api", "flush" (an admin key if there may be one, else an API key) or "admin"
    streams: bool = False
    errors: tuple[int, ...] = ()  # beside those of its key and its body
    query: tuple[tuple[str, Json, str], ...] = ()  # name, schema, what it says
    status: int = 200


_MODEL_INFO = Operation("The model's folder and name.", ANY, key="api")
_SERVER_INFO = Operation("Pages, limits, policies, the storage, the load.", ANY, key="api")
_FLUSHED = _object(flushed_pages=WHOLE, tiers=_list(TEXT_))
_FLUSH = Operation(
    "Evicts all unpinned pages.",
    _FLUSHED,
    FlushRequest,
    needs_body=False,
    key="flush",
    query=(
        ("tiers", TEXT_, "device, host or both with a comma between; both unless given"),
        ("timeout", {"anyOf": [NUMBER | {"minimum": 0, "maximum": 600}, {"const": ""}]}, "seconds for backups"),
    ),
)
_GENERATE = Operation(
    "Answers in SGLang's form.",
    {"anyOf": [_GENERATED, _list(_GENERATED)]},
    GenerateRequest,
    key="api",
    streams=True,
    errors=(404,),
)
_ATTACHING = (400, 409)
_FLAG = {"type": "string", "enum": ["false", "0", "no", "off"]}

# By path, and by method where they differ.
OPERATIONS: dict[str, Operation | dict[str, Operation]] = {
    "/health": Operation("Whether the engine serves.", _OK),
    "/metrics": Operation("The metrics of Prometheus."),
    "/version": Operation("kvarve's version.", _object(version=TEXT_)),
    PATH: Operation("This document.", _object(openapi=TEXT_, info=ANY, paths=ANY)),
    "/v1/models": Operation("The one model.", _object(object=TEXT_, data=_list(_CARD)), key="api"),
    "/v1/models/{model}": Operation("A model by its name.", _CARD, key="api", errors=(404,)),
    "/v1/completions": Operation(
        "Answers to prompts.",
        _answers({"text": TEXT_}, "text_completion"),
        CompletionRequest,
        key="api",
        streams=True,
        errors=(404,),
    ),
    "/v1/chat/completions": Operation(
        "Answers to a chat.",
        _answers({"message": _object(role=TEXT_, content=TEXT_)}, "chat.completion"),
        ChatRequest,
        key="api",
        streams=True,
        errors=(404,),
    ),
    "/generate": _GENERATE,
    "/model_info": _MODEL_INFO,
    "/get_model_info": _MODEL_INFO,
    "/server_info": _SERVER_INFO,
    "/get_server_info": _SERVER_INFO,
    "/health_generate": Operation("Computes a token.", _OK),
    "/tokenize": Operation(
        "The tokens of a prompt or of messages.",
        _object(count=WHOLE, max_model_len=WHOLE, tokens=_list(WHOLE), token_strs={"type": ["array", "null"]}),
        TokenizeRequest,
        key="api",
        errors=(404,),
    ),
    "/detokenize": Operation("The text of tokens.", _object(prompt=TEXT_), DetokenizeRequest, key="api", errors=(404,)),
    "/flush_cache": _FLUSH,
    "/reset_prefix_cache": Operation(
        "Evicts all unpinned pages, under vLLM's name.",
        _object(success=FLAG, flushed_pages=WHOLE),
        key="flush",
        errors=(400,),
        query=(("reset_running_requests", _FLAG, "not supported"), ("reset_external", _FLAG, "not supported")),
    ),
    "/admin/storage": {
        "get": Operation("The storage.", ANY, key="admin"),
        "put": Operation("Attaches a storage.", ANY, AttachRequest, key="admin", errors=_ATTACHING),
        "delete": Operation("Detaches the storage.", ANY, key="admin", errors=_ATTACHING),
    },
    HICACHE: {
        "get": Operation("The storage, in SGLang's names.", ANY, key="admin"),
        "put": Operation("Attaches a storage, in SGLang's names.", ANY, AttachHiCache, key="admin", errors=_ATTACHING),
        "delete": Operation("Detaches the storage.", ANY, key="admin", errors=_ATTACHING),
    },
    f"{HICACHE}/clear": Operation(
        "Drops this model's pages from storage.", _object(dropped_objects=WHOLE), key="admin", errors=_ATTACHING
    ),
    "/admin/replicas": Operation("The replicas.", _object(replicas=_list(ANY)), key="admin"),
    "/admin/replicas/{number}/restart": Operation(
        "Drains a replica and starts it anew.", ANY, key="admin", errors=(400, 404, 409), status=202
    ),
}


def document(routes: Sequence[BaseRoute], keys: Keyring) -> Json:
    """The document of these routes, as JSON. `keys`: which the server asks for."""
    kinds = {each.body for told in OPERATIONS.values() for each in _each(told) if each.body is not None}
    models = sorted(kinds, key=lambda kind: kind.__name__)
    names, made = models_json_schema([(kind, "validation") for kind in models], ref_template=_REF)
    bodies = {kind: names[kind, "validation"] for kind in models}
    whole = get_openapi(title="kvarve", version=__version__, routes=routes)
    whole["info"]["description"] = (
        "Any other path gets 404 and any other method 405, in the form of the other errors. A body is read as JSON "
        "whatever its Content-Type says."
    )
    for path, methods in whole["paths"].items():
        for method in methods:
            told = OPERATIONS[path]
            operation = told if isinstance(told, Operation) else told[method]
            methods[method] = _written(operation, method, methods[method], keys, bodies)
    bearer = {"type": "http", "scheme": "bearer"}
    whole["components"] = {
        "schemas": {"Error": ERROR} | made["$defs"],
        "securitySchemes": {KEY: bearer, ADMIN_KEY.replace(" ", "_"): bearer},
    }
    return whole


def _each(told: Operation | dict[str, Operation]) -> list[Operation]:
    return [told] if isinstance(told, Operation) else [*told.values()]


def _written(told: Operation, method: str, known: Json, keys: Keyring, bodies: dict[type[Body], Json]) -> Json:
    """One operation; `known`: what FastAPI says of it."""
    admin = told.key == "admin" or (told.key == "flush" and keys.guards_admin)
    guarded = told.key != "" and (admin or keys.guards_api)
    errors = {*ALWAYS, *told.errors}
    if guarded:
        errors.add(401)
    if told.key == "api":
        errors |= {403, 429} if method != "get" else set()
    elif told.key:
        errors.add(403)
    if told.key == "flush":
        errors.add(415)
    if told.body is not None:
        errors |= {*WITH_BODY}
    written: Json = {"summary": told.what, "operationId": known["operationId"], "responses": {}}
    parameters = [
        each | {"schema": TEXT_} if each["in"] == "path" and each["name"] == "model" else each
        for each in known.get("parameters", ())
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": what}
        for name, schema, what in told.query
    ]
    if parameters:
        written["parameters"] = parameters
    if told.body is not None:
        content = {JSON: {"schema": bodies[told.body]}}
        written["requestBody"] = {"required": told.needs_body, "content": content}
    content = {TEXT: {"schema": TEXT_}} if told.answer is None else {JSON: {"schema": told.answer}}
    if told.streams:
        content[EVENTS] = {"schema": _object(data=TEXT_)}  # of each event
    written["responses"][str(told.status)] = {"description": "the answer", "content": content}
    refused = {JSON: {"schema": {"$ref": _REF.format(model="Error")}}}
    for status in sorted(errors):
        answer: Json = {"description": ERRORS[status], "content": refused}
        if status in (429, 503):
            answer["headers"] = {"Retry-After": {"required": True, "schema": WHOLE}}
        written["responses"][str(status)] = answer
    written["security"] = [{(ADMIN_KEY if admin else KEY).replace(" ", "_"): []}] if guarded else []
    return written


def openapi_routes(routes: Callable[[], Sequence[BaseRoute]], keys: Keyring) -> APIRouter:
    """The document's own, which needs no key: it says what is in the manual. `routes`: all, these included."""
    router = APIRouter()
    router.get(PATH)(_told(lambda: document(routes(), keys)))
    return router


def _told(make: Callable[[], Json]) -> Callable[[], Awaitable[Response]]:
    made: list[Json] = []

    async def endpoint() -> Response:
        if not made:
            made.append(make())
        return JSONResponse(made[0])

    return endpoint
