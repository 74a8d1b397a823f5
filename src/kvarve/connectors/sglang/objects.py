"""Sealed objects in a storage, for engines that keep pages in memory of their own. Knows no engine and no tensor.

An object is a record (`memory.record`) under a name that says which model, pool, key and rank it belongs to. All calls
return by their deadline, and a storage that fails, hangs or is not open yet is a miss.

    load:   storage ──> bounce buffer ──(check)──> put_down(i, payload)
    store:  take_up(i, payload) ──(seal)──> bounce buffer ──> storage

The storage is called on a thread of its own, which is abandoned at the deadline; its buffer comes back when it returns.
The caller's memory is touched on the caller's thread only, while its call lasts. So a read that comes late never writes
to memory that the caller has given back. The price is one copy.
"""

import logging
import mmap
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, TypeVar

from kvarve.errors import StorageError, require_assertions
from kvarve.memory.record import HEADER_BYTES, Stamp, record_bytes, whole
from kvarve.memory.seals import CHECKSUM, Seal
from kvarve.pages.keys import object_name
from kvarve.storage import Breaker, Storage, StorageUsage, Tiers
from kvarve.storage.urls import open_storage
from kvarve.system.background import Abandoned, BackgroundCall
from kvarve.system.regions import HostRegion
from kvarve.transfer.compression import compressing

log = logging.getLogger(__name__)

T = TypeVar("T")

BUFFERS = 6  # of all calls in flight, of loads and stores together
BUFFER_MEMORY = 96 << 20  # of all buffers; more if a single record is larger than one
AHEAD = 3  # pieces of one call in flight: one is checked and copied while others are read
_ASKED = 4  # calls in flight that need no buffer
_CLOSE_S = 8.0
_DAMAGED_KNOWN = 1 << 16  # names


@dataclass(frozen=True)
class Kind:
    """The objects of one pool of one model on one rank. `namespace` (32 bytes) identifies the model, and all that
    decides what the bytes mean; a pool that all ranks hold alike has rank 0."""

    namespace: bytes
    pool: str
    payload_bytes: int
    rank: int = 0
    ranks: int = 1
    seal: Seal = CHECKSUM

    @cached_property
    def stamp(self) -> Stamp:
        return Stamp(self.namespace, self.pool, self.payload_bytes, self.rank, self.ranks, self.seal)

    @cached_property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)

    def name(self, key: bytes) -> str:
        return object_name(self.namespace, key, self.pool, self.rank, self.ranks)


@dataclass(frozen=True)
class Rate:
    """What one load or store moved: whole objects, their payload, and the seconds of the call."""

    objects: int
    bytes: int
    seconds: float


class _Buffers:
    """Bounce buffers, made when they are needed first. A call that hangs keeps its own, so memory is bounded."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._left, self._size_bytes = count, size_bytes
        self._free: list[memoryview] = []
        self._replaced: list[memoryview] = []  # a storage may have registered them, so they stay where they are
        self._came_back = threading.Condition()

    def take(self, size_bytes: int, within_s: float, register: Callable[[HostRegion], None]) -> memoryview | None:
        """A buffer of at least `size_bytes`; None if none is free within the time."""
        with self._came_back:
            if not self._came_back.wait_for(lambda: self._free or self._left, within_s):
                return None
            if self._free:
                buffer = self._free.pop()
                if buffer.nbytes >= size_bytes:
                    return buffer
                self._replaced.append(buffer)
            else:
                self._left -= 1
        buffer = memoryview(mmap.mmap(-1, max(size_bytes, self._size_bytes)))  # aligned for direct I/O
        register(HostRegion(buffer))
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        with self._came_back:
            self._free.append(buffer)
            self._came_back.notify()


class _Flight(Generic[T]):
    """A call of the storage, and what comes back when it has ended: now, or after its caller has abandoned it."""

    def __init__(self, what: str, call: Callable[[], T], give_back: Callable[[], None]) -> None:
        try:
            self._call = BackgroundCall(f"kvarve: {what}", call)
        except BaseException:
            give_back()
            raise
        self._give_back = give_back

    def answer(self, end: float) -> T:
        """Its answer by then. Abandoned, or the storage's error."""
        return self._call.result(max(0.0, end - time.monotonic()))

    def let_go(self) -> None:
        """The caller no longer reads the buffer, or never will."""
        self._call.future.add_done_callback(lambda _: self._give_back())


class Objects:
    """The objects of one label in one storage, which it owns; used by several threads.

    `counts`, by object: loaded, stored, already there; gone (told to exist, and not read), damaged (a record that is
    truncated, corrupt or another's: it is deleted, and missing from then on), no space, read only; late, failed, down,
    busy and closed name why the storage was not asked or did not answer in time.
    """

    def __init__(
        self,
        opened: Callable[[], Breaker | Tiers],
        *,
        deadline_s: float,
        buffer_memory: int = BUFFER_MEMORY,
    ) -> None:
        """Open the storage, for at most `deadline_s`: if that takes longer, all is a miss until it is open.

        ConfigError and StorageError of opening it, if they come in time.
        """
        require_assertions()
        assert deadline_s > 0
        self.deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self._buffer_bytes = max(1, buffer_memory // BUFFERS)
        self._buffers = _Buffers(BUFFERS, self._buffer_bytes)
        self._asked = threading.BoundedSemaphore(_ASKED)
        self._lock = threading.Lock()  # guards everything below and the counts; never held during a call
        self._damaged: OrderedDict[str, None] = OrderedDict()  # not deleted yet, as far as known
        self._rates: dict[str, list[Rate]] = {"load": [], "store": []}
        self._closed = False
        self._usage = StorageUsage()
        self._asking: BackgroundCall[StorageUsage] | None = None
        self._storage: Breaker | Tiers | None = None
        opening = BackgroundCall("kvarve opens a storage", opened)
        try:
            self._storage = opening.result(deadline_s, late=self._opened_late)
        except Abandoned:
            log.warning("a storage takes longer than %g s to open: until it has, nothing is found in it", deadline_s)

    @property
    def up(self) -> bool:
        """Whether the storage is open and answers."""
        storage = self._storage
        return storage is not None and not self._closed and storage.up

    def usage(self) -> StorageUsage:
        """The storage's, as it last answered; it is asked again, and not waited for."""
        storage = self._storage
        with self._lock:
            if self._asking is not None and self._asking.future.done():
                if self._asking.future.exception() is None:
                    self._usage = self._asking.future.result()
                self._asking = None
            if self._asking is None and storage is not None and not self._closed:
                with suppress(StorageError):  # no more threads
                    self._asking = BackgroundCall("kvarve usage", storage.usage)
            return self._usage

    @property
    def last_error(self) -> str:
        return "" if self._storage is None else self._storage.last_error

    # --- the calls

    def exists(self, kinds: Sequence[Kind], keys: Sequence[Sequence[bytes]]) -> list[list[bool]] | None:
        """For each kind, which of its keys are there, asked in one call; None if the storage gives no answer."""
        names = [[kind.name(key) for key in asked] for kind, asked in zip(kinds, keys, strict=True)]
        found = self._there([name for each in names for name in each], time.monotonic() + self.deadline_s)
        if found is None:
            return None
        answers = iter(found)
        return [[next(answers) for _ in each] for each in names]

    def load(self, kind: Kind, keys: Sequence[bytes], put_down: Callable[[int, memoryview], None]) -> list[bool]:
        """Read objects and hand each payload that is whole to `put_down(i, payload)`, on this thread and in order.

        False where an object is missing, damaged or not read by the deadline; after trouble the rest is not asked for.
        """
        began = time.monotonic()
        end = began + self.deadline_s
        loaded = [False] * len(keys)
        damaged: list[str] = []
        flights: deque[tuple[range, memoryview, _Flight[list[int | None]]]] = deque()
        waiting = deque(self._pieces(kind, len(keys)))
        try:
            while waiting or flights:
                while waiting and len(flights) < AHEAD:
                    started = self._read(kind, [keys[i] for i in waiting[0]], end, alone=not flights)
                    if started is None:
                        break
                    flights.append((waiting.popleft(), *started))
                if not flights:
                    break
                piece, buffer, flight = flights[0]
                sizes = self._answer(flight, end, len(piece))
                if sizes is None:
                    break
                missing = "gone" if self.up else "down"
                for at, (i, size) in enumerate(zip(piece, sizes, strict=True)):
                    record = buffer[at * kind.record_bytes : (at + 1) * kind.record_bytes]
                    if size is None:
                        self._count(missing)
                    elif size == kind.record_bytes and kind.stamp.intact(record, keys[i]):
                        put_down(i, record[HEADER_BYTES : HEADER_BYTES + kind.payload_bytes])
                        loaded[i] = True
                    else:
                        damaged.append(kind.name(keys[i]))
                flights.popleft()
                flight.let_go()
        finally:
            for _, _, flight in flights:
                flight.let_go()
        if damaged:
            self._retire(damaged, end)
        self._moved("load", "loaded", kind, sum(loaded), began)
        return loaded

    def store(self, kind: Kind, keys: Sequence[bytes], take_up: Callable[[int, memoryview], None]) -> list[bool]:
        """Store objects that are not there yet; `take_up(i, payload)` fills each payload, on this thread and in order.

        True: the object is there. After trouble the rest is not stored.
        """
        began = time.monotonic()
        end = began + self.deadline_s
        names = [kind.name(key) for key in keys]
        there = self._there(names, end)
        if there is None:
            return [False] * len(keys)
        missing = [i for i, found in enumerate(there) if not found]
        self._count("already there", len(keys) - len(missing))
        stored = list(there)
        flights: deque[tuple[list[int], _Flight[list[bool]]]] = deque()
        try:
            for piece in self._pieces(kind, len(missing)):
                if len(flights) == AHEAD and not self._landed(flights, end, stored):
                    break
                numbers = [missing[at] for at in piece]
                flight = self._write(kind, [(names[i], keys[i], partial(take_up, i)) for i in numbers], end)
                if flight is None:
                    break
                flights.append((numbers, flight))
            while flights and self._landed(flights, end, stored):
                pass
        finally:
            for _, flight in flights:
                flight.let_go()
        self._moved("store", "stored", kind, sum(stored) - sum(there), began)
        return stored

    def drop(self) -> bool:
        """Remove all objects of the label; False if the storage does not say that it has done so."""
        end = time.monotonic() + self.deadline_s
        flight = self._ask("drop", lambda storage: storage.drop(), end)
        if flight is None or self._answer(flight, end, 1) is None:
            return False
        with self._lock:
            self._damaged.clear()
        return True

    def take_rates(self, what: str) -> list[Rate]:
        """Of the loads or stores since this was called last; `what` is "load" or "store"."""
        with self._lock:
            rates, self._rates[what] = self._rates[what], []
            return rates

    def close(self) -> None:
        """All later calls are misses. Returns within seconds; calls that hang are abandoned."""
        with self._lock:
            closed, self._closed, storage = self._closed, True, self._storage
        if closed or storage is None:
            return
        _close(storage)

    # --- inside

    def _opened_late(self, storage: Breaker | Tiers) -> None:
        with self._lock:
            self._storage = storage
            closed = self._closed
        if closed:
            _close(storage)
        else:
            log.warning("a storage that took long to open is open")

    def _pieces(self, kind: Kind, count: int) -> Iterator[range]:
        per_piece = max(1, self._buffer_bytes // kind.record_bytes)
        return (range(at, min(at + per_piece, count)) for at in range(0, count, per_piece))

    def _there(self, names: Sequence[str], end: float) -> list[bool] | None:
        """Which of these are there and not known to be damaged; None if the storage gives no answer."""
        if not names:
            return []
        flight = self._ask("exists", lambda storage: storage.exists(names), end)
        found = None if flight is None else self._answer(flight, end, len(names))
        if found is None or not self._damaged:
            return found
        with self._lock:
            return [there and name not in self._damaged for name, there in zip(names, found, strict=True)]

    def _read(
        self, kind: Kind, keys: Sequence[bytes], end: float, *, alone: bool
    ) -> tuple[memoryview, _Flight[list[int | None]]] | None:
        """Begin to read; unless `alone`, only if a buffer is free now, as the caller has one to empty."""
        size_bytes = len(keys) * kind.record_bytes
        taken = self._take(size_bytes, end if alone else 0.0, len(keys) if alone else 0)
        if taken is None:
            return None
        storage, buffer = taken
        names = [kind.name(key) for key in keys]
        into = [buffer[at : at + kind.record_bytes] for at in range(0, size_bytes, kind.record_bytes)]
        flight = self._start("get", lambda: storage.get(names, into), partial(self._buffers.give_back, buffer))
        return None if flight is None else (buffer, flight)

    def _write(
        self, kind: Kind, objects: Sequence[tuple[str, bytes, Callable[[memoryview], None]]], end: float
    ) -> "_Flight[list[bool]] | None":
        """Fill a buffer with sealed records and begin to store them."""
        taken = self._take(len(objects) * kind.record_bytes, end, len(objects))
        if taken is None:
            return None
        storage, buffer = taken
        records = []
        try:
            for at, (_, key, fill) in enumerate(objects):
                record = buffer[at * kind.record_bytes : (at + 1) * kind.record_bytes]
                behind = HEADER_BYTES + kind.payload_bytes
                fill(record[HEADER_BYTES:behind])
                record[behind:] = bytes(kind.record_bytes - behind)
                kind.stamp.seal(record, key)
                records.append(record)
        except BaseException:
            self._buffers.give_back(buffer)
            raise
        names = [name for name, _, _ in objects]
        with self._lock:
            damaged = [name for name in names if name in self._damaged]

        def put() -> list[bool]:
            left: Sequence[str] = ()
            if damaged:
                try:
                    storage.delete(damaged)
                    self._healed(damaged)
                except StorageError as e:  # what is there stays; the others can be stored
                    log.debug("damaged objects could not be deleted: %s", e)
                    left = damaged
            good = [i for i, name in enumerate(names) if name not in left]
            stored = storage.put([names[i] for i in good], [records[i] for i in good])
            done = {i for i, it in zip(good, stored, strict=True) if it}
            return [i in done for i in range(len(names))]

        return self._start("put", put, partial(self._buffers.give_back, buffer))

    def _landed(self, flights: deque[tuple[list[int], _Flight[list[bool]]]], end: float, stored: list[bool]) -> bool:
        """Take in the answer of the first put; False if it gave none."""
        numbers, flight = flights[0]
        answer = self._answer(flight, end, len(numbers))
        if answer is None:
            return False
        flights.popleft()
        flight.let_go()
        for i, done in zip(numbers, answer, strict=True):
            stored[i] = done
        if refused := answer.count(False):
            why = "read only" if self._usage.read_only else "no space"
            self._count(why if self.up else "down", refused)
        return True

    def _retire(self, names: Sequence[str], end: float) -> None:
        """Delete damaged objects; until that is done they are missing here."""
        self._count("damaged", len(names))
        log.warning("%d damaged objects in a storage, such as %s: they count as missing", len(names), names[0])
        with self._lock:
            self._damaged.update(dict.fromkeys(names))
            while len(self._damaged) > _DAMAGED_KNOWN:
                self._damaged.popitem(last=False)

        def delete(storage: Storage) -> None:
            if self.up:  # else nothing would be deleted
                storage.delete(names)
                self._healed(names)

        flight = self._ask("delete", delete, end)
        if flight is not None:
            self._answer(flight, end, 0)

    def _healed(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._damaged.pop(name, None)

    def _take(self, size_bytes: int, end: float, count: int) -> tuple[Storage, memoryview] | None:
        """The storage and a buffer by then, unless the storage is closed or not open yet."""
        storage = self._open_storage(count)
        if storage is None:
            return None
        buffer = self._buffers.take(size_bytes, max(0.0, end - time.monotonic()), storage.register)
        if buffer is None:
            self._count("busy", count)
            return None
        return storage, buffer

    def _open_storage(self, count: int) -> Breaker | Tiers | None:
        storage = None if self._closed else self._storage
        if storage is None:
            self._count("closed", count)
        return storage

    def _ask(self, what: str, ask: Callable[[Storage], T], end: float) -> "_Flight[T] | None":
        """Begin a call that needs no buffer, unless too many of them hang."""
        storage = self._open_storage(1)
        if storage is None:
            return None
        if not self._asked.acquire(timeout=max(0.0, end - time.monotonic())):
            self._count("busy")
            return None
        flight = self._start(what, lambda: ask(storage), self._asked.release)
        if flight is not None:
            flight.let_go()
        return flight

    def _start(self, what: str, call: Callable[[], T], give_back: Callable[[], None]) -> "_Flight[T] | None":
        try:
            return _Flight(what, call, give_back)
        except StorageError as e:  # no more threads
            self._count("failed")
            log.warning("%s", e)
            return None

    def _answer(self, flight: _Flight[T], end: float, count: int) -> T | None:
        """The answer of a call; None, counted, if it failed or is late."""
        try:
            return flight.answer(end)
        except Abandoned:
            self._count("late", count)
        except StorageError as e:  # the breaker logs when it goes down
            self._count("failed", count)
            log.debug("a call of a storage failed: %s", e)
        except Exception:  # of any storage: its bug must not be the engine's
            self._count("failed", count)
            log.exception("a bug in a storage")
        return None

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


def open_guarded(
    setting: str | Sequence[str], *, label: bytes, description: str, deadline_s: float, seal: Seal = CHECKSUM
) -> Breaker | Tiers:
    """The storage that a URL or several mean, behind circuit breakers; it need not answer now.

    ConfigError, StorageError as `open_storage` raises them.
    """
    guard = partial(Breaker, deadline_s=deadline_s)
    judge = partial(whole, seal=seal)
    storage = open_storage(
        setting,
        label=label,
        description=description,
        guard=guard,
        whole=judge,
        around=compressing,
        answers=False,
    )
    return storage if isinstance(storage, Tiers) else guard(storage)


def _close(storage: Breaker | Tiers) -> None:
    try:
        BackgroundCall("kvarve closes a storage", storage.close).result(_CLOSE_S)
    except Abandoned:
        log.warning("a storage takes longer than %g s to close: it is abandoned", _CLOSE_S)
    except StorageError as e:
        log.warning("a storage could not be closed: %s", e)
