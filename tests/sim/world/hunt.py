"""Many short lives, sequential or in several processes, until one fails or enough steps are done."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice

from tests.sim.world.life import Life, born, live
from tests.sim.world.shrink import Trouble, bounded


@dataclass
class Story:
    """The result of one life; it holds the life only if that failed."""

    steps: int
    seen: Counter[str]
    broken: tuple[Life, Trouble] | None = None


@dataclass
class Tally:
    """The results of all lives so far."""

    lives: int = 0
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    def add(self, story: Story) -> None:
        self.lives += 1
        self.steps += story.steps
        self.seen.update(story.seen)
        if story.broken:
            self.troubles[story.broken[1].place] += 1

    def line(self) -> str:
        rate = self.steps / max(1e-9, time.monotonic() - self.began)
        broke = f" · {sum(self.troubles.values())} broke" if self.troubles else ""
        return f"{self.steps:,} steps · {self.lives:,} lives · {rate:,.0f} steps/s{broke}"


def tell(seed: int, kind: str = "core") -> Story:
    """Run one life of a kind (`born`)."""
    life, dice = born(seed, kind)
    try:
        with bounded():
            world = live(life, dice)
    except Exception as error:  # noqa: BLE001 - any exception is a failure to report
        return Story(len(life.actions), Counter(), (life, Trouble.of(error)))
    return Story(world.steps, world.seen + world.happened())


def hunt(seeds: Iterator[int], jobs: int = 1, kind: str = "core") -> Iterator[Story]:
    """Run lives with these seeds; yields each as soon as it has ended."""
    if jobs == 1:
        yield from (tell(seed, kind) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        coming = {pool.submit(tell, seed, kind) for seed in islice(seeds, 4 * jobs)}
        try:
            while coming:
                here, coming = wait(coming, return_when=FIRST_COMPLETED)
                coming |= {pool.submit(tell, seed, kind) for seed in islice(seeds, len(here))}
                yield from (each.result() for each in here)
        finally:
            pool.shutdown(cancel_futures=True)
