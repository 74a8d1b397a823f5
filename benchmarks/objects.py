"""How near to the library's own calls does kvarve come with an object store?

    .venv/bin/python benchmarks/objects.py [--quick] [--json FILE] [--server rclone|moto]

A real server of S3 in a process of its own, on loopback. Raw: obstore's own calls on as many threads, with the settings
that kvarve gives it, of the same bytes; what they get is not even copied. kvarve: the storage's calls. All move the
same pages, batch by batch in turns; each figure is the median. Then questions about 128 names, of which kvarve knows
nothing or all, against as many HEADs on as many threads. Last: what an object costs by its size, by raw calls.
"""

import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

from behind.pages import BATCH, MIB, Pages
from common import arguments, machine, show, watched, write_json
from kvarve.storage import open_storage
from kvarve.storage.objects._bucket import key_of
from kvarve.storage.objects._known import Known
from kvarve.storage.objects._object_storage import ObjectStorage

sys.path.append(str(Path(__file__).parents[1] / "tests" / "storage"))
from object_servers import KEY, SECRET, Rclone, moto

HELD, THREADS = 128, 8
SIZES = [64 << 10, 256 << 10, MIB, 4 * MIB]


@dataclass(frozen=True)
class Size:
    batches: int = 30
    questions: int = 100


QUICK = Size(batches=3, questions=3)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Raw:
    """obstore's own calls. Each thread takes the next object when it has one."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._obstore, self._store, self._root = storage._obstore, storage._store, storage._root
        self._pool = ThreadPoolExecutor(THREADS)

    def put(self, names: list[str], views: list[memoryview]) -> None:
        def one(name: str, view: memoryview) -> None:
            self._obstore.put(self._store, key_of(name, self._root), view, mode="create", use_multipart=False)

        list(self._pool.map(one, names, views))

    def get(self, names: list[str]) -> None:
        list(self._pool.map(lambda name: self._obstore.get(self._store, key_of(name, self._root)).bytes(), names))

    def head(self, names: list[str]) -> None:
        def one(name: str) -> None:
            with suppress(FileNotFoundError):
                self._obstore.head(self._store, key_of(name, self._root))

        list(self._pool.map(one, names))


def by_size(storage: ObjectStorage, raw: Raw, size_bytes: int, count: int) -> dict[str, float]:
    """Seconds of an object of this size."""
    view, names = memoryview(bytes(size_bytes)), [f"s{size_bytes}-{i:064x}" for i in range(count)]
    took: dict[str, list[float]] = {"put": [], "get": []}
    for _ in range(3):
        took["put"].append(timed(lambda: raw.put(names, [view] * count)) / count)
        took["get"].append(timed(lambda: raw.get(names)) / count)
        storage.delete(names)
    return {kind: median(some) for kind, some in took.items()}


def main() -> int:
    parser = arguments("How near to the library's own calls does kvarve come with an object store?")
    parser.add_argument("--server", choices=("rclone", "moto"), default="rclone")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine() | {"server": args.server, "threads": THREADS}
    seconds: dict[str, list[float]] = {}
    took = lambda what, work: seconds.setdefault(what, []).append(timed(work))  # noqa: E731
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as folder, mock.patch.dict("os.environ", keys):
        server = (Rclone if args.server == "rclone" else moto)(Path(folder))
        try:
            url = server.url(more=f"&threads={THREADS}")
            storage = open_storage(url, label=b"bench", description="benchmarks/objects.py")
            assert isinstance(storage, ObjectStorage)
            storage._closing.set()  # no listing meanwhile
            pages, raw = Pages(memoryview(mmap.mmap(-1, BATCH * MIB))), Raw(storage)
            for turn in watched(range(size.batches), "pages", size.batches):
                ours, theirs = ([f"{who}-{turn}-{i:064x}.kv.0of1" for i in range(BATCH)] for who in ("a", "b"))
                moves = [
                    ("put raw", lambda names=theirs: raw.put(names, pages.views)),
                    ("put kvarve", lambda names=ours: storage.put(names, pages.views)),
                    ("get raw", lambda names=theirs: raw.get(names)),
                    ("get kvarve", lambda names=ours: storage.get(names, pages.views)),
                ]
                for at in (0, 2):
                    for what, work in moves[at : at + 2][:: 1 if turn % 2 else -1]:
                        took(what, work)
                storage.delete(ours + theirs)
            names = [f"held-{i:064x}.kv.0of1" for i in range(HELD)]
            storage.put(names, [memoryview(b"page")] * HELD)

            def storage_asked() -> None:
                storage._known = Known()
                storage.exists(names)

            for turn in watched(range(size.questions), "questions", size.questions):
                questions = [("128 HEADs raw", lambda: raw.head(names)), ("128 names unknown", storage_asked)]
                for what, work in questions[:: 1 if turn % 2 else -1]:
                    took(what, work)
                took("128 names known", lambda: storage.exists(names))
            for each in watched(SIZES, "sizes", len(SIZES)):
                for kind, took_s in by_size(storage, raw, each, 4 if args.quick else 32 * MIB // each).items():
                    seconds[f"object of {each >> 10} KiB {kind}"] = [took_s]
            storage.close()
        finally:
            server.close()
    middle = {what: median(some) for what, some in seconds.items()}
    moved = {
        what: BATCH * MIB / middle[what] / 1e6 for kind in ("put", "get") for what in (f"{kind} raw", f"{kind} kvarve")
    }
    ratios = {kind: middle[f"{kind} raw"] / middle[f"{kind} kvarve"] for kind in ("put", "get")}
    asked = middle["128 names unknown"] / middle["128 HEADs raw"]
    rows: list[dict[str, object]] = [
        {"what": what, "figure": f"{BATCH * MIB / middle[what] / 1e6:.0f} MB/s"} for what in sorted(moved)
    ]
    rows += [{"what": f"{kind}: kvarve / raw", "figure": f"{ratio:.2f}"} for kind, ratio in ratios.items()]
    rows += [{"what": what, "figure": f"{middle[what] * 1e3:.2f} ms"} for what in middle if what not in moved]
    rows += [{"what": "128 names unknown: kvarve / raw", "figure": f"{asked:.2f}"}]
    show(f"objects of 1 MiB at {args.server}, {THREADS} threads", rows, "put and get: rates; questions: time")
    write_json(args.json, {"machine": about, "seconds": middle, "ratios": ratios | {"questions": asked}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
