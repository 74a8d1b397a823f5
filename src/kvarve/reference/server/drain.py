"""Drain: from SIGTERM on, new requests are refused and running ones end, and health checks say so to load balancers."""

import time
from collections.abc import Set

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarve.reference.server.api import Refused

METRICS = "/metrics"  # answered to the end
LOOK_S = 0.1  # as uvicorn at its end


class Drain:
    """Whether requests are admitted. Any thread may ask it to drain."""

    def __init__(self) -> None:
        self.running: Set[object] = frozenset()  # uvicorn's tasks, one for each request
        self._draining = False

    def around(self, app: ASGIApp) -> ASGIApp:
        async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
            if not self._draining or scope["path"] == METRICS:
                await app(scope, receive, send)
                return
            message = "the server is draining: another one has to answer this"
            headers = {"Retry-After": "1", "Connection": "close"}
            refused = Refused(503, message, code="draining", headers=headers)
            await JSONResponse(refused.body(), 503, headers)(scope, receive, send)

        return admitted

    def drain(self, patience_s: float) -> int:
        """Admit no more, and wait for running requests to end; how many have not after `patience_s`."""
        self._draining, end_s = True, time.monotonic() + patience_s
        while self.running and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return len(self.running)
