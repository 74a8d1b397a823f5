"""The bodies of requests, read within limits of size, time and memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request as Http

from kvarve.errors import Busy
from kvarve.reference.server.api import SMALL_BYTES, Refused

BODY_TIMEOUT_S = 60.0
BODIES = 32  # of the largest size held at a time, or the same bytes of smaller ones


class Bodies:
    """All bodies of one server. They belong to the event loop's thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0  # by bodies that are being read or used

    @asynccontextmanager
    async def read(self, http: Http) -> AsyncIterator[bytes]:
        """A body, within the size limits. Nothing is read of one whose Content-Length is beyond them, and of any other
        not more than a piece too much.

        Small bodies are always accepted; large ones while all bodies together are within a byte budget.
        """
        parts: list[bytes] = []
        size = held = 0
        too_large = Refused(413, f"the body is larger than {self._most_bytes} bytes", code="body_too_large")
        if int(http.headers.get("content-length", "0")) > self._most_bytes:
            raise too_large
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    async for part in http.stream():
                        size += len(part)
                        if size > self._most_bytes:
                            raise too_large
                        if self._held_bytes + len(part) > BODIES * self._most_bytes and size > SMALL_BYTES:
                            raise Busy("too many large requests are being read: try again later")
                        parts.append(part)
                        held += len(part)
                        self._held_bytes += len(part)
            except TimeoutError:
                raise Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
            yield b"".join(parts)
        finally:
            self._held_bytes -= held
