"""A `CacheScheduler` in a process of its own: calls come in by one pipe, answers go out by the other."""

import os
import sys
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from wire import Answer, Number, Standing, Wire

from kvarve.cache.scheduler import CacheScheduler
from kvarve.core.lease import Lease, Phase


def about(wire: Wire) -> dict[str, Any]:
    """The resources of this process beside the scheduler, and the messages that it got."""
    # Listing the open files opens one more.
    files = len(os.listdir("/proc/self/fd")) - 4  # noqa: PTH208  the pipes, the errors and the listing
    received = {each.__name__ for each in wire.received}
    return {
        "received": received,
        "torch": "torch" in sys.modules,
        "threads": threading.active_count() - 1,
        "files": files,
    }


def serve(wire: Wire) -> None:
    """Answer until the other process has ended."""
    _, (identity, config, slots, storage, only_read, prefill_tokens) = wire.receive()
    about_storage = {"storage": storage, "only_read": only_read}
    scheduler = CacheScheduler(identity, config, slots, **about_storage, prefill_tokens=prefill_tokens)
    wire.send(Answer(None, ()))
    leases: dict[int, Lease] = {}
    told: dict[int, Standing] = {}
    while True:
        try:
            name, words = wire.receive()
        except EOFError:
            return
        value, trouble = None, ""
        try:
            if name == "about":
                value = about(wire)
            else:
                found = attrgetter(name)(scheduler)
                value = found(*plain(words, leases)) if callable(found) else found
        except Exception as e:  # noqa: BLE001  told to the caller
            trouble = f"{type(e).__name__}: {e}"
        if isinstance(value, Lease):
            leases[value.number] = value
            value = Number(value.number)
        news = tuple(now for lease in leases.values() if (now := Standing.of(lease)) != told.get(lease.number))
        told.update({each.number: each for each in news})
        for each in news:
            if each.phase is Phase.CLOSED:
                del leases[each.number], told[each.number]
        wire.send(Answer(value, news, trouble))


def plain(words: Any, leases: dict[int, Lease]) -> Any:
    """The arguments with leases in place of their numbers."""
    if isinstance(words, Number):
        return leases[words.lease]
    return type(words)(plain(each, leases) for each in words) if type(words) in (tuple, list) else words


if __name__ == "__main__":
    serve(Wire(sys.stdin.buffer, sys.stdout.buffer))
