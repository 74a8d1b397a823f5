"""What both demos show: rounds side by side, and a picture of them."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.table import Table

from kvarve.bench.figures import draw
from kvarve.errors import ConfigError
from kvarve.reference.engine.recall import CHARS_PER_TOKEN
from kvarve.reports import plain_table, write_json

FOLLOW_UPS = (
    "Say in one sentence what the section above is about.",
    "Which of the rules above is the most surprising one?",
    "Write a short example of it.",
)


def sections(count: int, tokens: int) -> list[str]:
    """Sections of CPython's own manual, of `tokens` tokens each. ConfigError: the manual has no section as long."""
    chars = round(tokens * CHARS_PER_TOKEN)
    manual = sorted((name, text) for name, text in topics.items() if len(text) >= chars)
    if not manual:
        most = int(max(map(len, topics.values())) / CHARS_PER_TOKEN)
        raise ConfigError(f"--context-tokens must be at most {most:,}, got {tokens:,}: no text of the demo is longer")
    return [manual[number * len(manual) // count][1][:chars] for number in range(count)]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rounds side by side, narrow enough for 80 columns."""
    scored = ["right"] if "accuracy" in rows[0] else []
    right = ("cached", "from", "TTFT ms", "p50", "p99", "/cold", "TPOT", *scored, "answers")
    shown = plain_table("round", right=right)
    shown.columns[2].no_wrap, shown.columns[2].overflow = False, "fold"
    shown.title = f"{rows[0]['requests']} requests, {rows[0]['prompt_tokens']:,} prompt tokens, {len(rows)} times"
    for row in rows:
        ttft, cached = row["ttft_ms"], {tier: tokens for tier, tokens in row["cached_tokens"].items() if tokens}
        equal = row["answers_sha256"] == rows[0]["answers_sha256"]
        shown.add_row(
            row["round"],
            f"{sum(cached.values()) / row['prompt_tokens']:.1%}",
            ", ".join(f"{tier} {tokens / 1000:,.0f}k" for tier, tokens in cached.items()) or "-",
            *(f"{ttft[which]:.0f}" for which in ("mean", "median", "p99")),
            f"{ttft['mean'] / rows[0]['ttft_ms']['mean']:.2f}",
            f"{row['tpot_ms'].get('mean', 0):.1f}",
            *([f"{row['accuracy']:.1%}"] if scored else []),
            "-" if row is rows[0] else "equal" if equal else "DIFFER",
        )
    return shown


def finish(console: Console, path: Path, report: dict[str, Any], said: Sequence[str], differ: str) -> int:
    """Write the report to `path` and a picture beside it, and show it with what else is to be said; 1 if the rounds did
    not give the same answers, which `differ` tells, 0 if they did."""
    rows, written = report["rounds"], [path]
    report["outputs_equal"] = len({row["answers_sha256"] for row in rows}) == 1
    write_json(path, report)
    if importlib.util.find_spec("matplotlib"):  # vLLM's environment may lack it
        written.append(path.with_suffix(".png"))
        same = "the same answers in all rounds" if report["outputs_equal"] else "THE ANSWERS DIFFER"
        least_ms = report.get("bound", {}).get("copy_only_ttft_ms")
        draw(f"{report['model']}: {rows[0]['requests']} requests per round, {same}", rows, written[-1], least_ms)
    console.print(table(rows))
    for line in said:
        console.print(line)
    if len(written) == 1:
        console.print("There is no picture: matplotlib is not installed.")
    console.print(f"Written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)
    if report["outputs_equal"]:
        return 0
    console.print(f"[bold red]{differ}: this is a bug in kvarve.[/bold red]")
    return 1
