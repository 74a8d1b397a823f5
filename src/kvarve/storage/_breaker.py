"""A circuit breaker: a storage that is down costs nothing, and is noticed when it is back. Names and bytes only.

A dead backend costs its callers a timeout per call, a hung one a thread per call, and both are kept busy by calls while
they recover. So an open circuit answers every call with a miss at once. One thread probes the backend meanwhile, and
ends when the backend has answered.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import ANY_NAME, Storage, StorageUsage, check_batch, check_names, check_pieces, deadline
from kvarve.system.background import BackgroundCall
from kvarve.system.regions import HostRegion

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PROBE_BYTES = 4096  # read of a stored object, to see that the medium works

_REFUSED = {
    "exists": "exists missed: down",
    "get": "get missed: down",
    "put": "put dropped: down",
    "touch": "touch dropped: down",
    "delete": "delete dropped: down",
    "drop": "drop missed: down",
    "usage": "last known usage: down",
}


@dataclass(eq=False)
class _Call:
    """A call in flight. One that hangs counts as one failure, however long it lasts."""

    what: str
    started: float
    hung: bool = False


class Breaker(Storage):
    """A circuit breaker around `inner`. Closed, it passes calls and errors on; open, it answers misses at once.

    The circuit opens after `failures` calls in a row that raised, or when a call has been in flight for longer than
    `deadline_s`, which is noticed when a call comes or `up` is read. The count starts anew once something was read,
    stored or removed: an `exists` or a miss may come from an index in memory while the disk below is gone.

    While it is open, a thread probes: it asks `exists` of one name after `probe_first_s`, then after pauses that double
    up to `probe_most_s`, and reads the beginning of that object if it is there. An answer makes the circuit half-open:
    calls pass, but the next failure opens it again and the pauses go on growing. It is fully closed once a call proves
    that the storage works, or a call that hung returns without error.

    A call that ends itself by the deadline that `kvarve.storage.left_s` tells it has hung as well.

    `changed` is called whenever `up` has changed, on any thread, also within a read of `up`: it may wake a thread, and
    may not block. `counts` has the objects answered while open, and how often the circuit opened and closed;
    `last_error` and `since` (in `clock`'s time) are for people. `pause(event, seconds)` waits for the event that long.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        deadline_s: float,
        changed: Callable[[], None] = lambda: None,
        failures: int = 3,
        probe_first_s: float = 0.1,
        probe_most_s: float = 2.0,
        close_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        assert deadline_s > 0 and failures >= 1 and 0 < probe_first_s <= probe_most_s
        self.inner = inner
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self.since = clock()
        self._deadline_s, self._failures, self._close_s = deadline_s, failures, close_s
        self._probe_first_s, self._probe_most_s = probe_first_s, probe_most_s
        self.changed, self._clock, self._pause = changed, clock, pause
        self._lock = threading.Lock()  # guards everything below and the counts; never held during a call of `inner`
        self._left = threading.Condition(self._lock)
        self._in_flight: set[_Call] = set()
        self._failures_in_row = 0  # since a call last proved that the storage works
        self._open = self._closed = False
        self._probe_s = probe_first_s
        self._prober: BackgroundCall[None] | None = None
        self._wake_prober = threading.Event()
        self._known_name: str | None = None  # an object that was there at the last proof, or by an answer before any
        self._usage = StorageUsage()
        self._closing: BackgroundCall[None] | None = None
        self._close_told = False  # a caller has got its result

    @property
    def up(self) -> bool:
        """Whether calls reach the storage now."""
        with self._lock:
            changed = self._look_for_hung_calls()
            self._start_probing()
            up = not self._open and not self._closed
        self._notify(changed)
        return up

    @property
    def open(self) -> bool:
        """Whether calls are answered by misses; to be read at any time, as it starts nothing."""
        return self._open

    def look(self) -> None:
        """Call once, so that a storage that does not answer is down from the start and not after `failures` calls."""
        try:
            self.exists([ANY_NAME])
        except StorageError as e:
            with self._lock:
                changed = self._count_failure(str(e), by=self._failures)
            self._notify(changed)

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        found = self._ask("exists", len(names), lambda: self.inner.exists(names), [False] * len(names))
        if self._known_name is None and True in found:  # an index may have said so: no proof, but a page to probe with
            with self._lock:
                self._known_name = self._known_name or names[found.index(True)]
        return found

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        missed: list[int | None] = [None] * len(names)
        return self._ask(
            "get", len(names), lambda: self.inner.get(names, into), missed, lambda sizes: _first(names, sizes)
        )

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        return self.put_pieces(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        check_pieces(names, data)
        return self._ask(
            "put",
            len(names),
            lambda: self.inner.put_pieces(names, data),
            [False] * len(names),
            lambda stored: _first(names, [done or None for done in stored]),
        )

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        self._ask("touch", len(names), lambda: self.inner.touch(names), None)

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        no, proof = [False] * len(names), lambda removed: ANY_NAME if any(removed) else None
        return self._ask("delete", len(names), lambda: self.inner.delete(names), no, proof)

    def drop(self, group: str | None = None) -> int:
        """As the protocol. StorageError while the circuit is open, as nothing is removed."""
        count = self._ask("drop", 1, lambda: self.inner.drop(group), -1, lambda count: ANY_NAME if count else None)
        if count < 0:
            raise StorageError("the storage is down: nothing was removed")
        return count

    def usage(self) -> StorageUsage:
        """The storage's usage, or while it is down the last one known."""
        usage = self._ask("usage", 1, self.inner.usage, None)
        with self._lock:
            self._usage = usage or self._usage
            return self._usage

    @property
    def known(self) -> StorageUsage:
        """The usage as the storage last told it: nothing is asked."""
        with self._lock:
            return self._usage

    def register(self, region: HostRegion) -> None:
        self.inner.register(region)

    def close(self) -> None:
        """Return within `close_s`. `inner` is closed when the last call in flight has returned.

        A storage is never closed under a call: some crash the process. If a call hangs for ever, it stays open.
        """
        with self._lock:
            self._closed = True
            if self._closing is None:
                self._closing = BackgroundCall("kvarve closes a storage", self._close_inner)
            closing, prober = self._closing, self._prober
            self._wake_prober.set()
        end = time.monotonic() + self._close_s
        closed = closing.ended(self._close_s)
        if prober is not None:
            prober.ended(max(0.0, end - time.monotonic()))
        with self._lock:
            told, self._close_told = self._close_told, self._close_told or closed
            hanging = ", ".join(sorted(call.what for call in self._in_flight)) or "its close"
        if not closed:
            log.warning("a storage hangs in %s: it is closed when that returns", hanging)
        elif not told:
            closing.result()

    # --- a call

    def _ask(
        self,
        what: str,
        count: int,
        ask: Callable[[], Answer],
        down: Answer,
        proof: Callable[[Answer], str | None] = lambda _: None,
    ) -> Answer:
        """Call `inner`, or answer `down` while the circuit is open. `proof(answer)` is a name that the medium had."""
        call = self._enter(what, count)
        if call is None:
            return down
        try:
            with deadline(self._deadline_s):
                answer = ask()
        except ConfigError:  # says nothing about the medium
            self._leave(call)
            raise
        except BaseException as e:  # also on an interrupt the call must leave `_in_flight`
            self._leave(call, trouble=f"{what}: {e}")
            raise
        self._leave(call, known=proof(answer))
        return answer

    def _enter(self, what: str, count: int) -> _Call | None:
        with self._lock:
            if self._closed:
                raise StorageError("this storage is closed")
            changed = self._look_for_hung_calls()
            call = None
            if self._open:
                self._start_probing()
                self.counts[_REFUSED[what]] += count
            else:
                call = _Call(what, self._clock())
                self._in_flight.add(call)
        self._notify(changed)
        return call

    def _leave(self, call: _Call, *, trouble: str = "", known: str | None = None) -> None:
        """Learn from how a call ended; one that began before the last change of state does not count."""
        with self._lock:
            changed = bool(trouble) and self._look_for_hung_calls()  # it may have ended itself at its deadline
            past = call.hung or call.started < self.since
            if trouble:
                self.counts["raised"] += 1
                changed |= self._count_failure(trouble, by=0 if past else 1)
            elif call.hung or (known is not None and not past):
                self._known_name = known if known not in (None, ANY_NAME) else self._known_name
                self._failures_in_row, self._probe_s = 0, self._probe_first_s
                changed = self._close_circuit()
            self._in_flight.remove(call)
            self._left.notify_all()
        self._notify(changed)

    # --- the circuit; with the lock held; True: `up` has changed

    def _look_for_hung_calls(self) -> bool:
        now = self._clock()
        hung = [call for call in self._in_flight if not call.hung and now - call.started > self._deadline_s]
        if not hung:
            return False
        for call in hung:
            call.hung = True
            self.counts["hung"] += 1
        return self._count_failure(f"{hung[0].what}: no answer within {self._deadline_s:g} s", by=self._failures)

    def _count_failure(self, why: str, by: int) -> bool:
        self.last_error = why
        self._failures_in_row += by
        if self._failures_in_row < self._failures or self._open or self._closed:
            return False
        self._open, self.since = True, self._clock()
        self.counts["went down"] += 1
        log.warning("a storage is down: %s", why)
        self._start_probing()
        return True

    def _start_probing(self) -> None:
        if self._prober is not None or not self._must_probe():  # or an earlier probe hangs, and will answer
            return
        try:
            self._prober = BackgroundCall("kvarve probes a storage", self._probe)
        except StorageError as e:  # no more threads: the next call tries again
            log.warning("no thread to probe a storage that is down: %s", e)

    def _close_circuit(self) -> bool:
        if not self._open or self._closed:
            return False
        self._open, self.since = False, self._clock()
        self._wake_prober.set()
        self.counts["came up"] += 1
        log.warning("a storage is up again")
        return True

    def _notify(self, changed: bool) -> None:
        """Never with the lock held: the callback reads `up`."""
        if changed:
            try:
                self.changed()
            except Exception:  # must not fail the call that noticed the change
                log.exception("a bug in the callback that hears that a storage went down or up")

    # --- threads of our own

    def _probe(self) -> None:
        """Probe until the circuit is closed, by a probe or by a call that hung and returned."""
        while True:
            with self._lock:
                if not self._must_probe():
                    self._prober = None
                    return
                pause_s, self._probe_s = self._probe_s, min(2 * self._probe_s, self._probe_most_s)
                self._wake_prober.clear()
            self._pause(self._wake_prober, pause_s)
            call = _Call("probe", 0.0, hung=True)  # a probe that hangs is no further failure
            with self._lock:
                if not self._must_probe():
                    continue
                self._in_flight.add(call)
                name = self._known_name or ANY_NAME
            trouble = ""
            try:
                with deadline(self._deadline_s):
                    if self.inner.exists([name]) == [True]:
                        self.inner.get([name], [memoryview(bytearray(_PROBE_BYTES))])
            except StorageError as e:
                trouble = str(e)
            except Exception as e:  # else the probes would end
                trouble = f"{type(e).__name__}: {e}"
                log.exception("a bug in a storage")
            with self._lock:
                self._in_flight.remove(call)
                self._left.notify_all()
                self.counts["probes"] += 1
                changed = False
                if trouble:
                    self.last_error = f"probe: {trouble}"
                elif self._open:  # else a call that hung has returned, which proves more
                    self._failures_in_row = self._failures - 1  # half-open: the next failure opens it again
                    changed = self._close_circuit()
            self._notify(changed)

    def _must_probe(self) -> bool:
        return self._open and not self._closed

    def _close_inner(self) -> None:
        with self._lock:
            self._left.wait_for(lambda: not self._in_flight)
        try:
            self.inner.close()
        except StorageError as e:
            log.warning("a storage could not be closed: %s", e)
            raise


def _first(names: Sequence[str], found: Sequence[object | None]) -> str | None:
    """The first of the names for which something was found."""
    return next((name for name, it in zip(names, found, strict=True) if it is not None), None)
