"""What a worker tells the live page of its engine (`engine_page.py`), which is in the scheduler's process."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import Logger
from typing import TYPE_CHECKING, Any

from kvarve.cache.scheduler import CacheScheduler
from kvarve.cache.worker import CacheWorker
from kvarve.errors import ConfigError
from kvarve.transfer.flows import Flow

if TYPE_CHECKING:
    from kvarve.connectors.engine_page import EnginePage

VARIABLE = "KVARVE_PORT"
EVERY_S, STORAGE_EVERY = 1.0, 5  # looks, of which so many make one at the storage: it may be slow to answer


@dataclass(frozen=True)
class Levels:
    """Of one rank: `CacheWorker.stats`, its lanes by name, and its storage as `Attached.status`."""

    stats: Mapping[str, float]
    flows: Mapping[str, Flow]
    storage: Mapping[str, Any]


def levels_of(worker: CacheWorker, storage: Mapping[str, Any] | None = None) -> Levels:
    """In a moment, even if the storage hangs; from any thread. `storage`: what is known of it, which stays."""
    if storage is None:
        attached = worker.attached
        told = {} if attached is None else attached.status(time.monotonic())
        storage = {"attached": attached is not None} | told
    return Levels(worker.stats(), worker.flows(), storage)


class Teller:
    """Looks at a worker every second, on a thread of its own."""

    def __init__(self, worker: CacheWorker) -> None:
        self._worker, self._found, self._ended = worker, levels_of(worker), threading.Event()
        threading.Thread(target=self._look, name="kvarve levels", daemon=True).start()
        self.new = True

    def take(self) -> Levels:
        self.new = False
        return self._found

    def end(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        looks = 0
        while not self._ended.wait(EVERY_S):
            looks, known = looks + 1, self._found.storage
            stays = looks % STORAGE_EVERY and known.get("up", True) == self._worker.up
            self._found, self.new = levels_of(self._worker, known if stays else None), True


def port_of(engine: int, environ: Mapping[str, str]) -> int | None:
    """The port of the page of that engine, of several beside each other; None: there is none. ConfigError: it cannot be
    a port."""
    given = environ.get(VARIABLE, "")
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and 0 < int(given[:6]) + engine < 1 << 16):
        raise ConfigError(
            f"{VARIABLE} must be a port from 1 to 65535, got {given[:20]!r}: of several engines each takes the next one"
        )
    return int(given) + engine


def page_of(
    port: int,
    log: Logger,
    name: str,
    scheduler: CacheScheduler,
    levels: Mapping[int, Levels],
    wake: Callable[[], object],
) -> "EnginePage | None":
    """The live page on that port (`engine_page.open_page`); None, with a line in the log, if it cannot be served."""
    try:
        from kvarve.connectors.engine_page import open_page

        page = open_page(port, name, scheduler, levels, wake)
    except (ImportError, OSError) as e:
        log.warning("kvarve shows no live page on port %d: %s", port, e)
        return None
    log.info("kvarve's live page: http://127.0.0.1:%d", port)
    return page
