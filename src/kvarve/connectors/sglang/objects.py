"""Sealed objects in a storage for an engine that waits for them, with memory of its own. Knows no engine and no tensor.

All calls return by their deadline, and a storage that fails, hangs or is not open yet is a miss. The caller's memory is
touched while its call lasts, on threads of the storage's lanes.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from kvarve.core.copies.in_flight import STORE
from kvarve.errors import require_assertions
from kvarve.storage import Breaker, StorageUsage, Tiers
from kvarve.system.background import Abandoned, BackgroundCall
from kvarve.transfer.storage_road import BUFFERS, Became, Flight, Kind, Move, StorageRoad

log = logging.getLogger(__name__)

T = TypeVar("T")
Copy = Callable[[int, memoryview], None]  # the payload of an object, by its number, from or to the caller's memory

BUFFER_MEMORY = 96 << 20  # of all buffers; more if a single record is larger than one
_CLOSE_S = 4.0  # for calls, and again for the storage
_WORDS: Mapping[Became, str] = {"missing": "gone"}
_TROUBLE = frozenset[Became](("late", "failed"))


@dataclass(frozen=True)
class Rate:
    """What one load or store moved: whole objects, their payload, and the seconds of the call."""

    objects: int
    bytes: int
    seconds: float


class Objects:
    """The objects of one label in one storage, which it owns; used by several threads.

    `counts`, by object: loaded, stored, already there; gone (told to exist, and not read), damaged (a record that is
    truncated, corrupt or another's: it is deleted, and missing from then on), no space, read only; late, failed, down
    and closed name why the storage was not asked or did not answer in time.
    """

    def __init__(
        self, opened: Callable[[], Breaker | Tiers], *, deadline_s: float, buffer_memory: int = BUFFER_MEMORY
    ) -> None:
        """Open the storage, for at most `deadline_s`: if that takes longer, all is a miss until it is open.

        ConfigError and StorageError of opening it, if they come in time.
        """
        require_assertions()
        assert deadline_s > 0
        self.deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self.road: StorageRoad | None = None
        self._lock = threading.Lock()  # guards everything below and the counts; never held during a call
        self._rates: dict[str, list[Rate]] = {"load": [], "store": []}
        self._closed = False
        self._buffer_bytes = max(1, buffer_memory // BUFFERS)
        opening = BackgroundCall("kvarve opens a storage", opened)
        try:
            self.road = self._road_to(opening.result(deadline_s, late=self._opened_late))
        except Abandoned:
            log.warning("a storage takes longer than %g s to open: until it has, nothing is found in it", deadline_s)

    @property
    def up(self) -> bool:
        """Whether the storage is open and answers."""
        return self.road is not None and not self._closed and self.road.storage.up

    def usage(self) -> StorageUsage:
        """The storage's, as it last answered; it is asked again, and not waited for."""
        return StorageUsage() if self.road is None or self._closed else self.road.usage()

    @property
    def last_error(self) -> str:
        return "" if self.road is None else self.road.storage.last_error

    # --- the calls

    def exists(self, kinds: Sequence[Kind], keys: Sequence[Sequence[bytes]]) -> list[list[bool]] | None:
        """For each kind, which of its keys are there, asked in one call; None if the storage gives no answer."""
        names = [[kind.name(key) for key in asked] for kind, asked in zip(kinds, keys, strict=True)]
        found = self._there([name for each in names for name in each], time.monotonic() + self.deadline_s)
        if found is None:
            return None
        answers = iter(found)
        return [[next(answers) for _ in each] for each in names]

    def load(self, kind: Kind, keys: Sequence[bytes], put_down: Copy) -> list[bool]:
        """Read objects and hand each payload that is whole to `put_down(i, payload)`.

        False where an object is missing, damaged or not read by the deadline; after trouble the rest is not asked for.
        """
        began = time.monotonic()
        road = self._open_road(len(keys))
        if road is None:
            return [False] * len(keys)
        loaded = self._by_pieces(road, kind, keys, road.get, put_down, began + self.deadline_s)
        self._moved("load", "loaded", kind, sum(loaded), began)
        return loaded

    def store(self, kind: Kind, keys: Sequence[bytes], take_up: Copy) -> list[bool]:
        """Store objects that are not there yet; `take_up(i, payload)` fills each payload.

        True: the object is there. After trouble the rest is not stored.
        """
        began = time.monotonic()
        end = began + self.deadline_s
        there = self._there([kind.name(key) for key in keys], end)
        road = self.road
        if there is None or road is None:
            return [False] * len(keys)
        missing = [i for i, found in enumerate(there) if not found]
        self._count("already there", len(keys) - len(missing))
        mine = [keys[i] for i in missing]
        stored = self._by_pieces(road, kind, mine, road.fill, lambda at, view: take_up(missing[at], view), end)
        self._moved("store", "stored", kind, sum(stored), began)
        for i, done in zip(missing, stored, strict=True):
            there[i] = done
        return there

    def drop(self) -> bool:
        """Remove all objects of the label; False if the storage does not say that it has done so."""
        road = self._open_road(1)
        if road is None:
            return False
        flight = road.call(STORE, road.storage.drop, self.deadline_s)
        return self._answer(road, flight, time.monotonic() + self.deadline_s, 1) is not None

    def take_rates(self, what: str) -> list[Rate]:
        """Of the loads or stores since this was called last; `what` is "load" or "store"."""
        with self._lock:
            rates, self._rates[what] = self._rates[what], []
            return rates

    def close(self) -> None:
        """All later calls are misses. Returns within seconds; calls that hang are abandoned."""
        with self._lock:
            closed, self._closed, road = self._closed, True, self.road
        if not closed and road is not None:
            road.close(_CLOSE_S)

    # --- inside

    def _road_to(self, storage: Breaker | Tiers) -> StorageRoad:
        return StorageRoad(storage, deadline_s=self.deadline_s, buffer_bytes=self._buffer_bytes)

    def _opened_late(self, storage: Breaker | Tiers) -> None:
        road = self._road_to(storage)
        with self._lock:
            self.road = road
            closed = self._closed
        if closed:
            road.close(_CLOSE_S)
        else:
            log.warning("a storage that took long to open is open")

    def _open_road(self, count: int) -> StorageRoad | None:
        road = None if self._closed else self.road
        if road is None:
            self._count("closed", count)
        return road

    def _by_pieces(
        self,
        road: StorageRoad,
        kind: Kind,
        keys: Sequence[bytes],
        send: Callable[[Sequence[tuple[Kind, bytes]], Copy, float], Move],
        copy: Copy,
        end: float,
    ) -> list[bool]:
        """Which objects have been moved by `send`, in pieces that each fill a buffer. After one that is late or failed
        the rest is given up."""

        def sent(at: int) -> Move:
            piece = [(kind, key) for key in keys[at : at + size]]
            return send(piece, lambda i, view: copy(at + i, view), end - time.monotonic())

        size = max(1, road.buffers.size_bytes // kind.record_bytes)
        moves, trouble = [sent(at) for at in range(0, len(keys), size)], False
        for move in moves:
            if trouble:
                move.give_up()
            else:
                road.wait_for(move, end)
                trouble = self._trouble(move)
        return [became == "done" for move in moves for became in move.became]

    def _there(self, names: Sequence[str], end: float) -> list[bool] | None:
        """Which of these are there and not known to be damaged; None if the storage gives no answer."""
        road = self._open_road(len(names)) if names else None
        if road is None:
            return None if names else []
        return self._answer(road, road.exists(names, end - time.monotonic()), end, len(names))

    def _answer(self, road: StorageRoad, flight: Flight[T], end: float, count: int) -> T | None:
        """The answer of a call; None, counted, if it failed or is late."""
        if not road.wait_for(flight, end) or flight.began == inf:
            self._count("late", count)
        elif flight.answer is None:
            self._count("failed", count)
        return flight.answer

    def _trouble(self, move: Move) -> bool:
        """Count what became of objects, but for those that are done."""
        with self._lock:
            self.counts.update(_WORDS.get(became, became) for became in move.became if became != "done")
        damaged = move.became.count("damaged")
        if damaged:
            log.warning("%d damaged objects of pool %s in a storage: deleted", damaged, move.objects[0][0].pool)
        return not _TROUBLE.isdisjoint(move.became)

    def _count(self, what: str, by: int = 1) -> None:
        if by:
            with self._lock:
                self.counts[what] += by

    def _moved(self, what: str, done: str, kind: Kind, objects: int, began: float) -> None:
        if not objects:
            return
        seconds = time.monotonic() - began
        with self._lock:
            self.counts[done] += objects
            self.counts[f"{done} bytes"] += objects * kind.payload_bytes
            self._rates[what].append(Rate(objects, objects * kind.payload_bytes, seconds))
            del self._rates[what][:-1024]  # nothing may ever ask for them
