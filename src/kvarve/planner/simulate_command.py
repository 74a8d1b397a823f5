"""`kvarve simulate`: a table of what memory buys."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvarve.core.observe.reasons import HITS, Reason
from kvarve.errors import ConfigError
from kvarve.pages.pools import Tier
from kvarve.pages.sizes import format_size
from kvarve.planner.replayer import SimulationReport, replay, requests_of
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.sweep import COMPARED, SHARES, Point, draw, pyplot
from kvarve.planner.sweep import sweep as curve
from kvarve.reports import check_file, is_stdout, plain_table, write_json
from kvarve.settings.options import FLAT, ConfigFile, JsonFile, needs

PICTURES = (".png", ".svg", ".pdf")
SETTINGS = SimulationConfig()


def main(
    trace: Annotated[Path, Parameter(help="JSON lines, plain or gzip: see docs/planning.md")],
    /,
    *,
    settings: Annotated[SimulationConfig, FLAT] = SETTINGS,
    sweep: Annotated[Path | None, Parameter(help="try all eviction orders at many sizes, and draw them there")] = None,
    limit: Annotated[PositiveInt | None, Parameter(help="only the first N requests of the trace")] = None,
    json: Annotated[JsonFile, Parameter(help="write the report there too; -: to standard output alone")] = None,
    config: ConfigFile = None,
) -> int:
    """Replay a trace through the cache's own code and say what memory buys."""
    check_file("--json", json)
    check_file("--sweep", sweep)
    if sweep is None and not settings.device_memory:
        raise ConfigError("--device-memory is required, or --sweep, which tries many sizes")
    if sweep is not None:
        _check_sweep(sweep, settings)
    console = Console(quiet=is_stdout(json))
    errors = Console(stderr=True)
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(trace.name)

        def advance(done: int, size: int) -> None:
            progress.update(task, completed=done, total=size)

        if sweep is None:
            report = replay(trace, settings, limit=limit, advance=advance)
        else:
            asked, settings = requests_of(trace, settings, limit, advance)
            requests = [*asked]
            progress.reset(task, total=len(SHARES) * len(COMPARED))
            points = [*curve(requests, settings, lambda: progress.advance(task))]
    if sweep is None:
        console.print(_table(report, settings))
        write_json(json, {"config": asdict(settings), **report.as_json()})
        return 0
    draw(points, f"{trace.name}: {len(requests):,} requests", sweep)
    console.print(_curve(points))
    write_json(json, {"config": asdict(settings), "points": [asdict(point) for point in points]})
    return 0


def _check_sweep(path: Path, settings: SimulationConfig) -> None:
    """ConfigError for settings that a sweep chooses itself, and if no picture can be drawn."""
    if settings.device_memory:
        raise ConfigError("--sweep chooses the device memory itself: leave out --device-memory")
    if settings.policies.eviction != SETTINGS.policies.eviction:
        raise ConfigError("--sweep tries all eviction orders: leave out --eviction")
    if settings.prefill_tokens_per_s:
        raise ConfigError("--sweep counts hits, not seconds: leave out --prefill-tokens-per-s and the speeds of copies")
    if path.suffix not in PICTURES:
        raise ConfigError(f"--sweep: {path}: a picture's name ends in one of {', '.join(PICTURES)}")
    with needs("demo", "simulate --sweep"):
        pyplot()  # what is missing is told before the work


def _curve(points: Sequence[Point]) -> Table:
    table = plain_table(right=("memory", "of all pages", *COMPARED, "Belady's bound"))
    for point in points:
        missed = (f"{point.missed[order]:.1%}" for order in COMPARED)
        table.add_row(format_size(point.device_memory), f"{point.share:.0%}", *missed, f"{point.bound:.1%}")
    table.caption = "tokens missed, of all prompt tokens; no order can miss fewer than the bound"
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
    return table


def _between(counts: Sequence[int]) -> str:
    return f"{min(counts):,} to {max(counts):,}"
