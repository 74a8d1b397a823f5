"""What is sent when, and what is noted of the answers: against a server that holds answers back, or breaks them."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from fake_server import DONE, HEAD, USAGE, FakeServer, event, plain

from kvarve.bench.load import Record, arrivals, send_all
from kvarve.bench.workloads import Conversation, Turn

T = TypeVar("T")
LONG_S = 45.0


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, LONG_S))


def talks(count: int, turns: int = 1) -> list[Conversation]:
    return [Conversation(tuple(Turn([at, turn], 2) for turn in range(turns))) for at in range(count)]


def test_at_a_rate_requests_are_sent_on_time_though_no_answer_comes() -> None:
    """The server answers only when the last request has come: an open loop does not wait, so this ends."""

    async def work() -> tuple[list[Record], FakeServer]:
        all_came = asyncio.Event()

        async def held(body: dict[str, Any], out: asyncio.StreamWriter) -> None:
            if server.now == 20:
                all_came.set()
            await all_came.wait()
            await plain(body, out)

        async with FakeServer(held) as server:
            return await send_all(server.client, talks(20), 1, [each / 1000 for each in range(20)]), server

    records, server = run(work())
    assert server.most == 20
    assert not any(record.error for record in records)
    begins = [record.due_s - records[0].due_s for record in records]
    assert begins == pytest.approx([each / 1000 for each in range(20)]), "times count from when a request was due"
    assert all(record.due_s <= record.sent_s < record.first_s <= record.end_s for record in records)


def test_in_a_closed_loop_each_client_has_one_request_open() -> None:
    async def work() -> FakeServer:
        three = asyncio.Barrier(3)

        async def held(body: dict[str, Any], out: asyncio.StreamWriter) -> None:
            await three.wait()  # nothing is answered before three are open
            await plain(body, out)

        async with FakeServer(held) as server:
            await send_all(server.client, talks(12), 3, None)
            return server

    server = run(work())
    assert (server.most, len(server.asked)) == (3, 12)


def test_a_turn_is_asked_when_the_one_before_is_answered() -> None:
    async def work() -> tuple[list[Record], FakeServer]:
        async with FakeServer() as server:
            return await send_all(server.client, talks(2, turns=3), 2, [0.0, 0.0]), server

    records, server = run(work())
    assert len(records) == 6
    for conversation in (0, 1):
        assert [body["prompt"][1] for body in server.asked if body["prompt"][0] == conversation] == [0, 1, 2]
        one, two, three = records[3 * conversation : 3 * conversation + 3]
        assert one.end_s == two.due_s <= two.sent_s and two.end_s == three.due_s <= three.sent_s


TIERS = {"device": 1, "host": 2, "storage": 0}


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"kvarve": {"cached_tokens": TIERS}}, TIERS),
        ({"prompt_tokens_details": {"cached_tokens": 4}}, {"cached": 4}),  # of a server of another make
    ],
)
def test_what_a_stream_says_is_noted(usage: dict[str, Any], cached: dict[str, int]) -> None:
    async def said(body: dict[str, Any], out: asyncio.StreamWriter) -> None:
        parts = HEAD + event("") + event("on") + event("e") + event(usage=USAGE | usage) + DONE
        for at in range(0, len(parts), 7):  # events come in pieces
            out.write(parts[at : at + 7])
            await out.drain()

    async def work() -> Record:
        async with FakeServer(said) as server:
            (record,) = await send_all(server.client, talks(1), 1, None, ignore_eos=True)
            assert server.asked[0]["stream_options"] == {"include_usage": True} and server.asked[0]["ignore_eos"]
            return record

    record = run(work())
    assert (record.text, record.prompt, record.completion, record.cached) == ("one", 5, 2, cached)
    assert len(record.gaps_s) == 1 and not record.error


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "HTTP 503: full"),
        (HEAD + event("a"), "no usage"),
        (HEAD + event(error={"message": "it broke"}), "it broke"),
        (HEAD + b"data: {nonsense\n\n", "not an event"),
        (HEAD + b'data: {"choices": [], "usage": {"prompt_tokens": null, "completion_tokens": 1}}\n\n', "not an event"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + event("a"), "RemoteProtocolError"),
    ],
)
def test_a_broken_answer_fails_one_request_alone(said: bytes, complaint: str) -> None:
    async def one_is_broken(body: dict[str, Any], out: asyncio.StreamWriter) -> None:
        if body["prompt"][0] == 1:
            out.write(said)
        else:
            await plain(body, out)

    async def work() -> list[Record]:
        async with FakeServer(one_is_broken) as server:
            return await send_all(server.client, talks(3), 1, None)

    first, broken, last = run(work())
    assert complaint in broken.error
    assert (first.error, last.error, first.text, last.text) == ("", "", "ab", "ab")


def test_arrivals_at_a_rate_are_a_poisson_process() -> None:
    begins = arrivals(talks(4000), 50.0, seed=3)
    assert begins is not None and begins[0] == 0.0 and begins == sorted(begins)
    gaps = np.diff(begins)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1) and gaps.std() == pytest.approx(1 / 50, rel=0.1)
    assert begins == arrivals(talks(4000), 50.0, seed=3) != arrivals(talks(4000), 50.0, seed=4)


def test_the_times_of_a_trace_are_used_unless_a_rate_is_given() -> None:
    traced = [Conversation((Turn([1], 1),), at_s=at) for at in (0.0, 2.5)]
    assert arrivals(traced, None, 1) == [0.0, 2.5]
    assert arrivals(traced, 100.0, 1) != [0.0, 2.5]
    assert arrivals(talks(2), None, 1) is None
