"""What the live page at `/` shows: numbers, ids and keys of one server for its operator, and no prompt's text.

A thread takes a sample of the counters every `EVERY_S`, so that the last minutes are there when an operator opens the
page. The rest is put together on demand, at most once in `FRESH_S` however many viewers there are. The engine's thread
is asked for the hottest prefixes alone, and is not waited for if it is busy.
"""

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from math import ceil
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from kvarve import __version__
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.copies.effects import Refusal
from kvarve.core.core import Hottest
from kvarve.core.observe.reasons import Reason
from kvarve.errors import KvarveError
from kvarve.pages.keys import group_name, root_key
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.answers import Answer
from kvarve.reference.server.forms import by_tier
from kvarve.reference.server.live_history import EVERY_S, FINE, OUTPUT, REQUESTS, History, Sample, advice, reasons
from kvarve.reference.server.request_log import Responses
from kvarve.reference.server.work_threads import Shared, apart
from kvarve.reports import COLORS
from kvarve.system.background import BackgroundCall

log = logging.getLogger(__name__)

FRESH_S = 0.5
STORAGE_EVERY = 5  # samples; a storage may be slow to say what it holds
HOTTEST = 20
ASK_S, ASKED_S = 0.2, 600.0  # how long the engine's thread is waited for, and when the question is given up
SLOW_S = 5.0  # from then on a call, or an engine that does not answer, is trouble
REFUSALS = {
    Refusal.FULL: "storage has no room: nothing is stored",
    Refusal.READ_ONLY: "storage can only be read: nothing is stored",
}
AGAIN = "Such pages are computed and stored again"
DOWN = (
    "storage does not answer: requests go on without it. It is used again as soon as it answers, "
    "and `kvarve storage attach URL` puts another in its place"
)
_OF_STORAGE = (
    *("attached", "up", "for_s", "last_error", "bytes", "capacity_bytes", "objects", "room_bytes", "read_only"),
    *("lost_objects", "damaged_objects"),
)
ENDED, OPEN = 64, 32  # requests that are told of, at most
TTFTS, WINDOW_S = 2048, 60.0  # times to first token from which percentiles are taken: so many, and so old, at most
MOST_PATH = 100  # characters
KEY_DIGITS = 16  # of a page's key, which is how `kvarve storage ls` begins to name it

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """The page's files and the colours of tiers, by name: bytes and media types. They say nothing of the server."""
    light, dark = ("".join(f"--{name}:{both[at]};" for name, both in COLORS.items()) for at in (0, 1))
    colors = f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
    found = {"colors.css": (colors.encode(), MEDIA_TYPES[".css"])}
    for file in (files("kvarve.reference.server") / "page").iterdir():
        if media_type := MEDIA_TYPES.get(PurePath(file.name).suffix):
            found[file.name] = file.read_bytes(), media_type
    return found


def page_routes() -> APIRouter:
    """The page's files."""
    router = APIRouter()

    def answer(content: bytes, media_type: str) -> Callable[[], Response]:
        return lambda: Response(content, media_type=media_type, headers=HEADERS)

    for name, file in page_files().items():
        path = "/" if name == "page.html" else f"/live/{name}"
        router.get(path, include_in_schema=False)(answer(*file))
    return router


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


class Live:
    """The numbers of one server. The thread that samples ends when the engine shuts down."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        tokenizing: Callable[[], int],
        responses: Responses,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name`: of the model; `tokenizing`: requests that are being prepared."""
        self._engine, self._cache, self._name = engine, engine.cache, name
        self._tokenizing, self._responses, self._draining = tokenizing, responses, draining
        namespace = engine.cache.identity.fingerprint()
        self.recent = Recent(lambda salt: group_name(root_key(namespace, salt)))
        self._history = History()
        self._began_s = self._sampled_s = time.monotonic()
        self._counted: dict[Reason | str, float] = {}  # at the last sample
        self._storage: dict[str, Any] = {}
        self._countdown = 0  # samples until the storage is asked again
        self._hottest: list[Hottest] = []
        self._hottest_s = self._began_s  # when they were told
        self._asking: Future[list[Hottest]] | None = None
        self._asked_s = 0.0
        self._made = dict.fromkeys((False, True), (b"", 0.0))  # what viewers got last, and until when it is fresh
        self._shared = {hour: Shared(partial(self._content, hour)) for hour in self._made}
        self._tiers = [tier for tier in MEMORY_TIERS if _size(tier, engine.cache.stats())]  # that can hold pages
        self._cache.scheduler.core.watch()
        self.mark("start", f"version {__version__}")
        self._state = self._look_around()
        threading.Thread(target=self._sample_all, name="kvarve live", daemon=True).start()

    # --- any thread

    async def data(self, hour: bool = False) -> Response:
        """The endpoint, with the history of five minutes or of an hour; viewers share an answer."""
        content = await self._shared[hour].get()
        return Response(content, media_type="application/json", headers=HEADERS | {"Cache-Control": "no-store"})

    async def _content(self, hour: bool) -> bytes:
        if time.monotonic() >= self._made[hour][1]:
            made = await apart(lambda: json.dumps(self.told(hour), separators=(",", ":")).encode())
            self._made[hour] = made, time.monotonic() + FRESH_S
        return self._made[hour][0]

    def mark(self, what: str, text: str) -> None:
        """Note a change of the server for the charts."""
        self._history.mark(time.time(), what, text)

    def told(self, hour: bool = False) -> dict[str, Any]:
        """All that the page shows."""
        self._look()
        now, engine, stats = time.monotonic(), self._engine, self._cache.stats()
        running, waiting = engine.load()
        open_count, open_requests = self.recent.open(now)
        p50, p95, count = self.recent.ttfts(now)
        return {
            "model": self._name,
            "version": __version__,
            "up": not engine.broken,
            "draining": self._draining(),
            "now": round(time.time(), 3),
            "up_s": round(now - self._began_s, 1),
            "facts": self._facts(),
            "running": running,
            "waiting": waiting,
            "tokenizing": self._tokenizing(),
            "rejected": {str(status): count for status, count in sorted(self._rejected().items())},
            "preempted": engine.counts.preempted,
            "ttft_s": {"p50": p50, "p95": p95, "requests": count},
            **self._late(),
            "trouble": self._trouble(stats, now),
            "tiers": [self._tier(tier, stats) for tier in self._tiers],
            "storage": self._storage,
            "history": self._history.told(hour),
            "lanes": self._lanes(stats),
            "hottest": [_prefix(each, self._cache.identity.page_tokens) for each in self._hottest],
            "hottest_ago_s": round(now - self._hottest_s, 1),
            "open": {"count": open_count, "requests": open_requests},
            "requests": self.recent.ended(now),
            "reasons": {reason.value: reason.meaning for reason in Reason},
        }

    def sample(self) -> None:
        """Take a sample of the counters; the thread does it."""
        now, stats, counts = time.monotonic(), self._cache.stats(), self._engine.counts
        self._note_changes()
        if self._countdown == 0:
            self._storage = self._of_storage()
        self._countdown = (self._countdown + 1) % STORAGE_EVERY
        counted: dict[Reason | str, float] = {REQUESTS: counts.finished, OUTPUT: counts.output_tokens}
        counted |= {reason: tokens for reason, tokens in counts.reasons.items() if reason is not Reason.ANOTHER_SAMPLE}
        counted |= {name: flow.bytes.sum for name, flow in self._cache.worker.flows().items()}
        held: dict[str, float | None] = {tier.name.lower(): _bytes(tier, stats) for tier in self._tiers}
        if self._storage.get("attached"):
            held["storage"] = self._storage.get("bytes")
        sample = Sample(
            unix_s=time.time(),
            seconds=max(1e-3, now - self._sampled_s),
            held=held,
            ttft_s=self.recent.ttfts(now)[:2],
            happened={name: value - self._counted.get(name, 0) for name, value in counted.items()},
            **dict(zip(("running", "waiting"), self._engine.load(), strict=True)),
        )
        self._history.add(sample)
        self._counted, self._sampled_s = counted, now

    # --- its own thread

    def _sample_all(self) -> None:
        failed = False
        while not self._engine.ends(EVERY_S):
            try:
                self.sample()
            except Exception:  # a page that lacks samples is better than none, and the next one may do
                if not failed:
                    log.exception("the live page lacks a sample")
                failed = True

    def _look_around(self) -> tuple[object, bool, bool]:
        """What changes seldom: the storage, whether it answers, and whether the server drains."""
        attached = self._cache.worker.attached
        return attached, attached is None or self._cache.up, self._draining()

    def _note_changes(self) -> None:
        (attached, up, draining), (now_attached, now_up, now_draining) = self._state, self._look_around()
        self._state = now_attached, now_up, now_draining
        if now_attached is not attached or now_up != up:
            self._countdown = 0
        if now_attached is not attached:
            kinds = ", then ".join(storage_kinds(self._cache))
            self.mark("attach" if kinds else "detach", f"storage: {kinds or 'none'}")
        elif now_up != up:
            self.mark(*(("storage back", "it answers") if now_up else ("storage down", "requests go on without it")))
        if now_draining and not draining:
            self.mark("drain", "new requests get 503")

    def _of_storage(self) -> dict[str, Any]:
        status = self._engine.admin.status()
        told = {name: status.get(name) for name in _OF_STORAGE}
        return told if told["up"] else told | {"bytes": None, "objects": None}  # what it knew before is not so by now

    # --- parts of the answer

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

    def _facts(self) -> dict[str, Any]:
        """What does not change while it serves, but for the storage."""
        model, identity = self._engine.model, self._cache.identity
        return {
            "dtype": identity.dtype,
            "context": model.max_tokens,
            "page_tokens": identity.page_tokens,
            "grid_tokens": model.layout.grid_tokens,
            "shortest_hit": model.layout.shortest_hit,
            "storage": storage_kinds(self._cache),
            "ranks": identity.ranks,
        }

    def _late(self) -> dict[str, Any]:
        """What became of prompts in the last five minutes and since the start, and rates of the last minute."""
        counts, model = self._engine.counts, self._engine.model
        five, one = self._history.last(EVERY_S * FINE), self._history.last(WINDOW_S)
        found = {} if five is None else reasons(five)
        cached, all_cached = by_tier(found), sum(by_tier(counts.reasons).values())
        timed = counts.computed_tokens and counts.prefill_compute_s  # the first tokens are counted before their time
        speed = counts.computed_tokens / counts.prefill_compute_s if timed else None

        def rate(happened: float) -> float:
            return 0.0 if one is None else round(happened / one.seconds, 2)

        return {
            "late": {
                "seconds": 0.0 if five is None else round(five.seconds, 1),
                "prompt_tokens": sum(found.values()),
                "cached_tokens": cached,
                "reasons": {reason.value: tokens for reason, tokens in found.items()},
                "saved_s": None if speed is None else round(sum(cached.values()) / speed, 6),
                "advice": advice(
                    found,
                    grid=model.layout.grid_tokens,
                    rounded=model.layout.rounded,
                    host=Tier.HOST in self._tiers,
                    storage=self._cache.worker.attached is not None,
                ),
            },
            "prefill_tokens_per_s": speed and round(speed, 1),
            "per_s": {
                "requests": rate(one.happened[REQUESTS] if one else 0),
                "output_tokens": rate(one.happened[OUTPUT] if one else 0),
                "prompt_tokens": rate(sum(reasons(one).values()) if one else 0),
            },
            "total": {"requests": counts.finished, "prompt_tokens": counts.prompt_tokens, "cached_tokens": all_cached},
        }

    def _rejected(self) -> dict[int, int]:
        """How many requests got each status from 400 on."""
        found = Counter[int]()
        for (_, _, status), count in [*self._responses.items()]:
            if status >= 400:
                found[status] += count
        return found

    def _tier(self, tier: Tier, stats: Mapping[str, float]) -> dict[str, Any]:
        name, pools = tier.name.lower(), []
        for pool in self._cache.identity.pools:
            place = f"{name}.{pool.name}"
            used, evicted = stats[f"used.{place}"], stats[f"evicted.{place}"]
            size = used * stats[f"slot_bytes.{place}"]
            pools.append({"name": pool.name, "pages": used, "bytes": size, "evicted": evicted})
        return {"name": name, "capacity_bytes": _size(tier, stats), "pools": pools}

    def _lanes(self, stats: Mapping[str, float]) -> list[dict[str, Any]]:
        past, sample = self._history.lanes(), self._history.last(EVERY_S)
        return [
            {
                "name": name,
                "waiting": waiting,
                "running": stats[f"lane_running.{name}"],
                "bytes_per_s": 0 if sample is None else round(sample.happened.get(name, 0) / sample.seconds),
                "past_bytes_per_s": past.get(name, []),
                "failed": stats[f"lane_failed.{name}"],
                "stuck_s": round(stats[f"lane_stuck_s.{name}"], 3),
            }
            for name, waiting in _under("lane_waiting.", stats).items()
        ]

    def _trouble(self, stats: Mapping[str, float], now: float) -> list[str]:
        """What an operator should look at first, in words."""
        found = [self._engine.broken] if self._engine.broken else []
        if self._asking is not None and (silent_s := now - self._asked_s) > SLOW_S:
            found.append(f"the engine has not answered for {silent_s:.0f} s: one step takes so long, or it hangs")
        attached = self._cache.worker.attached
        error = attached.storage.last_error if attached is not None else ""
        why = f". Last error: {error}" if error else ""
        if attached is not None and not self._cache.up:
            found.append(DOWN + why)
        elif stats["stores_refused"]:
            found.append(REFUSALS[Refusal(int(stats["stores_refused"]))])
        elif stats["stores_backing_off"]:
            found.append(f"stores back off, since storage has failed{why}")
        if lost := self._storage.get("lost_objects"):
            found.append(
                f"objects that storage lost since it was attached, as its files were damaged or gone: {lost}. {AGAIN}"
            )
        if damaged := self._storage.get("damaged_objects"):
            found.append(f"objects that storage could not read: {damaged}. {AGAIN}")
        if stats["offload_paused"]:
            found.append("storing is paused, since too little of what is stored is used")
        for name, stuck_s in _under("lane_stuck_s.", stats).items():
            if stuck_s > SLOW_S:
                found.append(f"lane {name}: a call has been running for {stuck_s:.0f} s")
        bad = {tier: stats[f"bad_{tier}"] for tier in ("host", "storage") if stats[f"bad_{tier}"]}
        found += [f"pages from {tier} that failed their check: {count:.0f}" for tier, count in bad.items()]
        return found


def _prefix(prefix: Hottest, page_tokens: int) -> dict[str, Any]:
    told = {name: getattr(prefix, name) for name in ("pages", "hits", *(tier.name.lower() for tier in Tier))}
    return told | {
        "key": prefix.key.hex()[:KEY_DIGITS],
        "group": group_name(prefix.root),
        "tokens": prefix.pages * page_tokens,
        "resumes": None if prefix.resumes is None else prefix.resumes.name.lower(),
    }


def storage_kinds(cache: PrefixCache) -> list[str]:
    """The schemes of what is attached, the fast one first."""
    attached = cache.worker.attached
    return [url.partition("://")[0] if "://" in url else "file" for url in attached.urls] if attached else []


def _size(tier: Tier, stats: Mapping[str, float]) -> float:
    """Bytes of a memory tier."""
    return stats.get(f"memory_bytes.{tier.name.lower()}", 0)


def _bytes(tier: Tier, stats: Mapping[str, float]) -> float:
    """Bytes of its pages."""
    used = _under(f"used.{tier.name.lower()}.", stats)
    return sum(count * stats[f"slot_bytes.{tier.name.lower()}.{pool}"] for pool, count in used.items())


def _under(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}
