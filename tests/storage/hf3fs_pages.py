"""Pages of every kind of pool, as records in host memory: what a store on 3FS is filled with. No tests here."""

from collections.abc import Sequence

import numpy as np

from kvarve.memory.arenas import HostArena
from kvarve.pages.pools import BufferSpec, PoolSpec
from kvarve.system.regions import shared_region

POOLS = (
    PoolSpec("attention", (BufferSpec("k", (64, 40), "float32"), BufferSpec("v", (64, 80), "bfloat16")), None),
    PoolSpec("window", (BufferSpec("w", (64, 9), "float16"),), 128),
    PoolSpec("state", (BufferSpec("conv", (7, 900), "float32"), BufferSpec("ids", (3,), "int64")), 1, in_place=True),
)
PAGES = 6  # of each pool


class Pages:
    """Two arenas for each pool: sealed pages, and room to read them into. `shared`: in memory with a name."""

    def __init__(self, *, shared: bool) -> None:
        allocate = shared_region if shared else lambda _: None
        self.keys = [bytes([i]) * 32 for i in range(PAGES)]
        self.names: list[str] = []
        self.sources: list[memoryview] = []
        self.targets: list[memoryview] = []
        self.arenas: list[HostArena] = []
        for number, pool in enumerate(POOLS):
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
