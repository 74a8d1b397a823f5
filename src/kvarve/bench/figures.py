"""The figures of a round. Rounds side by side: in a table of 80 columns, with the rows of `sglang.bench_serving`, and
in a picture of how long requests took, and where their prompts came from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kvarve.bench.load import TIERS, Record, Round, digest
from kvarve.errors import ConfigError
from kvarve.planner.charts import pyplot
from kvarve.reports import COLORS, plain_table

# Milliseconds of a request, by the name that serving benchmarks give them.
LATENCIES = {"e2e_ms": "E2E latency", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "late_ms": "sent late"}
STATISTICS = ("mean", "median", "p99")


def figures(result: Round) -> dict[str, Any]:
    """What became of a round's requests; those that failed count as failed and nowhere else."""
    good = [record for record in result.records if not record.error]
    prompt, completion = sum(one.prompt for one in good), sum(one.completion for one in good)
    tiers: dict[str, int] = {}
    for record in good:
        for tier, count in record.cached.items():
            tiers[tier] = tiers.get(tier, 0) + count
    each_s = result.duration_s or 1e-9
    times = {name: _statistics(values) for name, values in _latencies(good).items()}
    return {
        "round": result.name,
        "requests": len(good),
        "failed": len(result.records) - len(good),
        "error": next((record.error for record in result.records if record.error), None),
        "duration_s": round(result.duration_s, 3),
        "prompt_tokens": prompt,
        "output_tokens": completion,
        "cached_tokens": tiers,
        "requests_per_s": round(len(good) / each_s, 3),
        "input_tok_per_s": round(prompt / each_s, 1),
        "output_tok_per_s": round(completion / each_s, 1),
        "total_tok_per_s": round((prompt + completion) / each_s, 1),
        **times,
        "answers_sha256": digest(result.records),
    }


def same_answers(first: Sequence[Record], other: Sequence[Record]) -> int:
    """How many requests of two rounds got the same text."""
    return sum(one.text == two.text and not one.error + two.error for one, two in zip(first, other, strict=True))


def _latencies(good: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds, by the names of LATENCIES."""
    return {
        "e2e_ms": [one.end_s - one.due_s for one in good],
        "ttft_ms": [one.ttft_s for one in good],
        "tpot_ms": [(one.end_s - one.first_s) / (one.completion - 1) for one in good if one.completion > 1],
        "itl_ms": [gap for one in good for gap in one.gaps_s],
        "late_ms": [one.sent_s - one.due_s for one in good],
    }


def _statistics(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = (float(np.mean(seconds)), *(float(value) for value in np.percentile(seconds, [50, 99])))
    return {name: round(1e3 * value, 3) for name, value in zip(STATISTICS, found, strict=True)}


def table(rounds: Sequence[Mapping[str, Any]], timed: bool) -> Table:
    """The rounds side by side; with two of them, the second over the first. `timed`: requests had times to be sent
    at."""
    over = ["over"] if len(rounds) == 2 else []
    shown = plain_table("", right=[*(str(row["round"]) for row in rounds), *over])

    def add(name: str, values: Sequence[float | None], form: str, ratio: bool = True) -> None:
        cells = ["-" if value is None else format(value, form) for value in values]
        one, two = values[0], values[-1]
        compared = f"{two / one:.3f}" if ratio and one and two is not None else ""
        shown.add_row(name, *cells, *([compared] if over else []))

    add("requests", [row["requests"] for row in rounds], ",", ratio=False)
    if any(row["failed"] for row in rounds):
        add("failed requests", [row["failed"] for row in rounds], ",", ratio=False)
    add("duration (s)", [row["duration_s"] for row in rounds], ",.2f")
    for key, name in (("requests", "request"), ("input_tok", "input token"), ("output_tok", "output token")):
        unit = "req/s" if key == "requests" else "tok/s"
        add(f"{name} throughput ({unit})", [row[f"{key}_per_s"] for row in rounds], ",.2f")
    add("total token throughput (tok/s)", [row["total_tok_per_s"] for row in rounds], ",.2f")
    tiers = dict.fromkeys(tier for row in rounds for tier, count in row["cached_tokens"].items() if count)
    for tier in tiers:
        shares = [row["cached_tokens"].get(tier, 0) / max(1, row["prompt_tokens"]) for row in rounds]
        add(f"prompt tokens {'cached' if tier == 'cached' else f'from {tier}'}", shares, ".1%", ratio=False)
    for key, name in LATENCIES.items():
        if key == "late_ms" and not timed:
            continue
        for which in STATISTICS:
            add(f"{which} {name} (ms)", [row[key].get(which) for row in rounds], ",.2f")
    if len(rounds) > 1:
        add("answers as in the first round", [row.get("same_answers") for row in rounds], ",", ratio=False)
    return shown


def draw(title: str, rounds: Sequence[Mapping[str, Any]], path: Path, least_ms: float | None = None) -> None:
    """`least_ms`: a lower bound of the times. ConfigError: it cannot be written there."""
    plt = pyplot()
    names = [str(row["round"]) for row in rounds]
    colors = {name: light for name, (light, _) in COLORS.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    means, worst = ([row["ttft_ms"].get(which, 0.0) for row in rounds] for which in ("mean", "p99"))
    left.bar(names, means, color=[colors.get(name, colors["computed"]) for name in names])
    left.plot(names, worst, "k_", markersize=18, label="p99")
    for name, mean, top in zip(names, means, worst, strict=True):
        text = f"{mean:,.0f} ms\n{mean / (means[0] or 1):.2f} of {names[0]}"
        left.annotate(text, (name, max(mean, top)), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    if least_ms is not None:
        left.axhline(least_ms, color="crimson", linewidth=1, label="copying alone")
    left.set(title="Time to first token", ylabel="ms", ylim=(0, 1.25 * max(worst) or 1))
    left.legend(frameon=False)
    floor = [0.0] * len(rounds)
    for tier in (*TIERS, "cached", "computed"):
        shares = []
        for row in rounds:
            known = row["prompt_tokens"] or 1
            computed = known - sum(row["cached_tokens"].values())
            shares.append(100 * (computed if tier == "computed" else row["cached_tokens"].get(tier, 0)) / known)
        if any(shares):
            right.bar(names, shares, bottom=floor, label=tier, color=colors["host" if tier == "cached" else tier])
        floor = [below + height for below, height in zip(floor, shares, strict=True)]
    right.set(title="Where prompt tokens came from", ylabel="% of prompt tokens", ylim=(0, 118))
    right.legend(frameon=False, ncols=4, loc="upper center", fontsize=9)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=130)
    except OSError as e:
        raise ConfigError(f"--png: {path}: {e.strerror}") from None
    finally:
        plt.close(figure)
