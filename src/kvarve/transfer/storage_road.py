"""The road of an engine's pages to a storage and back: sealed records by name in, what became of each out.

    put:  the engine's memory, or a buffer filled from it ──(seal)──> storage
    get:  storage ──> buffer ──(check)──> the engine's memory

Each call of the storage is a flight, on a thread of the connection's lanes. Its caller polls it or waits for it, and
may give it up: from then on it writes into no memory but a buffer, which comes back when the call returns. So a read
that comes late never writes into memory that the engine has given to another page, and calls that hang hold a bounded
number of buffers. The price of a read is one copy. Knows no engine.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf
from typing import Any, Generic, Literal, TypeVar

from kvarve.core.copies.effects import Ended, Event, Refusal
from kvarve.core.copies.in_flight import FETCH, PROBE, STORE, Edge
from kvarve.errors import StorageError
from kvarve.pages.keys import object_name
from kvarve.records.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.records.seals import CHECKSUM, Seal
from kvarve.storage import Breaker, StorageUsage, Tiers
from kvarve.transfer._buffers import Buffers
from kvarve.transfer.lanes import Ends, Lane, Outcome
from kvarve.transfer.storage_connection import FETCHES, STORES, StorageConnection

log = logging.getLogger(__name__)

T = TypeVar("T")
# Of an object, by its call. "down": the circuit was open; "late": it was given up, or could not begin in time.
Became = Literal["done", "missing", "damaged", "no space", "read only", "down", "failed", "late"]

BUFFERS = FETCHES + STORES  # one for each call that is under way
BUFFER_BYTES = 16 << 20  # of each; more if a single record is larger


@dataclass(frozen=True)
class Kind:
    """The objects of one pool of one model on one rank. `namespace` (32 bytes) identifies the model, and all that
    decides what the bytes mean; a pool that all ranks hold alike has rank 0. `root`: of the objects' names, if that is
    not the namespace."""

    namespace: bytes
    pool: str
    payload_bytes: int
    rank: int = 0
    ranks: int = 1
    seal: Seal = CHECKSUM
    root: bytes = b""

    @cached_property
    def stamp(self) -> Stamp:
        return Stamp(self.namespace, self.pool, self.payload_bytes, self.rank, self.ranks, self.seal)

    @cached_property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)

    def seal_payload(self, record: memoryview, key: bytes) -> None:
        """Write the header of a record whose payload is complete, and zeros behind that."""
        record[HEADER_BYTES + self.payload_bytes :] = bytes(self.record_bytes - HEADER_BYTES - self.payload_bytes)
        self.stamp.seal(record, key)

    def name(self, key: bytes) -> str:
        return object_name(self.root or self.namespace, key, self.pool, self.rank, self.ranks)


@dataclass(eq=False, kw_only=True)
class Flight(Generic[T]):
    """One call of the storage. `answer`: None if it failed, was given up, or has not ended."""

    lane: Lane
    sent: float
    began: float = inf
    answer: T | None = None
    given_up: bool = False
    ended: threading.Event = field(default_factory=threading.Event)  # when the call has returned, or never will begin
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, now: float) -> bool:
        with self.lock:
            self.began = now
            return not self.given_up

    def give_up(self) -> None:
        """Whatever the call answers from now on is ignored."""
        with self.lock:
            self.given_up = True


@dataclass(eq=False, kw_only=True)
class Move(Flight[None]):
    """A read or write of objects, whose records all have one size."""

    objects: Sequence[tuple[Kind, bytes]]  # and the key of each
    became: list[Became]
    buffer: memoryview | None = None  # the call's, if the engine's memory is copied from or to one

    def names(self) -> list[str]:
        return [kind.name(key) for kind, key in self.objects]

    def begin(self, now: float) -> bool:
        begins = super().begin(now)
        if begins:
            self.became = ["failed"] * len(self.objects)
        return begins

    def end(self, became: Sequence[Became]) -> bool:
        """False: it was given up before."""
        with self.lock:
            if not self.given_up:
                self.became = [*became]
            return not self.given_up

    def give_up(self) -> None:
        """What is done by now stays done."""
        with self.lock:
            self.given_up = True
            self.became = [each if each == "done" else "late" for each in self.became]


def payload(record: memoryview, kind: Kind) -> memoryview:
    return record[HEADER_BYTES : HEADER_BYTES + kind.payload_bytes]


class StorageRoad:
    """A storage, which it owns, its lanes and buffers. Any thread may send; StorageError if no threads start."""

    def __init__(
        self,
        storage: Breaker | Tiers,
        *,
        deadline_s: float,
        buffer_bytes: int = BUFFER_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.buffers = Buffers(BUFFERS, buffer_bytes, storage.register)
        self.storage, self._deadline_s, self._clock = storage, deadline_s, clock
        self._ends = Ends()
        self._ends.taken = self._took
        self._flights: dict[int, Flight[Any]] = {}
        self._ops = count()
        self._sealing = threading.Lock()  # one worker seals at a time, so that the first one's write starts early
        self._connection = StorageConnection(storage, self._ends, deadline_s=deadline_s, clock=clock)

    def usage(self) -> StorageUsage:
        """As the storage last answered; it is asked again, and not waited for."""
        try:
            return self._connection.usage(0.0)
        except StorageError:
            return StorageUsage()

    # --- flights; those that cannot begin within `within_s` end without

    def exists(self, names: Iterable[str], within_s: float) -> Flight[list[bool]]:
        """Which objects are there; the names are made on the lane's thread if they are an iterator."""
        return self.call(PROBE, lambda: self._connection.exists([*names]), within_s)

    def call(self, edge: Edge, ask: Callable[[], T], within_s: float) -> Flight[T]:
        """Any other call of the storage."""
        flight = Flight[T](lane=self._connection.lanes[edge], sent=self._clock())

        def work() -> Outcome:
            if flight.begin(self._clock()):
                flight.answer = ask()
            return 0, 0

        flight.lane.send(self._sent(flight), work, within_s)
        return flight

    def get(
        self,
        objects: Sequence[tuple[Kind, bytes]],
        land: Callable[[int, memoryview], None],
        within_s: float = inf,
    ) -> Move:
        """Read objects, and have `land(i, payload)` take each that is whole from a buffer, on the lane's thread and
        not after the flight was given up."""
        move = self._move(FETCH, objects)
        move.lane.send(self._sent(move), lambda: self._get(move, land), within_s)
        return move

    def fill(
        self, objects: Sequence[tuple[Kind, bytes]], take_up: Callable[[int, memoryview], None], within_s: float
    ) -> Move:
        """Have `take_up(i, payload)` fill each payload in a buffer, on the lane's thread and not after the flight was
        given up, and store them: those that are on their way to the storage by then, too."""
        move = self._move(STORE, objects)
        move.lane.send(self._sent(move), lambda: self._fill(move, take_up), within_s)
        return move

    def put(self, objects: Sequence[tuple[Kind, bytes]], sealed: Callable[[], Sequence[Sequence[memoryview]]]) -> Move:
        """Store records, which `sealed` gives in pieces, on the lane's thread, from the engine's memory. That may have
        other bytes once the flight was given up: from then on they are not stored, or deleted if they were."""
        move = self._move(STORE, objects)
        # A put is durable when it returns, so a few large ones are cheaper.
        move.lane.send_part(self._sent(move), self._put, (move, sealed), len(objects), inf)
        return move

    def wait_for(self, flight: Flight[Any], end: float) -> bool:
        """Wait until a flight has ended; False, and it is given up, if that takes until `end`."""
        while not flight.ended.wait(max(0.0, min(end - self._clock(), flight.lane.left_s()))):
            flight.lane.expire()
            if self._clock() >= end:
                flight.give_up()
                return False
        return True

    def collect(self) -> None:
        """End flights that could not begin in time, and replace threads that hang, for a caller that polls flights."""
        self._ends.collect()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a flight has ended, or the next `collect` has something to do; False after `timeout_s`."""
        return self._ends.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Let flights end within `timeout_s`, none if the storage is down, then close it within the same again."""
        try:
            self._connection.close(timeout_s if self.storage.up else min(0.1, timeout_s), timeout_s)
        except StorageError as e:
            log.warning("a storage could not be closed: %s", e)

    # --- inside

    def _move(self, edge: Edge, objects: Sequence[tuple[Kind, bytes]]) -> Move:
        lane = self._connection.lanes[edge]
        return Move(lane=lane, sent=self._clock(), objects=objects, became=["late"] * len(objects))

    def _sent(self, flight: Flight[Any]) -> int:
        flight.lane.expire()
        op = next(self._ops)
        self._flights[op] = flight
        return op

    def _took(self, event: Event) -> bool:
        if isinstance(event, Ended):
            flight = self._flights.pop(event.op)
            flight.ended.set()
            if isinstance(flight, Move) and flight.buffer is not None:
                self.buffers.give_back(flight.buffer)
            self._ends.wake()
        return True

    # --- on the lanes' threads

    def _records(self, move: Move, leave: int = 0) -> list[memoryview]:
        """Where its records are in a buffer, which it has until it ends."""
        size = move.objects[0][0].record_bytes
        buffer = move.buffer = self.buffers.take(len(move.objects) * size, self._deadline_s, leave)
        if buffer is None:
            raise StorageError(f"no buffer came back within {self._deadline_s:g} s")
        return [buffer[at * size : (at + 1) * size] for at in range(len(move.objects))]

    def _get(self, move: Move, land: Callable[[int, memoryview], None]) -> Outcome:
        if not move.begin(self._clock()):
            return 0, 0
        names, records = move.names(), self._records(move)
        sizes = self._connection.storage.get(names, records)
        missing: Became = "missing" if self.storage.up else "down"
        damaged = list[str]()
        for i, ((kind, key), record, size) in enumerate(zip(move.objects, records, sizes, strict=True)):
            whole = size == len(record) and kind.stamp.intact(record, key)
            if size is not None and not whole:
                damaged.append(names[i])
            with move.lock:  # the engine may use its memory for another page once the flight was given up
                if move.given_up:
                    break
                if whole:
                    land(i, payload(record, kind))
                move.became[i] = "done" if whole else missing if size is None else "damaged"
        self._connection.delete_damaged(damaged)
        return 0, 0

    def _fill(self, move: Move, take_up: Callable[[int, memoryview], None]) -> Outcome:
        if not move.begin(self._clock()):
            return 0, 0
        records = self._records(move, leave=FETCHES)  # the reads', also while stores hang and others take their turn

        def sealed() -> list[tuple[memoryview]]:
            for (kind, key), record in zip(move.objects, records, strict=True):
                kind.seal_payload(record, key)
            return [(record,) for record in records]

        with move.lock:  # as in `_get`
            if move.given_up:
                return 0, 0
            for i, ((kind, _), record) in enumerate(zip(move.objects, records, strict=True)):
                take_up(i, payload(record, kind))
        return self._put([(move, sealed)])[0]

    def _put(self, sent: Sequence[tuple[Move, Callable[[], Sequence[Sequence[memoryview]]]]]) -> list[Outcome]:
        names, pieces, begun = list[str](), list[Sequence[memoryview]](), list[Move]()
        with self._sealing:
            for move, sealed in sent:
                if move.begin(self._clock()):
                    begun.append(move)
                    names += move.names()
                    pieces += sealed()
        if not begun:
            return [(0, 0) for _ in sent]
        answers = self._connection.put(names, pieces)
        refused: Became = "no space"
        if not all(answers):
            read_only = self._connection.refusal() is Refusal.READ_ONLY
            refused = "read only" if read_only else refused if self.storage.up else "down"
        stored, doubtful = iter(answers), list[str]()
        for move in begun:
            became = [("done" if next(stored) else refused) for _ in move.objects]
            if not move.end(became) and move.buffer is None:
                doubtful += move.names()
        self._connection.delete_damaged(doubtful)
        return [(0, 0) for _ in sent]
