"""What people of SGLang and vLLM call things: their storage backends, as URLs of ours. Plain data."""

import json
from typing import Any
from urllib.parse import quote, urlencode

from kvarve.errors import ConfigError

# By SGLang's name of a backend: the parameter of its URL for each key of the extra config.
_MOONCAKE = {
    "protocol": "protocol",
    "device_name": "device",
    "global_segment_size": "segment",
    "metadata_server": "metadata",
    "local_hostname": "hostname",
}
_FOLDER = {"path": "", "file_path_prefix": "", "capacity": "capacity"}
# Keys of the extra config that concern SGLang's own prefetching: flags of ours say it.
_PREFETCH = {
    "prefetch_threshold": "--fetch-at-least",
    "prefetch_timeout_base": "--prefetch-base-s",
    "prefetch_timeout_per_ki_token": "--prefetch-per-ki-token-s",
}
_EXAMPLE = """'{"path": "/var/kvarve", "capacity": "100GiB"}'"""


def storage_url(backend: str, extra: str | None) -> str:
    """The storage that SGLang's `hicache_storage_backend` and its extra config (JSON) name; a URL of ours is itself.

    ConfigError for a backend that there is none of, and for a key of the config that says nothing here.
    """
    given = _config(extra)
    if "://" in backend:
        if given:
            raise ConfigError("a storage that is given as a URL says everything in it: leave out the extra config")
        return backend
    if backend == "file":
        path = _taken(given, "path", "")
        return _url("file://" + _path(path), {"capacity": _taken(given, "capacity", "10GiB")}, given)
    if backend == "hf3fs":
        path = _taken(given, "path", "") or _taken(given, "file_path_prefix", "")
        if not path or "capacity" not in given:
            raise ConfigError(f"hf3fs: the extra config says a folder and how much it may hold, such as {_EXAMPLE}")
        return _url("hf3fs://" + _path(path), {"capacity": _taken(given, "capacity", "")}, given)
    if backend == "mooncake":
        master = _taken(given, "master_server_address", "")
        found = {ours: _taken(given, theirs, "") for theirs, ours in _MOONCAKE.items() if theirs in given}
        if str(found.get("segment", "")).isdigit():
            found["segment"] = f"{found['segment']}B"
        return _url(f"mooncake://{quote(master, safe=':[]')}", found, given)
    raise ConfigError(
        f"there is no storage {backend!r}: file, mooncake and hf3fs have these names, others are URLs, "
        "such as redis://HOST:6379"
    )


def _config(extra: str | None) -> dict[str, Any]:
    if not extra or not extra.strip():
        return {}
    try:
        given = json.loads(extra)
    except (ValueError, RecursionError):
        raise ConfigError(f"the extra config is not JSON: write it as in {_EXAMPLE}") from None
    if not isinstance(given, dict) or not all(isinstance(value, str | int | float) for value in given.values()):
        raise ConfigError(f"the extra config is an object of texts and numbers, as in {_EXAMPLE}")
    for name, flag in _PREFETCH.items():
        if name in given:
            raise ConfigError(f"the extra config's {name} is the flag {flag} of kvarve serve")
    return given


def _taken(given: dict[str, Any], name: str, default: str) -> str:
    return str(given.pop(name, default))


def _path(path: str) -> str:
    if path and not path.startswith("/"):
        raise ConfigError(f"the extra config's path {path!r} does not begin with a slash")
    return quote(path)


def _url(place: str, parameters: dict[str, str], left: dict[str, Any]) -> str:
    if left:
        known = ", ".join([*_FOLDER, "master_server_address", *_MOONCAKE])
        raise ConfigError(f"the extra config's {min(left)[:40]!r} says nothing here; known: {known}")
    return place + ("?" + urlencode(parameters, safe=":/,") if parameters else "")
