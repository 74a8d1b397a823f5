"""Which storage does a setting such as `file:///var/kvarve?capacity=100GiB` mean? Several are tiers, nearest first.

`file://?capacity=100GiB`, without a path, is a folder in the user's state directory.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvarve.errors import ConfigError
from kvarve.sizes import parse_size
from kvarve.storage.base import ANY_NAME, Storage, check_settings
from kvarve.storage.breaker import Breaker
from kvarve.storage.file.call import DEFAULT_THREADS, check_limits
from kvarve.storage.file.folder import check_folder, checked_path
from kvarve.storage.file.storage import FileStorage
from kvarve.storage.memory import MemoryStorage, check_memory
from kvarve.storage.mooncake.client import load
from kvarve.storage.mooncake.settings import PARAMETERS, read_settings
from kvarve.storage.mooncake.storage import MooncakeStorage
from kvarve.storage.tiers import Tiers

DEFAULT_CAPACITY = "10GiB"  # of a plain path; a URL says its own
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", re.ASCII)


def parse_time(written: str) -> float:
    """The seconds meant by 90s, 30m, 12h, 7d or 2w; ConfigError for anything else."""
    match = _TIME.fullmatch(written)
    if match is None:
        raise ConfigError(f"{written} is not a time: write 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True)
class StorageUrl:
    """A parsed setting. `text` is how it was written, for messages."""

    text: str
    scheme: str
    place: str  # between "//" and the path
    path: str
    parameters: dict[str, str]

    def size_bytes(self, parameter: str) -> int:
        """The size that `parameter` gives; ConfigError when it is missing or not one above zero."""
        if parameter not in self.parameters:
            raise ConfigError(f"{self.text}: say how much it may hold, as in ?{parameter}={DEFAULT_CAPACITY}")
        size_bytes = parse_size(self.parameters[parameter])
        if size_bytes <= 0:
            raise ConfigError(f"{self.text}: {parameter} must be above zero, such as {DEFAULT_CAPACITY}")
        return size_bytes

    def seconds(self, parameter: str) -> float:
        """The time that `parameter` gives, such as 90s, 30m, 12h, 7d or 2w."""
        try:
            return parse_time(self.parameters[parameter])
        except ConfigError as error:
            raise ConfigError(f"{self.text}: {parameter}={error}") from None

    def yes(self, parameter: str, *, default: bool) -> bool:
        written = self.parameters.get(parameter, "yes" if default else "no")
        if written not in ("yes", "no"):
            raise ConfigError(f"{self.text}: {parameter}={written} is neither yes nor no")
        return written == "yes"

    def whole_number(self, parameter: str) -> int:
        written = self.parameters[parameter]
        if not written.isascii() or not written.isdigit() or len(written) > 4:
            raise ConfigError(f"{self.text}: {parameter}={written} is not a number from 1 to 9999")
        return int(written)


@dataclass(frozen=True)
class Scheme:
    """One kind of storage URL. To add a backend, put one of these into `SCHEMES`.

    `prepare(url, label, description)` checks them without touching anything (ConfigError, StorageError) and returns a
    call that opens the storage, so that none is opened unchecked.
    """

    example: str
    parameters: frozenset[str]
    prepare: Callable[[StorageUrl, bytes, str], Callable[[], Storage]]


@dataclass(frozen=True)
class FileSettings:
    """The settings of a file URL. `capacity_bytes`: None if it has none."""

    folder: Path
    capacity_bytes: int | None
    ttl_s: float | None
    quota_bytes: int | None
    eviction: str
    threads: int
    durable: bool
    shared: bool


def file_settings(url: StorageUrl) -> FileSettings:
    """Raise ConfigError for invalid settings; the disk is not accessed."""
    if url.place or not url.path.startswith("/"):
        raise ConfigError(
            f"{url.text}: a file URL has three slashes and an absolute path, as in {SCHEMES['file'].example}"
        )
    given = url.parameters
    settings = FileSettings(
        checked_path(url.path),
        url.size_bytes("capacity") if "capacity" in given else None,
        url.seconds("ttl") if "ttl" in given else None,
        url.size_bytes("quota") if "quota" in given else None,
        given.get("eviction", "lru"),
        url.whole_number("threads") if "threads" in given else DEFAULT_THREADS,
        url.yes("durable", default=True),
        url.yes("shared", default=False),
    )
    check_limits(settings.ttl_s, settings.quota_bytes, settings.eviction, settings.threads)
    return settings


def _file(url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
    settings, capacity_bytes = file_settings(url), url.size_bytes("capacity")
    check_folder(settings.folder, capacity_bytes, label, description, shared=settings.shared)
    return lambda: FileStorage(
        settings.folder,
        capacity_bytes,
        label,
        description,
        ttl_s=settings.ttl_s,
        quota_bytes=settings.quota_bytes,
        eviction=settings.eviction,
        threads=settings.threads,
        durable=settings.durable,
        shared=settings.shared,
    )


def _memory(url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
    if not url.place or url.path not in ("", "/"):
        raise ConfigError(f"{url.text}: a memory URL has one name and no path, as in {SCHEMES['memory'].example}")
    capacity_bytes = url.size_bytes("capacity")
    check_memory(capacity_bytes, label, description, url.place)
    return lambda: MemoryStorage(capacity_bytes, label, description, url.place)


def _mooncake(url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
    check_settings(1, label)
    settings = read_settings(url.text, url.place, url.path, url.parameters)
    load()  # else a missing library would be noticed late if the master is not up yet
    return lambda: MooncakeStorage(settings, label, description)


SCHEMES: dict[str, Scheme] = {
    "file": Scheme(
        "file:///var/kvarve?capacity=100GiB",
        frozenset({"capacity", "ttl", "quota", "eviction", "threads", "durable", "shared"}),
        _file,
    ),
    "memory": Scheme("memory://name?capacity=1GiB", frozenset({"capacity"}), _memory),
    "mooncake": Scheme("mooncake://10.0.0.1:50051?protocol=tcp&segment=4GiB", PARAMETERS, _mooncake),
}


def parse_url(text: str) -> StorageUrl:
    """Parse a setting; the disk is not accessed. ConfigError if it names no storage."""
    if not text.isprintable() or not text:
        raise ConfigError(f"{text!r} is not a storage: {_known_schemes()}")
    if "://" not in text:
        if not text.startswith("/"):
            raise ConfigError(f"{text!r} is neither an absolute path nor a storage URL: {_known_schemes()}")
        if "?" in text:
            raise ConfigError(f"{text!r}: parameters need a URL: write file://{text}")
        return StorageUrl(text, "file", "", text, {"capacity": DEFAULT_CAPACITY})
    try:
        parts = urlsplit(text)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a URL: {error}") from error
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None:
        raise ConfigError(f"{text!r}: there is no storage of the kind {parts.scheme!r}; {_known_schemes()}")
    if parts.fragment or text.endswith("#"):
        raise ConfigError(f"{text!r}: a # in a path is written %23")
    parameters = dict(pairs)
    for name, _ in pairs:
        if name not in scheme.parameters:
            known = ", ".join(sorted(scheme.parameters))
            raise ConfigError(f"{text!r}: unknown parameter {name!r}; {parts.scheme} knows: {known}")
    if len(parameters) < len(pairs):
        raise ConfigError(f"{text!r}: a parameter is given twice")
    path = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and not path:
        path = str(state_folder())
    return StorageUrl(text, parts.scheme, parts.netloc, path, parameters)


def state_folder() -> Path:
    """The folder of a file URL that names none: in the user's state directory, which no other user may write."""
    place = Path(os.environ.get("XDG_STATE_HOME", ""))
    if place.is_absolute():
        return place / "kvarve"
    try:
        return Path.home() / ".local" / "state" / "kvarve"
    except RuntimeError as error:
        raise ConfigError(f"a storage of this user has no place ({error}): name a folder") from None


def parse_urls(setting: str | Sequence[str]) -> tuple[StorageUrl, ...]:
    """Parse one setting or several; ConfigError also if two of them are one place."""
    urls = tuple(map(parse_url, [setting] if isinstance(setting, str) else setting))
    if not urls:
        raise ConfigError(f"no storage is named: {_known_schemes()}")
    places: dict[tuple[str, ...], StorageUrl] = {}
    for url in urls:
        path = str(Path(url.path).resolve()) if url.scheme == "file" and "\0" not in url.path else url.path
        other = places.setdefault((url.scheme, url.place, path), url)
        if other is not url:
            raise ConfigError(f"{url.text} is the same place as {other.text}: two tiers are two places")
    return urls


def open_storage(
    setting: str | Sequence[str],
    *,
    label: bytes,
    description: str,
    guard: Callable[[Storage], Breaker] = lambda storage: Breaker(storage, deadline_s=30.0),
    whole: Callable[[memoryview], bool] | None = None,
    answers: bool = True,
) -> Storage:
    """Open the storage that a URL names, for pages of `label` (1 to 64 bytes; `description` is for people).

    Several URLs are tiers, nearest first, each behind a `guard` of its own; see `Tiers` for `whole`. ConfigError: the
    setting is invalid. StorageError: the storage cannot be used, or (unless `answers` is false) does not answer now, as
    one on another machine may not. Nothing is touched in either case, unless one of several was opened and another,
    which passed its checks, then fails.
    """
    with ExitStack() as undo:
        storages = []
        for opened in _prepare(setting, label, description):
            storages.append(opened())
            undo.callback(storages[-1].close)
            if answers:
                storages[-1].exists([ANY_NAME])
        undo.pop_all()
    return storages[0] if len(storages) == 1 else Tiers([guard(storage) for storage in storages], whole=whole)


def check_storage(setting: str | Sequence[str], *, label: bytes, description: str) -> None:
    """Raise what `open_storage` would raise, as far as can be known without touching or creating anything."""
    _prepare(setting, label, description)


def _prepare(setting: str | Sequence[str], label: bytes, description: str) -> list[Callable[[], Storage]]:
    return [SCHEMES[url.scheme].prepare(url, label, description) for url in parse_urls(setting)]


def _known_schemes() -> str:
    return "known are " + ", ".join(scheme.example for scheme in SCHEMES.values()) + " and a plain absolute path"
