"""What the live page at `/` shows of any engine's cache: tiers, hits by tier, lanes, prefixes, reasons, storage.

A thread takes a sample of the counters every `EVERY_S`, so that the last minutes are there when an operator opens the
page. The rest is put together on demand, at most once in `FRESH_S` however many viewers there are. What an engine has
beside its cache is added by a subclass: of kvarve's own engine `live.py`, of vLLM the connector.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from kvarve import __version__
from kvarve.core.copies.effects import Refusal
from kvarve.core.core import Hottest
from kvarve.core.observe.reasons import Reason
from kvarve.metrics.snapshot import Snapshot
from kvarve.pages.keys import group_name
from kvarve.pages.pools import MEMORY_TIERS, ModelIdentity, Tier
from kvarve.reference.server.forms import by_tier
from kvarve.reference.server.live_history import EVERY_S, FINE, OUTPUT, REQUESTS, History, Sample, reasons
from kvarve.reference.server.work_threads import Shared, apart
from kvarve.reports import COLORS

log = logging.getLogger(__name__)

FRESH_S = 0.5
HOTTEST = 20
SLOW_S = 5.0  # from then on a call, or an engine that does not answer, is trouble
REFUSALS = {
    Refusal.FULL: "storage has no room: nothing is stored",
    Refusal.READ_ONLY: "storage can only be read: nothing is stored",
}
AGAIN = "Such pages are computed and stored again"
DOWN = "storage does not answer: requests go on without it. It is used again as soon as it answers"
_OF_STORAGE = (
    *("attached", "up", "for_s", "last_error", "bytes", "capacity_bytes", "objects", "room_bytes", "read_only"),
    *("lost_objects", "damaged_objects"),
)
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


class CacheLive:
    """The numbers of one cache."""

    INSTEAD = ""  # what an operator can do about a storage that is down
    STORAGE_EVERY = 5  # samples; a storage may be slow to say what it holds

    def __init__(
        self, name: str, identity: ModelIdentity, ends: Callable[[float], bool], *, tells_requests: bool
    ) -> None:
        """`name`: of the model; `ends`: waits for that long, and says whether there is nothing to sample any more;
        `tells_requests`: whether the engine does."""
        self._name, self._identity, self._ends = name, identity, ends
        self._history = History(tells_requests)
        self._began_s = self._sampled_s = time.monotonic()
        self._counted: dict[Reason | str, float] = {}  # at the last sample
        self._storage: dict[str, Any] = {}
        self._countdown = 0  # samples until the storage is asked again
        self._hottest: list[Hottest] = []
        self._hottest_s = self._began_s  # when they were told
        self._shared = {hour: Shared(partial(self._content, hour)) for hour in (False, True)}
        stats = self.now().cache
        self._tiers = [tier for tier in MEMORY_TIERS if _size(tier, stats)]  # that can hold pages
        self.mark("start", f"version {__version__}")
        self._state = self._look_around()
        threading.Thread(target=self._sample_all, name="kvarve live", daemon=True).start()

    # --- what a subclass tells, on any thread

    def now(self) -> Snapshot:
        """The numbers of this moment, or of the last one that is known; those of the storage may be left out."""
        raise NotImplementedError

    def _status(self) -> dict[str, Any]:
        """Of the storage, as `Attached.status`, with whether one is `attached`."""
        raise NotImplementedError

    def _look(self) -> None:
        """A viewer asks: look for what is not looked for otherwise."""

    def _look_around(self) -> tuple[object, bool, bool]:
        """What changes seldom: the storage, whether it answers, and whether the server drains."""
        now = self.now()
        return now.storage_kinds, now.storage_up is not False, False

    def _last_error(self) -> str:
        """Of the storage."""
        return self._storage.get("last_error") or ""

    def _advice(self, found: Mapping[Reason, int], now: Snapshot) -> str:
        """One sentence about the computed ones of those tokens of prompts."""
        raise NotImplementedError

    def _ttfts(self, at_s: float) -> tuple[float | None, float | None]:
        """The median and the 95th percentile of the times to first token of late."""
        return None, None

    # --- any thread

    async def data(self, hour: bool = False) -> Response:
        """The endpoint, with the history of five minutes or of an hour; viewers share an answer."""
        content = await self._shared[hour].get(FRESH_S)
        return Response(content, media_type="application/json", headers=HEADERS | {"Cache-Control": "no-store"})

    async def _content(self, hour: bool) -> bytes:
        return await apart(lambda: json.dumps(self.told(hour), separators=(",", ":")).encode())

    def mark(self, what: str, text: str) -> None:
        """Note a change of the server for the charts."""
        self._history.mark(time.time(), what, text)

    def told(self, hour: bool = False) -> dict[str, Any]:
        """All that the page shows."""
        self._look()
        at_s, now, identity = time.monotonic(), self.now(), self._identity
        facts = {"dtype": identity.dtype, "page_tokens": identity.page_tokens, "ranks": identity.ranks}
        return {
            "model": self._name,
            "version": __version__,
            "up": now.up,
            "now": round(time.time(), 3),
            "up_s": round(at_s - self._began_s, 1),
            "facts": facts | {"storage": [*now.storage_kinds]},
            **self._late(now),
            "trouble": self._trouble(now),
            "tiers": [self._tier(tier, now.cache) for tier in self._tiers],
            "storage": self._storage,
            "history": self._history.told(hour),
            "lanes": self._lanes(now.cache),
            "hottest": [_prefix(each, identity.page_tokens) for each in self._hottest],
            "hottest_ago_s": round(at_s - self._hottest_s, 1),
            "reasons": {reason.value: reason.meaning for reason in Reason},
        }

    def sample(self) -> None:
        """Take a sample of the counters; the thread does it."""
        at_s, now = time.monotonic(), self.now()
        self._note_changes()
        if self._countdown == 0:
            self._storage = self._of_storage()
        self._countdown = (self._countdown + 1) % self.STORAGE_EVERY
        counted: dict[Reason | str, float] = {REQUESTS: sum(now.ends.values()), OUTPUT: now.output_tokens}
        counted |= {reason: tokens for reason, tokens in now.reasons.items() if reason is not Reason.ANOTHER_SAMPLE}
        counted |= {name: flow.bytes.sum for name, flow in now.flows.items()}
        held: dict[str, float | None] = {tier.name.lower(): _bytes(tier, now.cache) for tier in self._tiers}
        if self._storage.get("attached"):
            held["storage"] = self._storage.get("bytes")
        sample = Sample(
            unix_s=time.time(),
            seconds=max(1e-3, at_s - self._sampled_s),
            held=held,
            ttft_s=self._ttfts(at_s),
            happened={name: value - self._counted.get(name, 0) for name, value in counted.items()},
            running=now.running,
            waiting=sum(now.waiting.values()),
        )
        self._history.add(sample)
        self._counted, self._sampled_s = counted, at_s

    # --- its own thread

    def _sample_all(self) -> None:
        failed = False
        while not self._ends(EVERY_S):
            try:
                self.sample()
            except Exception:  # a page that lacks samples is better than none, and the next one may do
                if not failed:
                    log.exception("the live page lacks a sample")
                failed = True

    def _note_changes(self) -> None:
        (attached, up, draining), (now_attached, now_up, now_draining) = self._state, self._look_around()
        self._state = now_attached, now_up, now_draining
        if now_attached != attached or now_up != up:
            self._countdown = 0
        if now_attached != attached:
            kinds = ", then ".join(self.now().storage_kinds)
            self.mark("attach" if kinds else "detach", f"storage: {kinds or 'none'}")
        elif now_up != up:
            self.mark(*(("storage back", "it answers") if now_up else ("storage down", "requests go on without it")))
        if now_draining and not draining:
            self.mark("drain", "new requests get 503")

    def _of_storage(self) -> dict[str, Any]:
        status = self._status()
        told = {name: status.get(name) for name in _OF_STORAGE}
        return told if told["up"] else told | {"bytes": None, "objects": None}  # what it knew before is not so by now

    # --- parts of the answer

    def _late(self, now: Snapshot) -> dict[str, Any]:
        """What became of prompts in the last five minutes and since the start."""
        five = self._history.last(EVERY_S * FINE)
        found = {} if five is None else reasons(five)
        cached, all_cached = by_tier(found), sum(by_tier(now.reasons).values())
        return {
            "late": {
                "seconds": 0.0 if five is None else round(five.seconds, 1),
                "prompt_tokens": sum(found.values()),
                "cached_tokens": cached,
                "reasons": {reason.value: tokens for reason, tokens in found.items()},
                "advice": self._advice(found, now),
            },
            "total": {"prompt_tokens": now.prompt_tokens, "cached_tokens": all_cached},
        }

    def _tier(self, tier: Tier, stats: Mapping[str, float]) -> dict[str, Any]:
        name, pools = tier.name.lower(), []
        for pool in self._identity.pools:
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

    def _trouble(self, now: Snapshot) -> list[str]:
        """What an operator should look at first, in words."""
        stats, found, error = now.cache, list[str](), self._last_error()
        why = f". Last error: {error}" if error else ""
        if now.storage_up is False:
            found.append(f"{DOWN}{self.INSTEAD}{why}")
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


def kinds_of(urls: Sequence[str]) -> list[str]:
    """The schemes of a storage's URLs."""
    return [url.partition("://")[0] if "://" in url else "file" for url in urls]


def _size(tier: Tier, stats: Mapping[str, float]) -> float:
    """Bytes of a memory tier."""
    return stats.get(f"memory_bytes.{tier.name.lower()}", 0)


def _bytes(tier: Tier, stats: Mapping[str, float]) -> float:
    """Bytes of its pages."""
    used = _under(f"used.{tier.name.lower()}.", stats)
    return sum(count * stats[f"slot_bytes.{tier.name.lower()}.{pool}"] for pool, count in used.items())


def _under(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}
