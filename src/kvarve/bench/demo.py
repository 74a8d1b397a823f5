"""The demo: real conversations with a real model, cold and then warm from every tier.

It starts `kvarve serve` as a user would and talks to it over HTTP only. The same requests run four times: `cold`
(nothing is read from the cache), `device`, `host` (the device is emptied before each request) and `storage` (the
server was restarted, and memory is emptied before each request). All rounds have to give the same answers.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import matplotlib  # noqa: F401  # if the picture cannot be drawn, that is told before the work
import numpy as np
from rich.console import Console
from rich.markup import escape

from kvarve.bench import load
from kvarve.bench.demo_report import FOLLOW_UPS, finish, sections
from kvarve.bench.figures import figures
from kvarve.bench.load import Record, Round
from kvarve.bench.run import bars
from kvarve.bench.workloads import Message, Turn
from kvarve.errors import KvarveError
from kvarve.reference.engine.recall import RecallTask, recall_task, score
from kvarve.reference.server.server_process import empty_log, served
from kvarve.settings.commands import Demo

ROUNDS = ("cold", "device", "host", "storage")
FLUSH = {"host": "device", "storage": "device,host"}  # tiers emptied before each request of a round


@dataclass(frozen=True)
class Size:
    """The amount of work."""

    conversations: int = 6
    tasks: int = 8
    turns: int = 3
    tokens: int = 3000  # of each context, about
    answer_tokens: int = 24
    facts: int = 48


QUICK = Size(conversations=1, tasks=2, turns=2, answer_tokens=8)


class Client:
    """The client of `kvarve bench`, for a request at a time."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        self._loop, self._client = asyncio.Runner(), load.Client(url, admin_key=admin_key)

    def chat(self, messages: list[Message], max_tokens: int, read_cache: bool, **more: Any) -> Record:
        """KvarveError: there is no answer. `more`: other fields of the request."""
        record = Record(time.perf_counter())
        more |= {"skip_reading_prefix_cache": not read_cache}
        self._loop.run(self._client.ask(Turn(messages, max_tokens), record, **more))
        load.check([record])
        return record

    def flush(self, tiers: str) -> None:
        self._loop.run(self._client.flush(tiers))

    def metrics(self) -> dict[str, float]:
        return self._loop.run(self._client.metrics())

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()


@contextmanager
def server(options: Demo, folder: Path, log: Path) -> Iterator[Client]:
    """A client of `kvarve serve` in a process of its own."""
    storage = options.storage or f"file://{(folder / 'storage').resolve()}?capacity=8GiB"
    words = ["--model", options.model, "--port", str(options.port), "--tp", str(options.tp)]
    words += ["--device-memory", str((1 << 30) // options.tp), "--host-memory", str((2 << 30) // options.tp)]
    words += ["--storage", storage, "--storage-wait", "all"]
    with served(words, folder, log) as url:
        client = Client(url)
        try:
            yield client
        except httpx.HTTPError as e:
            raise KvarveError(f"the server: {e} (its log is {log})") from None
        except KvarveError as e:
            raise KvarveError(f"{e} (its log is {log})") from None
        finally:
            client.close()


def conversations(size: Size) -> list[list[Message]]:
    """The first messages of conversations about real text: long sections of CPython's own manual."""
    return [
        [
            {"role": "system", "content": "You answer questions about the manual of a programming language."},
            {"role": "user", "content": f"{text}\n\n{FOLLOW_UPS[0]}"},
        ]
        for text in sections(size.conversations, size.tokens)
    ]


def run_round(
    result: Round,
    client: Client,
    size: Size,
    openings: list[list[Message]],
    tasks: list[RecallTask],
    tick: Callable[[Record], None],
) -> float:
    """All requests of one round, one at a time; the share of the tasks' questions that were answered right."""
    flush, read, start = FLUSH.get(result.name), result.name != "cold", time.perf_counter()

    def ask(messages: list[Message]) -> str:
        if flush:
            client.flush(flush)
        record = client.chat(messages, size.answer_tokens, read)
        result.records.append(record)
        tick(record)
        return record.text

    for opening in openings:
        messages = [*opening]
        for turn in range(size.turns):
            messages.append({"role": "assistant", "content": ask(messages)})
            messages.append({"role": "user", "content": FOLLOW_UPS[(turn + 1) % len(FOLLOW_UPS)]})
    scores = list[float]()
    for task in tasks:
        answers: list[str] = []
        for _ in task.questions:
            answers.append(ask(task.messages(answers)))
        scores.append(score(answers, [question.answer for question in task.questions]))
    result.duration_s = time.perf_counter() - start
    return statistics.fmean(scores)


def memcpy_bytes_per_s() -> float:
    """How fast this machine copies memory now, in one thread: the best of a few copies of 64 MiB."""
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, source.nbytes / (time.perf_counter() - start))
    return best


def bound(metrics: dict[str, float], rounds: list[Round]) -> dict[str, float]:
    """The lower bound of a warm TTFT: copying the request's pages once at this machine's memcpy speed."""
    size = {name.split('"')[1]: value for name, value in metrics.items() if name.startswith("kvarve_page_bytes{")}
    lookback = {
        name.split('"')[1]: value for name, value in metrics.items() if name.startswith("kvarve_page_lookback{")
    }
    page_tokens = metrics["kvarve_page_tokens"]
    speed = memcpy_bytes_per_s()
    moved = []
    for record in rounds[1].records:
        pages = sum(record.cached.values()) / page_tokens
        # A lookback of 0 stands for "all pages".
        moved.append(sum(size[pool] * (min(pages, lookback[pool]) if lookback[pool] else pages) for pool in size))
    cold = 1e3 * statistics.fmean(record.ttft_s for record in rounds[0].records)
    copy_ms = statistics.fmean(moved) / speed * 1e3
    return {
        "memcpy_gb_s": round(speed / 1e9, 2),
        "bytes_per_request": round(statistics.fmean(moved)),
        "copy_only_ttft_ms": round(copy_ms, 3),
        "copy_only_ttft_over_cold": round(copy_ms / cold, 5),
    }


def main(options: Demo) -> int:
    """Run the demo; 0 if every round gave the same answers, 1 if not. Writes demo.json and demo.png."""
    console = Console()
    size = replace(QUICK if options.quick else Size(), tokens=options.context_tokens)
    out = options.out
    log = empty_log(out, "demo-server.log")
    opening = conversations(size)
    tasks = [
        recall_task(seed, tokens=size.tokens, facts=size.facts, questions=size.turns) for seed in range(size.tasks)
    ]
    per_round = (len(opening) + len(tasks)) * size.turns
    rounds = [Round(name) for name in ROUNDS]
    console.print(
        f"[bold]kvarve demo[/bold]: {escape(options.model)}, {per_round} requests of about {size.tokens:,} tokens in "
        f"each of four rounds; the server's log is {escape(str(log))}"
    )
    scores: list[float] = []
    with tempfile.TemporaryDirectory(prefix="storage-", dir=out) as folder, bars(rounds, per_round) as begin:

        def work(client: Client, *rounds: Round) -> None:
            client.chat([{"role": "user", "content": "hello"}], 2, read_cache=False)  # first-use costs are not TTFT
            for result in rounds:
                scores.append(run_round(result, client, size, opening, tasks, begin(result)))

        with server(options, Path(folder), log) as client:
            work(client, *rounds[:3])
        with server(options, Path(folder), log) as client:
            work(client, rounds[3])
            limits = bound(client.metrics(), rounds)
    rows = [figures(each) | {"accuracy": round(one, 4)} for each, one in zip(rounds, scores, strict=True)]
    report = {"model": options.model, "tp": options.tp, "rounds": rows, "bound": limits}
    said = (
        f"A warm request brings back {limits['bytes_per_request'] / 1e6:.2f} MB; copying them once at this machine's "
        f"{limits['memcpy_gb_s']:.1f} GB/s takes {limits['copy_only_ttft_ms']:.2f} ms "
        f"({limits['copy_only_ttft_over_cold']:.4f} of cold). The rest of a warm TTFT is the prompt's own last chunk."
    )
    return finish(console, out / "demo.json", report, [said], "The answers differ between rounds")
