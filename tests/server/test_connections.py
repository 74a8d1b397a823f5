"""A connection without progress is closed, and locks out no other until then."""

import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from servers import SHAPE, held, settings
from talk import COMPLETIONS, LONG_S, metrics, until
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

import forks
from kvarve.reference.server.connections import HEADERS_S, READ_BYTES, SEND_BYTES, STALLED_S, Connection, Connections
from kvarve.reference.server.serve import Server, bind

Connect = Callable[..., socket.socket]
CLOSED = "kvarve_closed_connections_total"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt": "hei", "max_tokens": 1}'


@pytest.fixture(scope="module")
def own_server(checkpoint: Path) -> Iterator[Server]:
    with Server(settings(checkpoint)) as server:
        yield server


@pytest.fixture
def connect(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Opens a connection of its own and sends these bytes; all are closed in the end."""
    with ExitStack() as opened:

        def connect(content: bytes = b"", receive_bytes: int | None = None) -> socket.socket:
            url, connection = httpx.URL(own_server.url), opened.enter_context(socket.socket())
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.settimeout(LONG_S)
            connection.connect((url.host, url.port or 0))
            connection.sendall(content)
            return connection

        monkeypatch.setattr(own_server.connections, "most", own_server.connections.most)  # as it was, in the end
        yield connect
    with httpx.Client(base_url=own_server.url) as client:
        until(client, lambda now: now["kvarve_connections"] == 1 and now["kvarve_requests_running"] == 0)


@pytest.fixture
def client(own_server: Server) -> Iterator[httpx.Client]:
    """With a connection for each request: an idle one would end when the server's clock is put forward."""
    with httpx.Client(base_url=own_server.url, timeout=60, headers={"Connection": "close"}) as client:
        yield client


class Clock:
    """The server's, which can be put forward."""

    ahead_s = 0.0


@pytest.fixture
def clock(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(own_server.connections, "clock", lambda: time.monotonic() + clock.ahead_s)
    return clock


def post(content: bytes, length: int | None = None) -> bytes:
    length = len(content) if length is None else length
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode() + content


def answer(connection: socket.socket) -> bytes:
    """One whole answer, or the head of one that is streamed."""
    got = b""
    while True:
        head, end, body = got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if end and (length is None or len(body) >= int(length[1])):
            return got
        piece = connection.recv(1 << 16)
        assert piece, f"closed after {got!r}"
        got += piece


def is_closed(connection: socket.socket) -> bool:
    """Waits until there is something to read, or no more."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def sweep(server: Server) -> None:
    """Have the server check its connections twice, beside the times that it does so by itself."""
    swept = threading.Semaphore(0)
    loop = server._http.servers[0].get_loop()
    for _ in range(2):
        loop.call_soon_threadsafe(lambda: (server.connections.close_stalled(), swept.release()))
        assert swept.acquire(timeout=LONG_S)


# --- headers


def test_a_connection_whose_headers_do_not_come_ends(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    half = [connect(sent) for sent in (b"", b"G", b"GET /health HTTP/1.1\r\nHost", post(BODY)[:60])]
    until(client, lambda now: now["kvarve_connections"] == 5)
    sweep(own_server)
    clock.ahead_s = HEADERS_S + 1
    assert all(map(is_closed, half))
    until(client, lambda now: now[f"{CLOSED}.headers"] >= 4 and now["kvarve_connections"] == 1)


def test_dribbling_does_not_put_the_end_off(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    half = connect(b"GET /health HTTP/1.1\r\n")
    until(client, lambda now: now["kvarve_connections"] == 2)
    for i in range(3):
        clock.ahead_s += HEADERS_S / 3 - 1
        half.sendall(f"X-{i}: 1\r\n".encode())
        sweep(own_server)
    clock.ahead_s += 4
    assert is_closed(half)


def test_the_time_for_headers_begins_again_after_each_answer(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    kept = connect()
    for _ in range(3):
        clock.ahead_s += HEADERS_S * 2 / 3
        kept.sendall(HEALTH)
        assert answer(kept).startswith(b"HTTP/1.1 200")
    kept.sendall(HEALTH[:20])
    sweep(own_server)
    kept.sendall(HEALTH[20:])
    assert answer(kept).startswith(b"HTTP/1.1 200")
    kept.sendall(HEALTH[:20])
    sweep(own_server)
    clock.ahead_s += HEADERS_S + 1
    assert is_closed(kept)


def test_the_time_limit_of_headers_does_not_apply_to_bodies_and_answers(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    slow = connect(post(BODY[:5], len(BODY)))
    streaming = connect(post(b'{"prompt": "hei", "max_tokens": 30, "ignore_eos": true, "stream": true}'))
    assert answer(streaming).startswith(b"HTTP/1.1 200")
    clock.ahead_s = 10 * HEADERS_S
    sweep(own_server)
    slow.sendall(BODY[5:])
    assert answer(slow).startswith(b"HTTP/1.1 200")
    got = b""
    while b"[DONE]" not in got:
        piece = streaming.recv(1 << 16)
        assert piece
        got = got[-10:] + piece


# --- answers that are not read


def test_a_client_that_does_not_read_its_stream_is_aborted(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    for listener in own_server._http.servers[0].sockets:  # accepted sockets inherit these small send buffers
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    asked = b'{"prompt": "hei", "max_tokens": 900, "n": 8, "ignore_eos": true, "stream": true, "logprobs": 5}'
    before = metrics(client)["kvarve_requests_total.aborted"]
    deaf = connect(post(asked), receive_bytes=1024)

    def paused(_: object) -> bool:
        for one in [*own_server.connections._open]:
            one.transport.set_write_buffer_limits(512)
        return any(one.flow.write_paused for one in [*own_server.connections._open])

    until(client, paused)
    clock.ahead_s = STALLED_S + 1
    with held(own_server.engine):
        sweep(own_server)
    now = until(client, lambda now: now["kvarve_requests_total.aborted"] == before + 8)
    assert now[f"{CLOSED}.stalled"] == 1
    assert now["kvarve_requests_running"] == now["kvarve_leases"] == 0
    with suppress(ConnectionResetError):
        while deaf.recv(1 << 20):  # it ends
            pass


class Pipe:
    """A transport with this many bytes unread."""

    def __init__(self) -> None:
        self.unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Cycle:
    def __init__(self, complete: bool) -> None:
        self.response_complete = complete


def a_connection(now: float, complete: bool) -> tuple[Connection, Pipe]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    config = uvicorn.Config(app, log_config=None, lifespan="off")
    loop = cast(Any, object())
    connection = Connection(Connections(9, lambda: now), config, ServerState(), {}, loop)
    pipe = Pipe()
    connection.transport, connection.cycle = cast(Any, pipe), cast(Any, Cycle(complete))
    connection.flow = FlowControl(cast(Any, pipe))
    return connection, pipe


@pytest.mark.parametrize("complete", [True, False])
def test_an_answer_stalls_from_the_last_moment_at_which_something_of_it_was_taken(complete: bool) -> None:
    connection, pipe = a_connection(100.0, complete)
    connection.flow.write_paused = not complete
    assert connection.stalled_s(110.0) == 0  # there is nothing to read
    pipe.unsent = 5000
    assert [connection.stalled_s(now) for now in (120.0, 130.0, 150.0)] == [10, 20, 40]
    pipe.unsent = 4999
    assert [connection.stalled_s(now) for now in (160.0, 170.0)] == [0, 10]
    pipe.unsent = 0
    assert connection.stalled_s(180.0) == 0


def test_an_answer_that_drains_and_fills_up_between_two_looks_does_not_stall() -> None:
    now = 100.0
    connection, pipe = a_connection(now, complete=False)
    connection._connections.clock = lambda: now
    pipe.unsent = 80_000
    for _ in range(100):
        connection.pause_writing()
        now += 20
        connection.resume_writing()
        connection.pause_writing()
        assert connection.stalled_s(now) == 0
    assert connection.stalled_s(now + 40) == 40


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_system_holds_little_of_an_answer_so_that_slow_reading_is_seen(host: str) -> None:
    listener = bind(host, 0)
    with listener:
        room = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert room in (SEND_BYTES, 2 * SEND_BYTES)  # Linux doubles it, and grows buffers that are not set


# --- turns


def test_a_body_of_tiny_chunks_is_read_a_little_at_a_time_and_others_have_their_turns_between(
    client: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing a quarter of a megabyte of them, which is what asyncio reads at once, takes a second or so."""
    read, received = list[int](), Connection.data_received

    def noted(connection: Connection, data: bytes) -> None:
        read.append(len(data))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 8_000)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert answer(connect(head + chunks + b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert sum(read) > len(chunks)
    assert max(read) <= READ_BYTES
    assert client.get("/health").status_code == 200


# --- too many


def test_where_there_are_too_many_the_oldest_without_a_whole_request_goes(
    own_server: Server, client: httpx.Client, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client.close()  # its connection would be one of them
    streaming = connect(post(b'{"prompt": "hei", "max_tokens": 300, "ignore_eos": true, "stream": true}'))
    assert answer(streaming).startswith(b"HTTP/1.1 200")
    own_server.connections.most = 4
    half = [connect(sent) for sent in (b"", b"GET /he", post(BODY[:9], len(BODY)))]
    with held(own_server.engine), caplog.at_level(logging.WARNING, "kvarve"):
        for oldest in half:
            new = connect(HEALTH)
            assert answer(new).startswith(b"HTTP/1.1 200")
            assert is_closed(oldest)
        sweep(own_server)
        with httpx.Client(base_url=own_server.url) as later:
            now = until(later, lambda now: bool(caplog.records))
    assert streaming.recv(10)
    assert now[f"{CLOSED}.crowded"] >= 3
    assert "connections closed: there were too many" in caplog.text
    assert now["kvarve_connections"] <= 4


def test_if_all_connections_have_a_complete_request_the_newest_gets_503(own_server: Server, connect: Connect) -> None:
    streaming = connect(post(b'{"prompt": "hei", "max_tokens": 900, "ignore_eos": true, "stream": true}'))
    assert answer(streaming).startswith(b"HTTP/1.1 200")
    with held(own_server.engine):
        own_server.connections.most = 1
        told = answer(connect())
        assert told.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in told
        own_server.connections.most = 2
        assert answer(connect(HEALTH)).startswith(b"HTTP/1.1 200")
    assert streaming.recv(10)


# --- descriptors


@pytest.mark.parametrize(("soft", "hard", "most"), [(64, 256, 128), (20, 20, 16)])
def test_descriptors_are_raised_to_what_the_system_allows_and_half_of_them_are_for_connections(
    soft: int, hard: int, most: int
) -> None:
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from kvarve.reference.server.connections import most_connections, raise_descriptors\n"
        "raise_descriptors()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), most_connections())"
    )
    done = forks.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{hard} {hard} {most}"


@pytest.mark.long
def test_a_server_with_few_descriptors_serves_beside_more_half_open_connections_and_logs_little(
    checkpoint: Path, tmp_path: Path
) -> None:
    ready, log = tmp_path / "ready", tmp_path / "log"
    words = ["serve", "--model", str(checkpoint), "--port", "0", "--ready-file", str(ready), *SHAPE]
    code = (
        "import resource, sys\nfrom kvarve.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))\nsys.exit(main({words!r}))"
    )
    with log.open("w") as file, ExitStack() as opened:
        process = forks.Popen([sys.executable, "-c", code], stdout=file, stderr=file)
        opened.callback(process.wait)
        opened.callback(process.kill)
        while not ready.exists():
            assert process.poll() is None, log.read_text()
        url = httpx.URL(ready.read_text().strip())
        for i in range(400):
            connection = opened.enter_context(socket.create_connection((url.host, url.port or 0), timeout=LONG_S))
            connection.sendall((b"GET / HT", b"nonsense\r\n\r\n")[i % 2])
        with httpx.Client(base_url=url, timeout=LONG_S) as client:
            assert client.post(COMPLETIONS, content=BODY).status_code == 200
            assert metrics(client)["kvarve_connections"] <= 128
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
    said = log.read_text()
    assert len(said) < 16 << 10 and "Too many open files" not in said and "Invalid HTTP request" in said
