"""What requests may leave behind in a server of this process: nothing."""

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
from talk import LONG_S, Body, complete, metrics, until

from kvarve.reference.server.serve import Server
from kvarve.storage.file._index import DEFAULT_THREADS
from kvarve.system.heap import bound_heaps

bound_heaps()  # as `kvarve serve` does before its threads start: else each has a heap of its own, which only grows
# Those of a file store, which begin when it first moves several records at once.
FILE_THREADS = Counter(f"kvarve files {what} {at}" for what in ("move", "sync") for at in range(DEFAULT_THREADS))
ROOM_BYTES = 64 << 20  # beyond what a server takes once: its caches of bounded size, the heap's holes


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Left:
    """Compares a server after some requests with what it was before them. Its clients close their connections first."""

    def __init__(self, server: Server, client: httpx.Client) -> None:
        self._server, self._client = server, client
        complete(client, "hei", max_tokens=1)  # what a server makes once is made
        self._before, self._answered = self._now(), self._refused()

    def check(self, got: Counter[int], unread: int = 0, *, rss_bytes_before: int | None = None) -> None:
        """`got`: how many of each status its clients got, whose 503 it has counted; `unread`: answers that they did not
        read."""
        until(self._client, lambda now: now["kvarve_connections"] == 1)
        assert got[503] <= self._refused() - self._answered <= got[503] + unread
        assert self._client.get("/health").status_code == 200
        assert complete(self._client, "hei", max_tokens=1)["choices"]
        self._server.engine.flush()  # what it leaves is pinned
        end = time.monotonic() + LONG_S
        while self._more(now := self._now()):
            assert time.monotonic() < end, (self._before, now)
            self._client.get("/health")
        if rss_bytes_before is not None:
            grown = rss_bytes() - rss_bytes_before
            assert grown <= ROOM_BYTES, f"{grown >> 20} MiB more"

    def _more(self, now: Body) -> bool:
        """Whether there is more than before; less there is of a server whose storage was detached."""
        numbers = ("leases", "copies", "tasks", "sockets")
        return (
            any(now[name] > self._before[name] for name in numbers)
            or any(now["lost slots"])
            or now["load"] != (0, 0)
            or not now["threads"] <= self._before["threads"] | FILE_THREADS
        )

    def _refused(self) -> int:
        now = metrics(self._client)
        return int(
            sum(count for name, count in now.items() if name.startswith("kvarve_responses") and name.endswith(".503"))
        )

    def _now(self) -> Body:
        """Some of it ends by itself soon: copies, and threads of one piece of work."""
        gc.collect()
        core, loop = self._server.engine.cache.scheduler.core, self._server._http.servers[0].get_loop()
        pools = core.slot_pools
        names = Counter(thread.name for thread in threading.enumerate())
        return {
            "leases": len(core.leases),
            "copies": len(core.copies.ops),
            "lost slots": [pools.committed(place) - len(free) for place, free in enumerate(pools.free)],
            "tasks": len(asyncio.all_tasks(loop)),
            "load": self._server.engine.load(),
            "threads": Counter({name: count for name, count in names.items() if name.startswith("kvarve")}),
            "sockets": sum(_name(fd).startswith("socket") for fd in Path("/proc/self/fd").iterdir()),
        }


def _name(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # closed since
        return ""
