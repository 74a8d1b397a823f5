"""What do exact hits on answers cost? Conversations whose answers are computed again when idle, and kept as decoded.

    .venv/bin/python benchmarks/conversations.py [--quick] [--json FILE]

The same conversations on builtin:tiny-hybrid, in turns of both engines: all at once without a pause (full load), and at
half the requests a second that the engine took then (half load). `kept` has the pages that decoding computed, as with
`--hits rounded`; `exact` computes whole chunks of answers again while nothing else is to be done. Ratios are of exact
over kept, medians of the rounds: hits at half load, and tokens a second of answers at full load.

At full load nothing is idle, so each later turn computes a chunk of the answer before it. The limit is the time of
kept and of as many chunks without answers.
"""

import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from common import arguments, machine, show, watched, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, keeping_answers, load_model, quiet_libraries
from kvarve.reference.engine.requests import Request, Sampling

MIB = 1 << 20
IDS = range(300, 800)  # of tokens


@dataclass(frozen=True)
class Size:
    rounds: int = 3
    talks: int = 12
    turns: int = 4
    first: int = 500  # tokens of the first prompt, and of each later question
    question: int = 60
    answer: int = 200


QUICK = Size(rounds=1, talks=2, turns=2, first=300, question=20, answer=30)


@dataclass
class Seen:
    prompt: int = 0
    cached: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def talk(engine: Engine, size: Size, seed: int, every_s: float, seen: Seen) -> None:
    """One conversation; its next question comes `every_s` after the one before, or as soon as that is answered."""
    dice, history = random.Random(seed), list[int]()
    for turn in range(size.turns):
        begun_s = time.monotonic()
        history += [dice.choice(IDS) for _ in range(size.question if turn else size.first)]
        request = engine.submit(Request([*history], Sampling(size.answer, ignore_eos=True)))
        _, ids, last = request.result(600.0)
        assert last.usage is not None, last.error
        history += ids
        if turn:  # the first has nothing to hit
            with seen.lock:
                seen.prompt += last.usage.prompt
                seen.cached += last.usage.cached
        time.sleep(max(0.0, begun_s + every_s - time.monotonic()))


def played(model: LoadedModel, exact: bool, size: Size, seed: int, every_s: float) -> dict[str, float]:
    cache = PrefixCache(model.identity, CacheConfig(256 * MIB, 256 * MIB))
    engine, seen = Engine(model, cache, exact=exact).start(), Seen()
    dice = random.Random(seed)
    each = [
        threading.Thread(target=talk, args=(engine, size, seed * 100 + number, every_s, seen))
        for number in range(size.talks)
    ]
    begun_s = time.monotonic()
    for thread in each:
        thread.start()
        time.sleep(dice.random() * every_s / size.talks)
    for thread in each:
        thread.join()
    took_s = time.monotonic() - begun_s
    again = engine.counts.recomputed_tokens
    engine.shutdown(10)
    answered = size.talks * size.turns * size.answer
    return {
        "tokens/s": answered / took_s,
        "hits": seen.cached / seen.prompt,
        "computed again": float(again),
        "s": took_s,
    }


def computed_again_s(model: LoadedModel, size: Size, seed: int) -> float:
    """The time of what exact has to compute beside kept at full load: for each later turn one chunk."""
    engine = Engine(model, PrefixCache(model.identity, CacheConfig(256 * MIB, 256 * MIB))).start()
    dice, tokens = random.Random(seed), model.layout.chunk_tokens * (size.turns - 1)
    prompts = [dice.choices(IDS, k=tokens) for _ in range(size.talks)]
    begun_s = time.monotonic()
    for request in [engine.submit(Request(prompt, Sampling(1))) for prompt in prompts]:
        request.result(600.0)
    took_s = time.monotonic() - begun_s
    engine.shutdown(10)
    return took_s


def main(words: Sequence[str] | None = None) -> int:
    args = arguments((__doc__ or "").partition("\n")[0]).parse_args(words)
    size, about = QUICK if args.quick else Size(), machine()
    quiet_libraries()
    torch.set_num_threads(2)
    model = load_model("builtin:tiny-hybrid")
    engines = {"kept": (keeping_answers(model), False), "exact": (model, True)}
    rows, found = [], dict[tuple[str, str], list[dict[str, float]]]()
    limits = list[float]()
    for number in watched(range(size.rounds), "round", size.rounds):
        full = {name: played(*given, size, number, 0.0) for name, given in engines.items()}
        again_s = computed_again_s(model, size, number)
        limits.append(full["kept"]["s"] / (full["kept"]["s"] + again_s))
        every_s = 2 * size.talks * size.answer / max(each["tokens/s"] for each in full.values())
        half = {name: played(*given, size, number, every_s) for name, given in engines.items()}
        for load, told in (("full", full), ("half", half)):
            for name in engines:
                found.setdefault((load, name), []).append(told[name])
    for (load, name), told in found.items():
        rows.append({"load": load, "answers": name} | {key: median(each[key] for each in told) for key in told[0]})

    def ratio(load: str, key: str) -> float:
        pairs = zip(found[load, "exact"], found[load, "kept"], strict=True)
        return median(exact[key] / kept[key] for exact, kept in pairs)

    ratios = {
        "hits_half_exact_over_kept": ratio("half", "hits"),
        "full_exact_over_kept": ratio("full", "tokens/s"),
        "full_limit_over_kept": median(limits),
    }
    show(f"{size.talks} conversations of {size.turns} turns", rows)
    for name, value in ratios.items():
        print(f"{name}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
