"""One attached storage with all that belongs to it: its lanes, and what is under way on them.

Storages come and go while others are served. One that hangs takes nothing with it but its own
connection: the next one has workers of its own, and what still runs here keeps its slots until it comes back.
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
ASKED = 8192  # pages that are asked for in one call, at most, where several requests wait for an answer
USAGE_S = 0.5  # how long who asks for figures waits for a storage to say them


class StorageConnection:
    """A storage, which is its own from now on, a lane each way and one for probes; their ends go where all ends go."""

    def __init__(
        self, storage: Storage, ends: Ends, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.storage = storage
        self.closed = threading.Event()  # the storage has been let go of, or given up
        self.lanes: dict[Edge, Lane] = {}
        self._deadline_s = deadline_s
        self._figures = _Figures()
        self._lock = threading.Lock()  # of the figures that are being asked for
        try:
            hire = partial(Lane, ends=ends, patience_s=deadline_s, clock=clock)
            self.lanes[STORE] = hire("host-to-storage", workers=WORKERS)
            self.lanes[FETCH] = hire("storage-to-host", workers=WORKERS, tells_begin=True)
            self.lanes[PROBE] = hire("storage-probe", together=ASKED, tells_begin=True)
        except RuntimeError as e:  # no more threads are to be had
            for lane in self.lanes.values():
                lane.close(0.0)
            raise StorageError(f"no workers for a storage: {e}") from None

    def hangs(self) -> bool:
        """Whether all who read have been in calls for longer than the deadline: one of several tiers may hang while the
        others are up, and who waits would wait in vain."""
        return self.lanes[FETCH].busy_s() > self._deadline_s

    def usage(self) -> StorageUsage:
        """What the storage says of itself, or what it said last if that takes longer than a moment. From any thread.

        StorageError: it cannot, or has not said anything yet.
        """
        with self._lock:
            if self._figures.asking is None or not self._figures.asking.is_alive():
                # Should it hang, then one thread hangs with it, however often somebody asks.
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
        """Let what was sent be done within `timeout_s`, then end the rest undone and close the storage in `storage_s`.

        A call that hangs even then is left behind, and ends when it comes back, and so is a close that takes longer.
        StorageError from the storage's close.
        """
        end = time.monotonic() + timeout_s
        for lane in self.lanes.values():
            if not lane.close(max(0.0, end - time.monotonic())):
                log.warning("%s: a call to a storage hangs; it is left behind", lane.name)
        closing: Future[None] = Future()
        threading.Thread(target=self._close, args=(closing,), name="kvarve closes", daemon=True).start()
        try:
            closing.result(None if storage_s == inf else storage_s)
        except TimeoutError:
            log.warning("a storage takes longer than %.1f s to close; it is left behind", storage_s)

    def _close(self, closing: "Future[None]") -> None:
        try:
            self.storage.close()
        except BaseException as e:  # noqa: BLE001  it belongs to the caller, if that still waits
            closing.set_exception(e)
        else:
            closing.set_result(None)
        finally:
            self.closed.set()

    def retire(self, timeout_s: float) -> None:
        """The same on a thread of its own: nobody waits, and trouble is logged."""
        threading.Thread(target=self._retire, args=(timeout_s,), name="kvarve detach", daemon=True).start()

    def _retire(self, timeout_s: float) -> None:
        try:
            self.close(timeout_s)
        except StorageError as e:
            log.warning("a storage that was detached could not be closed: %s", e)
        except Exception:  # whoever wrote the backend: nobody waits here who could be told
            log.exception("a bug in a storage's close")

    def _ask(self) -> None:
        usage, trouble = None, None
        try:
            usage = self.storage.usage()
        except StorageError as e:
            trouble = str(e)
        except Exception as e:  # or it would be said on standard error only
            trouble = f"{type(e).__name__}: {e}"
            log.exception("a bug in a storage's usage")
        with self._lock:
            self._figures.usage, self._figures.trouble = usage, trouble


@dataclass
class _Figures:
    """What a storage said of itself last, and who is asking it now."""

    usage: StorageUsage | None = None
    trouble: str | None = "this storage has not said yet what it holds"
    asking: threading.Thread | None = None
