"""The front of replicas that end at bad moments: no request fails that had not begun, and none is forgotten.

The replicas are small servers of this test, so that they end and come back when it says so.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import Request

from kvarve.reference.server import front as front_module
from kvarve.reference.server import replicas as replicas_module
from kvarve.reference.server.access import Access
from kvarve.reference.server.api import Refused
from kvarve.reference.server.front import Front
from kvarve.reference.server.keyfile import Keyring
from kvarve.reference.server.replicas import Replica, Replicas
from kvarve.reference.server.request_log import Seen
from kvarve.reference.server.serve_settings import Settings
from kvarve.reference.server.stopped import BEFORE, DURING, ENGINE

PATIENCE_S = 120.0
SETTINGS = cast(Settings, SimpleNamespace(dp=2, kv_events_config=None))


class Served:
    """A replica's place: what listens there notes each request and answers it, or ends with it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.replica = Replica(number, SETTINGS, folder)
        self.asked: list[str] = []
        self.ends = False  # with the next request
        self.hangs: asyncio.Event | None = None  # it answers once this is set
        self.status = 200
        self.headers = ""  # lines of its own
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.replica.url, self.replica.up = f"http://127.0.0.1:{port}", True
        self.replica.starts += 1

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
        body = (await reader.readexactly(int(lengths[0]))).decode() if lengths else ""
        self.asked.append(f"{head.splitlines()[0].rpartition(' ')[0]} {body}".strip())
        if self.hangs is not None:
            await self.hangs.wait()
        if self.ends:
            await self.stop()
        else:
            said = b'{"served": %d}' % self.replica.number
            words = f"HTTP/1.1 {self.status} X\r\ncontent-type: application/json\r\ncontent-length: {len(said)}\r\n"
            writer.write(f"{words}{self.headers}connection: close\r\n\r\n".encode() + said)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def a_front(places: list[Served], keys: Keyring) -> AsyncIterator[httpx.AsyncClient]:
    group = SimpleNamespace(all=[place.replica for place in places], ended=[])
    front = Front(cast(Replicas, group), 1 << 20, Access(keys), lambda app: app)
    for place in places:
        await place.start()
    try:
        transport = httpx.ASGITransport(front.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=PATIENCE_S) as client:
            yield client
    finally:
        await front.close()
        for place in places:
            await place.stop()


async def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def played(play: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test that a play of two places and a client of their front is; its other arguments are fixtures."""

    def test(tmp_path: Path, keys: Keyring, **fixtures: Any) -> None:
        async def whole() -> None:
            places = [Served(number, tmp_path) for number in range(2)]
            async with a_front(places, keys) as client:
                await play(places, client, **fixtures)

        asyncio.run(whole())

    own, asked = ([*signature(each).parameters.values()] for each in (test, play))
    test.__signature__ = Signature(own[:2] + asked[2:])  # type: ignore[attr-defined]
    return test


@pytest.fixture
def keys() -> Keyring:
    return Keyring()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "replace", lambda settings, **_: settings)


@played
async def test_a_request_outlives_the_end_of_all_replicas_at_once(
    places: list[Served], client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for place in places:
        place.ends = True
    asked = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
    await until(lambda: all(place.asked for place in places))
    # Their ends have not been seen yet: the front goes on trying them, and finds nothing there.
    await until(lambda: sum("goes to another" in each for each in caplog.messages) >= 6)
    places[1].ends = False
    await places[1].start()
    answer = await asked
    assert (answer.status_code, answer.json()) == (200, {"served": 1})


@played
async def test_a_replica_that_was_started_again_has_the_storage_of_the_others(
    places: list[Served], client: httpx.AsyncClient
) -> None:
    first, other = places
    changes = [{"storage": "file:///a", "write_policy": "x"}, {"storage": "file:///b"}, {"storage": "file:///c"}]
    for change in changes:
        assert (await client.put("/admin/storage", json=change)).status_code == 200
    assert first.asked == other.asked and len(other.asked) == 3
    await other.stop()
    other.asked.clear()
    await other.start()
    first.replica.up = False
    await client.post("/v1/completions", json={"prompt": "x"})
    await client.post("/v1/completions", json={"prompt": "y"})
    told = [each.split(" ")[0] for each in other.asked]
    assert told == ["PUT", "PUT", "POST", "POST"], "once, before any request; none that a later one makes up for"
    assert "/a" in other.asked[0] and "/c" in other.asked[1]


@played
async def test_a_change_that_one_replica_refuses_is_not_told_to_one_that_comes_back(
    places: list[Served], client: httpx.AsyncClient
) -> None:
    first, other = places
    other.status = 409
    answer = await client.put("/admin/storage", json={"storage": "file:///a"})
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "replica 1: status 409; replicas that have done it: 0"
    other.status = 200
    await first.stop()
    first.asked.clear()
    await first.start()
    other.replica.up = False
    await client.post("/v1/completions", json={"prompt": "x"})
    assert [each.split(" ")[0] for each in first.asked] == ["POST"]


@played
async def test_a_change_reaches_a_replica_that_does_not_serve_once_it_does(
    places: list[Served], client: httpx.AsyncClient
) -> None:
    first, other = places
    other.replica.up = False  # its end has been seen
    answer = await client.put("/admin/storage", json={"storage": "file:///a"})
    whole = {"served": 0, "replicas": [{"served": 0}], "not_serving": [1]}
    assert (answer.status_code, answer.json()) == (200, whole)
    await other.stop()
    await other.start()
    await other.stop()  # unseen
    answer = await client.put("/admin/storage", json={"storage": "file:///b"})
    assert (answer.status_code, answer.json()) == (200, whole)
    await other.start()
    first.replica.up = False
    await client.post("/v1/completions", json={"prompt": "x"})
    assert [each.split(" ")[0] for each in other.asked] == ["PUT", "POST"] and "/b" in other.asked[0]
    other.replica.up = False
    answer = await client.put("/admin/storage", json={"storage": "file:///c"})
    assert answer.status_code == 503 and "no replica serves" in answer.text


@played
async def test_a_change_is_told_again_to_a_replica_whose_connection_alone_has_ended(
    places: list[Served], client: httpx.AsyncClient
) -> None:
    first, other = places
    other.ends = True
    answer = await client.put("/admin/storage", json={"storage": "file:///a"})
    assert answer.status_code == 200 and answer.json()["not_serving"] == [1]
    other.ends, first.replica.up = False, False
    await other.start()
    other.replica.starts -= 1
    await client.post("/v1/completions", json={"prompt": "x"})
    assert [each.split(" ")[0] for each in other.asked] == ["PUT", "PUT", "POST"]


@played
async def test_a_flush_is_made_by_all_replicas_at_once_so_that_its_time_is_that_of_each(
    places: list[Served], client: httpx.AsyncClient
) -> None:
    first, other = places
    first.hangs = asyncio.Event()
    flushing = asyncio.ensure_future(client.post("/flush_cache?timeout=1"))
    await until(lambda: first.asked and other.asked)
    first.hangs.set()
    assert (await flushing).json() == {"served": 0, "replicas": [{"served": 0}, {"served": 1}]}
    first.hangs, first.ends = None, True
    answer = await client.post("/flush_cache")
    assert answer.status_code == 502 and "replica 0 has ended, perhaps of this" in answer.text


@pytest.mark.parametrize("how", [BEFORE, DURING])
@played
async def test_a_request_to_an_engine_that_has_stopped_goes_to_another_replica(
    places: list[Served], client: httpx.AsyncClient, how: str
) -> None:
    for place in places:
        place.status, place.headers = 500, f"{ENGINE}: {how}\r\n"
    asked = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
    if how == DURING:  # it may be what stops them
        assert (await asked).status_code == 502 and sum(len(place.asked) for place in places) == 3
    else:
        await until(lambda: sum(len(place.asked) for place in places) >= 6)
        places[1].status, places[1].headers = 200, ""
        assert (await asked).json() == {"served": 1}


@pytest.mark.parametrize(("last", "told"), [(b"data: {}\n\n", True), (b'data: {"choi', False)])
def test_a_stream_whose_replica_ends_says_so_between_events_and_does_not_look_whole(last: bytes, told: bool) -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield last
            raise httpx.ReadError("")

    async def play() -> None:
        answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Broken())
        replica = cast(Replica, SimpleNamespace(number=0, busy=1, work=5))
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        begun, gone = front_module._Begun(answer, replica, 5), asyncio.get_running_loop().create_future()
        await front_module._Answer(begun, gone)({}, cast(Any, None), send)
        assert sent[1]["body"] == last and all(each["more_body"] for each in sent[1:])
        assert [b"replica 0 has ended" in each["body"] for each in sent[2:]] == [True] * told
        assert (replica.busy, replica.work) == (0, 0)

    asyncio.run(play())


@pytest.mark.parametrize("keys", [Keyring(api_key="a", admin_key="b")])
@pytest.mark.parametrize("path", ["/v1/completions", "/admin/storage", "/no/such/path"])
@played
async def test_no_body_is_read_for_a_client_without_a_key(
    places: list[Served], client: httpx.AsyncClient, path: str
) -> None:
    read = list[bytes]()

    async def body() -> AsyncIterator[bytes]:
        for _ in range(3):
            read.append(b" ")
            yield b" "

    for headers in ({}, {"authorization": "Bearer c"}):
        for content in (body(), b"{}"):
            answer = await client.put(path, content=content, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert not read and not any(place.asked for place in places)
    for key in ("a", "b"):  # whether it opens this is for the replicas to say
        answer = await client.put(path, content=b"{}", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", ["/./admin/storage", "/x/../admin/storage", "/x/../../flush_cache", "/health/.."])
def test_a_path_with_dots_is_sent_to_no_replica(path: str) -> None:
    scope = {"type": "http", "method": "PUT", "raw_path": path.encode(), "query_string": b"a=/../b", "headers": []}
    scope["kvarve.seen"] = Seen("an-id")
    with pytest.raises(Refused, match=r"no \. or \.\."):
        front_module._Call.of(Request(scope), b"")
    front_module._Call.of(Request(scope | {"raw_path": b"/x/.../..b"}), b"")
