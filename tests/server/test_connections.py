"""A connection without progress is closed, and locks out no other until then."""

import logging
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from talk import COMPLETIONS, LONG_S, metrics, until
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from kvarve.server import connections as connections_module
from kvarve.server.connections import HEADERS_S, READ_BYTES, SEND_BYTES, STALLED_S, Connection, Connections
from kvarve.server.serve import Server, bind

Connect = Callable[..., socket.socket]
CLOSED = "kvarve_closed_connections_total"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt": "hei", "max_tokens": 1}'


@pytest.fixture
def connect(own_server: Server) -> Iterator[Connect]:
    """Opens a connection of its own and sends these bytes."""
    with ExitStack() as opened:

        def connect(content: bytes = b"", receive_bytes: int | None = None) -> socket.socket:
            url, connection = httpx.URL(own_server.url), opened.enter_context(socket.socket())
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.settimeout(LONG_S)
            connection.connect((url.host, url.port or 0))
            connection.sendall(content)
            return connection

        yield connect


@pytest.fixture
def client(own_client: httpx.Client) -> httpx.Client:
    """With a connection for each request: an idle one would end when the server's clock is put forward."""
    own_client.headers["Connection"] = "close"
    return own_client


class Clock:
    """The server's, which can be put forward."""

    def __init__(self, connections: Connections) -> None:
        self.ahead_s = 0.0
        connections.clock = lambda: time.monotonic() + self.ahead_s


@pytest.fixture
def clock(own_server: Server) -> Clock:
    return Clock(own_server.connections)


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


def sweep(client: httpx.Client, server: Server) -> None:
    """Wait until the server has checked its connections twice from now on."""
    sweeps: list[None] = []
    done = server.connections.close_stalled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.connections, "close_stalled", lambda: (done(), sweeps.append(None)))
        until(client, lambda _: len(sweeps) >= 2)


# --- headers


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", b"GET /health HTTP/1.1\r\nHost", post(BODY)[:60]],
    ids=["none", "G", "GET", "POST"],
)
def test_a_connection_whose_headers_do_not_come_ends(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock, sent: bytes
) -> None:
    half = connect(sent)
    until(client, lambda now: now["kvarve_connections"] == 2)
    sweep(client, own_server)
    clock.ahead_s = HEADERS_S + 1
    assert is_closed(half)
    now = until(client, lambda now: now[f"{CLOSED}.headers"] >= 1)
    assert now["kvarve_connections"] <= 2


def test_dribbling_does_not_put_the_end_off(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    half = connect(b"GET /health HTTP/1.1\r\n")
    until(client, lambda now: now["kvarve_connections"] == 2)
    for i in range(3):
        clock.ahead_s += HEADERS_S / 3 - 1
        half.sendall(f"X-{i}: 1\r\n".encode())
        sweep(client, own_server)
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
    sweep(client, own_server)
    kept.sendall(HEALTH[20:])
    assert answer(kept).startswith(b"HTTP/1.1 200")
    kept.sendall(HEALTH[:20])
    sweep(client, own_server)
    clock.ahead_s += HEADERS_S + 1
    assert is_closed(kept)


def test_the_time_limit_of_headers_does_not_apply_to_bodies_and_answers(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    slow = connect(post(BODY[:5], len(BODY)))
    streaming = connect(post(b'{"prompt": "hei", "max_tokens": 200, "ignore_eos": true, "stream": true}'))
    assert answer(streaming).startswith(b"HTTP/1.1 200")
    clock.ahead_s = 10 * HEADERS_S
    sweep(client, own_server)
    slow.sendall(BODY[5:])
    assert answer(slow).startswith(b"HTTP/1.1 200")
    got = b""
    while b"[DONE]" not in got:
        piece = streaming.recv(1 << 16)
        assert piece
        got = got[-10:] + piece


def test_a_connection_between_two_requests_stays_longer_than_a_client_keeps_it(own_server: Server) -> None:
    """Where the server closes it first, a request that is on its way at that moment gets no answer."""
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    assert kept_s < own_server._http.config.timeout_keep_alive < HEADERS_S  # which would be told as trouble


# --- answers that are not read


def test_a_client_that_does_not_read_its_stream_is_aborted(
    own_server: Server, client: httpx.Client, connect: Connect, clock: Clock
) -> None:
    for listener in own_server._http.servers[0].sockets:  # accepted sockets inherit these small send buffers
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    asked = b'{"prompt": "hei", "max_tokens": 900, "ignore_eos": true, "stream": true, "n": 16, "logprobs": 5}'
    deaf = connect(post(asked), receive_bytes=1024)

    def paused(_: object) -> bool:
        return any(one.flow.write_paused for one in [*own_server.connections._open])

    until(client, paused)
    clock.ahead_s = STALLED_S + 1
    now = until(client, lambda now: now["kvarve_requests_total.aborted"] == 16)
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


def test_while_an_answer_is_written_as_it_comes_it_does_not_stall() -> None:
    connection, pipe = a_connection(100.0, complete=False)
    for now in range(101, 200):
        pipe.unsent += 100  # more is written than is read
        assert connection.stalled_s(now) == 0
    connection.flow.write_paused = True
    assert connection.stalled_s(209.0) == 10


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
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 20_000)
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
    streaming = connect(post(b'{"prompt": "hei", "max_tokens": 900, "ignore_eos": true, "stream": true}'))
    assert answer(streaming).startswith(b"HTTP/1.1 200")
    own_server.connections.most = 4
    half = [connect(sent) for sent in (b"", b"GET /he", post(BODY[:9], len(BODY)))]
    with caplog.at_level(logging.WARNING, "kvarve"):
        for oldest in half:
            new = connect(HEALTH)
            assert answer(new).startswith(b"HTTP/1.1 200")
            assert is_closed(oldest)
        assert streaming.recv(10)
        with httpx.Client(base_url=own_server.url) as later:
            now = until(later, lambda now: bool(caplog.records))
    assert now[f"{CLOSED}.crowded"] >= 3
    assert "connections closed: there were too many" in caplog.text
    assert now["kvarve_connections"] <= 4


def test_if_all_connections_have_a_complete_request_the_newest_gets_503(own_server: Server, connect: Connect) -> None:
    streaming = connect(post(b'{"prompt": "hei", "max_tokens": 900, "ignore_eos": true, "stream": true}'))
    assert answer(streaming).startswith(b"HTTP/1.1 200")
    own_server.connections.most = 1
    told = answer(connect())
    assert told.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in told
    own_server.connections.most = 2
    assert answer(connect(HEALTH)).startswith(b"HTTP/1.1 200")
    assert streaming.recv(10)


def test_a_thousand_half_open_connections_leave_no_trace(own_server: Server, connect: Connect) -> None:
    own_server.connections.most = 20
    for i in range(1000):
        connect(b"GET /" if i % 2 else b"").close()
        if i % 100 == 0:  # on a new connection: one that was idle meanwhile may have been the oldest
            assert answer(connect(HEALTH)).startswith(b"HTTP/1.1 200")
    with httpx.Client(base_url=own_server.url, timeout=LONG_S) as client:
        now = until(client, lambda now: now["kvarve_connections"] <= 11)  # with the ten above
    kept = own_server.connections
    assert len(kept._open) <= 11 and not kept._closing and len(kept._incomplete) <= 11
    assert now["kvarve_requests_running"] == 0


# --- descriptors


def in_a_process(code: str, soft: int, hard: int) -> str:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n{code}"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=True, timeout=200)
    return done.stdout.strip()


@pytest.mark.parametrize(("soft", "hard", "most"), [(64, 256, 128), (512, 512, 256), (20, 20, 16), (99, 9000, 4096)])
def test_descriptors_are_raised_to_what_the_system_allows_and_half_of_them_are_for_connections(
    soft: int, hard: int, most: int
) -> None:
    code = (
        "import resource\n"
        "from kvarve.server.connections import most_connections, raise_descriptors\n"
        "raise_descriptors()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), most_connections())"
    )
    if hard > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        hard, most = resource.getrlimit(resource.RLIMIT_NOFILE)[1], connections_module.most_connections()
    assert in_a_process(code, soft, hard) == f"{hard} {hard} {most}"


def test_a_server_with_few_descriptors_serves_beside_more_half_open_connections_and_logs_little(
    checkpoint: Path, tmp_path: Path
) -> None:
    ready, log = tmp_path / "ready", tmp_path / "log"
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))\n"
    words = ["serve", "--model", checkpoint, "--port", 0, "--ready-file", ready, "--threads", 1]
    words += ["--page-tokens", 16, "--chunk-tokens", 64, "--device-memory", "8MiB", "--host-memory", "16MiB"]
    code = f"{limits}import sys\nfrom kvarve.cli import main\nsys.exit(main({[str(word) for word in words]!r}))"
    with log.open("w") as file, ExitStack() as opened:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=file)
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
    assert log.stat().st_size < 16 << 10, log.read_text()[:10_000]
    assert "Too many open files" not in log.read_text()
    assert "Invalid HTTP request" in log.read_text()
