"""How near to Mooncake's own calls does kvarve come?

    .venv/bin/python benchmarks/mooncake.py [--quick] [--json FILE]

A real master and an owner of memory, each a process of its own, and this one, in a network of their own with nothing
but loopback (which takes root). Raw: the library's batch calls from registered memory, by the same client, because two
clients differ by more than what is measured here. kvarve: the work of its lanes, so each page's checksum is computed
before it is written and after it is read, and a put looks its objects up afterwards. Both move the same pages, batch by
batch in turns.

Then questions about 128 names, and a prompt of 4,096 tokens on its way from the store to the device: probe, reads,
checks, copies. Each figure is the median, of many batches: on few processors both processes of a transfer share them
with everything else, and one batch takes half as long as another. And what a master that is lost costs: the time of a
call that fails, and of one behind the breaker.
"""

import mmap
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from behind.pages import BATCH, MIB, Pages
from common import arguments, machine, show, watched, write_json
from kvarve.errors import StorageError
from kvarve.storage._breaker import Breaker
from kvarve.storage.mooncake._client import Settings
from kvarve.storage.mooncake._mooncake_storage import MooncakeStorage
from kvarve.system.regions import HostRegion, address
from pretend import PAGES, PROMPT_BYTES, PROMPT_TOKENS, Restore

sys.path.remove(str(Path(__file__).parent))  # or this file would be taken for the library of its name
sys.path.append(str(Path(__file__).parents[1] / "tests" / "storage"))
from mooncake_cluster import MASTER, METRICS, Cluster, kill, own_network

HELD = 128


@dataclass(frozen=True)
class Size:
    batches: int = 16  # moved by each way in each round
    rounds: int = 8
    questions: int = 2000
    restores: int = 4  # in each round


QUICK = Size(batches=2, rounds=2, questions=100, restores=2)


class Raw:
    """The library's own calls, on the connections that kvarve has."""

    def __init__(self, pages: Pages, storage: MooncakeStorage) -> None:
        with storage._client._entered() as raw:
            self.addresses, self.store = [address(view) for view in pages.views], raw.store

    def put(self, names: list[str]) -> None:
        assert self.store.batch_put_from(names, self.addresses, [MIB] * BATCH) == [0] * BATCH

    def get(self, names: list[str]) -> None:
        assert self.store.batch_get_into(names, self.addresses, [MIB] * BATCH) == [MIB] * BATCH

    def holds(self, names: list[str]) -> Any:
        return self.store.batch_is_exist(names)

    def delete(self, names: list[str]) -> None:
        assert self.store.batch_remove(names, True) == [0] * BATCH


class Lane:
    """Puts and gets as kvarve's lanes make them."""

    def __init__(self, pages: Pages, storage: MooncakeStorage) -> None:
        self.pages, self.storage = pages, storage
        storage.register(HostRegion(pages.memory))

    def put(self, names: list[str]) -> None:
        self.pages.check()
        assert all(self.storage.put(names, self.pages.views))

    def get(self, names: list[str]) -> None:
        assert self.storage.get(names, self.pages.views) == [MIB] * BATCH
        self.pages.check()

    def holds(self, names: list[str]) -> Any:
        return self.storage.exists(names)

    def delete(self, names: list[str]) -> None:
        assert all(self.storage.delete(names))


def names(of_round: int, count: int = BATCH) -> list[str]:
    return [f"0123456789abcdef-{of_round:08x}{number:056x}.kv.0" for number in range(count)]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def moves(ways: dict[str, Raw | Lane], pages: Pages, size: Size, number: int) -> Iterator[tuple[str, float]]:
    """Seconds of a batch, put and got each way; each way's objects are deleted before the next one's are put."""
    for batch in range(size.batches):
        some = names(number * size.batches + batch)
        for way, what in [*ways.items()][:: 1 if batch % 2 else -1]:
            pages.check()  # so that both start with the same CPU caches
            yield f"{way} put", timed(lambda what=what, some=some: what.put(some))  # type: ignore[misc]
            pages.blank()
            yield f"{way} get", timed(lambda what=what, some=some: what.get(some))  # type: ignore[misc]
            what.delete(some)


def restored(restore: Restore, raw: Raw | Lane, size: Size, number: int) -> Iterator[tuple[float, float]]:
    """Seconds of a prompt's restore, and of raw gets of about as many bytes, in turns."""
    for pair in range(size.restores):
        some = [names((1 << 20) + 2 * pair + half) for half in range(2)]
        for batch in some:
            raw.put(batch)
        seconds = restore.round()
        assert restore.cache.worker.attached is not None
        assert restore.cache.worker.attached.storage.drop() == PAGES + 1  # and its state
        yield seconds, timed(lambda some=some: [raw.get(batch) for batch in some])  # type: ignore[misc]
        for batch in some:
            raw.delete(batch)


def questions(ways: dict[str, Raw | Lane], size: Size) -> dict[str, float]:
    """Median seconds of a question about 128 names, half of which are there."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    asked = names(1 << 30, HELD)
    lane = ways["kvarve"]
    assert isinstance(lane, Lane)
    assert all(lane.storage.put(asked[::2], [memoryview(b"x" * 64)] * (HELD // 2)))
    raw_asked = [lane.storage._prefix + name for name in asked]
    for _ in range(size.questions):
        for way, what in ways.items():
            some = asked if what is lane else raw_asked
            found[way].append(timed(lambda what=what, some=some: what.holds(some)))  # type: ignore[misc]
    assert sum(lane.holds(asked)) == HELD // 2
    return {way: median(seconds) for way, seconds in found.items()}


# --- a lost master


def loss(cluster: Cluster, storage: MooncakeStorage) -> dict[str, float]:
    """Seconds of calls while the master is gone, and from its return until something is stored and read again."""
    breaker, asked = Breaker(storage, deadline_s=30.0), names(0, HELD)
    kill(cluster.master)
    first = []
    while breaker.up:
        start = time.perf_counter()
        try:
            breaker.exists(asked)
        except StorageError:
            first.append(time.perf_counter() - start)
    later = max(timed(lambda: breaker.exists(asked)) for _ in range(100))
    cluster.start_master()
    start, number, one = time.perf_counter(), 0, memoryview(bytearray(64))
    while True:
        number += 1
        try:
            if breaker.put([f"back-{number}"], [one]) == [True] and breaker.get([f"back-{number}"], [one]) == [64]:
                break
        except StorageError:
            pass
    return {
        "first failed call": max(first),
        "call behind the breaker": later,
        "hits after its return": time.perf_counter() - start,
    }


# --- all of it


def main() -> int:
    parser = arguments("How near to Mooncake's own calls does kvarve come?")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    restores: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as folder, own_network():
        cluster = Cluster(Path(folder), "--default_kv_lease_ttl=2000")
        try:
            cluster.owner(1 << 30)
            pages = Pages(memoryview(mmap.mmap(-1, BATCH * MIB)))
            storage = MooncakeStorage(Settings(master=MASTER, metrics=METRICS), b"bench", "benchmarks/mooncake.py")
            ways: dict[str, Raw | Lane] = {"kvarve": Lane(pages, storage), "raw": Raw(pages, storage)}
            restore = Restore(f"mooncake://{MASTER}?metrics={METRICS}")
            for batch in range((1 << 30) // BATCH // MIB - 1):  # the owner's memory is faulted in by a first use
                ways["raw"].put(names((1 << 21) + batch))
            assert storage._client.remove_all_of(".*")
            for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
                for what, taken in moves(ways, pages, size, number):
                    if number:  # the first round only warms up
                        seconds.setdefault(what, []).append(taken)
                for taken, raw_taken in restored(restore, ways["raw"], size, number):
                    if number:
                        restores.append(taken)
                        seconds.setdefault("raw prompt", []).append(raw_taken)
            asked = questions(ways, size)
            restore.cache.shutdown()
            lost = loss(cluster, storage)
        finally:
            cluster.close()
    usual = {what: median(taken) for what, taken in seconds.items()}
    moved = BATCH * MIB
    rows = [
        {
            "what": way,
            "put GB/s": moved / usual[f"{way} put"] / 1e9,
            "get GB/s": moved / usual[f"{way} get"] / 1e9,
            f"{HELD} names us": 1e6 * asked[way],
        }
        for way in ("raw", "kvarve")
    ]
    ratios = {
        "put_over_raw": usual["raw put"] / usual["kvarve put"],
        "get_over_raw": usual["raw get"] / usual["kvarve get"],
        "holds_over_raw": asked["kvarve"] / asked["raw"],
        "restore_over_raw": PROMPT_BYTES / median(restores) / (2 * moved / usual["raw prompt"]),
    }
    show(f"batches of {BATCH} pages of 1 MiB, median of {size.rounds * size.batches}; TCP on loopback", rows)
    restore_ms = 1000 * median(restores)
    print(f"a prompt of {PROMPT_TOKENS} tokens, {PROMPT_BYTES // MIB} MiB, from the store: {restore_ms:.1f} ms")
    for what, value in lost.items():
        print(f"a lost master, {what}: {1000 * value:.2f} ms")
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "lost_s": lost, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
