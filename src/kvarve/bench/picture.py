"""A picture of rounds side by side: how long requests took, and where their prompts came from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarve.bench.figures import STATISTICS
from kvarve.bench.load import TIERS
from kvarve.errors import ConfigError
from kvarve.planner.sweep import pyplot

COLORS = {"device": "#2a6f97", "host": "#61a5c2", "storage": "#d9a441", "cached": "#61a5c2", "computed": "#b8b8b8"}
SHADES = ("#b8b8b8", "#2a6f97", "#d9a441", "#61a5c2")


def draw(title: str, rounds: Sequence[Mapping[str, Any]], path: Path) -> None:
    """ConfigError: it cannot be written there."""
    plt = pyplot()
    names = [str(row["round"]) for row in rounds]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    width = 0.8 / len(rounds)
    for number, row in enumerate(rounds):
        values = [row["ttft_ms"].get(which, 0.0) for which in STATISTICS]
        places = [at + number * width for at in range(len(STATISTICS))]
        left.bar(places, values, width, label=names[number], color=SHADES[number % len(SHADES)])
    left.set_xticks([at + 0.4 - width / 2 for at in range(len(STATISTICS))], STATISTICS)
    left.set(title="Time to first token", ylabel="ms")
    left.legend(frameon=False)
    middle.bar(names, [row["output_tok_per_s"] for row in rounds], color=[*SHADES] * len(rounds))
    middle.set(title="Output throughput", ylabel="tokens/s")
    floor = [0.0] * len(rounds)
    for tier in (*TIERS, "cached", "computed"):
        shares = []
        for row in rounds:
            known = row["prompt_tokens"] or 1
            computed = known - sum(row["cached_tokens"].values())
            shares.append(100 * (computed if tier == "computed" else row["cached_tokens"].get(tier, 0)) / known)
        if any(shares):
            right.bar(names, shares, bottom=floor, label=tier, color=COLORS[tier])
        floor = [below + height for below, height in zip(floor, shares, strict=True)]
    right.set(title="Where prompt tokens came from", ylabel="% of prompt tokens", ylim=(0, 118))
    right.legend(frameon=False, ncols=3, loc="upper center", fontsize=9)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=130)
    except OSError as e:
        raise ConfigError(f"--png: {path}: {e.strerror}") from None
    finally:
        plt.close(figure)
