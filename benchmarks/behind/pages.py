"""The pages that benchmarks of storages move: a batch of sealed records in page-aligned memory, as a host has them."""

import numpy as np

from kvarve.records.record import HEADER_BYTES, Stamp

MIB = 1 << 20
BATCH = 32


class Pages:
    """`memory`: of `BATCH` pages of 1 MiB."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.views = [memory[at : at + MIB] for at in range(0, BATCH * MIB, MIB)]
        self.stamp = Stamp(b"n" * 32, "kv", MIB - HEADER_BYTES)
        self.keys = [number.to_bytes(32, "little") for number in range(BATCH)]
        noise = np.random.default_rng(7).integers(0, 256, MIB, np.uint8).data
        for view, key in zip(self.views, self.keys, strict=True):
            view[:] = noise
            self.stamp.seal(view, key)

    def check(self) -> None:
        """Checksums, as a lane makes them before a write and verifies them after a read."""
        for view, key in zip(self.views, self.keys, strict=True):
            assert self.stamp.intact(view, key), "these are not the bytes that were written"

    def blank(self) -> None:
        for view in self.views:
            view[:4096] = bytes(4096)
