"""Operations on the storage of a serving cache: its status, attach, detach. From any thread.

Opening and closing a storage can take long, so they happen on the caller's thread; the cache's own thread only makes
the change. One change at a time: a second caller gets `UnderWay`.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.scheduler import CHANGE_S
from kvarve.cache.worker import Change, UnderWay
from kvarve.errors import Busy, ConfigError, KvarveError, StorageError
from kvarve.storage import Storage
from kvarve.storage.urls import shown
from kvarve.system.background import Abandoned, BackgroundCall
from kvarve.transfer.compression import totals

log = logging.getLogger(__name__)

ASK_S = 60.0  # how long the cache's thread may take to accept a change
OPEN_S = 300.0  # how long a large storage may take to open; one that opens later is closed again
CLOSED_S = 10.0  # how long a change waits for the storage before it to be closed

OnItsThread = Callable[[Callable[[], Change], float], Change]
# Has the other ranks attach (URLs, prefetch and write policy, whether to back up) or detach (None) as this one does.
TellOthers = Callable[[tuple[tuple[str, ...], str | None, str | None, bool] | None], None]


class Admin:
    """Changes the storage of one cache. `on_its_thread(call, seconds)` runs a call on the cache's thread; `cleared()`
    has the caches of all ranks know that the storage has been emptied."""

    def __init__(
        self,
        cache: PrefixCache,
        on_its_thread: OnItsThread,
        cleared: Callable[[], None],
        tell: TellOthers = lambda _: None,
    ) -> None:
        self._cache, self._on_its_thread, self._cleared, self._tell = cache, on_its_thread, cleared, tell
        self._changing = threading.Lock()

    def status(self) -> dict[str, Any]:
        """The attached storage and its state, as JSON; in a moment, even if the storage hangs."""
        cache, attached = self._cache, self._cache.worker.attached
        told: dict[str, Any] = {
            "attached": attached is not None,
            "changing": self._changing.locked(),
            "storage_wait": cache.worker.config.policies.storage_wait,
            "write_policy": cache.worker.config.policies.write_policy,
        }
        if attached is None:
            return told
        counters = cache.scheduler.core.counters
        return told | {
            **attached.status(cache.clock()),
            "pages": {
                "fetched": counters.fetched,
                "stored": counters.stored,
                "failed": counters.failed,
                "bad": counters.bad_storage,
                "late": counters.late,
            },
            "given_up_backups": counters.given_up,
            "lanes": {
                lane.name: {
                    "waiting": lane.waiting(),
                    "done": lane.counts.done,
                    "failed": lane.counts.failed,
                    "late": lane.counts.late,
                    "refused": lane.counts.refused,
                }
                for lane in attached.connection.lanes.values()
            },
            "compressed": totals(attached.storage),
            "counts": dict(attached.storage.counts),
        }

    def attach(
        self, url: str | Sequence[str], *, wait: str | None = None, write: str | None = None, back_up: bool = False
    ) -> dict[str, Any]:
        """Open a storage (several URLs: tiers) and attach it in place of the present one; returns the status then.

        Any KvarveError: the present storage is still attached.
        """
        cache, told = self._cache, ", ".join(map(shown, [url] if isinstance(url, str) else url))
        with self._alone():
            self._tell(((url,) if isinstance(url, str) else tuple(url), wait, write, back_up))
            try:
                # Abandoned if it hangs: neither the next change nor the program's exit waits for it.
                opening = BackgroundCall(
                    "kvarve opens a storage", lambda: cache.worker.opened(url, wait=wait, write=write)
                )
                storage = opening.result(OPEN_S, late=_close)
            except Exception as e:  # noqa: BLE001  it may be a bug in a backend; the caller is told
                if isinstance(e, Abandoned):
                    e = StorageError(f"{told}: it is not open after {OPEN_S:g} s: given up")
                error = _ours(e, f"{told}: it cannot be opened")
                if cache.identity.ranks > 1:  # so that ranks that opened theirs do not wait for this one
                    with suppress(KvarveError, TimeoutError):
                        declined = self._on_its_thread(lambda: cache.worker.decline(error), ASK_S)
                        # Until all ranks have said so: what one says of this change would else refuse the next one.
                        declined.made.result(CHANGE_S + ASK_S)
                raise error from None
            try:
                change = self._on_its_thread(
                    lambda: cache.worker.attach(storage, setting=url, back_up=back_up, wait=wait, write=write),
                    ASK_S,
                )
            except BaseException:  # the storage is closed on any error
                _close(storage)
                raise
            return self._made(change)

    def detach(self) -> dict[str, Any]:
        """Detach the storage, if there is one; returns the status then. Any KvarveError: it is still attached."""
        with self._alone():
            self._tell(None)
            return self._made(self._on_its_thread(self._cache.worker.detach, ASK_S))

    def clear(self) -> int:
        """Remove this model's pages from the storage; how many objects they were. Pages in memory are dirty then. Any
        KvarveError: some may be left."""
        with self._alone():
            if (attached := self._cache.worker.attached) is None:
                raise ConfigError("no storage is attached, and clearing needs one")
            try:
                return BackgroundCall("kvarve clears a storage", attached.storage.drop).result(OPEN_S)
            except Exception as e:  # noqa: BLE001  it may be a bug in a backend; the caller is told
                if isinstance(e, Abandoned):
                    e = StorageError(f"the storage is not cleared after {OPEN_S:g} s: given up")
                raise _ours(e, "the storage cannot be cleared") from None
            finally:
                self._cleared()

    def _made(self, change: Change) -> dict[str, Any]:
        """Wait for a change; the status then, and whether the storage before it is closed."""
        try:
            before = change.made.result(CHANGE_S + ASK_S)
        except TimeoutError:
            raise Busy("the engine is too busy to change its storage; it may still do so") from None
        except Exception as e:  # noqa: BLE001  it may be a bug of ours; the caller is told
            if change.attached is not None:
                change.attached.connection.closed.wait(CLOSED_S)
            raise _ours(e, "the storage could not be changed") from None
        told = self.status() | {"changing": False}
        return told if before is None else told | {"previous_closed": before.closed.wait(CLOSED_S)}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise UnderWay("another change of the storage is under way: try again later")
        try:
            yield
        finally:
            self._changing.release()


def _ours(e: Exception, what: str) -> KvarveError:
    """A KvarveError as it is; any other exception is a bug (perhaps of a backend), logged and made a StorageError."""
    if isinstance(e, KvarveError):
        return e
    log.error("%s", what, exc_info=e)
    return StorageError(f"{what}: {type(e).__name__}: {e}")


def _close(storage: Storage) -> None:
    try:
        storage.close()
    except StorageError as e:
        log.warning("a storage that was not attached could not be closed: %s", e)
