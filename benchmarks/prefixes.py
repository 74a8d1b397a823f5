"""How long until the first token, by length of the prefix and by the tier that holds it?

    .venv/bin/python benchmarks/prefixes.py [--quick] [--json FILE] [--picture FILE] [--device DEVICE] [--model large]

The reference engine on a hybrid model with random weights (`tools/random_qwen3_5.py`: 0.1 billion parameters, or 0.9 as
`large`; float32 on a CPU, else bfloat16). Each round takes a new prompt of each length, with a question of 16 tokens at
its end: computed cold, then again from the device, from the host with the device emptied, and from files with both
emptied. Each figure is the best of the rounds, because other work on a machine only ever makes a round slower.

Ratios: `warm_host` and `warm_storage` over cold, at the longest prefix.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import arguments, machine, show, watched, write_json
from engine import PATIENCE_S, Timed, make, tokens
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.policies import Policies
from kvarve.pages.pools import Tier
from kvarve.planner.charts import INK, pyplot
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import load_model, quiet_libraries
from random_qwen3_5 import LARGE

QUESTION = 16
TIERS: dict[str, list[Tier]] = {"device": [], "host": [Tier.DEVICE], "storage": [Tier.DEVICE, Tier.HOST]}


@dataclass(frozen=True)
class Size:
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192)
    rounds: int = 3


QUICK, CARD = Size((256, 512), 1), Size((512, 2048, 4096, 8192, 32768))


def one(engine: Engine, length: int, seed: int) -> dict[str, float]:
    """Seconds to the first token of a new prompt, cold and from each tier."""
    prompt, found, answers = [*tokens(length, seed), *tokens(QUESTION, seed + 1)], dict[str, float](), list[list[int]]()
    for name, flushed in {"cold": [], **TIERS}.items():
        engine.settle(PATIENCE_S)
        if flushed:
            engine.flush(flushed, PATIENCE_S)
        timed = Timed(prompt, 2).start(engine).wait()
        assert timed.piece and timed.piece.usage
        assert name == "cold" or getattr(timed.piece.usage, name) > 0, timed.piece
        found[name] = timed.ttft_s
        answers.append(timed.tokens)
    assert all(answer == answers[0] for answer in answers), "the cache changed an answer"
    return found


def draw(path: Path, lengths: Sequence[int], best: Mapping[int, Mapping[str, float]], title: str) -> None:
    plt = pyplot()
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with plt.rc_context(colors | {"svg.hashsalt": "kvarve", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        for name in ("cold", *TIERS):
            took = [1000 * best[length][name] for length in lengths]
            axes.plot(lengths, took, marker="o", label=name)
        axes.legend(frameon=False)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="tokens of the prefix", ylabel="time to first token, ms", title=title)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.yaxis.set_major_formatter(lambda took, _: f"{took:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        figure.savefig(path, dpi=130, transparent=True)
        plt.close(figure)


def main() -> int:
    parser = arguments("How long until the first token, by length of the prefix and by the tier that holds it?")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the figures: .svg, .png or .pdf")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0; the lengths of a GPU end at 32,768 tokens")
    parser.add_argument("--model", choices=["base", "large"], default="base", help="0.1 or 0.9 billion parameters")
    args = parser.parse_args()
    about, gpu = machine(), args.device != "cpu"
    size = QUICK if args.quick else CARD if gpu else Size()
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as name:
        make(Path(name) / "model", small=args.quick, **({} if args.model == "base" or args.quick else LARGE))
        dtype = "bfloat16" if gpu else "float32"
        model = load_model(f"{name}/model", dtype=dtype, device=args.device)
        room = int(2 * (max(size.lengths) + 1024) * model.layout.bytes_per_token) + (512 << 20)
        cache = CacheConfig(
            room, 2 * room, f"file://{name}/store?capacity=16GiB", policies=Policies(storage_wait="all")
        )
        engine = Engine(model, PrefixCache(model.identity, cache, device=args.device)).start()
        one(engine, size.lengths[0], 1)  # warms up
        found: dict[int, dict[str, float]] = {length: {} for length in size.lengths}
        for number in watched(range(size.rounds), "round", size.rounds):
            for length in size.lengths:
                for what, seconds in one(engine, length, 1000 * (number + 1) + length).items():
                    found[length][what] = min(seconds, found[length].get(what, seconds))
        engine.shutdown()
    rows = [
        {"tokens": f"{length:,}"} | {f"{name}, ms": 1000 * seconds for name, seconds in found[length].items()}
        for length in size.lengths
    ]
    ratios = {f"warm_{tier}": found[size.lengths[-1]][tier] / found[size.lengths[-1]]["cold"] for tier in TIERS}
    title = f"Time to first token, {args.model} model in {dtype} on {args.device}"
    show(title, rows)
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    if args.picture is not None:
        draw(args.picture, size.lengths, found, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
