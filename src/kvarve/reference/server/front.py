"""The front of several replicas: one port, requests to the replica that has most of their prompt.

An answer that has begun belongs to its replica. Until then a request goes to another replica if the one chosen has
ended, or is full; an engine that has stopped is as a replica that has ended. Calls that change or show a server's state
go to all that serve; a replica that was started again is told the changes of its storage before it gets requests.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
from fastapi import APIRouter, Depends
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarve.planner.routing import BLOCK_BYTES, PrefixRouter, Prompt
from kvarve.reference.server.access import Access, no_pages
from kvarve.reference.server.admin import HICACHE
from kvarve.reference.server.answers import RETRY_AFTER
from kvarve.reference.server.api import MOST_VALUES, Refused, check_values
from kvarve.reference.server.app import add_errors, asked, without_extras
from kvarve.reference.server.bodies import Bodies
from kvarve.reference.server.forms import event
from kvarve.reference.server.front_metrics import front_families, merged
from kvarve.reference.server.live import HEADERS
from kvarve.reference.server.openapi import PATH, document
from kvarve.reference.server.replicas import Replica, Replicas
from kvarve.reference.server.request_log import QUIET, Observed, Responses, acts, seen
from kvarve.reference.server.stopped import BEFORE, ENGINE
from kvarve.reference.server.work_threads import Shared

log = logging.getLogger(__name__)

PROMPTS = ("prompt", "messages", "text", "input_ids")  # fields that hold one, whatever the endpoint
SALTS = ("cache_salt", "extra_key")
MOST_TOKENS = 1 << 18  # of a prompt of ids that is routed by them; the front does not know the context of the model
# Calls that go to all replicas.
FLUSHES = ("/flush_cache", "/reset_prefix_cache")
OF_ALL = (*FLUSHES, "/admin/storage", HICACHE, f"{HICACHE}/clear")
OF_A_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"date", b"x-request-id"}
OF_A_BODY = {b"host", b"content-length", b"expect"}  # of a request, which is sent on whole
CONNECT_S, METRICS_S = 5.0, 5.0
TELL_S = 700.0  # for a call to all: a flush may wait long for backups
CHANGES = {(method, path) for method in ("PUT", "DELETE") for path in ("/admin/storage", HICACHE)}
UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)  # a replica that has not got the request
RETRIES = 2  # of a request during which its replica has ended
WAIT_S = 30.0  # of a request for a replica that serves
LOOK_S = 0.1


class _Call(NamedTuple):
    """A request, to be sent to any replica."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    def of(cls, http: Http, body: bytes) -> "_Call":
        headers = [each for each in http.headers.raw if each[0].lower() not in OF_A_HOP | OF_A_BODY]
        headers.append((b"x-request-id", seen(http).id.encode()))
        path, query = http.scope["raw_path"], http.scope["query_string"]
        if not path.startswith(b"/"):
            raise Refused(400, "a request names a path, not a URL")
        if {b".", b".."} & {*path.split(b"/")}:  # these are resolved on the way: a call to all would reach one replica
            raise Refused(400, "a request's path has no . or .. in it")
        return cls(http.method, (path + b"?" * bool(query) + query).decode("latin-1"), headers, body)

    def to(self, each: Replica, client: httpx.AsyncClient) -> httpx.Request:
        return client.build_request(self.method, each.url + self.path, headers=self.headers, content=self.body)

    def makes_up_for(self, earlier: "_Call") -> bool:
        """Whether nothing is left of an earlier change of the storage: this one says all that it said."""
        return earlier.method == "DELETE" or (self[:2] == earlier[:2] and _fields(self) >= _fields(earlier))


class Front:
    """The application. `access`: to what it answers itself, and to sending a body; the replicas guard the rest.
    `around`: as `create_app`."""

    def __init__(
        self, replicas: Replicas, max_body_bytes: int, access: Access, around: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        self._replicas, self._bodies = replicas, Bodies(max_body_bytes)
        self._router = PrefixRouter(len(replicas.all))
        self._changes: list[_Call] = []  # of the storage, which every replica has made
        self._changing = asyncio.Lock()
        self._catching_up = set[asyncio.Task[None]]()  # the event loop alone would let them vanish
        self._scrape = Shared(self._scraped)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits, trust_env=False, follow_redirects=False
        )
        app = without_extras()
        own = APIRouter(
            prefix="/admin/replicas", dependencies=[Depends(acts), Depends(no_pages), Depends(access.operator)]
        )
        own.get("")(self.state)
        own.post("/{number}/restart")(self.restart)
        app.include_router(own)
        self._own = document(own.routes, access.keys)["paths"]
        app.get("/metrics")(self.metrics)
        app.get(PATH)(self.openapi)
        app.get("/live/data", include_in_schema=False)(self.live)
        passing = APIRouter(dependencies=[Depends(access.bodies)])
        for path in OF_ALL:
            passing.add_api_route(path, self.tell_all, methods=["GET", "POST", "PUT", "DELETE"])
        passing.add_api_route("/{path:path}", self.forward, methods=["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
        app.include_router(passing)
        add_errors(app)
        self._responses: Responses = Counter()  # without those of replicas, which count their own
        self.app = Observed(around(app), self._responses)

    async def state(self) -> Response:
        return JSONResponse({"replicas": [each.state() for each in self._replicas.all]})

    async def restart(self, number: int) -> Response:
        """Drain a replica, and start it anew once it has no request: answers at once."""
        if not 0 <= number < len(self._replicas.all):
            raise Refused(404, f"there is no replica {number}: they count from 0 to {len(self._replicas.all) - 1}")
        if self._replicas.all[number].draining:
            raise Refused(409, f"replica {number} is being restarted", code="change_under_way")
        if not any(other.able for other in self._replicas.all if other.number != number):
            raise Refused(409, f"no replica but {number} serves now: try again", code="change_under_way")
        self._replicas.restart(number)
        log.info("replica %d is drained, to be restarted", number)
        return JSONResponse(self._replicas.all[number].state(), 202)

    async def metrics(self) -> Response:
        """All replicas' metrics, each with the number of its replica; and the front's own."""
        return Response(await self._scrape.get(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _scraped(self) -> bytes:
        texts = []
        for each in self._able():
            with suppress(httpx.HTTPError):
                answer = await self._http.get(each.url + "/metrics", timeout=METRICS_S)
                texts.append((each.number, answer.text))
        own = front_families(self._replicas.all, self._responses)
        return await asyncio.to_thread(merged, texts, own)

    async def openapi(self) -> Response:
        """A replica's document, with the front's own paths."""
        each = next(iter(self._able()), None)
        try:
            if each is None:
                raise TimeoutError
            answer = await self._http.get(each.url + PATH, timeout=METRICS_S)
            told = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError, TimeoutError):
            raise Refused(503, "no replica answers now: try again", headers=RETRY_AFTER) from None
        return JSONResponse(told | {"paths": told["paths"] | self._own})

    async def live(self, http: Http) -> Response:
        """What the live page shows of one replica (`?replica=1`; the first unless given), and how many there are."""
        known = {"X-Kvarve-Replicas": str(len(self._replicas.all))}
        number = asked(http, "replica", "0")
        each = next((each for each in self._replicas.all if str(each.number) == number), None)
        if each is None:
            raise Refused(404, f"replicas count from 0 to {len(self._replicas.all) - 1}", headers=known)
        try:
            if not each.up:
                raise TimeoutError
            async with asyncio.timeout(METRICS_S):
                answer = _passed(await self._http.send(_Call.of(http, b"").to(each, self._http)))
                seen(http).passed_on = True
        except (httpx.HTTPError, TimeoutError):
            raise Refused(503, f"replica {each.number} does not answer now", headers=RETRY_AFTER | known) from None
        answer.headers.update(HEADERS | known)
        return answer

    async def tell_all(self, http: Http) -> Response:
        """One call to every replica that serves, one after the other; the first that refuses ends it, and is named. A
        flush is made by all at once, as one time holds for all of them.

        One that does not serve has no pages, and is told a change before it gets requests.
        """
        told, absent = dict[int, httpx.Response](), list[int]()
        changes = (http.method, http.url.path) in CHANGES
        # What changes nothing keeps no replica from being told what it has missed, however long one takes to answer.
        async with self._bodies.read(http) as body, self._changing if changes else nullcontext():
            call = _Call.of(http, body)
            flushing = [each for each in self._replicas.all if each.up and http.url.path in FLUSHES]
            said = await asyncio.gather(*(self._tell(call, each) for each in flushing), return_exceptions=True)
            flushed = dict(zip((each.number for each in flushing), said, strict=True))
            for each in self._replicas.all:
                if not each.up and each.number not in flushed:
                    absent.append(each.number)
                    continue
                try:
                    answer = flushed.get(each.number) or await self._tell(call, each, changes)
                    if isinstance(answer, BaseException):
                        raise answer
                except httpx.TransportError as e:
                    if changes:
                        each.told = 0  # if it has not ended, but its connection
                    if not told and not isinstance(e, UNREACHED):  # the call may be what ends it
                        raise Refused(502, f"replica {each.number} has ended, perhaps of this; {_done(told)}") from None
                    absent.append(each.number)
                    continue
                except TimeoutError:
                    why = f"replica {each.number} has not answered within {TELL_S:.0f} s; {_done(told)}"
                    raise Refused(502, why) from None
                if answer.status_code >= 400:
                    log.warning("%s %s: replica %d refuses; %s", call.method, http.url.path, each.number, _done(told))
                    seen(http).passed_on = True
                    if not told:
                        return _passed(answer)
                    raise Refused(answer.status_code, f"replica {each.number}: {_why(answer)}; {_done(told)}")
                told[each.number] = answer
            if not told:
                raise Refused(503, "no replica serves now: try again", headers=RETRY_AFTER)
            if changes:
                self._changes = [earlier for earlier in self._changes if not call.makes_up_for(earlier)] + [call]
        return _joined([*told.values()], absent)

    async def _tell(self, call: _Call, each: Replica, changes: bool = False) -> httpx.Response:
        async with asyncio.timeout(TELL_S):
            await (self._tell_changes(each) if changes else self._catch_up(each))
            return await self._http.send(call.to(each, self._http))

    async def _tell_changes(self, each: Replica) -> None:
        """Have a replica that was started again change its storage as the others have. TransportError if it ends."""
        starts = each.starts
        for change in self._changes if each.told < starts else ():
            answer = await self._http.send(change.to(each, self._http))
            if answer.status_code >= 400:
                message = "replica %d, started again, refuses %s %s: %s"
                log.error(message, each.number, change.method, change.path, answer.text[:300])
        each.told = starts

    async def _catch_up(self, each: Replica) -> None:
        """Before it is asked anything, a replica that was started again has the storage of the others."""
        if each.told < each.starts:
            # It goes on if this client leaves: the replica makes a change of which it has a part all the same.
            task = asyncio.ensure_future(self._caught_up(each))
            self._catching_up.add(task)
            task.add_done_callback(self._catching_up.discard)
            await asyncio.shield(task)

    async def _caught_up(self, each: Replica) -> None:
        async with self._changing:
            await self._tell_changes(each)

    async def forward(self, http: Http) -> Response:
        async with self._bodies.read(http) as body:
            prompt = await asyncio.to_thread(_prompt_of, body) if http.method in ("POST", "PUT") else None
            call = _Call.of(http, body)
            gone, tried, ended = asyncio.ensure_future(_gone(http.receive)), set[int](), 0
            end_s = asyncio.get_running_loop().time() + (WAIT_S if http.url.path not in QUIET else 0.0)
            try:
                while True:
                    each = await self._choose(prompt, tried, end_s)
                    tried.add(each.number)
                    work = BLOCK_BYTES + prompt.size_bytes if prompt else 0
                    try:
                        begun = await self._begin(call, each, work, gone)
                    except httpx.TransportError as e:  # nothing of an answer has reached the client
                        ended += not isinstance(e, UNREACHED)  # else it had ended before
                        if ended > RETRIES:  # it may be what ends them
                            raise Refused(502, f"{ended} replicas have ended before they answered this") from None
                        log.warning("replica %d: %s: its request goes to another", each.number, type(e).__name__)
                        continue
                    if begun.answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and self._others(tried):
                        await begun.end()
                        continue
                    seen(http).passed_on = True
                    return _Answer(begun, gone)
            except BaseException:
                gone.cancel()
                raise

    # --- one request

    async def _choose(self, prompt: Prompt | None, tried: set[int], end_s: float) -> Replica:
        """The replica for a request, of those that it has not tried; waits while none serves, at most until `end_s`."""
        while not (able := self._others(tried)):
            if asyncio.get_running_loop().time() > end_s:
                raise Refused(503, "no replica serves now: try again", headers=RETRY_AFTER)
            tried.clear()  # one that is started again has not been tried
            await asyncio.sleep(LOOK_S)
        while self._replicas.ended:
            self._router.forget(self._replicas.ended.pop())
        able = [each for each in able if not each.slow] or able
        if prompt is None:
            return min(able, key=lambda each: each.busy)
        work = [each.work for each in self._replicas.all]
        return self._replicas.all[self._router.choose(prompt, work, [each.number for each in able])]

    async def _begin(self, call: _Call, each: Replica, work: int, gone: "asyncio.Future[None]") -> "_Begun":
        """The beginning of a replica's answer. TransportError if it has ended before that."""
        each.busy, each.work = each.busy + 1, each.work + work
        sent = asyncio.ensure_future(self._send(call, each))
        try:
            await asyncio.wait((sent, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                sent.cancel()
                raise Refused(499, "the client has gone")
            return _Begun(sent.result(), each, work)
        except BaseException:
            sent.cancel()
            each.busy, each.work = each.busy - 1, each.work - work
            raise

    async def _send(self, call: _Call, each: Replica) -> httpx.Response:
        await self._catch_up(each)
        answer = await self._http.send(call.to(each, self._http), stream=True)
        if how := answer.headers.get(ENGINE):
            await answer.aclose()
            raise (httpx.ConnectError if how == BEFORE else httpx.ReadError)("its engine has stopped")
        return answer

    def _able(self) -> list[Replica]:
        return [each for each in self._replicas.all if each.able]

    def _others(self, tried: set[int]) -> list[Replica]:
        return [each for each in self._able() if each.number not in tried]

    async def close(self) -> None:
        await self._http.aclose()


@dataclass(frozen=True)
class _Begun:
    """A replica's answer whose status and headers have come."""

    answer: httpx.Response
    replica: Replica
    work: int

    async def end(self) -> None:
        """No more of it is wanted."""
        self.replica.busy, self.replica.work = self.replica.busy - 1, self.replica.work - self.work
        await self.answer.aclose()


class _Answer(Response):
    """A replica's answer, passed on as it comes."""

    def __init__(self, begun: _Begun, gone: "asyncio.Future[None]") -> None:
        super().__init__(status_code=begun.answer.status_code)
        self._begun, self._gone = begun, gone
        self.raw_headers = [
            (name.lower(), value) for name, value in begun.answer.headers.raw if name.lower() not in OF_A_HOP
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces, number = self._begun.answer.aiter_raw(), self._begun.replica.number
        events = self._begun.answer.headers.get("content-type", "").startswith("text/event-stream")
        between = True  # two events
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (piece := await self._next(pieces)) is not None:
                between = piece.endswith(b"\n\n")
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError as e:  # the answer is not ended, so that the client sees it break off
            log.warning("replica %d: %s within an answer", number, type(e).__name__)
            if events and between:  # else it would become a part of the last event
                said = Refused(502, f"replica {number} has ended within this answer: ask again").body()
                with suppress(OSError):
                    await send({"type": "http.response.body", "body": event(said), "more_body": True})
        except OSError:
            pass  # the client has gone
        finally:
            self._gone.cancel()
            await self._begun.end()

    async def _next(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        """The next piece; None at the end. An answer that breaks off breaks off here too: its end is missing, so that
        no client takes it for whole."""
        following = asyncio.ensure_future(anext(pieces, None))
        await asyncio.wait((following, self._gone), return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            following.cancel()
            raise ConnectionAbortedError
        return following.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _fields(call: _Call) -> set[str]:
    """The names that a change of the storage gives."""
    try:
        given = json.loads(call.body)
    except (ValueError, RecursionError):
        return set()
    return {*given} if isinstance(given, dict) else set()


def _prompt_of(body: bytes) -> Prompt | None:
    """The prompt of a request; None if there is none, and the replica says what is wrong."""
    try:
        check_values(body, MOST_TOKENS + MOST_VALUES)  # the parser holds the GIL, and with it every other answer
        given = json.loads(body)
    except (ValueError, RecursionError, Refused):
        return None
    prompt = next((given[name] for name in PROMPTS if given.get(name)), None) if isinstance(given, dict) else None
    if prompt is None:
        return None
    salt = json.dumps([given.get(name) for name in SALTS]).encode()
    return Prompt.of(salt, json.dumps(prompt, ensure_ascii=False).encode(errors="surrogatepass"))


def _done(told: Iterable[int]) -> str:
    numbers = ", ".join(map(str, told))
    return f"replicas that have done it: {numbers}" if numbers else "no replica has done it"


def _why(answer: httpx.Response) -> str:
    """The message of a replica's error."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {answer.status_code}"


def _joined(told: list[httpx.Response], absent: list[int]) -> Response:
    """One answer of all: counts are added up, anything else is the first one's; and each one's own. `absent`: numbers
    of those that do not serve."""
    try:
        found = [each.json() for each in told]
    except ValueError:
        return _passed(told[0])
    if not all(isinstance(each, dict) for each in found):
        return _passed(told[0])
    first: dict[str, Any] = found[0]
    counts = {
        name: sum(each.get(name, 0) for each in found)
        for name, value in first.items()
        if name.endswith(("_pages", "_objects")) and isinstance(value, int)
    }
    return JSONResponse(first | counts | {"replicas": found} | ({"not_serving": absent} if absent else {}))


def _passed(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
