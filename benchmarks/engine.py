"""What does the cache give, and what does it cost, end to end?

    .venv/bin/python benchmarks/engine.py [--quick] [--json FILE] [--dir FOLDER] [--model FOLDER]

The reference engine on a model of 0.1 billion parameters with random weights (`tools/random_qwen3_5.py`), on prompts of
4,096 tokens that end in a question of 16. Each round takes a new prompt: computed by the bare model (chunks of the same
grid, no engine, no cache) and cold by the engine with its cache on, then again from the host alone and from the storage
alone. Times are to the first token. The two cold ones are computed in turns, chunk by chunk
and then token by token, so that whatever else a machine does slows both alike. Copies that the engine's chunk has begun
count as its own time, all of it, though without turns they would overlap with the next chunk. At the end 16
conversations of two turns run side by side, and some of them one after the other.

Each figure is the best of several rounds (of a cold prompt: each chunk's; of further tokens: each token's, and then the
median), because other work on a machine only ever makes a round slower. Ratios:
`warm_host_ttft`, `warm_storage_ttft` warm over cold; `cold_ttft_on_over_off` engine with cache over bare model;
`decode_on_over_off` tokens per second of the same; `throughput_16_over_1` tokens said per second, and
`ttft_p99_over_mean` of those sixteen, for starvation. `layer_overlap`: of a prompt in the host and 240 further tokens,
time to first token over the longer of copying the pages to the device and computing the rest, with a sleep before each
layer has come, so that both take as long; without overlap it would be 2 (`layer_overlap_unslowed`: no sleeps; the check
of the pages comes before both). Then interference between requests:
`mixed_lengths` tokens per second of 31 answers at 20 to 100 tokens beside one at 6,000, over the same 31 alone;
`sampling_share` seconds of sampling over seconds of the whole turn, of 64 answers of a model with 152K tokens at
temperature 1 and top-p 0.9, where 1,000 tokens have 99% of the chances (`sampling_share_flat`: all have the same);
`short_prompts_32_over_1` requests per second of prompts of 64 tokens and one token to say, by 32 clients over one.
`elastic_over_fixed`: tokens per second of traffic that changes every 100 requests, where pools share memory, over the
best of memory that is divided once.
"""

import random
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from common import arguments, divided, machine, show, watched, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.policies import Policies
from kvarve.memory.page_copies import DeviceCopies
from kvarve.pages.pools import Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.job import Job
from kvarve.reference.engine.model import LoadedModel, forward, keeping_answers, load_model, quiet_libraries
from kvarve.reference.engine.requests import OutputChunk, Request, Sampling
from kvarve.reference.engine.workspace import Workspace

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from random_qwen3_5 import make

MIB = 1 << 20
PATIENCE_S = 3600.0
CONVERSATIONS = 16
# Traffic that changes: tokens of a prompt and how many there are, of long documents and of short talks; memory in which
# either has room alone, and for what it is divided once.
CHANGING, CHANGING_BYTES, SPLITS = ((2048, 9), (300, 60)), 24 * MIB, (128, 256, 512, 1024, 2048)
IN_A_ROW = 10  # prompts of changing traffic, which one engine answers before the next has its turn
REST = 240  # tokens behind a prompt that is in the host: less than a chunk


@dataclass(frozen=True)
class Size:
    prompt: int = 4096
    question: int = 16
    answer: int = 32
    rounds: int = 3
    turn_prompt: int = 192  # of a conversation
    turn_answer: int = 64
    alone: int = 3  # conversations that are measured one after the other
    long: int = 6000  # tokens of the long one beside 31 short ones
    said: int = 24  # tokens of each of those answers
    vocabulary: int = 151_936
    clients: int = 32
    short_prompts: int = 96
    alike: int = 100  # requests before the traffic changes


QUICK = Size(prompt=768, answer=16, rounds=2, turn_prompt=64, turn_answer=16, alone=2)
QUICK = replace(QUICK, long=1000, said=6, vocabulary=4096, clients=8, short_prompts=16, alike=3)


class Timed:
    """A request that notes the time of each chunk. Between two of them, `between` runs on the engine's thread."""

    def __init__(self, prompt: Sequence[int], most: int, between: Callable[[], object] = lambda: None) -> None:
        self.tokens: list[int] = []
        self.came: list[float] = []
        self.token_s: list[float] = []  # of each token but the first
        self._between, self._went_on = between, 0.0
        self._done = threading.Event()
        self.piece: OutputChunk | None = None
        self.request = Request(prompt, Sampling(most, ignore_eos=True), deliver=self._take)

    def _take(self, piece: OutputChunk) -> None:
        self.came.append(time.perf_counter())
        if self.tokens:
            self.token_s.append(self.came[-1] - self._went_on)
        self.tokens.extend(piece.tokens)
        if piece.finish is not None:
            self.piece = piece
            self._done.set()
            return
        self._between()
        self._went_on = time.perf_counter()

    def start(self, engine: Engine) -> "Timed":
        self.began = time.perf_counter()
        engine.submit(self.request)
        return self

    def wait(self) -> "Timed":
        assert self._done.wait(PATIENCE_S), "no answer"
        assert self.piece is not None and not self.piece.error, self.piece
        return self

    @property
    def ttft_s(self) -> float:
        return self.came[0] - self.began


class Bare:
    """The model with the same chunks and the same tokens, without engine and cache."""

    def __init__(self, model: LoadedModel, prompt: Sequence[int], most: int) -> None:
        self._model, self._chunk = model.model, model.layout.chunk_tokens
        self._workspace = Workspace(model.layout, len(prompt) + most, model.model.device)
        self._workspace.resume(0)
        self._ids, self._done = torch.tensor([list(prompt)]), 0
        self.said: list[int] = []
        self.chunk_s: list[float] = []
        self.token_s: list[float] = []

    def chunk(self) -> None:
        began = time.perf_counter()
        ids = self._ids[:, self._done : self._done + self._chunk]
        logits = forward(self._model, self._workspace, ids)
        self._done += ids.shape[1]
        if self._done == self._ids.shape[1]:
            self.said.append(int(logits.argmax()))
        self.chunk_s.append(time.perf_counter() - began)

    def token(self) -> None:
        began = time.perf_counter()
        self.said.append(int(forward(self._model, self._workspace, torch.tensor([[self.said[-1]]])).argmax()))
        self.token_s.append(time.perf_counter() - began)


class TakingTurns(Engine):
    """Before each chunk of its own, `before` has the engine's thread, once the copies of the last one have ended."""

    before: Callable[[], object] | None = None

    def _compute_alone(self, job: Job) -> None:
        if self.before is not None and job.prefilling:
            self.cache.settle(PATIENCE_S)
            self.chunk_s.append(time.perf_counter() - self._went_on)
            self.before()
            self._went_on = time.perf_counter()
        super()._compute_alone(job)

    def cold(self, prompt: Sequence[int], bare: Bare, most: int) -> tuple[Timed, list[float]]:
        """Answer in turns with the bare model; the seconds before the first chunk, and of each chunk."""
        self.chunk_s, self._went_on, self.before = list[float](), time.perf_counter(), bare.chunk
        timed = Timed(prompt, most, bare.token).start(self).wait()
        self.before = None
        return timed, [*self.chunk_s, timed.came[0] - self._went_on]


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_round(
    model: LoadedModel, engine: TakingTurns, size: Size, seed: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds by name, and those of each chunk of the cold prompt, and of each further token."""
    prompt, question = tokens(size.prompt, seed), tokens(size.question, seed + 1)
    bare = Bare(model, [*prompt, *question], size.answer)
    cold, chunk_s = engine.cold([*prompt, *question], bare, size.answer)
    found = dict[str, float]()
    for tier, flushed in (("device", []), ("host", [Tier.DEVICE]), ("storage", [Tier.DEVICE, Tier.HOST])):
        engine.settle(PATIENCE_S)
        if flushed:
            engine.flush(flushed, PATIENCE_S)
        warm = Timed([*prompt, *question], 2).start(engine).wait()
        assert warm.piece and warm.piece.usage and getattr(warm.piece.usage, tier) > 0, warm.piece
        assert warm.tokens == bare.said[:2] and cold.tokens == bare.said, "the cache changed an answer"
        found[f"warm_{tier}"] = warm.ttft_s
    each = {"cold_off": bare.chunk_s, "cold_on": chunk_s, "token_off": bare.token_s, "token_on": cold.token_s}
    return found, each


def talk(engine: Engine, size: Size, seeds: Sequence[int]) -> tuple[float, list[float]]:
    """Conversations of two turns side by side; tokens generated per second, and the times to each first token."""
    began, said, waits = time.perf_counter(), 0, list[float]()
    histories = [tokens(size.turn_prompt, seed) for seed in seeds]
    for turn in range(2):
        talks = [Timed(history, size.turn_answer).start(engine) for history in histories]
        for number, (each, seed) in enumerate(zip(talks, seeds, strict=True)):
            said += len(each.wait().tokens)
            waits.append(each.ttft_s)
            histories[number] += each.tokens + tokens(size.turn_prompt // 4, seed + turn + 1)
    return said / (time.perf_counter() - began), waits


def measure(model: LoadedModel, size: Size, folder: Path) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every round by name, of cold prompts and further tokens those of the best; tokens per second."""
    seconds: dict[str, list[float]] = {}
    chunks: dict[str, list[list[float]]] = {}
    storage = f"file://{folder}/store?capacity=4GiB"
    cache = CacheConfig(512 * MIB, 1024 * MIB, storage, policies=Policies(storage_wait="all"))
    engine = TakingTurns(model, PrefixCache(model.identity, cache), max_running=CONVERSATIONS)
    engine.start()
    for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
        found, chunk_s = one_round(model, engine, size if number else short(size), 1000 * (number + 1))
        if number:
            for name, taken in found.items():
                seconds.setdefault(name, []).append(taken)
            for name, each in chunk_s.items():
                chunks.setdefault(name, []).append(each)
    one_by_one = [talk(engine, size, [9000 + 10 * number]) for number in range(size.alone)]
    together = [talk(engine, size, [10_000 * (again + 1) + 10 * n for n in range(CONVERSATIONS)]) for again in range(2)]
    engine.shutdown()
    best = {name: [*map(min, zip(*rounds, strict=True))] for name, rounds in chunks.items()}
    seconds |= {name: [sum(each) if name.startswith("cold") else median(each)] for name, each in best.items()}
    waits = sorted(wait for _, each in together for wait in each)
    fair = {"ttft_mean_s": fmean(waits), "ttft_p99_s": waits[int(0.99 * (len(waits) - 1))]}
    return seconds, {
        "one": max(speed for speed, _ in one_by_one),
        "sixteen": max(speed for speed, _ in together),
        **fair,
    }


# --- layer by layer


class Slowed:
    """Copies to the device, each layer of which takes `layer_s` longer; `seconds` of the last one."""

    def __init__(self) -> None:
        self.layer_s, self.seconds, self._load = 0.0, 0.0, DeviceCopies.load

    def __enter__(self) -> "Slowed":
        def load(copies: DeviceCopies, pages: Any, ready: Any, copied: Callable[[int, Any], None]) -> None:
            def late(layer: int, event: Any) -> None:
                time.sleep(self.layer_s)
                copied(layer, event)

            began = time.perf_counter()
            self._load(copies, pages, ready, late)
            self.seconds = time.perf_counter() - began

        DeviceCopies.load = load  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        DeviceCopies.load = self._load  # type: ignore[method-assign]


def overlap(model: LoadedModel, size: Size) -> dict[str, float]:
    """Time to first token over the longer of copy and computing, slowed and not."""
    engine = Engine(model, PrefixCache(model.identity, CacheConfig(512 * MIB, 1024 * MIB))).start()
    prompt = tokens(size.prompt, 77)
    Timed([*prompt, 1], 1).start(engine).wait()
    seeds = iter(range(100, 1000))

    def ask(*, host: bool) -> float:
        engine.settle(PATIENCE_S)
        if host:
            engine.flush([Tier.DEVICE], PATIENCE_S)
        timed = Timed([*prompt, *tokens(REST, next(seeds))], 1).start(engine).wait()
        assert timed.piece and timed.piece.usage
        assert (timed.piece.usage.host if host else timed.piece.usage.device) == size.prompt, timed.piece
        return timed.ttft_s

    best = dict[str, float]()

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    with Slowed() as slowed:
        for number in watched(range(2 * size.rounds), "layer by layer", 2 * size.rounds):
            note("compute", ask(host=False))
            note("unslowed", ask(host=True))
            note("copy", slowed.seconds)
            if number < 2:  # warms up, and finds out how long both take
                continue
            slowed.layer_s = max(0.0, best["compute"] - best["copy"]) / len(model.layout.layers)
            note("slowed", ask(host=True))
            note("slowed_copy", slowed.seconds)
            slowed.layer_s = 0.0
    engine.shutdown()
    print(", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in best.items()))
    return {
        "layer_overlap": best["slowed"] / max(best["slowed_copy"], best["compute"]),
        "layer_overlap_unslowed": best["unslowed"] / max(best["copy"], best["compute"]),
    }


# --- concurrent requests


def mixed(model: LoadedModel, size: Size) -> tuple[float, float]:
    """Tokens per second of 31 short answers, alone and beside a long one; the best of several rounds."""
    engine = Engine(
        model, PrefixCache(model.identity, CacheConfig(512 * MIB, policies=Policies(storage_wait="none")))
    ).start()
    long = tokens(size.long, 4)
    Timed(long, 1).start(engine).wait()
    best = [0.0, 0.0]
    for number in watched(range(size.rounds), "mixed lengths", size.rounds):
        for beside in (False, True):
            prompts = [tokens(20 + 80 * each // 30, 100 * number + each) for each in range(31)]
            talk = Timed(long, 8 * size.said).start(engine) if beside else None
            talks = [Timed(prompt, size.said).start(engine) for prompt in prompts]
            for each in talks:
                each.wait()
            everybody = [*talks, *([talk] if talk else [])]
            start, stop = max(each.came[0] for each in everybody), min(each.came[-1] for each in talks)
            within = [sum(start < came <= stop for came in each.came) for each in everybody]
            assert max(within) - min(within) <= 1, "each says a token in every turn"
            best[beside] = max(best[beside], sum(within[:31]) / (stop - start))
            if talk:
                engine.abort(talk.request)
                talk.wait()
    engine.shutdown()
    return best[0], best[1]


class Sampled(Engine):
    """Chooses from logits that are given instead of the model's, and counts the seconds of that and of whole turns."""

    given: torch.Tensor
    sampling_s = 0.0

    def _sample(self, jobs: list[Job], logits: torch.Tensor) -> None:
        began = time.perf_counter()
        super()._sample(jobs, self.given[: len(jobs)])
        self.sampling_s += time.perf_counter() - began


def sampling(model: LoadedModel, size: Size) -> dict[str, float]:
    """The share of a turn of 64 answers that is spent on sampling, for peaked and for flat chances."""
    rows, vocabulary, most = 64, model.model.get_input_embeddings().num_embeddings, 10_000
    peaked = torch.full((rows, vocabulary), 0.01 / vocabulary)
    likely = torch.rand(rows, min(1000, vocabulary // 4)) ** 4
    for row, chances in zip(peaked, 0.99 * likely / likely.sum(-1, keepdim=True), strict=True):
        row[torch.randperm(vocabulary)[: len(chances)]] = chances
    found = {}
    for name, logits in (("sampling_share", peaked.log()), ("sampling_share_flat", torch.zeros(rows, vocabulary))):
        engine = Sampled(model, PrefixCache(model.identity, CacheConfig(512 * MIB)), max_running=rows)
        engine.given = logits
        choice = Sampling(most, temperature=1.0, top_p=0.9, ignore_eos=True)
        for number in range(rows):
            engine.submit(Request(tokens(8, number), replace(choice, seed=number)))
        while len(engine.scheduler.running) < rows or any(job.prefilling for job in engine.scheduler.running):
            engine._turn()
        shares = []
        for _ in watched(range(2 * size.rounds), name, 2 * size.rounds):
            engine.sampling_s, began = 0.0, time.perf_counter()
            engine._turn()
            shares.append(engine.sampling_s / (time.perf_counter() - began))
        found[name] = median(shares)
        engine.shutdown()
    return found


def short_prompts(model: LoadedModel, size: Size) -> tuple[float, float]:
    """Requests per second of prompts of 64 tokens by one client and by many; the best of several rounds."""
    engine = Engine(model, PrefixCache(model.identity, CacheConfig(512 * MIB))).start()
    best, seed = [0.0, 0.0], 10_000
    for number in watched(range(size.rounds + 1), "short prompts", size.rounds + 1):
        for many in (False, True):
            prompts = [
                tokens(64, seed + each) for each in range(size.short_prompts if many else size.short_prompts // 4)
            ]
            seed += len(prompts)
            began, under_way = time.perf_counter(), deque[Timed]()
            for prompt in prompts:
                if len(under_way) == (size.clients if many else 1):
                    under_way.popleft().wait()
                under_way.append(Timed(prompt, 1).start(engine))
            for timed in under_way:
                timed.wait()
            if number:  # the first is a warm-up
                best[many] = max(best[many], len(prompts) / (time.perf_counter() - began))
    engine.shutdown()
    return best[0], best[1]


def changing(size: Size) -> Iterator[list[int]]:
    """Prompts of which `size.alike` in a row are about a few long documents, then as many in many short talks."""
    dice = random.Random(7)
    documents, talks = ([tokens(length, 1000 * length + each) for each in range(many)] for length, many in CHANGING)
    for phase in range(4):
        for number in range(size.alike):
            yield [*dice.choice(talks if phase % 2 else documents), *tokens(8, 10**6 + 1000 * phase + number)]


def elastic(model: LoadedModel, size: Size) -> dict[int, float]:
    """Prompt tokens per second of traffic that changes, by the tokens between states for which memory is divided once;
    0: pools share it. The engines take turns after `IN_A_ROW` prompts, each such time is the best of several rounds."""
    splits, prompts = [0, *SPLITS], [*changing(size)]
    parts = [prompts[at : at + IN_A_ROW] for at in range(0, len(prompts), IN_A_ROW)]
    best = {split: [float("inf")] * len(parts) for split in splits}
    for _ in watched(range(size.rounds), "changing traffic", size.rounds):
        engines = {}
        for split in splits:
            with divided(split):
                cache = PrefixCache(model.identity, CacheConfig(CHANGING_BYTES))
            engines[split] = Engine(model, cache).start()
        for number, part in enumerate(parts):
            first = number % len(splits)
            for split in splits[first:] + splits[:first]:
                began = time.perf_counter()
                for prompt in part:
                    Timed(prompt, 1).start(engines[split]).wait()
                best[split][number] = min(best[split][number], time.perf_counter() - began)
        for engine in engines.values():
            engine.shutdown()
    return {split: sum(map(len, prompts)) / sum(best[split]) for split in splits}


def short(size: Size) -> Size:
    """For the round that only warms up."""
    return Size(prompt=min(size.prompt, 512), question=size.question, answer=4)


WHAT = {
    "cold_off": "cold, bare model, to the first token",
    "cold_on": "cold, engine and cache",
    "warm_device": "warm from the device",
    "warm_host": "warm from the host",
    "warm_storage": "warm from storage",
    "token_off": "each further token, bare model",
    "token_on": "each further token, engine and cache",
}


def main() -> int:
    parser = arguments("What does the cache give, and what does it cost, end to end?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where files are written; a temporary folder")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a checkpoint to measure; one is made unless given"
    )
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as name:
        folder = Path(name)
        if args.model is None:
            make(folder / "model", small=args.quick)
        model = keeping_answers(load_model(str(args.model or folder / "model"), dtype="float32"))
        seconds, speeds = measure(model, size, folder)
        overlaps = overlap(model, size)
        short_alone, short_mixed = mixed(model, size)
        tiny = keeping_answers(load_model("builtin:tiny-hybrid", dtype="float32"))
        one, many = short_prompts(tiny, size)
        splits = elastic(tiny, size)
        del model
        make(folder / "wide", small=args.quick, vocab_size=size.vocabulary)
        shares = sampling(keeping_answers(load_model(str(folder / "wide"), dtype="float32")), size)
    best = {name: min(taken) for name, taken in seconds.items()}
    ratios = {
        "warm_host_ttft": best["warm_host"] / best["cold_on"],
        "warm_storage_ttft": best["warm_storage"] / best["cold_on"],
        "cold_ttft_on_over_off": best["cold_on"] / best["cold_off"],
        "decode_on_over_off": best["token_off"] / best["token_on"],
        "throughput_16_over_1": speeds["sixteen"] / speeds["one"],
        "ttft_p99_over_mean": speeds["ttft_p99_s"] / speeds["ttft_mean_s"],
        "mixed_lengths": short_mixed / short_alone,
        "short_prompts_32_over_1": many / one,
        "elastic_over_fixed": splits[0] / max(splits[split] for split in SPLITS),
        **shares,
        **overlaps,
    }
    rows = [{"what": what, "ms": 1000 * best[name]} for name, what in WHAT.items()]
    show(f"A prompt of {size.prompt} tokens and a question of {size.question}, best of {size.rounds}", rows)
    print(f"tokens said per second: {speeds['one']:.1f} alone, {speeds['sixteen']:.1f} by {CONVERSATIONS} at once")
    print(f"31 short answers, tokens per second: {short_alone:.1f} alone, {short_mixed:.1f} beside one of {size.long}")
    print(
        f"prompts of 64 tokens per second (builtin:tiny-hybrid): {one:.1f} by one client, {many:.1f} by {size.clients}"
    )
    divided = ", ".join(f"{splits[split]:,.0f} for {split}" for split in SPLITS)
    print(f"changing traffic, tokens per second: {splits[0]:,.0f} in shared memory; divided once: {divided}")
    for name, value in ratios.items():
        print(f"{name}: {value:.3f}")
    every = {name: [1000 * taken for taken in all_taken] for name, all_taken in seconds.items()}
    write_json(
        args.json,
        {"machine": about, "rows": rows, "ratios": ratios, "tokens_per_s": speeds, "ms_of_every_round": every},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
