"""What a client sends beyond its answer is not read on, and it gets the answer whole all the same."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
from servers import settings
from talk import COMPLETIONS, LONG_S, until

from kvarve.reference.server import connections as connections_module
from kvarve.reference.server.connections import LINGER_BYTES, READ_BYTES, Connection, Parser
from kvarve.reference.server.serve import Server

Connect = Callable[..., socket.socket]
KEY = "door"
MOST_BODY = 1 << 20
MOST_READ = LINGER_BYTES + (64 << 10) + 3 * READ_BYTES  # uvicorn pauses at 64 KiB that the application has not taken
SIZED, CHUNKED = "Content-Length: 99999999", "Transfer-Encoding: chunked"


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Server]:
    with Server(settings(checkpoint, api_key=KEY, max_body_bytes=MOST_BODY)) as server:
        yield server


@pytest.fixture
def connect(guarded: Server) -> Iterator[Connect]:
    """Opens a connection of its own and sends these bytes."""
    with ExitStack() as opened:

        def connect(content: bytes = b"") -> socket.socket:
            url = httpx.URL(guarded.url)
            connection = opened.enter_context(socket.create_connection((url.host, url.port or 0), timeout=LONG_S))
            connection.sendall(content)
            return connection

        yield connect


@pytest.fixture
def client(guarded: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=LONG_S, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "LINGER_S", 9000.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "LINGER_S", 0.2)


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: localhost", *headers, "", ""]).encode()


def post(*headers: str, path: str = COMPLETIONS) -> bytes:
    return head(f"POST {path} HTTP/1.1", *headers)


def answers(connection: socket.socket) -> bytes:
    """All that comes until the server has said its last."""
    got = b""
    while piece := connection.recv(1 << 16):
        got += piece
    return got


def told(got: bytes, status: int) -> str:
    """The message of a whole error, after which the connection is to be closed."""
    first, _, body = got.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status), got
    assert b"\r\nconnection: close" in first.lower()
    length = re.search(rb"content-length: (\d+)", first)
    assert length and len(body) == int(length[1]), "whole, and nothing behind it"
    return str(json.loads(body)["error"]["message"])


def sends_until_it_is_closed(connection: socket.socket, piece: bytes) -> None:
    with pytest.raises(OSError) as ended:
        while True:
            connection.sendall(piece)
    assert not isinstance(ended.value, TimeoutError)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("sent", "piece", "status"),
    [
        (post(SIZED), b"x" * 4096, 401),
        (post(CHUNKED), b"1\r\nx\r\n" * 500, 401),
        (post(CHUNKED, path="/nope"), b"8000\r\n%s\r\n" % (b"x" * 0x8000), 404),
        (post(SIZED, f"Authorization: Bearer {KEY}"), b"x" * 4096, 413),
        (post("Content-Length: 9999", CHUNKED), b"1\r\nx\r\n" * 500, 400),
        (head("POST /v1/completions HTTP/1.0", SIZED), b"x" * 4096, 401),
    ],
    ids=["sized", "bytes", "chunks-404", "sized-413", "two-lengths", "http-1.0"],
)
def test_a_stranger_who_sends_on_is_answered_and_closed_and_little_of_it_is_read(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, sent: bytes, piece: bytes, status: int
) -> None:
    read, pieces = list[int](), list[object]()
    updated, parsed = Connection.buffer_updated, Parser.next_event

    def noted(connection: Connection, nbytes: int) -> None:
        read.append(nbytes)
        updated(connection, nbytes)

    def next_event(parser: Parser) -> Any:
        event = parsed(parser)
        pieces.extend([event] * isinstance(event, h11.Data))
        return event

    monkeypatch.setattr(Connection, "buffer_updated", noted)
    monkeypatch.setattr(Parser, "next_event", next_event)
    connection = connect(sent + piece)
    assert told(answers(connection), status)
    sends_until_it_is_closed(connection, piece)
    assert sum(read) <= MOST_READ
    assert b"1\r\nx" not in piece or not pieces, "parsing the chunks would take a thousand times as long"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("how", "key"), [(CHUNKED, "wrong"), (SIZED, KEY), (CHUNKED, KEY)])
def test_a_client_that_sends_all_of_a_refused_body_and_then_reads_gets_its_answer(
    connect: Connect, how: str, key: str
) -> None:
    body = b"x" * 4_000_000
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if how == CHUNKED else body
    connection = connect(post(how, f"Authorization: Bearer {key}"))
    with suppress(OSError):  # it is closed while it writes
        connection.sendall(sent)
    answer = told(answers(connection), 401 if key == "wrong" else 413)
    assert answer == ("wrong API key" if key == "wrong" else f"the body is larger than {MOST_BODY} bytes")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("sent", [post(CHUNKED), post(SIZED), b"\x16\x03\x01 nonsense\r\n\r\n"])
def test_a_client_that_reads_while_it_sends_gets_its_answer_and_may_go_on_sending(
    connect: Connect, sent: bytes
) -> None:
    connection, over = connect(sent), threading.Event()

    def send_on() -> None:
        with suppress(OSError):
            for _ in range(LINGER_BYTES // 20):  # less than the server reads, or it would not see the end
                if not over.is_set():
                    connection.sendall(b"1\r\nx\r\n")

    sending = threading.Thread(target=send_on)
    sending.start()
    try:
        got = answers(connection)
        assert got.startswith(b"HTTP/1.1 40") and b"\r\n\r\n" in got
        connection.sendall(b"1\r\nx\r\n")  # the server does not break it off
    finally:
        over.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        sending.join()


@pytest.mark.usefixtures("patient")
def test_a_client_that_leaves_once_it_has_its_answer_is_gone_at_once(client: httpx.Client, connect: Connect) -> None:
    before = until(client, lambda now: now["kvarve_connections"] == 1)
    for how in (SIZED, CHUNKED):
        with connect(post(how)) as connection:
            told(answers(connection), 401)
    until(client, lambda now: now["kvarve_connections"] == before["kvarve_connections"])


@pytest.mark.usefixtures("patient")
def test_a_body_that_is_waited_for_is_asked_for_and_one_that_is_too_large_is_refused_before(connect: Connect) -> None:
    expects, key = "Expect: 100-continue", f"Authorization: Bearer {KEY}"
    connection = connect(post(f"Content-Length: {MOST_BODY + 1}", key, expects))
    assert told(answers(connection), 413) == f"the body is larger than {MOST_BODY} bytes"
    body = b'{"prompt": "hei", "max_tokens": 1}'
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for length, sent in ((f"Content-Length: {len(body)}", body), (CHUNKED, chunk)):
        connection = connect(post(length, expects, "Connection: close", key))
        continues = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connection.recv(len(continues), socket.MSG_WAITALL) == continues
        connection.sendall(sent)
        assert answers(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("length", ["Content-Length: 2", CHUNKED])
def test_what_follows_a_body_that_was_not_asked_for_is_a_request_only_if_the_body_is_whole(
    connect: Connect, length: str
) -> None:
    """A body is whole here if it came with its head: then the connection stays. Of chunks nobody has looked."""
    health, last = head("GET /health HTTP/1.1", length), head("GET /nope HTTP/1.1", "Connection: close")
    connection = connect(health + (b"{}" if length != CHUNKED else b"2\r\n{}\r\n0\r\n\r\n") + last)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answers(connection))
    assert statuses == ([b"200"] if length == CHUNKED else [b"200", b"404"])


@pytest.mark.usefixtures("patient")
def test_connections_that_linger_are_the_first_to_go_where_there_are_too_many(
    guarded: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client(base_url=guarded.url) as idle:
        until(idle, lambda now: now["kvarve_connections"] == 1)
    monkeypatch.setattr(guarded.connections, "most", 2)
    lingering = [connect(post(SIZED)) for _ in range(2)]
    for each in lingering:
        told(answers(each), 401)
    for each in lingering:
        fresh = connect(head("GET /health HTTP/1.1"))
        assert fresh.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        sends_until_it_is_closed(each, b"x" * 100)
