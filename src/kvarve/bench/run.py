"""Runs a load in rounds and reports it."""

import asyncio
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvarve.bench.bench_command import Load, Target
from kvarve.bench.figures import draw, figures, same_answers, table
from kvarve.bench.load import Client, Record, Round, arrivals, check, connected, send_all
from kvarve.bench.workloads import Conversation, warm_up
from kvarve.errors import ConfigError
from kvarve.planner.charts import pyplot
from kvarve.reference.server.server_process import empty_log, served
from kvarve.reports import Printer, check_file
from kvarve.settings.options import needs

MEMORY = ("--device-memory", "1GiB", "--host-memory", "2GiB")
MODEL, STORAGE = "builtin:tiny-hybrid", "--storage"
LOG = "bench-server.log"


def load(kind: str, options: Load, make: Callable[[], list[Conversation]]) -> int:
    """Measure what a subcommand asks for; 0 if all requests were answered, 1 if not."""
    printer = Printer(options.json)
    check_file("--png", options.png)
    if options.png is not None:
        with needs("demo", "bench --png"):
            pyplot()  # what is missing is told before the work

    conversations = make()
    with target(options) as url:
        rounds = asyncio.run(_rounds(url, options, conversations))
    rows = compared(rounds)
    turns = sum(len(each.turns) for each in conversations)
    how = f"{options.clients} clients"
    if (begins := arrivals(conversations, options.rate, options.seed)) is not None:
        how = f"over {begins[-1]:.0f} s" if options.rate is None else f"{options.rate:g} conversations/s"
    title = f"{kind}: {len(conversations):,} conversations, {turns:,} requests, {how}"
    printer.say(title)
    printer.table(table(rows, timed=begins is not None))
    if error := next((row["error"] for row in rows if row["error"]), None):
        printer.say(f"The first request that failed: {error}")
    if options.png is not None:
        draw(title, rows, options.png)
    return printer.write(
        {"bench": kind, "options": shown(options), "rounds": rows}, int(any(r["failed"] for r in rows))
    )


async def _rounds(url: str, options: Load, conversations: Sequence[Conversation]) -> list[Round]:
    begins_s = arrivals(conversations, options.rate, options.seed)
    async with connected(url, options) as client:
        asked = warm_up(options.warmup, conversations, options.seed)
        check(await send_all(client, asked, options.warmup, None, ignore_eos=True))
        return await in_rounds(client, options, conversations, options.clients, begins_s, ignore_eos=True)


async def in_rounds(
    client: Client,
    options: Target,
    conversations: Sequence[Conversation],
    clients: int,
    begins_s: Sequence[float] | None = None,
    **more: Any,
) -> list[Round]:
    """All rounds, with what `--flush` says between two of them; `more`: fields of each request."""
    rounds = [Round(f"round {number + 1}") for number in range(options.rounds)]
    with bars(rounds, sum(len(each.turns) for each in conversations)) as begin:
        for each in rounds:
            if each is not rounds[0] and options.flush != "none":
                await client.flush(options.flush)
            tick, start = begin(each), time.perf_counter()
            each.records = await send_all(client, conversations, clients, begins_s, tick, **more)
            each.duration_s = time.perf_counter() - start
    return rounds


def compared(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The figures of all rounds; of all but the first also how many answers are those of the first."""
    rows = [figures(each) for each in rounds]
    for row, each in zip(rows, rounds, strict=True):
        row["same_answers"] = same_answers(rounds[0].records, each.records)
    return rows


@contextmanager
def target(options: Target, *more: str) -> Iterator[str]:
    """The URL of the server to measure: the one given, or a kvarve serve with a storage of its own and the options
    `more`."""
    if options.server is not None:
        if options.serve:
            raise ConfigError("--serve cannot go with --server: it is for the server that is started")
        yield options.server.rstrip("/")
        return
    try:
        words = shlex.split(options.serve or "")
    except ValueError as e:
        raise ConfigError(f"--serve: {e}") from None
    log = empty_log(options.out, LOG)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.out) as folder:
        storage = (STORAGE, f"file://{(Path(folder) / 'storage').resolve()}?capacity=16GiB")
        own = () if any(word.partition("=")[0] == STORAGE for word in words) else storage
        policy = ("--storage-wait", "all")
        with served(
            ["--model", options.model or MODEL, *MEMORY, *policy, *own, *more, *words], Path(folder), log
        ) as url:
            yield url


def shown(options: Target) -> dict[str, Any]:
    """The options for a report, without keys."""
    secret = ("api_key", "admin_key")
    return {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in vars(options).items()
        if name not in secret
    }


Begin = Callable[..., Callable[[Record], None]]


@contextmanager
def bars(rounds: Sequence[Round], requests: int) -> Iterator[Begin]:
    """Progress on standard error, a bar for each round: begins one, and counts each request that ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TextColumn("{task.fields[last]}"), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        tasks = {each.name: progress.add_task(each.name, total=requests, start=False, last="") for each in rounds}

        def begin(each: Round, doing: str = "") -> Callable[[Record], None]:
            task, ended, failed, sum_s = tasks[each.name], 0, 0, 0.0
            progress.start_task(task)
            progress.update(task, last=doing)

            def tick(record: Record) -> None:
                nonlocal ended, failed, sum_s
                if record.error:
                    failed += 1
                else:
                    ended, sum_s = ended + 1, sum_s + record.ttft_s
                last = f"TTFT {1e3 * sum_s / ended:,.0f} ms" if ended else ""
                progress.update(task, advance=1, last=last + (f", {failed} failed" if failed else ""))

            return tick

        yield begin
