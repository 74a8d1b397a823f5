"""One log line for each request, with its id, and its span; one more line for an operator's act; and the count of
responses by status.

A line has no prompt text, header or key in it, but the name of a key.
"""

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fastapi import Request as Http
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarve.reference.server.api import Refused
from kvarve.reference.server.keyfile import Key
from kvarve.reference.server.spans import MOST_PATH, Attributes, Traces

log = logging.getLogger(__name__)
audit = logging.getLogger("kvarve.audit")

QUIET = ("/health", "/livez", "/readyz", "/health_generate", "/metrics", "/live/data")  # asked for every few seconds
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")  # a client may make up others
CLIENT_GONE = 499  # no status was sent
_ID = re.compile(r"[!-~]{1,128}")
_HEADER = b"x-request-id"
_SEEN = "kvarve.seen"


Responses = Counter[tuple[str, str, int]]  # by method, route ("none": there is none) and status


@dataclass
class Seen:
    """What is known of a request by the time of its line."""

    id: str
    act: str | None = None  # of an operator
    key: Key | None = None  # that admitted it
    answered: Callable[[], str] = field(default=lambda: "")
    ended: Callable[[int], None] = field(default=lambda _: None)  # gets the status
    traced: Callable[[], Attributes] = field(default=dict)  # what its span says, if it gets one
    refused: Refused | None = None  # the error that it got


class Observed:
    """`app`, with an x-request-id in every response: the request's own, or a new one."""

    def __init__(self, app: ASGIApp, responses: Responses, traces: Traces | None = None) -> None:
        """`responses`: counts them."""
        self._app, self._responses, self._traces = app, responses, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, began_ns, status = time.monotonic(), time.time_ns(), CLIENT_GONE
        seen = scope[_SEEN] = Seen(_id(scope))

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (_HEADER, seen.id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            seen.ended(status)
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._responses[method, getattr(scope.get("route"), "path", "none"), status] += 1
            seconds, peer = time.monotonic() - began_s, (scope.get("client") or ("unknown",))[0]
            what = f"{scope['method']} {quote(scope['path'][:MOST_PATH])}"
            if self._traces is not None and (attributes := seen.traced()):
                self._traces.add(scope, status, began_ns, attributes)
            if seen.act is not None:
                whom = f"{peer} with {seen.key.name}" if seen.key else peer
                audit.info("%s: %s by %s: %s: %d", seen.id, what, whom, seen.act or "asked", status)
            level = logging.DEBUG if scope["path"] in QUIET and status < 400 else logging.INFO
            if log.isEnabledFor(level):
                error = {} if seen.refused is None else {"code": seen.refused.code, "param": seen.refused.param}
                why = [f"{name} {value}" for name, value in error.items() if value is not None]
                told = [part for part in (*why, seen.key and f"key {seen.key.name}", seen.answered()) if part]
                line = {"request": seen.id, "method": scope["method"], "path": scope["path"][:MOST_PATH]}
                line |= {"status": status, "seconds": round(seconds, 6), "client": peer}
                line |= {"key": seen.key.name} if seen.key else {}
                line |= {f"error.{name}": value for name, value in error.items() if value is not None}
                text = ", ".join([f"{status} in {seconds:.3f} s", *told])
                more = [seen.traced]
                told_of = {"told": lambda: line | {name: value for each in more for name, value in each().items()}}
                log.log(level, "%s: %s: %s", seen.id, what, text, extra=told_of)
                more.clear()  # whoever keeps the record does not keep the request with it


def seen(http: Http) -> Seen:
    found: Any = http.scope[_SEEN]
    assert isinstance(found, Seen)
    return found


async def refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, which the request's line names."""
    if (known := scope.get(_SEEN)) is not None:
        known.refused = refused
    await refused.response()(scope, receive, send)


async def acts(http: Http) -> None:
    """A dependency: the request is an operator's act, whether it is admitted or not."""
    seen(http).act = ""


async def changes(http: Http) -> None:
    """The same for endpoints of which a GET only looks."""
    if http.method != "GET":
        await acts(http)


def _id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == _HEADER), b"").decode("latin-1")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
