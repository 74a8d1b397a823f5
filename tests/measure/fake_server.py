"""A server that speaks just enough OpenAI, and does to its clients what a test says: for faults and for order."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from kvarve.bench.load import Client

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(text: str | None = None, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
DONE = b"data: [DONE]\n\n"


async def plain(body: dict[str, Any], out: asyncio.StreamWriter) -> None:
    out.write(HEAD + event("a") + event("b") + event(usage=USAGE) + DONE)


class FakeServer:
    """`async with` it: what is asked for, in order, and how many requests were open at most."""

    def __init__(self, answer: Answer = plain) -> None:
        self._answer = answer
        self.asked: list[dict[str, Any]] = []
        self.now = self.most = 0

    async def __aenter__(self) -> "FakeServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.client = Client(f"http://127.0.0.1:{port}", "fake")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.asked.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
            await self._answer(body, writer)
            self.now -= 1
            await writer.drain()
            writer.close()
            await writer.wait_closed()
