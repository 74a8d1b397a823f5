"""A connection to one storage: its lanes, the copies in flight on them, and which of its objects are damaged.

Storages are attached and detached while the cache serves. A storage that hangs blocks only its own connection: the next
one has its own workers, and copies that still run here keep their slots until they return.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from kvarve.core.copies.effects import Refusal
from kvarve.core.copies.in_flight import FETCH, PROBE, STORE, Edge
from kvarve.errors import StorageError
from kvarve.records.record import whole
from kvarve.records.seals import CHECKSUM, Seal
from kvarve.storage import Breaker, Storage, StorageUsage, Tiers, open_storage
from kvarve.system.background import Abandoned, BackgroundCall
from kvarve.transfer.compression import compressing
from kvarve.transfer.flows import LANES
from kvarve.transfer.lanes import Ends, Lane

log = logging.getLogger(__name__)

# Calls at once. While one fetch checks its pages, others move theirs. Stores also wait until theirs are on the medium,
# and one sync has others wait: three stores left the disk idle in between (decision 11).
FETCHES, STORES = 3, 5
ASKED = 8192  # pages, at most, of several requests' probes that become one call
USAGE_S = 0.5  # how long `usage` waits for the storage's answer
CLOSE_S = 5.0  # how long closing a storage waits for a call that hangs
_DAMAGED_KNOWN = 1 << 16  # names


class StorageConnection:
    """Owns a storage, a lane each way and one for probes; their events go to `ends`."""

    def __init__(
        self, storage: Storage, ends: Ends, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.storage = storage
        self.closed = threading.Event()  # the storage has been closed, or has failed to close
        self.lanes: dict[Edge, Lane] = {}
        self._deadline_s = deadline_s
        self._asking: BackgroundCall[StorageUsage] | None = None  # the last call of its usage
        self._answered: BackgroundCall[StorageUsage] | None = None  # the last one before that, which has ended
        self._damaged: OrderedDict[str, None] = OrderedDict()  # not deleted yet, as far as known
        self._lock = threading.Lock()  # guards these three; never held during a call
        try:
            lane = partial(Lane, ends=ends, patience_s=deadline_s, clock=clock)
            self.lanes[STORE] = lane(LANES[STORE], workers=STORES)
            self.lanes[FETCH] = lane(LANES[FETCH], workers=FETCHES, tells_begin=True)
            self.lanes[PROBE] = lane(LANES[PROBE], together=ASKED, tells_begin=True)
        except RuntimeError as e:  # the system starts no more threads
            for started in self.lanes.values():
                started.close(0.0)
            raise StorageError(f"no workers for a storage: {e}") from None

    def hangs(self) -> bool:
        """Whether every fetch worker has been in one call for longer than the deadline, as when one of several tiers
        hangs."""
        return self.lanes[FETCH].busy_s() > self._deadline_s

    # --- calls of the storage that know what is damaged: such an object is missing until it has been deleted

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self.storage.exists(names)
        if not self._damaged:
            return found
        with self._lock:
            return [there and name not in self._damaged for name, there in zip(names, found, strict=True)]

    def put(self, names: Sequence[str], records: Sequence[Sequence[memoryview]]) -> list[bool]:
        if self._damaged:
            with self._lock:
                damaged = [name for name in names if name in self._damaged]
            if damaged and not self._delete(damaged):  # a put keeps what is there; the others can be stored
                kept = [i for i, name in enumerate(names) if name not in damaged]
                answers = self.storage.put_pieces([names[i] for i in kept], [records[i] for i in kept])
                stored = {i for i, done in zip(kept, answers, strict=True) if done}
                return [i in stored for i in range(len(names))]
        return self.storage.put_pieces(names, records)

    def delete_damaged(self, names: Sequence[str]) -> None:
        """Delete objects whose bytes are not what their names say, so that they are stored anew."""
        if not names:
            return
        with self._lock:
            self._damaged.update(dict.fromkeys(names))
            while len(self._damaged) > _DAMAGED_KNOWN:
                self._damaged.popitem(last=False)
        self._delete(names)

    def _delete(self, damaged: Sequence[str]) -> bool:
        if not self.up:  # nothing would be deleted
            return False
        try:
            self.storage.delete(damaged)
        except StorageError as e:
            log.warning("%d damaged objects, such as %s, could not be deleted: %s", len(damaged), damaged[0], e)
            return False
        with self._lock:
            for name in damaged:
                self._damaged.pop(name, None)
        return True

    # --- its state

    @property
    def up(self) -> bool:
        """Whether calls reach the storage."""
        return not isinstance(self.storage, Breaker | Tiers) or self.storage.up

    def refusal(self) -> Refusal:
        """Why the storage has not stored what was put."""
        try:
            usage = self.storage.usage()
        except StorageError:
            return Refusal.NONE
        if not self.up:
            return Refusal.NONE
        return Refusal.READ_ONLY if usage.read_only else Refusal.FULL

    def usage(self, within_s: float | None = None) -> StorageUsage:
        """The storage's usage, or its last answer if it takes longer than that, or `USAGE_S`. From any thread.

        StorageError: the storage failed, or has not answered yet.
        """
        with self._lock:
            if self._asking is None or self._asking.ended():
                # If the storage hangs, one thread hangs with it, however often `usage` is called.
                self._answered = self._asking
                self._asking = BackgroundCall("kvarve usage", self.storage.usage)
            asking, answered = self._asking, self._answered
        last = asking if asking.ended(USAGE_S if within_s is None else within_s) else answered
        if last is None:
            raise StorageError("the storage has not reported its usage yet")
        try:
            return last.result()
        except StorageError as e:
            raise StorageError(str(e)) from None
        except Exception as e:  # of any backend: the caller gets an error of ours
            log.exception("a bug in a storage's usage")
            raise StorageError(f"{type(e).__name__}: {e}") from None

    def close(self, timeout_s: float, storage_s: float = inf) -> None:
        """Let the lanes finish within `timeout_s`, end the other pieces undone, and close the storage in `storage_s`.

        A call that still hangs is abandoned, and ends when it returns; so is a close that takes longer. StorageError
        from the storage's close.
        """
        end = time.monotonic() + timeout_s
        for lane in self.lanes.values():
            if not lane.close(max(0.0, end - time.monotonic())):
                log.warning("%s: a call to a storage hangs; it is abandoned", lane.name)
        try:
            BackgroundCall("kvarve closes", self._close).result(storage_s)
        except Abandoned:
            log.warning("a storage takes longer than %.1f s to close; it is abandoned", storage_s)

    def _close(self) -> None:
        try:
            self.storage.close()
        finally:
            self.closed.set()

    def retire(self, timeout_s: float) -> None:
        """The same on a thread of its own, which logs errors."""
        BackgroundCall("kvarve detach", partial(self._retire, timeout_s))

    def _retire(self, timeout_s: float) -> None:
        try:
            self.close(timeout_s)
        except StorageError as e:
            log.warning("a storage that was detached could not be closed: %s", e)
        except Exception:  # of any backend: no caller waits for it
            log.exception("a bug in a storage's close")


def open_guarded(
    setting: str | Sequence[str],
    *,
    label: bytes,
    description: str,
    deadline_s: float,
    seal: Seal = CHECKSUM,
    answers: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Breaker | Tiers:
    """The storage that a URL or several mean, behind circuit breakers; unless it `answers`, it need not do so now.

    ConfigError, StorageError as `open_storage` raises them.
    """
    guard = partial(Breaker, deadline_s=deadline_s, close_s=min(CLOSE_S, deadline_s), clock=clock)
    storage = open_storage(
        setting,
        label=label,
        description=description,
        guard=guard,
        whole=partial(whole, seal=seal),
        around=compressing,
        answers=answers,
    )
    return storage if isinstance(storage, Tiers) else guard(storage)
