"""What both demos show: rounds side by side, their progress, and a picture of them."""

import hashlib
import importlib.util
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvarve.reference.engine.recall import CHARS_PER_TOKEN
from kvarve.reports import COLORS, plain_table, write_json

TIERS = ("device", "host", "storage")
FOLLOW_UPS = (
    "Say in one sentence what the section above is about.",
    "Which of the rules above is the most surprising one?",
    "Write a short example of it.",
)


@dataclass
class Answer:
    """One answer: its text (of vLLM: its tokens and their logprobs), the client's latencies, and the cached tokens by
    tier as the engine reports them."""

    text: str
    ttft_ms: float
    decode_s: float
    prompt: int
    completion: int
    by_tier: dict[str, int]
    transfer: dict[str, Any] | None = None
    """`kv_transfer_params`, if the request asked for a ticket"""


@dataclass
class Round:
    """One pass over all requests."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        ttft = [answer.ttft_ms for answer in self.answers]
        decoded = sum(answer.completion - 1 for answer in self.answers)
        by_tier = {tier: sum(answer.by_tier[tier] for answer in self.answers) for tier in TIERS}
        digest = hashlib.sha256(json.dumps([answer.text for answer in self.answers]).encode())
        return {
            "name": self.name,
            "requests": len(self.answers),
            "prompt_tokens": sum(answer.prompt for answer in self.answers),
            "cached_tokens": sum(by_tier.values()),
            "cached_by_tier": by_tier,
            "ttft_ms": {
                "mean": round(statistics.fmean(ttft), 2),
                "p50": round(float(np.percentile(ttft, 50)), 2),
                "p99": round(float(np.percentile(ttft, 99)), 2),
            },
            "output_tok_s": round(decoded / max(1e-9, sum(answer.decode_s for answer in self.answers)), 1),
            "accuracy": round(statistics.fmean(self.scores), 4) if self.scores else None,
            "outputs_sha256": digest.hexdigest(),
        }


class Bars:
    """Progress on the terminal: a bar for each round."""

    def __init__(self, progress: Progress, rounds: Sequence[Round], requests: int) -> None:
        width = max(len(result.name) for result in rounds)
        self._progress = progress
        self._bars: dict[str, TaskID] = {
            result.name: progress.add_task(f"{result.name:{width}}", total=requests, last="", start=False)
            for result in rounds
        }

    def begin(self, result: Round, doing: str = "") -> None:
        self._progress.start_task(self._bars[result.name])
        self._progress.update(self._bars[result.name], last=doing)

    def tick(self, result: Round, answer: Answer) -> None:
        cached = sum(answer.by_tier.values()) / answer.prompt
        shown = f"TTFT {answer.ttft_ms:5.0f} ms, {cached:.0%} cached"
        self._progress.update(self._bars[result.name], advance=1, last=shown)


@contextmanager
def bars(console: Console, rounds: Sequence[Round], requests: int) -> Iterator[Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console) as progress:
        yield Bars(progress, rounds, requests)


def sections(count: int, tokens: int) -> list[str]:
    """Long sections of CPython's own manual."""
    chars = round(tokens * CHARS_PER_TOKEN)
    manual = sorted((name, text) for name, text in topics.items() if len(text) >= chars)
    return [manual[number * len(manual) // count][1][:chars] for number in range(count)]


def table(rows: list[dict[str, Any]]) -> Table:
    """The rounds side by side, narrow enough for 80 columns."""
    scored = rows[0]["accuracy"] is not None
    right = ["right"] if scored else []
    shown = plain_table("round", right=("cached", "from", "TTFT ms", "p50", "p99", "/cold", "tok/s", *right, "answers"))
    shown.columns[2].no_wrap, shown.columns[2].overflow = False, "fold"
    shown.title = f"{rows[0]['requests']} requests, {rows[0]['prompt_tokens']:,} prompt tokens, {len(rows)} times"
    cold, reference = rows[0]["ttft_ms"]["mean"], rows[0]["outputs_sha256"]
    for row in rows:
        ttft = row["ttft_ms"]
        shown.add_row(
            row["name"],
            f"{row['cached_tokens'] / row['prompt_tokens']:.1%}",
            ", ".join(f"{tier} {tokens / 1000:,.0f}k" for tier, tokens in row["cached_by_tier"].items() if tokens)
            or "-",
            f"{ttft['mean']:.0f}",
            f"{ttft['p50']:.0f}",
            f"{ttft['p99']:.0f}",
            f"{ttft['mean'] / cold:.2f}",
            f"{row['output_tok_s']:.0f}",
            *([f"{row['accuracy']:.1%}"] if scored else []),
            "-" if row is rows[0] else "equal" if row["outputs_sha256"] == reference else "DIFFER",
        )
    return shown


def chart(report: dict[str, Any], path: Path) -> None:
    """Draw TTFT and the source of the tokens by round."""
    import matplotlib as mpl  # of kvarve's own demo; vLLM's environment may lack it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = report["rounds"]
    names = [row["name"] for row in rows]
    colors = {name: light for name, (light, _) in COLORS.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    means = [row["ttft_ms"]["mean"] for row in rows]
    worst = [row["ttft_ms"]["p99"] for row in rows]
    left.bar(names, means, color=[colors.get(name, colors["computed"]) for name in names])
    left.plot(names, worst, "k_", markersize=18, label="p99")
    for name, mean, top in zip(names, means, worst, strict=True):
        text = f"{mean:.0f} ms\n{mean / means[0]:.2f} of cold"
        left.annotate(text, (name, max(mean, top)), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    if "bound" in report:
        left.axhline(report["bound"]["copy_only_ttft_ms"], color="crimson", linewidth=1, label="copying alone")
    left.set(title="Time to first token", ylabel="ms", ylim=(0, max(worst) * 1.25))
    left.legend(frameon=False)
    floor = [0.0] * len(rows)
    for tier in (*TIERS, "computed"):
        if tier == "computed":
            share = [100 * (1 - row["cached_tokens"] / row["prompt_tokens"]) for row in rows]
        else:
            share = [100 * row["cached_by_tier"][tier] / row["prompt_tokens"] for row in rows]
        right.bar(names, share, bottom=floor, label=tier, color=colors[tier])
        floor = [below + height for below, height in zip(floor, share, strict=True)]
    right.set(title="Where the prompt's tokens came from", ylabel="% of prompt tokens", ylim=(0, 118))
    right.legend(frameon=False, ncols=4, loc="upper center", fontsize=9)
    same = "the same answers in all rounds" if report["outputs_equal"] else "THE ANSWERS DIFFER"
    figure.suptitle(f"{report['model']}: {rows[0]['requests']} requests per round, {same}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def finish(console: Console, path: Path, report: dict[str, Any], said: Sequence[str], differ: str) -> int:
    """Write the report to `path` and a picture beside it, and show it with what else is to be said; 1 if the rounds did
    not give the same answers, which `differ` tells, 0 if they did."""
    report["outputs_equal"] = len({row["outputs_sha256"] for row in report["rounds"]}) == 1
    write_json(path, report)
    written = [path]
    if importlib.util.find_spec("matplotlib"):
        written.append(path.with_suffix(".png"))
        chart(report, written[-1])
    console.print(table(report["rounds"]))
    for line in said:
        console.print(line)
    if len(written) == 1:
        console.print("There is no picture: matplotlib is not installed.")
    console.print(f"Written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)
    if report["outputs_equal"]:
        return 0
    console.print(f"[bold red]{differ}: this is a bug in kvarve.[/bold red]")
    return 1
