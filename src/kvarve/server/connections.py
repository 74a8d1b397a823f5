"""Connections: how many there may be at a time, and an end for each that gets nowhere.

uvicorn closes a connection that is silent between two requests (`KEEP_ALIVE_S`), and leaves the rest to a proxy in
front of it. Here a connection ends that does not bring the headers of a request to an end, and one whose client reads
nothing of its answer. (A body has a time limit of its own, in `app`.) Where there are too many, the connection that has
been longest without a whole request goes, so that half-open ones keep nobody out.
"""

import logging
import resource
import time
from asyncio import BaseTransport, BufferedProtocol, Transport
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADERS_S = 30.0  # from a connection's beginning, or the end of the answer before, until a request's headers are whole
KEEP_ALIVE_S = (
    20  # between two requests: clients keep a connection for less (httpx 5, aiohttp 15), so they close it first
)
STALLED_S = 30.0  # without a byte of an answer being taken
SEND_BYTES = 1 << 16  # of an answer that the system holds at a time: how slowly a client reads shows no earlier
READ_BYTES = 4096  # of a connection before others have their turn: each byte can be a chunk, which takes 20 us to parse
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
    """Those of one server. All but the counts belongs to the thread of its event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self.closed: Counter[str] = Counter()  # by reason, since the beginning
        self._told: Counter[str] = Counter()  # of these, in the log
        self._open: set[Connection] = set()
        self._ending: set[Connection] = set()  # of these, those that have been closed and still write
        self.read = memoryview(bytearray(READ_BYTES))  # what has just come, over whichever connection
        self._asking: dict[Connection, float] = {}  # those without a whole request: since when, the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, *args: Any, **kwargs: Any) -> "Connection":
        """What uvicorn makes for a connection that has come."""
        return Connection(self, *args, **kwargs)

    def look(self) -> None:
        """End what gets nowhere; once a second, say."""
        now = self.clock()
        late = [one for one, since in self._asking.items() if one.waits_for_headers and now - since > HEADERS_S]
        for one in late:
            self._end(one, "headers")
        for one in [one for one in self._open if one.stalled_s(now) > STALLED_S]:
            self.closed["stalled"] += 1
            one.transport.abort()
        for reason, count in (self.closed - self._told).items():
            log.warning("%d connections closed: %s", count, _WHY[reason])
        self._told = self.closed.copy()

    # --- what connections tell

    def came(self, one: "Connection") -> None:
        self._open.add(one)
        if len(self._open) - len(self._ending) > self.most:
            if self._asking:
                self._end(next(iter(self._asking)), "crowded")
            else:
                one.transport.write(FULL)
                self._end(one, "crowded")
                return
        self._asking[one] = self.clock()

    def heard(self, one: "Connection") -> None:
        """Something has come, or an answer is complete."""
        if one in self._ending or one.has_whole_request:
            self._asking.pop(one, None)
        else:
            self._asking.setdefault(one, self.clock())

    def answered(self, one: "Connection") -> None:
        self._asking.pop(one, None)  # from now on it waits for the next request
        self.heard(one)

    def lost(self, one: "Connection") -> None:
        self._open.discard(one)
        self._ending.discard(one)
        self._asking.pop(one, None)

    def _end(self, one: "Connection", reason: str) -> None:
        self.closed[reason] += 1
        self._asking.pop(one, None)
        self._ending.add(one)
        one.transport.close()


class Connection(H11Protocol, BufferedProtocol):
    """One that says when it comes, when something has come over it, and when it goes."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._unsent_bytes, self._moved_s = 0, connections.clock()

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        super().connection_made(transport)
        self._connections.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.lost(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._connections.read[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._connections.heard(self)

    def on_response_complete(self) -> None:
        self._connections.answered(self)
        super().on_response_complete()  # it may find the next request in what has come already
        self._connections.heard(self)

    def resume_writing(self) -> None:
        self._moved_s = self._connections.clock()
        super().resume_writing()

    @property
    def waits_for_headers(self) -> bool:
        """Nothing is being answered on it."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def has_whole_request(self) -> bool:
        return not self.waits_for_headers and not self.cycle.more_body

    def stalled_s(self, now: float) -> float:
        """For how long its client has not read what there is for it; asked now and then.

        While an answer is being written new pieces hide what has been read; but writing pauses where too much waits,
        and goes on when the client has read most of that.
        """
        unsent, writing = self.transport.get_write_buffer_size(), not self.waits_for_headers
        if not unsent or unsent < self._unsent_bytes or (writing and not self.flow.write_paused):
            self._moved_s = now
        self._unsent_bytes = unsent
        return now - self._moved_s


_WHY = {
    "headers": f"no headers of a request within {HEADERS_S:.0f} s",
    "stalled": f"nothing of an answer was read for {STALLED_S:.0f} s",
    "crowded": "there were too many, and these had no whole request",
}


def raise_descriptors() -> None:
    """Let this process open as many files and sockets as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems name a limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many connections may be open at a time: half of the descriptors is for storage and all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(LEAST, min(MOST, soft // 2))
