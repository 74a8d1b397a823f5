"""What the live page at `/` shows: numbers, ids and keys of one server for its operator, and no prompt's text.

Beside what it shows of any cache (`live_cache.py`) these are requests: running, ended, and how fast they were answered.
The engine's thread is asked for the hottest prefixes alone, and is not waited for if it is busy.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields
from functools import partial
from math import ceil
from typing import Any

from kvarve import __version__
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.core import Hottest
from kvarve.core.observe.histograms import Histogram
from kvarve.core.observe.reasons import Reason
from kvarve.errors import KvarveError
from kvarve.metrics import Snapshot
from kvarve.pages.keys import group_name, root_key
from kvarve.pages.pools import Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.answers import Answer
from kvarve.reference.server.live_cache import HOTTEST, SLOW_S, CacheLive, kinds_of
from kvarve.reference.server.live_history import OUTPUT, REQUESTS, advice, reasons
from kvarve.reference.server.request_log import Responses
from kvarve.system.background import BackgroundCall

ASK_S, ASKED_S = 0.2, 600.0  # how long the engine's thread is waited for, and when the question is given up
ENDED, OPEN = 64, 32  # requests that are told of, at most
TTFTS, WINDOW_S = 2048, 60.0  # times to first token from which percentiles are taken: so many, and so old, at most
MOST_PATH = 100  # characters


@dataclass(eq=False)
class Entry:
    """One request. `told` has what is to be said of it once it has ended, when its answer is let go."""

    number: int
    id: str
    path: str
    key: str
    began_s: float  # by time.monotonic, like all times here
    answer: Answer | None = None
    timed: bool = False  # its time to first token has been noted
    told: Mapping[str, Any] = field(default_factory=dict)


class Recent:
    """The event loop begins and ends entries; any thread reads."""

    def __init__(self, group_of: Callable[[str], str]) -> None:
        """`group_of`: the name of a salt's group, which does not tell the salt."""
        self._group_of = group_of
        self._numbers = 0
        self._open: dict[int, Entry] = {}
        self._ended: deque[Entry] = deque(maxlen=ENDED)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=TTFTS)  # when, seconds

    def begin(self, id: str, path: str, key: str = "") -> Entry:
        """`key`: the name of the one that admitted it."""
        self._numbers += 1
        entry = self._open[self._numbers] = Entry(self._numbers, id, path[:MOST_PATH], key, time.monotonic())
        return entry

    def end(self, entry: Entry, status: int, code: str | None = None) -> None:
        """`code`: of the error that it got."""
        now = time.monotonic()
        entry.told = self._tell(entry, now) | {"status": status, "code": code, "ended_s": now}
        self._time(entry, now)
        entry.answer = None
        self._ended.append(entry)
        del self._open[entry.number]

    def ended(self, now: float) -> list[dict[str, Any]]:
        """The latest first, each with the seconds since its end (`ago_s`)."""
        told = [dict(entry.told) for entry in reversed([*self._ended])]
        return [each | {"ago_s": round(now - each.pop("ended_s"), 1)} for each in told]

    def open(self, now: float) -> tuple[int, list[dict[str, Any]]]:
        """How many are open, and the oldest of them."""
        found = [*self._open.values()]
        return len(found), [self._tell(entry, now) for entry in found[:OPEN]]

    def ttfts(self, now: float) -> tuple[float | None, float | None, int]:
        """The median and the 95th percentile of the times to first token of late, in seconds, and of how many."""
        for entry in [*self._open.values()]:
            self._time(entry, now)
        found = sorted(ttft_s for at, ttft_s in [*self._ttfts] if at > now - WINDOW_S)
        if not found:
            return None, None, 0
        p50, p95 = (found[ceil(share * len(found)) - 1] for share in (0.5, 0.95))
        return p50, p95, len(found)

    def _time(self, entry: Entry, now: float) -> None:
        answer = entry.answer
        if answer is not None and answer.first_seconds is not None and not entry.timed:
            entry.timed = True
            self._ttfts.append((now, answer.first_seconds))

    def _tell(self, entry: Entry, now: float) -> dict[str, Any]:
        answer = entry.answer
        told = {"number": entry.number, "id": entry.id, "path": entry.path, "key": entry.key, "state": "is prepared"}
        told |= {"seconds": round(now - entry.began_s, 3)}
        if answer is None or answer.salt is None:
            return told
        usage, ends = answer.usage(), {choice.finish for choice in [*answer.choices] if choice.finish is not None}
        return told | {
            "state": "waits" if answer.first_seconds is None else "answers",
            "group": self._group_of(answer.salt),
            "prompt": usage.prompt or answer.prompt_tokens,
            "completion": usage.completion,
            "cached": usage.details(),
            "reasons": {reason.value: tokens for reason, tokens in usage.reasons.items()},
            "queued_s": answer.queued_s,
            "ttft_s": answer.first_seconds,
            "finish": ", ".join(sorted(finish.value for finish in ends)),
        }


class Live(CacheLive):
    """The numbers of one server. The thread that samples ends when the engine shuts down."""

    INSTEAD = ", and `kvarve storage attach URL` puts another in its place"

    def __init__(
        self,
        engine: Engine,
        name: str,
        tokenizing: Callable[[], int],
        responses: Responses,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name`: of the model; `tokenizing`: requests that are being prepared."""
        self._engine, self._cache = engine, engine.cache
        self._tokenizing, self._responses, self._draining = tokenizing, responses, draining
        namespace = engine.cache.identity.fingerprint()
        self.recent = Recent(lambda salt: group_name(root_key(namespace, salt)))
        self._asking: Future[list[Hottest]] | None = None
        self._asked_s = 0.0
        self._cache.scheduler.core.watch()
        super().__init__(name, engine.cache.identity, engine.ends, tells_requests=True)

    # --- any thread

    def now(self) -> Snapshot:
        engine, cache, counts, s = self._engine, self._engine.cache, self._engine.counts, time.monotonic()
        admitted, layout = counts.admitted_rate.total(s), engine.model.layout
        kept = ((each.name, getattr(counts, each.name)) for each in fields(counts))
        return Snapshot(
            model=self._name,
            version=__version__,
            up=not engine.broken,
            running=engine.load()[0],
            waiting=engine.waiting(),
            ends={finish.value: count for finish, count in counts.ends.items()},
            prompt_tokens=counts.prompt_tokens,
            computed_tokens=counts.computed_tokens,
            recomputed_tokens=counts.recomputed_tokens,
            output_tokens=counts.output_tokens,
            preempted=counts.preempted,
            reasons=dict(counts.reasons),
            histograms={name: value for name, value in kept if isinstance(value, Histogram)},
            cache=cache.stats(),
            ages=cache.scheduler.core.ages,
            flows=cache.worker.flows(),
            storage_up=cache.up if cache.worker.attached is not None else None,
            storage_kinds=tuple(storage_kinds(cache)),
            dtype=cache.identity.dtype if layout.scales is None else layout.kv_cache_dtype,
            output_rate=counts.output_rate.per_second(s),
            hit_rate=counts.cached_rate.total(s) / admitted if admitted else 0.0,
            tokenizing=self._tokenizing(),
            responses=dict(self._responses),
        )

    def told(self, hour: bool = False) -> dict[str, Any]:
        told, at_s, model, counts = super().told(hour), time.monotonic(), self._engine.model, self._engine.counts
        running, waiting = self._engine.load()
        open_count, open_requests = self.recent.open(at_s)
        p50, p95, count = self.recent.ttfts(at_s)
        one = self._history.last(WINDOW_S)
        timed = counts.computed_tokens and counts.prefill_compute_s  # the first tokens are counted before their time
        speed = counts.computed_tokens / counts.prefill_compute_s if timed else None
        cached = sum(told["late"]["cached_tokens"].values())
        facts = {"context": model.max_tokens, "grid_tokens": model.layout.grid_tokens}

        def rate(happened: float) -> float:
            return 0.0 if one is None else round(happened / one.seconds, 2)

        return told | {
            "facts": told["facts"] | facts | {"shortest_hit": model.layout.shortest_hit},
            "late": told["late"] | {"saved_s": None if speed is None else round(cached / speed, 6)},
            "draining": self._draining(),
            "running": running,
            "waiting": waiting,
            "tokenizing": self._tokenizing(),
            "rejected": {str(status): count for status, count in sorted(self._rejected().items())},
            "preempted": counts.preempted,
            "ttft_s": {"p50": p50, "p95": p95, "requests": count},
            "prefill_tokens_per_s": speed and round(speed, 1),
            "per_s": {
                "requests": rate(one.happened[REQUESTS] if one else 0),
                "output_tokens": rate(one.happened[OUTPUT] if one else 0),
                "prompt_tokens": rate(sum(reasons(one).values()) if one else 0),
            },
            "total": told["total"] | {"requests": counts.finished},
            "open": {"count": open_count, "requests": open_requests},
            "requests": self.recent.ended(at_s),
        }

    # --- parts of it

    def _status(self) -> dict[str, Any]:
        return self._engine.admin.status()

    def _ttfts(self, at_s: float) -> tuple[float | None, float | None]:
        return self.recent.ttfts(at_s)[:2]

    def _look_around(self) -> tuple[object, bool, bool]:
        attached = self._cache.worker.attached
        return attached, attached is None or self._cache.up, self._draining()

    def _look(self) -> None:
        """Ask the engine's thread for the hottest prefixes. While it is busy the last answer stays."""
        if self._asking is None:
            self._asked_s = time.monotonic()
            what = partial(self._cache.scheduler.core.hottest, HOTTEST)
            self._asking = BackgroundCall("kvarve asks", lambda: self._engine.ask(what, ASKED_S)).future
        if wait([self._asking], ASK_S).done:
            asked, self._asking = self._asking, None
            try:
                self._hottest, self._hottest_s = asked.result(), time.monotonic()
            except KvarveError:  # it has ended
                self._hottest = []

    def _last_error(self) -> str:
        attached = self._cache.worker.attached
        return attached.storage.last_error if attached is not None else ""

    def _advice(self, found: Mapping[Reason, int], now: Snapshot) -> str:
        return advice(
            found,
            grid=self._engine.model.layout.grid_tokens,
            rounded=self._engine.model.layout.rounded,
            host=Tier.HOST in self._tiers,
            storage=self._cache.worker.attached is not None,
        )

    def _rejected(self) -> dict[int, int]:
        """How many requests got each status from 400 on."""
        found = Counter[int]()
        for (_, _, status), count in [*self._responses.items()]:
            if status >= 400:
                found[status] += count
        return found

    def _trouble(self, now: Snapshot) -> list[str]:
        found = [self._engine.broken] if self._engine.broken else []
        if self._asking is not None and (silent_s := time.monotonic() - self._asked_s) > SLOW_S:
            found.append(f"the engine has not answered for {silent_s:.0f} s: one step takes so long, or it hangs")
        return found + super()._trouble(now)


def storage_kinds(cache: PrefixCache) -> list[str]:
    """The schemes of what is attached, the fast one first."""
    attached = cache.worker.attached
    return kinds_of(attached.urls) if attached else []
