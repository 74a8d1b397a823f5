"""The live page and the metrics of kvarve beside an engine that has its own server, vLLM or SGLang: on the loopback.

The engine's thread takes a picture of the cache now and then (`look`); the page's threads read the last one, and never
the cache.
"""

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp

from kvarve import __version__
from kvarve.cache.scheduler import CacheScheduler
from kvarve.connectors.levels import Levels
from kvarve.core.observe.reasons import Reason
from kvarve.metrics import Metrics, Snapshot
from kvarve.reference.server.live_cache import CacheLive, kinds_of, page_routes
from kvarve.reference.server.live_history import advice
from kvarve.reference.server.middleware import NamedHosts
from kvarve.storage import StorageUsage

LOOPBACK = "127.0.0.1"
LOOK_S = 0.5  # between two pictures
PREFIXES, VIEWED_S = 10, 5.0  # so many are looked at, as long as a viewer has asked this lately
TOLD = ("attached", "up", "for_s", "last_error", "bytes", "objects")  # of each rank's storage
# What is adjusted here, instead of options of `kvarve serve`.
WORDS = {
    "grid_option": "smaller blocks or pages of the engine",
    "more_device": "more --host-memory",
    "more_states": "more --host-memory, which has room for more of these,",
}


class EnginePage(CacheLive):
    """Of the engine whose pages a scheduler plans."""

    STORAGE_EVERY = 1  # its worker has asked it
    server: uvicorn.Server | None = None

    def __init__(
        self, name: str, scheduler: CacheScheduler, levels: Mapping[int, Levels], wake: Callable[[], object]
    ) -> None:
        """`name`: of the model; `levels`: of each rank. `wake`: have an idle engine look soon."""
        self._scheduler, self._levels, self._wake = scheduler, levels, wake
        self._end, self._viewed_s, self._looked_s = threading.Event(), -math.inf, -math.inf
        self._model = name
        scheduler.core.watch()
        self.look({}, [True] * len(levels))
        super().__init__(name, scheduler.identity, self._end.wait, tells_requests=False)

    # --- the engine's thread

    def look(self, reasons: Mapping[Reason, int], up: Sequence[bool]) -> None:
        """Take a picture, if the last one is old. `reasons`: of prompt tokens so far; `up`: the storage, by rank."""
        if (now := time.monotonic()) < self._looked_s + LOOK_S:
            return
        scheduler = self._scheduler
        self._picture = Snapshot(
            model=self._model,
            version=__version__,
            up=True,
            prompt_tokens=sum(reasons.values()),
            reasons=dict(reasons),
            cache=scheduler.stats(),
            ages=scheduler.core.ages,
            flows={},
            storage_up=all(up),
            dtype=scheduler.identity.dtype,
            ours=False,
        )
        self._looked_s = now
        if now < self._viewed_s + VIEWED_S:
            self._hottest, self._hottest_s = scheduler.core.hottest(PREFIXES), now

    def reported(self, levels: Mapping[int, Levels]) -> None:
        self._levels = {**self._levels, **levels}

    # --- any thread

    def now(self) -> Snapshot:
        """Tiers and lanes are those of rank 0."""
        picture, first = self._picture, self._levels[0]
        held, urls = first.storage, first.storage.get("url") or ()
        usage = StorageUsage(*(held.get(name) for name in ("objects", "bytes", "capacity_bytes", "evicted_objects")))
        return replace(
            picture,
            cache={**picture.cache, **first.stats},
            flows=first.flows,
            storage=usage if held["attached"] else None,
            storage_up=picture.storage_up if held["attached"] else None,
            storage_kinds=tuple(kinds_of([urls] if isinstance(urls, str) else urls)),
        )

    def told(self, hour: bool = False) -> dict[str, Any]:
        ranks = [
            {"rank": rank} | {name: each.storage.get(name) for name in TOLD}
            for rank, each in sorted(self._levels.items())
        ]
        told, age_s = super().told(hour), round(time.monotonic() - self._looked_s, 1)
        facts = {"ranks": len(ranks), "identity": self._identity.fingerprint().hex()[:16]}
        return told | {"facts": told["facts"] | facts, "ranks": ranks, "age_s": age_s}

    def sample(self) -> None:
        super().sample()
        self._wake()

    def end(self) -> None:
        self._end.set()
        if self.server is not None:
            self.server.should_exit = True

    # --- parts of it

    def _status(self) -> dict[str, Any]:
        return dict(self._levels[0].storage)

    def _look(self) -> None:
        self._viewed_s = time.monotonic()
        self._wake()

    def _last_error(self) -> str:
        """Of a rank whose storage is down, before others."""
        ranks = sorted(self._levels.items(), key=lambda item: (item[1].storage.get("up") is not False, item[0]))
        errors = ((rank, each.storage.get("last_error")) for rank, each in ranks)
        return next((f"{error} (rank {rank})" if len(ranks) > 1 else error for rank, error in errors if error), "")

    def _advice(self, found: Mapping[Reason, int], now: Snapshot) -> str:
        said = advice(found, grid=self._identity.page_tokens, storage=bool(now.storage_kinds), words=WORDS)
        return re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), said)  # as the connector names them


def app_of(page: EnginePage) -> ASGIApp:
    """The page, its numbers and the metrics, for those who name this machine."""
    app, metrics = FastAPI(openapi_url=None), Metrics(page.now)
    app.include_router(page_routes())
    app.get("/live/data")(page.data)
    app.get("/metrics")(lambda: Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4))
    return NamedHosts(app, (), "use 127.0.0.1 or localhost")


def open_page(port: int, *given: Any) -> EnginePage:
    """The page of an engine, which is served until it ends. OSError: the port is taken."""
    listening = socket.create_server((LOOPBACK, port))
    page = EnginePage(*given)
    config = uvicorn.Config(app_of(page), loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False)
    page.server = uvicorn.Server(config)
    threading.Thread(target=page.server.run, args=([listening],), name="kvarve page", daemon=True).start()
    return page
