"""How far apart should memory expect windows and states to be? Measured over traffic and models of many shapes.

Where pools cannot share memory it is divided once between slots for states and slots for attention. A division that
suits one traffic wastes memory with another. For each drawn shape (a model's bytes, a traffic, a memory) the same
requests are replayed through the product's own core (`kvarve.planner`) with memory that is shared by the pools, with
every spacing from 256 to 65,536 tokens, and with those that rules suggest. What a rule loses is the part of the best
fixed spacing's hits that it does not get: 0 is as good as the best one for this very shape, 1 is no hit at all.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

import common
from kvarve.cache.config import spacing
from kvarve.errors import ConfigError
from kvarve.planner import SimulationConfig, SimulationReport, TraceRequest, read_trace, replayed

BLOCK = 64  # tokens of an id, and of a page
CHUNK = 256
SHARED = "shared by the pools"
SPACINGS = tuple(CHUNK << power for power in range(9))  # 256 to 65,536
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Shape:
    """A model as bytes, a traffic by its name and seed, and a memory as a share of what the traffic would fill."""

    traffic: str
    seed: int
    kv_bytes_per_token: int
    state_bytes: int
    window_tokens: int
    window_bytes_per_token: int
    share: float
    host: bool

    @property
    def snapshot_bytes(self) -> int:
        window = math.ceil(max(0, self.window_tokens - 1) / BLOCK) * BLOCK * self.window_bytes_per_token
        return self.state_bytes + window

    def config(self, memory: int) -> SimulationConfig:
        return SimulationConfig(
            memory // 5 if self.host else memory,
            memory - memory // 5 if self.host else 0,
            kv_bytes_per_token=self.kv_bytes_per_token,
            state_bytes=self.state_bytes,
            window_tokens=self.window_tokens,
            window_bytes_per_token=self.window_bytes_per_token,
            block_tokens=BLOCK,
            page_tokens=BLOCK,
            chunk_tokens=CHUNK,
        )


# --- traffic: prompts as lists of ids, an id for each block and all before it


class Ids:
    """Hands out ids, and extends prompts by a number of tokens."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self._next = dice, count()

    def longer(self, ids: Sequence[int], tokens: float) -> list[int]:
        return [*ids, *(next(self._next) for _ in range(max(1, round(tokens / BLOCK))))]

    def between(self, low: float, high: float) -> float:
        """A number whose logarithm is drawn evenly."""
        return math.exp(self.dice.uniform(math.log(low), math.log(high)))


Prompts = Iterator[list[int]]


def asked_again(ids: Ids) -> Prompts:
    """Conversations of about one length, each asked again when all others have been."""
    length = ids.between(300, 30_000)
    prompts = [ids.longer([], ids.dice.uniform(0.7, 1.3) * length) for _ in range(ids.dice.randint(10, 80))]
    for _ in range(3):
        yield from prompts


def talks(ids: Ids) -> Prompts:
    """Conversations that grow turn by turn, side by side."""
    first, turn = ids.between(100, 10_000), ids.between(100, 2_000)
    open_, turns = [list[int]() for _ in range(ids.dice.randint(4, 40))], ids.between(2, 12)
    for _ in range(240):
        at = ids.dice.randrange(len(open_))
        if not open_[at] or ids.dice.random() < 1 / turns:
            open_[at] = ids.longer([], ids.between(0.5, 2) * first)
        else:
            open_[at] = ids.longer(open_[at], ids.between(0.5, 2) * turn)
        yield open_[at]


def documents(ids: Ids) -> Prompts:
    """Questions about documents, of which some are asked about far more often than others."""
    length = ids.between(1_000, 100_000)
    known = [ids.longer([], ids.between(0.5, 2) * length) for _ in range(ids.dice.randint(5, 40))]
    weights = [1 / (rank + 1) for rank in range(len(known))]
    for _ in range(160):
        (document,) = ids.dice.choices(known, weights)
        yield ids.longer(document, ids.between(50, 500))


def instructions(ids: Ids) -> Prompts:
    """Short questions behind a few long instructions."""
    length = ids.between(500, 20_000)
    before = [ids.longer([], ids.between(0.5, 2) * length) for _ in range(ids.dice.randint(1, 8))]
    question = ids.between(100, 3_000)
    for _ in range(240):
        yield ids.longer(ids.dice.choice(before), ids.between(0.5, 2) * question)


def agents(ids: Ids) -> Prompts:
    """A few sessions with long histories that grow by small steps, and begin anew when they are full."""
    full, step, start = ids.between(20_000, 100_000), ids.between(100, 2_000), ids.between(2_000, 20_000)
    tools = ids.longer([], start)
    open_ = [tools for _ in range(ids.dice.randint(2, 12))]
    for _ in range(200):
        at = ids.dice.randrange(len(open_))
        open_[at] = ids.longer(tools if len(open_[at]) * BLOCK > full else open_[at], ids.between(0.5, 2) * step)
        yield open_[at]


def mixed(ids: Ids) -> Prompts:
    """Long prompts that come once between short conversations that come back."""
    long, turns = ids.between(10_000, 60_000), talks(ids)
    for prompt in turns:
        yield prompt
        if ids.dice.random() < 0.15:
            yield ids.longer([], ids.between(0.5, 1.5) * long)


TRAFFIC: dict[str, Callable[[Ids], Prompts]] = {
    each.__name__: each for each in (asked_again, talks, documents, instructions, agents, mixed)
}


def requests(traffic: str, seed: int) -> list[TraceRequest]:
    found = []
    for at, ids in enumerate(TRAFFIC[traffic](Ids(random.Random(f"{traffic} {seed}")))):
        found.append(TraceRequest(at * 1000.0, len(ids) * BLOCK + 1, 1, ids))
    return found


def drawn(seed: int) -> Shape:
    """The shape of this number. A snapshot takes as much as 10 to 25,000 tokens do, as in docs/families.md, between 0.1
    and 400 MB; memory is between a thirtieth and sixteen times of what the traffic would fill."""
    dice = random.Random(f"shape {seed}")
    ids = Ids(dice)
    kv = round(ids.between(1 * KIB, 256 * KIB))
    snapshot = min(max(kv * ids.between(10, 25_000), 0.1 * MIB), 400 * MIB)
    windowed = dice.choice((0.0, 0.0, 0.5, 1.0))  # the part of it that is a window's
    window = dice.choice((129, 513, 1025, 4097)) if windowed else 0
    return Shape(
        dice.choice([*TRAFFIC]),
        seed,
        kv,
        round((1 - windowed) * snapshot),
        window,
        max(1, round(windowed * snapshot / (window - 1))) if windowed else 0,
        ids.between(0.03, 16),
        dice.random() < 0.5,
    )


def fills(shape: Shape, asked: Sequence[TraceRequest]) -> int:
    """Bytes of all that the traffic would keep: each block once, a snapshot where each prompt ends."""
    blocks = {id_ for each in asked for id_ in each.ids}
    ends = {each.ids[-1] for each in asked}
    return len(blocks) * BLOCK * shape.kv_bytes_per_token + len(ends) * shape.snapshot_bytes


# --- rules


Rule = Callable[[Shape], float]  # tokens per snapshot


def fixed(tokens: int) -> Rule:
    return lambda shape: tokens


def by_share(share: float) -> Rule:
    """Windows and states get this share of the bytes."""
    return lambda shape: (1 - share) / share * shape.snapshot_bytes / shape.kv_bytes_per_token


def between(tokens: int) -> Rule:
    """The geometric mean of `tokens` and the spacing that divides the bytes evenly."""
    return lambda shape: math.sqrt(tokens * shape.snapshot_bytes / shape.kv_bytes_per_token)


def product(shape: Shape) -> int:
    return spacing(shape.config(1 << 40).pools, BLOCK, CHUNK)


def rules() -> dict[str, Rule]:
    constants = {f"every {tokens:,}": fixed(tokens) for tokens in SPACINGS}
    shares = {f"{share:.0%} of the bytes": by_share(share) for share in (0.2, 0.4, 0.6)}
    means = {f"between even and {tokens:,}": between(tokens) for tokens in (2048, 4096, 8192, 16384)}
    return constants | shares | means | {"by the model": product, SHARED: lambda shape: 0}


@dataclass
class Lost:
    """The hits that one rule lost with one shape, and those of the best fixed spacing."""

    rule: str
    tokens_per_snapshot: int
    hit_rate: float
    best: float

    @property
    def lost(self) -> float:
        return 1 - self.hit_rate / self.best


def measured(shape: Shape, asked: Sequence[TraceRequest]) -> list[Lost]:
    """Every rule with one shape; nothing where not even the best spacing finds anything."""
    memory, found = round(shape.share * fills(shape, asked)), dict[int, float]()
    apart = {name: max(CHUNK, int(rule(shape))) if name != SHARED else 0 for name, rule in rules().items()}
    for tokens in {*SPACINGS, *apart.values()}:
        try:
            with common.divided(tokens):
                report: SimulationReport = replayed(asked, shape.config(memory))
        except ConfigError:  # not even two chunks fit
            return []
        found[tokens] = report.hit_rate
    best = max(found[tokens] for tokens in SPACINGS)
    if best < 0.01:
        return []
    return [Lost(name, tokens, found[tokens], best) for name, tokens in apart.items()]


def table(lost: Sequence[Lost]) -> list[dict[str, object]]:
    by_rule: dict[str, list[float]] = {}
    for each in lost:
        by_rule.setdefault(each.rule, []).append(max(0.0, each.lost))
    rows: list[dict[str, object]] = []
    for rule, losses in by_rule.items():
        losses.sort()
        rows.append(
            {
                "rule": rule,
                "lost, mean %": 100 * sum(losses) / len(losses),
                "of one in ten %": 100 * losses[int(0.9 * len(losses))],
                "worst %": 100 * losses[-1],
                "half or more lost %": 100 * sum(loss >= 0.5 for loss in losses) / len(losses),
                "worst, points": 100 * max(each.best - each.hit_rate for each in lost if each.rule == rule),
            }
        )
    return rows


def main() -> int:
    parser = common.arguments((__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shapes", type=int, default=40, help="how many shapes are drawn (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them (default %(default)s)")
    parser.add_argument(
        "--trace", type=Path, nargs="*", default=[], help="traces of 512-token blocks to replay as well"
    )
    args = parser.parse_args()
    shapes = [drawn(args.seed + number) for number in range(2 if args.quick else args.shapes)]
    lost: list[Lost] = []
    told = []
    for shape in common.watched(shapes, "shapes", len(shapes)):
        each = measured(shape, requests(shape.traffic, shape.seed))
        lost += each
        told.append(asdict(shape) | {"found": {row.rule: [row.tokens_per_snapshot, row.hit_rate] for row in each}})
    rows = table(lost)
    ours = [each.hit_rate / each.best for each in lost if each.rule == SHARED]
    shown = len(lost) // len(rows) if rows else 0
    common.show("What a spacing of windows and states loses", rows, f"{shown} of {len(shapes)} shapes had any hits")
    ratios = {"shared_hits_over_best": sum(ours) / len(ours)} if ours else {}
    figures: dict[str, object] = {"machine": common.machine(), "rows": rows, "ratios": ratios, "shapes": told}
    for path in args.trace:
        figures[path.name] = rows = trace(path, args.quick)
        common.show(path.name, rows)
    common.write_json(args.json, figures)
    return 0


MODELS = ((24 * KIB, 77 * MIB), (32 * KIB, 50 * MIB), (64 * KIB, 1 * MIB))  # bytes of a token, and of a state


def trace(path: Path, quick: bool) -> list[dict[str, object]]:
    """Hit rates of a real trace on a device of 430 GB, by model and rule."""
    asked = [*islice(read_trace(path, 512), 500 if quick else None)]
    rows: list[dict[str, object]] = []
    for name, rule in rules().items():
        row: dict[str, object] = {"rule": name}
        for kv, state in MODELS:
            tokens = max(512, int(rule(Shape("", 0, kv, state, 0, 0, 1.0, False)))) if name != SHARED else 0
            with common.divided(tokens):
                config = SimulationConfig(430 * 10**9, kv_bytes_per_token=kv, state_bytes=state)
                row[f"{kv // KIB} KiB, {state // MIB} MiB: %"] = 100 * replayed(asked, config).hit_rate
        rows.append(row)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
