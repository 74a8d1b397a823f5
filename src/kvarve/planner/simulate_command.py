"""`kvarve simulate`, a table of what memory buys; `kvarve plan`, how much memory a target takes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvarve.core.observe.reasons import HITS, Reason
from kvarve.errors import ConfigError
from kvarve.pages.pools import Tier
from kvarve.pages.sizes import format_size
from kvarve.planner.charts import PICTURES, pyplot
from kvarve.planner.plan import REPLAYS, Plan
from kvarve.planner.plan import draw as draw_plan
from kvarve.planner.plan import plan as planned
from kvarve.planner.replayer import SimulationReport, replay, requests_of
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.sweep import COMPARED, PAYS, SHARES, Point, draw, pays_until, swept
from kvarve.planner.sweep import sweep as curve
from kvarve.planner.traces import Advance, TraceRequest
from kvarve.reports import Printer, check_file, plain_table
from kvarve.settings.options import FLAT, ConfigFile, JsonFile, needs

SETTINGS = SimulationConfig()

Trace = Annotated[Path, Parameter(help="Trace: a file of JSON lines, plain or gzip (docs/planning.md)")]
Sweep = Annotated[
    Path | None, Parameter(help="Picture of all eviction orders at many sizes of the first tier that has none")
]
Limit = Annotated[PositiveInt | None, Parameter(help="Requests of the trace to replay, the first ones [default: all]")]
Report = Annotated[
    JsonFile, Parameter(help="File for the report as JSON; - writes it, and nothing else, to standard output")
]


def main(
    trace: Trace,
    /,
    *,
    settings: Annotated[SimulationConfig, FLAT] = SETTINGS,
    sweep: Sweep = None,
    limit: Limit = None,
    json: Report = None,
    config: ConfigFile = None,
) -> int:
    """Replay a trace through the cache's own code and say what memory buys."""
    out = Printer(json)
    if sweep is None:
        if not settings.device_memory:
            raise ConfigError("simulate needs --device-memory, or --sweep, which tries many sizes")
        with _progress(trace) as (progress, task):
            report = replay(trace, settings, limit=limit, advance=_advance(progress, task))
        out.table(_table(report, settings))
        return out.write({"config": asdict(settings), **report.as_json()})
    if settings.policies.eviction != SETTINGS.policies.eviction:
        raise ConfigError("--sweep cannot go with --eviction: it tries all orders")
    _check_untimed("--sweep", settings)
    tier = swept(settings)
    _check_picture("--sweep", sweep, "simulate --sweep")
    with _progress(trace) as (progress, task):
        requests, settings = _read(trace, settings, limit, progress, task)
        progress.reset(task, total=len(SHARES) * len(COMPARED))
        points = [*curve(requests, settings, lambda: progress.advance(task))]
    draw(points, tier, f"{trace.name}: {len(requests):,} requests", sweep)
    out.table(_curve(points, tier))
    found = {"tier": tier.name.lower(), "points": [asdict(each) for each in points]}
    return out.write({"config": asdict(settings), **found})


def plan(
    trace: Trace,
    /,
    *,
    settings: Annotated[SimulationConfig, FLAT] = SETTINGS,
    target: Annotated[str, Parameter(help="Share to hit of what unlimited memory hits")] = "90%",
    picture: Annotated[Path | None, Parameter(help="Picture of hit rates over memory (.svg, .png or .pdf)")] = None,
    limit: Limit = None,
    json: Report = None,
    config: ConfigFile = None,
) -> int:
    """Say how much host memory and storage a hit rate takes, for a trace of prompts."""
    out = Printer(json)
    if picture is not None:
        _check_picture("--picture", picture, "plan --picture")
    share = _share(target)
    if not settings.device_memory:
        raise ConfigError("--device-memory must be given: the memory for pages that each replica has beside the model")
    if settings.host_memory or settings.storage_memory:
        raise ConfigError("kvarve plan cannot go with sizes of host memory and storage: it finds them")
    _check_untimed("kvarve plan", settings)
    with _progress(trace) as (progress, task):
        requests, settings = _read(trace, settings, limit, progress, task)
        progress.reset(task, total=REPLAYS)
        made = planned(requests, settings, share, lambda: progress.advance(task))
    if picture is not None:
        draw_plan(made, f"{trace.name}: {len(requests):,} requests", picture)
    out.say(made.sentence)
    out.table(_planned(made))
    return out.write({"config": asdict(settings), **asdict(made), "sentence": made.sentence})


@contextmanager
def _progress(trace: Path) -> Iterator[tuple[Progress, TaskID]]:
    errors = Console(stderr=True)
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        yield progress, progress.add_task(trace.name)


def _advance(progress: Progress, task: TaskID) -> Advance:
    return lambda done, size: progress.update(task, completed=done, total=size)


def _read(
    trace: Path, settings: SimulationConfig, limit: int | None, progress: Progress, task: TaskID
) -> tuple[list[TraceRequest], SimulationConfig]:
    requests, settings = requests_of(trace, settings, limit, _advance(progress, task))
    return [*requests], settings


def _check_picture(option: str, path: Path, command: str) -> None:
    """ConfigError if no picture can be drawn there: before the work."""
    check_file(option, path)
    if path.suffix not in PICTURES:
        raise ConfigError(f"{option}: {path}: a picture's name must end in one of {', '.join(PICTURES)}")
    with needs("demo", command):
        pyplot()


def _check_untimed(what: str, settings: SimulationConfig) -> None:
    if settings.prefill_tokens_per_s:
        raise ConfigError(f"{what} cannot go with --prefill-tokens-per-s and speeds of copies: it counts hits")


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--target must be above 0% and at most 100%, such as 90%, got {text!r}")
    return share


def _planned(made: Plan) -> Table:
    table = plain_table("tried", right=("memory", "hit rate", "Belady's bound"))
    for what, points in (("host", made.by_host), ("storage", made.by_storage)):
        for size, hit, bound in points:
            table.add_row(what, format_size(size), f"{hit:.1%}", f"{bound:.1%}")
        table.add_section()
    table.add_row("infinite cache", "", f"{made.infinite:.1%}")
    table.caption = f"storage beside {format_size(made.beside)} of host memory; each replica has the host memory"
    return table


def _curve(points: Sequence[Point], tier: Tier) -> Table:
    memory = f"{tier.name.lower()} memory"
    table = plain_table(right=(memory, "of all pages", *COMPARED, "Belady's bound"))
    for point in points:
        hit = (f"{point.hit[order]:.1%}" for order in COMPARED)
        table.add_row(format_size(point.memory), f"{point.share:.0%}", *hit, f"{point.bound:.1%}")
    table.caption = (
        "tokens hit, of all prompt tokens; no order can hit more than the bound; "
        f"more than {format_size(pays_until(points).memory)} hits less than {PAYS:.0%} more"
    )
    return table


def _table(report: SimulationReport, config: SimulationConfig) -> Table:
    tokens = max(1, report.prompt_tokens)
    table = plain_table("tier", right=("memory", "pages", "tokens", "hit rate", "evicted"))
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    table.title = f"{report.requests:,} requests, {report.prompt_tokens:,} prompt tokens"
    memory = (config.replicas * config.device_memory, config.replicas * config.host_memory, config.storage_memory)
    for tier, size in zip(Tier, memory, strict=True):
        name = tier.name.lower()
        pages = sum(slots for place, slots in report.slots.items() if place.partition(".")[0] == name)
        gone = sum(evicted for place, evicted in report.evicted.items() if place.partition(".")[0] == name)
        hit = report.hit_tokens[name]
        if size:
            table.add_row(
                name, format_size(size), f"{pages:,}" if pages else "", f"{hit:,}", f"{hit / tokens:.1%}", f"{gone:,}"
            )
    table.add_section()
    table.add_row("all tiers", "", "", f"{sum(report.hit_tokens.values()):,}", f"{report.hit_rate:.1%}")
    table.add_row("infinite cache", "", "", f"{report.infinite_hit_tokens:,}", f"{report.infinite_hit_rate:.1%}")
    table.add_section()
    for reason in Reason:
        if reason not in HITS and (missed := report.reasons[reason.value]):
            table.add_row(f"not: {reason.value.replace('_', ' ')}", "", "", f"{missed:,}", f"{missed / tokens:.1%}")
    moved = ", ".join(f"{edge.replace('_', ' ')} {format_size(size)}" for edge, size in report.moved_bytes.items())
    saved = f"{report.saved_rate:.1%} of the computation saved"
    table.caption = f"{saved}; moved: {moved or 'nothing'}; computed and not kept: {report.uncached_pages:,} pages"
    if ttft := report.ttft_s:
        table.caption += "; TTFT " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ttft.items())
    if config.replicas > 1:
        table.caption += f"; {config.replicas} replicas, of which each got {_between(report.by_replica)} requests"
    if config.storage_memory:
        used = f"{report.used_bytes / max(1, report.stored_bytes):.1%} of the {format_size(report.stored_bytes)} stored"
        table.caption += f"; {used} was used, storing paused for {report.paused_requests:,} requests"
        asked = ", ".join(f"{count:,} {name}" for name, count in report.asked.items())
        table.caption += f"; asked of it: {asked}"
    if report.storage_price is not None:
        table.caption += f", at a price of {report.storage_price:,.4g}"
    return table


def _between(counts: Sequence[int]) -> str:
    return f"{min(counts):,} to {max(counts):,}"
