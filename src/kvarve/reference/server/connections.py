"""Connection limits: how many may be open, and time limits for headers and for clients that do not read.

uvicorn closes a connection that is idle between two requests (`KEEP_ALIVE_S`), and leaves the rest to a proxy. This
module also closes a connection whose request headers do not complete, and one whose client does not read its answer. (A
body has a time limit of its own: `bodies`.) Beyond the limit, the connection that has been longest without a complete
request is closed, so that idle connections cannot lock out new clients. A connection counts from its accept on: TLS
begins on it afterwards, as part of the wait for headers.

A body that the application does not ask for is not read on: its answer says `Connection: close`, and the connection is
closed once the client has had time to read it.
"""

import asyncio
import logging
import resource
import ssl
import time
from asyncio import BaseTransport, BufferedProtocol, Protocol, Transport
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADERS_S = 30.0  # from accept, or the end of the previous answer, until a request's headers are complete
KEEP_ALIVE_S = (
    20  # between two requests: clients keep a connection for less (httpx 5, aiohttp 15), so they close it first
)
STALLED_S = 30.0  # in which the client reads no byte of an answer
SEND_BYTES = 1 << 16  # the socket's send buffer: a slow reader shows only when it is full
READ_BYTES = 4096  # per read before other connections' turn: each byte can be an HTTP chunk, which takes 20 us to parse
LINGER_S, LINGER_BYTES = (
    1.0,
    100 << 10,
)  # that a client has to read its answer while it sends on, and that are discarded
MOST = 4096  # connections; half of the descriptors if that is less
LEAST = 16
FULL = b"""\
HTTP/1.1 503 Service Unavailable\r
connection: close\r
retry-after: 1\r
content-length: 0\r
\r
"""


class Connections:
    """The connections of one server. All state but the counts belongs to the event loop's thread."""

    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, context: ssl.SSLContext | None = None
    ) -> None:
        """`context`: of TLS, which each connection begins with; None for none."""
        self.most, self.clock, self._context = most, clock, context
        self.closed: Counter[str] = Counter()  # by reason, since the start
        self._logged: Counter[str] = Counter()  # those that have been logged
        self._open: set[Connection | Handshake] = set()
        self._closing: set[Connection | Handshake] = set()  # closed, with unsent bytes left
        self.read = memoryview(bytearray(READ_BYTES))  # the read buffer of all connections
        self._incomplete: dict[Connection | Handshake, float] = {}  # no complete request yet: since when, oldest first

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, *args: Any, **kwargs: Any) -> "Connection | Handshake":
        """The protocol factory that uvicorn calls for each accepted connection."""
        if self._context is None:
            return Connection(self, *args, **kwargs)
        return Handshake(self, self._context, lambda: Connection(self, *args, **kwargs))

    def close_stalled(self) -> None:
        """Close connections past a time limit; to be called about once a second."""
        now = self.clock()
        late = [one for one, since in self._incomplete.items() if one.waits_for_headers and now - since > HEADERS_S]
        for one in late:
            self._end(one, "headers")
        for one in [one for one in self._open if one.stalled_s(now) > STALLED_S]:
            self.closed["stalled"] += 1
            one.wire.abort()
        for reason, count in (self.closed - self._logged).items():
            log.warning("%d connections closed: %s", count, _WHY[reason])
        self._logged = self.closed.copy()

    # --- called by connections

    def opened(self, one: "Connection | Handshake") -> None:
        self._open.add(one)
        if len(self._open) - len(self._closing) > self.most:
            if self._incomplete:
                self._end(next(iter(self._incomplete)), "crowded")
            else:
                if isinstance(one, Connection):
                    one.wire.write(FULL)
                self._end(one, "crowded")
                return
        self._incomplete[one] = self.clock()

    def received(self, one: "Connection") -> None:
        """Data has arrived, or an answer is complete."""
        if one in self._closing or one.has_whole_request:
            self._incomplete.pop(one, None)
        else:
            self._incomplete.setdefault(one, self.clock())

    def response_complete(self, one: "Connection") -> None:
        self._incomplete.pop(one, None)  # from now on it waits for the next request
        self.received(one)

    def forget(self, one: "Connection | Handshake") -> None:
        self._open.discard(one)
        self._closing.discard(one)
        self._incomplete.pop(one, None)

    def _end(self, one: "Connection | Handshake", reason: str) -> None:
        self.closed[reason] += 1
        self._incomplete.pop(one, None)
        self._closing.add(one)
        cut(one.wire)


class Parser(h11.Connection):
    """Of requests. It leaves a body of chunks alone until that is `wanted`, as each chunk may be a byte."""

    wanted = chunked = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.SEND_BODY and self.chunked and not self.wanted:
            return h11.PAUSED  # uvicorn reads no more then, until the application asks for the body
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.wanted, self.chunked = False, any(name == b"transfer-encoding" for name, _ in event.headers)
        return event


class Connection(H11Protocol, BufferedProtocol):
    """A connection that reports its opening, incoming data and closing to `Connections`. Where its client may still be
    sending it lingers."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._unsent_bytes, self._moved_s = 0, connections.clock()
        self.conn: Parser = Parser(h11.SERVER)
        self._app, self.app = self.app, self._answer
        self._linger: asyncio.TimerHandle | None = None  # ends it
        self._spare_bytes = LINGER_BYTES  # that may be discarded until then

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        self.wire = transport
        super().connection_made(cast(Transport, Leaving(self)))
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        self._connections.forget(self)
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def ask() -> Message:
            if not self.conn.wanted:
                self.conn.wanted = True
                self.handle_events()
            return await receive()

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start" and self.conn.their_state is h11.SEND_BODY:
                others = [each for each in message["headers"] if each != CLOSE_HEADER]
                message = {**message, "headers": [*others, CLOSE_HEADER]}
            await send(message)

        await self._app(scope, ask, say)

    @property
    def leaves(self) -> bool:
        """It is closed, but for what its client may still be sending."""
        return self._linger is not None

    def leave(self) -> None:
        """Close it. If the client may still be sending, it has a moment first to read the answer to the end: a system
        that gets bytes for a closed connection resets it, which takes from the client what it has not read yet
        (RFC 9112, 9.6)."""
        if self.leaves or self.wire.is_closing():
            return
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            self.wire.close()
            return
        self._linger = self.loop.call_later(LINGER_S, cut, self.wire)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # there is nothing more to receive or to send
            self.cycle.message_event.set()
        if self.wire.can_write_eof():  # TLS cannot
            self.wire.write_eof()
        self.wire.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.read

    def buffer_updated(self, nbytes: int) -> None:
        if not self.leaves:
            self.data_received(bytes(self._connections.read[:nbytes]))
            return
        self._spare_bytes -= nbytes
        if self._spare_bytes < READ_BYTES:
            self.wire.pause_reading()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._connections.received(self)

    def on_response_complete(self) -> None:
        self._connections.response_complete(self)
        super().on_response_complete()  # it may find the next request in data received earlier
        self._connections.received(self)

    def resume_writing(self) -> None:
        self._moved_s = self._connections.clock()
        super().resume_writing()

    @property
    def waits_for_headers(self) -> bool:
        """No request on it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def has_whole_request(self) -> bool:
        return not self.waits_for_headers and not self.cycle.more_body

    def stalled_s(self, now: float) -> float:
        """For how long the client has not read any of the unsent bytes; to be called periodically.

        While an answer is being written, new chunks hide how much the client has read; but writing pauses above the
        transport's high watermark and resumes when the client has read most of the buffer.
        """
        unsent, writing = self.transport.get_write_buffer_size(), not self.waits_for_headers
        if not unsent or unsent < self._unsent_bytes or (writing and not self.flow.write_paused):
            self._moved_s = now
        self._unsent_bytes = unsent
        return now - self._moved_s


class Leaving:
    """The transport of a connection, for uvicorn: to close it is to leave its client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.wire, name)

    def close(self) -> None:
        self._connection.leave()

    def is_closing(self) -> bool:
        return self._connection.leaves or self._connection.wire.is_closing()


class Handshake(Protocol):
    """A connection until TLS has begun on it. asyncio's own servers tell of one only then."""

    waits_for_headers = True

    def __init__(self, connections: Connections, context: ssl.SSLContext, connection: Callable[[], Connection]) -> None:
        self._connections, self._context, self._connection = connections, context, connection
        self._lost = False
        self._early = b""  # what came in the moment between the handshake's end and the connection's begin

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        self.wire = transport
        self._connections.opened(self)
        self._task = asyncio.get_running_loop().create_task(self._begin())

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                self.wire, self, self._context, server_side=True, ssl_handshake_timeout=HEADERS_S
            )
        except OSError:  # of TLS, of the network, of time
            self.wire.abort()
            return
        except asyncio.CancelledError:
            self.wire.abort()
            raise
        finally:
            self._connections.forget(self)
        if self._lost or encrypted is None:
            return
        connection = self._connection()
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted)
        if self._early:
            connection.data_received(self._early)

    def stalled_s(self, now: float) -> float:
        return 0.0


def cut(wire: Transport) -> None:
    """Close it as soon as what was written has been sent. TLS would wait for the client's part in that."""
    if wire.get_write_buffer_size():
        wire.close()
    else:
        wire.abort()


_WHY = {
    "headers": f"no headers of a request within {HEADERS_S:.0f} s",
    "stalled": f"nothing of an answer was read for {STALLED_S:.0f} s",
    "crowded": "there were too many, and these had no complete request",
}


def raise_descriptors() -> None:
    """Raise this process's limit of file descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems report a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many connections may be open: half of the descriptors; the rest is for storage and other files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(LEAST, min(MOST, soft // 2))
