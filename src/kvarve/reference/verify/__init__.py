"""`kvarve verify`: proves on a user's own model that the cache changes no logit, and that the proof would notice it.

It computes random prompts without any cache, then sends them through caches of its own by every path (`PATHS`), and
compares all logits bit for bit; then it damages pages of every pool on purpose.
"""

import logging
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvarve.cache.config import room_for
from kvarve.cache.worker import check
from kvarve.errors import ConfigError
from kvarve.pages.sizes import format_size
from kvarve.ranks.star import Listener
from kvarve.reference.engine.model import (
    LoadedModel,
    check_device,
    check_model,
    choose_device,
    load_model,
    quiet_libraries,
)
from kvarve.reference.engine.rank_processes import Place, Ranks, device_of, started, threads_of
from kvarve.reference.verify.damage import ADVICE, damages
from kvarve.reference.verify.proof_paths import PATHS
from kvarve.reference.verify.proof_plan import Plan
from kvarve.reference.verify.prover import Prover
from kvarve.reference.verify.report import Path, ProofReport, Rounding
from kvarve.reference.verify.serving import answers, rounded, together
from kvarve.reference.verify.watched import Transcript, Uncached
from kvarve.reports import check_file, is_stdout, write_json
from kvarve.settings.commands import Verify
from kvarve.storage import StorageUsage
from kvarve.storage import open_storage as open_storage
from kvarve.storage.urls import parse_url, shown
from kvarve.system.orphans import temporary_folder
from kvarve.transfer.compression import compressing as compressing

LOG = logging.getLogger("kvarve")
STEPS = {"exact": (*PATHS, together, answers, damages), "rounded": (rounded, damages)}  # by --hits


@dataclass(frozen=True)
class Task:
    """What all ranks have to know alike: `folder` is where pages lie unless the user has given a storage."""

    options: Verify
    folder: str
    salt: str

    @property
    def url(self) -> str:
        return self.options.storage or f"file://{self.folder}/pages?capacity=1PiB"


def main(options: Verify) -> int:
    """Run the proof; 0 if all logits are equal and every damage was noticed, 1 if not. Writes a JSON file if asked."""
    console = Console(quiet=is_stdout(options.json))
    start = time.perf_counter()
    check_file("--json", options.json)
    if options.storage is not None:
        parse_url(options.storage)
    options = replace(options, device=choose_device(options.device))
    check_device(options.device)
    quiet_libraries()
    check_model(options.model, **_shape(options))
    with temporary_folder("kvarve-verify-") as folder:
        task = Task(options, str(folder), f"verify {secrets.token_hex(8)}")
        report = prove(task, _load(options), console) if options.tp == 1 else _prove_among(task, console)
    report.seconds = time.perf_counter() - start
    for table in report.tables():
        console.print(table)
        console.print()
    for path in report.paths:
        for note in path.notes:
            console.print(f"[yellow]{path.name}[/yellow]: {escape(note)}", highlight=False)
    for line in report.troubles():
        console.print(line, style="red", markup=False, highlight=False)
    write_json(options.json, report.as_json())
    if options.json is not None:
        console.print(f"Written: {options.json}", markup=False)
    if report.uncovered:
        console.print(
            f"[yellow]Not covered[/yellow]: {', '.join(report.uncovered)}: no answer depended on it; {ADVICE}"
        )
    console.print(_verdict(report), highlight=False)
    return 0 if report.ok else 1


def _shape(options: Verify) -> dict[str, Any]:
    return {"page_tokens": options.page_tokens, "chunk_tokens": options.chunk_tokens, "dtype": options.dtype}


def _load(options: Verify, ranks: Ranks | None = None) -> LoadedModel:
    kept = options.kv_cache_dtype
    return load_model(options.model, device=options.device, ranks=ranks, kv_cache_dtype=kept, **_shape(options))


def _prove_among(task: Task, console: Console) -> ProofReport:
    """The proof on several ranks, each with a part of the model and of every page."""
    model = _load(task.options)
    plan = Plan.of(task.options, model)
    whole = Uncached(model, plan.decode)(plan.prompt(plan.longest))
    del model
    with started(_prove_on_rank, task, task.options.tp) as (place, listener):
        return _prove_on_rank(task, place, listener, console, whole)


def _prove_on_rank(
    task: Task,
    place: Place,
    listener: Listener | None = None,
    console: Console | None = None,
    whole: Transcript | None = None,
) -> ProofReport:
    """One rank's proof; rank 0 has the `whole` model's answer to the longest prompt without a cache. Any other rank
    prints nothing, and what it finds wrong stands in rank 0's report."""
    quiet_libraries()
    device = device_of(task.options.device, place)
    torch.set_num_threads(threads_of(place.ranks))
    ranks = Ranks(place, place.meet(f"verify {task}", listener), device)
    with ranks.ended():
        model = _load(task.options, ranks)
        plan = Plan.of(task.options, model)
        divided = Uncached(model, plan.decode)(plan.prompt(plan.longest))
        report = prove(task, model, console or Console(quiet=True), ranks)
        if whole is not None:
            report.sharding = Rounding(f"computed on {place.ranks} ranks", plan.longest)
            report.sharding.take(divided, whole, plan.longest)
        for rank, lines in enumerate(ranks.of_all([*report.troubles()])):
            if rank and lines and not ranks.rank:
                report.paths.append(Path(f"rank {rank}", "what this rank found alone", troubles=lines))
    return report


def prove(task: Task, model: LoadedModel, console: Console, ranks: Ranks | None = None) -> ProofReport:
    """Run every path and every damage; with rounded hits their effect instead of the paths. ConfigError or StorageError
    for a storage or a size that cannot be used."""
    plan, hits, storage = Plan.of(task.options, model), task.options.hits, task.options.storage
    report = ProofReport(_about(model, plan, hits))
    if not plan.leaves_windows:
        report.notes.append(
            f"prompts of {plan.longest} tokens never leave the window of some layers: with --tokens "
            f"{plan.reach + 2 * plan.chunk} or more the proof covers that too"
        )
    for line in (*_headline(report, model), *report.notes):
        console.print(line, highlight=False)
    with ExitStack() as undo:
        url = task.url
        columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        last = TextColumn("{task.fields[last]}")
        progress = undo.enter_context(Progress(*columns, last, console=console, transient=True))
        bar = progress.add_task("", total=len(STEPS[hits]), last="")

        def tick(row: Path) -> None:
            wrong = "" if row.ok else ", something is wrong"
            progress.update(bar, description=row.name, last=f"{row.requests} requests{wrong}")

        prover = Prover(model, plan, url, task.salt, report, tick, ranks)
        if storage is not None:
            undo.callback(prover.clear)
        try:
            check(model.identity, prover.config(), str(model.model.device))
        except ConfigError as e:
            raise ConfigError(f"{e} (fewer --tokens need less)") from None
        with prover.store() as store:
            _check_room(model, plan, shown(url), store.usage())
        LOG.addHandler(prover.log)
        undo.callback(LOG.removeHandler, prover.log)
        for step in STEPS[hits]:
            step(prover)
            progress.advance(bar)
    return report


def _about(model: LoadedModel, plan: Plan, hits: str) -> dict[str, Any]:
    pools = [
        {"name": pool.name, "lookback": pool.lookback, "page_bytes": pool.payload_bytes} for pool in model.layout.pools
    ]
    return {
        "model": model.name,
        "identity": str(model.identity),
        "numerics": model.identity.numerics,
        "dtype": model.identity.dtype,
        "kv_cache_dtype": model.layout.kv_cache_dtype,
        "device": str(model.model.device),
        "pools": pools,
        "page_tokens": plan.page,
        "chunk_tokens": plan.chunk,
        "longest_prompt": plan.longest,
        "hits": hits,
        "ranks": model.identity.ranks,
        "shortest_hit": (plan.chunk if hits == "exact" else plan.page) + 1,
        "decoded_tokens": plan.decode,
        "seed": plan.seed,
        "quick": plan.quick,
    }


def _headline(report: ProofReport, model: LoadedModel) -> list[str]:
    about = report.about
    lines = [
        f"[bold]kvarve verify[/bold]: {escape(model.name)} on {about['device']}",
        escape(about["identity"]),
        about["numerics"],
    ]
    for pool in model.layout.pools:
        back = "all pages" if pool.lookback is None else f"the last {pool.lookback} page{'s' * (pool.lookback > 1)}"
        lines.append(f"pool {pool.name}: reads {back}, {format_size(pool.payload_bytes)} each")
    if model.identity.ranks > 1:
        lines.append(f"computed on {model.identity.ranks} ranks, each of which has its part of every page")
    lines.append(
        f"prompts of up to {about['longest_prompt']:,} tokens; the shortest to hit has {about['shortest_hit']:,}"
    )
    return lines


def _verdict(report: ProofReport) -> str:
    compared = sum(path.compared for path in report.paths)
    requests = sum(path.requests for path in report.paths)
    if report.ok and report.about["hits"] == "rounded":
        assert report.rounding is not None
        return (
            f"[bold green]Measured[/bold green] in {report.seconds:.1f} s: {requests:,} requests, each resumed at the "
            f"page at which it has to; rounding changes logits by up to {report.rounding.share:.2g} of the largest; "
            f"{len(report.damages)} damages, every one noticed."
        )
    if report.ok:
        return (
            f"[bold green]Proved[/bold green] in {report.seconds:.1f} s: {requests:,} requests, {compared:,} vectors "
            f"of logits, every bit equal; {len(report.damages)} damages, every one noticed."
        )
    paths, breaks = ([row for row in rows if not row.ok] for rows in (report.paths, report.damages))
    return (
        f"[bold red]NOT proved[/bold red] in {report.seconds:.1f} s: {len(paths)} of {len(report.paths)} paths are "
        f"wrong, {len(breaks)} of {len(report.damages)} damages were not noticed as they have to be."
    )


def _check_room(model: LoadedModel, plan: Plan, url: str, usage: StorageUsage) -> None:
    """ConfigError for a storage that would have to evict pages, ours or another user's."""
    shape = (model.layout.pools, plan.page, plan.chunk)
    need = room_for(plan.stored_tokens, *shape, records=True, per_snapshot=plan.chunk)
    free = None if usage.capacity_bytes is None or usage.bytes is None else usage.capacity_bytes - usage.bytes
    if free is not None and free < need:
        raise ConfigError(
            f"{url}: the proof needs {format_size(need)}, and {format_size(free)} are free: give it more, "
            f"or fewer --tokens"
        )
