"""Pages of every kind of pool, as records in host memory: what a store on 3FS is filled with. No tests here."""

from collections.abc import Sequence
from functools import cache as cached

import numpy as np

from kvarve.engine.state import StateLayout
from kvarve.memory.arenas import HostArena
from kvarve.model import PoolSpec
from kvarve.regions import shared_region
from kvarve.testing.models import tiny_grid, tiny_model

# By what is special about it: attention with index keys, a window, a recurrent state, and all pools of DeepSeek-V4.
KINDS = {"index keys": "deepseek_v32", "window": "gpt_oss", "state": "qwen3_5", "DeepSeek-V4": "deepseek_v4"}
PAGES = 6  # of each pool


@cached
def pools(kind: str) -> tuple[PoolSpec, ...]:
    family = KINDS[kind]
    return StateLayout.of(tiny_model(family), *tiny_grid(family)).pools


class Pages:
    """Two arenas for each pool: sealed pages, and room to read them into. `shared`: in memory with a name."""

    def __init__(self, kind: str, *, shared: bool) -> None:
        allocate = shared_region if shared else lambda _: None
        self.keys = [bytes([i]) * 32 for i in range(PAGES)]
        self.names: list[str] = []
        self.sources: list[memoryview] = []
        self.targets: list[memoryview] = []
        self.arenas: list[HostArena] = []
        for number, pool in enumerate(pools(kind)):
            source, target = (HostArena(pool, PAGES, b"n" * 32, allocate=allocate) for _ in range(2))
            noise = np.random.default_rng(number)
            for slot, key in enumerate(self.keys):
                source.record(slot)[:] = noise.bytes(source.stride)
                source.record(slot)[-64:] = bytes(64)
                source.seal(slot, key)
                self.names.append(f"tenant-{key.hex()[:8]}.{pool.name}")
                self.sources.append(source.record(slot))
                self.targets.append(target.record(slot))
            self.arenas += [source, target]
        self.wanted = [bytes(view) for view in self.sources]
        self.blank()

    def blank(self) -> None:
        for view in self.targets:
            view[:] = b"." * view.nbytes

    def scribble(self) -> None:
        """The memory of the sources is another's now."""
        for view in self.sources:
            view[:] = b"?" * view.nbytes

    def restore(self) -> None:
        for view, data in zip(self.sources, self.wanted, strict=True):
            view[:] = data

    def right(self, sizes: Sequence[int | None]) -> int:
        """How many pages were read; each of them is, bit for bit, what was written."""
        for size, view, data in zip(sizes, self.targets, self.wanted, strict=True):
            assert size is None or (size == len(data) and bytes(view) == data), "wrong bytes"
        return sum(size is not None for size in sizes)
