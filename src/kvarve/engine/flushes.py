"""Flushes of memory, from any thread. All who ask for the same tiers at once share one, which keeps to the shortest of
their times."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from kvarve.background import BackgroundCall
from kvarve.engine.inputs import Evict
from kvarve.errors import Busy
from kvarve.model import Tier

POLL_S = 0.005  # between two checks whether backups have been written
TURN_S = 1.0  # that the engine's thread has for a question at least: it may be computing


class Pages(Protocol):
    """What a flush needs of a cache, on the engine's thread."""

    def idle(self) -> bool: ...
    def evict(self, tiers: Sequence[Tier]) -> int: ...


class _Flush:
    """One that is under way. Guarded by the lock of its `Flushes`."""

    def __init__(self, by_s: float) -> None:
        self.by_s = by_s  # by time.monotonic: when it waits no longer
        self.asked = 0  # by how many
        self.pages = Future[int]()  # that were evicted


class Flushes:
    """`ask(what, seconds, order)` calls something on the engine's thread, and has other ranks do `order` (see
    `Engine.ask`); `over`: whether that thread has ended."""

    def __init__(self, pages: Pages, ask: Callable[..., Any], over: Callable[[], bool]) -> None:
        self._pages, self._ask, self._over = pages, ask, over
        self._lock = threading.Lock()
        self._under_way: dict[Evict, _Flush] = {}  # by what they evict; each may still be shared

    def begin(self, tiers: Sequence[Tier], timeout_s: float) -> "Future[int]":
        """Have unpinned pages evicted after the backups under way, but after `timeout_s` at the latest; how many they
        are. The future is shared: it must not be cancelled."""
        what, by_s = Evict(tuple(sorted({*map(int, tiers)}))), time.monotonic() + timeout_s
        with self._lock:
            if (flush := self._under_way.get(what)) is None:
                flush = _Flush(by_s)
                flush.pages = BackgroundCall("kvarve flushes", partial(self._run, what, flush)).future
                self._under_way[what] = flush
            flush.by_s, flush.asked = min(flush.by_s, by_s), flush.asked + 1
            return flush.pages

    def _run(self, what: Evict, flush: _Flush) -> int:
        gone: int = 0
        try:
            while True:
                while not self._asked(flush, self._pages.idle) and time.monotonic() < flush.by_s:
                    time.sleep(POLL_S)
                with self._lock:
                    if over := time.monotonic() >= flush.by_s:
                        self._end(what, flush)  # who asks from now on begins another
                    asked = flush.asked
                pages, idle = self._asked(flush, lambda: (self._pages.evict(what.of()), self._pages.idle()), what)
                gone += pages
                with self._lock:
                    # Write-back copies pages down before it evicts them, and who has joined asks for a later eviction.
                    if over or (idle and asked == flush.asked):
                        self._end(what, flush)
                        return gone
        except BaseException:
            with self._lock:
                self._end(what, flush)
            raise

    def _end(self, what: Evict, flush: _Flush) -> None:
        if self._under_way.get(what) is flush:
            del self._under_way[what]

    def _asked(self, flush: _Flush, question: Callable[[], Any], order: Evict | None = None) -> Any:
        while True:
            try:
                return self._ask(question, TURN_S, order)
            except Busy:  # its turn takes long
                if self._over() or time.monotonic() >= flush.by_s:
                    raise
