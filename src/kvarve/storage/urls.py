"""Which storage does a setting such as `file:///var/kvarve?capacity=100GiB` mean? Several are tiers, nearest first.

`file://?capacity=100GiB`, without a path, is a folder in the user's state directory. A scheme is an entry point of the
group `kvarve.storage`, ours and others' alike; its module is imported when its first URL is parsed.
"""

import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from kvarve.errors import ConfigError, KvarveError, StorageError
from kvarve.pages.sizes import parse_size
from kvarve.storage._breaker import Breaker
from kvarve.storage._tiers import Tiers
from kvarve.storage.base import ANY_NAME, Around, Damaged, Storage
from kvarve.storage.upkeep import Upkeep
from kvarve.system.regions import HostRegion

log = logging.getLogger(__name__)

GROUP = "kvarve.storage"
DEFAULT_CAPACITY = "10GiB"  # of a plain path; a URL says its own
COMPRESS = ("no", "zstd", "lz4", "auto")  # a parameter of every URL, as records are encoded outside of a storage
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", re.ASCII)
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:/@\s]+)(?::([0-9]{1,5}))?")
_YES, _NO = ("yes", "true", "1"), ("no", "false", "0")
_ENCODED = re.compile(r"([?&][^=&]*=[^&]*?(?:/|%2F){2})[^&]*%40", re.IGNORECASE)  # a URL in a parameter, with an @
_SECRET = re.compile(r"([?&][^=&]*(?:pass|secret|token|auth|sig|(?:access|account)_?key)[^=&]*=)[^&]*", re.IGNORECASE)


def parse_time(written: str) -> float:
    """The seconds meant by 90s, 30m, 12h, 7d or 2w; ConfigError for anything else."""
    match = _TIME.fullmatch(written)
    if match is None:
        raise ConfigError(f"{written} cannot be read as a time: write 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def shown(text: str) -> str:
    """A setting as it may be printed: without user and password, whether it can be parsed or not."""
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "", text
    _, secret, place = rest.rpartition("@")
    if secret and not rest.startswith("/"):
        rest = f"***@{place}"
    return _SECRET.sub(r"\1***", _ENCODED.sub(r"\1***%40", f"{scheme}{found}{rest}"))


def has_secret(setting: str | Sequence[str]) -> bool:
    """Whether a URL, or one of several, has what is not printed."""
    return any(shown(url) != url for url in ([setting] if isinstance(setting, str) else setting))


@dataclass(frozen=True)
class StorageUrl:
    """A parsed setting. `text` is how it was written, for messages: it has no secret."""

    text: str
    scheme: str
    place: str  # between "//" and the path, without user and password
    path: str
    parameters: dict[str, str]  # of its backend
    compress: str = "no"
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def size_bytes(self, parameter: str) -> int:
        """The size that `parameter` gives; ConfigError when it is missing or not one above zero."""
        if parameter not in self.parameters:
            raise ConfigError(f"{self.text}: it must say how much it may hold, as in ?{parameter}={DEFAULT_CAPACITY}")
        try:
            size_bytes = parse_size(self.parameters[parameter])
        except ConfigError as e:
            raise ConfigError(f"{self.text}: {parameter}: {e}") from None
        if size_bytes <= 0:
            raise ConfigError(f"{self.text}: {parameter} must be above zero, such as {DEFAULT_CAPACITY}")
        return size_bytes

    def seconds(self, parameter: str) -> float | None:
        """The time that `parameter` gives, such as 90s, 30m, 12h, 7d or 2w; None if it is not there."""
        if parameter not in self.parameters:
            return None
        try:
            seconds = parse_time(self.parameters[parameter])
        except ConfigError as error:
            raise ConfigError(f"{self.text}: {parameter}={error}") from None
        if not seconds:
            raise ConfigError(f"{self.text}: {parameter} must be above zero, such as 7d")
        return seconds

    def yes(self, parameter: str, *, default: bool) -> bool:
        written = self.parameters.get(parameter, "yes" if default else "no")
        if written not in (*_YES, *_NO):
            raise ConfigError(f"{self.text}: {parameter}={written} must be yes or no")
        return written in _YES

    def whole_number(self, parameter: str, default: int = 0, *, most: int = 9999) -> int:
        written = self.parameters.get(parameter, str(default))
        if not re.fullmatch("[0-9]{1,4}", written) or not 1 <= int(written) <= most:
            raise ConfigError(f"{self.text}: {parameter} must be a number from 1 to {most}, got {written!r}")
        return int(written)


def host_and_port(place: str, port: int, source: str) -> tuple[str, int]:
    """The host of a place, an IPv6 address in brackets, and its port, or this one. ConfigError quotes the `source`."""
    match = _PLACE.fullmatch(place)
    if match is None or not 0 < int(match[2] or port) < 1 << 16:
        raise ConfigError(f"{source}: {place!r} must be host:port")
    return match[1], int(match[2] or port)


Wrap = Callable[[Storage], Storage]


class Backend(ABC):
    """One kind of storage, as its URLs show it: the class that an entry point names under its scheme.

    What is said here is known before a storage is opened, and of one that is wrapped in others.
    """

    example: ClassVar[str]
    parameters: ClassVar[frozenset[str]] = frozenset()
    secrets: ClassVar[bool] = False  # its URL may have user:password@

    bounded: ClassVar[bool] = False  # it holds at most the `capacity` of its URL, and evicts to do so
    by_gc: ClassVar[bool] = False  # its `ttl` and `capacity` are what `kvarve storage gc` keeps to
    shared: ClassVar[bool] = False  # other processes that open its URL see the same objects
    can_list: ClassVar[bool] = False  # `kvarve storage ls`, `stat`, `gc` and `drop` manage it without a server
    can_verify: ClassVar[bool] = False  # and `kvarve storage verify` reads all of it
    managed_by: ClassVar[str] = ""  # what does so instead, for people

    @classmethod
    @abstractmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        """Check all three without touching anything (ConfigError, StorageError); returns the call that opens the
        storage, so that none is opened unchecked."""

    @classmethod
    def only_read(cls, url: StorageUrl) -> bool:
        """Whether a URL asks for a storage of which nothing is written; then it need not say how much that may hold."""
        return False

    @classmethod
    def upkeep(cls, url: StorageUrl) -> Upkeep:
        """What `kvarve storage` does without a server. The capacity of its URL may be left out."""
        raise NotImplementedError

    @classmethod
    def allocate(cls, url: StorageUrl, size_bytes: int) -> HostRegion | None:
        """Memory for a host arena, from which this storage moves pages without a copy; None: any memory will do.
        ConfigError: there is not so much."""
        return None


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """By scheme; none of them is imported."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"{point.name}:// must be of one package, and {other.value} and {point.value} want it: uninstall one"
            )
    return found


def _backend(scheme: str) -> type[Backend] | None:
    point = _entry_points().get(scheme)
    if point is None:
        return None
    try:
        backend = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{point.value}, which serves {scheme}://, cannot be loaded: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ConfigError(f"{point.value}, which serves {scheme}://, must be a kvarve.storage.Backend")
    return backend


def backend_of(url: StorageUrl) -> type[Backend]:
    """What is known of all storages of a URL's scheme."""
    backend = _backend(url.scheme)
    assert backend is not None, "a parsed URL has a backend"
    return backend


def parse_url(text: str) -> StorageUrl:
    """Parse a setting; the disk is not accessed. ConfigError if it names no storage."""
    told = shown(text)
    if not text.isprintable() or not text:
        raise ConfigError(f"{told!r} cannot be a storage: {_known_schemes()}")
    if "://" not in text:
        if not text.startswith("/"):
            raise ConfigError(f"{told!r} must be an absolute path or a storage URL: {_known_schemes()}")
        if "?" in text:
            raise ConfigError(f"{told!r}: parameters need a URL: write file://{text}")
        return StorageUrl(text, "file", "", text, {"capacity": DEFAULT_CAPACITY})
    try:
        parts = urlsplit(text)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        why = "" if told != text else f": {error}"  # which may quote a password
        raise ConfigError(f"{told!r} cannot be read as a URL{why}") from None
    secrets, at, place = parts.netloc.rpartition("@")
    rest = text.partition("://")[2]
    if not rest.startswith("/") and "@" in rest[len(parts.netloc) :]:  # before any error that quotes a part
        raise ConfigError(f"{told!r}: a password must have / written as %2F, ? as %3F, # as %23 and @ as %40")
    backend = _backend(parts.scheme)
    if backend is None:
        raise ConfigError(f"{told!r}: unknown storage {parts.scheme!r}; {_known_schemes()}")
    if parts.fragment or text.endswith("#"):
        raise ConfigError(f"{told!r}: a # in a path or a password must be written %23")
    parameters = dict(pairs)
    for name, _ in pairs:
        if name not in (names := {*backend.parameters, "compress"}):
            known = ", ".join(sorted(names))
            raise ConfigError(f"{told!r}: unknown parameter {name!r}; {parts.scheme} knows: {known}")
    if len(parameters) < len(pairs):
        raise ConfigError(f"{told!r}: a parameter cannot be given twice")
    if at and not backend.secrets:
        raise ConfigError(f"{told!r}: a {parts.scheme} URL cannot have a user or a password")
    compress = parameters.pop("compress", COMPRESS[0])
    if compress not in COMPRESS:
        raise ConfigError(f"{told!r}: compress must be {', '.join(COMPRESS[:-1])} or {COMPRESS[-1]}, not {compress!r}")
    user, colon, password = secrets.partition(":")
    path = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and not path:
        path = str(state_folder())
    password_given = unquote(password) if colon else None
    return StorageUrl(told, parts.scheme, place, path, parameters, compress, unquote(user) or None, password_given)


def state_folder() -> Path:
    """The folder of a file URL that names none: in the user's state directory, which no other user may write."""
    place = Path(os.environ.get("XDG_STATE_HOME", ""))
    if place.is_absolute():
        return place / "kvarve"
    try:
        return Path.home() / ".local" / "state" / "kvarve"
    except RuntimeError as error:
        raise ConfigError(f"a storage of this user needs a folder ({error}): name one") from None


def parse_urls(setting: str | Sequence[str]) -> tuple[StorageUrl, ...]:
    """Parse one setting or several; ConfigError also if two of them are one place."""
    urls = tuple(map(parse_url, [setting] if isinstance(setting, str) else setting))
    if not urls:
        raise ConfigError(f"a storage must be named: {_known_schemes()}")
    places: dict[tuple[str, ...], StorageUrl] = {}
    for url in urls:
        path = str(Path(url.path).resolve()) if url.scheme == "file" and "\0" not in url.path else url.path
        other = places.setdefault((url.scheme, url.place, path), url)
        if other is not url:
            raise ConfigError(f"{url.text} is the same place as {other.text}: two tiers must be two places")
    return urls


def _plain(url: StorageUrl) -> Wrap:
    if url.compress != COMPRESS[0]:
        raise ConfigError(f"{url.text}: compress is not supported, as nothing here can be compressed: leave it out")
    return lambda storage: storage


def open_storage(
    setting: str | Sequence[str],
    *,
    label: bytes,
    description: str,
    guard: Callable[[Storage], Breaker] = lambda storage: Breaker(storage, deadline_s=30.0),
    whole: Callable[[memoryview], bool] | None = None,
    around: Callable[[StorageUrl], Wrap] = _plain,
    answers: bool = True,
) -> Storage:
    """Open the storage that a URL names, for pages of `label` (1 to 64 bytes; `description` is for people).

    Several URLs are tiers, nearest first, each behind a `guard` of its own; see `Tiers` for `whole`. `around(url)` is
    how each is wrapped inside of its guard: for a caller whose objects can be compressed. ConfigError: the setting is
    invalid. StorageError: the storage cannot be used, or (unless `answers` is false) does not answer now, as
    one on another machine may not, or is damaged. Nothing is touched in either case, unless one of several was opened
    and another, which passed its checks, then fails. A damaged one that need not answer is opened by a later call, once
    it can be.
    """
    with ExitStack() as undo:
        storages = []
        for opened in [_opening(url, label, description, around, answers=answers) for url in parse_urls(setting)]:
            storages.append(opened())
            undo.callback(storages[-1].close)
            if answers:
                storages[-1].exists([ANY_NAME])
        undo.pop_all()
    return storages[0] if len(storages) == 1 else Tiers([guard(storage) for storage in storages], whole=whole)


def check_storage(
    setting: str | Sequence[str], *, label: bytes, description: str, around: Callable[[StorageUrl], Wrap] = _plain
) -> None:
    """Raise what `open_storage` would raise for storages that need not answer, as far as can be known without touching
    or creating anything."""
    for url in parse_urls(setting):
        _opening(url, label, description, around, answers=False)


def _opening(
    url: StorageUrl, label: bytes, description: str, around: Callable[[StorageUrl], Wrap], *, answers: bool
) -> Callable[[], Storage]:
    """Check what a URL names; returns the call that opens it."""
    backend, wrap = backend_of(url), around(url)

    def anew() -> Storage:
        with _bugs_told(url):
            return backend.prepare(url, label, description)()

    try:
        with _bugs_told(url):
            opened = backend.prepare(url, label, description)
    except Damaged:
        if answers:
            raise
        opened = anew

    def tried() -> Storage:
        try:
            with _bugs_told(url):
                return opened()
        except Damaged as why:
            if answers:
                raise
            log.error("%s: served without this storage: %s", url.text, why)
            return _Unopened(anew)

    return lambda: wrap(tried())


@contextmanager
def _bugs_told(url: StorageUrl) -> Iterator[None]:
    """A KvarveError as it is; any other exception is a bug of a backend, logged and made a StorageError."""
    try:
        yield
    except KvarveError:
        raise
    except Exception as e:
        log.error("%s: it cannot be opened", url.text, exc_info=e)
        raise StorageError(f"{url.text}: it cannot be opened: {type(e).__name__}: {e}") from e


class _Unopened(Around):
    """A storage that was damaged when it was to be opened. Each call tries again, and raises what is wrong with it."""

    def __init__(self, opens: Callable[[], Storage]) -> None:
        self._opens, self._lock = opens, threading.Lock()
        self._regions: list[HostRegion] = []
        self._closed = False

    def __getattr__(self, name: str) -> Storage:
        """`inner`, while it is not there."""
        if name != "inner":
            raise AttributeError(name)
        with self._lock:
            if self._closed:
                raise StorageError("this storage is closed")
            if "inner" not in self.__dict__:
                storage = self._opens()
                for region in self._regions:
                    storage.register(region)
                self.inner = storage
            return self.inner

    def register(self, region: HostRegion) -> None:
        with self._lock:
            self._regions.append(region)
            if "inner" in self.__dict__:
                self.inner.register(region)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if "inner" in self.__dict__:
            self.inner.close()


def only_read(setting: str | Sequence[str]) -> bool:
    """Whether nothing is written to any of these storages, as their URLs ask for."""
    return bool(setting) and all(backend_of(url).only_read(url) for url in parse_urls(setting))


def allocate(setting: str | Sequence[str], size_bytes: int) -> HostRegion | None:
    """Memory for a host arena, of the nearest of these storages that makes its own; None: none does."""
    regions = (backend_of(url).allocate(url, size_bytes) for url in (parse_urls(setting) if setting else ()))
    return next((region for region in regions if region is not None), None)


def _known_schemes() -> str:
    known = ", ".join(f"{scheme}://" for scheme in sorted(_entry_points()))
    if "file" not in _entry_points():
        return "kvarve's own backends are not registered here: install kvarve anew (pip install)"
    return f"known are {known} and a plain absolute path"
