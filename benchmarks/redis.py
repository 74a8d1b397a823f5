"""How near to ready-made commands over the same socket does kvarve come with Redis?

    .venv/bin/python benchmarks/redis.py [--quick] [--json FILE] [--tcp]

A real server in a process of its own, on a Unix socket (or loopback with --tcp). Raw: all commands of a batch, made
before the clock starts, in one `sendall`, and all answers read into one buffer without looking at them, by the very
connection that kvarve uses. kvarve: the storage's calls; and the same with each page's checksum computed before it is
written and after it is read, one after the other (a lane's workers check one batch while another moves). Beside them
the client library, pipelined. All move the same pages, batch by batch in turns; each figure is the median. Then
questions about 128 names, and a server that is gone.
"""

import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from behind.pages import BATCH, MIB, Pages
from common import arguments, machine, show, watched, write_json
from kvarve.errors import StorageError
from kvarve.storage import Breaker, open_storage
from kvarve.storage.redis.redis_storage import RedisStorage
from kvarve.storage.redis.servers import library
from kvarve.storage.redis.wire import command

sys.path.remove(str(Path(__file__).parent))  # or this file would be taken for the library of its name
sys.path.append(str(Path(__file__).parents[1] / "tests" / "storage"))
from redis_server import RedisServer, free_port

HELD = 128


@dataclass(frozen=True)
class Size:
    batches: int = 60
    questions: int = 2000


QUICK = Size(batches=3, questions=50)


class Raw:
    """Ready-made commands of all batches' names, and a buffer for all that a get brings."""

    def __init__(self, pages: Pages, storage: RedisStorage, names: list[str]) -> None:
        keys = [storage._key(name) for name in names]
        heads = [b"*4\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, MIB) for key in keys]
        pieces = [b"%s%s\r\n$2\r\nNX\r\n" % (head, bytes(view)) for head, view in zip(heads, pages.views, strict=True)]
        self._sets = b"".join(pieces)
        self._gets = b"".join(command(b"GET", key) for key in keys)
        self._into = memoryview(mmap.mmap(-1, BATCH * (MIB + len(b"$1048576\r\n\r\n"))))
        self._storage = storage

    def put(self) -> None:
        self._both(self._sets, self._into[: BATCH * len(b"+OK\r\n")])

    def get(self) -> None:
        self._both(self._gets, self._into)

    def _both(self, commands: bytes, into: memoryview) -> None:
        with self._storage._servers.wire(*self._storage._servers.all()) as wire:
            wire._link.settimeout(30.0)
            wire._link.sendall(commands)
            at = 0
            while at < len(into):
                at += wire._link.recv_into(into[at:])


class Ours:
    """The storage's calls."""

    def __init__(self, pages: Pages, storage: RedisStorage, names: list[str], *, checked: bool) -> None:
        self._pages, self._storage, self._names, self._checked = pages, storage, names, checked

    def put(self) -> None:
        if self._checked:
            self._pages.check()
        assert all(self._storage.put(self._names, self._pages.views))

    def get(self) -> None:
        assert self._storage.get(self._names, self._pages.views) == [MIB] * BATCH
        if self._checked:
            self._pages.check()


class Library:
    """The client library, pipelined; what it gets is not even copied into the buffers."""

    def __init__(self, pages: Pages, storage: RedisStorage, names: list[str], client: Any) -> None:
        self._pages, self._client, self._keys = pages, client, [storage._key(name) for name in names]

    def put(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, view in zip(self._keys, self._pages.views, strict=True):
            pipeline.set(key, view, nx=True)
        assert all(pipeline.execute())

    def get(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in self._keys:
            pipeline.get(key)
        assert all(len(data) == MIB for data in pipeline.execute())


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def loss(server: RedisServer, storage: RedisStorage) -> dict[str, float]:
    """Seconds of calls while the server is gone, and from its return until something is stored and read again."""
    breaker, asked = Breaker(storage, deadline_s=30.0), [f"page-{i}" for i in range(HELD)]
    server.kill()
    first = []
    while breaker.up:
        start = time.perf_counter()
        try:
            breaker.exists(asked)
        except StorageError:
            first.append(time.perf_counter() - start)
    later = max(timed(lambda: breaker.exists(asked)) for _ in range(100))
    server.start()
    start, one = time.perf_counter(), memoryview(bytearray(64))
    while breaker.put(["back"], [one]) != [True] or breaker.get(["back"], [one]) != [64]:
        pass
    back = time.perf_counter() - start
    breaker.close()
    return {"first failed call": max(first), "call behind the breaker": later, "hits after its return": back}


def main() -> int:
    parser = arguments("How near to ready-made commands over the same socket does kvarve come with Redis?")
    parser.add_argument("--tcp", action="store_true", help="over loopback in place of a Unix socket")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    seconds: dict[str, list[float]] = {}
    names = [f"0123456789abcdef-{number:064x}.kv.0of1" for number in range(HELD)]
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as folder:
        server = RedisServer(Path(folder), port=free_port())
        try:
            url = f"redis://127.0.0.1:{server.port}" if args.tcp else server.url()
            storage = open_storage(url, label=b"bench", description="benchmarks/redis.py")
            assert isinstance(storage, RedisStorage)
            place = {"port": server.port} if args.tcp else {"unix_socket_path": str(server.socket)}
            client = library().Redis(**place, protocol=2)
            pages, some = Pages(memoryview(mmap.mmap(-1, BATCH * MIB))), names[:BATCH]
            ways: dict[str, Raw | Ours | Library] = {
                "raw": Raw(pages, storage, some),
                "kvarve": Ours(pages, storage, some, checked=False),
                "kvarve, checked": Ours(pages, storage, some, checked=True),
                "redis-py": Library(pages, storage, some, client),
            }
            for batch in watched(range(size.batches + 1), "batch", size.batches + 1):
                turn = [*ways.items()]
                for way, what in turn[batch % len(turn) :] + turn[: batch % len(turn)]:
                    pages.check()
                    put = timed(what.put)
                    if way != "redis-py":
                        pages.blank()
                    get = timed(what.get)
                    assert storage.get(some, pages.views) == [MIB] * BATCH  # the raw way read it elsewhere
                    pages.check()
                    storage.delete(some)
                    if batch:
                        seconds.setdefault(f"{way} put", []).append(put)
                        seconds.setdefault(f"{way} get", []).append(get)
            assert all(storage.put(names[::2], [memoryview(b"x" * 64)] * (HELD // 2)))
            asked = [timed(lambda: storage.exists(names)) for _ in range(size.questions)]
            client.close()
            lost = loss(server, storage)
        finally:
            server.close()
    moved = BATCH * MIB / 1e9
    rows = [
        {"what": way} | {f"{what} GB/s": moved / median(seconds[f"{way} {what}"]) for what in ("put", "get")}
        for way in ways
    ]

    def over(way: str, what: str) -> float:
        pairs = zip(seconds[f"raw {what}"], seconds[f"{way} {what}"], strict=True)
        return median(raw / ours for raw, ours in pairs)

    ratios = {f"{what}_over_raw": over("kvarve", what) for what in ("put", "get")}
    ratios |= {f"checked_{what}_over_raw": over("kvarve, checked", what) for what in ("put", "get")}
    ratios |= {f"library_{what}_over_raw": over("redis-py", what) for what in ("put", "get")}
    ratios["holds_128_ms"] = 1000 * median(asked)
    show(f"{BATCH} pages of 1 MiB a batch; median of {size.batches} batches", rows)
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    for what, taken in lost.items():
        print(f"{what}: {1000 * taken:.1f} ms")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios, "lost_s": lost})
    return 0


if __name__ == "__main__":
    sys.exit(main())
