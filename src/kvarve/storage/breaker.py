"""A circuit breaker: a storage that is down costs nothing, and is noticed when it is back. Names and bytes only.

A dead backend costs its callers a timeout per call, a hung one a thread per call, and both cost it the calls themselves
while it tries to get up. So whoever stands in front of it stops asking: a miss is an answer at once. One thread asks
meanwhile, now and then, and goes away when it has been answered.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import ANY_NAME, Storage, StorageUsage, check_batch, check_names

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_LOOK_BYTES = 4096  # of a stored object, read to see that the medium can

_UNASKED = {
    "exists": "exists missed: down",
    "get": "get missed: down",
    "put": "put dropped: down",
    "delete": "delete dropped: down",
    "usage": "usage of before: down",
}


@dataclass(eq=False)
class _Call:
    """One call that is inside the storage. One that hangs is held against it once, however long it stays."""

    what: str
    started: float
    hung: bool = False


class Breaker(Storage):
    """`inner`, until it is down; from then on answers at once that nothing is there, until `inner` answers again.

    It is down after `failures` calls in a row that raised, or as soon as one has been inside for longer than
    `deadline_s`, which is noticed when a call comes or `up` is read. What breaks the row is something read, stored or
    removed: an `exists` or a miss may come from an index in memory while the disk below is gone. A call that raises
    while it is up raises to its caller.

    While it is down a thread of its own asks `exists` of one name, after `probe_first_s`, then twice as long up to
    `probe_most_s`, and reads the beginning of that object if it is there. An answer is a chance, no more: the next
    failure means down again and the pauses go on growing, until a call has proven that the storage works. So does a
    call that hung and comes back well.

    `changed` is called whenever `up` has changed, on any thread, also in the middle of reading `up`: it may wake
    somebody, and may not wait for anybody. `counts` says in objects what was answered without asking, and how often it
    went down and up; `last_error` and `since` (as `clock` counts) are for people. `pause(event, seconds)` waits for the
    event that long.
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
        self._lock = threading.Lock()  # of everything below and of the counts; never held while `inner` is asked
        self._left = threading.Condition(self._lock)
        self._inside: set[_Call] = set()
        self._row = 0  # failures since something was last known to work
        self._down = self._closed = False
        self._probe_s = probe_first_s
        self._prober: threading.Thread | None = None
        self._wake_prober = threading.Event()
        self._known: str | None = None  # an object that was there when we last heard
        self._usage = StorageUsage(0, 0, None, 0)
        self._closer: threading.Thread | None = None
        self._close_errors: list[StorageError] = []  # that nobody was told of yet

    @property
    def up(self) -> bool:
        """Whether calls reach the storage now."""
        with self._lock:
            turned = self._look_for_hung_calls()
            self._start_asking()
            up = not self._down and not self._closed
        self._tell(turned)
        return up

    def look(self) -> None:
        """Ask once: a storage that does not answer is down from the beginning, and not only after some calls."""
        try:
            self.exists([ANY_NAME])
        except StorageError as e:
            with self._lock:
                turned = self._fail(str(e), rows=self._failures)
            self._tell(turned)

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        return self._ask("exists", len(names), lambda: self.inner.exists(names), [False] * len(names))

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        missed: list[int | None] = [None] * len(names)
        return self._ask(
            "get", len(names), lambda: self.inner.get(names, into), missed, lambda sizes: _first(names, sizes)
        )

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        return self._ask(
            "put",
            len(names),
            lambda: self.inner.put(names, data),
            [False] * len(names),
            lambda stored: _first(names, [done or None for done in stored]),
        )

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        return self._ask(
            "delete",
            len(names),
            lambda: self.inner.delete(names),
            [False] * len(names),
            lambda removed: ANY_NAME if any(removed) else None,
        )

    def usage(self) -> StorageUsage:
        """What the storage says, or while it is down what it said last."""
        usage = self._ask("usage", 1, self.inner.usage, None)
        with self._lock:
            self._usage = usage or self._usage
            return self._usage

    def register(self, memory: memoryview) -> None:
        self.inner.register(memory)

    def close(self) -> None:
        """Let go within `close_s`. Calls that are inside come back when they can; the last of them closes `inner`.

        A storage is never closed under a call: some crash the process. One in which a call hangs for ever stays open.
        """
        with self._lock:
            self._closed = True
            if self._closer is None:
                self._closer = threading.Thread(target=self._close_inner, name="kvarve closes a storage", daemon=True)
                self._closer.start()
            threads = [thread for thread in (self._closer, self._prober) if thread is not None]
            self._wake_prober.set()
        end = time.monotonic() + self._close_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            if threads[0].is_alive():
                inside = ", ".join(sorted(call.what for call in self._inside)) or "its close"
                log.warning("a storage hangs in %s: it is closed when that comes back", inside)
            errors = [*self._close_errors]
            self._close_errors.clear()
        for error in errors:
            raise error

    # --- a call

    def _ask(
        self,
        what: str,
        count: int,
        ask: Callable[[], Answer],
        down: Answer,
        proof: Callable[[Answer], str | None] = lambda _: None,
    ) -> Answer:
        """Ask `inner`, or answer `down` while it is. `proof` of an answer names an object that the medium had."""
        call = self._enter(what, count)
        if call is None:
            return down
        try:
            answer = ask()
        except ConfigError:  # says nothing about the medium
            self._leave(call)
            raise
        except BaseException as e:  # whatever it is, the call is not inside any more, and it goes on to the caller
            self._leave(call, trouble=f"{what}: {e}")
            raise
        self._leave(call, known=proof(answer))
        return answer

    def _enter(self, what: str, count: int) -> _Call | None:
        with self._lock:
            if self._closed:
                raise StorageError("this storage is closed")
            turned = self._look_for_hung_calls()
            call = None
            if self._down:
                self._start_asking()
                self.counts[_UNASKED[what]] += count
            else:
                call = _Call(what, self._clock())
                self._inside.add(call)
        self._tell(turned)
        return call

    def _leave(self, call: _Call, *, trouble: str = "", known: str | None = None) -> None:
        """What a call says of the storage; one from before the storage last went down or up says nothing of now."""
        with self._lock:
            self._inside.remove(call)
            self._left.notify_all()
            turned, past = False, call.hung or call.started < self.since
            if trouble:
                self.counts["raised"] += 1
                turned = self._fail(trouble, rows=0 if past else 1)
            elif call.hung or (known is not None and not past):
                self._known = known if known not in (None, ANY_NAME) else self._known
                self._row, self._probe_s = 0, self._probe_first_s
                turned = self._go_up()
        self._tell(turned)

    # --- up and down; all of it under the lock, and true when it has changed

    def _look_for_hung_calls(self) -> bool:
        now = self._clock()
        hung = [call for call in self._inside if not call.hung and now - call.started > self._deadline_s]
        if not hung:
            return False
        for call in hung:
            call.hung = True
            self.counts["hung"] += 1
        return self._fail(f"{hung[0].what}: no answer within {self._deadline_s:g} s", rows=self._failures)

    def _fail(self, why: str, rows: int) -> bool:
        self.last_error = why
        self._row += rows
        if self._row < self._failures or self._down or self._closed:
            return False
        self._down, self.since = True, self._clock()
        self.counts["went down"] += 1
        log.warning("a storage is down: %s", why)
        self._start_asking()
        return True

    def _start_asking(self) -> None:
        if self._prober is not None or not self._has_to_ask():  # or one hangs in a question of earlier, which will do
            return
        prober = threading.Thread(target=self._probe, name="kvarve asks a storage", daemon=True)
        try:
            prober.start()
        except RuntimeError as e:  # no more threads are to be had: whoever comes next tries again
            log.warning("nobody asks whether the storage is up: %s", e)
        else:
            self._prober = prober

    def _go_up(self) -> bool:
        if not self._down or self._closed:
            return False
        self._down, self.since = False, self._clock()
        self._wake_prober.set()
        self.counts["came up"] += 1
        log.warning("a storage is up again")
        return True

    def _tell(self, turned: bool) -> None:
        """Never under the lock: who is told will ask."""
        if turned:
            try:
                self.changed()
            except Exception:  # whoever reads or writes a page, or asks for us, is not to suffer for it
                log.exception("a bug in who is told that a storage went down or up")

    # --- threads of our own

    def _probe(self) -> None:
        """Ask until the storage is up again, by an answer to this or to another call."""
        while True:
            with self._lock:
                if not self._has_to_ask():
                    self._prober = None
                    return
                pause_s, self._probe_s = self._probe_s, min(2 * self._probe_s, self._probe_most_s)
                self._wake_prober.clear()
            self._pause(self._wake_prober, pause_s)
            call = _Call("probe", 0.0, hung=True)  # nothing more can be held against it
            with self._lock:
                if not self._has_to_ask():
                    continue
                self._inside.add(call)
                name = self._known or ANY_NAME
            trouble = ""
            try:
                if self.inner.exists([name]) == [True]:
                    self.inner.get([name], [memoryview(bytearray(_LOOK_BYTES))])
            except StorageError as e:
                trouble = str(e)
            except Exception as e:  # or nobody would ask any more
                trouble = f"{type(e).__name__}: {e}"
                log.exception("a bug in a storage")
            with self._lock:
                self._inside.remove(call)
                self._left.notify_all()
                self.counts["probes"] += 1
                turned = False
                if trouble:
                    self.last_error = f"probe: {trouble}"
                elif self._down:  # else a call that hung has come back meanwhile, which says more
                    self._row = self._failures - 1  # a chance, no more
                    turned = self._go_up()
            self._tell(turned)

    def _has_to_ask(self) -> bool:
        return self._down and not self._closed

    def _close_inner(self) -> None:
        with self._lock:
            self._left.wait_for(lambda: not self._inside)
        try:
            self.inner.close()
        except StorageError as e:
            self._close_errors.append(e)
            log.warning("a storage could not be closed: %s", e)


def _first(names: Sequence[str], found: Sequence[object | None]) -> str | None:
    """The first of the names for which something was found."""
    return next((name for name, it in zip(names, found, strict=True) if it is not None), None)
