"""The HTTP side: OpenAI's endpoints over one engine. It reads, hands over and writes; nothing slow runs on its loop.

A request lives on three threads: its bytes on the event loop, its words (JSON, tokens) on a pool, its answer on the
engine's. Whoever goes away is aborted.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvarve import __version__
from kvarve.admin import Admin
from kvarve.engine.engine import Engine
from kvarve.engine.requests import Finish, OutputChunk, Request, TokenUsage
from kvarve.errors import Busy, ConfigError, KvarveError, ModelError, StorageError
from kvarve.metrics import Metrics, Snapshot
from kvarve.model import MEMORY_TIERS, Tier
from kvarve.server.admin import admin_routes
from kvarve.server.api import (
    SMALL_BYTES,
    Asked,
    ChatAsked,
    Choice,
    CompletionAsked,
    FlushAsked,
    Form,
    Refused,
    Told,
    event,
    parse,
)
from kvarve.server.connections import Connections
from kvarve.server.doors import Door, no_forms, no_pages, no_simple_requests
from kvarve.server.lanes import Lanes, apart
from kvarve.server.words import Gone, Prepared, Words

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 60.0
BODIES = 32  # of the largest size, or more smaller ones, are held at a time
LIKELIHOOD_BYTES = 256  # of an answer's token with its likelihood, written
RETRY_AFTER = {"Retry-After": "1"}

T = TypeVar("T")


def create_app(
    engine: Engine,
    *,
    name: str | None = None,
    api_key: str | None = None,
    admin_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    connections: Connections | None = None,
) -> FastAPI:
    """The application around a started engine, which stays the caller's to shut down.

    The model answers to `name` (its own unless given). With an `api_key`, /v1 wants it. /admin wants the `admin_key`,
    and is off without one; /flush_cache wants it where there is one, and else what /v1 wants. /metrics tells of the
    `connections`.
    """
    app = FastAPI(title="kvarve", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    front = _Front(engine, name or engine.model.name, max_body_bytes, connections)
    api, operator = _door(api_key, "API"), _door(admin_key, "admin")
    open_to_all, guarded = APIRouter(), APIRouter(dependencies=[Depends(no_simple_requests), *_admission(api)])
    flushing = APIRouter(dependencies=[Depends(no_pages), Depends(no_forms), *_admission(operator or api)])
    open_to_all.get("/health")(front.health)
    open_to_all.get("/metrics")(front.metrics)
    guarded.get("/v1/models")(front.models)
    guarded.get("/v1/models/{model:path}")(front.one_model)
    guarded.post("/v1/completions")(front.completions)
    guarded.post("/v1/chat/completions")(front.chat)
    flushing.post("/flush_cache")(front.flush_cache)
    for router in (open_to_all, guarded, flushing):
        app.include_router(router)
    app.include_router(admin_routes(Admin(engine.cache, engine.ask), operator, front.body))
    app.add_exception_handler(KvarveError, _trouble)
    app.add_exception_handler(HTTPException, _no_such_place)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _bug)
    return app


def _door(key: str | None, name: str) -> Door | None:
    return None if key is None else Door(key, name)


def _admission(door: Door | None) -> list[Any]:
    return [] if door is None else [Depends(door.admit)]


class _Front:
    """The endpoints."""

    def __init__(self, engine: Engine, name: str, max_body_bytes: int, connections: Connections | None) -> None:
        self._engine, self._name, self._max_body_bytes = engine, name, max_body_bytes
        self._connections = connections
        self._started = int(time.time())
        self._metrics = Metrics(self._snapshot)
        self._words = Words(engine.model, name)
        self._lanes = Lanes("kvarve words")
        self._preparing: set[Future[Asked]] = set()  # requests whose words wait for a lane or are on one
        self._bodies_bytes = 0  # of bodies that are being read, or that a lane has not done with
        self._flushing = asyncio.Lock()

    async def health(self) -> Response:
        if self._engine.broken:
            raise Refused(503, self._engine.broken)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(await run_in_threadpool(self._metrics.text), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, model: str) -> Response:
        self._words.check_model(model)
        return JSONResponse(self._card())

    async def completions(self, http: Http) -> Response:
        return await self._answer(http, CompletionAsked)

    async def chat(self, http: Http) -> Response:
        return await self._answer(http, ChatAsked)

    async def flush_cache(self, http: Http) -> Response:
        """Empty `tiers` (in the query or the body: "device", "device,host"; both unless told) of what nobody holds."""
        async with self.body(http) as body:
            tiers = await apart(lambda: _tiers(http.query_params.get("tiers"), body))
        if self._engine.broken:
            raise Refused(500, self._engine.broken)
        async with self._flushing:  # one after the other: each may wait for a storage
            pages = await apart(lambda: self._engine.flush(tiers))
        return JSONResponse({"flushed_pages": pages, "tiers": [tier.name.lower() for tier in tiers]})

    # --- the life of one request

    async def _answer(self, http: Http, kind: type[Asked]) -> Response:
        answer: _Answer | None = None
        try:
            async with self.body(http) as body:
                answer = _Answer(self._engine, http.receive)
                asked = await answer.when(self._prepare(answer, kind, body))
            chat = isinstance(asked, ChatAsked)
            number = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
            spell = None if asked.alternatives is None else self._words.spell
            form = Form(chat, number, int(time.time()), asked.model or self._name, spell)
            # An answer that fails at once is an error with a status of its own, streaming or not.
            first = await answer.next()
            _raise_trouble(first[1])
            if asked.stream:
                return _Stream(form, asked.include_usage, answer, first)
            return await self._whole(form, answer, first)
        except BaseException as e:  # whatever it is, nobody waits for the answer any more
            if answer is not None:
                answer.close()
            if isinstance(e, Gone):
                return await _nobody(http, e)
            raise

    def _prepare(self, answer: "_Answer", kind: type[Asked], body: bytes) -> "Future[Asked]":
        """Have a lane make of a body what the engine is asked, and ask it."""
        if self._engine.broken:
            raise Refused(500, self._engine.broken)
        if (before := len(self._preparing)) >= self._engine.places_left():
            raise Busy(f"every place is taken, {before} by requests that are being tokenized: try again later")

        def work() -> Asked:
            prepared = self._words.prepare(kind, body, lambda: answer.left)
            answer.submit(prepared)
            return prepared.asked

        future = self._lanes.run(len(body), work)
        self._preparing.add(future)
        future.add_done_callback(self._preparing.discard)
        return future

    async def _whole(self, form: Form, answer: "_Answer", first: tuple[int, OutputChunk]) -> Response:
        choices = [Choice() for _ in range(answer.count)]
        index, piece = first
        while True:
            choice = choices[index]
            choice.text += piece.text
            choice.likelihoods.extend(piece.likelihoods)
            if piece.finish is not None:
                _raise_trouble(piece)
                choice.finish = piece.finish.value
            if not answer.open:
                break
            index, piece = await answer.next()
        answer.close()

        def written() -> Response:
            return JSONResponse(form.whole(choices, answer.told()))

        size = sum(len(choice.text) + LIKELIHOOD_BYTES * len(choice.likelihoods) for choice in choices)
        if size <= SMALL_BYTES and form.spell is None:
            return written()
        return await asyncio.wrap_future(self._lanes.run(size, written))  # spelling a book takes its time

    @asynccontextmanager
    async def body(self, http: Http) -> AsyncIterator[bytes]:
        """The body, as far as it may go; what its headers say of its length is not asked.

        Small ones always find room. Large ones find it until all that are held together take a set number of bytes.
        """
        parts: list[bytes] = []
        size = held = 0
        busy = False
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    async for part in http.stream():
                        size += len(part)
                        full = self._bodies_bytes + len(part) > BODIES * self._max_body_bytes
                        busy = busy or (full and size > SMALL_BYTES)
                        if busy or size > self._max_body_bytes:
                            parts.clear()
                        else:
                            parts.append(part)
                            held += len(part)
                            self._bodies_bytes += len(part)
                        # A little more is read and thrown away, since a client that is still writing would not see
                        # the answer.
                        if size > 4 * self._max_body_bytes:
                            break
            except TimeoutError:
                raise Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
            if size > self._max_body_bytes:
                raise Refused(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")
            if busy:
                raise Busy("too many large requests are being read: try again later")
            yield b"".join(parts)
        finally:
            self._bodies_bytes -= held

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvarve",
            "max_model_len": self._engine.model.max_tokens,
        }

    def _snapshot(self) -> Snapshot:
        engine = self._engine
        try:
            storage = engine.cache.usage()  # first: it may take a moment, and the rest is of one moment
        except StorageError:  # closed, or the medium is gone: a scrape tells the rest
            storage = None
        counts, (running, waiting) = engine.counts, engine.load()
        connections = self._connections
        return Snapshot(
            model=self._name,
            version=__version__,
            up=not engine.broken,
            running=running,
            waiting=waiting,
            requests={
                "done": counts.finished - counts.failed - counts.aborted,
                "aborted": counts.aborted,
                "failed": counts.failed,
            },
            prompt_tokens=counts.prompt_tokens,
            computed_tokens=counts.computed_tokens,
            output_tokens=counts.output_tokens,
            preempted=counts.preempted,
            cached_tokens={
                "device": counts.cached_device,
                "host": counts.cached_host,
                "storage": counts.cached_storage,
            },
            ttft_s=counts.ttft_s,
            tokenizing=len(self._preparing),
            connections=None if connections is None else len(connections),
            closed_connections={} if connections is None else dict(connections.closed),
            ignored_fields=self._words.ignored.counts(),
            cache=engine.cache.stats(),
            storage=storage,
            storage_up=engine.cache.up if engine.cache.attached is not None else None,
        )


class _Answer:
    """The answers to one prompt as the event loop sees them: pieces arrive in order, and the client may leave."""

    def __init__(self, engine: Engine, receive: Receive) -> None:
        """The body has been read; from now on it watches whether the client is still there."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, OutputChunk] | None] = asyncio.Queue()  # None: the client has gone
        self._arrived_s = time.monotonic()
        self._first_s: float | None = None
        self._usages: dict[int, TokenUsage] = {}
        self._requests: list[Request] = []
        self.open: set[int] = set()  # those that run or wait
        self.left = False  # the client has gone before the engine was asked; any thread reads it
        self._watch = self._loop.create_task(self._listen(receive))

    @property
    def count(self) -> int:
        return len(self._requests)

    async def when(self, work: "Future[T]") -> T:
        """What comes of work on a lane, which asks the engine at its end. Gone: the client left first; then work that
        has not begun never does, and what the engine is asked nevertheless is given up."""
        done = asyncio.wrap_future(work)
        either: set[asyncio.Future[Any]] = {done, self._watch}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not done.done():
                self.left = True
                done.cancel()
                work.add_done_callback(lambda _: self._give_up())
        if self.left:
            raise Gone
        return done.result()

    def submit(self, prepared: Prepared) -> None:
        """Ask the engine, on a lane's thread."""
        asked = prepared.asked
        self._requests = [
            Request(
                prepared.prompt,
                sampling,
                salt=asked.salt,
                priority=asked.cache_priority or 0,
                read_cache=not asked.skip_reading_prefix_cache,
                deliver=partial(self._deliver, index),
                submitted_s=self._arrived_s,
            )
            for index, sampling in enumerate(prepared.samplings)
        ]
        try:
            self._engine.submit(*self._requests)
        except Busy as e:
            raise Refused(500, str(e)) if self._engine.broken else e from None
        self.open = set(range(self.count))

    async def next(self) -> tuple[int, OutputChunk]:
        """The next piece, and the index of the answer to which it belongs."""
        if (found := await self._pieces.get()) is None:
            raise Gone
        index, piece = found
        if piece.finish is not None:
            assert piece.usage is not None
            self.open.remove(index)
            self._usages[index] = piece.usage
        return found

    def close(self) -> None:
        """No more pieces are wanted."""
        self._watch.cancel()
        if not self.left:
            self._give_up()

    def _give_up(self) -> None:
        for index in self.open:
            self._engine.abort(self._requests[index])
        self.open.clear()

    def told(self) -> Told:
        """The numbers when all have ended. The prompt is counted once, as the first answer found it."""
        now = time.monotonic()
        first, start = self._usages[0], self._arrived_s
        ttft_ms = None if self._first_s is None else round(1000 * (self._first_s - start), 3)
        cached = {"device": first.device, "host": first.host, "storage": first.storage}
        completion = sum(usage.completion for usage in self._usages.values())
        return Told(first.prompt, completion, cached, ttft_ms, round(1000 * (now - start), 3))

    def _deliver(self, index: int, piece: OutputChunk) -> None:
        """On the engine's thread."""
        if self._first_s is None and piece.tokens:
            self._first_s = time.monotonic()
        with suppress(RuntimeError):  # the loop has closed, so there is nobody to tell
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._pieces.put_nowait(None)


class _Stream(Response):
    """Answers as server-sent events, each written as soon as its text is certain."""

    def __init__(self, form: Form, include_usage: bool, answer: _Answer, first: tuple[int, OutputChunk]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._form, self._include_usage, self._answer, self._first = form, include_usage, answer, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send)
        except (Gone, OSError):
            pass  # the client left: nobody is there to be told
        finally:
            self._answer.close()

    async def _write(self, send: Send) -> None:
        async def say(data: dict[str, Any] | str) -> None:
            await send({"type": "http.response.body", "body": event(data), "more_body": True})

        nothing = {"usage": None} if self._include_usage else {}
        form, answer = self._form, self._answer
        for chunk in (chunk for index in range(answer.count) for chunk in form.opening(index)):
            await say(chunk | nothing)
        index, piece = self._first
        while piece.finish is not Finish.ERROR:
            finish = None if piece.finish is None else piece.finish.value
            for chunk in form.chunks(index, piece.text, finish, piece.likelihoods):
                await say(chunk | nothing)
            if not answer.open:
                break
            index, piece = await answer.next()
        if piece.finish is Finish.ERROR:
            answer.close()
            await say(Refused(500, piece.error).body())
        elif self._include_usage:
            await say(form.closing(answer.told()))
        await say("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _tiers(query: str | None, body: bytes) -> list[Tier]:
    """The tiers to flush, nearest first."""
    asked: str | list[str] | None = query
    if asked is None and body.strip():
        asked = parse(FlushAsked, body).tiers
    if asked is None:
        return list(MEMORY_TIERS)
    names = asked.split(",") if isinstance(asked, str) else asked
    known = {tier.name.lower(): tier for tier in MEMORY_TIERS}
    for name in names:
        if name not in known:
            raise Refused(400, f"unknown tier {name!r}; can be flushed: {', '.join(known)}", param="tiers")
    if not names:
        raise Refused(400, f"no tier to flush; known: {', '.join(known)}", param="tiers")
    return sorted({known[name] for name in names})


def _raise_trouble(piece: OutputChunk) -> None:
    """An answer that nobody should take for a whole one is an error."""
    if piece.finish is Finish.ERROR:
        raise Refused(500, piece.error)
    if piece.finish is Finish.ABORT:
        raise Refused(503, "the server is shutting down: try again", headers=RETRY_AFTER)


async def _trouble(http: Http, e: Exception) -> Response:
    if isinstance(e, Refused):
        refused = e
    elif isinstance(e, ConfigError | ModelError):
        refused = Refused(400, str(e))
    elif isinstance(e, Busy):
        refused = Refused(503, str(e), code="busy", headers=RETRY_AFTER)
    else:
        refused = Refused(500, str(e))
    return JSONResponse(refused.body(), refused.status, refused.headers)


async def _no_such_place(http: Http, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    message = f"{http.method} {http.url.path}: {e.detail}"
    return JSONResponse(Refused(e.status_code, message).body(), e.status_code, e.headers)


async def _nobody(http: Http, e: Exception) -> Response:
    return Response(status_code=499)  # the client left before its question was whole: nobody reads this


async def _bug(http: Http, e: Exception) -> Response:
    return JSONResponse(Refused(500, f"a bug: {type(e).__name__}: {e}").body(), 500)
