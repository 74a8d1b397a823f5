"""The HTTP server: OpenAI's endpoints over one engine. Nothing slow runs on its event loop.

A request uses three threads: I/O on the event loop, preparation (JSON, tokens) on a lane, generation on the engine's.
A request whose client disconnects is aborted.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi import Request as Http
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from kvarve.cache.worker import UnderWay
from kvarve.errors import Busy, ConfigError, KvarveError, ModelError, StorageError, TooLong
from kvarve.metrics import Metrics, Snapshot
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.pages.ticket import HandOverError
from kvarve.reference.engine.engine import TURN_S, Engine
from kvarve.reference.server.access import Access, no_browsers
from kvarve.reference.server.admin import HICACHE, admin_routes
from kvarve.reference.server.answers import RETRY_AFTER, Answer, Stream, stopped
from kvarve.reference.server.api import SMALL_BYTES, Asked, ChatRequest, CompletionRequest, FlushRequest, Refused, parse
from kvarve.reference.server.bodies import Bodies
from kvarve.reference.server.connections import Connections
from kvarve.reference.server.engine_routes import Work, add_sglang, add_vllm, folder
from kvarve.reference.server.forms import TRANSFER, Form
from kvarve.reference.server.generate import GenerateRequest
from kvarve.reference.server.live import Live
from kvarve.reference.server.live_cache import page_routes
from kvarve.reference.server.middleware import Drain, Edge
from kvarve.reference.server.openapi import Api, ChatCompletion, Completion, Ok, errors, reads, streams
from kvarve.reference.server.prepare import ClientGone, Prepared, RequestPreparer
from kvarve.reference.server.request_log import Observed, Responses, seen
from kvarve.reference.server.serve_settings import Settings
from kvarve.reference.server.spans import Traces, told
from kvarve.reference.server.trace_out import TraceOut
from kvarve.reference.server.work_threads import Lanes, Shared, apart

FLUSH_S, MOST_FLUSH_S = 60.0, 600.0  # that a flush waits for backups: unless it says, and at most
LIKELIHOOD_BYTES = 256  # of one token with its logprobs in the response

T = TypeVar("T")
# A parameter of the query that is refused if it is there twice: one of the two would be ignored.
Once = Annotated[Sequence[T], Query(max_length=1)]


class Card(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(BaseModel):
    object: str
    data: list[Card]


class Flushed(BaseModel):
    flushed_pages: int
    tiers: list[str]


class Reset(BaseModel):
    success: bool
    flushed_pages: int


def create_app(
    engine: Engine,
    settings: Settings,
    edge: Edge,
    connections: Connections,
    address: str,
    traces: Traces | None,
    trace_out: TraceOut | None,
) -> ASGIApp:
    """The application around a started engine, which stays the caller's to shut down.

    /v1 needs one of the keys if there are any. /admin needs an admin key and is off without one; /flush_cache needs an
    admin key, else an API key. `traces` gets a span for each request for answers. Requests pass the `edge` before the
    endpoints, and after they are observed. `address`: what the server's socket is bound to.
    """
    app = Api()
    access = Access(edge.keys)
    front = _Front(engine, settings, connections, edge.drain, traces, trace_out)
    open_to_all, guarded, flushing = APIRouter(), access.for_clients(), access.for_flushes()
    for path in ("/health", "/readyz", "/livez"):  # of which a drain refuses all but the last
        open_to_all.get(path)(front.health)
    open_to_all.get("/metrics", response_class=PlainTextResponse)(front.metrics)
    guarded.get("/v1/models")(front.models)
    guarded.get("/v1/models/{model:path}", responses=errors(404))(front.one_model)
    said = streams(reads(CompletionRequest, 403, 404))
    guarded.post("/v1/completions", response_model=Completion, **said)(front.completions)
    said = streams(reads(ChatRequest, 403, 404))
    guarded.post("/v1/chat/completions", response_model=ChatCompletion, **said)(front.chat)
    flushing.post("/flush_cache", **reads(FlushRequest, needed=False))(front.flush_cache)
    flushing.post("/reset_prefix_cache", responses=errors(400))(front.reset_prefix_cache)
    no_body = [Depends(no_browsers)]
    flushing.get("/flush_cache", dependencies=no_body, responses=errors(400, 408, 413))(front.flush_cache)
    add_vllm(open_to_all, guarded, front.done)
    add_sglang(open_to_all, guarded, engine, front.name, front.generate)
    for router in (open_to_all, guarded, flushing, admin_routes(engine, access, front.body), page_routes()):
        app.include_router(router)
    watching = [Depends(access.flushing)]  # it is for the operator, as a flush is
    app.get("/live/data", dependencies=watching, include_in_schema=False)(front.live.data)
    # Every error is answered in the form that OpenAI's clients read.
    app.add_exception_handler(KvarveError, _error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _not_that_kind)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    return Observed(edge.around(app, address), front.responses, traces)


class _Front:
    """The endpoints."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        connections: Connections,
        drain: Drain,
        traces: Traces | None,
        trace_out: TraceOut | None,
    ) -> None:
        self._engine, self._connections, self._traces, self._trace_out = engine, connections, traces, trace_out
        self.name, self._started = settings.served_model_name or engine.model.name, int(time.time())
        self.responses: Responses = Counter()
        scraped = Metrics(self._snapshot, settings.metrics_compat or "").text
        self._scrape = Shared(lambda: run_in_threadpool(scraped))  # it holds the GIL, and asks for no key
        self._preparer = RequestPreparer(engine.model, self.name)
        self._lanes = Lanes("kvarve prepare")
        self._preparing: set[Future[Any]] = set()  # requests queued or running on a lane
        self.body = Bodies(settings.max_body_bytes).read
        self.live = Live(engine, self.name, lambda: len(self._preparing), self.responses, lambda: drain.draining)

    async def health(self) -> Ok:
        """Whether the engine serves."""
        if self._engine.broken:
            raise stopped(self._engine, 503)
        return Ok()

    async def metrics(self) -> Response:
        """The metrics of Prometheus."""
        return Response(await self._scrape.get(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self) -> Models:
        """The one model."""
        return Models(object="list", data=[self._card()])

    async def one_model(self, model: str) -> Card:
        """A model by its name."""
        self._preparer.check_model(model)
        return self._card()

    async def completions(self, http: Http) -> Response:
        """Answers to prompts."""
        return await self._answer(http, CompletionRequest, "cmpl-")

    async def chat(self, http: Http) -> Response:
        """Answers to a chat."""
        return await self._answer(http, ChatRequest, "chatcmpl-")

    async def generate(self, http: Http) -> Response:
        """Answers in SGLang's form."""
        return await self._answer(http, GenerateRequest)

    async def flush_cache(
        self,
        http: Http,
        tiers: Annotated[
            Once[str], Field(description="device, host or both with a comma between; both unless given")
        ] = (),
        timeout: Annotated[
            Once[Annotated[float, Field(ge=0, le=MOST_FLUSH_S)]], Field(description="seconds for backups")
        ] = (),
    ) -> Flushed:
        """Evict all unpinned pages of `tiers`, which the query or the body has."""
        async with self.body(http) as body:
            chosen = await apart(lambda: _tiers(tiers, body))
        pages = await self._flush(http, chosen, timeout[0] if timeout else FLUSH_S)
        return Flushed(flushed_pages=pages, tiers=[tier.name.lower() for tier in chosen])

    async def reset_prefix_cache(
        self, http: Http, reset_running_requests: Once[bool] = (), reset_external: Once[bool] = ()
    ) -> Reset:
        """vLLM's name of a flush of all memory. The storage is cleared under its own endpoint, with the admin key."""
        for name, given, instead in (
            ("reset_running_requests", reset_running_requests, ""),
            ("reset_external", reset_external, f": POST {HICACHE}/clear does it"),
        ):
            if any(given):
                raise Refused(400, f"{name} is not supported{instead}", param=name, code="unsupported_parameter")
        return Reset(success=True, flushed_pages=await self._flush(http, list(MEMORY_TIERS), FLUSH_S))

    async def _flush(self, http: Http, tiers: list[Tier], wait_s: float) -> int:
        if self._engine.broken:
            raise stopped(self._engine)
        try:
            flush = asyncio.wrap_future(self._engine.begin_flush(tiers, wait_s))
            pages = await asyncio.wait_for(flush, wait_s + TURN_S)
        except TimeoutError:
            raise Busy(f"the engine did not get round to it within {wait_s + TURN_S:g} s") from None
        seen(http).act = told = f"{pages} pages of the {' and '.join(tier.name.lower() for tier in tiers)} flushed"
        self.live.mark("flush", told)
        return pages

    async def done(self, http: Http, work: Work[T]) -> T:
        """Work on a request's body, done on a lane."""
        async with self.body(http) as body:
            return await asyncio.wrap_future(
                self._on_lane(body, lambda: work(self._preparer, self._engine.model, body))
            )

    # --- the life of one request

    async def _answer(self, http: Http, kind: type[Asked], prefix: str = "") -> Response:
        """`prefix`: of the response's id."""
        answer: Answer | None = None
        noted, recent = seen(http), self.live.recent
        entry = recent.begin(noted.id, http.url.path, noted.key.name if noted.key else "")
        noted.ended = lambda status: recent.end(entry, status, noted.refused.code if noted.refused else None)
        noted.traced = lambda: told(kind.operation, prefix + noted.id, answer)
        try:
            async with self.body(http) as body:
                answer = entry.answer = Answer(self._engine, http.receive, noted.key)
                prepared = await answer.when(self._prepare(answer, kind, body))
            request = prepared.request
            noted.answered = answer.summary
            spell = None if request.alternatives is None else self._preparer.spell
            form = request.form(prefix + noted.id, self.name, spell, prepared.echo)
            # A request that fails before its first token gets an HTTP error, streaming or not.
            first = await answer.next()
            answer.raise_if_failed(first[1])
            if request.stream:
                return Stream(form, answer, first)
            await answer.rest(first[1])
            return await self._whole(form, answer)
        except BaseException as e:  # on any error, cancellation included, the answer is no longer wanted
            if answer is not None:
                answer.close()
            if isinstance(e, ClientGone):
                return await _client_gone(http, e)
            raise

    def _prepare(self, answer: Answer, kind: type[Asked], body: bytes) -> "Future[Prepared]":
        """Prepare a body on a lane, and submit it to the engine."""

        def work() -> Prepared:
            try:
                prepared = self._preparer.prepare(kind, body, lambda: answer.left)
                answer.submit(prepared)
                if self._trace_out is not None:
                    self._trace_out.add(prepared.prompts, answer.salt or "")
            except ConfigError as e:
                raise _with_param(e, kind) from None
            return prepared

        return self._on_lane(body, work)

    def _on_lane(self, body: bytes, work: Callable[[], T]) -> "Future[T]":
        if self._engine.broken:
            raise stopped(self._engine)
        if (before := len(self._preparing)) >= self._engine.capacity_left():
            raise Busy(f"every place is taken, {before} by requests that are being tokenized: try again later")

        future = self._lanes.run(len(body), work)
        self._preparing.add(future)
        future.add_done_callback(self._preparing.discard)
        return future

    async def _whole(self, form: Form, answer: Answer) -> Response:
        choices = answer.choices

        def written() -> Response:
            return JSONResponse(form.whole(choices, answer.usage(), answer.ticket))

        size = sum(len(choice.text) + LIKELIHOOD_BYTES * len(choice.likelihoods) for choice in choices)
        if size <= SMALL_BYTES and form.spell is None:
            return written()
        return await asyncio.wrap_future(self._lanes.run(size, written))  # rendering a long answer is slow

    def _card(self) -> Card:
        return Card(
            id=self.name,
            object="model",
            created=self._started,
            owned_by="kvarve",
            root=folder(self._engine.model),  # from which vLLM's clients load the tokenizer
            parent=None,
            max_model_len=self._engine.model.max_tokens,
        )

    def _snapshot(self) -> Snapshot:
        """The numbers of one moment, for /metrics."""
        try:
            storage = self._engine.cache.worker.usage()  # first: it may be slow
        except StorageError:  # closed, or the medium is gone: the scrape has the rest
            storage = None
        return replace(
            self.live.now(),
            storage=storage,
            connections=len(self._connections),
            closed_connections=dict(self._connections.closed),
            ignored_fields=self._preparer.ignored.counts(),
            spans=None if self._traces is None else self._traces.counts(),
        )


def _tiers(query: Sequence[str], body: bytes) -> list[Tier]:
    """The tiers to flush, nearest first."""
    given: str | list[str] | None = query[0] if query else None
    if given is None and body:
        given = parse(FlushRequest, body).tiers
    if given is None:
        return list(MEMORY_TIERS)
    names = given.split(",") if isinstance(given, str) else given
    known = {tier.name.lower(): tier for tier in MEMORY_TIERS}
    for name in names:
        if name not in known:
            raise Refused(400, f"unknown tier {name!r}; can be flushed: {', '.join(known)}", param="tiers")
    if not names:
        raise Refused(400, f"no tier to flush; known: {', '.join(known)}", param="tiers")
    return sorted({known[name] for name in names})


def _with_param(error: ConfigError, kind: type[Asked]) -> Refused | HandOverError:
    """An error of the engine's as OpenAI's clients read it: with the field that it names first, if any."""
    if isinstance(error, HandOverError):
        return error
    words, code = (
        str(error).replace(":", " ").split(),
        "context_length_exceeded" if isinstance(error, TooLong) else None,
    )
    param = next((word for word in words if word in kind.model_fields), None)
    return Refused(400, str(error), param=param, code=code)


async def _error(http: Http, e: Exception) -> Response:
    if isinstance(e, Refused):
        refused = e
    elif isinstance(e, ConfigError | ModelError):
        refused = Refused(400, str(e), param=TRANSFER if isinstance(e, HandOverError) else None)
    elif isinstance(e, UnderWay):
        refused = Refused(409, str(e), code="change_under_way")
    elif isinstance(e, Busy):
        refused = Refused(503, str(e), code="busy", headers=RETRY_AFTER)
    else:
        refused = Refused(500, str(e))
    return _refused(http, refused)


async def _http_error(http: Http, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    return _refused(http, Refused(e.status_code, f"{http.method} {http.url.path}: {e.detail}", headers=e.headers))


async def _not_that_kind(http: Http, e: Exception) -> Response:
    """A parameter of the path or the query is of another type, or is there twice."""
    assert isinstance(e, RequestValidationError)
    first = e.errors()[0]
    name = str(first["loc"][1])
    twice = first["type"] == "too_long"
    message = f"{name} is given {first['ctx']['actual_length']} times" if twice else f"{name}: {first['msg']}"
    return _refused(http, Refused(400, message, param=name))


async def _client_gone(http: Http, e: Exception) -> Response:
    return Response(status_code=499)  # the client disconnected before the request was complete, so this is never read


async def _bug(http: Http, e: Exception) -> Response:
    return _refused(http, Refused(500, f"a bug: {type(e).__name__}: {e}"))


def _refused(http: Http, refused: Refused) -> Response:
    seen(http).refused = refused
    return refused.response()
