"""An engine's host memory over a store of chunks, with a storage that fails as told; no test stands here."""

import hashlib
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from disks import WithoutSync
from kvarve.connectors.vllm.chunks import ChunkStore, Found, JobEnded, namespace_of
from kvarve.storage import Breaker, FileStorage, Storage
from kvarve.storage.file.disk import BLOCK_BYTES, Disk
from kvarve.testing import FaultyStorage

LONG_S = 20.0  # nothing here waits so long unless something is broken
DEADLINE_S = 30.0  # on the clock of the test, which moves when it is told to
ROWS, ROW_BYTES = 24, 4 * BLOCK_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class StallingDisk(WithoutSync):
    """A disk whose writes of rows wait while the test says so: the bytes leave the caller's memory afterwards."""

    def __init__(self) -> None:
        self.running, self.arrived = threading.Event(), threading.Semaphore(0)
        self.running.set()

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        if sum(memoryview(piece).nbytes for piece in data) >= ROW_BYTES and not self.running.is_set():
            self.arrived.release()
            assert self.running.wait(LONG_S)
        return super().write(file, data, at)


def key(number: int, group: int = 0) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


class Bed:
    """The rows, and the store of one engine; `row n` holds the bytes of `page(n)` after `fill`."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "a",
        capacity_bytes: int = 8 << 20,
        rows: int = ROWS,
        disk: Disk | None = None,
    ) -> None:
        self.clock = Clock()
        self.namespace = namespace_of({"model": model})
        self.files = FileStorage(folder, capacity_bytes, self.namespace, model, disk=disk or WithoutSync())
        self.sick = FaultyStorage(self.files, stall_limit_s=LONG_S)
        below: Storage = self.sick if disk is None else self.files  # the first copies pieces into one buffer
        self.storage = Breaker(below, deadline_s=DEADLINE_S, clock=self.clock, close_s=LONG_S)
        self.rows = np.frombuffer(mmap.mmap(-1, rows * ROW_BYTES), np.uint8).reshape(rows, ROW_BYTES)
        self.chunks = ChunkStore(self.storage, self.rows, self.namespace, deadline_s=DEADLINE_S, clock=self.clock)
        self.jobs = 0

    def fill(self, row: int, number: int) -> None:
        self.rows[row] = page(number)

    def store(self, *numbers: int, group: int = 0) -> JobEnded:
        """Fill rows with these pages and store them, to the end."""
        for row, number in enumerate(numbers):
            self.fill(row, number)
        return self.wait_for(self.send_store(*numbers, group=group))

    def send_store(self, *numbers: int, group: int = 0) -> int:
        self.jobs += 1
        self.chunks.store(self.jobs, [key(number, group) for number in numbers], range(len(numbers)))
        return self.jobs

    def load(self, *numbers: int, group: int = 0) -> JobEnded:
        """Load these pages into rows 0, 1, ..., which are blank before, to the end."""
        return self.wait_for(self.send_load(*numbers, group=group))

    def send_load(self, *numbers: int, group: int = 0) -> int:
        self.rows[:] = 0
        self.jobs += 1
        self.chunks.load(self.jobs, [key(number, group) for number in numbers], range(len(numbers)))
        return self.jobs

    def wait_for(self, job: int) -> JobEnded:
        while True:
            for ended in self.chunks.ended():
                assert ended.job == job
                return ended
            assert self.chunks.wait(LONG_S), f"job {job} does not end"

    def lookup(self, number: int, asker: str = "r", group: int = 0) -> Found:
        """The answer, once there is one."""
        while (found := self.chunks.lookup(key(number, group), asker)) is Found.LATER:
            self.chunks.flush()
            assert not self.chunks.ended()
            assert self.chunks.lookup(key(number, group), asker) is not Found.LATER or self.chunks.wait(LONG_S)
        return found

    def holds(self, row: int, number: int) -> bool:
        return bytes(self.rows[row]) == bytes(page(number))

    def name(self, number: int, group: int = 0) -> str:
        return self.chunks.name(key(number, group))

    def close(self) -> None:
        self.sick.release()
        self.chunks.close(LONG_S)


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(1, 256, ROW_BYTES, np.uint8)
