"""A long random life of SGLang's tree with kvarve's linker: no wrong byte, and nothing is left behind."""

import random
from typing import Any

import pytest
from linker_bed import KINDS, LATENT, Engine, Failed, MakeEngine, prompt
from sglang_engines import long

from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage, Rule

PAGE = 16
RULES = [Rule("raise", probability=0.02)] + [Rule(it, probability=0.02) for it in ("lose", "flip", "truncate")]


class Life:
    """Requests that come, wait, are loaded together, cancelled and served, while memory and storage come and go."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.seen: list[list[int]] = []  # prompts so far
        self.waiting: list[tuple[Any, list[int]]] = []
        self.served = self.restored = self.failed = 0

    def tokens(self) -> list[int]:
        """A new prompt, a known one, one that goes on from a known one, or its beginning."""
        how, pages = self.random.random(), self.random.randint(1, 6)
        if not self.seen or how < 0.2:
            found = prompt(pages, PAGE, self.random.randrange(1, 1000))
        else:
            known = self.random.choice(self.seen[-20:])
            whole = len(known) // PAGE
            found = known if how < 0.6 else known[: self.random.randint(1, whole) * PAGE]
            if how > 0.8:
                found = prompt(min(12, len(found) // PAGE + pages), PAGE, self.random.randrange(1, 1000), after=found)
        self.seen.append(found)
        return found

    def step(self) -> None:
        engine, pick = self.engine, self.random.random()
        if pick < 0.35:
            self.serve(*self.arrive(), lambda: None)
        elif pick < 0.45 and len(self.waiting) < 4:
            self.waiting.append(self.arrive())
        elif pick < 0.65 and self.waiting:
            self.serve(*self.waiting.pop(self.random.randrange(len(self.waiting))), self.meanwhile)
        elif pick < 0.70 and self.waiting:
            engine.match(*self.random.choice(self.waiting))
        elif pick < 0.75 and self.waiting:
            engine.end(self.waiting.pop()[0])
        elif pick < 0.80 and self.waiting:
            self.cancel(*self.waiting.pop())
        else:
            self.meanwhile()

    def arrive(self) -> tuple[Any, list[int]]:
        tokens = self.tokens()
        return self.engine.arrive(tokens), tokens

    def serve(self, req: Any, tokens: list[int], between: Any) -> None:
        self.engine.wait_for_storage(req)
        try:
            self.restored += self.engine.run(req, self.engine.match(req, tokens), tokens, between).restored
            self.served += 1
        except Failed:
            self.failed += 1

    def cancel(self, req: Any, tokens: list[int]) -> None:
        match = self.engine.match(req, tokens)
        self.engine.load(req, match)
        self.engine.end_unused(req, self.engine.cache.prefix_device_indices(req)[match.device_prefix_len :])

    def meanwhile(self) -> None:
        engine, pick = self.engine, self.random.random()
        if pick < 0.3:
            engine.evict()
        elif pick < 0.5:
            engine.drop_host_unheld()
        elif pick < 0.55:
            self.damage()
        else:
            engine.cache.check_hicache_events()

    def damage(self) -> None:
        """A byte of some page in host memory changes. No check sees one that changes between it and the copy."""
        if self.engine.linker.scheduler.core.copies.ops:
            return
        arena = self.random.choice(self.engine.linker.worker.host)
        arena.record(self.random.randrange(arena.slots))[-1] ^= 1

    def finish(self) -> None:
        for req, _ in self.waiting:
            self.engine.end(req)
        self.waiting.clear()
        self.engine.audit()


MIXES = [kind for kind in KINDS if kind not in LATENT]
LIVES = [(MIXES[-1], "rust", 2000)] + long(*[(kind, "python", 2000) for kind in MIXES])
VERY_LONG = [pytest.mark.long, pytest.mark.timeout(3600)]
LONG_LIVES = [pytest.param(kind, "rust", 100_000, marks=VERY_LONG) for kind in MIXES]


@pytest.mark.parametrize(("kind", "core", "steps"), [*LIVES, *LONG_LIVES])
def test_no_life_reads_a_wrong_byte_or_leaves_a_lock(make_engine: MakeEngine, kind: str, core: str, steps: int) -> None:
    live(make_engine(kind, PAGE, core=core, host_memory="1MiB"), steps, random.randrange(1 << 32))


def live(engine: Engine, steps: int, seed: int) -> None:
    print("seed", seed)
    engine.attach(FaultyStorage(MemoryStorage(1 << 22, bytes(32), ""), RULES, seed=seed))
    life = Life(engine, seed)
    for number in range(steps):
        life.step()
        if number % 100 == 99:
            engine.linker.scheduler.audit()
    life.finish()
    print(life.served, "served", life.restored, "pages restored", life.failed, "failed", engine.linker.planner.counts)
    assert life.served and life.restored
