"""SGLang's and vLLM's endpoints, for their clients: /generate, what the server is, and whether it answers; tokens of a
text, and the version."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as Http
from pydantic import BaseModel, Field

from kvarve import __version__
from kvarve.errors import Busy
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.requests import Request, Sampling
from kvarve.reference.server import fields
from kvarve.reference.server.answers import RETRY_AFTER
from kvarve.reference.server.api import MOST_VALUES, Body, Message, Refused, parse
from kvarve.reference.server.generate import GenerateRequest
from kvarve.reference.server.openapi import Generated, Json, Ok, reads, streams
from kvarve.reference.server.prepare import RequestPreparer
from kvarve.settings.engine_flags import their_wait, their_write
from kvarve.storage.urls import shown

HEALTH_S = 20.0  # as SGLang
LOOK_S = 0.02


class Probe:
    """Computes a token to see whether the engine does; several that ask at once share one answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: asyncio.Task[bool] | None = None

    async def health(self) -> Ok:
        """200 if a token was computed within 20 s, for this or for another request."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._computes())
        if self._engine.broken or not await asyncio.shield(self._asked):
            why = self._engine.broken or f"no token was computed within {HEALTH_S:.0f} s"
            raise Refused(503, why, headers=RETRY_AFTER)
        return Ok()

    async def _computes(self) -> bool:
        before, end = self._progress(), time.monotonic() + HEALTH_S
        request = Request([0], Sampling(max_tokens=1), read_cache=False, deliver=lambda chunk: None)
        with suppress(Busy):  # every place is taken: then others' tokens have to come
            self._engine.submit(request)
        while self._progress() == before:
            if time.monotonic() > end or self._engine.broken:
                self._engine.abort(request)
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _progress(self) -> tuple[int, int]:
        counts = self._engine.counts
        return counts.output_tokens, counts.computed_tokens


def folder(model: LoadedModel) -> str:
    """The checkpoint's, from which a client on the same machine loads the tokenizer."""
    return str(model.tokenizer.name_or_path)


def describe(engine: Engine, name: str) -> dict[str, Any]:
    """/model_info."""
    config, place = engine.model.model.config, folder(engine.model)
    return {
        "model_path": place,
        "tokenizer_path": place,
        "served_model_name": name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": getattr(config, "model_type", None),
        "architectures": getattr(config, "architectures", None),
    }


def state(engine: Engine, name: str) -> dict[str, Any]:
    """/server_info."""
    cache, model = engine.cache, engine.model
    policies, (running, waiting) = cache.worker.config.policies, engine.load()
    told = describe(engine, name)
    return {
        **{field: told[field] for field in ("model_path", "tokenizer_path", "served_model_name")},
        "dtype": model.identity.dtype,
        "kv_cache_dtype": model.layout.kv_cache_dtype,
        "context_length": model.max_tokens,
        "page_size": model.identity.page_tokens,
        "chunked_prefill_size": engine.turn_tokens,
        "tp_size": cache.identity.ranks,
        "dp_size": 1,
        "max_total_num_tokens": cache.scheduler.capacity_tokens(),
        "radix_eviction_policy": policies.eviction,
        "enable_hierarchical_cache": bool(cache.worker.config.host_memory),
        "hicache_write_policy": their_write(policies.write_policy),
        **storage_state(engine),
        "internal_states": [{"num_running_reqs": running, "num_waiting_reqs": waiting}],
        "version": __version__,
        "server": "kvarve",
    }


def storage_state(engine: Engine) -> dict[str, Any]:
    """Which storage is attached, in SGLang's names."""
    attached, policies = engine.cache.worker.attached, engine.cache.worker.config.policies
    urls = [] if attached is None else [shown(url) for url in attached.urls]
    return {
        "hicache_storage_backend": ", then ".join(urls) or None,
        "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": their_wait(policies.storage_wait),
        "hicache_write_policy": their_write(policies.write_policy),
    }


def add_sglang(
    open_to_all: APIRouter, guarded: APIRouter, engine: Engine, name: str, generate: Callable[[Http], Any]
) -> None:
    """All but the operator's; `guarded` is for those that need the API key."""

    async def model_info() -> Json:
        """The model's folder and name."""
        return describe(engine, name)

    async def server_info() -> Json:
        """Pages, limits, policies, the storage, the load."""
        return state(engine, name)

    said = streams(reads(GenerateRequest, 403, 404))
    for add in (guarded.post, guarded.put):
        add("/generate", response_model=Generated | list[Generated], **said)(generate)
    for path in ("/model_info", "/get_model_info"):
        guarded.get(path)(model_info)
    for path in ("/server_info", "/get_server_info"):
        guarded.get(path)(server_info)
    open_to_all.get("/health_generate")(Probe(engine).health)


# --- vLLM's


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
