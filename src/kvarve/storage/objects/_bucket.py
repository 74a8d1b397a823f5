"""One bucket by the library: how it is set up, which key has an object, and what its errors mean in a line.

    PREFIX/kvarve-LABEL/HH/NAME     an object; HH: of the hash of its name, so that keys are spread however names begin
    PREFIX/kvarve-LABEL/about.json  the model, for people

LABEL is the whole label in hex. Whatever has another key is not ours: it is neither read nor deleted.
"""

import configparser
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import LABEL_MAX_BYTES, is_name
from kvarve.storage.objects._known import hashed

CONNECT_S, REQUEST_S = 3.0, 30.0  # one try of a request, until its last byte
RETRIES, RETRY_S = 3, 10.0  # of what may pass (5xx, throttling, lost connections); no retry begins later
PAGE = 1000  # keys of one listing's answer, and of one request that deletes
_CERTIFICATE_BYTES = 1 << 20  # read of a file of them
_ABOUT_BYTES = 4096  # read of an about.json, which anyone may have written
_MODEL = re.compile(rf"kvarve-((?:[0-9a-f]{{2}}){{1,{LABEL_MAX_BYTES}}})")
_PRINTED = re.compile(r"[^\x20-\x7e]")  # no escape of a terminal gets into what people read
_CODE = re.compile(r"<Code>\s*(\w{1,64})\s*</Code>")
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_MEANING = (  # the first of which a word occurs in the error
    (
        ("169.254.169.254", "metadata.google.internal", "Missing AccessKeyId", "Missing SecretAccessKey"),
        "there are no credentials: set the variables of the cloud (AWS_ACCESS_KEY_ID, ...), or give profile=",
    ),
    (NO_BUCKET, "there is no such bucket: make it, or name another one"),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "redirect without LOCATION"),
        "the bucket is in another region: give region=",
    ),
    (("RequestTimeTooSkewed", "RequestExpired"), "this machine's clock is wrong: set it, as by NTP"),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthenticationFailed"),
        "the credentials are wrong or have expired",
    ),
    (("SlowDown", "ServiceUnavailable", "TooManyRequests", "429 Too Many"), "it is throttled: give less threads="),
    (
        ("AccessDenied", "403 Forbidden", "401 Unauthorized"),
        "no permission: it needs s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and s3:DeleteObject on "
        "its objects",
    ),
)


@dataclass(frozen=True)
class Settings:
    """What a URL says. `config`: settings of the library by its names, without secrets."""

    scheme: str
    bucket: str
    prefix: str = ""  # without slashes at its ends
    threads: int = 16
    read_only: bool = False
    ttl_s: float | None = None
    capacity_bytes: int | None = None
    profile: str | None = None
    tls_ca: str | None = None
    config: dict[str, str | bool] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return "/".join(filter(None, (f"{self.scheme}://{self.bucket}", self.prefix)))

    @property
    def place(self) -> tuple[str, ...]:
        return (self.scheme, str(self.config.get("endpoint")), self.bucket, self.prefix)

    def lifecycle(self) -> str | None:
        """The command that lets the bucket itself remove what is older than `ttl`; None: without one, or not of S3."""
        if self.ttl_s is None or self.scheme != "s3":
            return None
        rule = {
            "ID": "kvarve",
            "Status": "Enabled",
            "Filter": {"Prefix": "/".join(filter(None, (self.prefix, "kvarve-")))},
            "Expiration": {"Days": max(1, -int(-self.ttl_s // 86400))},
        }
        words = ["aws", "s3api", "put-bucket-lifecycle-configuration", "--bucket", self.bucket]
        words += ["--endpoint-url", str(self.config["endpoint"])] if "endpoint" in self.config else []
        return shlex.join([*words, "--lifecycle-configuration", json.dumps({"Rules": [rule]})])


@dataclass(frozen=True)
class Listed:
    """An object of a listing."""

    name: str
    size_bytes: int
    stored: datetime


def library() -> Any:
    """ConfigError: it is not installed."""
    try:
        return import_module("obstore")
    except ImportError as error:
        raise ConfigError(
            f"s3://, gs:// and az:// need obstore ({error}): install kvarve with the extra 's3'"
        ) from error


def _of_profile(profile: str) -> dict[str, str]:
    """The keys of a profile in the file that AWS' own tools read."""
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    parser = configparser.RawConfigParser()
    try:
        file = file.expanduser()  # RuntimeError: there is no home
        parser.read_string(file.read_text("utf-8"))
        found = dict(parser[profile])
        keys = {name: found[f"aws_{name}"] for name in ("access_key_id", "secret_access_key")}
    except (OSError, RuntimeError, UnicodeDecodeError, configparser.Error, KeyError):  # which may quote a line
        raise StorageError(f"{file}: it has no keys of the profile {profile!r}, or cannot be read") from None
    return keys | ({"session_token": found["aws_session_token"]} if "aws_session_token" in found else {})


class Bucket:
    """The objects of all labels under a URL. Errors are the library's own; `trouble` says what they mean."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.obstore = settings, library()
        stores, exceptions = import_module("obstore.store"), import_module("obstore.exceptions")
        self.errors: tuple[type[Exception], ...] = (exceptions.BaseError, OSError, ValueError)  # of the library
        self.exists_error: type[Exception] = exceptions.AlreadyExistsError
        make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[settings.scheme]
        config: dict[str, Any] = {**settings.config}
        if settings.scheme == "s3":
            config["unsigned_payload"] = True  # a page has a checksum of its own; hashing costs as much as sending
            config |= _of_profile(settings.profile) if settings.profile is not None else {}
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "allow_http": str(config.get("endpoint", "")).startswith("http://"),
        }
        if settings.tls_ca is not None:
            client["root_certificate"] = _certificate(settings.tls_ca)
        if settings.scheme == "gs" and "endpoint" in config:  # Google's has another name for it
            config["base_url"] = config.pop("endpoint")
        retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
        with self.told():
            self.store = make(settings.bucket, config=config, client_options=client, retry_config=retry)

    def root(self, label: bytes) -> str:
        return "/".join(filter(None, (self.settings.prefix, f"kvarve-{label.hex()}")))

    def trouble(self, error: BaseException) -> StorageError:
        """One line about an error of the library, whose own words quote the server's whole answer."""
        text = str(error)
        code = code_of(error)
        meaning = next((says for words, says in _MEANING if any(word in text for word in words)), None)
        if meaning is not None:
            return StorageError(f"{self.settings.where}: {meaning}" + (f" ({code})" if code else ""))
        first = " ".join(text.partition("Debug source")[0].split())
        said = code or _PRINTED.sub("?", re.sub(r"^Generic \w+ error: |https?://\S+", "", first))[:200]
        return StorageError(f"{self.settings.where}: {said or type(error).__name__}")

    @contextmanager
    def told(self) -> Iterator[None]:
        """The library's errors are trouble."""
        try:
            yield
        except self.errors as error:
            raise self.trouble(error) from None

    def check(self, root: str) -> None:
        """One short listing, which unlike a question about an object says what is wrong with the bucket."""
        with self.told():
            next(iter(self.obstore.list(self.store, f"{root}/00", chunk_size=1)), None)

    # --- maintenance: no request of a server waits for these

    def models(self) -> dict[bytes, str]:
        """The labels that have objects here, and what is said of each."""
        with self.told():
            found = self.obstore.list_with_delimiter(self.store, self.settings.prefix or None)["common_prefixes"]
        matches = [_MODEL.fullmatch(each.rstrip("/").rpartition("/")[2]) for each in found]
        return {label: self._about(label) for label in sorted(bytes.fromhex(match[1]) for match in matches if match)}

    def _about(self, label: bytes) -> str:
        said = "a model that is not described"
        # It is for people, and may be missing, damaged or forged.
        with suppress(LookupError, TypeError, RecursionError, StorageError), self.told():
            result = self.obstore.get(self.store, f"{self.root(label)}/about.json")
            said = str(json.loads(next(iter(result.stream(_ABOUT_BYTES)), b"")[:_ABOUT_BYTES])["description"])
        return _PRINTED.sub("?", said)[:400]

    def listed(self, label: bytes) -> Iterator[list[Listed]]:
        """The objects of a label, in parts."""
        root = self.root(label)
        with self.told():
            for part in self.obstore.list(self.store, root, chunk_size=PAGE):
                found = [(name_of(each["path"], root), each) for each in part]
                yield [Listed(name, each["size"], each["last_modified"]) for name, each in found if name is not None]

    def delete(self, label: bytes, names: Sequence[str]) -> None:
        """Delete these, at most as many as a listing's part has."""
        root = self.root(label)
        with self.told():
            if names:
                self.obstore.delete(self.store, [key_of(name, root) for name in names])

    def forget(self, label: bytes) -> None:
        """Delete what is said of a model."""
        with self.told(), suppress(FileNotFoundError):
            self.obstore.delete(self.store, f"{self.root(label)}/about.json")

    def read(self, label: bytes, name: str, size_bytes: int) -> bytes | None:
        """An object as it is stored; None: it is gone, or not of this size any more."""
        with self.told(), suppress(FileNotFoundError):
            result = self.obstore.get(self.store, key_of(name, self.root(label)))
            if result.meta["size"] == size_bytes:
                return bytes(result.bytes())
        return None


def code_of(error: BaseException) -> str:
    """What a server has called an error, empty if it has not. All other words may quote a key, so any name."""
    code = _CODE.search(str(error))
    return code[1] if code else ""


def _certificate(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_CERTIFICATE_BYTES)
    except OSError as error:
        raise StorageError(f"{path}: the certificate cannot be read: {error.strerror}") from None


def key_of(name: str, root: str) -> str:
    return f"{root}/{hashed(name) & 0xFF:02x}/{name}"


def name_of(key: str, root: str) -> str | None:
    """The name of an object of this storage; None: another program has made the key."""
    name = key.rpartition("/")[2]
    return name if is_name(name) and key == key_of(name, root) else None
