"""How many bytes does compression save, and how much time over a slow link?

    .venv/bin/python benchmarks/compress.py [--quick] [--json FILE] [--dir FOLDER]

The pages are those of real models in bfloat16 that have read this repository's documentation: of `builtin:tiny-hybrid`,
and of a model of 0.1 billion parameters (random weights, `tools/random_qwen3_5.py`). A transfer engine stores them in a
file store and fetches them again, on its own workers and with its checks, through a link of 100 MB/s that all calls
share: plainly, and with each `compress=`, in turns; every page that arrives is checked. `auto` also moves them without
the link, where it has to switch itself off.

Ratios, each of the model that is worse: `bytes_over_raw` of attention KV with zstd, stored over plain;
`compressed_put_over_plain` and `compressed_get_over_plain`, the speed with zstd over that without compression, on the
link; `auto_put_over_plain` and `auto_get_over_plain` the same of auto, and `auto_fast_put_over_plain` and
`auto_fast_get_over_plain` without the link. Medians over the rounds. `all_bytes_over_raw` is of all pools, states
included, as many of each as the model keeps.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import arguments, machine, show, watched, write_json
from engine import PATIENCE_S, Timed
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.copies.effects import Copy, Ended, Page
from kvarve.core.policies import Policies
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.pages.keys import parse_object_name
from kvarve.pages.pools import PoolSpec, Tier
from kvarve.records.encodings import codec, decode, encode
from kvarve.records.record import BLOCK_BYTES
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import load_model, quiet_libraries
from kvarve.storage import MemoryStorage, Storage, open_storage
from kvarve.storage.altered import AlteredStorage
from kvarve.storage.base import Around
from kvarve.transfer.compression import Compressed
from kvarve.transfer.transfer_engine import TransferEngine

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from random_qwen3_5 import make

MIB = 1 << 20
LINK = 100e6  # bytes a second
TOGETHER = 16  # pages of one copy
TEXTS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
PLAIN, WAYS = "no", ("no", "zstd", "lz4", "auto")


@dataclass(frozen=True)
class Size:
    tokens: int = 1024  # that each model reads: bfloat16 is slow on most CPUs
    moved_bytes: int = 128 * MIB  # of each round and way
    rounds: int = 5


QUICK = Size(tokens=512, moved_bytes=4 * MIB, rounds=1)


@dataclass(frozen=True)
class Pages:
    """The records of one pool of a model, by their keys."""

    pool: PoolSpec
    namespace: bytes
    records: dict[bytes, bytes]


def computed(name: str, tokens: int) -> list[Pages]:
    """What a model in bfloat16 keeps of the documentation's first tokens, by pool."""
    model = load_model(name, dtype="bfloat16")
    namespace = model.identity.fingerprint()
    storage = AlteredStorage(MemoryStorage(1 << 30, namespace, "benchmarks/compress.py"))
    policies = Policies(write_policy="through", keep_states="ends,branches,chunks,every:256")
    cache = PrefixCache(model.identity, CacheConfig(512 * MIB, 512 * MIB, policies=policies), storage=storage)
    engine = Engine(model, cache).start()
    ids = model.tokenizer.encode("\n".join(text.read_text() for text in TEXTS))
    Timed([*islice(ids, tokens)], 1).start(engine).wait()
    assert engine.settle(PATIENCE_S)
    found: dict[str, dict[bytes, bytes]] = {pool.name: {} for pool in model.identity.pools}
    for written in sorted(storage.written):
        about, record = parse_object_name(written), storage.read(written)
        assert about is not None and record is not None
        found[about.pool][about.key] = record
    engine.shutdown()
    return [Pages(pool, namespace, found[pool.name]) for pool in model.identity.pools]


class Link(Around):
    """`inner` at the end of a link of so many bytes a second, which all calls share and each waits for."""

    def __init__(self, inner: Storage, rate: float = LINK) -> None:
        super().__init__(inner)
        self._rate = rate
        self._lock, self._free = threading.Lock(), 0.0

    def _pass(self, nbytes: int) -> None:
        with self._lock:
            self._free = end = max(self._free, time.monotonic()) + nbytes / self._rate
        time.sleep(max(0.0, end - time.monotonic()))

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self._pass(sum(map(len, data)))
        return self.inner.put(names, data)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        sizes = self.inner.get(names, into)
        self._pass(sum(size or 0 for size in sizes))
        return sizes


@dataclass
class Taken:
    """Seconds of each round."""

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)


class Mover:
    """A transfer engine whose host memory is full of a pool's pages, over and over, under another root each time."""

    def __init__(self, pages: Pages, size: Size, storage: Storage) -> None:
        keys, records = [*pages.records], [*pages.records.values()]
        count = max(len(keys), size.moved_bytes // len(records[0]))
        self.host = HostArena(pages.pool, count, pages.namespace)
        for slot in range(count):
            self.host.record(slot)[:] = records[slot % len(keys)]
        self.at = [((slot // len(keys)).to_bytes(32, "little"), keys[slot % len(keys)]) for slot in range(count)]
        self.bytes = count * len(records[0])
        self.transfers = TransferEngine([DeviceArena(pages.pool, 1)], [self.host])
        self.storage = storage
        self.transfers.attach(self.transfers.connect(storage))

    def put(self) -> float:
        return self._all(Tier.HOST, Tier.STORAGE)

    def get(self) -> float:
        """Every page comes into its own slot again, which has been damaged before."""
        for slot in range(self.host.slots):
            self.host.record(slot)[:4096] = bytes(4096)
        return self._all(Tier.STORAGE, Tier.HOST)

    def _all(self, source: Tier, target: Tier) -> float:
        copies = []
        for first in range(0, len(self.at), TOGETHER):
            part = [*enumerate(self.at)][first : first + TOGETHER]
            by_root: dict[bytes, list[Page]] = {}
            for slot, (root, key) in part:
                page = Page(0, key, slot, -1) if target is Tier.STORAGE else Page(0, key, -1, slot)
                by_root.setdefault(root, []).append(page)
            copies += [Copy(0, source, target, tuple(found), root) for root, found in by_root.items()]
        copies = [Copy(number, source, target, copy.pages, copy.root) for number, copy in enumerate(copies)]
        began = time.perf_counter()
        self.transfers.send(*copies)
        left = len(copies)
        while left:
            assert self.transfers.ends.wait(PATIENCE_S)
            for event in self.transfers.collect():
                if isinstance(event, Ended):
                    assert event.good == (1 << len(copies[event.op].pages)) - 1, "a page was lost on its way"
                    left -= 1
        return time.perf_counter() - began

    def close(self) -> None:
        self.transfers.close()


def stored(folder: Path, name: str, way: str, *, link: bool, pages: Pages) -> Compressed:
    url = f"file://{folder / name}?capacity=4GiB"
    files = open_storage(url, label=pages.namespace, description="benchmarks/compress.py")
    return Compressed(Link(files) if link else files, way)


def moved(pages: Pages, size: Size, folder: Path, title: str) -> tuple[dict[str, Taken], int]:
    """Each way in turns, the first round unmeasured; on the link, and two of them without it."""
    movers = {way: Mover(pages, size, stored(folder, way, way, link=True, pages=pages)) for way in WAYS}
    for way in ("no", "auto"):
        movers[f"{way}, no link"] = Mover(pages, size, stored(folder, f"fast-{way}", way, link=False, pages=pages))
    taken = {way: Taken() for way in movers}
    for number in watched(range(size.rounds + 1), title, size.rounds + 1):
        turn = [*movers.items()]
        for way, mover in turn[number % len(turn) :] + turn[: number % len(turn)]:
            put, get = mover.put(), mover.get()
            mover.storage.drop()
            if number:
                taken[way].put.append(put)
                taken[way].get.append(get)
    nbytes = movers[PLAIN].bytes
    for mover in movers.values():
        mover.close()
    return taken, nbytes


def coded(pages: Pages, name: str) -> dict[str, Any]:
    """Bytes and GB/s of one thread, the quickest of five."""
    using, rows = codec(name), [memoryview(record) for record in pages.records.values()]
    into, back = (memoryview(bytearray(len(rows[0]) + BLOCK_BYTES)) for _ in range(2))
    plain, small = sum(map(len, rows)), 0
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    worth: Sequence[bool] = ()
    for _ in range(5):
        small, taken = 0, {"encode": 0.0, "decode": 0.0}
        for row in rows:
            began = time.perf_counter()
            length, worth = encode([row], using, into, worth)
            taken["encode"] += time.perf_counter() - began
            small += length or len(row)
            if length is not None:
                began = time.perf_counter()
                decode(into[:length], back[: len(row)])
                taken["decode"] += time.perf_counter() - began
                assert back[: len(row)] == row, "a bit was lost"
        for what, each in taken.items():
            seconds[what].append(each)
    speeds = {f"{what} GB/s": plain / min(each) / 1e9 if min(each) else 0.0 for what, each in seconds.items()}
    return {"plain MB": plain / 1e6, "over raw": small / plain} | speeds


def over(taken: dict[str, Taken], way: str, plain: str, what: str) -> float:
    pairs: Iterable[tuple[float, float]] = zip(getattr(taken[plain], what), getattr(taken[way], what), strict=True)
    return median(without / with_it for without, with_it in pairs)


def models(folder: Path, quick: bool) -> Iterator[tuple[str, str]]:
    yield "tiny-hybrid", "builtin:tiny-hybrid"
    make(folder / "model", small=quick)
    yield "0.1B", str(folder / "model")


def main() -> int:
    parser = arguments("How many bytes does compression save, and how much time over a slow link?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where the files are written; a temporary folder")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    quiet_libraries()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    found: dict[str, dict[str, float]] = {}
    every: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as name:
        folder = Path(name)
        for model, where in models(folder, args.quick):
            kept = computed(where, size.tokens)
            for pages in kept:
                for each in ("zstd", "lz4"):
                    rows.append({"model": model, "pool": pages.pool.name, "codec": each} | coded(pages, each))
            mine = [row for row in rows if row["model"] == model and row["codec"] == "zstd"]
            plain = sum(row["plain MB"] for row in mine)
            ratios = {"all_bytes_over_raw": sum(row["plain MB"] * row["over raw"] for row in mine) / plain}
            ratios["bytes_over_raw"] = next(row["over raw"] for row in mine if row["pool"] == "attention")
            attention = next(pages for pages in kept if pages.pool.name == "attention")
            (folder / model).mkdir()
            taken, nbytes = moved(attention, size, folder / model, model)
            for what in ("put", "get"):
                ratios[f"compressed_{what}_over_plain"] = over(taken, "zstd", PLAIN, what)
                ratios[f"lz4_{what}_over_plain"] = over(taken, "lz4", PLAIN, what)
                ratios[f"auto_{what}_over_plain"] = over(taken, "auto", PLAIN, what)
                ratios[f"auto_fast_{what}_over_plain"] = over(taken, "auto, no link", "no, no link", what)
            found[model] = ratios
            speeds += [
                {"model": model, "compress": way}
                | {f"{what} MB/s": nbytes / median(getattr(each, what)) / 1e6 for what in ("put", "get")}
                for way, each in taken.items()
            ]
            every[model] = {way: {"put": each.put, "get": each.get} for way, each in taken.items()}
    worse = {
        name: (max if name.endswith("over_raw") else min)(ratios[name] for ratios in found.values())
        for name in found["0.1B"]
    }
    show(f"Records of {size.tokens} tokens, one thread", rows)
    show(f"Attention KV through a link of {LINK / 1e6:.0f} MB/s; median of {size.rounds} rounds", speeds)
    for name, value in worse.items():
        print(f"{name}: {value:.3f}")
    figures = {"rows": rows, "speeds": speeds, "by_model": found, "seconds": every}
    write_json(args.json, {"machine": about, "ratios": worse} | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
