"""Drain: from SIGTERM on, new requests are refused and running ones end, and health checks say so to load balancers."""

import threading

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarve.reference.server.api import Refused
from kvarve.reference.server.request_log import QUIET

METRICS = "/metrics"  # answered to the end


class Drain:
    """How many requests are being answered, and whether more are admitted. Any thread may ask it to drain."""

    def __init__(self) -> None:
        self._running = 0
        self._draining = False
        self._changed = threading.Condition()

    def around(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"]
            if path == METRICS or (path in QUIET and not self._draining):
                await app(scope, receive, send)
            elif not self._begin():
                message = "the server is draining: another one has to answer this"
                headers = {"Retry-After": "1", "Connection": "close"}
                refused = Refused(503, message, code="draining", headers=headers)
                await JSONResponse(refused.body(), 503, headers)(scope, receive, send)
            else:
                try:
                    await app(scope, receive, send)
                finally:
                    self._end()

        return counted

    def drain(self, patience_s: float) -> int:
        """Admit no more, and wait for running requests to end; how many have not after `patience_s`."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: not self._running, patience_s)
            return self._running

    def _begin(self) -> bool:
        with self._changed:
            self._running += not self._draining
            return not self._draining

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
