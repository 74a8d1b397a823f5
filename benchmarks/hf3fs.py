"""How near to the calls of the file system does kvarve come with a store on 3FS, and what does its metadata cost?

    .venv/bin/python benchmarks/hf3fs.py [--quick] [--json FILE] [--only pages embedded redis]

Pages: 1 MiB each, 32 a batch, all ways in each batch, in any order; each figure is the median. Two engines:

- POSIX, on a mount of type fuse.hf3fs (bindfs), against `pwrite` + `fdatasync` and `pread` of the same sizes on that
  mount;
- USRBIO, through the emulator of its Python binding, against the same calls on the folder that the emulator works on.

Raw moves a batch in one file, past the page cache or through it, with one, four or eight threads, whichever is fastest;
its pages lie as far from each other as slots do. Its reads do not come from this machine's page cache (dropped before):
a storage is asked for pages that this machine does not have. Beside them, and in no ratio: pages that adjoin each
other, which the kernel reads ahead; those of a prompt lie in any slots. Needs bindfs, and root to mount.

Metadata: lookups of 128 names and what else a server asks (`behind/metadata.py`), of stores of 10,000 and a million
objects: of a process that is alone with its store, and of a map in a Redis over a Unix socket, where that is installed.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any

sys.path.append(sys.path.pop(0))  # behind the packages: a script here has the name of one
sys.path.append(str(Path(__file__).parents[1] / "tests" / "storage"))
from hf3fs_mounts import Bindfs

from behind import metadata
from behind.pages import BATCH, MIB, Pages
from common import arguments, machine, show, watched, write_json
from kvarve.storage.hf3fs._hf3fs_backend import Settings, open_hf3fs
from kvarve.storage.hf3fs._hf3fs_storage import Hf3fsStorage
from kvarve.storage.hf3fs._slot_layout import slot_bytes_for
from kvarve.system.regions import shared_region
from tests.sim.usrbio import Emulator

sys.path.remove(str(Path(__file__).parent))  # or benchmarks/redis.py would be taken for the client library

ADJOINING = "adjoining, through it, 1"


@dataclass(frozen=True)
class Size:
    batches: int = 40


QUICK = Size(batches=4)


class Raw:
    """The calls of the file system, on one file, whose pages begin every `apart` bytes."""

    def __init__(self, folder: Path, pages: Pages, threads: int, flags: int, apart: int) -> None:
        self._file = os.open(folder / f"raw-{threads}-{flags}-{apart}", os.O_RDWR | os.O_CREAT | flags, 0o600)
        self._views, self._pool, self._apart = pages.views, ThreadPoolExecutor(threads), apart

    def put(self) -> None:
        self._each(lambda i: os.pwrite(self._file, self._views[i], i * self._apart))
        os.fdatasync(self._file)

    def ready(self) -> None:
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def get(self) -> None:
        self._each(lambda i: os.preadv(self._file, [self._views[i]], i * self._apart))

    def _each(self, move: Callable[[int], int]) -> None:
        assert [*self._pool.map(move, range(BATCH))] == [MIB] * BATCH

    def done(self) -> None:
        pass


class Ours:
    """The storage's calls."""

    def __init__(self, storage: Hf3fsStorage, pages: Pages) -> None:
        self._storage, self._views = storage, pages.views
        self._names = [f"0123456789abcdef-{number:064x}.kv.0of1" for number in range(BATCH)]

    def put(self) -> None:
        assert all(self._storage.put(self._names, self._views))

    def ready(self) -> None:
        pass

    def get(self) -> None:
        assert self._storage.get(self._names, self._views) == [MIB] * BATCH

    def done(self) -> None:
        self._storage.delete(self._names)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def raws(folder: Path, pages: Pages) -> dict[str, Raw]:
    folder.mkdir()
    slots, ways = slot_bytes_for(MIB), {"past the cache": os.O_DIRECT, "through it": 0}
    raws = {
        f"{way}, {threads}": Raw(folder, pages, threads, flags, slots)
        for way, flags in ways.items()
        for threads in (1, 4, 8)
    }
    return raws | {ADJOINING: Raw(folder, pages, 1, 0, MIB)}


def moves(size: Size) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """GB/s of all ways, and ours over the fastest raw one on the same files."""
    seconds: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as name:
        folder, region = Path(name), shared_region(BATCH * MIB)  # as a host arena of this storage
        pages = Pages(region.memory)
        mount = Bindfs(folder / "3fs")
        below = folder / "below"
        below.mkdir()
        emulator = Emulator(below, threads=8, direct=True)
        settings = {"capacity_bytes": 1 << 30, "quota_bytes": None, "threads": 8}
        posix = Settings(mount.mount / "ours", engine="posix", metadata=None, **settings)
        usrbio = Settings(below / "ours", engine="usrbio", metadata=None, **settings)
        opened = [
            open_hf3fs(posix, b"bench", None),
            open_hf3fs(usrbio, b"bench", emulator),
        ]
        try:
            ways: dict[tuple[str, str], Raw | Ours] = {}
            order = random.Random(18)
            for engine, place, storage in zip(("posix", "usrbio"), (mount.mount, below), opened, strict=True):
                ways |= {(engine, way): raw for way, raw in raws(place / "raw", pages).items()}
                ways[engine, "kvarve"] = Ours(storage, pages)
                storage.register(region)
            for batch in watched(range(size.batches + 1), "batch", size.batches + 1):
                for (engine, way), what in order.sample([*ways.items()], len(ways)):  # a way may slow down the next one
                    pages.check()
                    put = timed(what.put)
                    pages.blank()
                    what.ready()
                    get = timed(what.get)
                    pages.check()
                    what.done()
                    if batch:
                        seconds.setdefault((engine, way, "put"), []).append(put)
                        seconds.setdefault((engine, way, "get"), []).append(get)
        finally:
            for storage in opened:
                storage.close()
            del ways
            mount.close()
    moved = BATCH * MIB / 1e9
    rows = [
        {"engine": engine, "what": way}
        | {f"{what} GB/s": moved / median(seconds[engine, way, what]) for what in ("put", "get")}
        for engine, way, direction in sorted(seconds)
        if direction == "put"
    ]
    return rows, {
        f"{engine}_{what}_over_raw": over(seconds, engine, what)
        for engine in ("posix", "usrbio")
        for what in ("put", "get")
    }


def over(seconds: dict[tuple[str, str, str], list[float]], engine: str, what: str) -> float:
    """Ours over the raw way whose median is the lowest, batch by batch."""
    alike = {way: times for (its, way, direction), times in seconds.items() if (its, direction) == (engine, what)}
    ours, _ = alike.pop("kvarve"), alike.pop(ADJOINING)
    return median(a / b for a, b in zip(min(alike.values(), key=median), ours, strict=True))


def main() -> int:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PART", help="of: pages, embedded, redis")
    args = parser.parse_args()
    about, rows, ratios = machine(), dict[str, list[dict[str, Any]]](), dict[str, float]()
    if not args.only or "pages" in args.only:
        size = QUICK if args.quick else Size()
        rows["pages"], ratios = moves(size)
        for what in ("put", "get"):
            ratios[f"{what}_over_raw"] = min(ratios[f"{engine}_{what}_over_raw"] for engine in ("posix", "usrbio"))
        show(f"{BATCH} pages of 1 MiB a batch; median of {size.batches} batches", rows["pages"])
    asked = metadata.QUICK if args.quick else metadata.Size()
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as name:
        for what in ("embedded", *(("redis",) if which("redis-server") and find_spec("redis") else ())):
            if not args.only or what in args.only:
                rows[what] = metadata.rows_of(what, Path(name), asked)
                show(f"{what}: {asked.calls} of each call", rows[what])
    if "embedded" in rows:
        ratios |= metadata.ratios_of(rows["embedded"])
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
