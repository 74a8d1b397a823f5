"""Metadata in a Redis, for stores that several machines share: the slot table as a script (`slots.lua`), one a call.

The server has to keep what it is told (appendonly yes) and to evict nothing (maxmemory-policy noeviction): both are
asked when a store is opened.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import check_names, left_s
from kvarve.storage.hf3fs.metadata.calls import RemoteMetadata
from kvarve.storage.hf3fs.metadata.service import MOST_NAMES, first_numbers
from kvarve.storage.hf3fs.metadata.store_identity import Identity
from kvarve.storage.redis.redis_backend import read_settings
from kvarve.storage.redis.servers import Servers, Settings
from kvarve.storage.redis.wire import Refused, Wire, command
from kvarve.storage.urls import parse_url

_SCRIPT = files("kvarve.storage.hf3fs.metadata").joinpath("slots.lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT).hexdigest().encode()  # by which Redis names it
_PASSWORD_BYTES = 4096


def redis_settings(setting: str) -> tuple[Settings, Path | None, str | None]:
    """Where the server is, the file with its password, and the user. ConfigError; nothing is touched."""
    if "@" in setting:
        raise ConfigError("metadata=redis://...: no password stands in a URL: give user= and password_file=")
    parts = urlsplit(setting)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    file, user = given.pop("password_file", None), given.pop("user", None)
    if "ttl" in given:
        raise ConfigError(f"metadata={setting}: metadata has no ttl")
    if file is not None and not Path(file).is_absolute():
        raise ConfigError(f"metadata={setting}: password_file is an absolute path")
    if user is not None and file is None:
        raise ConfigError(f"metadata={setting}: a user has a password: give password_file= too")
    query = "&".join(f"{name}={quote(value, safe='/')}" for name, value in given.items())
    settings = read_settings(parse_url(f"{parts.scheme}://{parts.netloc}{parts.path}{'?' if query else ''}{query}"))
    return settings, (file and Path(file)) or None, user


def _password(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_PASSWORD_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{file}: the password of the metadata's Redis cannot be read: {error}") from error


class RedisMetadata(RemoteMetadata):
    """`identity` tells which store it is, once the server is known to be fit for it. Used by several threads; after a
    fork by the parent alone."""

    def __init__(
        self,
        setting: str,
        identity: Callable[[], Identity],
        owner: bytes,
        capacity_bytes: int,
        quota_bytes: int | None,
    ) -> None:
        settings, file, user = redis_settings(setting)
        if file is not None:
            settings = replace(settings, password=_password(file), user=user)
        self._servers = Servers(settings)
        self._pid = os.getpid()
        self._prefix = b"kvarve:hf3fs"
        self._owner = owner.hex()[:16].encode()  # all that the script looks at
        self._hello = [capacity_bytes, quota_bytes or 0]
        try:
            self._check_server(settings.where)
            store, self._empty = identity()
            self._prefix += b":{%s}" % store.encode()
            self._say_hello()
        except BaseException:
            self._servers.close()
            raise

    def drop(self, group: str | None = None) -> int:
        check_names([] if group is None else [group])
        cursor, count = 0, 0
        while True:
            cursor, removed = self._told("drop", () if group is None else (group,), (cursor,), 2)
            count += removed
            if not cursor:
                return count

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._servers.close()

    def _ask(self, call: str, names: Sequence[str], numbers: Sequence[int]) -> list[int]:
        try:
            told = self._try(call, names, numbers)
        except Refused:
            raise
        except StorageError:  # the connection is lost, perhaps with the server; another one may have its place
            self._servers.forget_layout()
            self._require_open()
            if left_s() <= 0:
                raise
            told = self._try(call, names, numbers)
        if told is None:
            self._say_hello()  # the server has lost what it knew
            told = self._try(call, names, numbers)
        if told is None:
            raise StorageError("the metadata's Redis forgets what it is told")
        return told

    def _try(self, call: str, names: Sequence[str], numbers: Sequence[int]) -> list[int] | None:
        """None: the server knows nothing of this store."""
        self._require_open()
        assert len(names) <= MOST_NAMES, "the script unpacks them at once"
        words = [self._prefix, call.encode(), self._owner, b"%d" % len(names)]
        words += [name.encode() for name in names]
        words += [b"%d" % number for number in numbers]
        with self._wire() as wire:
            try:
                wire.send([command(b"EVALSHA", _SHA, b"1", *words)])
                told = wire.text()
            except Refused as refusal:
                if not refusal.words.startswith("NOSCRIPT"):
                    raise
                wire.send([command(b"EVAL", _SCRIPT, b"1", *words)])
                told = wire.text()
        try:
            return None if told == b"unknown" else [*map(int, told.split())]
        except ValueError:
            raise StorageError("the metadata's Redis answers no numbers") from None

    def _wire(self) -> AbstractContextManager[Wire]:
        ((server, _),) = self._servers.by_server([self._prefix]) or [(0, [0])]
        return self._servers.wire(server)

    def _require_open(self) -> None:
        if self._servers.closed or os.getpid() != self._pid:
            raise StorageError("this metadata is closed, or was opened before a fork")

    def _say_hello(self) -> None:
        _, extent = first_numbers(0.0)
        self._try("hello", (), [*self._hello, int(self._empty), extent])
        self._empty = False

    def _check_server(self, where: str) -> None:
        with self._wire() as wire:
            wire.send([command(b"INFO", b"persistence"), command(b"INFO", b"memory")])
            lines = (wire.text() + wire.text()).decode("utf-8", "replace").splitlines()
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        if told.get("aof_enabled") == "0":
            raise StorageError(f"{where}: metadata has to survive its server: set appendonly yes there")
        if told.get("maxmemory", "0") != "0" and told.get("maxmemory_policy") != "noeviction":
            raise StorageError(f"{where}: metadata may not be evicted: set maxmemory-policy noeviction there")
