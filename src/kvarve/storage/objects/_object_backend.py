"""What an s3, gs or az URL may say: s3://BUCKET/PREFIX?region=eu-central-1&ttl=7d; docs/objects.md."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvarve.errors import ConfigError
from kvarve.storage.base import Storage, check_settings
from kvarve.storage.objects._bucket import Settings, library
from kvarve.storage.objects._bucket_upkeep import BucketUpkeep
from kvarve.storage.objects._object_storage import ObjectStorage
from kvarve.storage.upkeep import Upkeep
from kvarve.storage.urls import Backend, StorageUrl

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}")
_PART = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._=-]+")
_PREFIX_MOST = 400  # characters: a key has at most 1,024, and a name and a label take 340
_OURS = frozenset({"endpoint", "threads", "ttl", "capacity", "read_only", "tls_ca"})
# By scheme and parameter: the library's setting.
_THEIRS: dict[str, dict[str, str]] = {
    "s3": {
        "region": "region",
        "virtual_host": "virtual_hosted_style_request",
        "sse": "server_side_encryption",
        "kms_key": "sse_kms_key_id",
        "bucket_key": "sse_bucket_key_enabled",
        "anonymous": "skip_signature",
    },
    "gs": {"anonymous": "skip_signature"},
    "az": {"account": "account_name", "anonymous": "skip_signature"},
}
_FORMS = {name: re.compile(r"[a-z0-9-]{1,60}") for name in ("region", "account")}  # they become parts of a host's name
_FORMS["kms_key"] = re.compile(r"[A-Za-z0-9:/._-]{1,300}")
_FLAGS = ("virtual_host", "bucket_key", "anonymous")
_SSE = ("AES256", "aws:kms", "aws:kms:dsse")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # as the library reads them


class S3Backend(Backend):
    example = "s3://BUCKET/kvarve?region=eu-central-1&ttl=7d"
    parameters = _OURS | {*_THEIRS["s3"], "profile"}
    shared = by_gc = can_list = can_verify = True

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        check_settings(1, label)
        settings = read_settings(url)
        library()
        return lambda: ObjectStorage(settings, label, description)

    @classmethod
    def only_read(cls, url: StorageUrl) -> bool:
        return read_settings(url).read_only

    @classmethod
    def upkeep(cls, url: StorageUrl) -> Upkeep:
        return BucketUpkeep(read_settings(url))


class GoogleBackend(S3Backend):
    example = "gs://BUCKET/kvarve"
    parameters = _OURS | {*_THEIRS["gs"]}


class AzureBackend(S3Backend):
    example = "az://CONTAINER/kvarve?account=ACCOUNT"
    parameters = _OURS | {*_THEIRS["az"]}


def read_settings(url: StorageUrl, environ: Mapping[str, str] = os.environ) -> Settings:
    """ConfigError: what is wrong with the URL."""
    given, text = url.parameters, url.text
    if not _BUCKET.fullmatch(url.place):
        raise ConfigError(f"{text}: it must name a bucket, as in {S3Backend.example}, got {url.place!r}")
    prefix = url.path.strip("/")
    if len(prefix) > _PREFIX_MOST or not all(map(_PART.fullmatch, prefix.split("/") if prefix else ())):
        raise ConfigError(
            f"{text}: its path must be at most {_PREFIX_MOST} of A-Z a-z 0-9 . _ = - between single slashes"
        )
    config: dict[str, str | bool] = {}
    for name, theirs in _THEIRS[url.scheme].items():
        if name in given:
            config[theirs] = url.yes(name, default=False) if name in _FLAGS else given[name]
    for name, form in _FORMS.items():
        if name in given and not form.fullmatch(given[name]):
            raise ConfigError(f"{text}: {name} must be as the cloud names it, got {given[name]!r}")
    if given.get("sse", _SSE[0]) not in _SSE:
        raise ConfigError(f"{text}: sse must be {', '.join(_SSE[:-1])} or {_SSE[-1]}, got {given['sse']!r}")
    endpoint = given.get("endpoint") or next((environ[name] for name in _ENDPOINTS if environ.get(name)), None)
    if endpoint is not None and (url.scheme == "s3" or "endpoint" in given):
        config["endpoint"] = _endpoint(endpoint, text)
    tls_ca = given.get("tls_ca")
    if tls_ca is not None and not Path(tls_ca).is_absolute():
        raise ConfigError(f"{text}: tls_ca must be the absolute path of a file, got {tls_ca!r}")
    return Settings(
        url.scheme,
        url.place,
        prefix,
        url.whole_number("threads", Settings.threads, most=256),
        url.yes("read_only", default=False),
        url.seconds("ttl"),
        url.size_bytes("capacity") if "capacity" in given else None,
        given.get("profile"),
        tls_ca,
        config,
    )


def _endpoint(written: str, text: str) -> str:
    """ConfigError: it is no server's address. What an environment says is not quoted, as it may have a password."""
    try:
        parts = urlsplit(written)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username and parts.port != 0
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment or not written.isascii() or not written.isprintable():
        raise ConfigError(f"{text}: endpoint (or AWS_ENDPOINT_URL) must be http:// or https:// and a host")
    return written.rstrip("/")
