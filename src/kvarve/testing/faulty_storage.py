"""A storage with faults, around a real one: it loses, damages, stalls and fails as told, and replays from its seed.

What goes wrong, and to which object, follows from the seed and the order of the calls alone. Threads that call at once
share one order, so a replay of theirs is only as exact as their schedule.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvarve.errors import StorageError
from kvarve.storage.altered import AlteredStorage
from kvarve.storage.base import Storage, StorageUsage, check_batch

Call = Literal["exists", "get", "put", "touch", "delete", "drop", "usage"]
Fault = Literal["raise", "lose", "truncate", "flip", "swap", "short"]

# The call of each fault of a single object; "raise" fails any whole call.
_CALL_OF: dict[Fault, Call] = {"lose": "put", "truncate": "put", "flip": "put", "swap": "put", "short": "get"}


@dataclass(frozen=True)
class Rule:
    """One kind of fault.

    raise: StorageError after a part of the batch is done. lose: a put answers True and stores nothing. truncate, flip,
    swap: a put stores less, or one byte changed, or exchanges the object with another. short: a get reads less than is
    stored and answers that length. An object too small for its fault stays whole, and is not counted.
    """

    fault: Fault
    call: Call | None = None  # only for "raise": in which call; None is in any
    nth: int | None = None  # only in the n-th such call, counted from 1
    probability: float = 1.0  # for "raise" of each call, for the others of each object

    def __post_init__(self) -> None:
        assert self.call in (None, _CALL_OF.get(self.fault, self.call)), f"a {self.call} cannot {self.fault}"


class FaultyStorage(AlteredStorage):
    """`inner` with the faults of `rules`. `counts`: of calls, and of faults injected (stalls also by call); `puts`: the
    names of each put; `closed`: whether it was closed. One that `stays` leaves `inner` open, as a disk outlives a
    process."""

    def __init__(
        self,
        inner: Storage,
        rules: Iterable[Rule] = (),
        *,
        seed: int = 0,
        stall_limit_s: float = 30,
        stays: bool = False,
    ) -> None:
        super().__init__(inner)
        self.rules = list(rules)  # a test may change it between calls
        self.dead = False  # while a test sets it, every call but close raises
        self.read_only = False  # while a test sets it, nothing is stored
        self.before: Callable[[Call], object] = lambda call: None  # called on the thread of each call
        self.puts: list[list[str]] = []
        self.stays, self.closed = stays, threading.Event()
        self.counts: Counter[str] = Counter()
        self._calls = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards everything above and `_stored_names`
        self._stored_names: dict[str, None] = {}  # in order of their first put: a swap may hit these
        self._stall_limit_s = stall_limit_s
        self._stalled: Call | None = None  # only calls of this kind wait
        self._running, self._arrivals = threading.Event(), threading.Semaphore(0)
        self._running.set()

    # For the test. Damage is done to stored objects, so they must exist.

    def stall(self, call: Call | None = None) -> None:
        """From now on calls (of one kind) wait for `release`; after `stall_limit_s` of that they raise StorageError."""
        self._stalled = call
        self._running.clear()

    def release(self) -> None:
        self._running.set()

    def leave_behind(self) -> threading.Event:
        """What the calls that wait now wait for from now on, instead of `release`; no others wait."""
        left, self._running = self._running, threading.Event()
        self.release()
        return left

    def wait_for_stalled_call(self) -> None:
        """Return when a call has begun to wait, each call once; StorageError when none comes within the limit."""
        if not self._arrivals.acquire(timeout=self._stall_limit_s):
            raise StorageError(f"no call came to the stalled storage within {self._stall_limit_s} s")

    def truncate(self, name: str, size_bytes: int | None = None) -> None:
        """Cut the stored object to `size_bytes`, or somewhere."""
        data = self._stored(name)
        self._overwrite("truncate", {name: data[: self._below(len(data)) if size_bytes is None else size_bytes]})

    def flip(self, name: str, offset: int | None = None) -> None:
        """Change the stored object's byte at `offset`, or some byte."""
        data = self._stored(name)
        data[self._below(len(data)) if offset is None else offset] ^= 1 << self._below(8)
        self._overwrite("flip", {name: data})

    def swap(self, one: str, other: str) -> None:
        """Exchange what is stored under the two names."""
        self._overwrite("swap", {one: self._stored(other), other: self._stored(one)})

    # The storage.

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._begin("exists", len(names), lambda done: self.inner.exists(names[:done]))
        return super().exists(names)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        nth = self._begin("get", len(names), lambda done: self.inner.get(names[:done], into[:done]))
        # A short read goes through other memory, so that the rest of the caller's buffer stays as it was.
        read = [memoryview(bytearray(view.nbytes)) if self._strikes("short", nth) else view for view in into]
        sizes = super().get(names, read)
        for i, (size_bytes, view) in enumerate(zip(sizes, into, strict=True)):
            whole = min(size_bytes or 0, view.nbytes)
            if read[i] is not view and whole:
                sizes[i] = short = self._below(whole)
                view[:short] = read[i][:short]
                self._count("short")
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        self.puts.append([*names])
        nth = self._begin("put", len(names), lambda done: self.inner.put(names[:done], data[:done]))
        if self.read_only:
            return [False] * len(names)
        lost = [self._strikes("lose", nth) for _ in names]
        kept = [(name, self._worn(view, nth)) for name, view, gone in zip(names, data, lost, strict=True) if not gone]
        answers = iter(super().put([name for name, _ in kept], [view for _, view in kept]))
        self._count("lose", sum(lost))
        stored = [gone or next(answers) for gone in lost]
        for name, was_stored, gone in zip(names, stored, lost, strict=True):
            if was_stored and not gone:
                self._remember_and_swap(name, nth)
        return stored

    def touch(self, names: Sequence[str]) -> None:
        self._begin("touch", len(names), lambda done: self.inner.touch(names[:done]))
        super().touch(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        self._begin("delete", len(names), lambda done: self.inner.delete(names[:done]))
        return super().delete(names)

    def drop(self, group: str | None = None) -> int:
        self._begin("drop", 0, lambda _: None)
        return super().drop(group)

    def usage(self) -> StorageUsage:
        self._begin("usage", 0, lambda _: None)
        return replace(super().usage(), read_only=True) if self.read_only else super().usage()

    def close(self) -> None:
        self.closed.set()
        if not self.stays:
            super().close()

    # Faults.

    def _begin(self, call: Call, batch: int, do_part: Callable[[int], object]) -> int:
        """Count the call, stall, fail; otherwise return its number among calls of its kind."""
        with self._lock:
            self.counts[call] += 1
            self._calls += 1
            nth, nth_of_all = self.counts[call], self._calls
        self.before(call)
        running = self._running
        if self._stalled in (None, call) and not running.is_set():
            self._count("stall")
            self._count(f"stall: {call}")
            self._arrivals.release()
            if not running.wait(self._stall_limit_s):
                raise StorageError(f"injected: {call} stalled for {self._stall_limit_s} s")
        if self.dead:
            self._count("dead")
            raise StorageError(f"injected: the backend is dead, {call} did 0 of {batch}")
        if self._strikes("raise", nth, call) or self._strikes("raise", nth_of_all):
            done = self._below(batch) if batch else 0
            do_part(done)
            self._count("raise")
            raise StorageError(f"injected: {call} failed after {done} of {batch}")
        return nth

    def _strikes(self, fault: Fault, nth: int, call: Call | None = None) -> bool:
        """Whether a rule of this fault (a "raise": with this `call`) hits now."""
        with self._lock:
            return any(
                rule.nth in (None, nth) and self._random.random() < rule.probability
                for rule in self.rules
                if rule.fault == fault and (fault != "raise" or rule.call == call)
            )

    def _worn(self, data: memoryview, nth: int) -> memoryview:
        """`data`, perhaps truncated or with a flipped bit."""
        if data.nbytes and self._strikes("truncate", nth):
            data = data[: self._below(data.nbytes)]
            self._count("truncate")
        if data.nbytes and self._strikes("flip", nth):
            data = memoryview(bytearray(data))
            data[self._below(data.nbytes)] ^= 1 << self._below(8)
            self._count("flip")
        return data

    def _remember_and_swap(self, name: str, nth: int) -> None:
        with self._lock:
            self._stored_names[name] = None
            others = [other for other in self._stored_names if other != name]
        if self._strikes("swap", nth):
            present = [other for other, there in zip(others, self.inner.exists(others), strict=True) if there]
            if present and self.inner.exists([name]) == [True]:
                self.swap(name, present[self._below(len(present))])

    def _stored(self, name: str) -> bytearray:
        data = self.read(name)
        assert data is not None, f"{name} is not stored"
        return bytearray(data)

    def _overwrite(self, fault: Fault, objects: dict[str, bytearray]) -> None:
        self.write(objects)
        self._count(fault)

    def _below(self, end: int) -> int:
        with self._lock:
            return self._random.randrange(end)

    def _count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times
