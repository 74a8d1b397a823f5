"""The settings of a tier below an engine's host memory, as its operator writes them. Knows no engine."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from kvarve.errors import ConfigError
from kvarve.storage.urls import parse_urls

READ_ALL = "read"  # as the value of `weights`


@dataclass(frozen=True)
class TierSettings:
    """One tier. Each field is a key of its configuration; `read_settings` has the checks."""

    storage: tuple[str, ...]
    """URLs of storages, nearest first, such as file:///var/kvarve?capacity=100GiB"""
    deadline_s: float = 5.0
    """seconds after which a call to the storage counts as hanging and its chunks as misses"""
    weights: str = ""
    """what tells these weights apart, instead of a sample of their files; "read": all bytes of the files"""
    identity: str = ""
    """anything else that tells apart what must not be shared, such as the version of an adapter"""
    enable_kv_events: bool = False
    """tell vLLM's KV event stream what is stored here, and what turned out to be gone"""
    locality: str | None = None
    """LOCAL or REMOTE: where the storage lies, for KV events and requests that choose tiers by it"""


_KNOWN = tuple(field.name for field in fields(TierSettings))


def read_settings(given: Mapping[str, Any], written: Collection[str] | None = None) -> TierSettings:
    """The settings in `given`. ConfigError: what is wrong, and what to do.

    `written`: the keys that the operator has written, if they are known; an engine may add arguments of its own, which
    are ignored. Without it every key counts as the operator's.
    """
    unknown = [name for name in given if name not in _KNOWN and (written is None or name in written)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _KNOWN, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"a kvarve tier has no setting {unknown[0]!r}: {hint}It knows {', '.join(_KNOWN)}")
    settings = {name: given[name] for name in _KNOWN if name in given}
    if "storage" not in settings:
        raise ConfigError('a kvarve tier needs a storage: {"storage": "file:///var/kvarve?capacity=100GiB"}')
    urls = settings["storage"]
    urls = [urls] if isinstance(urls, str) else urls
    if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"storage is a URL or a list of URLs, not {urls!r}")
    parse_urls(urls)
    settings["storage"] = tuple(urls)
    deadline_s = settings.get("deadline_s", TierSettings.deadline_s)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < inf:
        raise ConfigError(f"deadline_s is a number of seconds above zero, such as 5, not {deadline_s!r}")
    for name in ("weights", "identity"):
        if not isinstance(settings.get(name, ""), str):
            raise ConfigError(f"{name} is a text, not {settings[name]!r}")
    if not isinstance(settings.get("enable_kv_events", False), bool):
        raise ConfigError(f"enable_kv_events is true or false, not {settings['enable_kv_events']!r}")
    if settings.get("locality") not in (None, "LOCAL", "REMOTE"):
        raise ConfigError(f"locality is LOCAL or REMOTE, not {settings['locality']!r}")
    return TierSettings(**settings)
