"""One client of a Mooncake master, made safe to call: the workarounds for the library are in this file.

Measured with version 0.3.13 (docs/decisions/0012-mooncake.md): a call after `close` ends the process; a `setup` without
a master blocks for 90 s; a get that the library gave up on may write later; a dead master costs seconds per call.
"""

import http.client
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvarve.errors import ConfigError, StorageError
from kvarve.system.regions import address

log = logging.getLogger(__name__)

# The library's ErrorCode.
NO_ROOM, INVALID, NOT_READY, NOT_FOUND, ALREADY_THERE = -200, -600, -703, -704, -705
LEASE_EXPIRED, NO_REPLICA, GONE = -707, -710, -712
TRANSFER_FAILED, BAD_CHECKSUM = -800, -801
NO_FILE, FILE_UNREADABLE, NO_BUCKET = -1100, -1102, -1200  # of an object that its owner has on a disk
MISSING = frozenset({NOT_READY, NOT_FOUND, LEASE_EXPIRED, NO_REPLICA, GONE})
DAMAGED = frozenset({BAD_CHECKSUM, NO_FILE, FILE_UNREADABLE, NO_BUCKET})
_OUTAGES = range(-1099, -899)  # the master does not answer, or refuses for now

# The library reads these from the environment at its first use; values set by the user stay. The second and third end a
# transfer that hangs: four at a time go to one owner, so 32 objects end within 20 s, long before the 60 s after which
# the library returns and leaves transfers behind that may still write.
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",  # of the first contact with an owner, for each object of a call
}
LIBRARY_PATIENCE_S = 50.0  # a call that took longer may have left transfers behind (the library waits for 60 s)
_TURN_S = 1.0  # how long a transfer waits for the one before it, which may hang
_KNOCK_S = 0.5  # timeout of a connection to the master's port, and of its figures
_BUFFER_BYTES = 16 << 20  # which the library keeps for calls that we do not make; its minimum
_CLOSED = "this storage is closed, or was opened before a fork"


@dataclass(frozen=True)
class Settings:
    """How to reach one master, and what this client contributes."""

    master: str  # host:port
    protocol: str = "tcp"
    device: str = ""  # of RDMA
    segment_bytes: int = 0  # of this process's memory, lent to all clients
    metadata: str = "P2PHANDSHAKE"
    hostname: str = ""  # by which the other clients reach this one; empty: the address from which it reaches the master
    replicas: int = 1
    soft_pin: bool = False
    hard_pin: bool = False
    metrics: str = ""  # host:port of the master's own figures

    @property
    def address(self) -> tuple[str, int]:
        return _address(self.master)

    @property
    def metrics_address(self) -> tuple[str, int]:
        return _address(self.metrics)


def library() -> Any:
    """A Mooncake client object, not connected. ConfigError: it is not installed, or cannot be loaded here."""
    return load().MooncakeDistributedStore()


def load() -> Any:
    """The library. ConfigError: it is not installed, or cannot be loaded here."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"the Mooncake client cannot be loaded ({error}): pip install '.[server,mooncake]' in kvarve's checkout, "
            f"and on Debian apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error


@contextmanager
def _turn(lock: threading.Lock) -> Iterator[None]:
    """One transfer each way at a time: the library moves a batch on threads of its own, and two batches at once are
    slower than one after the other where processors are few (over TCP on two of them by a third)."""
    mine = lock.acquire(timeout=_TURN_S)
    try:
        yield
    finally:
        if mine:
            lock.release()


def _address(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


class Client:
    """Calls of many threads into one library object, which is replaced when it may have stray transfers.

    Every call answers the library's own codes, and raises StorageError when the master does not answer. The master need
    not run before the first call.
    """

    def __init__(
        self,
        settings: Settings,
        make: Callable[[], Any] = library,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._make, self._clock = settings, make, clock
        self._lock = threading.Condition()  # guards everything below
        self._raw: _Raw | None = None
        self._inside = 0  # calls in flight in `_raw`
        self._changing = self._closed = False
        self._suspect = True  # the master did not answer the last call
        self._lent: list[memoryview] = []  # memory to register with every library object
        self._putting, self._getting = threading.Lock(), threading.Lock()
        self._pid = os.getpid()
        self._hostname = settings.hostname

    def lend(self, memory: memoryview) -> None:
        """Buffers of later calls lie in `memory`. The next call registers it with the library."""
        with self._lock:
            self._lent.append(memory)

    def exists(self, keys: list[str]) -> list[int]:
        """1 or 0 for each, 0 for one of which the master cannot tell. StorageError: it can tell of none."""
        with self._entered() as raw:
            codes: list[int] = raw.store.batch_is_exist(keys)
        if min(codes, default=0) < 0:
            if max(self._heard(codes)) < 0:
                raise StorageError(
                    f"the Mooncake master at {self._settings.master} cannot tell which objects exist: {min(codes)}"
                )
            codes = [max(0, code) for code in codes]
        self._suspect = False
        return codes

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        with _turn(self._putting), self._entered() as raw:
            config = raw.replication
            more = () if config is None else (config,)
            return self._heard(raw.store.batch_put_from(list(keys), list(addresses), list(sizes), *more))

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read each object; once this returns or raises, no transfer writes to the addresses any more."""
        with _turn(self._getting), self._entered() as raw:
            start = self._clock()
            codes: list[int] = raw.store.batch_get_into(list(keys), list(addresses), list(sizes))
        if TRANSFER_FAILED in codes and self._clock() - start >= LIBRARY_PATIENCE_S:
            self._renew(raw)
        return self._heard(codes)

    def size(self, key: str) -> int:
        with self._entered() as raw:
            (code,) = self._heard([raw.store.get_size(key)])
            return code

    def remove(self, keys: list[str]) -> list[int]:
        """Remove each object, also one under a lease: a reader may get torn bytes, and its check refuses them."""
        with self._entered() as raw:
            return self._heard(raw.store.batch_remove(keys, True))

    def remove_all_of(self, pattern: str) -> int:
        """Remove all objects whose names match a regular expression; returns how many there were."""
        with self._entered() as raw:
            (count,) = self._heard([raw.store.remove_by_regex(pattern, True)])
            return count

    def figures(self) -> dict[str, float] | None:
        """The master's metrics by name; None if they cannot be read."""
        connection = http.client.HTTPConnection(*self._settings.metrics_address, timeout=_KNOCK_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            text = answer.read(4 << 20).decode("utf-8", "replace") if answer.status == http.client.OK else ""
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        pairs = (line.split() for line in text.splitlines() if line.startswith("master_"))
        return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2} or None

    def require_open(self) -> None:
        """StorageError after `close`."""
        if self._closed or os.getpid() != self._pid:
            raise StorageError(_CLOSED)

    def close(self) -> None:
        """Wait for the calls in flight, and close. May be called twice."""
        if os.getpid() != self._pid:  # after a fork the library object is the parent's
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.wait_for(lambda: not self._inside and not self._changing)
            raw, self._raw = self._raw, None
        if raw is not None:
            raw.store.close()

    # --- inside

    def _entered(self) -> "_Inside":
        """The library object with all memory registered; it is not closed within the block."""
        self.require_open()  # before the lock, which may be locked for ever after a fork
        if self._suspect:
            self._knock()
        return _Inside(self, self._ready())

    def _ready(self) -> "_Raw":
        """The library object, with this call counted as in flight. Slow work is done without the lock."""
        while True:
            with self._lock:
                if self._changing:
                    self._lock.wait_for(lambda: not self._changing)
                self.require_open()
                raw = self._raw
                if raw is not None and raw.registered == len(self._lent):
                    self._inside += 1
                    return raw
                self._changing, lent = True, [*self._lent]
            try:
                raw = raw or self._connected()
                for memory in lent[raw.registered :]:
                    raw.register(memory)
            finally:
                with self._lock:
                    self._raw, self._changing = raw, False
                    self._lock.notify_all()

    def _heard(self, codes: list[int]) -> list[int]:
        """StorageError if the master did not answer; the next call then tries its port first."""
        outage = next((code for code in codes if code in _OUTAGES), None) if min(codes, default=0) < 0 else None
        self._suspect = outage is not None
        if outage is not None:
            raise StorageError(f"the Mooncake master at {self._settings.master} does not answer ({outage})")
        return codes

    def _knock(self) -> None:
        """StorageError at once if no process listens; the library would try for seconds, and `setup` for 90."""
        try:
            with socket.create_connection(self._settings.address, _KNOCK_S) as knock:
                self._hostname = self._hostname or str(knock.getsockname()[0])
        except OSError as error:
            raise StorageError(f"no Mooncake master answers at {self._settings.master}: {error}") from None

    def _connected(self) -> "_Raw":
        settings, raw = self._settings, _Raw(self._make(), self._settings)
        hostname = f"[{self._hostname}]" if ":" in self._hostname.strip("[]") else self._hostname
        code = raw.store.setup(
            hostname,
            settings.metadata,
            settings.segment_bytes,
            _BUFFER_BYTES,
            settings.protocol,
            settings.device,
            settings.master,
        )
        if code != 0:
            raise StorageError(
                f"the Mooncake client could not be set up for {settings.master} ({code}); its log says why"
            )
        self._suspect = False
        return raw

    def _renew(self, raw: "_Raw") -> None:
        """Close `raw`, after which its stray transfers write nothing more; the next call gets a new one. The caller's
        call has ended; the other calls in flight hang as it did, and come here too.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._changing)
            if self._raw is not raw:
                return
            self._changing = True
            self._lock.wait_for(lambda: not self._inside)
        log.warning("a transfer from Mooncake hangs: its client is closed, and another one takes its place")
        try:
            raw.store.close()
        finally:
            with self._lock:
                self._raw, self._changing = None, False
                self._lock.notify_all()


class _Inside:
    """Counts one call as in flight; a class, since a generator-based context would cost too much per `exists`."""

    __slots__ = ("_client", "_raw")

    def __init__(self, client: Client, raw: "_Raw") -> None:
        self._client, self._raw = client, raw

    def __enter__(self) -> "_Raw":
        return self._raw

    def __exit__(self, *_: object) -> None:
        client = self._client
        with client._lock:
            client._inside -= 1
            if client._changing or client._closed:  # `close` or `_renew` waits for this
                client._lock.notify_all()


class _Raw:
    """A library object, and the memory that it knows."""

    def __init__(self, store: Any, settings: Settings) -> None:
        if "force" not in (getattr(getattr(store, "batch_remove", None), "__doc__", "") or ""):
            raise ConfigError("mooncake:// needs Mooncake's client 0.3.13 or newer: install kvarve's extra 'mooncake'")
        self.store = store
        self.registered = 0  # how many of `_lent`
        self.replication = _replication(settings)

    def register(self, memory: memoryview) -> None:
        code = self.store.register_buffer(address(memory), memory.nbytes)
        if code != 0:
            raise StorageError(f"Mooncake cannot register {memory.nbytes} bytes of host memory ({code})")
        self.registered += 1


def _replication(settings: Settings) -> Any:
    """The replication config of each object."""
    if settings.replicas == 1 and not settings.soft_pin and not settings.hard_pin:
        return None
    store = importlib.import_module("mooncake.store")
    config = store.ReplicateConfig()
    config.replica_num, config.with_hard_pin = settings.replicas, settings.hard_pin
    if settings.soft_pin:
        config.soft_pin_action = store.SoftPinAction.ENABLE
    return config
