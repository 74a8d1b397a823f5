"""Flushes of memory, from any thread. All who ask for the same tiers at once share one, which keeps to the shortest of
their times; where the engine is too busy to flush by then, those alone are told so whose time is over."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, Protocol

from kvarve.errors import Busy
from kvarve.pages.pools import Tier
from kvarve.reference.engine.inputs import Evict
from kvarve.system.background import BackgroundCall

POLL_S = 0.005  # between two checks whether backups have been written
TURN_S = 1.0  # that the engine's thread has for a question at least: it may be computing


class Pages(Protocol):
    """What a flush needs of a core, on the engine's thread."""

    def idle(self) -> bool: ...
    def flush(self, tiers: Sequence[Tier]) -> int: ...


class _Flush:
    """One that is under way. Guarded by the lock of its `Flushes`."""

    def __init__(self) -> None:
        self.asked = 0  # by how many
        self.gone = 0  # pages that were evicted
        self.waiting = list[tuple[float, Future[int]]]()  # until when, by time.monotonic, and for how many pages

    @property
    def by_s(self) -> float:
        """When it waits no longer."""
        return min(by_s for by_s, _ in self.waiting)

    def late(self, now_s: float) -> list["Future[int]"]:
        """Those whose time is over: they wait no longer."""
        late = [pages for by_s, pages in self.waiting if by_s <= now_s]
        self.waiting = [(by_s, pages) for by_s, pages in self.waiting if by_s > now_s]
        return late


class Flushes:
    """`ask(what, seconds, order)` calls something on the engine's thread, and has other ranks do `order` (see
    `Engine.ask`); `over`: whether that thread has ended."""

    def __init__(self, pages: Pages, ask: Callable[..., Any], over: Callable[[], bool]) -> None:
        self._pages, self._ask, self._over = pages, ask, over
        self._lock = threading.Lock()
        self._under_way: dict[Evict, _Flush] = {}  # by what they evict; each may still be shared

    def begin(self, tiers: Sequence[Tier], timeout_s: float) -> "Future[int]":
        """Have unpinned pages evicted after the backups under way, but after `timeout_s` at the latest; how many they
        are. Busy: the engine's thread had no turn for it in that time."""
        what, pages = Evict(tuple(sorted({*map(int, tiers)}))), Future[int]()
        pages.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            flush = self._under_way.get(what) or _Flush()
            flush.waiting.append((time.monotonic() + timeout_s, pages))
            flush.asked += 1
            if what not in self._under_way:
                BackgroundCall("kvarve flushes", partial(self._run, what, flush))
                self._under_way[what] = flush
        return pages

    def _run(self, what: Evict, flush: _Flush) -> None:
        while flush.waiting:
            trouble: BaseException | None = None
            try:
                self._flush(what, flush)
            except BaseException as error:  # noqa: BLE001  all who wait are told
                trouble = error
            with self._lock:
                busy = isinstance(trouble, Busy) and not self._over()
                ended = flush.late(time.monotonic() if busy else inf)
                if not flush.waiting:
                    self._end(what, flush)
            for pages in ended:
                pages.set_result(flush.gone) if trouble is None else pages.set_exception(trouble)

    def _flush(self, what: Evict, flush: _Flush) -> None:
        """Busy: the engine's thread has no turn for it, and the shortest of the times is over."""
        while True:
            while not self._asked(flush, self._pages.idle) and time.monotonic() < flush.by_s:
                time.sleep(POLL_S)
            with self._lock:
                if over := time.monotonic() >= flush.by_s:
                    self._end(what, flush)  # who asks from now on begins another
                asked = flush.asked
            pages, idle = self._asked(flush, lambda: (self._pages.flush(what.of()), self._pages.idle()), what)
            with self._lock:
                flush.gone += pages
                # Under write-back a page is copied down before it is evicted; who joined asks for a later eviction.
                if over or (idle and asked == flush.asked):
                    self._end(what, flush)
                    return

    def _end(self, what: Evict, flush: _Flush) -> None:
        if self._under_way.get(what) is flush:
            del self._under_way[what]

    def _asked(self, flush: _Flush, question: Callable[[], Any], order: Evict | None = None) -> Any:
        while True:
            try:
                return self._ask(question, TURN_S, order)
            except Busy:  # its turn takes long
                with self._lock:
                    if self._over() or time.monotonic() >= flush.by_s:
                        raise
