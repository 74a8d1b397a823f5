"""What do 2,000 idle connections cost 200 streams?

    .venv/bin/python benchmarks/connections.py [--quick] [--seconds S] [--json FILE]

`kvarve serve` in a process of its own answers 200 clients, each of which asks again as soon as it has its answer.
Spells with and without idle connections take turns; the idle ones are half of clients that have had an answer and keep
the connection, half of clients that never ask. The server closes both after some time (`server/connections.py`), and
they come back at once. `ttft_p50_over_alone`, `ttft_p99_over_alone`: of the streams beside them, over the same streams
alone. `rss_over_before`: the server's memory in the last quarter of the spells beside them over that in the second
quarter. `--seconds`: of all these spells together, 600 unless given.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np

from common import arguments, machine, show, watched, write_json
from kvarve.reference.server.connections import raise_descriptors

ALONE, BESIDE = KINDS = ("alone", "beside idle ones")
PATIENCE_S = 120.0
RAMP_S = 10.0  # in which idle connections open
HELD = 0.95  # of the idle connections are open: some are just coming back


@dataclass(frozen=True)
class Size:
    idle: int = 2000
    streams: int = 200
    tokens: int = 16
    prompt: int = 24
    spells: int = 3  # of each kind
    seconds: float = 600.0  # of each kind in all


QUICK = Size(idle=20, streams=4, tokens=4, spells=1, seconds=2.0)


@dataclass
class Load:
    """Streams and idle connections of one client process."""

    url: str
    size: Size
    ttft_s: list[float] = field(default_factory=list)
    came_back: int = 0

    async def streams(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._stream(number, end) for number in range(self.size.streams)))

    async def _stream(self, number: int, end: float) -> None:
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        asked = {"max_tokens": self.size.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        turn = 0
        while time.monotonic() < end:
            prompt = [(number * 37 + turn * 5 + at * 11) % 251 for at in range(self.size.prompt)]
            body, turn = json.dumps(asked | {"prompt": prompt}).encode(), turn + 1
            start = time.perf_counter()
            reader, writer = await asyncio.open_connection(host, port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            async with asyncio.timeout(PATIENCE_S):
                head_of_answer = await reader.readuntil(b"\r\n\r\n")
                assert head_of_answer.startswith(b"HTTP/1.1 200"), head_of_answer
                await reader.readuntil(b"data: ")
                self.ttft_s.append(time.perf_counter() - start)
                rest = await reader.read()
            assert b"[DONE]" in rest, rest[-300:]
            writer.close()

    async def idle(self, number: int) -> None:
        """One idle connection, opened again when the server has closed it; all do not begin at once."""
        await asyncio.sleep(RAMP_S * number / self.size.idle)
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        while True:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                with suppress(ConnectionError):
                    if number % 2:
                        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    while await reader.read(1 << 12):
                        pass
                self.came_back += 1
            finally:
                writer.close()

    async def beside(self, seconds: float) -> None:
        """Streams beside idle connections, which are there before the first."""
        idle = [asyncio.ensure_future(self.idle(number)) for number in range(self.size.idle)]
        try:
            await self._until_open(int(HELD * self.size.idle))
            await self.streams(seconds)
            assert not any(each.done() for each in idle), "an idle connection was refused"
        finally:
            for each in idle:
                each.cancel()
            await asyncio.gather(*idle, return_exceptions=True)

    async def _until_open(self, count: int) -> None:
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                lines = (await reader.read()).decode().splitlines()
                writer.close()
                if next(float(line.split()[1]) for line in lines if line.startswith("kvarve_connections ")) >= count:
                    return


class Memory:
    """The resident bytes of a process, about once a second."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/statm")

    def bytes(self) -> int:
        return int(self._file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def watch(self, seen: list[int]) -> None:
        while True:
            seen.append(self.bytes())
            await asyncio.sleep(1)


async def spell(load: Load, kind: str, seconds: float, memory: Memory) -> tuple[list[float], list[int]]:
    """The times to first tokens, and the server's memory."""
    load.ttft_s, seen = [], list[int]()
    watching = asyncio.ensure_future(memory.watch(seen))
    await (load.beside(seconds) if kind == BESIDE else load.streams(seconds))
    watching.cancel()
    return load.ttft_s, seen


def serve(size: Size) -> tuple["subprocess.Popen[str]", str]:
    words = ["--port", "0", "--log-level", "warning", "--threads", "1", "--max-running", str(size.streams)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvarve", "serve", *words, "--device-memory", "1GiB"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "  url  " in line:
            return process, line.split()[1]
    raise AssertionError("the server did not start")


def measure(size: Size) -> tuple[dict[str, list[float]], list[int], int]:
    """Times to first tokens by kind of spell, the server's memory beside idle connections, and how many came back."""
    process, url = serve(size)
    ttft_s, seen = {kind: list[float]() for kind in KINDS}, list[int]()
    try:
        load, memory = Load(url, size), Memory(process.pid)
        asyncio.run(spell(load, ALONE, min(10.0, size.seconds / size.spells), memory))  # only warms up
        for number in watched(range(2 * size.spells), "spell", 2 * size.spells):
            kind = KINDS[number % 2]
            times, bytes_ = asyncio.run(spell(load, kind, size.seconds / size.spells, memory))
            ttft_s[kind] += times
            seen += bytes_ if kind == BESIDE else []
    finally:
        process.terminate()
        process.communicate()
    return ttft_s, seen, load.came_back


def main() -> int:
    parser = arguments("What do idle connections cost streams?")
    parser.add_argument("--seconds", type=float, help="of each kind of spell in all")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    if args.seconds is not None:
        size = Size(**{**vars(size), "seconds": args.seconds})
    raise_descriptors()
    ttft_s, seen, came_back = measure(size)
    p50, p99 = ({kind: 1000 * float(np.quantile(each, at)) for kind, each in ttft_s.items()} for at in (0.5, 0.99))
    rows = [
        {"streams": kind, "answers": len(ttft_s[kind]), "ttft_p50_ms": p50[kind], "ttft_p99_ms": p99[kind]}
        for kind in KINDS
    ]
    quarter = max(1, len(seen) // 4)
    ratios = {
        "ttft_p50_over_alone": p50[BESIDE] / p50[ALONE],
        "ttft_p99_over_alone": p99[BESIDE] / p99[ALONE],
        "rss_over_before": median(seen[-quarter:]) / median(seen[quarter : 2 * quarter] or seen),
    }
    title = f"{size.streams} streams, {size.idle} idle connections, {size.seconds:g} s of each"
    show(title, rows, f"{came_back} idle connections came back, {seen[-1] >> 20} MiB resident")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
