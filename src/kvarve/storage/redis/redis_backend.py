"""What a redis URL may say: redis://[user:password@]host[:6379][/database]?ttl=7d, rediss:// for TLS; docs/redis.md."""

import re
from collections.abc import Callable
from pathlib import Path

from kvarve.errors import ConfigError
from kvarve.storage.base import Storage, check_settings
from kvarve.storage.redis.redis_storage import RedisStorage
from kvarve.storage.redis.servers import Settings, library
from kvarve.storage.urls import Backend, StorageUrl, host_and_port

_TLS = ("tls_ca", "tls_cert", "tls_key")


class RedisBackend(Backend):
    example = "redis://10.0.0.1:6379/0?ttl=7d"
    parameters = frozenset({"ttl", "cluster", "user", "password_file", *_TLS})
    secrets = True
    shared = True
    managed_by = "the server itself: see redis-cli"

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        check_settings(1, label)
        settings = read_settings(url)
        library()
        return lambda: RedisStorage(settings, label, description)


def read_settings(url: StorageUrl) -> Settings:
    """ConfigError: what is wrong with the URL."""
    given, tls = url.parameters, url.scheme == "rediss"
    cluster = url.yes("cluster", default=False)
    if (wrong := next((name for name in _TLS if name in given), None)) and not tls:
        raise ConfigError(f"{url.text}: {wrong} needs rediss://, which encrypts")
    user, file = given.get("user", url.user), given.get("password_file")
    if user is not None and url.password is None and file is None:
        raise ConfigError(f"{url.text}: a user needs a password, as in redis://user:password@host, or a password_file")
    if file is not None and (url.password is not None or not Path(file).is_absolute()):
        raise ConfigError(f"{url.text}: password_file must be the absolute path of a file, and the only password")
    host, port, socket, database = "", 6379, "", 0
    if url.place:
        (host, port), number = host_and_port(url.place, port, url.text), url.path.removeprefix("/") or "0"
        if not re.fullmatch("[0-9]{1,6}", number):
            raise ConfigError(f"{url.text}: the path of a redis URL must be the number of a database, not {number!r}")
        host, database = host.strip("[]"), int(number)
    elif url.path.startswith("/") and not tls:
        socket = url.path
    else:
        raise ConfigError(f"{url.text}: it must say where the server is, as in {RedisBackend.example}")
    if cluster and (database or socket):
        raise ConfigError(f"{url.text}: a cluster must have a host, and no database but 0")
    return Settings(
        f"{url.scheme}://{url.place or socket}",
        host,
        port,
        socket,
        database,
        user,
        url.password,
        file,
        cluster,
        tls,
        given.get("tls_ca"),
        given.get("tls_cert"),
        given.get("tls_key"),
        url.seconds("ttl"),
    )
