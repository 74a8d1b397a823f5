"""The demo: real conversations with a real model, cold and then warm from every tier.

It starts `kvarve serve` as a user would and talks to it over HTTP only. The same requests run four times: `cold`
(nothing is read from the cache), `device`, `host` (the device is emptied before each request) and `storage` (the
server was restarted, and memory is emptied before each request). All rounds have to give the same answers.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import matplotlib  # noqa: F401  # if the picture cannot be drawn, that is told before the work
import numpy as np
from rich.console import Console
from rich.markup import escape

from kvarve.errors import KvarveError
from kvarve.reference.demo.demo_report import FOLLOW_UPS, Answer, Round, bars, finish, sections
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
    """Talks to one server as any OpenAI client would."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600.0, trust_env=False)

    def chat(self, messages: list[dict[str, str]], max_tokens: int, read_cache: bool, **more: Any) -> Answer:
        """`more`: other fields of the request."""
        body = more | {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "skip_reading_prefix_cache": not read_cache,
        }
        text, first, start = "", None, time.perf_counter()
        usage: dict[str, Any] = {}
        transfer = None
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise KvarveError(f"the server answered {response.status_code}: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise KvarveError(f"the server failed: {event['error']['message']}")
                usage = event.get("usage") or usage
                transfer = event.get("kv_transfer_params", transfer)
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    if first is None and (text or choice["finish_reason"]):
                        first = time.perf_counter()
        end = time.perf_counter()
        first = first or end
        return Answer(
            text,
            (first - start) * 1e3,
            end - first,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["kvarve"]["cached_tokens"],
            transfer,
        )

    def flush(self, tiers: str) -> None:
        self._http.post("/flush_cache", params={"tiers": tiers}).raise_for_status()

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name and labels."""
        lines = self._http.get("/metrics").raise_for_status().text.splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        }

    def close(self) -> None:
        self._http.close()


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
        finally:
            client.close()


def conversations(size: Size) -> list[list[dict[str, str]]]:
    """The first messages of conversations about real text: long sections of CPython's own manual."""
    return [
        [
            {"role": "system", "content": "You answer questions about the manual of a programming language."},
            {"role": "user", "content": f"{text}\n\n{FOLLOW_UPS[0]}"},
        ]
        for text in sections(size.conversations, size.tokens)
    ]


def run_round(
    result: Round, client: Client, size: Size, topics_: list[list[dict[str, str]]], tasks: list[RecallTask], tick: Any
) -> None:
    """All requests of one round, one at a time."""
    flush, read = FLUSH.get(result.name), result.name != "cold"

    def ask(messages: list[dict[str, str]]) -> str:
        if flush:
            client.flush(flush)
        answer = client.chat(messages, size.answer_tokens, read)
        result.answers.append(answer)
        tick(answer)
        return answer.text

    for opening in topics_:
        messages = [*opening]
        for turn in range(size.turns):
            messages.append({"role": "assistant", "content": ask(messages)})
            messages.append({"role": "user", "content": FOLLOW_UPS[(turn + 1) % len(FOLLOW_UPS)]})
    for task in tasks:
        answers: list[str] = []
        for _ in task.questions:
            answers.append(ask(task.messages(answers)))
        result.scores.append(score(answers, [question.answer for question in task.questions]))


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
    for answer in rounds[1].answers:
        pages = sum(answer.by_tier.values()) / page_tokens
        # A lookback of 0 stands for "all pages".
        moved.append(sum(size[pool] * (min(pages, lookback[pool]) if lookback[pool] else pages) for pool in size))
    cold = statistics.fmean(answer.ttft_ms for answer in rounds[0].answers)
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
    with (
        tempfile.TemporaryDirectory(prefix="storage-", dir=out) as folder,
        bars(console, rounds, per_round) as shown,
    ):

        def work(result: Round, client: Client) -> None:
            shown.begin(result)
            run_round(result, client, size, opening, tasks, lambda answer: shown.tick(result, answer))

        with server(options, Path(folder), log) as client:
            client.chat([{"role": "user", "content": "hello"}], 2, read_cache=False)  # first-use costs are not TTFT
            for result in rounds[:3]:
                work(result, client)
        with server(options, Path(folder), log) as client:
            client.chat([{"role": "user", "content": "hello"}], 2, read_cache=False)
            work(rounds[3], client)
            limits = bound(client.metrics(), rounds)
    report = {"model": options.model, "tp": options.tp, "rounds": [each.row() for each in rounds], "bound": limits}
    said = (
        f"A warm request brings back {limits['bytes_per_request'] / 1e6:.2f} MB; copying them once at this machine's "
        f"{limits['memcpy_gb_s']:.1f} GB/s takes {limits['copy_only_ttft_ms']:.2f} ms "
        f"({limits['copy_only_ttft_over_cold']:.4f} of cold). The rest of a warm TTFT is the prompt's own last chunk."
    )
    return finish(console, out / "demo.json", report, [said], "The answers differ between rounds")
