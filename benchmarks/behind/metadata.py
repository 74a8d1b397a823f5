"""What it costs to say which slots have which objects of a store on 3FS: for a process alone, and by a map in Redis."""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from redis_server import RedisServer

from common import watched
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs._hf3fs_folder import Folder
from kvarve.storage.hf3fs._io_engine import PosixEngine
from kvarve.storage.hf3fs._owner import Owner, own
from kvarve.storage.hf3fs._slot_layout import Title
from kvarve.storage.hf3fs._slot_table import Entry

SLOT_BYTES = 1 << 20
LOOKED_UP, WRITTEN = 128, 32
FEW, MANY = 10_000, 1_000_000
_FILLED = 1000  # objects of a call, until there are as many as are wanted; freed slots rest, so more are spare
_LABEL = b"b" * 32


@dataclass(frozen=True)
class Size:
    many: int = MANY
    calls: int = 400


QUICK = Size(many=2 * FEW, calls=20)


class Store:
    """What one process has of a store, whose files are never written. `setting`: of the map, as in a URL."""

    def __init__(self, folder: Path, objects: int, setting: str | None) -> None:
        self._engine = PosixEngine(Disk(), 1)
        self._folder = Folder(Disk(), folder, self._engine)
        self.owner: Owner = own(setting, (objects + objects // 20 + 8 * _FILLED) * SLOT_BYTES, None, self._folder)
        self.owner.keep(self._folder, self._engine)

    def store(self, names: Sequence[str]) -> None:
        slots, _ = self.owner.reserve(_LABEL, dict.fromkeys(names, SLOT_BYTES))
        entries = [slot for slot in slots if isinstance(slot, Entry)]
        assert len(entries) == len(names)
        assert all(self.owner.commit(_LABEL, names, entries))

    def delete(self, names: Sequence[str]) -> None:
        found = zip(names, self.owner.places(_LABEL, names), strict=True)
        self.owner.remove([Title(_LABEL, name, slot) for name, (slot,) in found])

    def close(self) -> None:
        self.owner.close(self._folder)
        self._folder.close()
        self._engine.close()


def name_of(number: int) -> str:
    return f"0123456789abcdef-{number:064x}.kv.0of1"


class Times:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - start)

    def row(self) -> dict[str, float]:
        return {"p50_ms": 1000 * median(self.seconds), "p99_ms": 1000 * quantiles(self.seconds, n=100)[-1]}


def measure(stores: dict[int, Store], calls: int) -> dict[tuple[int, str], Times]:
    """Calls as a server makes them: of stores with so many objects in turn, since a machine's speed changes."""
    times: dict[tuple[int, str], Times] = defaultdict(Times)
    random.seed(18)
    for call in range(calls):
        for held, store in stores.items():
            names = [name_of(random.randrange(held)) for _ in range(LOOKED_UP)]
            with times[held, f"lookup_{LOOKED_UP}"].taken():
                slots = store.owner.find(_LABEL, names)
            assert all(slots)
            if call < calls // 4:
                names = [name_of(MANY * 10 + call * WRITTEN + number) for number in range(WRITTEN)]
                with times[held, f"store_{WRITTEN}"].taken():
                    store.store(names)
                with times[held, f"delete_{WRITTEN}"].taken():
                    store.delete(names)
    return times


def rows_of(what: str, folder: Path, size: Size) -> list[dict[str, object]]:
    """Figures with 10,000 objects and with many; `what` is "embedded" or "redis"."""
    rows: list[dict[str, object]] = []
    with ExitStack() as close:
        stores: dict[int, Store] = {}
        for held in (FEW, size.many):
            setting = None
            if what == "redis":
                server = RedisServer(folder / f"server-{held}")
                close.callback(server.close)
                setting = server.url()
            store = stores[held] = Store(folder / f"{what}-{held}", held, setting)
            close.callback(store.close)
            for at in watched(range(0, held, _FILLED), f"{what}: {held:,} objects", held // _FILLED):
                store.store([name_of(number) for number in range(at, at + _FILLED)])
            if held == FEW:
                rows += rows_from(measure(stores, size.calls), {"service": what, "beside": "nothing"})
        rows += rows_from(measure(stores, size.calls), {"service": what, "beside": "the other"})
    return rows


def rows_from(times: dict[tuple[int, str], Times], about: dict[str, object]) -> list[dict[str, object]]:
    return [about | {"objects": held, "call": call} | taken.row() for (held, call), taken in times.items()]


def ratios_of(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """Of a process alone: a lookup of the small store alone, and stores of both in turns."""

    def found(call: str, beside: str) -> list[float]:
        wanted = {"call": call, "beside": beside}
        return [float(row["p50_ms"]) for row in rows if wanted.items() <= row.items()]

    (lookup_ms,), (few, many) = found(f"lookup_{LOOKED_UP}", "nothing"), found(f"store_{WRITTEN}", "the other")
    return {f"lookup_{LOOKED_UP}_ms": lookup_ms, "store_1m_over_10k": many / few}
