"""A connection to one storage: its lanes, and the copies in flight on them.

Storages are attached and detached while the cache serves. A storage that hangs blocks only its own connection: the next
one has its own workers, and copies that still run here keep their slots until they return.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf

from kvarve.core.copies import FETCH, PROBE, STORE, Edge
from kvarve.errors import StorageError
from kvarve.storage import Storage, StorageUsage
from kvarve.transfer.lanes import Ends, Lane

log = logging.getLogger(__name__)

WORKERS = 3  # each way: one checks pages, one moves them, and one waits until they are on the medium
ASKED = 8192  # pages, at most, of several requests' probes that become one call
USAGE_S = 0.5  # how long `usage` waits for the storage's answer


class StorageConnection:
    """Owns a storage, a lane each way and one for probes; their events go to `ends`."""

    def __init__(
        self, storage: Storage, ends: Ends, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.storage = storage
        self.closed = threading.Event()  # the storage has been closed, or has failed to close
        self.lanes: dict[Edge, Lane] = {}
        self._deadline_s = deadline_s
        self._figures = _Figures()
        self._lock = threading.Lock()  # guards `_figures`
        try:
            lane = partial(Lane, ends=ends, patience_s=deadline_s, clock=clock)
            self.lanes[STORE] = lane("host-to-storage", workers=WORKERS)
            self.lanes[FETCH] = lane("storage-to-host", workers=WORKERS, tells_begin=True)
            self.lanes[PROBE] = lane("storage-probe", together=ASKED, tells_begin=True)
        except RuntimeError as e:  # the system starts no more threads
            for started in self.lanes.values():
                started.close(0.0)
            raise StorageError(f"no workers for a storage: {e}") from None

    def hangs(self) -> bool:
        """Whether every fetch worker has been in one call for longer than the deadline, as when one of several tiers
        hangs."""
        return self.lanes[FETCH].busy_s() > self._deadline_s

    def usage(self) -> StorageUsage:
        """The storage's usage, or its last answer if it takes longer than `USAGE_S`. From any thread.

        StorageError: the storage failed, or has not answered yet.
        """
        with self._lock:
            if self._figures.asking is None or not self._figures.asking.is_alive():
                # If the storage hangs, one thread hangs with it, however often `usage` is called.
                self._figures.asking = threading.Thread(target=self._ask, name="kvarve usage", daemon=True)
                self._figures.asking.start()
            asking = self._figures.asking
        asking.join(USAGE_S)
        with self._lock:
            if self._figures.trouble is not None:
                raise StorageError(self._figures.trouble)
            assert self._figures.usage is not None
            return self._figures.usage

    def close(self, timeout_s: float, storage_s: float = inf) -> None:
        """Let the lanes finish within `timeout_s`, end the other pieces undone, and close the storage in `storage_s`.

        A call that still hangs is abandoned, and ends when it returns; so is a close that takes longer. StorageError
        from the storage's close.
        """
        end = time.monotonic() + timeout_s
        for lane in self.lanes.values():
            if not lane.close(max(0.0, end - time.monotonic())):
                log.warning("%s: a call to a storage hangs; it is abandoned", lane.name)
        closing: Future[None] = Future()
        threading.Thread(target=self._close, args=(closing,), name="kvarve closes", daemon=True).start()
        try:
            closing.result(None if storage_s == inf else storage_s)
        except TimeoutError:
            log.warning("a storage takes longer than %.1f s to close; it is abandoned", storage_s)

    def _close(self, closing: "Future[None]") -> None:
        try:
            self.storage.close()
        except BaseException as e:  # noqa: BLE001  raised to the caller, if it still waits
            closing.set_exception(e)
        else:
            closing.set_result(None)
        finally:
            self.closed.set()

    def retire(self, timeout_s: float) -> None:
        """The same on a thread of its own, which logs errors."""
        threading.Thread(target=self._retire, args=(timeout_s,), name="kvarve detach", daemon=True).start()

    def _retire(self, timeout_s: float) -> None:
        try:
            self.close(timeout_s)
        except StorageError as e:
            log.warning("a storage that was detached could not be closed: %s", e)
        except Exception:  # of any backend: no caller waits for it
            log.exception("a bug in a storage's close")

    def _ask(self) -> None:
        usage, trouble = None, None
        try:
            usage = self.storage.usage()
        except StorageError as e:
            trouble = str(e)
        except Exception as e:  # else the thread would print it on standard error only
            trouble = f"{type(e).__name__}: {e}"
            log.exception("a bug in a storage's usage")
        with self._lock:
            self._figures.usage, self._figures.trouble = usage, trouble


@dataclass
class _Figures:
    """A storage's last answer to `usage`, and the thread of the call in flight."""

    usage: StorageUsage | None = None
    trouble: str | None = "the storage has not reported its usage yet"
    asking: threading.Thread | None = None
