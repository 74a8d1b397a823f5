"""Whatever a client sends to /generate, however it sends it and wherever it leaves: no answer is a bug.

Bodies are valid ones, altered as data, as text and on their way. One test sends the same requests in each run.
The other one (`make test-fuzzed`) goes on for ten minutes, with another seed each time, which it prints; KVARVE_SEED
repeats one, KVARVE_MINUTES says how long.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
import pytest
from left import Left, rss_bytes
from odd_clients import asked
from servers import settings

from kvarve.reference.server.serve import Server

SEED, CLIENTS, REQUESTS = 5, 4, 80  # in the short form, of each client
MINUTES, GIVEN_SEED = float(os.environ.get("KVARVE_MINUTES", "10")), os.environ.get("KVARVE_SEED")
WARM_REQUESTS, WARM_ROUNDS = 200, 5
LONG = [pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 600)]


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    """With few places, so that some get 503, and a small context, as some ask for as many tokens as there are."""
    with Server(settings(checkpoint, tmp_path, context_length=128, max_running=2, max_waiting=5)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def fuzz(
    server: Server, pool: Executor, number: int, requests: int, end_s: float = float("inf")
) -> tuple[Counter[int], int]:
    """What the clients got, and how many answers they have not read."""
    seeds = random.Random(number)
    clients = [pool.submit(asked, server.url, seeds.random(), requests, end_s) for _ in range(CLIENTS)]
    found = [client.result() for client in clients]
    return sum((got for got, _ in found), Counter[int]()), sum(unread for _, unread in found)


@pytest.mark.long
def test_no_request_for_an_answer_is_a_bug_or_leaves_anything_behind(server: Server, client: httpx.Client) -> None:
    print(f"seed {SEED}")
    left = Left(server, client)
    with ThreadPoolExecutor(CLIENTS) as pool:
        got, unread = fuzz(server, pool, SEED, REQUESTS)
    print(got, unread)
    assert got[200] and got[400]
    left.check(got, unread)


@pytest.mark.parametrize("minutes", [pytest.param(MINUTES, marks=LONG)])
def test_for_ten_minutes_no_request_for_an_answer_is_a_bug(
    server: Server, client: httpx.Client, minutes: float
) -> None:
    number = int(GIVEN_SEED) if GIVEN_SEED else time.time_ns() % (1 << 32)
    print(f"KVARVE_SEED={number} KVARVE_MINUTES={minutes:g}", flush=True)
    dice, end_s = random.Random(number), time.monotonic() + 60 * minutes
    got, unread = Counter[int](), 0
    # In processes of their own, since only the server's memory counts.
    with ProcessPoolExecutor(CLIENTS, get_context("spawn")) as pool:
        for _ in range(WARM_ROUNDS):
            fuzz(server, pool, dice.randrange(1 << 32), WARM_REQUESTS, end_s)
        left, before = Left(server, client), rss_bytes()
        while time.monotonic() < end_s:
            more, others = fuzz(server, pool, dice.randrange(1 << 32), WARM_REQUESTS, end_s)
            got, unread = got + more, unread + others
    print(got, unread)
    left.check(got, unread, rss_bytes_before=before)
