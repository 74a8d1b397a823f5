"""Tiers in a row that fail as told, and pages that say whether they are whole."""

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gates import threads
from kvarve.errors import StorageError
from kvarve.storage import Breaker, MemoryStorage, Storage, Tiers
from kvarve.testing import FaultyStorage
from kvarve.testing.suite import LABEL, put, there

LONG_S = 20.0  # nothing here waits so long unless something is broken
ROOM = 1 << 20


def page(name: str, size_bytes: int = 40) -> bytes:
    """The object of a name, which shows whether it is intact."""
    body = (name.encode() * size_bytes)[: size_bytes - 4]
    return hashlib.sha256(body).digest()[:4] + body


def whole(record: memoryview) -> bool:
    return hashlib.sha256(record[4:]).digest()[:4] == record[:4]


def read(storage: Storage, name: str, size_bytes: int = 40) -> bytes | None:
    """A page of a known size."""
    buffer = bytearray(size_bytes)
    (found,) = storage.get([name], [memoryview(buffer)])
    return None if found is None else bytes(buffer[:found])


class Row:
    """Tiers that fail as told, each behind a breaker that opens at the first failure and probes when told.

    `probes`: it probes by itself, and soon.
    """

    def __init__(
        self,
        capacities: Sequence[int] = (ROOM, ROOM),
        *,
        failures: int = 1,
        close_s: float = 5.0,
        probes: bool = False,
        **more: object,
    ) -> None:
        self.before = {*threading.enumerate()}
        self.sick = [FaultyStorage(MemoryStorage(size, LABEL, "model A"), stall_limit_s=LONG_S) for size in capacities]
        self.pauses = [queue.Queue[threading.Event]() for _ in capacities]
        self.told: queue.Queue[bool] = queue.Queue()
        soon = {"probe_first_s": 0.0005, "probe_most_s": 0.001}
        self.breakers = [
            Breaker(
                sick,
                deadline_s=LONG_S,
                failures=failures,
                close_s=close_s,
                **(soon if probes else {"pause": self._pause(pauses)}),  # type: ignore[arg-type]
            )
            for sick, pauses in zip(self.sick, self.pauses, strict=True)
        ]
        told = {"whole": whole, "changed": lambda: self.told.put(self.storage.up), "patience_s": LONG_S}
        self.storage = Tiers(self.breakers, close_s=close_s, **(told | more))  # type: ignore[arg-type]
        self.replicators = [thread for thread in threads("kvarve replicates") if thread not in self.before]
        self.callers = ThreadPoolExecutor(4)
        self.settle()

    @staticmethod
    def _pause(pauses: queue.Queue[threading.Event]) -> Callable[[threading.Event, float], None]:
        def pause(event: threading.Event, _: float) -> None:
            pauses.put(event)
            assert event.wait(LONG_S)

        return pause

    def put(self, *names: str) -> list[bool]:
        return put(self.storage, **{name: page(name) for name in names})

    def has(self, number: int, *names: str) -> str:
        """Which of the names one tier has, whatever its state."""
        return there(self.sick[number].inner, *names)

    def settle(self) -> None:
        assert self.storage.settle(LONG_S)

    def backlogs(self) -> list[int]:
        """How many objects each tier gets once it is up and not behind."""
        return [len(each.backlog) for each in self.storage._replicators]

    def waiting_bytes(self) -> list[int]:
        return [each.waiting_bytes for each in self.storage._replicators]

    def go_down(self, number: int) -> None:
        """Notice it by a call of its own."""
        self.sick[number].dead = True
        with pytest.raises(StorageError):
            self.breakers[number].exists(["x"])
        assert not self.breakers[number].up

    def come_up(self, number: int) -> None:
        self.sick[number].dead = False
        event = self.pauses[number].get(timeout=LONG_S)
        while not self.told.empty():
            self.told.get()
        event.set()
        self.told.get(timeout=LONG_S)
        assert self.breakers[number].up

    def hang(self, number: int, call: Callable[[], object]) -> Future[object]:
        self.sick[number].stall()
        hanging = self.callers.submit(call)
        self.sick[number].wait_for_stalled_call()
        return hanging

    def recover(self) -> None:
        """Wait until tiers that probe by themselves, and fail no more, are up and have what they lack."""
        while not all(breaker.up for breaker in self.breakers):
            self.told.get(timeout=LONG_S)
        self.settle()

    def is_closed(self, number: int) -> bool:
        try:
            self.sick[number].inner.usage()
        except StorageError as error:
            return "closed" in str(error)
        return False

    def close(self) -> None:
        for sick in self.sick:
            sick.release()
        self.storage.close()
        for thread in self.replicators:
            thread.join(LONG_S)
        self.callers.shutdown()


MakeRow = Callable[..., Row]
