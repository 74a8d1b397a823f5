"""How many more tokens per second do 16 conversations say than one, in a family that selects or compresses its keys?

    .venv/bin/python benchmarks/batch.py [--quick] [--json FILE]

Tiny models with random weights, so nearly all time is that of calling operations, which a batch shares. Decoding only:
each answer's tokens after its first, over the seconds between them; the best of several rounds.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial

from common import arguments, machine, show, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.pages.pools import ModelIdentity
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.requests import OutputChunk, Request, Sampling
from kvarve.reference.engine.workspace import StateLayout
from tests.sim.models import byte_tokenizer, tiny_grid, tiny_model

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")
CONVERSATIONS, PROMPT = 16, 48
MIB = 1 << 20
PATIENCE_S = 600.0


def an_engine(family: str) -> Engine:
    net, (page, chunk) = tiny_model(family), tiny_grid(family)
    layout = StateLayout.of(net, page, chunk)
    identity = ModelIdentity(family, "random", "float32", page, chunk, layout.pools)
    model = LoadedModel(family, net, byte_tokenizer(), layout, identity, 1024, frozenset({256}))
    return Engine(model, PrefixCache(identity, CacheConfig(64 * MIB)), max_running=CONVERSATIONS).start()


def tokens_per_s(engine: Engine, seeds: Sequence[int], most: int) -> float:
    """Of these conversations, from when all of them speak until the first is done."""
    came: dict[int, list[float]] = {seed: [] for seed in seeds}
    done = threading.Event()

    def take(seed: int, piece: OutputChunk) -> None:
        assert not piece.error, piece
        came[seed].extend([time.perf_counter()] * len(piece.tokens))
        if all(len(times) == most for times in came.values()):
            done.set()

    for seed in seeds:
        prompt = [(seed * 37 + at * 11) % 251 for at in range(PROMPT)]
        engine.submit(Request(prompt, Sampling(most, ignore_eos=True), deliver=partial(take, seed)))
    assert done.wait(PATIENCE_S), "no answer"
    began, ended = max(times[0] for times in came.values()), min(times[-1] for times in came.values())
    return sum(began < at <= ended for times in came.values() for at in times) / (ended - began)


def measure(family: str, most: int, rounds: int) -> dict[str, object]:
    engine = an_engine(family)
    try:
        one = max(tokens_per_s(engine, [100 + number], most) for number in range(rounds))
        crowds = [range(1000 + CONVERSATIONS * number, 1000 + CONVERSATIONS * (number + 1)) for number in range(rounds)]
        many = max(tokens_per_s(engine, crowd, most) for crowd in crowds)
    finally:
        engine.shutdown(10)
    return {"family": family, "tokens/s of 1": round(one), "of 16": round(many), "16 over 1": round(many / one, 1)}


def main() -> None:
    options = arguments(__doc__.partition("\n")[0]).parse_args()
    most, rounds = (40, 1) if options.quick else (160, 3)
    rows = [measure(family, most, rounds) for family in FAMILIES]
    show("decoding, tokens per second", rows)
    write_json(options.json, {"machine": machine(), "results": rows})


if __name__ == "__main__":
    main()
