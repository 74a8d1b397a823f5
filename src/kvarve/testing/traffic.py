"""Mixed traffic for the real engine, on a device that holds little of it: every answer is compared, memory is watched.

    python -m kvarve.testing.traffic --minutes 120 [--seed 7] [--model builtin:tiny-hybrid] [--json FILE] [--png FILE]

Conversations with a few system prompts come back again and again, many at once, some are given up in the middle, some
must not read the cache, some have a salt; tiers are emptied, and now and then the server is another one that finds only
what is in storage. What the model says to each prompt without any cache is computed first. A deterministic engine has
to say that to the last bit of every logit; one that batches has to choose the same tokens, and may choose another only
where the two best were as good as equal.
"""

import argparse
import json
import os
import queue
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import torch
import xxhash
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from kvarve.config import CacheConfig, room_for
from kvarve.core.audit import audit
from kvarve.engine.batch import ROUNDING
from kvarve.engine.engine import Engine
from kvarve.engine.model import LoadedModel, forward, keeping_answers, load_model
from kvarve.engine.requests import Finish, OutputChunk, Request, Sampling
from kvarve.engine.state import Workspace
from kvarve.errors import KvarveError
from kvarve.memory.heap import bound_heaps
from kvarve.model import MEMORY_TIERS, Tier
from kvarve.runtime import PrefixCache
from kvarve.server.serve import quiet_libraries
from kvarve.testing.law import waits_in_vain

AT_ONCE = 16
STUCK_S = 120.0  # when nobody has said a word for so long, something waits for ever
GIVEN_UP, UNREAD, SALTED, EMPTIED = 0.06, 0.03, 0.1, 0.01  # shares of the requests
FLAT_FROM_S = 600.0  # a shorter run has not seen enough to judge memory by
FLAT = 1.1  # the last quarter of a run may hold so much more than the second


@dataclass(frozen=True)
class Size:
    """What is talked about, in tokens."""

    talks: int = 64
    turns: int = 4
    system: int = 300
    context: int = 900
    more: int = 300  # that each turn adds
    answer: int = 24
    page: int = 64
    chunk: int = 256


SHORT = Size(talks=32, turns=3, system=48, context=96, more=60, answer=8, page=16, chunk=64)


class Wrong(KvarveError):
    """What must never happen."""


@dataclass(frozen=True)
class Answer:
    """What a model says without a cache, and by how much each token was better than the next best."""

    tokens: list[int]
    leads: list[float]  # as a share of the largest logit
    logits: list[int]  # a hash of all of them, for each token


@dataclass(frozen=True)
class Asked:
    """One request under way."""

    request: Request
    talk: int
    turn: int
    gives_up_after: int | None  # tokens
    said: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)


@dataclass
class Told:
    """What became of the requests to one kind of engine."""

    requests: int = 0
    given_up: int = 0
    near_ties: int = 0
    prompt_tokens: int = 0
    cached: list[int] = field(default_factory=lambda: [0, 0, 0])  # tokens from device, host, storage
    preempted: int = 0
    servers: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        ttft = sorted(self.ttft_s) or [0.0]
        whole = max(1, self.prompt_tokens)
        return {name: value for name, value in asdict(self).items() if name not in ("cached", "ttft_s")} | {
            "cached_share": dict(zip(("device", "host", "storage"), (n / whole for n in self.cached), strict=True)),
            "ttft_mean_ms": 1000 * fmean(ttft),
            "ttft_p99_ms": 1000 * ttft[int(0.99 * (len(ttft) - 1))],
        }


class Traffic:
    """Conversations, what has to be said in them, and what has been seen so far."""

    def __init__(self, model: LoadedModel, size: Size, share: float, seed: int, folder: Path) -> None:
        """`share`: of all tokens that are talked about, how many have room on the device."""
        self.model, self.size, self.share, self.folder = model, size, share, folder
        self.dice = random.Random(seed)
        self.answers: dict[tuple[int, int], Answer] = {}
        self.prompts: dict[tuple[int, int], list[int]] = {}
        self.told = {"deterministic": Told(), "batched": Told()}
        self.memory: list[tuple[float, int]] = []  # seconds, bytes
        self.working_set = 0  # tokens
        self._near = ROUNDING.get(model.model.dtype, 0.1)
        self._text = model.tokenizer.encode("\n".join(topics.values()), add_special_tokens=False, verbose=False)

    def prepare(self) -> Iterator[int]:
        """Compute every prompt and its answer without a cache; yields after each conversation."""
        size = self.size
        systems = [self._words(size.system) for _ in range(4)]
        self.working_set = 4 * size.system
        for talk in range(size.talks):
            prompt = systems[talk % 4] + self._words(size.context)
            for turn in range(size.turns):
                prompt = prompt + self._words(size.more)
                self.prompts[talk, turn] = prompt
                self.answers[talk, turn] = answer = self._uncached(prompt)
                prompt = prompt + answer.tokens
            self.working_set += len(prompt) - size.system
            yield talk

    def _words(self, count: int) -> list[int]:
        start = self.dice.randrange(len(self._text) - count)
        return list(self._text[start : start + count])

    def _uncached(self, prompt: Sequence[int]) -> Answer:
        model, chunk = self.model.model, self.model.layout.chunk_tokens
        workspace = Workspace(self.model.layout, len(prompt) + self.size.answer, model.device)
        workspace.resume(0)
        for start in range(0, len(prompt), chunk):
            logits = forward(model, workspace, torch.tensor([prompt[start : start + chunk]], device=model.device))
        answer = Answer([], [], [])
        while True:
            best, second = logits.float().topk(2).values.tolist()
            answer.tokens.append(int(logits.argmax()))
            answer.leads.append((best - second) / float(logits.float().abs().max()))
            answer.logits.append(digest(logits))
            if len(answer.tokens) == self.size.answer:
                return answer
            logits = forward(model, workspace, torch.tensor([answer.tokens[-1:]], device=model.device))

    # --- one server's life

    def serve(self, kind: str, seconds: float, least: int = 0) -> None:
        """Start an engine, keep it busy for some time and at least so many requests, and look at what it leaves."""
        deterministic, told = kind == "deterministic", self.told[kind]
        model = self.model if deterministic else keeping_answers(self.model)
        engine = Engine(
            model, PrefixCache(model.identity, self._config(kind)), max_running=AT_ONCE, deterministic=deterministic
        )
        engine.scheduler.admit = partial(_admit, engine, engine.scheduler.admit)  # type: ignore[method-assign]
        engine.start()
        try:
            self._busy(engine, told, deterministic, time.monotonic() + seconds, least)
            told.preempted += engine.counts.preempted
            told.servers += 1
            engine.settle(STUCK_S)
            engine.flush(MEMORY_TIERS, STUCK_S)
        finally:
            engine.shutdown(STUCK_S)
        self._left(engine)

    def _busy(self, engine: Engine, told: Told, deterministic: bool, end: float, least: int) -> None:
        """Keep an engine busy until a time and for at least so many requests, and hear its last answers."""
        news: queue.SimpleQueue[tuple[int, float, OutputChunk]] = queue.SimpleQueue()
        under_way: dict[int, Asked] = {}
        while True:
            while len(under_way) < AT_ONCE and (least > 0 or time.monotonic() < end):
                asked, least = self._ask(news), least - 1
                under_way[asked.request.number] = asked
                engine.submit(asked.request)
                if asked.gives_up_after == 0:
                    engine.abort(asked.request)
            if not under_way:
                return
            try:
                number, when, piece = news.get(timeout=STUCK_S)
            except queue.Empty:
                raise Wrong(f"nobody has said a word for {STUCK_S:.0f} s, {len(under_way)} wait") from None
            asked = under_way[number]
            if not asked.said and piece.tokens:
                told.ttft_s.append(when - asked.request.submitted_s)
            asked.said.extend(piece.tokens)
            if piece.finish is not None:
                self._ended(under_way.pop(number), piece, told, deterministic)
                self._watch()
            elif asked.gives_up_after == len(asked.said):
                engine.abort(asked.request)
            if self.dice.random() < EMPTIED / self.size.answer:
                engine.flush(self.dice.choice(([Tier.DEVICE], list(MEMORY_TIERS))))

    def _config(self, kind: str) -> CacheConfig:
        """The device has its share, the host four times as much, storage three quarters of all."""
        layout, size = self.model.layout, self.size
        shape = (layout.pools, size.page, size.chunk)
        every = size.context

        def room(share: float, records: bool) -> int:
            return room_for(int(share * self.working_set), *shape, records=records, per_snapshot=every)

        return CacheConfig(
            room(self.share, False),
            room(4 * self.share, True),
            f"file://{self.folder}/{kind}?capacity={room(0.75, True)}",
            tokens_per_snapshot=every,
        )

    def _ask(self, news: "queue.SimpleQueue[tuple[int, float, OutputChunk]]") -> Asked:
        dice, most = self.dice, self.size.answer
        talk, turn = dice.randrange(self.size.talks), dice.randrange(self.size.turns)
        request = Request(
            self.prompts[talk, turn],
            Sampling(dice.randint(1, most), ignore_eos=True),
            salt="somebody else's" if dice.random() < SALTED else "",
            read_cache=dice.random() >= UNREAD,
        )
        request.deliver = partial(_tell, news, request.number)
        gives_up = dice.random() < GIVEN_UP
        asked = Asked(request, talk, turn, dice.randrange(most) if gives_up else None)
        request.watch = lambda logits: asked.logits.append(digest(logits))
        return asked

    def _ended(self, asked: Asked, last: OutputChunk, told: Told, deterministic: bool) -> None:
        expected, said = self.answers[asked.talk, asked.turn], asked.said
        where = f"turn {asked.turn} of conversation {asked.talk}"
        if last.finish is Finish.ERROR:
            raise Wrong(f"{where}: {last.error}")
        assert last.usage is not None
        told.requests += 1
        told.given_up += last.finish is Finish.ABORT
        told.prompt_tokens += last.usage.prompt
        for tier, cached in enumerate((last.usage.device, last.usage.host, last.usage.storage)):
            told.cached[tier] += cached
        if last.finish is Finish.ABORT and asked.gives_up_after is None:
            raise Wrong(f"{where}: given up, though nobody asked for it")
        if last.finish is Finish.LENGTH and len(said) != asked.request.sampling.max_tokens:
            raise Wrong(f"{where}: {len(said)} tokens instead of {asked.request.sampling.max_tokens}")
        if deterministic and (odd := [*map(int.__ne__, asked.logits, expected.logits)]) and any(odd):
            raise Wrong(f"{where}: the logits of token {odd.index(True)} of the answer differ; cached: {last.usage}")
        for at, (token, right) in enumerate(zip(said, expected.tokens, strict=False)):
            if token != right:
                if deterministic or expected.leads[at] > self._near:
                    raise Wrong(
                        f"{where}: token {at} of the answer is {token}, not {right}, which led by "
                        f"{expected.leads[at]:.1e} of the largest logit; cached: {last.usage}"
                    )
                told.near_ties += 1
                return

    def _left(self, engine: Engine) -> None:
        """Nothing may be left of the requests: no hold on a page, no slot."""
        core = engine.cache.core
        audit(core)
        if engine.broken or core.leases or core.copies.ops:
            raise Wrong(f"left behind: {engine.broken or (len(core.leases), len(core.copies.ops))}")
        lost = [room - len(free) for room, free in zip(core.slot_pools.capacity, core.slot_pools.free, strict=True)]
        if any(lost):
            raise Wrong(f"slots that did not come back: {lost}")

    # --- memory

    def _watch(self) -> None:
        now = time.monotonic()
        if not self.memory or now > self.memory[-1][0] + 1:
            self.memory.append((now, resident_bytes()))

    def growth(self) -> float:
        """Memory in the last quarter of the run over that in the second."""
        sizes = [size for _, size in self.memory]
        quarter = max(1, len(sizes) // 4)
        return median(sizes[-quarter:]) / median(sizes[quarter : 2 * quarter] or sizes)


def _admit(engine: Engine, admit: Callable[[], None]) -> None:
    """The law of admission holds after every turn's."""
    admit()
    if why := waits_in_vain(engine.scheduler):
        raise Wrong(f"a request waits in vain: {why}")


def _tell(news: "queue.SimpleQueue[tuple[int, float, OutputChunk]]", number: int, piece: OutputChunk) -> None:
    news.put((number, time.monotonic(), piece))


def digest(logits: Tensor) -> int:
    """A hash of every bit."""
    return xxhash.xxh3_64_intdigest(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def resident_bytes() -> int:
    """The memory that this process has now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(traffic: Traffic, seconds: float, lives: int) -> None:
    """Serve for some time in so many lives, by turns deterministic and batched. Raises Wrong."""
    kinds = ("deterministic", "batched")
    for life in range(lives):
        traffic.serve(kinds[life % 2], seconds / lives)
        if lives > 2:
            done = sum(told.requests for told in traffic.told.values())
            print(f"life {life + 1} of {lives}: {done:,} requests, {resident_bytes() >> 20} MiB", file=sys.stderr)


def figures(traffic: Traffic) -> dict[str, Any]:
    start = traffic.memory[0][0]
    return {
        "model": traffic.model.name,
        "working_set_tokens": traffic.working_set,
        "device_share": traffic.share,
        "engines": {kind: told.row() for kind, told in traffic.told.items()},
        "memory_growth": traffic.growth(),
        "memory": [(round(at - start, 1), size) for at, size in traffic.memory],
    }


def show(found: dict[str, Any]) -> None:
    table = Table(
        title=f"Every answer was right: {found['model']}, {found['working_set_tokens']:,} tokens talked about"
    )
    table.add_column("engine")
    rows = found["engines"]
    for name in rows:
        table.add_column(name, justify="right")
    table.add_row("requests", *(f"{row['requests']:,}" for row in rows.values()))
    table.add_row("given up", *(f"{row['given_up']:,}" for row in rows.values()))
    table.add_row("gave way to others", *(f"{row['preempted']:,}" for row in rows.values()))
    for tier in ("device", "host", "storage"):
        table.add_row(f"cached, {tier}", *(f"{row['cached_share'][tier]:.1%}" for row in rows.values()))
    table.add_row("ended in a near tie", *(f"{row['near_ties']:,}" for row in rows.values()))
    table.add_row("TTFT mean", *(f"{row['ttft_mean_ms']:.0f} ms" for row in rows.values()))
    table.add_row("TTFT p99", *(f"{row['ttft_p99_ms']:.0f} ms" for row in rows.values()))
    Console().print(table)
    print(f"memory, last quarter over second: {found['memory_growth']:.3f}")


def draw(found: dict[str, Any], path: Path) -> None:
    """Memory over time."""
    import matplotlib.pyplot as plt  # takes a second, for one picture

    figure, axes = plt.subplots(figsize=(8, 3))
    axes.plot([at / 60 for at, _ in found["memory"]], [size / (1 << 20) for _, size in found["memory"]])
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None), title="Memory under mixed traffic")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m kvarve.testing.traffic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="how long (default %(default)s)")
    parser.add_argument("--lives", type=int, default=12, help="servers one after the other (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="builtin:tiny-hybrid", help="default %(default)s")
    parser.add_argument("--share", type=float, default=0.05, help="of all tokens, on the device (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="small conversations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw memory over time there")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 1 or options.minutes <= 0 or options.lives < 1:
        parser.error("--share is above 0 and at most 1, --minutes above 0, --lives at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    size = SHORT if options.short else Size()
    bound_heaps()
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="kvarve-traffic-") as folder:
        try:
            model = load_model(options.model, page_tokens=size.page, chunk_tokens=size.chunk)
            traffic = Traffic(model, size, options.share, options.seed, Path(folder))
            for _ in track(
                traffic.prepare(), "without a cache", size.talks, console=Console(stderr=True), transient=True
            ):
                pass
            run(traffic, 60 * options.minutes, options.lives)
        except KvarveError as e:
            print(f"error: {e}", file=sys.stderr)
            return 1 if isinstance(e, Wrong) else 2
    found = figures(traffic)
    show(found)
    for path in (options.json, options.png):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    if options.png:
        draw(found, options.png)
    if 60 * options.minutes >= FLAT_FROM_S and found["memory_growth"] > FLAT:
        print("error: memory grew", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
