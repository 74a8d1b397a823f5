"""Mixed traffic for the real engine on a device that holds little of it; answers are compared and memory is watched.

    python -m tests.sim.traffic --minutes 120 [--seed 7] [--model builtin:tiny-hybrid] [--json FILE] [--png FILE]

Many concurrent conversations with a few system prompts repeat. Some requests are aborted, some do not read the cache,
some have a salt; tiers are flushed, and the server is restarted with only its storage. Reference answers are computed
first, without a cache. A deterministic engine has to reproduce every logit to the last bit; a batching one has to
choose the same tokens, except where the two best logits are equal up to rounding.
"""

import argparse
import json
import os
import queue
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

from kvarve.cache.config import CacheConfig, room_for
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.audit import audit
from kvarve.core.observe.reasons import Reason
from kvarve.errors import KvarveError
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.reference.engine.batch import ROUNDING
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, forward, keeping_answers, load_model, quiet_libraries
from kvarve.reference.engine.requests import Finish, OutputChunk, Request, Sampling
from kvarve.reference.engine.workspace import Workspace
from kvarve.system.heap import bound_heaps
from tests.sim.law import waits_in_vain

AT_ONCE = 16
STUCK_S = 120.0  # without a token from any request: a deadlock
GIVEN_UP, UNREAD, SALTED, EMPTIED = 0.06, 0.03, 0.1, 0.01  # shares of the requests
FLAT_FROM_S = 600.0  # a shorter run is not judged by its memory
FLAT = 1.1  # the most by which memory in the last quarter of a run may exceed that in the second


@dataclass(frozen=True)
class Size:
    """Sizes of the conversations, in tokens."""

    talks: int = 64
    turns: int = 4
    system: int = 300
    context: int = 900
    more: int = 300  # added by each turn
    answer: int = 24
    page: int = 64
    chunk: int = 256


SHORT = Size(talks=32, turns=3, system=48, context=96, more=60, answer=8, page=16, chunk=64)


class Wrong(KvarveError):
    """The engine violated what this run checks."""


@dataclass(frozen=True)
class Answer:
    """A reference answer computed without a cache, and by how much each token led the next best."""

    tokens: list[int]
    leads: list[float]  # as a share of the largest logit
    logits: list[int]  # a hash of all of them, for each token


@dataclass(frozen=True)
class ActiveRequest:
    """A request in flight."""

    request: Request
    talk: int
    turn: int
    abort_after: int | None  # tokens
    tokens: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)


@dataclass
class Results:
    """Results of the requests to one kind of engine."""

    requests: int = 0
    given_up: int = 0
    near_ties: int = 0
    prompt_tokens: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)  # of the prompts' tokens
    preempted: int = 0
    servers: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        ttft = sorted(self.ttft_s) or [0.0]
        whole = max(1, self.prompt_tokens)
        return {name: value for name, value in vars(self).items() if name not in ("reasons", "ttft_s")} | {
            "reasons": {reason.value: self.reasons[reason] / whole for reason in Reason},
            "ttft_mean_ms": 1000 * fmean(ttft),
            "ttft_p99_ms": 1000 * ttft[int(0.99 * (len(ttft) - 1))],
        }


class Traffic:
    """The conversations, their reference answers, and the results so far."""

    def __init__(self, model: LoadedModel, size: Size, share: float, seed: int, folder: Path) -> None:
        """`share`: of all tokens of the conversations, the part that fits on the device."""
        self.model, self.size, self.share, self.folder = model, size, share, folder
        self.dice = random.Random(seed)
        self.answers: dict[tuple[int, int], Answer] = {}
        self.prompts: dict[tuple[int, int], list[int]] = {}
        self.results = {"deterministic": Results(), "batched": Results()}
        self.memory: list[tuple[float, int]] = []  # seconds, bytes
        self.working_set = 0  # tokens
        self._near = ROUNDING.get(model.model.dtype, 0.1)
        self._text = model.tokenizer.encode("\n".join(topics.values()), add_special_tokens=False, verbose=False)

    def prepare(self) -> Iterator[int]:
        """Compute the reference answers; yields after each conversation."""
        size = self.size
        systems = [self._tokens(size.system) for _ in range(4)]
        self.working_set = 4 * size.system
        for talk in range(size.talks):
            prompt = systems[talk % 4] + self._tokens(size.context)
            for turn in range(size.turns):
                prompt = prompt + self._tokens(size.more)
                self.prompts[talk, turn] = prompt
                self.answers[talk, turn] = answer = self._uncached(prompt)
                prompt = prompt + answer.tokens
            self.working_set += len(prompt) - size.system
            yield talk

    def _tokens(self, count: int) -> list[int]:
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
        """Start an engine, keep it busy for `seconds` and at least `least` requests, and check that nothing leaks."""
        deterministic, results = kind == "deterministic", self.results[kind]
        model = self.model if deterministic else keeping_answers(self.model)
        engine = Engine(
            model, PrefixCache(model.identity, self._config(kind)), max_running=AT_ONCE, deterministic=deterministic
        )
        engine.scheduler.admit = partial(_admit, engine, engine.scheduler.admit)  # type: ignore[method-assign]
        engine.start()
        try:
            self._keep_busy(engine, results, deterministic, time.monotonic() + seconds, least)
            results.preempted += engine.counts.preempted
            results.servers += 1
            engine.settle(STUCK_S)
            engine.flush(MEMORY_TIERS, STUCK_S)
        finally:
            engine.shutdown(STUCK_S)
        self._check_leaks(engine)

    def _keep_busy(self, engine: Engine, results: Results, deterministic: bool, end: float, least: int) -> None:
        """Keep an engine busy until `end` and for at least `least` requests, then wait for the last answers."""
        news: queue.SimpleQueue[tuple[int, float, OutputChunk]] = queue.SimpleQueue()
        in_flight: dict[int, ActiveRequest] = {}
        while True:
            while len(in_flight) < AT_ONCE and (least > 0 or time.monotonic() < end):
                active, least = self._ask(news), least - 1
                in_flight[active.request.number] = active
                engine.submit(active.request)
                if active.abort_after == 0:
                    engine.abort(active.request)
            if not in_flight:
                return
            try:
                number, when, piece = news.get(timeout=STUCK_S)
            except queue.Empty:
                raise Wrong(f"no request has had a token for {STUCK_S:.0f} s, {len(in_flight)} wait") from None
            active = in_flight[number]
            if not active.tokens and piece.tokens:
                results.ttft_s.append(when - active.request.submitted_s)
            active.tokens.extend(piece.tokens)
            if piece.finish is not None:
                self._check_answer(in_flight.pop(number), piece, results, deterministic)
                self._watch()
            elif active.abort_after == len(active.tokens):
                engine.abort(active.request)
            if self.dice.random() < EMPTIED / self.size.answer:
                engine.flush(self.dice.choice(([Tier.DEVICE], list(MEMORY_TIERS))))

    def _config(self, kind: str) -> CacheConfig:
        """The device holds its share of all tokens, the host four times as much, storage three quarters of all."""
        layout, size = self.model.layout, self.size
        shape = (layout.pools, size.page, size.chunk)
        every = size.context

        def room(share: float, records: bool) -> int:
            return room_for(int(share * self.working_set), *shape, records=records, per_snapshot=every)

        return CacheConfig(
            room(self.share, False),
            room(4 * self.share, True),
            f"file://{self.folder}/{kind}?capacity={room(0.75, True)}",
        )

    def _ask(self, news: "queue.SimpleQueue[tuple[int, float, OutputChunk]]") -> ActiveRequest:
        dice, most = self.dice, self.size.answer
        talk, turn = dice.randrange(self.size.talks), dice.randrange(self.size.turns)
        request = Request(
            self.prompts[talk, turn],
            Sampling(dice.randint(1, most), ignore_eos=True),
            salt="somebody else's" if dice.random() < SALTED else "",
            read_cache=dice.random() >= UNREAD,
        )
        request.deliver = partial(_report, news, request.number)
        aborts = dice.random() < GIVEN_UP
        active = ActiveRequest(request, talk, turn, dice.randrange(most) if aborts else None)

        def watch(at: int, logits: Tensor) -> None:
            if at == len(request.prompt) + len(active.logits):
                active.logits.append(digest(logits))

        request.watch = watch
        return active

    def _check_answer(self, active: ActiveRequest, last: OutputChunk, results: Results, deterministic: bool) -> None:
        expected, tokens = self.answers[active.talk, active.turn], active.tokens
        where = f"turn {active.turn} of conversation {active.talk}"
        if last.finish is Finish.ERROR:
            raise Wrong(f"{where}: {last.error}")
        assert last.usage is not None
        results.requests += 1
        results.given_up += last.finish is Finish.ABORT
        results.prompt_tokens += last.usage.prompt
        results.reasons.update(last.usage.reasons)
        if sum(last.usage.reasons.values()) != len(active.request.prompt):
            raise Wrong(f"{where}: the reasons do not sum to {len(active.request.prompt)} tokens: {last.usage}")
        if last.finish is Finish.ABORT and active.abort_after is None:
            raise Wrong(f"{where}: aborted without a call to abort")
        if last.finish is Finish.LENGTH and len(tokens) != active.request.sampling.max_tokens:
            raise Wrong(f"{where}: {len(tokens)} tokens instead of {active.request.sampling.max_tokens}")
        if deterministic and (odd := [*map(int.__ne__, active.logits, expected.logits)]) and any(odd):
            raise Wrong(f"{where}: the logits of token {odd.index(True)} of the answer differ; cached: {last.usage}")
        for at, (token, right) in enumerate(zip(tokens, expected.tokens, strict=False)):
            if token != right:
                if deterministic or expected.leads[at] > self._near:
                    raise Wrong(
                        f"{where}: token {at} of the answer is {token}, not {right}, which led by "
                        f"{expected.leads[at]:.1e} of the largest logit; cached: {last.usage}"
                    )
                results.near_ties += 1
                return

    def _check_leaks(self, engine: Engine) -> None:
        """No request may leave a pin or a slot behind."""
        core = engine.cache.scheduler.core
        audit(core)
        if engine.broken or core.leases or core.copies.ops:
            raise Wrong(f"left behind: {engine.broken or (len(core.leases), len(core.copies.ops))}")
        lost = [core.slot_pools.committed(place) - len(free) for place, free in enumerate(core.slot_pools.free)]
        if any(lost):
            raise Wrong(f"slots that did not come back: {lost}")

    # --- memory

    def _watch(self) -> None:
        now = time.monotonic()
        if not self.memory or now > self.memory[-1][0] + 1:
            self.memory.append((now, resident_bytes()))

    def growth(self) -> float:
        """Median memory in the last quarter of the run divided by that in the second."""
        sizes = [size for _, size in self.memory]
        quarter = max(1, len(sizes) // 4)
        return median(sizes[-quarter:]) / median(sizes[quarter : 2 * quarter] or sizes)


def _admit(engine: Engine, admit: Callable[[], None]) -> None:
    """Check the law of admission after every admission."""
    admit()
    if why := waits_in_vain(engine.scheduler, engine.cache.scheduler.core):
        raise Wrong(f"a request that could be admitted waits: {why}")


def _report(news: "queue.SimpleQueue[tuple[int, float, OutputChunk]]", number: int, piece: OutputChunk) -> None:
    news.put((number, time.monotonic(), piece))


def digest(logits: Tensor) -> int:
    """A hash of every bit."""
    return xxhash.xxh3_64_intdigest(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def resident_bytes() -> int:
    """The resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(traffic: Traffic, seconds: float, lives: int) -> None:
    """Serve for `seconds` with `lives` servers in turn, alternately deterministic and batched. Raises Wrong."""
    kinds = ("deterministic", "batched")
    for life in range(lives):
        traffic.serve(kinds[life % 2], seconds / lives)
        if lives > 2:
            done = sum(results.requests for results in traffic.results.values())
            print(f"life {life + 1} of {lives}: {done:,} requests, {resident_bytes() >> 20} MiB", file=sys.stderr)


def figures(traffic: Traffic) -> dict[str, Any]:
    start = traffic.memory[0][0]
    return {
        "model": traffic.model.name,
        "working_set_tokens": traffic.working_set,
        "device_share": traffic.share,
        "engines": {kind: results.row() for kind, results in traffic.results.items()},
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
    table.add_row("preempted", *(f"{row['preempted']:,}" for row in rows.values()))
    for reason in Reason:
        name = reason.value.replace("_", " ")
        table.add_row(name, *(f"{row['reasons'][reason.value]:.1%}" for row in rows.values()))
    table.add_row("ended in a near tie", *(f"{row['near_ties']:,}" for row in rows.values()))
    table.add_row("TTFT mean", *(f"{row['ttft_mean_ms']:.0f} ms" for row in rows.values()))
    table.add_row("TTFT p99", *(f"{row['ttft_p99_ms']:.0f} ms" for row in rows.values()))
    Console().print(table)
    print(f"memory, last quarter over second: {found['memory_growth']:.3f}")


def draw(found: dict[str, Any], path: Path) -> None:
    """Memory over time."""
    import matplotlib.pyplot as plt  # slow to import

    figure, axes = plt.subplots(figsize=(8, 3))
    axes.plot([at / 60 for at, _ in found["memory"]], [size / (1 << 20) for _, size in found["memory"]])
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None), title="Memory under mixed traffic")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.sim.traffic", description=(__doc__ or "").split("\n")[0])
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
