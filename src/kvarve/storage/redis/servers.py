"""The servers of one Redis URL, by the client library: which one has a key, and connections to it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import left_s
from kvarve.storage.redis.wire import Wire

CONNECT_S = 2.0  # for a connection, and for each step of its handshake
_PASSWORD_BYTES = 4096  # at most
CALL_S = 30.0  # for a call whose caller has not said how long it waits


@dataclass(frozen=True)
class Settings:
    """Where a Redis is and how to reach it. `socket`: the path of a Unix socket, in place of host and port."""

    where: str  # for messages
    host: str = ""
    port: int = 6379
    socket: str = ""
    database: int = 0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    cluster: bool = False
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    ttl_s: float | None = None


def _password(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(_PASSWORD_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{file}: the password of a Redis cannot be read: {error}") from error


def library() -> Any:
    """The client library. ConfigError: it is not installed."""
    try:
        return import_module("redis")
    except ImportError as error:
        raise ConfigError(f"redis:// needs redis-py ({error}): install kvarve with the extra 'redis'") from error


@dataclass(eq=False)
class Server:
    """`pool`: of the library, how a connection is made; `idle`: connections for the next call."""

    pool: Any
    idle: list[Wire] = field(default_factory=list)


class Servers:
    """Connections to the servers of one URL, kept for the next call; used by several threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._redis = settings, library()
        self._lock = threading.Lock()  # guards all below
        self._cluster: Any = None
        self._by_name: dict[str, Server] = {}  # "" without a cluster
        self._busy: set[Wire] = set()
        self._stale = settings.cluster  # the cluster's layout is not known, or not as it was
        self.closed = False
        if not settings.cluster:
            self._by_name[""] = Server(self._redis.Redis(**self._options(), db=settings.database).connection_pool)

    def by_server(self, keys: Sequence[bytes]) -> list[tuple[Server, list[int]]]:
        """Which of the keys, by their places, each server has; in a cluster, some may be at none. StorageError: no
        server of the cluster answers."""
        if not self._settings.cluster:
            return [(self._by_name[""], [*range(len(keys))])] if keys else []
        self._learn()
        parts: dict[Server, list[int]] = {}
        with self._library():
            for i, key in enumerate(keys):
                with suppress(self._redis.exceptions.SlotNotCoveredError):  # no server has it
                    node = self._cluster.get_node_from_key(key)
                    parts.setdefault(self._server(node), []).append(i)
        return [*parts.items()]

    def all(self) -> list[Server]:
        """Every server that has keys."""
        if not self._settings.cluster:
            return [*self._by_name.values()]
        self._learn()
        with self._library():
            return [self._server(node) for node in self._cluster.get_primaries()]

    def forget_layout(self) -> None:
        """A server of the cluster is gone, or does not have a key that it had: ask anew."""
        self._stale = self._settings.cluster

    @contextmanager
    def wire(self, server: Server) -> Iterator[Wire]:
        """A connection for a call, which is to end by its caller's deadline. StorageError: there is none."""
        seconds = min(left_s(), CALL_S)
        wire = self._taken(server) or self._connected(server, seconds)
        try:
            wire.wait_for(seconds)
            yield wire
        except BaseException as error:
            wire.close()  # answers may still come, and would be taken for those of later commands
            if isinstance(error, StorageError) and self.closed:
                raise StorageError("this storage is closed") from None
            raise
        finally:
            with self._lock:
                self._busy.discard(wire)
                kept = not wire.closed and not self.closed
                if kept:
                    server.idle.append(wire)
            if not kept:
                wire.close()

    def close(self) -> None:
        """Close all connections, also those of calls in flight."""
        with self._lock:
            self.closed = True
            wires = [*self._busy, *(wire for server in self._by_name.values() for wire in server.idle)]
            cluster, self._cluster = self._cluster, None
        for wire in wires:
            wire.close()
        if cluster is not None:
            cluster.close()

    # --- inside

    def _taken(self, server: Server) -> Wire | None:
        """A connection of an earlier call. The server may have gone, or have come back, since then."""
        while True:
            with self._lock:
                if not server.idle:
                    return None
                wire = server.idle.pop()
                self._busy.add(wire)
            if wire.is_fresh():
                return wire
            wire.close()
            with self._lock:
                self._busy.discard(wire)

    def _connected(self, server: Server, seconds: float) -> Wire:
        connection = server.pool.make_connection()
        connection.socket_timeout = connection.socket_connect_timeout = min(CONNECT_S, max(seconds, 1e-3))
        with self._library():
            connection.connect()
        link, connection._sock = connection._sock, None  # it is ours from now on
        wire = Wire(link, self._settings.where)
        with self._lock:
            self._busy.add(wire)
            closed = self.closed
        if closed:
            wire.close()
        return wire

    def _learn(self) -> None:
        """Ask the cluster for its layout, if it may have changed."""
        if not self._stale:
            return
        with self._library():
            if self._cluster is None:
                cluster = self._redis.cluster.RedisCluster(**self._options(), require_full_coverage=False)
                with self._lock:
                    self._cluster = cluster
            else:
                self._cluster.nodes_manager.initialize()
        self._stale = False

    def _server(self, node: Any) -> Server:
        """A cluster's server."""
        with self._lock:
            if node.name not in self._by_name:
                self._by_name[node.name] = Server(self._cluster.get_redis_connection(node).connection_pool)
            return self._by_name[node.name]

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        options: dict[str, Any] = {
            "username": settings.user,
            "password": settings.password if settings.password_file is None else _password(settings.password_file),
            "socket_timeout": CONNECT_S,
            "socket_connect_timeout": CONNECT_S,
            "protocol": 2,
            "max_connections": 1 << 31,  # the library counts those that it has made, and ours are never given back
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),  # the breaker tries again
        }
        if settings.socket:
            return options | {"unix_socket_path": settings.socket}
        options |= {"host": settings.host, "port": settings.port}
        if settings.tls:
            options |= {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": settings.tls_ca}
            options |= {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
        return options

    @contextmanager
    def _library(self) -> Iterator[None]:
        """The library's errors are trouble."""
        try:
            yield
        except (self._redis.RedisError, self._redis.exceptions.RedisClusterException, OSError) as error:
            if self.closed:
                raise StorageError("this storage is closed") from None
            raise StorageError(f"{self._settings.where}: {error or type(error).__name__}") from None
