"""What the metadata services of a store on 3FS cost: that of this machine, and others where they are installed."""

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

from common import watched
from kvarve.errors import StorageError
from kvarve.storage.hf3fs.metadata import Metadata, Slot, open_metadata

HERE = Path(__file__).parent
SLOT_BYTES = 1 << 20
LOOKED_UP, WRITTEN = 128, 32
FEW, MANY = 10_000, 1_000_000
_FILLED = 1000  # objects of a call, until there are as many as are wanted
_FOR_S = 300.0
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Size:
    many: int = MANY
    calls: int = 400


QUICK = Size(many=2 * FEW, calls=20)


class Service(Protocol):
    """One service in a folder of its own."""

    def open(self, capacity_bytes: int) -> Metadata: ...

    def memory_bytes(self) -> int: ...

    def restart(self) -> None:
        """Kill it, and start it again unless its next client does."""
        ...

    def close(self) -> None: ...


class Local:
    """The server of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, folder / "store"
        self._store.mkdir(parents=True)

    def open(self, capacity_bytes: int) -> Metadata:
        os.environ["XDG_STATE_HOME"] = str(self._folder / "state")
        return open_metadata(None, self._store, b"bench", capacity_bytes, None)

    @property
    def _pid(self) -> int:
        (lock,) = (self._folder / "state").glob("kvarve/hf3fs/*/lock")
        return int(lock.read_text())

    def memory_bytes(self) -> int:
        return resident_bytes(self._pid)

    def restart(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGTERM)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def name_of(number: int) -> str:
    return f"0123456789abcdef-{number:064x}.kv.0of1"


def store(metadata: Metadata, names: Sequence[str]) -> None:
    request = random.getrandbits(62)
    slots = metadata.reserve(request, names, [SLOT_BYTES] * len(names), _FOR_S)
    mine = [(name, slot) for name, slot in zip(names, slots, strict=True) if isinstance(slot, Slot)]
    assert len(mine) == len(names)
    assert all(metadata.commit(request, names, [slot for _, slot in mine], [SLOT_BYTES - 4096] * len(names)))


def fill(metadata: Metadata, first: int, last: int, title: str) -> None:
    for at in watched(range(first, last, _FILLED), title, (last - first + _FILLED - 1) // _FILLED):
        store(metadata, [name_of(number) for number in range(at, min(last, at + _FILLED))])


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


def measure(stores: dict[int, Metadata], calls: int) -> dict[tuple[int, str], Times]:
    """Calls as a server makes them, which looks pages up and lets them go, and stores others: of stores with so many
    objects in turn, since a machine's speed changes."""
    times: dict[tuple[int, str], Times] = defaultdict(Times)
    random.seed(18)
    for call in range(calls):
        for held, metadata in stores.items():
            names = [name_of(random.randrange(held)) for _ in range(LOOKED_UP)]
            with times[held, f"lookup_{LOOKED_UP}"].taken():
                assert all(metadata.lookup(names, call + 1, _FOR_S))
            with times[held, "release"].taken():
                metadata.release(call + 1)
            if call < calls // 4:
                names = [name_of(MANY * 10 + call * WRITTEN + number) for number in range(WRITTEN)]
                with times[held, f"store_{WRITTEN}"].taken():
                    store(metadata, names)
                with times[held, f"delete_{WRITTEN}"].taken():
                    assert all(metadata.delete(names))
    return times


def measure_evicting(metadata: Metadata, capacity: int, calls: int) -> Times:
    """The same stores where all slots are taken."""
    fill(metadata, MANY * 20, MANY * 20 + capacity - (metadata.usage().objects or 0), "full store")
    times = Times()
    for call in range(calls):
        names = [name_of(MANY * 30 + call * WRITTEN + number) for number in range(WRITTEN)]
        with times.taken():
            store(metadata, names)
    return times


def rows_of(what: str, make: Callable[[Path], Service], folder: Path, size: Size) -> list[dict[str, object]]:
    """Figures with 10,000 objects and with many, and what a kill costs."""
    rows: list[dict[str, object]] = []
    with ExitStack() as close:
        stores: dict[int, Metadata] = {}
        for held in (FEW, size.many):
            service = make(folder / f"{what}-{held}")
            close.callback(service.close)
            metadata = stores[held] = service.open((held + held // 20 + 2 * _FILLED) * SLOT_BYTES)
            close.callback(metadata.close)
            metadata.exists(["a"])
            empty_bytes = service.memory_bytes()
            fill(metadata, 0, held, f"{what}: {held:,} objects")
            if held == FEW:
                rows += rows_from(measure(stores, size.calls), {"service": what, "beside": "nothing"})
        per_object = (service.memory_bytes() - empty_bytes) / held
        rows += rows_from(measure(stores, size.calls), {"service": what, "beside": "the other"})
        capacity = size.many + size.many // 20 + 2 * _FILLED
        evicting = measure_evicting(metadata, capacity, size.calls // 4)
        rows += rows_from(
            {(capacity, f"store_{WRITTEN}, evicting"): evicting}, {"service": what, "beside": "the other"}
        )
        service.restart()
        start = time.perf_counter()
        _answers(lambda: metadata.exists([name_of(MANY * 30)]) == [True])
        back_ms = 1000 * (time.perf_counter() - start)
    for held, call, figure in ((capacity, "kill -9", back_ms), (size.many, "bytes an object", per_object)):
        about = {"service": what, "beside": "the other", "objects": held, "call": call}
        rows.append(about | {"p50_ms": figure, "p99_ms": figure})
    return rows


def rows_from(times: dict[tuple[int, str], Times], about: dict[str, object]) -> list[dict[str, object]]:
    return [about | {"objects": held, "call": call} | taken.row() for (held, call), taken in times.items()]


def ratios_of(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """Of the server of this machine: a lookup of the small store alone, and releases of both in turns."""

    def found(call: str, beside: str) -> list[float]:
        wanted = {"call": call, "beside": beside}
        return [float(row["p50_ms"]) for row in rows if wanted.items() <= row.items()]

    (lookup_ms,), (few, many) = found(f"lookup_{LOOKED_UP}", "nothing"), found("release", "the other")
    return {f"lookup_{LOOKED_UP}_ms": lookup_ms, "release_1m_over_10k": many / few}


def _answers(ask: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert ask(), "what was committed is there"
            return
        except StorageError:
            assert time.monotonic() < end
            time.sleep(0.005)
