"""What does HTTP add to a token, when many answers are streamed at once?

    .venv/bin/python benchmarks/server.py [--quick] [--json FILE]

The same requests go to the same engine in turns: submitted to it, and over HTTP from a process of its own, as streams
of `/v1/completions`. `overhead_per_token_ms`: the seconds from the first request to the end of the last answer, divided
by all tokens of all answers, over HTTP less without; each is the median of several rounds. Prompts are shorter than a
page, so none is cached.
"""

import asyncio
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from urllib.parse import urlsplit

import torch

from common import arguments, machine, show, watched, write_json
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import quiet_libraries
from kvarve.reference.engine.requests import OutputChunk, Request, Sampling
from kvarve.reference.server.serve import Server
from kvarve.reference.server.serve_settings import Settings

PATIENCE_S = 600.0
PROMPT = 24  # tokens


@dataclass(frozen=True)
class Size:
    streams: int = 32
    tokens: int = 128
    rounds: int = 15


QUICK = Size(streams=4, tokens=8, rounds=2)


def prompts(size: Size) -> list[list[int]]:
    return [[(stream * 37 + at * 11) % 251 for at in range(PROMPT)] for stream in range(size.streams)]


def through_engine(engine: Engine, asked: Sequence[Sequence[int]], tokens: int) -> float:
    """Seconds until all prompts are answered with so many tokens each."""
    left, done = len(asked), threading.Event()

    def take(piece: OutputChunk) -> None:
        nonlocal left
        if piece.finish is not None:
            assert not piece.error, piece
            left -= 1
            if not left:
                done.set()

    start = time.perf_counter()
    for prompt in asked:
        engine.submit(Request(prompt, Sampling(tokens, ignore_eos=True), read_cache=False, deliver=take))
    assert done.wait(PATIENCE_S), "no answer"
    return time.perf_counter() - start


async def over_http(url: str, size: Size) -> float:
    """The same by a client that only reads."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def stream(prompt: Sequence[int]) -> None:
        asked = {"prompt": prompt, "max_tokens": size.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(asked | {"skip_reading_prefix_cache": True}).encode()
        reader, writer = await asyncio.open_connection(host, port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        got = await reader.read()
        assert got.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in got, got[-500:]
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*map(stream, prompts(size)))
    return time.perf_counter() - start


def client(url: str, size: Size, told: Connection) -> None:
    """A process: answers each word with the seconds of a round, until there is none."""
    while told.recv():
        told.send(asyncio.run(over_http(url, size)))


def measure(size: Size) -> dict[str, list[float]]:
    """Seconds of each round."""
    ours, theirs = multiprocessing.Pipe()
    with Server(Settings(port=0, log_level="warning", threads=1)) as server:
        process = multiprocessing.get_context("spawn").Process(target=client, args=(server.url, size, theirs))
        process.start()

        def asked() -> float:
            ours.send(True)
            assert ours.poll(PATIENCE_S), "no answer"
            return float(ours.recv())

        took: dict[str, list[float]] = {"engine": [], "http": []}
        for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
            found = {"engine": through_engine(server.engine, prompts(size), size.tokens), "http": asked()}
            if number:  # the first only warms up
                for how, seconds in found.items():
                    took[how].append(seconds)
        ours.send(False)
        process.join()
    return took


def main() -> int:
    args = arguments("What does HTTP add to a token?").parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    quiet_libraries()
    torch.set_num_threads(1)
    tokens = size.streams * size.tokens
    rows = [
        {"requests": how, "ms_per_token": 1000 * median(took) / tokens, "least": 1000 * min(took) / tokens}
        for how, took in measure(size).items()
    ]
    engine, http = (float(str(row["ms_per_token"])) for row in rows)
    ratios = {"overhead_per_token_ms": http - engine}
    table = [{name: each if isinstance(each, str) else f"{each:.3f}" for name, each in row.items()} for row in rows]
    show(f"{size.streams} streams of {size.tokens} tokens, {size.rounds} rounds", table)
    print(f"overhead_per_token_ms: {ratios['overhead_per_token_ms']:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
