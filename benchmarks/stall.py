"""What does a hanging storage cost requests that do not need it, and requests that wait for it?

    .venv/bin/python benchmarks/stall.py [--quick] [--json FILE] [--dir FOLDER]

One request decodes all the time. Beside it come requests whose prompt only storage has, once a second: with a storage
that works, with one that hangs for 30 seconds (every call into it waits), and with one that hangs while nothing decodes
and the engine is idle. Spells of these kinds take turns. Ratios: `decode_stalled_over_healthy` tokens per second of the
one that decodes; `late_ms` by how much the longest wait for storage was longer than its deadline. A wait is from
`submit` until nothing more is expected from storage.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from common import arguments, machine, show, watched, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import Policies
from kvarve.pages.pools import Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import keeping_answers, load_model, quiet_libraries
from kvarve.reference.engine.requests import OutputChunk, Request, Sampling
from kvarve.storage import FileStorage
from kvarve.testing import FaultyStorage

MIB = 1 << 20
LONG_S = 120.0


@dataclass(frozen=True)
class Size:
    spell_s: float = 30.0
    spells: int = 2  # of each kind
    prompt: int = 1024
    patience_s: float = 0.5


QUICK = Size(spell_s=3.0, spells=1)
HEALTHY, STALLED, IDLE = KINDS = ("healthy", "stalled", "stalled, idle")


class Waits:
    """A cache that notes how long each request waited for storage beyond its deadline."""

    def __init__(self, cache: PrefixCache) -> None:
        self.late_s: list[float] = []
        self._waiting: dict[Lease, float] = {}
        self._cache, self._step, self._open = cache, cache.step, cache.open
        cache.step, cache.open = self.step, self.open  # type: ignore[method-assign]

    def open(self, *args: object, **words: object) -> Lease:
        lease = self._open(*args, **words)  # type: ignore[arg-type]
        if lease.phase is Phase.PROBING:
            self._waiting[lease] = lease.deadline
        return lease

    def step(self, *words: object) -> object:
        called = self._step(*words)  # type: ignore[arg-type]
        now = time.monotonic()
        for lease, deadline in [*self._waiting.items()]:
            if lease.phase not in (Phase.PROBING, Phase.FETCHING):
                self.late_s.append(now - deadline)
                del self._waiting[lease]
        return called


class Spell:
    """Some seconds of one request that decodes, unless it is idle, and of others whose pages only storage has."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], seconds: float, idle: bool) -> None:
        self.came: list[float] = []
        self._engine, self._end = engine, time.perf_counter() + seconds
        self._over = threading.Event()
        talk = Request(prompts[0][:64], Sampling(1 << 14, ignore_eos=True), deliver=self._take)
        if not idle:
            engine.submit(talk)
        others = []
        for number in range(1, int(seconds)):
            others.append(engine.submit(Request(prompts[number % len(prompts)], Sampling(1, ignore_eos=True))))
            self._over.wait(1.0)
        assert idle or self._over.wait(LONG_S)
        engine.abort(talk)
        for other in others:
            _, _, last = other.result(LONG_S)
            assert not last.error, last.error

    def _take(self, piece: OutputChunk) -> None:
        now = time.perf_counter()
        self.came.append(now)
        if now > self._end:
            self._over.set()

    @property
    def tokens_per_s(self) -> float:
        """By the median gap between two tokens: the chunks of the others' prompts are the same in both kinds."""
        if not self.came:
            return 0.0
        return 1 / median(after - before for before, after in zip(self.came, self.came[1:], strict=False))


def measure(size: Size, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second of every spell, and the lateness of every wait, by kind of spell."""
    model = keeping_answers(load_model("builtin:tiny-hybrid"))
    store = FileStorage(folder, 1 << 30, model.identity.fingerprint(), str(model.identity))
    faulty = FaultyStorage(store, stall_limit_s=LONG_S)
    settings = CacheConfig(64 * MIB, 64 * MIB, policies=Policies(storage_wait=f"{size.patience_s}s"))
    cache = PrefixCache(model.identity, settings, storage=faulty)
    waits, engine = Waits(cache), Engine(model, cache).start()
    dice = torch.Generator().manual_seed(7)
    prompts = [torch.randint(256, (size.prompt,), generator=dice).tolist() for _ in range(8)]
    for prompt in prompts:
        engine.submit(Request(prompt, Sampling(1, ignore_eos=True))).result(LONG_S)
    speeds, late = {kind: list[float]() for kind in KINDS}, {kind: list[float]() for kind in KINDS}
    for number in watched(range(len(KINDS) * size.spells), "spell", len(KINDS) * size.spells):
        kind = KINDS[number % len(KINDS)]
        engine.settle(LONG_S)
        engine.flush([Tier.DEVICE, Tier.HOST], LONG_S)
        waits.late_s.clear()
        if kind != HEALTHY:
            faulty.stall()
        speeds[kind].append(Spell(engine, prompts, size.spell_s, kind == IDLE).tokens_per_s)
        late[kind] += waits.late_s
        faulty.release()
    engine.shutdown()
    return speeds, late


def main() -> int:
    parser = arguments("What does a storage that hangs cost?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where files are written; a temporary folder")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    quiet_libraries()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as name:
        speeds, late = measure(size, Path(name) / "store")
    rows = [
        {
            "storage": kind,
            "decoded_tokens_per_s": max(speeds[kind]),
            "waits": len(late[kind]),
            "latest_ms": 1000 * max(late[kind]),
        }
        for kind in speeds
    ]
    ratios = {
        "decode_stalled_over_healthy": max(speeds[STALLED]) / max(speeds[HEALTHY]),
        "late_ms": 1000 * max(late[STALLED] + late[IDLE]),
    }
    show(f"Spells of {size.spell_s:.0f} s, patience {size.patience_s} s", rows)
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
