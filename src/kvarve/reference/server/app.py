"""The HTTP server: OpenAI's endpoints over one engine. Nothing slow runs on its event loop.

A request uses three threads: I/O on the event loop, preparation (JSON, tokens) on a lane, generation on the engine's.
A request whose client disconnects is aborted.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from math import ceil
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as Http
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from kvarve import __version__
from kvarve.cache.worker import UnderWay
from kvarve.errors import Busy, ConfigError, KvarveError, ModelError, TooLong
from kvarve.metrics import Metrics, Snapshot
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.pages.ticket import HandOverError
from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.access import Access, no_browsers, no_forms, no_pages, no_simple_requests
from kvarve.reference.server.admin import HICACHE, admin_routes
from kvarve.reference.server.answers import RETRY_AFTER, Answer, Stream, stopped
from kvarve.reference.server.api import SMALL_BYTES, Asked, ChatRequest, CompletionRequest, FlushRequest, Refused, parse
from kvarve.reference.server.bodies import MAX_BODY_BYTES, Bodies
from kvarve.reference.server.connections import Connections
from kvarve.reference.server.forms import TRANSFER, Form
from kvarve.reference.server.generate import GenerateRequest
from kvarve.reference.server.keyfile import Keyring
from kvarve.reference.server.live import Live, page_routes, rejections
from kvarve.reference.server.numbers import snapshot
from kvarve.reference.server.openapi import openapi_routes
from kvarve.reference.server.prepare import ClientGone, Prepared, RequestPreparer
from kvarve.reference.server.quotas import OverQuota
from kvarve.reference.server.request_log import Observed, Responses, acts, seen
from kvarve.reference.server.sglang_routes import folder, sglang_routes
from kvarve.reference.server.spans import Traces, told
from kvarve.reference.server.vllm_routes import Work, vllm_routes
from kvarve.reference.server.work_threads import Lanes, Shared, apart

FLUSH_S, MOST_FLUSH_S = 60.0, 600.0  # that a flush waits for backups: unless it says, and at most
LIKELIHOOD_BYTES = 256  # of one token with its logprobs in the response

T = TypeVar("T")


def create_app(
    engine: Engine,
    *,
    name: str | None = None,
    keys: Keyring | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    connections: Connections | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    metrics_compat: str = "",
    traces: Traces | None = None,
) -> ASGIApp:
    """The application around a started engine, which stays the caller's to shut down.

    `name`: the served model name (the model's own unless given). /v1 needs one of the `keys` if there are any. /admin
    needs an admin key and is off without one; /flush_cache needs an admin key, else an API key. /metrics reports the
    `connections`, under the names of `metrics_compat` too. `traces` gets a span for each request for answers. `around`
    gets requests before the endpoints do, and after they are observed.
    """
    app = without_extras()
    access = Access(keys or Keyring())
    front = _Front(engine, name or engine.model.name, max_body_bytes, connections, metrics_compat, access, traces)
    guards = [Depends(no_simple_requests), Depends(access.api)]
    open_to_all, guarded = APIRouter(), APIRouter(dependencies=guards)
    flushing = APIRouter(dependencies=[Depends(acts), Depends(no_pages), Depends(no_forms), Depends(access.flushing)])
    open_to_all.get("/health")(front.health)
    open_to_all.get("/metrics")(front.metrics)
    guarded.get("/v1/models")(front.models)
    guarded.get("/v1/models/{model:path}")(front.one_model)
    guarded.post("/v1/completions")(front.completions)
    guarded.post("/v1/chat/completions")(front.chat)
    flushing.post("/flush_cache")(front.flush_cache)
    flushing.post("/reset_prefix_cache")(front.reset_prefix_cache)
    flushing.get("/flush_cache", dependencies=[Depends(no_browsers)])(front.flush_cache)
    for router in (open_to_all, guarded, flushing):
        app.include_router(router)
    app.include_router(vllm_routes(front.done, guards))
    app.include_router(sglang_routes(engine, front.name, front.generate, guards))
    app.include_router(admin_routes(engine, access, front.body))
    app.include_router(page_routes())
    app.include_router(openapi_routes(lambda: app.routes, access.keys))
    watching = [Depends(access.flushing)]  # it is for the operator, as a flush is
    app.get("/live/data", dependencies=watching, include_in_schema=False)(front.live.data)
    add_errors(app)
    return Observed(around(app), front.responses, traces)


def without_extras() -> FastAPI:
    """An application with the endpoints alone that it is given."""
    # A path with a slash at its end is not redirected: that would name the scheme and the host that this server sees,
    # which behind a proxy or a front are not the client's.
    return FastAPI(
        title="kvarve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )


def add_errors(app: FastAPI) -> None:
    """Have every error answered in the form that OpenAI's clients read."""
    app.add_exception_handler(KvarveError, _error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _not_that_kind)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)


class _Front:
    """The endpoints."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        max_body_bytes: int,
        connections: Connections | None,
        metrics_compat: str,
        access: Access,
        traces: Traces | None,
    ) -> None:
        self._engine, self.name, self._connections, self._traces = engine, name, connections, traces
        self._access, self._started = access, int(time.time())
        self.responses: Responses = Counter()
        scraped = Metrics(self._snapshot, metrics_compat).text
        self._scrape = Shared(lambda: run_in_threadpool(scraped))  # it holds the GIL, and asks for no key
        self._preparer = RequestPreparer(engine.model, name)
        self._lanes = Lanes("kvarve prepare")
        self._preparing: set[Future[Any]] = set()  # requests queued or running on a lane
        self.body = Bodies(max_body_bytes).read
        self.live = Live(
            engine, self.name, tokenizing=lambda: len(self._preparing), rejected=lambda: rejections(self.responses)
        )

    async def health(self) -> Response:
        if self._engine.broken:
            raise stopped(self._engine, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(await self._scrape.get(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, model: str) -> Response:
        self._preparer.check_model(model)
        return JSONResponse(self._card())

    async def completions(self, http: Http) -> Response:
        return await self._answer(http, CompletionRequest, "cmpl-")

    async def chat(self, http: Http) -> Response:
        return await self._answer(http, ChatRequest, "chatcmpl-")

    async def generate(self, http: Http) -> Response:
        return await self._answer(http, GenerateRequest)

    async def flush_cache(self, http: Http) -> Response:
        """Evict all unpinned pages of `tiers` (in the query or the body: "device", "device,host"; default both)."""
        async with self.body(http) as body:
            tiers = await apart(lambda: _tiers(asked(http, "tiers", None), body))
            wait_s = _seconds(asked(http, "timeout", None))
        pages = await self._flush(http, tiers, wait_s)
        return JSONResponse({"flushed_pages": pages, "tiers": [tier.name.lower() for tier in tiers]})

    async def reset_prefix_cache(self, http: Http) -> Response:
        """vLLM's name of a flush of all memory. The storage is cleared under its own endpoint, with the admin key."""
        for name, instead in (("reset_running_requests", ""), ("reset_external", f": POST {HICACHE}/clear does it")):
            if asked(http, name, "false").lower() not in ("false", "0", "no", "off"):
                raise Refused(400, f"{name} is not supported{instead}", param=name, code="unsupported_parameter")
        return JSONResponse({"success": True, "flushed_pages": await self._flush(http, list(MEMORY_TIERS), FLUSH_S)})

    async def _flush(self, http: Http, tiers: list[Tier], wait_s: float) -> int:
        if self._engine.broken:
            raise stopped(self._engine)
        pages = await asyncio.wrap_future(self._engine.flushes.begin(tiers, wait_s))
        seen(http).act = f"{pages} pages of the {' and '.join(tier.name.lower() for tier in tiers)} flushed"
        return pages

    async def done(self, http: Http, work: Work) -> dict[str, Any]:
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
        entry = recent.begin(noted.id, http.url.path, noted.key)
        noted.ended = lambda status: recent.end(entry, status)
        noted.traced = lambda: told(kind.operation, prefix + noted.id, answer)
        try:
            async with self.body(http) as body:
                answer = entry.answer = Answer(self._engine, http.receive, noted.visit)
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

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvarve",
            "root": folder(self._engine.model),  # from which vLLM's clients load the tokenizer
            "parent": None,
            "max_model_len": self._engine.model.max_tokens,
        }

    def _snapshot(self) -> Snapshot:
        return snapshot(
            self._engine,
            self.name,
            connections=self._connections,
            tokenizing=len(self._preparing),
            responses=self.responses,
            ignored_fields=self._preparer.ignored.counts(),
            keys=self._access.quotas.counts(),
            spans=None if self._traces is None else self._traces.counts(),
        )


Given = TypeVar("Given", str, str | None)


def asked(http: Http, name: str, unless_given: Given) -> str | Given:
    """A parameter of the query; Refused if it is there twice: one of the two would be ignored."""
    given = http.query_params.getlist(name)
    if len(given) > 1:
        raise Refused(400, f"{name} is given {len(given)} times", param=name)
    return given[0] if given else unless_given


def _tiers(query: str | None, body: bytes) -> list[Tier]:
    """The tiers to flush, nearest first."""
    given: str | list[str] | None = query
    if given is None and body.strip():
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


def _seconds(given: str | None) -> float:
    """How long a flush may wait for backups: SGLang's `timeout`."""
    try:
        seconds = FLUSH_S if given is None else float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_FLUSH_S:
        raise Refused(400, f"timeout is a number of seconds from 0 to {MOST_FLUSH_S:.0f}", param="timeout")
    return seconds


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
    elif isinstance(e, OverQuota):
        refused = Refused(429, str(e), code="rate_limit_exceeded", headers={"Retry-After": f"{ceil(e.wait_s) or 1}"})
    elif isinstance(e, Busy):
        refused = Refused(503, str(e), code="busy", headers=RETRY_AFTER)
    else:
        refused = Refused(500, str(e))
    return JSONResponse(refused.body(), refused.status, refused.headers)


async def _http_error(http: Http, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    message = f"{http.method} {http.url.path}: {e.detail}"
    return JSONResponse(Refused(e.status_code, message).body(), e.status_code, e.headers)


async def _not_that_kind(http: Http, e: Exception) -> Response:
    """A parameter of an endpoint is of another type, as a replica's number that is none."""
    assert isinstance(e, RequestValidationError)
    first = e.errors()[0]
    name = str(first["loc"][-1])
    return JSONResponse(Refused(400, f"{name}: {first['msg']}", param=name).body(), 400)


async def _client_gone(http: Http, e: Exception) -> Response:
    return Response(status_code=499)  # the client disconnected before the request was complete, so this is never read


async def _bug(http: Http, e: Exception) -> Response:
    return JSONResponse(Refused(500, f"a bug: {type(e).__name__}: {e}").body(), 500)
