"""How near to memcpy do restores come?

    .venv/bin/python benchmarks/restore.py [--quick] [--json FILE] [--dir FOLDER]

A real `PrefixCache` with an engine that only pretends to compute: it fills pages of 1 MiB of KV and a recurrent state
of 4 MiB per prompt. Each edge is timed alone: backups to the host while storage is held back, then the writes to files,
then loads from the host, then reads from files. The limits of the same run are one thread's `numpy.copyto` of
pages of the same size, and `pwrite` and `preadv` of records of the same size in one preallocated file, one after the
other and past the system's page cache, as the file store does it (with several threads).

Each figure is the best of several rounds, because other work on a machine only ever makes a round slower.
"""

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import arguments, machine, show, watched, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease, Phase
from kvarve.core.policies import Policies
from kvarve.pages.pools import Tier
from kvarve.records.record import record_bytes
from kvarve.storage import FileStorage, Storage
from kvarve.storage.base import Around
from pretend import IDENTITY, KV, PAGE_TOKENS, PATIENCE_S, STATE, until

MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """The amount moved in a round: each prompt has its pages and one state."""

    prompts: int = 4
    pages: int = 60  # of each prompt; all of them fit within what backups may have in flight at once
    rounds: int = 5

    @property
    def payloads(self) -> list[int]:
        return ([KV.payload_bytes] * self.pages + [STATE.payload_bytes]) * self.prompts

    @property
    def payload_bytes(self) -> int:
        return sum(self.payloads)


QUICK = Size(prompts=2, pages=12, rounds=2)


class Gate(Around):
    """A storage whose writes wait until the gate is open, so that the steps before them can be timed alone."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._open = threading.Event()
        self._names: list[str] = []

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def clear(self) -> None:
        """Delete everything that was put."""
        self.inner.delete(self._names)
        self._names.clear()

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self._open.wait(PATIENCE_S)
        self._names.extend(names)
        return self.inner.put(names, data)


class Bench:
    """A cache with a fake engine."""

    def __init__(self, size: Size, storage: Gate | None, verify_host: bool) -> None:
        self.size, self.storage = size, storage
        room = 2 * size.payload_bytes
        settings = CacheConfig(room, room, policies=Policies(storage_wait="all", verify_host=verify_host))
        self.cache = PrefixCache(IDENTITY, settings, storage=storage)
        self._round = 0

    def round(self) -> dict[str, float]:
        """Seconds of every edge, for new prompts."""
        self._round += 1
        cache, seconds = self.cache, dict[str, float]()
        prompts = [self._prompt(number) for number in range(self.size.prompts)]
        leases = [self._filled(prompt) for prompt in prompts]
        if self.storage is not None:
            self.storage.shut()
        done = cache.stats()["backed_up"] + len(self.size.payloads)

        def back_up() -> None:
            for lease in leases:
                cache.publish(lease, self.size.pages)
            until(self.cache, lambda: cache.stats()["backed_up"] >= done)

        seconds["backup"] = timed(back_up)
        if self.storage is not None:
            self.storage.open()
            seconds["store"] = timed(lambda: until(self.cache, cache.scheduler.core.idle))
        for lease in leases:
            cache.close(lease)
        cache.flush([Tier.DEVICE])
        seconds["load"] = self._resume(prompts)
        if self.storage is not None:
            cache.flush()
            seconds["fetch"] = sum(self._fetched(prompt) for prompt in prompts)
            cache.flush()
            seconds["restore"] = self._resume(prompts)
            self.storage.clear()
        cache.flush()
        return seconds

    def _prompt(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        tokens = self.size.pages * PAGE_TOKENS + 1
        return np.arange(tokens) + (self._round * self.size.prompts + number) * tokens

    def _filled(self, prompt: np.ndarray[Any, np.dtype[np.int64]]) -> Lease:
        """A request whose pages are computed, and not yet published."""
        lease = self.cache.open(prompt)
        self._claimed(lease)
        fresh = self.cache.grow(lease, self.size.pages)
        assert [len(slots) for slots in fresh.values()] == [self.size.pages, 1], "there are slots for everything"
        for name, slots in fresh.items():
            for buffer in self.cache.worker.arena(name).values():
                for position, slot in slots.items():
                    buffer[slot].fill_(self._value(prompt, position))
        return lease

    def _resume(self, prompts: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> float:
        """Seconds until all of the prompts, opened at once, have their pages on the device."""
        start = time.perf_counter()
        leases = [self.cache.open(prompt) for prompt in prompts]
        for lease in leases:
            self._claimed(lease)
        seconds = time.perf_counter() - start
        for lease, prompt in zip(leases, prompts, strict=True):
            self._finish(lease, prompt)
        return seconds

    def _finish(self, lease: Lease, prompt: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """A request resumes from the pages that were computed for it."""
        self._claimed(lease)
        assert lease.boundary == self.size.pages, f"only {lease.boundary} of {self.size.pages} pages came back"
        for name, (positions, slots) in self.cache.pages(lease).items():
            buffer = [*self.cache.worker.arena(name).values()][-1]
            for position, slot in zip(positions, slots, strict=True):
                assert buffer[slot].flatten()[-1].item() == self._value(prompt, position), "another page's bytes"
        self.cache.close(lease)

    def _fetched(self, prompt: np.ndarray[Any, np.dtype[np.int64]]) -> float:
        """Seconds until the pages of one prompt have come from storage to the host."""
        start = time.perf_counter()
        lease = self.cache.open(prompt)
        until(self.cache, lambda: lease.phase not in (Phase.PROBING, Phase.FETCHING))
        seconds = time.perf_counter() - start
        self._finish(lease, prompt)
        return seconds

    def _value(self, prompt: np.ndarray[Any, np.dtype[np.int64]], position: int) -> int:
        return int(prompt[0] // len(prompt) * 31 + position) % 251  # small enough for bfloat16 to hold it exactly

    def _claimed(self, lease: Lease) -> None:
        until(self.cache, lambda: self.cache.claim(lease))


class Limits:
    """The limits of the machine at the same sizes, on one thread."""

    def __init__(self, size: Size, folder: Path) -> None:
        self._file = folder / "raw"
        self._payloads = size.payloads
        self._records = [record_bytes(payload) for payload in size.payloads]
        self._source, self._target = (memoryview(mmap.mmap(-1, sum(self._records))) for _ in range(2))

    def round(self) -> dict[str, float]:
        file = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(file, 0, sum(self._records))  # after the first round it has been written before, as ours
            return {
                "memcpy": timed(self._copy),
                "raw_write": timed(lambda: self._write(file)),
                "raw_read": timed(lambda: self._read(file)),
            }
        finally:
            os.close(file)

    def _copy(self) -> None:
        source, target = np.frombuffer(self._source, np.uint8), np.frombuffer(self._target, np.uint8)
        for start, stop in _spans(self._payloads):
            np.copyto(target[start:stop], source[start:stop])

    def _write(self, file: int) -> None:
        for start, stop in _spans(self._records):
            assert os.pwrite(file, self._source[start:stop], start) == stop - start

    def _read(self, file: int) -> None:
        for start, stop in _spans(self._records):
            assert os.preadv(file, [self._target[start:stop]], start) == stop - start


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


EDGES = {
    "memcpy": "numpy copy, 1 thread",
    "backup": "device to host, sealed",
    "load": "host to device, checked",
    "load_unchecked": "host to device, not checked",
    "raw_write": "direct pwrite to one file, 1 thread",
    "store": "host to storage, checked, durable",
    "raw_read": "direct preadv from one file, 1 thread",
    "fetch": "storage to host, one prompt after the other",
    "restore": "storage to device, all prompts at once",
}
RATIOS = {
    "host_load_over_memcpy": ("load", "memcpy"),
    "host_load_unchecked_over_memcpy": ("load_unchecked", "memcpy"),
    "backup_over_memcpy": ("backup", "memcpy"),
    "store_over_raw_write": ("store", "raw_write"),
    "fetch_over_raw_read": ("fetch", "raw_read"),
    "restore_over_raw_read": ("restore", "raw_read"),
}


def measure(size: Size, folder: Path) -> dict[str, list[float]]:
    """Seconds of every edge and limit in every round, the first of which only warms up."""
    gate = Gate(FileStorage(folder / "pages", 4 * size.payload_bytes, IDENTITY.fingerprint(), str(IDENTITY)))
    benches = {"": Bench(size, gate, True), "_unchecked": Bench(size, None, False)}
    limits = Limits(size, folder)
    seconds: dict[str, list[float]] = {}
    for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
        found = limits.round()
        for suffix, bench in benches.items():
            found |= {edge + suffix: taken for edge, taken in bench.round().items() if edge + suffix in EDGES}
        if number:
            for edge, taken in found.items():
                seconds.setdefault(edge, []).append(taken)
    for bench in benches.values():
        bench.cache.shutdown()
    return seconds


def main() -> int:
    parser = arguments("How near to memcpy do restores come?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where the files are written; a temporary folder")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    torch.set_num_threads(1)  # the limit is one thread's, so is the copy that is compared with it
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as folder:
        seconds = measure(size, Path(folder))
    rows = [
        {
            "what": edge,
            "how": how,
            "MiB": size.payload_bytes // MIB,
            "ms": 1000 * min(seconds[edge]),
            "GB_per_s": size.payload_bytes / min(seconds[edge]) / 1e9,
        }
        for edge, how in EDGES.items()
    ]
    ratios = {name: min(seconds[limit]) / min(seconds[ours]) for name, (ours, limit) in RATIOS.items()}
    show(
        f"{size.payload_bytes // MIB} MiB in pages of 1 MiB and states of 4 MiB, best of {size.rounds}",
        rows,
        ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in ratios.items()),
    )
    every = {edge: [1000 * taken for taken in all_taken] for edge, all_taken in seconds.items()}
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios, "ms_of_every_round": every})
    return 0


if __name__ == "__main__":
    sys.exit(main())
