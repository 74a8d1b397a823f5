"""API keys as an operator keeps them: a TOML file of names, SHA-256 digests and salts. It never holds a key itself.

    team-a = { sha256 = "9f86...", salt = "team-a" }

A key is 32 random bytes, so its plain digest cannot be turned back. Light to import: `kvarve keys` needs no server.
"""

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvarve.errors import ConfigError
from kvarve.pages.sizes import format_size
from kvarve.settings.values import closest

log = logging.getLogger(__name__)

MOST_KEYS = 1000  # each is compared with the key of every request
FILE_BYTES = 1 << 20
LOOK_S = 1.0  # between two looks whether the file has changed
API_KEY, ADMIN_KEY = "api-key", "admin-key"  # names of the keys that are given by flag
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_LETTERS = 1024  # of a salt


@dataclass(frozen=True)
class Key:
    """What a bearer of one key may do."""

    name: str
    sha256: str  # of the key, 64 hex digits
    salt: str | None = None  # requests of other keys share no page with those of this one
    admin: bool = False  # it opens /admin as well

    @property
    def line(self) -> str:
        """As the file has it."""
        told = {name: getattr(self, name) for name in _FIELDS}
        given = {name: value for name, value in told.items() if value is not None and value is not False}
        inside = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        return f"{self.name} = {{ {inside} }}"

    def salted(self, salt: str) -> str:
        """The cache's salt of a request with a salt of its own: no other key's request can have the same."""
        return salt if self.salt is None else json.dumps({"key": self.salt, "salt": salt})


_FIELDS = [each.name for each in fields(Key) if each.name != "name"]


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def new_key(name: str, salt: str | None = None, admin: bool = False) -> tuple[str, Key]:
    """A new random key, and what the file says of it. ConfigError for a bad name or salt."""
    key = f"kvarve-{secrets.token_urlsafe(32)}"
    given = {} if salt is None else {"salt": salt}
    return key, _key("kvarve keys", name, {"sha256": digest(key.encode()), "admin": admin, **given})


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. ConfigError says in one line what is wrong with it, and repeats no value of it."""
    try:
        if not path.is_file() and path.exists():  # a pipe would give its keys once, and then none
            raise ConfigError(f"--api-keys must be a file, got {path}: it is read more than once")
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"--api-keys: {path} cannot be read: {e.strerror}") from None
    if len(content) > FILE_BYTES:
        raise ConfigError(f"{path}: a file of keys must have at most {format_size(FILE_BYTES)}")
    try:
        given = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: a file of keys must be TOML: it is not UTF-8") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: a file of keys must be TOML: {e}") from None
    if len(given) > MOST_KEYS:
        raise ConfigError(f"{path}: there must be at most {MOST_KEYS} keys, got {len(given)}")
    keys = tuple(_key(str(path), name, about) for name, about in given.items())
    owner: dict[str, str] = {}
    for key in keys:
        if (other := owner.setdefault(key.sha256, key.name)) != key.name:
            raise ConfigError(f"{path}: {other} and {key.name} are the same key, and must differ: leave one out")
    return keys


def _key(path: str, name: str, about: Any) -> Key:
    where = f"{path}: key {name[:80]!r}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name must have 1 to 64 letters, digits, - and _")
    if name in (API_KEY, ADMIN_KEY):
        raise ConfigError(f"{where}: this is the name of the key that --{name} gives: it must be another")
    if not isinstance(about, dict):
        raise ConfigError(f'{where}: it must be {name} = {{ sha256 = "..." }}, as kvarve keys new prints it')
    for field in about:
        if field not in _FIELDS:
            raise ConfigError(f"{where}: unknown field {field[:80]!r}{closest(field, _FIELDS)}; {', '.join(_FIELDS)}")
    if not isinstance(about.get("sha256"), str) or not _SHA256.fullmatch(about["sha256"]):
        raise ConfigError(f"{where}: sha256 must have 64 hex digits (0-9, a-f), the digest of the key")
    salt = about.get("salt", "salt")
    if not isinstance(salt, str) or not 0 < len(salt) <= _MOST_LETTERS or not salt.isprintable():
        raise ConfigError(f"{where}: salt must be a text of 1 to {_MOST_LETTERS} printable characters")
    if type(about.get("admin", False)) is not bool:
        raise ConfigError(f"{where}: admin must be true or false")
    return Key(name, **about)


class Keyring:
    """The keys of a running server: those given by flag, and those of the file, which is read again when it changes.

    Belongs to one thread, but for `reload`.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ConfigError if the file cannot be used."""
        self._path, self._clock = path, clock
        self._mark: object = None if path is None else _mark(path)
        self._fixed = tuple(_given(api_key, API_KEY, admin=False) + _given(admin_key, ADMIN_KEY, admin=True))
        self._keys = self._read()
        self._looked_s = clock()
        self.guards_api = api_key is not None or path is not None  # /v1 needs a key
        self.guards_admin = admin_key is not None or path is not None  # /admin is on, and needs one

    def _read(self) -> tuple[Key, ...]:
        keys = () if self._path is None else read_keys(self._path)
        flags = {key.sha256: key.name for key in self._fixed}
        for key in keys:
            if (flag := flags.get(key.sha256)) is not None:
                raise ConfigError(f"{self._path}: {key.name} must differ from --{flag}: leave one of them out")
        return self._fixed + keys

    def find(self, given: bytes, *, admin: bool) -> Key | None:
        """The key that was given, if it opens this. The time depends on no key: all are compared."""
        if self._path is not None and self._clock() - self._looked_s >= LOOK_S:
            self._looked_s = self._clock()
            if _mark(self._path) != self._mark:
                self.reload()
        found, hashed = None, digest(given)
        for key in self._keys:
            if hmac.compare_digest(key.sha256, hashed):
                found = key
        opens = found is not None and (found.admin if admin else found.name != ADMIN_KEY)
        return found if opens else None

    def reload(self) -> None:
        """Read the file again. One that cannot be used is logged, and the keys stay as they are."""
        if self._path is None:
            return
        mark = _mark(self._path)
        try:
            keys = self._read()
        except ConfigError as e:
            log.error("the API keys stay as they are: %s", e)
        else:
            log.info("API keys read again: %s", _changes(self._keys, keys))
            self._keys = keys
        self._mark = mark


def _given(key: str | None, name: str, *, admin: bool) -> tuple[Key, ...]:
    # Bytes of an environment variable that are not UTF-8 read as surrogates; this restores them.
    return () if key is None else (Key(name, digest(key.encode("utf-8", "surrogateescape")), admin=admin),)


def _mark(path: Path) -> object:
    """What changes with the file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_dev


def _changes(before: Iterable[Key], after: Iterable[Key]) -> str:
    old, new = ({key.name: key for key in keys} for keys in (before, after))
    kinds = {
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
        "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
    }
    return "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names) or "no change"
